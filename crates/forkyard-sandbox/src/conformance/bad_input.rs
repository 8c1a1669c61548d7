//! What can't be: each a typed error with a fix in it, and the list stays true.

use forkyard_core::{Attempt, Millis};

use super::{Case, CaseResult, Ctx, Failed, case, ensure, ensure_eq, sh};
use crate::{ErrorKind, ExecRequest, Labels, Lifetime, Root, SandboxError, SandboxSpec, Volume};

pub fn cases() -> Vec<Case> {
    vec![
        case!(images_that_are_not),
        case!(impossible_specifications),
        case!(commands_that_are_not),
        case!(paths_that_lead_nowhere),
        case!(a_full_disk),
        case!(what_is_written_from_outside_fits_the_disk_limit),
        case!(use_after_the_end),
        case!(archives_that_are_not, |c| c.snapshot),
    ]
}

/// One of these kinds, with a fix.
fn typed<T>(what: &str, result: Result<T, SandboxError>, kinds: &[ErrorKind]) -> CaseResult {
    let Some(error) = result.err() else { return Err(Failed::new(format!("{what} was taken"))) };
    ensure!(kinds.contains(&error.kind), "{what}: {:?}: {error}", error.kind);
    ensure!(error.hint.is_some(), "{what}: no fix in {error}");
    Ok(())
}

async fn listed(ctx: &Ctx) -> Result<Vec<String>, Failed> {
    Ok(ctx.other.list(&Labels::new()).await?.into_iter().map(|info| info.id.to_string()).collect())
}

/// Creation is refused, and nothing new is there.
async fn refused(ctx: &Ctx, what: &str, spec: &SandboxSpec, kinds: &[ErrorKind]) -> CaseResult {
    let before = listed(ctx).await?;
    let id = ctx.id();
    typed(what, ctx.provider.create(&id, Attempt(1), spec).await.map(drop), kinds)?;
    ensure_eq!(listed(ctx).await?, before);
    let gone = ctx.provider.attach(&id, Attempt(1)).await.map(drop);
    typed(what, gone, &[ErrorKind::NotFound])
}

async fn images_that_are_not(ctx: &Ctx) -> CaseResult {
    let dir = tempfile::tempdir()?;
    let rubbish = dir.path().join("rubbish.tar");
    std::fs::write(&rubbish, "neither an archive nor an image ".repeat(1000))?;
    let empty = dir.path().join("empty.tar");
    std::fs::write(&empty, "")?;
    let layout = dir.path().join("layout");
    std::fs::create_dir(&layout)?;
    std::fs::write(layout.join("index.json"), "{}")?;
    use ErrorKind::{Invalid, NotFound, Timeout, Unavailable, Unsupported};
    let table: Vec<(String, &[ErrorKind])> = vec![
        ("Not An Image!".into(), &[Invalid]),
        // Nobody listens there.
        ("127.0.0.1:1/forkyard/none:1".into(), &[Invalid, NotFound, Unavailable, Timeout]),
        ("archive:/no/such/file".into(), &[NotFound]),
        (format!("archive:{}", rubbish.display()), &[Invalid]),
        (format!("archive:{}", empty.display()), &[Invalid]),
        ("oci:/no/such/folder".into(), &[NotFound, Unsupported]),
        (format!("oci:{}", layout.display()), &[Invalid, Unsupported]),
    ];
    for (image, kinds) in table {
        let spec = SandboxSpec { root: Root::Image(image.clone()), ..ctx.spec.clone() };
        refused(ctx, &image, &spec, kinds).await?;
    }
    let spec = SandboxSpec { root: Root::Directory("/no/such/root".into()), ..ctx.spec.clone() };
    refused(ctx, "a missing directory", &spec, &[NotFound, Invalid, Unsupported]).await
}

async fn impossible_specifications(ctx: &Ctx) -> CaseResult {
    type Change = fn(&mut SandboxSpec);
    fn volume(host: &str, path: &str) -> Volume {
        Volume { host_path: host.into(), path: path.into(), writable: false }
    }
    let wrong: &[(&str, Change)] = &[
        ("a byte of memory", |s| s.limits.memory_bytes = 1),
        ("no CPU", |s| s.limits.cpus = 0.0),
        ("CPUs that are no number", |s| s.limits.cpus = f64::NAN),
        ("no process", |s| s.limits.processes = 0),
        ("more memory than can be counted", |s| s.limits.memory_bytes = u64::MAX),
        ("no disk", |s| s.limits.disk_bytes = 0),
        ("more disk than can be counted", |s| s.limits.disk_bytes = u64::MAX),
        ("more processes than there can be", |s| s.limits.processes = u32::MAX),
        ("a rate of nothing", |s| s.limits.network_bytes_per_s = Some(0)),
        ("no lifetime", |s| s.lifetime = Lifetime(Millis(0))),
        ("a lifetime without end", |s| s.lifetime = Lifetime(Millis(u64::MAX))),
        ("too many labels", |s| s.labels.extend((0..65).map(|n| (format!("l{n}"), String::new())))),
        ("too long a label", |s| drop(s.labels.insert("l".into(), "x".repeat(2000)))),
        ("a variable without a name", |s| drop(s.env.insert(String::new(), "x".into()))),
        ("a variable's name with =", |s| drop(s.env.insert("A=B".into(), "x".into()))),
        ("a variable with a zero byte", |s| drop(s.env.insert("A".into(), "\0".into()))),
        ("too long a variable", |s| drop(s.env.insert("A".into(), "x".repeat(65 << 10)))),
        ("a volume outside", |s| s.volumes.push(volume("/usr", "/mnt/../../v"))),
        ("a relative volume", |s| s.volumes.push(volume("usr", "/mnt/v"))),
        ("a volume over the root", |s| s.volumes.push(volume("/usr", "/"))),
        ("a volume over the kernel's files", |s| s.volumes.push(volume("/usr", "/proc/v"))),
        ("a volume over devices", |s| s.volumes.push(volume("/usr", "/dev"))),
        ("a volume over Forkyard's own", |s| s.volumes.push(volume("/usr", "/.forkyard/run"))),
        ("a volume in another", |s| s.volumes.extend(["/mnt", "/mnt/v"].map(|path| volume("/usr", path)))),
        ("a volume of everything", |s| s.volumes.push(volume("/", "/mnt/v"))),
        ("a volume of processes", |s| s.volumes.push(volume("/proc", "/mnt/v"))),
        ("a volume of the kernel", |s| s.volumes.push(volume("/sys/kernel", "/mnt/v"))),
        ("a volume of devices", |s| s.volumes.push(volume("/dev", "/mnt/v"))),
        ("a volume of services", |s| s.volumes.push(volume("/run", "/mnt/v"))),
        ("a file for a volume", |s| s.volumes.push(volume("/etc/passwd", "/mnt/v"))),
        ("a missing volume", |s| s.volumes.push(volume("/no/such/place", "/mnt/v"))),
    ];
    for (what, change) in wrong {
        let mut spec = ctx.spec.clone();
        change(&mut spec);
        let kind = if *what == "a missing volume" { ErrorKind::NotFound } else { ErrorKind::Invalid };
        refused(ctx, what, &spec, &[kind]).await?;
    }
    Ok(())
}

async fn commands_that_are_not(ctx: &Ctx) -> CaseResult {
    let sandbox = ctx.sandbox().await?;
    sandbox.write_file("plain", "not a program".into(), Some(0o644)).await?;
    let exec = async |request: ExecRequest| sandbox.exec(request).await.map(drop);
    typed("a missing command", exec(ExecRequest::new(["no-such-command"])).await, &[ErrorKind::NotFound])?;
    typed("a missing program", exec(ExecRequest::new(["/no/such/program"])).await, &[ErrorKind::NotFound])?;
    typed("a file without leave", exec(ExecRequest::new(["/workspace/plain"])).await, &[ErrorKind::Denied])?;
    let nowhere = exec(ExecRequest::new(["true"]).cwd("/no/such")).await;
    typed("a missing folder", nowhere, &[ErrorKind::NotFound, ErrorKind::Invalid])?;
    ensure_eq!(sh(&sandbox, "echo alive").await?.out, "alive\n");
    Ok(())
}

async fn paths_that_lead_nowhere(ctx: &Ctx) -> CaseResult {
    let sandbox = ctx.sandbox().await?;
    sh(&sandbox, "ln -s /etc/../../outside out; ln -s loop loop").await?;
    typed("a missing file", sandbox.read_file("missing", 0, 1).await, &[ErrorKind::NotFound])?;
    typed("a way out", sandbox.read_file("../../../outside", 0, 1).await, &[ErrorKind::NotFound])?;
    typed("a link out", sandbox.read_file("out", 0, 1).await, &[ErrorKind::NotFound])?;
    typed("a loop", sandbox.read_file("loop", 0, 1).await, &[ErrorKind::Invalid])?;
    typed(
        "another's root",
        sandbox.read_file("/proc/1/root/x", 0, 1).await,
        &[ErrorKind::Denied, ErrorKind::Invalid, ErrorKind::NotFound],
    )?;
    typed(
        "a system file",
        sandbox.write_file("/proc/version", "x".into(), None).await,
        &[ErrorKind::Denied, ErrorKind::Invalid, ErrorKind::NotFound],
    )?;
    typed("a missing folder", sandbox.list_files("missing").await, &[ErrorKind::NotFound])?;
    typed("no removal", sandbox.remove("missing", true).await, &[ErrorKind::NotFound])
}

async fn a_full_disk(ctx: &Ctx) -> CaseResult {
    let mut spec = ctx.spec.clone();
    spec.limits.memory_bytes = 96 << 20;
    let sandbox = ctx.sandbox_with(&spec).await?;
    // A file system whose end the kernel knows, filled to it.
    sh(&sandbox, "dd if=/dev/zero of=/dev/shm/fill bs=1M 2>/dev/null; dd if=/dev/zero of=/dev/shm/rest bs=4k 2>/dev/null; :").await?;
    let full = sandbox.write_file("/dev/shm/more", vec![7; 64 << 10].into(), None).await;
    typed("a full file system", full, &[ErrorKind::TooLarge])?;
    ensure!(sandbox.stat("/dev/shm/more").await.is_err(), "half a file is left");
    sh(&sandbox, "rm -f /dev/shm/fill /dev/shm/rest").await?;
    sandbox.write_file("/dev/shm/more", "fits".into(), None).await?;
    ensure!(listed(ctx).await?.contains(&sandbox.id().to_string()), "it is not listed");
    Ok(())
}

async fn what_is_written_from_outside_fits_the_disk_limit(ctx: &Ctx) -> CaseResult {
    const PART: usize = 6 << 20;
    let mut spec = ctx.spec.clone();
    spec.limits.disk_bytes = 16 << 20;
    let sandbox = ctx.sandbox_with(&spec).await?;
    // By the agent's tools, in parts as `cp` does it, and as an archive.
    let too_large = &[ErrorKind::TooLarge];
    sandbox.write_file("one", vec![1; PART].into(), None).await?;
    for _ in 0..20 {
        sandbox.write_file("small", vec![1; PART / 10].into(), None).await?;
    }
    sandbox.write_file_from("two", &mut &vec![2; PART][..], None).await?;
    typed("a whole file", sandbox.write_file("three", vec![3; PART].into(), None).await, too_large)?;
    typed(
        "a file in parts",
        sandbox.write_file_from("three", &mut &vec![3; PART][..], None).await,
        too_large,
    )?;
    let mut archive = tar::Builder::new(Vec::new());
    let mut header = tar::Header::new_ustar();
    header.set_size(PART as u64);
    header.set_mode(0o644);
    archive.append_data(&mut header, "three", &vec![3; PART][..])?;
    let archive = archive.into_inner()?;
    typed("an archive", sandbox.unpack("three", &mut &archive[..]).await.map(drop), too_large)?;
    let used = sandbox.stats().await?.disk_bytes;
    ensure!(used <= spec.limits.disk_bytes, "{used} bytes are there");
    // Nobody inside is to blame, and there is a way on.
    ensure_eq!(sh(&sandbox, "sleep 1; rm -r one three; echo alive").await?.out, "alive\n");
    sandbox.write_file("three", vec![3; PART].into(), None).await?;
    Ok(())
}

async fn use_after_the_end(ctx: &Ctx) -> CaseResult {
    let sandbox = ctx.sandbox().await?;
    let id = sandbox.id().clone();
    ctx.provider.destroy(&id).await?;
    let gone = &[ErrorKind::NotFound];
    typed("a command", sandbox.exec(ExecRequest::new(["true"])).await.map(drop), gone)?;
    typed("a file", sandbox.read_file("/etc/passwd", 0, 1).await, gone)?;
    typed("an attach", ctx.provider.attach(&id, Attempt(2)).await.map(drop), gone)?;
    typed("a stop", ctx.provider.stop(&id).await, gone)?;
    typed("a start", ctx.provider.start(&id, Attempt(2)).await.map(drop), gone)?;
    ensure!(!listed(ctx).await?.contains(&id.to_string()), "it is still listed");
    Ok(())
}

async fn archives_that_are_not(ctx: &Ctx) -> CaseResult {
    let dir = tempfile::tempdir()?;
    let path = dir.path().join("archive");
    let name = || forkyard_core::SnapshotId::new(ctx.id().as_str()).map_err(|e| Failed::new(e.to_string()));
    for rubbish in [&b""[..], b"{}\n", b"rubbish", &[0; 100_000]] {
        std::fs::write(&path, rubbish)?;
        typed("rubbish", ctx.provider.import_snapshot(&name()?, &path, None).await, &[ErrorKind::Invalid])?;
    }
    let missing = ctx.provider.import_snapshot(&name()?, &dir.path().join("missing"), None).await;
    typed("a missing archive", missing, &[ErrorKind::NotFound])?;
    let unknown = SandboxSpec { root: Root::Snapshot(name()?), ..ctx.spec.clone() };
    refused(ctx, "an unknown snapshot", &unknown, &[ErrorKind::NotFound]).await?;
    ensure_eq!(
        ctx.provider.snapshots().await?.iter().filter(|s| s.id.as_str().starts_with("case")).count(),
        0
    );
    Ok(())
}
