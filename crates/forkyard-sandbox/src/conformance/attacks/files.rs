//! Files: the tools' paths, links, names, and what hangs or fills a reader.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use forkyard_core::SnapshotId;

use super::attack;
use super::stage::{PROBE, bring_probe, probe};
use crate::conformance::{Case, CaseResult, Ctx, Failed, ensure, ensure_eq, run, sh};
use crate::{
    ErrorKind, ExecRequest, FileKind, GitExport, GlobRequest, GrepRequest, Labels, ProviderKind, Root,
    Sandbox, SandboxSpec,
};

pub fn cases() -> Vec<Case> {
    let deep = attack!(deep_names_fit_into_a_snapshot, [10, 23],
        "Files deeper than any path leads, with second names deeper still, before a snapshot",
        Harmless by local "names by folder, bounded memory of workers" docker "names by folder");
    vec![
        attack!(paths_stay_inside, [1], "A host's file by `..` or an absolute path", Denied by "root of its own"),
        attack!(a_symlink_to_a_secret, [2], "A host's secret through a symlink, to read and to write",
            Denied by "root of its own"),
        attack!(host_files_are_not_there, [2], "The host's own secrets, devices and sockets where they usually are",
            Denied by local "allow-list of the root" docker "image as root"),
        attack!(a_symlink_swapped_under_us, [3], "A symlink swapped between check and open",
            Harmless by "openat2: one lookup, inside"),
        attack!(a_symlink_as_a_bare_argument, [4], "A symlink as the bare argument of every tool",
            Denied by "root of its own"),
        attack!(hard_links_stay_inside, [5], "A hard link to a system file or to a parent's file, then a write",
            Denied by local "read-only binds, layers" docker "read-only root, own volumes"),
        attack!(magic_links_lead_nowhere, [6], "/proc/self/fd/N as a path or as a folder to work in",
            Denied by "openat2 without magic links"),
        attack!(readers_neither_hang_nor_fill, [10], "A FIFO, a device, a terabyte of holes before a reader of the host",
            Harmless by "regular files alone, bounds, holes kept"),
        attack!(readers_keep_to_their_memory, [10, 23], "A line, ignore files and folders without end before searches",
            Harmless by "bounds of what a search holds"),
        Case { applies: |c| c.snapshot, ..deep },
        attack!(odd_names_stay_names, [11], "Names with newlines, escapes, dashes, 255 bytes and no UTF-8",
            Harmless by "names as data, never in a shell or a path of the host"),
    ]
}

fn host_secret() -> Result<tempfile::NamedTempFile, Failed> {
    let secret = tempfile::NamedTempFile::new()?;
    std::fs::write(secret.path(), "host secret")?;
    Ok(secret)
}

fn unharmed(secret: &Path) -> CaseResult {
    ensure_eq!(std::fs::read_to_string(secret)?, "host secret");
    Ok(())
}

async fn paths_stay_inside(ctx: &Ctx) -> CaseResult {
    let secret = host_secret()?;
    let path = secret.path().display().to_string();
    let sandbox = ctx.sandbox().await?;
    let up = format!("{}{path}", "../".repeat(40));
    let mixed = format!("/workspace/./x/../..//{path}");
    for attempt in [path.as_str(), &up, &mixed] {
        ensure!(sandbox.read_file(attempt, 0, 100).await.is_err(), "{attempt} was read");
        ensure!(sandbox.stat(attempt).await.is_err(), "{attempt} was found");
        // A write goes to a file of the sandbox's own, if anywhere.
        let _ = sandbox.write_file(attempt, "overwritten".into(), None).await;
        let _ = sandbox.remove(attempt, true).await;
        unharmed(secret.path())?;
    }
    Ok(())
}

async fn a_symlink_to_a_secret(ctx: &Ctx) -> CaseResult {
    let secret = host_secret()?;
    let (path, dir) = (secret.path().display(), secret.path().parent().unwrap_or(secret.path()).display());
    let sandbox = ctx.sandbox().await?;
    sh(&sandbox, &format!("ln -s {path} link; ln -s {dir} dirlink; ln -s ../../../../../..{path} up"))
        .await?;
    let through = format!("dirlink/{}", secret.path().file_name().unwrap_or_default().to_string_lossy());
    for attempt in ["link", "up", &through] {
        ensure!(sandbox.read_file(attempt, 0, 100).await.is_err(), "{attempt} was read");
        let _ = sandbox.write_file(attempt, "overwritten".into(), None).await;
        unharmed(secret.path())?;
    }
    let script =
        format!("cat link up {through} {path} 2>/dev/null; echo overwritten > link; echo overwritten > up");
    let seen = sh(&sandbox, &script).await?.out;
    ensure!(!seen.contains("host secret"), "{seen}");
    unharmed(secret.path())
}

async fn a_symlink_swapped_under_us(ctx: &Ctx) -> CaseResult {
    const ENOUGH: u32 = 30;
    let sandbox = ctx.sandbox().await?;
    // There is something at both ends of the link: whoever follows it where it must not finds that out. Of the
    // supervisor's root commands may not follow the link, the supervisor itself could. One link takes the place of the other, so
    // that there always is one.
    sh(&sandbox, "mkdir real beyond; ln -s real swap; ln -s real to; for f in maps passwd; do echo inside > real/$f; done")
        .await?;
    bring_probe(&sandbox).await?;
    let swap = [
        PROBE,
        "probe",
        "swap",
        "swap",
        "real",
        "swap",
        "/proc/1",
        "swap",
        "/proc/1/root/etc",
        "to",
        "real",
        "to",
        "/proc/1/root/workspace/beyond",
    ];
    let _swapping = sandbox.exec(ExecRequest::new(swap)).await?;
    let (mut inside, mut refused, mut written, mut kept_out) = (0, 0, 0, 0);
    let limit = tokio::time::Instant::now() + Duration::from_secs(60);
    while [inside, refused, written, kept_out].iter().any(|times| *times < ENOUGH) {
        ensure!(
            tokio::time::Instant::now() < limit,
            "read {inside} times, refused {refused} times, written {written} times, kept out {kept_out} times"
        );
        for name in ["maps", "passwd"] {
            match sandbox.read_file(&format!("swap/{name}"), 0, 100).await {
                Ok(data) => {
                    ensure_eq!(data, "inside\n");
                    inside += 1;
                }
                // Not everything has a file of that name.
                Err(e) if e.kind == ErrorKind::NotFound => {}
                Err(e) => {
                    ensure!(matches!(e.kind, ErrorKind::Invalid | ErrorKind::Denied), "{e}");
                    refused += 1;
                }
            }
        }
        match sandbox.write_file("to/mark", "followed".into(), None).await {
            Ok(()) => written += 1,
            Err(e) => {
                ensure!(matches!(e.kind, ErrorKind::Invalid | ErrorKind::Denied), "{e}");
                kept_out += 1;
            }
        }
    }
    ensure_eq!(sh(&sandbox, "ls beyond").await?.out, "");
    Ok(())
}

async fn a_symlink_as_a_bare_argument(ctx: &Ctx) -> CaseResult {
    let outside = tempfile::tempdir()?;
    std::fs::write(outside.path().join("keep"), "host secret")?;
    let sandbox = ctx.sandbox().await?;
    sh(&sandbox, &format!("ln -s {} bare", outside.path().display())).await?;
    let path = Some("bare".to_string());
    let mut seen = Vec::new();
    seen.extend(sandbox.list_files("bare").await.unwrap_or_default().into_iter().map(|f| f.name));
    let glob = GlobRequest { pattern: "**".into(), path: path.clone(), max: 100 };
    seen.extend(sandbox.glob(glob).await.unwrap_or_default());
    let grep =
        GrepRequest { pattern: "secret".into(), path: path.clone(), max: 100, ..GrepRequest::default() };
    seen.extend(sandbox.grep(grep).await.unwrap_or_default().matches.into_iter().map(|m| m.text));
    let export = GitExport { repo: path, base: vec![], max_bytes: 1 << 20, max_files: 100 };
    seen.extend(sandbox.git_export(export).await.unwrap_or_default().changed.into_iter().map(|c| c.path));
    if let Ok(exec) = sandbox.exec(ExecRequest::shell("ls; cat keep").cwd("bare")).await {
        seen.push(String::from_utf8_lossy(&exec.output().await?.1).into_owned());
    }
    ensure!(
        !seen.iter().any(|s| s.contains("keep") || s.contains("secret")),
        "seen through the link: {seen:?}"
    );
    let _ = sandbox.write_file("bare/planted", "x".into(), None).await;
    let _ = sandbox.make_dir("bare/planted2").await;
    let _ = sandbox.remove("bare/keep", false).await;
    // The link itself may go; what it points to may not.
    let _ = sandbox.remove("bare", true).await;
    unharmed(&outside.path().join("keep"))?;
    ensure_eq!(outside.path().read_dir()?.count(), 1);
    Ok(())
}

async fn hard_links_stay_inside(ctx: &Ctx) -> CaseResult {
    let sandbox = ctx.sandbox().await?;
    bring_probe(&sandbox).await?;
    // Of an image that was unpacked for it, a local sandbox may change its own layer over it; of everything else nothing.
    let script = "ln /bin/sh mine 2>/dev/null && echo evil >> mine; cmp -s mine /bin/sh && echo shared; :";
    let own_root = matches!(&ctx.spec.root, Root::Image(_))
        && ctx.provider.capabilities().provider == ProviderKind::Local;
    if own_root {
        sh(&sandbox, script).await?;
    } else {
        let worked = super::kernel::worked(&probe(&sandbox, &["5"]).await?)?;
        ensure!(worked.is_empty(), "these worked: {worked:?}");
        ensure_eq!(sh(&sandbox, script).await?.out, "");
    }
    let other = ctx.sandbox().await?;
    ensure_eq!(sh(&other, "tail -c 5 /bin/sh | grep -c evil; ls /bin/mine 2>/dev/null; :").await?.out, "0\n");
    // A child's link to a file that it shares with its parent.
    if !ctx.provider.capabilities().snapshot {
        return Ok(());
    }
    sh(&sandbox, "echo parent > f").await?;
    let snapshot = SnapshotId::new(ctx.id().as_str()).map_err(|e| Failed::new(e.to_string()))?;
    sandbox.snapshot(&snapshot, &Labels::new()).await?;
    let child =
        ctx.sandbox_with(&SandboxSpec { root: Root::Snapshot(snapshot.clone()), ..ctx.spec.clone() }).await;
    ctx.provider.remove_snapshot(&snapshot).await?;
    let child = child?;
    ensure_eq!(sh(&child, "ln f own; echo evil > own; cat f").await?.out, "evil\n");
    ensure_eq!(sh(&sandbox, "cat f").await?.out, "parent\n");
    Ok(())
}

async fn magic_links_lead_nowhere(ctx: &Ctx) -> CaseResult {
    let sandbox = ctx.sandbox().await?;
    for path in [
        "/proc/self/root/etc/passwd",
        "/proc/1/root/etc/passwd",
        "/proc/self/cwd/x",
        "/proc/1/fd/3",
        "/proc/self/exe",
    ] {
        ensure!(sandbox.read_file(path, 0, 10).await.is_err(), "{path} was read");
    }
    for number in 0..64 {
        let fd = format!("/proc/self/fd/{number}");
        for path in
            [fd.clone(), format!("{fd}/meta.json"), format!("{fd}/.."), format!("{fd}/../../meta.json")]
        {
            ensure!(sandbox.read_file(&path, 0, 10).await.is_err(), "{path} was read");
            ensure!(sandbox.list_files(&path).await.is_err(), "{path} was listed");
        }
        let cwd = sandbox.exec(ExecRequest::new(["/bin/sh", "-c", "ls -la; pwd -P"]).cwd(fd.clone())).await;
        if let Ok(exec) = cwd {
            let (_, out, _) = exec.output().await?;
            let text = String::from_utf8_lossy(&out).into_owned();
            ensure!(!text.contains("meta.json"), "a command runs in {fd}: {text}");
        }
    }
    Ok(())
}

async fn host_files_are_not_there(ctx: &Ctx) -> CaseResult {
    let sandbox = ctx.sandbox().await?;
    let mut paths = vec![
        "/root/.ssh",
        "/var/run/docker.sock",
        "/run/docker.sock",
        "/boot/vmlinuz",
        "/sys/kernel",
        "/dev/sda",
        "/dev/kmsg",
        "/dev/mem",
        "/dev/kvm",
        "/dev/fuse",
        "/dev/net/tun",
    ];
    // An image brings its own of these.
    if matches!(ctx.spec.root, Root::Default) && ctx.provider.capabilities().provider == ProviderKind::Local {
        paths.extend(["/etc/shadow", "/root/.bashrc", "/var/lib/dpkg"]);
    }
    for path in paths {
        ensure!(sandbox.stat(path).await.is_err(), "{path} is there");
    }
    let accounts = sandbox.read_file("/etc/passwd", 0, 100_000).await?;
    let host = std::fs::read_to_string("/etc/passwd").unwrap_or_default();
    ensure!(
        host.is_empty() || !String::from_utf8_lossy(&accounts).contains(&host),
        "the host's accounts are shown"
    );
    Ok(())
}

/// Everything of the host's that reads what a sandbox wrote.
async fn read_all(ctx: &Ctx, sandbox: &Arc<dyn Sandbox>) -> CaseResult {
    for path in ["pipe", "link", "zero", "terminal"] {
        ensure_eq!(sandbox.read_file(path, 0, 10).await.err().map(|e| e.kind), Some(ErrorKind::Invalid));
    }
    ensure_eq!(sandbox.read_file("sparse", 1 << 39, 10).await?, vec![0; 10]);
    ensure_eq!(sandbox.read_file("sparse", 0, 1 << 20).await?.len(), 1 << 20);
    let kinds: Vec<FileKind> = sandbox.list_files(".").await?.into_iter().map(|f| f.kind).collect();
    ensure!(kinds.contains(&FileKind::Other), "{kinds:?}");
    sandbox.glob(GlobRequest { pattern: "**".into(), path: None, max: 1000 }).await?;
    let grep = GrepRequest {
        pattern: "needle".into(),
        glob: Some("!sparse".into()),
        max: 10,
        ..GrepRequest::default()
    };
    sandbox.grep(grep).await?;
    let export = GitExport { repo: None, base: vec![], max_bytes: 1 << 20, max_files: 100 };
    ensure_eq!(sandbox.git_export(export).await.err().map(|e| e.kind), Some(ErrorKind::TooLarge));
    sandbox.stats().await?;
    if !ctx.provider.capabilities().snapshot {
        return Ok(());
    }
    let snapshot = SnapshotId::new(ctx.id().as_str()).map_err(|e| Failed::new(e.to_string()))?;
    sandbox.snapshot(&snapshot, &Labels::new()).await?;
    let dir = tempfile::tempdir()?;
    let archive = dir.path().join("archive");
    let exported = ctx.provider.export_snapshot(&snapshot, &archive).await;
    ctx.provider.remove_snapshot(&snapshot).await?;
    exported?;
    let size = std::fs::metadata(&archive)?.len();
    ensure!(size < 256 << 20, "holes were written out: {size} bytes");
    Ok(())
}

async fn readers_neither_hang_nor_fill(ctx: &Ctx) -> CaseResult {
    let sandbox = ctx.sandbox().await?;
    let script = "mkfifo pipe; ln -s /dev/zero zero; ln -s pipe link; ln -s /dev/tty terminal; truncate -s 1099511627776 sparse";
    run(&sandbox, ExecRequest::shell(script)).await?;
    tokio::time::timeout(Duration::from_secs(60), read_all(ctx, &sandbox))
        .await
        .map_err(|_| Failed::new("a reader of the host hangs"))?
}

/// The most that the supervisor ever held.
async fn peak_bytes(sandbox: &Arc<dyn Sandbox>) -> Result<u64, Failed> {
    let status = sh(sandbox, "cat /proc/1/status").await?.out;
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")?.strip_suffix("kB"));
    let kib = peak.and_then(|kib| kib.trim().parse::<u64>().ok());
    kib.map(|kib| kib << 10).ok_or_else(|| Failed::new(format!("no peak in {status}")))
}

async fn readers_keep_to_their_memory(ctx: &Ctx) -> CaseResult {
    const AT_ONCE: usize = 4;
    const PEAK: u64 = 96 << 20;
    let sandbox = ctx.sandbox().await?;
    let script = "mkdir data endless silent; head -c 150000000 /dev/zero | tr '\\0' x > data/line; \
        echo needle > data/z; ln -s /dev/zero endless/.gitignore; mkfifo silent/.gitignore";
    run(&sandbox, ExecRequest::shell(script)).await?;
    let grep = GrepRequest {
        pattern: "needle".into(),
        path: Some("data".into()),
        max: 10,
        ..GrepRequest::default()
    };
    let found = futures::future::try_join_all((0..AT_ONCE).map(|_| sandbox.grep(grep.clone()))).await?;
    for found in found {
        ensure_eq!((found.unsearched, found.matches.len()), (vec!["line".to_string()], 1));
    }
    let peak = peak_bytes(&sandbox).await?;
    ensure!(peak <= PEAK, "the supervisor held {peak} bytes");
    for path in ["endless", "silent"] {
        let glob = GlobRequest { pattern: "*".into(), path: Some(path.into()), max: 10 };
        ensure_eq!(sandbox.glob(glob).await?, [".gitignore"]);
        let export = GitExport { repo: Some(path.into()), base: vec![], max_bytes: 1 << 20, max_files: 10 };
        sandbox.git_export(export).await?;
    }
    let peak = peak_bytes(&sandbox).await?;
    ensure!(peak <= PEAK, "the supervisor held {peak} bytes");
    Ok(())
}

async fn deep_names_fit_into_a_snapshot(ctx: &Ctx) -> CaseResult {
    let sandbox = ctx.sandbox().await?;
    bring_probe(&sandbox).await?;
    ensure_eq!(probe(&sandbox, &["deep"]).await?, "done\n");
    // Where something runs, it is a copy.
    let _running = sandbox.exec(ExecRequest::shell("sleep 600")).await?;
    let snapshot = SnapshotId::new(ctx.id().as_str()).map_err(|e| Failed::new(e.to_string()))?;
    sandbox.snapshot(&snapshot, &Labels::new()).await?;
    ctx.provider.remove_snapshot(&snapshot).await?;
    Ok(())
}

async fn odd_names_stay_names(ctx: &Ctx) -> CaseResult {
    let sandbox = ctx.sandbox().await?;
    let longest = "x".repeat(255);
    let names = [
        "new\nline",
        "-rf",
        "$(touch planted)",
        "`id`",
        "\u{1b}[2Jgone",
        "quote'\"",
        "*",
        "\\x41",
        "a:b",
        "...",
        &longest,
    ];
    for name in names {
        sandbox.write_file(name, "odd".into(), None).await?;
    }
    sh(&sandbox, "touch \"$(printf 'b\\377ad')\"").await?;
    let listed: Vec<String> = sandbox.list_files(".").await?.into_iter().map(|f| f.name).collect();
    ensure_eq!(listed.len(), names.len() + 1);
    ensure!(
        listed.contains(&"b\\xffad".to_string()) && listed.contains(&"new\nline".to_string()),
        "{listed:?}"
    );
    let export = GitExport { repo: None, base: vec![], max_bytes: 1 << 20, max_files: 100 };
    let diff = sandbox.git_export(export).await?;
    for file in &diff.changed {
        ensure!(names.contains(&file.path.as_str()), "a name came out as {:?}", file.path);
    }
    ensure_eq!(diff.changed.len() + diff.skipped.len(), names.len() + 1);
    for name in names {
        ensure_eq!(sandbox.read_file(name, 0, 10).await?, "odd");
        sandbox.remove(name, false).await?;
    }
    ensure_eq!(sandbox.list_files(".").await?.len(), 1);
    Ok(())
}
