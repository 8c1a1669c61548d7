//! The same with Docker's own program, where its engine answers.

use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

use super::stopwatch::Times;
use super::{Options, Report, Result, Single, at_least, failed, whole};

const IMAGE: &str = "forkyard-bench";
const BUSYBOX: [&str; 2] = ["/bin/busybox", "/usr/bin/busybox"];

fn docker(args: &[&str], stdin: Option<&[u8]>) -> Result<String> {
    let mut child = Command::new("docker")
        .args(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(failed)?;
    let written = child.stdin.take().map(|mut to| to.write_all(stdin.unwrap_or_default()));
    let output = child.wait_with_output().map_err(failed)?;
    if !output.status.success() || !matches!(written, Some(Ok(()))) {
        return Err(failed(String::from_utf8_lossy(&output.stderr).trim()));
    }
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_string())
}

/// An image of one static program, since none may be there and none is fetched.
fn make_image() -> Result<()> {
    let program = BUSYBOX.iter().find(|path| Path::new(path).exists());
    let program = program.ok_or_else(|| failed("no image: install busybox-static, or name one"))?;
    let mut tar = tar::Builder::new(Vec::new());
    let add = |tar: &mut tar::Builder<Vec<u8>>, name: &str| tar.append_path_with_name(program, name);
    add(&mut tar, "bin/busybox").and_then(|()| add(&mut tar, "bin/true")).map_err(failed)?;
    docker(&["import", "-", IMAGE], Some(&tar.into_inner().map_err(failed)?)).map(drop)
}

pub(super) async fn measure(
    options: &Options,
    rounds: usize,
    ours: &Single,
    report: &mut Report,
) -> Result<()> {
    if let Err(e) = docker(&["version", "--format", "{{.Server.Version}}"], None) {
        report.missing.push(format!("docker: {}", e.message));
        return Ok(());
    }
    let own = options.docker_image.is_none();
    if own && let Err(e) = make_image() {
        report.missing.push(format!("docker: {}", e.message));
        return Ok(());
    }
    let image = options.docker_image.as_deref().unwrap_or(IMAGE);
    let mut times = Times::default();
    let container = docker(&["run", "-d", image, "/bin/busybox", "sleep", "3600"], None)?;
    let measured = async {
        let program = Path::new("docker");
        for _ in 0..rounds.min(options.rounds) {
            times.add("docker run true", whole(program, &["run", "--rm", image, "/bin/true"], &[]).await?);
            times.add("docker exec true", whole(program, &["exec", &container, "/bin/true"], &[]).await?);
        }
        Ok(())
    };
    let measured = measured.await;
    docker(&["rm", "-f", &container], None)?;
    if own {
        docker(&["rmi", image], None)?;
    }
    measured?;
    let (run, exec) = (times.p50("docker run true"), times.p50("docker exec true"));
    report.ratio("docker run / create + true + destroy", run, ours.whole, at_least(50.0));
    report.ratio("docker exec / exec of true", exec, ours.exec, at_least(80.0));
    report.times(times);
    Ok(())
}
