//! What a hostile program inside tries. Each case is a real attempt; it fails if the attempt works.

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::Bytes;

use super::{Case, CaseResult, Ctx, Failed, case, ensure, ensure_eq, run, sh};
use crate::local::GUEST;
use crate::{ErrorKind, ExecRequest, NetworkMode};

pub fn cases() -> Vec<Case> {
    vec![
        case!(paths_stay_inside, attack "1, 2, 4" by "root of its own"),
        case!(a_symlink_swapped_under_us, attack "3" by "openat2"),
        case!(hard_links_stay_inside, attack "5" by "root of its own"),
        case!(magic_links_lead_nowhere, attack "6" by "openat2"),
        case!(host_files_are_not_there, attack "2" by "allow-list of the root"),
        case!(kernel_calls_are_refused, attack "7, 8, 16-21" by "seccomp, capabilities, namespaces"),
        case!(setuid_programs_give_nothing, attack "17" by "no_new_privs, nosuid"),
        case!(the_supervisor_survives_signals, attack "18" by "pid namespace"),
        case!(host_processes_are_not_seen, attack "18, 21" by "pid, ipc and net namespaces"),
        case!(a_fork_bomb_is_contained, attack "22" by "process limit"),
        case!(memory_is_contained, attack "23" by "memory limit"),
        case!(the_disk_is_contained, attack "23" by "disk limit"),
        case!(an_output_flood_is_contained, attack "23" by "bounded spool"),
        case!(a_double_fork_dies_with_the_sandbox, attack "24" by "pid namespace"),
        case!(a_stopped_tree_still_times_out, attack "25" by "supervisor"),
        case!(no_network_but_loopback, attack "30" by "network namespace"),
        case!(children_share_no_identity, attack "35" by "own processes"),
    ]
}

async fn paths_stay_inside(ctx: &Ctx) -> CaseResult {
    let secret = tempfile::NamedTempFile::new().map_err(|e| Failed(e.to_string()))?;
    std::fs::write(secret.path(), "host secret").map_err(|e| Failed(e.to_string()))?;
    let path = secret.path().display().to_string();
    let sandbox = ctx.sandbox().await?;
    let up = format!("{}{path}", "../".repeat(40));
    sh(
        &sandbox,
        &format!(
            "ln -s {path} link; ln -s {} dirlink",
            secret.path().parent().unwrap_or(secret.path()).display()
        ),
    )
    .await?;
    let through = format!("dirlink/{}", secret.path().file_name().unwrap_or_default().to_string_lossy());
    for attempt in [path.as_str(), &up, "link", &through] {
        ensure!(sandbox.read_file(attempt, 0, 100).await.is_err(), "{attempt} was read");
    }
    // A write goes to a file of the sandbox's own, if anywhere.
    for attempt in [path.as_str(), &up, "link"] {
        let _ = sandbox.write_file(attempt, "overwritten".into(), None).await;
    }
    let _ = sandbox.remove(&path, false).await;
    let kept = std::fs::read_to_string(secret.path()).map_err(|e| Failed(e.to_string()))?;
    ensure_eq!(kept, "host secret");
    Ok(())
}

async fn a_symlink_swapped_under_us(ctx: &Ctx) -> CaseResult {
    let sandbox = ctx.sandbox().await?;
    sh(&sandbox, "mkdir real; echo inside > real/file").await?;
    let script =
        "while :; do ln -sfn real swap; ln -sfn /proc/1/root/etc swap; ln -sfn /proc/self/fd swap; done";
    let _swapping = sandbox.exec(ExecRequest::shell(script)).await?;
    for _ in 0..300 {
        match sandbox.read_file("swap/file", 0, 100).await {
            Ok(data) => ensure_eq!(data, "inside\n"),
            Err(e) => {
                ensure!(matches!(e.kind, ErrorKind::NotFound | ErrorKind::Invalid | ErrorKind::Denied), "{e}")
            }
        }
    }
    Ok(())
}

async fn hard_links_stay_inside(ctx: &Ctx) -> CaseResult {
    let sandbox = ctx.sandbox().await?;
    let output = sh(
        &sandbox,
        "ln /usr/bin/env mine 2>/dev/null && echo evil >> mine; cmp -s mine /usr/bin/env && echo shared",
    )
    .await?;
    ensure!(!output.out.contains("shared"), "a read-only file was linked");
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
    for path in [
        "/etc/shadow",
        "/root/.ssh",
        "/root/.bashrc",
        "/var/run/docker.sock",
        "/var/lib/dpkg",
        "/boot/vmlinuz",
        "/sys/kernel",
        "/dev/sda",
        "/dev/kmsg",
        "/dev/mem",
    ] {
        ensure!(sandbox.stat(path).await.is_err(), "{path} is there");
    }
    let mounts = sandbox.read_file("/etc/passwd", 0, 10_000).await?;
    ensure!(String::from_utf8_lossy(&mounts).lines().count() < 40, "the host's accounts are shown");
    Ok(())
}

/// Attempts that may succeed without harm, because what they reach is the sandbox's own.
const HARMLESS: &[&str] = &[];

async fn kernel_calls_are_refused(ctx: &Ctx) -> CaseResult {
    let sandbox = ctx.sandbox().await?;
    sandbox.write_file("probe", Bytes::from_static(GUEST), Some(0o755)).await?;
    let output = run(&sandbox, ExecRequest::new(["/workspace/probe", "probe"])).await?;
    let results: BTreeMap<&str, &str> = output.out.lines().filter_map(|line| line.split_once(' ')).collect();
    ensure!(results.len() >= 45, "the probe did not run: {} {}", output.out, output.err);
    let worked: Vec<&str> =
        results.iter().filter(|(name, r)| **r == "0" && !HARMLESS.contains(name)).map(|(n, _)| *n).collect();
    ensure!(worked.is_empty(), "these worked: {worked:?}");
    Ok(())
}

async fn setuid_programs_give_nothing(ctx: &Ctx) -> CaseResult {
    let sandbox = ctx.sandbox().await?;
    let script = "cp /bin/sh mine; chmod 6755 mine; ./mine -c 'id -u'; (su -c id root || sudo -n id || mount -t tmpfs x /tmp) </dev/null 2>/dev/null
        grep -E 'CapEff|CapPrm|CapBnd|CapAmb|NoNewPrivs|Seccomp:' /proc/self/status";
    let output = sh(&sandbox, script).await?.out;
    ensure!(output.starts_with("1000\n") && !output.contains("uid=0"), "{output}");
    for line in [
        "CapPrm:\t0000000000000000",
        "CapEff:\t0000000000000000",
        "CapBnd:\t0000000000000000",
        "CapAmb:\t0000000000000000",
        "NoNewPrivs:\t1",
        "Seccomp:\t2",
    ] {
        ensure!(output.contains(line), "no {line} in {output}");
    }
    Ok(())
}

async fn the_supervisor_survives_signals(ctx: &Ctx) -> CaseResult {
    let sandbox = ctx.sandbox().await?;
    let output = sh(
        &sandbox,
        "for s in HUP INT QUIT ABRT KILL SEGV TERM STOP USR1; do kill -$s 1; done; echo tried; kill -9 -1",
    )
    .await?;
    ensure!(output.out.contains("tried"), "{output}", output = output.out);
    ensure_eq!(sh(&sandbox, "echo alive").await?.out, "alive\n");
    Ok(())
}

async fn host_processes_are_not_seen(ctx: &Ctx) -> CaseResult {
    let sandbox = ctx.sandbox().await?;
    let output =
        sh(&sandbox, "ls -d /proc/[0-9]* | wc -l; cat /proc/net/unix | wc -l; ls /dev/shm | wc -l; hostname")
            .await?
            .out;
    let numbers: Vec<&str> = output.lines().collect();
    ensure!(numbers.first().and_then(|n| n.parse::<u32>().ok()).is_some_and(|n| n < 8), "{output}");
    ensure!(
        numbers.get(1).and_then(|n| n.trim().parse::<u32>().ok()).is_some_and(|n| n <= 4),
        "unix sockets: {output}"
    );
    Ok(())
}

async fn a_fork_bomb_is_contained(ctx: &Ctx) -> CaseResult {
    let mut spec = ctx.spec.clone();
    spec.limits.processes = 48;
    let sandbox = ctx.sandbox_with(&spec).await?;
    let bomb = ExecRequest::shell("b() { b | b & }; b; sleep 600").timeout(Duration::from_millis(1500));
    let output = run(&sandbox, bomb).await?;
    ensure!(output.result.exit_code != 0, "it ended well");
    // The machine and the sandbox go on.
    let limit = tokio::time::Instant::now() + Duration::from_secs(60);
    loop {
        let stats = sandbox.stats().await?;
        ensure!(stats.processes <= 48 + 64, "{} processes", stats.processes);
        match sh(&sandbox, "echo alive").await {
            Ok(output) if output.out == "alive\n" => return Ok(()),
            _ => ensure!(tokio::time::Instant::now() < limit, "the sandbox does not recover"),
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

async fn memory_is_contained(ctx: &Ctx) -> CaseResult {
    let mut spec = ctx.spec.clone();
    spec.limits.memory_bytes = 96 << 20;
    let sandbox = ctx.sandbox_with(&spec).await?;
    // tail keeps what it reads until a line ends.
    let hog = ExecRequest::shell("tail /dev/zero").timeout(Duration::from_secs(60));
    let output = run(&sandbox, hog).await?;
    ensure_eq!((output.result.exit_code, output.result.timed_out), (137, false));
    ensure!(output.result.oom_killed, "not recorded as a kill for memory: {:?}", output.result);
    ensure_eq!(sh(&sandbox, "echo alive").await?.out, "alive\n");
    let shm =
        ExecRequest::shell("dd if=/dev/zero of=/dev/shm/x bs=1M count=400").timeout(Duration::from_secs(60));
    let output = run(&sandbox, shm).await?;
    let caught = output.result.exit_code != 0 || spec.limits.memory_bytes > 400 << 20;
    let held = sh(&sandbox, "stat -c %b /dev/shm/x 2>/dev/null || echo 0").await?;
    ensure!(
        caught || held.out.trim().parse::<u64>().unwrap_or(0) * 512 <= 512 << 20,
        "shared memory is not bounded"
    );
    Ok(())
}

async fn the_disk_is_contained(ctx: &Ctx) -> CaseResult {
    let mut spec = ctx.spec.clone();
    spec.limits.disk_bytes = 64 << 20;
    let sandbox = ctx.sandbox_with(&spec).await?;
    // Into a folder that its owner can't list.
    let flood = "mkdir h; cd h; chmod 300 .; i=0; while :; do head -c 1048576 /dev/urandom > f$i || exit 9; i=$((i+1)); sleep 0.01; done";
    let output = run(&sandbox, ExecRequest::shell(flood).timeout(Duration::from_secs(60))).await?;
    ensure!(!output.result.timed_out, "nobody stopped it");
    let used = sandbox.stats().await?.disk_bytes;
    ensure!(used < 1 << 30, "{used} bytes were written");
    // It is still over: whoever goes on is stopped again, whoever cleans up is not, however long that takes.
    let more = flood.replace("mkdir h; ", "").replace("> f", "> g");
    let output = run(&sandbox, ExecRequest::shell(more).timeout(Duration::from_secs(60))).await?;
    ensure!(!output.result.timed_out, "nobody stopped the second one");
    let clean = "sleep 1.2; chmod 700 h; rm -r h; echo alive";
    ensure_eq!(sh(&sandbox, clean).await?.out, "alive\n");
    Ok(())
}

async fn an_output_flood_is_contained(ctx: &Ctx) -> CaseResult {
    let sandbox = ctx.sandbox().await?;
    let call = forkyard_core::CallId::new("yes").expect("an id");
    let request =
        ExecRequest { call: Some(call), ..ExecRequest::new(["yes"]) }.timeout(Duration::from_millis(1500));
    let (result, out, _) = sandbox.exec(request).await?.output().await?;
    ensure!(out.len() as u64 <= ExecRequest::DEFAULT_MAX_OUTPUT, "{} bytes were passed on", out.len());
    ensure!(result.timed_out && result.truncated, "{result:?}");
    Ok(())
}

async fn a_double_fork_dies_with_the_sandbox(ctx: &Ctx) -> CaseResult {
    let sandbox = ctx.sandbox().await?;
    let mark = format!("86{}", std::process::id());
    sh(
        &sandbox,
        &format!("(setsid sh -c 'trap \"\" HUP TERM; sleep {mark}; sleep {mark}' >/dev/null 2>&1 &)"),
    )
    .await?;
    let limit = tokio::time::Instant::now() + Duration::from_secs(20);
    while !host_runs(&mark) {
        ensure!(tokio::time::Instant::now() < limit, "the attempt did not start");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    ctx.provider.destroy(sandbox.id()).await?;
    ensure!(!host_runs(&mark), "it outlived its sandbox");
    Ok(())
}

/// Whether a process of this machine has the word among its arguments.
fn host_runs(word: &str) -> bool {
    let Ok(entries) = std::fs::read_dir("/proc") else { return false };
    entries.flatten().any(|entry| {
        let line = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
        line.split(|b| *b == 0).any(|arg| arg == word.as_bytes())
    })
}

async fn a_stopped_tree_still_times_out(ctx: &Ctx) -> CaseResult {
    let sandbox = ctx.sandbox().await?;
    let games = ExecRequest::shell(
        "trap '' TERM INT HUP; nice -n 19 sh -c 'kill -STOP $$' & kill -STOP $$; sleep 600",
    );
    let output = run(&sandbox, games.timeout(Duration::from_millis(700))).await?;
    ensure_eq!((output.result.exit_code, output.result.timed_out), (124, true));
    Ok(())
}

async fn no_network_but_loopback(ctx: &Ctx) -> CaseResult {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").map_err(|e| Failed(e.to_string()))?;
    let port = listener.local_addr().map_err(|e| Failed(e.to_string()))?.port();
    let mut spec = ctx.spec.clone();
    spec.network.mode = NetworkMode::None;
    let sandbox = ctx.sandbox_with(&spec).await?;
    let script = format!(
        "cat /proc/net/dev | tail -n +3 | cut -d: -f1; (echo x > /dev/tcp/127.0.0.1/{port}) 2>/dev/null && echo reached"
    );
    let output = run(
        &sandbox,
        ExecRequest::new([
            "/bin/sh",
            "-c",
            &format!("command -v bash >/dev/null && exec bash -c '{script}'; {script}"),
        ]),
    )
    .await?;
    ensure!(!output.out.contains("reached"), "the host's loopback was reached");
    let devices: Vec<&str> = output.out.lines().map(str::trim).filter(|l| !l.is_empty()).collect();
    ensure!(devices.iter().all(|d| *d == "lo" || d.ends_with('0')), "{devices:?}");
    Ok(())
}

async fn children_share_no_identity(ctx: &Ctx) -> CaseResult {
    let (a, b) = (ctx.sandbox().await?, ctx.sandbox().await?);
    sh(&a, "echo private > /tmp/x; echo private > /dev/shm/x; (sleep 300 &) >/dev/null 2>&1").await?;
    let other =
        sh(&b, "cat /tmp/x /dev/shm/x 2>/dev/null; ps ax 2>/dev/null | grep -c '[s]leep 300'").await?;
    ensure!(!other.out.contains("private"), "{}", other.out);
    let random = "head -c 16 /dev/urandom | od -An -tx1; cat /proc/sys/kernel/random/uuid";
    ensure!(sh(&a, random).await?.out != sh(&b, random).await?.out, "the same random numbers");
    Ok(())
}
