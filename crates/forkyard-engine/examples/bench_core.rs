//! Figures of the core as a Markdown table: a machine's answer to one input, a long log rebuilt through the store, ten
//! thousand live forks in one process.
//!
//! `cargo run --release -p forkyard-engine --example bench_core -- [--quick]`

use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use forkyard_core::fork::{Fork, ForkInput};
use forkyard_core::run::{Command, Run, RunInput, RunStep};
use forkyard_core::spec::{ModelKnown, RunSpec};
use forkyard_core::task::*;
use forkyard_core::view::DiffStat;
use forkyard_core::{HostId, Millis, RunId, SnapshotId, Timestamp};
use forkyard_engine::activity::{Activities, Job};
use forkyard_engine::clock::Clock;
use forkyard_engine::embedded::{Embedded, EmbeddedConfig};
use forkyard_engine::{Engine, log};
use forkyard_store::{Append, CreateRun, ProcessKind, Store, StreamId};
use tokio_util::sync::CancellationToken;

type Failure = Box<dyn std::error::Error + Send + Sync>;

const START: Timestamp = Timestamp(1_700_000_000_000);
/// Events of one append while the long log is written.
const BATCH: usize = 1000;
/// An agent says that it lives, as often as the real one.
const BEAT: Duration = Duration::from_secs(30);

fn host() -> HostId {
    HostId::new("bench").expect("a valid id")
}

fn run_id(i: usize) -> RunId {
    RunId::new(format!("run{i}")).expect("a valid id")
}

fn spec(forks: u32) -> RunSpec {
    let mut spec = RunSpec::new("/repo", "fix the failing test", "script", forks);
    spec.max_concurrent = forks;
    spec.verify = Some("true".into());
    spec
}

/// The answer of an activity that has no trouble.
fn good(run: &RunId, task: &Task) -> TaskResult {
    let verdict = || Verdict { passed: Some(true), ..Default::default() };
    Ok(match task.kind() {
        TaskKind::PrepareBase => Output::Base(Base {
            commit: "c0".into(),
            branch: "main".into(),
            snapshot: SnapshotId::new(format!("{run}base")).expect("a valid id"),
            host: host(),
        }),
        TaskKind::VerifyBase => Output::BaseVerified(verdict()),
        TaskKind::CheckBudget => Output::BudgetOk,
        TaskKind::CreateSandbox => Output::Created { host: host() },
        TaskKind::HealthCheck => Output::Healthy,
        TaskKind::RunAgent => Output::Agent(AgentReport { turns: 3, ..Default::default() }),
        TaskKind::Collect => Output::Collected(Collected {
            commit: "c1".into(),
            diff: DiffStat { files: 1, added: 2, removed: 1 },
            from_checkpoint: false,
            captured: vec![],
            edited_tests: vec![],
            ..Default::default()
        }),
        TaskKind::Verify => Output::Verified(verdict()),
        TaskKind::Publish => Output::Published { reference: "refs/forkyard/x".into() },
        TaskKind::Destroy => Output::Destroyed,
    })
}

fn performs(effects: &[Effect], into: &mut Vec<Dispatch>) {
    into.extend(effects.iter().filter_map(|e| match e {
        Effect::Perform(d) => Some(d.clone()),
        Effect::Cancel { .. } | Effect::SetTimer { .. } | Effect::ClearTimer { .. } | Effect::Fork { .. } => {
            None
        }
    }));
}

/// A run whose base is ready, and its steps so far.
fn started(forks: u32) -> (Run, Vec<RunStep>) {
    let (mut run, step) = Run::submit(START, run_id(0), spec(forks));
    let mut steps = vec![step, run.handle(START, RunInput::Takeover { commands: vec![] })];
    let mut tasks = vec![];
    performs(&steps[1].effects, &mut tasks);
    while let Some(d) = tasks.pop() {
        let result = good(run.id(), &d.task);
        let step = run.handle(START, RunInput::Outcome { serial: d.serial, result });
        performs(&step.effects, &mut tasks);
        steps.push(step);
    }
    (run, steps)
}

/// Microseconds for one input: whole lives of forks, and commands to a run of a hundred live forks.
fn handle(lives: usize) -> (f64, f64) {
    let (mut run, _) = started(100);
    let (mut spent, mut inputs) = (Duration::ZERO, 0_u32);
    for _ in 0..lives {
        let plan = run.fork_plan(0).expect("the base is ready");
        let (mut fork, step) = Fork::start(START, plan, Wish::default());
        let mut tasks = vec![];
        performs(&step.effects, &mut tasks);
        while let Some(d) = tasks.pop() {
            let input = ForkInput::Outcome { serial: d.serial, result: good(run.id(), &d.task) };
            let begun = Instant::now();
            let step = black_box(fork.handle(START, black_box(input)));
            spent += begun.elapsed();
            inputs += 1;
            performs(&step.effects, &mut tasks);
        }
        assert!(fork.is_ended());
    }
    let per_fork = spent.as_secs_f64() * 1e6 / f64::from(inputs);
    let begun = Instant::now();
    for _ in 0..lives {
        black_box(run.handle(START, black_box(RunInput::Command(Command::Pause))));
        black_box(run.handle(START, black_box(RunInput::Command(Command::Resume))));
    }
    (per_fork, begun.elapsed().as_secs_f64() * 1e6 / (2 * lives) as f64)
}

/// Seconds to rebuild a run of so many events from the store.
async fn rebuild(store: &dyn Store, events: usize) -> Result<f64, Failure> {
    let (mut run, steps) = started(4);
    let stored = |steps: Vec<RunStep>| {
        let all = steps.into_iter().flat_map(|s| s.events);
        all.map(|e| log::stored(START, &e, None)).collect::<Vec<_>>()
    };
    let first = stored(steps);
    let mut seq = first.len() as u64;
    let new = CreateRun { run: run.id().clone(), key: None, events: first, views: run.views() };
    store.create_run(new).await?;
    let lease =
        store.acquire(run.id(), "bench", Duration::from_secs(3600)).await?.ok_or("nobody else has it")?;
    let mut batch: Vec<RunStep> = vec![];
    while (seq as usize) < events {
        for command in [Command::Pause, Command::Resume] {
            batch.push(run.handle(START, RunInput::Command(command)));
        }
        if batch.iter().map(|s| s.events.len()).sum::<usize>() >= BATCH {
            let append = Append {
                stream: StreamId::Run(run.id().clone()),
                lease: lease.token,
                expected: seq,
                events: stored(std::mem::take(&mut batch)),
                views: run.views(),
                consume: vec![],
            };
            seq = store.append(append).await?.seq;
        }
    }
    let begun = Instant::now();
    let (again, length) = log::load_run(store, run.id()).await?.ok_or("it was stored")?;
    let took = begun.elapsed().as_secs_f64();
    assert_eq!((length, again.views()), (seq, run.views()));
    Ok(took)
}

/// Agents that only live.
struct Idle {
    live: AtomicUsize,
}

#[async_trait]
impl Activities for Idle {
    async fn perform(&self, job: Job) -> TaskResult {
        if job.task.kind() != TaskKind::RunAgent {
            return good(&job.run, &job.task);
        }
        self.live.fetch_add(1, Ordering::Relaxed);
        loop {
            job.heartbeat.beat();
            tokio::select! {
                () = job.cancel.cancelled() => break,
                () = tokio::time::sleep(BEAT) => {}
            }
        }
        self.live.fetch_sub(1, Ordering::Relaxed);
        Err(TaskError::new(ErrorClass::Cancelled, "stopped"))
    }
}

fn resident_bytes() -> u64 {
    let pages = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    pages.split(' ').nth(1).and_then(|p| p.parse::<u64>().ok()).unwrap_or(0) * 4096
}

struct Live {
    seconds: f64,
    bytes_per_fork: f64,
    /// From a pause to its event, while all the others live.
    pause_ms: f64,
}

async fn live(store: Arc<dyn Store>, forks: usize) -> Result<Live, Failure> {
    let idle = Arc::new(Idle { live: AtomicUsize::new(0) });
    let mut config = EmbeddedConfig::new(host(), "bench");
    config.host_limit = forks;
    let models = Arc::new(|_: &str| ModelKnown::Priced);
    let engine = Embedded::new(store.clone(), idle.clone(), models, Clock::system(), config);
    let (before, begun, stop) = (resident_bytes(), Instant::now(), CancellationToken::new());
    for i in 0..forks / 100 {
        let mut spec = spec(100);
        spec.fork_timeout = Millis::minutes(600);
        spec.verify = None;
        engine.submit(run_id(i + 1), spec, None).await?;
    }
    let work = tokio::spawn({
        let (engine, stop) = (engine.clone(), stop.clone());
        async move { engine.work(ProcessKind::Worker, stop).await }
    });
    while idle.live.load(Ordering::Relaxed) < forks {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let seconds = begun.elapsed().as_secs_f64();
    let bytes_per_fork = resident_bytes().saturating_sub(before) as f64 / forks as f64;
    let run = run_id(1);
    let mut watch = store.watch(Some(&run));
    let asked = Instant::now();
    engine.command(&run, Command::Pause, None).await?;
    while !store.run(&run).await?.is_some_and(|v| v.paused) {
        watch.changed().await;
    }
    let pause_ms = asked.elapsed().as_secs_f64() * 1e3;
    work.abort();
    Ok(Live { seconds, bytes_per_fork, pause_ms })
}

#[tokio::main]
async fn main() -> Result<(), Failure> {
    let quick = std::env::args().any(|a| a == "--quick");
    let (lives, events, forks) = if quick { (200, 5_000, 1_000) } else { (20_000, 100_000, 10_000) };
    let folder = tempfile::tempdir()?;
    let open = |name: &str| format!("sqlite:{}", folder.path().join(name).display());
    println!("| figure | value |\n|---|---|");
    let (per_fork, per_run) = handle(lives);
    println!("| `handle`, one input of a fork | {per_fork:.2} µs |");
    println!("| `handle`, one command to a run of 100 live forks | {per_run:.2} µs |");
    let store = forkyard_store::open(&open("long.db")).await?;
    let seconds = rebuild(&*store, events).await?;
    println!("| rebuild a run of {events} events from SQLite | {seconds:.2} s |");
    let store = forkyard_store::open(&open("live.db")).await?;
    let held = live(store, forks).await?;
    println!("| {forks} live forks in one process, from submission | {:.1} s |", held.seconds);
    println!("| memory of one live fork | {:.1} KiB |", held.bytes_per_fork / 1024.0);
    println!("| a pause among them, from command to event | {:.1} ms |", held.pause_ms);
    Ok(())
}
