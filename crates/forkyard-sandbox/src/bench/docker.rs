//! The same with Docker's own program, where its engine answers: the same static program in both, and Docker's network on as
//! a sandbox's own is.

use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

use super::stopwatch::Times;
use super::{BUSYBOX, Docker, Options, Report, Result, Single, at_least, failed, whole_after};

const IMAGE: &str = "forkyard-bench";
const RUN: &str = "docker run busybox true";
const RUN_WITHOUT_NETWORK: &str = "docker run --network none busybox true";
const EXEC: &str = "docker exec busybox true";

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
    let mut tar = tar::Builder::new(Vec::new());
    tar.append_path_with_name(BUSYBOX, BUSYBOX.trim_start_matches('/')).map_err(failed)?;
    docker(&["import", "-", IMAGE], Some(&tar.into_inner().map_err(failed)?)).map(drop)
}

pub(super) async fn measure(options: &Options, ours: Option<&Single>, report: &mut Report) -> Result<()> {
    let (image, own) = match &options.docker {
        Docker::LeftOut => return Ok(()),
        Docker::OwnImage => (IMAGE, true),
        Docker::Image(image) => (image.as_str(), false),
    };
    let Some(ours) = ours else {
        report.missing.push(format!("docker: there is no {BUSYBOX} to run in both: install busybox-static"));
        return Ok(());
    };
    if let Err(e) = docker(&["version", "--format", "{{.Server.Version}}"], None) {
        report.missing.push(format!("docker: {}", e.message));
        return Ok(());
    }
    if own && let Err(e) = make_image() {
        report.missing.push(format!("docker: {}", e.message));
        return Ok(());
    }
    let mut times = Times::default();
    let container = docker(&["run", "-d", image, BUSYBOX, "sleep", "3600"], None)?;
    let measured = async {
        // Not done before: next to a container's time, what a cold cache costs is nothing.
        let once = async |args: &[&str]| {
            let all = [args, &[BUSYBOX, "true"]].concat();
            whole_after(0, Path::new("docker"), &all, &[]).await
        };
        for _ in 0..options.rounds {
            times.add(RUN, once(&["run", "--rm", image]).await?);
            times.add(RUN_WITHOUT_NETWORK, once(&["run", "--rm", "--network", "none", image]).await?);
            times.add(EXEC, once(&["exec", &container]).await?);
        }
        Ok(())
    };
    let measured = measured.await;
    docker(&["rm", "-f", &container], None)?;
    if own {
        docker(&["rmi", image], None)?;
    }
    measured?;
    report.ratio("docker run / create + true + destroy", times.p50(RUN), ours.whole, at_least(50.0));
    report.ratio("docker exec / exec of true", times.p50(EXEC), ours.exec, at_least(80.0));
    report.times(times);
    Ok(())
}
