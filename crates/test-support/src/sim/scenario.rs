//! What a seed brings about: runs, processes, faults, and what users and fate do over time.

use std::time::Duration;

use forkyard_core::run::Command;
use forkyard_core::spec::{RunSpec, UntilVerified};
use forkyard_core::{ForkNum, Millis, RunId, Usd};
use forkyard_engine::Engine;
use forkyard_engine::embedded::Embedded;

use super::Process;
use super::world::Faults;

pub struct Scenario {
    pub seed: u64,
    pub processes: usize,
    pub host_limit: usize,
    pub faults: Faults,
    pub runs: Vec<(RunId, RunSpec)>,
    pub actions: Vec<Action>,
    pub crash_after: Option<u64>,
}

pub struct Action {
    pub after: Duration,
    pub what: What,
}

pub enum What {
    Crash(usize),
    Restart(usize),
    Stop(usize),
    Continue(usize),
    Command(RunId, Command),
    Message(RunId, ForkNum),
}

impl Scenario {
    /// One run of two forks on one process that dies after a given append and comes back.
    pub fn plain(crash_after: u64) -> Scenario {
        let mut spec = RunSpec::new("/repo", "p", "m", 2);
        spec.max_concurrent = 1;
        spec.verify = Some("true".into());
        spec.budget.run = Some(Usd(2000));
        let restart = |s| Action { after: Duration::from_secs(s), what: What::Restart(0) };
        Scenario {
            seed: crash_after,
            processes: 1,
            host_limit: 8,
            faults: Faults::default(),
            runs: vec![(RunId::new("run0").expect("a valid id"), spec)],
            actions: (0..20).map(|_| restart(5)).collect(),
            crash_after: Some(crash_after),
        }
    }

    pub fn random(seed: u64) -> Scenario {
        let mut rng = fastrand::Rng::with_seed(seed);
        // Most seeds have a few kinds of trouble, so that each kind is also seen alone.
        let mut rate = |max: u32| if rng.u8(0..3) == 0 { rng.u32(0..=max) } else { 0 };
        let faults = Faults {
            transient: rate(20),
            permanent: rate(4),
            sandbox_lost: rate(20),
            store_before: rate(10),
            store_after: rate(5),
            crash: rate(4),
            slow: rate(10),
            repeat: rate(50),
        };
        let processes = rng.usize(1..=3);
        let runs: Vec<(RunId, RunSpec)> = (0..rng.usize(1..=2))
            .map(|i| (RunId::new(format!("run{i}")).expect("a valid id"), spec(&mut rng)))
            .collect();
        let actions = (0..rng.usize(0..8)).map(|_| action(&mut rng, processes, &runs)).collect();
        Scenario { seed, processes, host_limit: rng.usize(1..=4), faults, runs, actions, crash_after: None }
    }
}

fn spec(rng: &mut fastrand::Rng) -> RunSpec {
    let n = rng.u32(1..=4);
    let mut s = RunSpec::new("/repo", "p", "m", n);
    s.max_concurrent = rng.u32(1..=3);
    s.fork_timeout = Millis(if rng.u8(0..4) == 0 { 1000 + rng.u64(0..20_000) } else { 7_200_000 });
    s.keep = rng.u8(0..5) == 0;
    s.linger = Millis(if rng.u8(0..4) == 0 { rng.u64(0..20_000) } else { 0 });
    s.verify = rng.bool().then(|| "true".to_string());
    s.budget.run = match rng.u8(0..4) {
        0 => Some(Usd(rng.u64(0..600))),
        1 => Some(Usd(rng.u64(600..3000))),
        _ => None,
    };
    s.budget.fork = (rng.u8(0..5) == 0).then(|| Usd(rng.u64(0..400)));
    if s.verify.is_some() && rng.u8(0..4) == 0 {
        let max_forks = n + rng.u32(0..3);
        s.until_verified = Some(UntilVerified { verified: rng.u32(1..=max_forks), max_forks });
    }
    s
}

fn action(rng: &mut fastrand::Rng, processes: usize, runs: &[(RunId, RunSpec)]) -> Action {
    let p = rng.usize(0..processes);
    let (run, spec) = &runs[rng.usize(0..runs.len())];
    let fork = rng.u32(0..spec.forks.len() as u32 + 1);
    let command = |c| What::Command(run.clone(), c);
    let what = match rng.u8(0..20) {
        0..=3 => What::Crash(p),
        4..=6 => What::Restart(p),
        7..=8 => What::Stop(p),
        9..=10 => What::Continue(p),
        11..=12 => command(Command::Pause),
        13 => command(Command::Resume),
        14 => command(Command::Cancel),
        15 => command(Command::CancelFork { fork }),
        16 => command(Command::AddForks { forks: vec![spec.forks[0].clone()] }),
        17 => command(Command::Detach),
        _ => What::Message(run.clone(), fork),
    };
    Action { after: Duration::from_millis(rng.u64(0..12_000)), what }
}

/// True if a process was found dead, or died by it.
pub(super) async fn act(action: &Action, user: &Embedded, procs: &mut [Process]) -> bool {
    match &action.what {
        What::Crash(p) => {
            let lived = procs[*p].proc.is_alive();
            procs[*p].kill();
            lived
        }
        What::Restart(p) => procs[*p].restart_if_dead(),
        What::Stop(p) => {
            procs[*p].proc.pause();
            false
        }
        What::Continue(p) => {
            procs[*p].proc.resume();
            false
        }
        // Refusals are answers.
        What::Command(run, command) => {
            let _ = user.command(run, command.clone(), None).await;
            false
        }
        What::Message(run, fork) => {
            let _ = user.message(run, *fork, serde_json::json!({"content": "hello"}), None).await;
            false
        }
    }
}
