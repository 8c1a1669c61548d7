//! Times of local sandboxes beside bubblewrap and a plain spawn, in one run. `cargo run --release --example bench [ROUNDS]`

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use forkyard_core::{Attempt, SandboxId};
use forkyard_sandbox::local::{LocalOptions, LocalProvider};
use forkyard_sandbox::{ExecRequest, NetworkMode, Provider, SandboxSpec};

fn report(name: &str, mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    let at = |part: f64| times[((times.len() - 1) as f64 * part) as usize];
    println!("{name:<40} p50 {:>7} µs   p95 {:>7} µs", at(0.5).as_micros(), at(0.95).as_micros());
    at(0.5)
}

fn plain(program: &str, args: &[&str]) -> Duration {
    let start = Instant::now();
    let ok = Command::new(program)
        .args(args)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    assert!(ok.is_ok_and(|status| status.success()), "{program}");
    start.elapsed()
}

fn spec() -> SandboxSpec {
    let mut spec = SandboxSpec::default();
    spec.network.mode = NetworkMode::None;
    spec
}

#[tokio::main]
async fn main() {
    let rounds: usize = std::env::args().nth(1).and_then(|n| n.parse().ok()).unwrap_or(200);
    let state = tempfile::tempdir().expect("a temporary folder");
    let provider = LocalProvider::new(state.path(), LocalOptions::default()).expect("a provider");
    let name = |i: usize| SandboxId::new(format!("bench{i}")).expect("an id");

    let warm = provider.create(&name(0), Attempt(1), &spec()).await.expect("a sandbox");
    let mut whole = Vec::new();
    let mut spawns = Vec::new();
    let mut bwraps = Vec::new();
    let mut execs = Vec::new();
    let mut creates = Vec::new();
    let mut destroys = Vec::new();
    let bwrap = [
        "--ro-bind",
        "/",
        "/",
        "--unshare-all",
        "--dev",
        "/dev",
        "--proc",
        "/proc",
        "--tmpfs",
        "/tmp",
        "true",
    ];
    let have_bwrap = Command::new("bwrap").arg("--version").stdout(Stdio::null()).status().is_ok();
    for i in 1..=rounds {
        spawns.push(plain("true", &[]));
        if have_bwrap {
            bwraps.push(plain("bwrap", &bwrap));
        }
        let start = Instant::now();
        let exec = warm.exec(ExecRequest::new(["true"])).await.expect("exec");
        assert_eq!(exec.output().await.expect("output").0.exit_code, 0);
        execs.push(start.elapsed());

        let start = Instant::now();
        let sandbox = provider.create(&name(i), Attempt(1), &spec()).await.expect("a sandbox");
        creates.push(start.elapsed());
        let exec = sandbox.exec(ExecRequest::new(["true"])).await.expect("exec");
        assert_eq!(exec.output().await.expect("output").0.exit_code, 0);
        let destroy = Instant::now();
        provider.destroy(&name(i)).await.expect("destroy");
        destroys.push(destroy.elapsed());
        whole.push(start.elapsed());
    }
    let spawn = report("plain spawn of true", spawns);
    let exec = report("exec of true in a live sandbox", execs);
    let whole = report("create + true + destroy", whole);
    report("  create", creates);
    report("  destroy", destroys);
    println!("exec / spawn: {:.2}", exec.as_secs_f64() / spawn.as_secs_f64());
    if have_bwrap {
        let bwrap = report("bwrap with all namespaces", bwraps);
        println!("create + true + destroy / bwrap: {:.2}", whole.as_secs_f64() / bwrap.as_secs_f64());
    }

    provider.destroy(&name(0)).await.expect("destroy");
    let start = Instant::now();
    let mut all = tokio::task::JoinSet::new();
    for i in 0..100 {
        let (provider, id) = (provider.clone(), name(10_000 + i));
        all.spawn(async move {
            let sandbox = provider.create(&id, Attempt(1), &spec()).await.expect("a sandbox");
            let exec = sandbox.exec(ExecRequest::new(["true"])).await.expect("exec");
            exec.output().await.expect("output");
            provider.destroy(&id).await.expect("destroy");
        });
    }
    all.join_all().await;
    println!("100 at once: {} ms", start.elapsed().as_millis());
    provider.settle().await;
}
