//! Times of local sandboxes beside bubblewrap, Docker and a plain spawn, in one run and with all defaults on. `forkyard bench
//! sandbox` shows them.

mod docker;
mod stopwatch;

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use forkyard_core::{Attempt, SandboxId, SnapshotId};
use serde::{Deserialize, Serialize};

use crate::egress::{EgressConfig, EgressProxy};
use crate::local::{LocalOptions, LocalProvider};
use crate::{ErrorKind, ExecRequest, Labels, Provider, Result, Root, Sandbox, SandboxError, SandboxSpec};

pub use stopwatch::{Figure, Outcome, Report, Unit, Want};

use stopwatch::{Times, at_least, at_most, p50};

/// How much is measured.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Options {
    pub rounds: usize,
    /// Sandboxes that live at once; 0 leaves this out.
    pub alive: usize,
    /// The fork of a sandbox with this many files of together 1 GiB; 0 leaves this out.
    pub files: usize,
    /// This program, for the time of a whole `forkyard sandbox run true`, and the home that it gets.
    pub program: Option<PathBuf>,
    /// A folder for everything that is made.
    pub dir: PathBuf,
    pub docker: Docker,
}

/// What Docker's containers are made of.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Docker {
    LeftOut,
    /// An image that is made of this machine's busybox and goes afterwards.
    OwnImage,
    /// One that has /bin/busybox.
    Image(String),
}

/// Sandboxes made, used and destroyed at once.
const AT_ONCE: usize = 100;
const GIB: u64 = 1 << 30;
/// Before each measurement: the kernel takes apart what the one before left, and that is not the next one's time.
const REST: Duration = Duration::from_millis(20);
/// And after it: what is measured was done just before, so that no measured thing finds processors asleep or caches that
/// another one filled.
const WARM_UPS: usize = 2;
/// A program without libraries of its own: what it takes is the sandbox's or the container's time, not the loader's.
const BUSYBOX: &str = "/bin/busybox";
const BWRAP: [&str; 11] =
    ["--ro-bind", "/", "/", "--unshare-all", "--dev", "/dev", "--proc", "/proc", "--tmpfs", "/tmp", "true"];

fn failed(what: impl std::fmt::Display) -> SandboxError {
    SandboxError::new(ErrorKind::Unavailable, what.to_string())
}

/// What the last of several in a row tells.
async fn warmed<T, F: Future<Output = Result<T>>>(once: impl Fn() -> F) -> Result<T> {
    after(WARM_UPS, once).await
}

async fn after<T, F: Future<Output = Result<T>>>(warm_ups: usize, once: impl Fn() -> F) -> Result<T> {
    tokio::time::sleep(REST).await;
    for _ in 0..warm_ups {
        once().await?;
    }
    once().await
}

/// The time of a whole program; its output goes nowhere.
async fn whole(program: &Path, args: &[&str], env: &[(&str, &Path)]) -> Result<Duration> {
    whole_after(WARM_UPS, program, args, env).await
}

async fn whole_after(
    warm_ups: usize,
    program: &Path,
    args: &[&str],
    env: &[(&str, &Path)],
) -> Result<Duration> {
    let once = || async {
        let mut command = Command::new(program);
        command.args(args).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        // Cargo's own would make every program look for its libraries in more places.
        command.env_remove("LD_LIBRARY_PATH").envs(env.iter().copied());
        let start = Instant::now();
        let status = command.status();
        let took = start.elapsed();
        match status {
            Ok(status) if status.success() => Ok(took),
            Ok(status) => Err(failed(format!("{}: {status}", program.display()))),
            Err(e) => Err(failed(format!("{}: {e}", program.display()))),
        }
    };
    after(warm_ups, once).await
}

async fn is_there(program: &str) -> bool {
    Command::new(program).arg("--version").output().is_ok_and(|output| output.status.success())
}

async fn run_true(sandbox: &Arc<dyn Sandbox>) -> Result<()> {
    run_program(sandbox, &["true"]).await
}

async fn run_program(sandbox: &Arc<dyn Sandbox>, argv: &[&str]) -> Result<()> {
    match sandbox.exec(ExecRequest::new(argv.iter().copied())).await?.output().await? {
        (result, ..) if result.exit_code == 0 => Ok(()),
        (result, ..) => Err(failed(format!("{} ended with {}", argv.join(" "), result.exit_code))),
    }
}

/// Times of a command in a sandbox that lives.
async fn exec(sandbox: &Arc<dyn Sandbox>, argv: &[&str]) -> Result<Duration> {
    let once = || async {
        let start = Instant::now();
        run_program(sandbox, argv).await?;
        Ok(start.elapsed())
    };
    warmed(once).await
}

/// Of a sandbox made for one command.
struct Life {
    create: Duration,
    destroy: Duration,
    whole: Duration,
}

async fn life(provider: &LocalProvider, number: &AtomicUsize, argv: &[&str]) -> Result<Life> {
    let spec = SandboxSpec::default();
    let once = || async {
        let (id, start) = (name("one", number.fetch_add(1, Ordering::Relaxed)), Instant::now());
        let sandbox = provider.create(&id, Attempt(1), &spec).await?;
        let create = start.elapsed();
        run_program(&sandbox, argv).await?;
        let ends = Instant::now();
        provider.destroy(&id).await?;
        Ok(Life { create, destroy: ends.elapsed(), whole: start.elapsed() })
    };
    warmed(once).await
}

fn name(prefix: &str, number: usize) -> SandboxId {
    SandboxId::new(format!("{prefix}{number}")).expect("letters and digits")
}

/// Measures; what it made is gone when it ends well.
pub async fn run(options: &Options) -> Result<Report> {
    let egress = EgressConfig::for_host(&options.dir, Arc::new(|_| {}))?;
    let local = LocalOptions { egress: Some(Arc::new(EgressProxy::new(egress))), ..LocalOptions::default() };
    let provider = LocalProvider::new(&options.dir.join("state"), local)?;
    let mut report = Report::new();
    let ours = single(&provider, options, &mut report).await?;
    snapshots(&provider, options, &mut report).await?;
    offenders(&provider, options, &mut report).await?;
    burst(&provider, &mut report).await?;
    if options.alive > 0 {
        alive(&provider, options.alive, &mut report).await?;
    }
    provider.settle().await;
    docker::measure(options, ours.as_ref(), &mut report).await?;
    Ok(report)
}

const EXEC_STATIC: &str = "exec of busybox true";
const LIFE_STATIC: &str = "create + busybox true + destroy";

/// What Docker is compared with: the program that runs in its containers too.
struct Single {
    whole: Duration,
    exec: Duration,
}

/// One sandbox at a time. All that is compared is measured in turns.
async fn single(provider: &LocalProvider, options: &Options, report: &mut Report) -> Result<Option<Single>> {
    let warm = provider.create(&name("warm", 0), Attempt(1), &SandboxSpec::default()).await?;
    run_true(&warm).await?;
    let (bwrap, busybox) = (is_there("bwrap").await, Path::new(BUSYBOX).exists());
    let home = options.dir.join("home");
    let (mut times, number) = (Times::default(), AtomicUsize::new(0));
    for _ in 0..options.rounds {
        times.add("plain spawn of true", whole(Path::new("true"), &[], &[]).await?);
        if bwrap {
            times.add("bwrap, all namespaces, true", whole(Path::new("bwrap"), &BWRAP, &[]).await?);
        }
        times.add("exec of true", exec(&warm, &["true"]).await?);
        let one = life(provider, &number, &["true"]).await?;
        times.add("create", one.create);
        times.add("destroy", one.destroy);
        times.add("create + true + destroy", one.whole);
        if busybox {
            times.add(EXEC_STATIC, exec(&warm, &[BUSYBOX, "true"]).await?);
            times.add(LIFE_STATIC, life(provider, &number, &[BUSYBOX, "true"]).await?.whole);
        }
        if let Some(program) = &options.program {
            let env = [("FORKYARD_HOME", home.as_path())];
            times.add("forkyard sandbox run true", whole(program, &["sandbox", "run", "true"], &env).await?);
        }
    }
    provider.destroy(&name("warm", 0)).await?;
    let spawn = times.p50("plain spawn of true");
    report.ratio("exec of true / plain spawn", times.p50("exec of true"), spawn, at_most(1.25));
    if bwrap {
        let bwrap = times.p50("bwrap, all namespaces, true");
        report.ratio(
            "create + true + destroy / bwrap",
            times.p50("create + true + destroy"),
            bwrap,
            at_most(0.9),
        );
        if options.program.is_some() {
            let program = times.p50("forkyard sandbox run true");
            report.ratio("forkyard sandbox run true / bwrap", program, bwrap, at_most(2.5));
        }
    }
    if !bwrap {
        report.missing.push("bubblewrap: there is no bwrap on the PATH: install bubblewrap".into());
    }
    let single = busybox.then(|| Single { whole: times.p50(LIFE_STATIC), exec: times.p50(EXEC_STATIC) });
    report.times(times);
    Ok(single)
}

/// The time to a child that can be used, of an empty sandbox and of a large one in turns, and of a snapshot alone.
async fn snapshots(provider: &LocalProvider, options: &Options, report: &mut Report) -> Result<()> {
    let empty = provider.create(&name("empty", 0), Attempt(1), &SandboxSpec::default()).await?;
    let mut sandboxes = vec![(empty, "empty".to_string())];
    if options.files > 0 {
        let large = provider.create(&name("large", 0), Attempt(1), &SandboxSpec::default()).await?;
        let label = fill(&large, options.files).await?;
        sandboxes.push((large, label));
    }
    let (mut times, number) = (Times::default(), AtomicUsize::new(0));
    for _ in 0..options.rounds.max(1) {
        for (sandbox, label) in &sandboxes {
            let forked = warmed(|| fork(provider, sandbox, number.fetch_add(1, Ordering::Relaxed)));
            let (snapshot, child) = forked.await?;
            times.add(&format!("snapshot of an idle sandbox, {label}"), snapshot);
            times.add(&format!("fork, {label}"), child);
        }
    }
    for (sandbox, _) in &sandboxes {
        provider.destroy(sandbox.id()).await?;
    }
    let snapshot = times.p50("snapshot of an idle sandbox, empty");
    report.result("snapshot of an idle sandbox", snapshot.as_secs_f64() * 1e3, Unit::Ms, at_most(5.0));
    if let Some((_, label)) = sandboxes.get(1) {
        let (large, empty) = (times.p50(&format!("fork, {label}")), times.p50("fork, empty"));
        report.ratio("fork of a large / of an empty sandbox", large, empty, at_most(1.2));
    }
    report.times(times);
    Ok(())
}

/// Returns what the sandbox then holds, in words.
async fn fill(sandbox: &Arc<dyn Sandbox>, files: usize) -> Result<String> {
    let each = GIB / files as u64;
    // On the disk before anything is measured.
    let fill =
        format!("mkdir d && cd d && head -c {GIB} /dev/zero | split -a 4 -b {each} && sync && ls | wc -l");
    let (result, out, err) = sandbox.exec(ExecRequest::shell(fill)).await?.output().await?;
    if result.exit_code != 0 {
        return Err(failed(format!("can't fill a sandbox: {}", String::from_utf8_lossy(&err))));
    }
    Ok(format!("1 GiB in {} files", String::from_utf8_lossy(&out).trim()))
}

/// The time of a snapshot, and to a child of it that can be used.
async fn fork(
    provider: &LocalProvider,
    sandbox: &Arc<dyn Sandbox>,
    round: usize,
) -> Result<(Duration, Duration)> {
    // Something new each time, or there would be nothing to seal.
    sandbox.write_file("changed", round.to_string().into(), None).await?;
    let snapshot = SnapshotId::new(format!("snap{round}")).expect("letters and digits");
    let id = name("child", round);
    let start = Instant::now();
    sandbox.snapshot(&snapshot, &Labels::new()).await?;
    let sealed = start.elapsed();
    let spec = SandboxSpec { root: Root::Snapshot(snapshot.clone()), ..SandboxSpec::default() };
    provider.create(&id, Attempt(1), &spec).await?;
    let made = start.elapsed();
    provider.destroy(&id).await?;
    provider.remove_snapshot(&snapshot).await?;
    Ok((sealed, made))
}

/// By whichever means this user has: how long a command lives that passes a limit as soon as it can, and then stays there.
async fn offenders(provider: &LocalProvider, options: &Options, report: &mut Report) -> Result<()> {
    const MEMORY: (&str, &str) = ("a command past its memory limit ends", "tail /dev/zero");
    const DISK: (&str, &str) =
        ("a command past its disk limit ends", "head -c 24M /dev/zero > f || exit 9; sleep 600");
    let mut spec = SandboxSpec::default();
    spec.limits.memory_bytes = 32 << 20;
    spec.limits.disk_bytes = 16 << 20;
    let sandbox = provider.create(&name("offender", 0), Attempt(1), &spec).await?;
    let mut times = Times::default();
    for _ in 0..(options.rounds / 10).max(1) {
        for (what, script) in [MEMORY, DISK] {
            let start = Instant::now();
            let (result, ..) = sandbox.exec(ExecRequest::shell(script)).await?.output().await?;
            if result.exit_code == 0 {
                return Err(failed(format!("nothing stopped {script:?}")));
            }
            times.add(what, start.elapsed());
            // By another one: who fills again what was over already is not stopped, as long as it does not grow.
            sandbox.exec(ExecRequest::new(["rm", "-f", "f"])).await?.output().await?;
        }
    }
    provider.destroy(sandbox.id()).await?;
    for (what, _) in [MEMORY, DISK] {
        let slowest = times.slowest(what).as_secs_f64() * 1e3;
        report.result(&format!("{what}, the slowest"), slowest, Unit::Ms, at_most(1000.0));
    }
    report.times(times);
    Ok(())
}

async fn use_once(provider: LocalProvider, id: SandboxId) -> Result<()> {
    let sandbox = provider.create(&id, Attempt(1), &SandboxSpec::default()).await?;
    run_true(&sandbox).await?;
    provider.destroy(&id).await
}

async fn burst(provider: &LocalProvider, report: &mut Report) -> Result<()> {
    let mut took = Vec::new();
    for round in 0..5 {
        provider.settle().await;
        let start = Instant::now();
        let mut all = tokio::task::JoinSet::new();
        for i in 0..AT_ONCE {
            all.spawn(use_once(provider.clone(), name("many", round * AT_ONCE + i)));
        }
        for done in all.join_all().await {
            done?;
        }
        took.push(start.elapsed());
    }
    let median = p50(&mut took).as_secs_f64() * 1e3;
    report.result("100 created, used and destroyed at once", median, Unit::Ms, at_most(500.0));
    Ok(())
}

async fn alive(provider: &LocalProvider, count: usize, report: &mut Report) -> Result<()> {
    /// Made at the same time.
    const STRIDE: usize = 16;
    provider.settle().await;
    let (before, start) = (available()?, Instant::now());
    let mut sandboxes = Vec::new();
    for first in (0..count).step_by(STRIDE) {
        let mut some = tokio::task::JoinSet::new();
        for i in first..count.min(first + STRIDE) {
            let provider = provider.clone();
            some.spawn(async move {
                let sandbox = provider.create(&name("idle", i), Attempt(1), &SandboxSpec::default()).await?;
                run_true(&sandbox).await?;
                Ok::<_, SandboxError>(sandbox)
            });
        }
        for sandbox in some.join_all().await {
            sandboxes.push(sandbox?);
        }
    }
    let made = start.elapsed().as_secs_f64() * 1e3;
    provider.settle().await;
    let each = before.saturating_sub(available()?) as f64 / 1024.0 / count as f64;
    report.result(&format!("{count} made and used"), made, Unit::Ms, Want::Nothing);
    report.result(&format!("memory of each of {count} idle ones"), each, Unit::KiB, at_most(768.0));
    let mut ends = tokio::task::JoinSet::new();
    for sandbox in sandboxes {
        let provider = provider.clone();
        ends.spawn(async move { provider.destroy(sandbox.id()).await });
    }
    for end in ends.join_all().await {
        end?;
    }
    Ok(())
}

/// Memory that the machine could still give out, in bytes.
fn available() -> Result<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").map_err(failed)?;
    let kib = text.lines().find_map(|line| line.strip_prefix("MemAvailable:")?.trim().strip_suffix(" kB"));
    kib.and_then(|kib| kib.trim().parse::<u64>().ok())
        .map(|kib| kib * 1024)
        .ok_or_else(|| failed("no MemAvailable"))
}
