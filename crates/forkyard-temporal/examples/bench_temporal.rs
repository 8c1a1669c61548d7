//! What Temporal costs, as Markdown tables: the same runs on the Temporal engine and on the embedded one, and bare workflows with
//! one activity beside them, against a real service with its database on disk; and the history of a fork, by its turns.
//!
//! Agents are the tests' (sandboxes are folders, models answer at once): what is left is the engines' own time.
//!
//! `cargo xtask bench temporal`, or `cargo run --release -p forkyard-temporal --example bench_temporal -- [--quick]`

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use forkyard_core::spec::{ModelKnown, RunSpec};
use forkyard_core::view::{RunOutcome, RunStatus};
use forkyard_core::{Millis, RunId};
use forkyard_engine::Engine;
use forkyard_engine::clock::Clock;
use forkyard_engine::embedded::{Embedded, EmbeddedConfig};
use forkyard_engine::sweep::SweepConfig;
use forkyard_store::{ProcessKind, Store};
use forkyard_temporal::{Pace, Service, ServiceConfig, TemporalEngine, WorkerConfig, work};
use prost::Message;
use temporalio_client::WorkflowStartOptions;
use temporalio_common::worker::WorkerDeploymentOptions;
use temporalio_macros::{activities, workflow, workflow_methods};
use temporalio_sdk::activities::{ActivityContext, ActivityError};
use temporalio_sdk::runtime::{PollerBehavior, RuntimeOptions};
use temporalio_sdk::{
    ActivityOptions, Runtime, Worker, WorkerOptions, WorkflowContext, WorkflowContextView, WorkflowResult,
};
use test_support::sim::files::{FileActivities, FileYard, host};
use test_support::temporal::Temporal;
use tokio_util::sync::CancellationToken;

type Failure = Box<dyn std::error::Error + Send + Sync>;

/// Forks of one run while throughput is measured; all of them may work at once.
const FORKS: u32 = 10;
/// What a host takes at once, on both engines.
const HOST_LIMIT: usize = 64;
/// As many as a worker of ours has.
const POLLERS: usize = 10;
const BARE_QUEUE: &str = "bare";
/// What a fork's history may come to without retries or messages, however many turns it takes.
const MAX_EVENTS: usize = 120;
const MAX_BYTES: usize = 100_000;

/// The least that a workflow can be: one activity that does nothing.
#[workflow]
struct Bare {
    number: u32,
}

#[workflow_methods]
impl Bare {
    #[init]
    fn new(_ctx: &WorkflowContextView, number: u32) -> Self {
        Bare { number }
    }
    #[run(name = "Bare")]
    async fn run(ctx: &mut WorkflowContext<Self>) -> WorkflowResult<u32> {
        let number = ctx.state(|s| s.number);
        let options = ActivityOptions::with_start_to_close_timeout(Duration::from_secs(60)).build();
        Ok(ctx.execute_activity(Echo::echo, number, options).await?)
    }
}

struct Echo;

#[activities]
impl Echo {
    #[activity(name = "echo")]
    async fn echo(self: Arc<Self>, _ctx: ActivityContext, number: u32) -> Result<u32, ActivityError> {
        Ok(number)
    }
}

fn spec(forks: u32, turns: usize) -> RunSpec {
    let mut spec = RunSpec::new("/repo", format!("turns={turns} pace=0"), "m", forks);
    spec.max_concurrent = forks;
    spec.verify = Some("true".into());
    spec.fork_timeout = Millis::minutes(600);
    spec
}

/// An engine with somebody at work for it in this process.
struct Bench {
    name: &'static str,
    store: Arc<dyn Store>,
    engine: Arc<dyn Engine>,
}

impl Bench {
    async fn submit(&self, name: &str, spec: RunSpec) -> Result<RunId, Failure> {
        Ok(self.engine.submit(RunId::new(format!("{}{name}", self.name))?, spec, None).await?)
    }

    async fn ended(&self, run: &RunId) -> Result<(), Failure> {
        let mut watch = self.store.watch(Some(run));
        loop {
            let view = self.store.run(run).await?.ok_or("it was stored")?;
            if view.status == RunStatus::Ended {
                assert_eq!(view.outcome, Some(RunOutcome::Success), "{run}: {:?}", view.error);
                return Ok(());
            }
            watch.changed().await;
        }
    }

    /// Milliseconds of runs with one fork, one after the other, from submission to end.
    async fn alone(&self, n: usize) -> Result<Vec<f64>, Failure> {
        let mut took = vec![];
        for i in 0..n {
            let begun = Instant::now();
            let run = self.submit(&format!("alone{i}"), spec(1, 1)).await?;
            self.ended(&run).await?;
            took.push(begun.elapsed().as_secs_f64() * 1e3);
        }
        Ok(sorted(took))
    }

    /// Milliseconds of those runs' forks, from start to end, as their machines recorded it.
    async fn forks_alone(&self, n: usize) -> Result<Vec<f64>, Failure> {
        let mut took = vec![];
        for i in 0..n {
            let run = RunId::new(format!("{}alone{i}", self.name))?;
            let fork = self.store.fork(&run, 0).await?.ok_or("it was started")?;
            took.push(fork.ended_at.ok_or("it has ended")?.since(fork.created_at).0 as f64);
        }
        Ok(sorted(took))
    }

    /// Forks per second of many runs at once.
    async fn together(&self, runs: u32) -> Result<f64, Failure> {
        let begun = Instant::now();
        let mut ids = vec![];
        for i in 0..runs {
            ids.push(self.submit(&format!("many{i}"), spec(FORKS, 1)).await?);
        }
        for run in &ids {
            self.ended(run).await?;
        }
        Ok(f64::from(runs * FORKS) / begun.elapsed().as_secs_f64())
    }
}

fn sorted(mut values: Vec<f64>) -> Vec<f64> {
    values.sort_by(f64::total_cmp);
    values
}

/// Of sorted values.
fn at(values: &[f64], part: f64) -> f64 {
    values[((values.len() - 1) as f64 * part).round() as usize]
}

/// Where one engine's store and sandboxes are.
struct Place {
    store: Arc<dyn Store>,
    hands: Arc<FileActivities>,
    desk: Embedded,
    folder: PathBuf,
}

async fn place(name: &str) -> Result<Place, Failure> {
    let folder = tempfile::tempdir()?;
    let path = folder.path().to_path_buf();
    test_support::keep_until_exit(folder);
    let store = forkyard_store::open(&format!("sqlite:{}", path.join("store.db").display())).await?;
    let hands = Arc::new(FileActivities {
        host: host(),
        folder: path.clone(),
        store: store.clone(),
        turns: 1,
        pace: Duration::ZERO,
    });
    let mut config = EmbeddedConfig::new(host(), name);
    config.host_limit = HOST_LIMIT;
    let models = Arc::new(|_: &str| ModelKnown::Priced);
    let desk = Embedded::new(store.clone(), hands.clone(), models, Clock::system(), config);
    Ok(Place { store, hands, desk, folder: path })
}

async fn embedded() -> Result<Bench, Failure> {
    let p = place("embedded").await?;
    let engine = p.desk.clone();
    tokio::spawn(async move { engine.work(ProcessKind::Worker, CancellationToken::new()).await });
    Ok(Bench { name: "embedded", store: p.store, engine: Arc::new(p.desk) })
}

async fn temporal(service: &Service) -> Result<Bench, Failure> {
    let p = place("temporal").await?;
    let config = WorkerConfig {
        host: host(),
        owner: "bench".into(),
        host_limit: HOST_LIMIT,
        beat: Duration::from_secs(30),
        grace: Duration::from_secs(5),
        heir: p.desk.clone(),
        counted: None,
        sweep: SweepConfig::default(),
    };
    let yard = Arc::new(FileYard(p.folder));
    let working = work(service.clone(), p.store.clone(), p.hands, yard, config, CancellationToken::new());
    tokio::spawn(async move {
        if let Err(e) = working.await {
            eprintln!("the worker has ended: {e}");
            std::process::exit(1);
        }
    });
    let engine = TemporalEngine::new(p.desk, service.clone());
    Ok(Bench { name: "temporal", store: p.store, engine: Arc::new(engine) })
}

/// A worker of bare workflows, on a thread of its own.
fn bare_worker(service: &Service) -> Result<(), Failure> {
    let runtime = Runtime::from_current_tokio(RuntimeOptions::builder().build()?)?;
    let mut options = WorkerOptions::new(BARE_QUEUE)
        .deployment_options(WorkerDeploymentOptions::from_build_id("bench".into()))
        .activity_task_poller_behavior(PollerBehavior::SimpleMaximum(POLLERS))
        .workflow_task_poller_behavior(PollerBehavior::SimpleMaximum(POLLERS))
        .build();
    options.register_workflow::<Bare>()?;
    options.register_activities(Echo);
    let mut worker = Worker::new(&runtime, service.client().clone(), options)?;
    let handle = tokio::runtime::Handle::current();
    std::thread::spawn(move || {
        // The runtime lives as long as its worker.
        let _runtime = runtime;
        let local = tokio::task::LocalSet::new();
        if let Err(e) = handle.block_on(local.run_until(worker.run())) {
            eprintln!("the bare worker has ended: {e}");
            std::process::exit(1);
        }
    });
    Ok(())
}

async fn bare(service: &Service, number: u32) -> Result<(), Failure> {
    let options = WorkflowStartOptions::new(BARE_QUEUE, format!("bare/{number}")).build();
    let handle = service.client().start_workflow(Bare::run, number, options).await?;
    assert_eq!(handle.get_result(Default::default()).await?, number);
    Ok(())
}

async fn bare_alone(service: &Service, n: usize) -> Result<Vec<f64>, Failure> {
    let mut took = vec![];
    for i in 0..n {
        let begun = Instant::now();
        bare(service, i as u32).await?;
        took.push(begun.elapsed().as_secs_f64() * 1e3);
    }
    Ok(sorted(took))
}

/// Workflows per second, as many at once as the engines have forks.
async fn bare_together(service: &Service, n: u32) -> Result<f64, Failure> {
    let begun = Instant::now();
    let all = (0..n).map(|i| bare(service, 1_000_000 + i));
    futures::future::try_join_all(all).await?;
    Ok(f64::from(n) / begun.elapsed().as_secs_f64())
}

/// Events and bytes of a fork's history.
async fn history(service: &Service, bench: &Bench, turns: usize) -> Result<(usize, usize), Failure> {
    let run = bench.submit(&format!("turns{turns}"), spec(1, turns)).await?;
    bench.ended(&run).await?;
    // The run has ended in the store; its fork's workflow did so before.
    let events = service.fork_handle(&run, 0).fetch_history(Default::default()).into_events().await?;
    Ok((events.len(), events.iter().map(Message::encoded_len).sum()))
}

#[tokio::main]
async fn main() -> Result<(), Failure> {
    let quick = std::env::args().any(|a| a == "--quick");
    // What these agents leave is a list of their turns, and part of the history: at a thousand it alone would be most of it.
    let (alone, runs, turns) = if quick { (5, 2, 100) } else { (30, 20, 400) };
    let Some(server) = tokio::task::spawn_blocking(Temporal::start).await? else {
        return Err("there is no Temporal here: cargo xtask setup".into());
    };
    let config = ServiceConfig {
        address: server.address(),
        namespace: "default".into(),
        task_queue: "bench".into(),
        identity: "bench".into(),
        pace: Pace::default(),
        ..ServiceConfig::default()
    };
    let service = Service::connect(&config).await?;
    let (on_temporal, on_embedded) = (temporal(&service).await?, embedded().await?);
    bare_worker(&service)?;
    // Once without looking: connections, caches, pollers.
    for bench in [&on_temporal, &on_embedded] {
        let run = bench.submit("first", spec(1, 1)).await?;
        bench.ended(&run).await?;
    }
    bare(&service, u32::MAX).await?;

    let (t, e, b) = (
        on_temporal.alone(alone).await?,
        on_embedded.alone(alone).await?,
        bare_alone(&service, alone).await?,
    );
    let (tf, ef) = (on_temporal.forks_alone(alone).await?, on_embedded.forks_alone(alone).await?);
    let rates = (
        on_temporal.together(runs).await?,
        on_embedded.together(runs).await?,
        bare_together(&service, runs * FORKS).await?,
    );
    println!(
        "| figure | Temporal engine | embedded engine | bare workflow, one activity |\n|---|---|---|---|"
    );
    let many = runs * FORKS;
    println!(
        "| {many} forks in {runs} runs at once | {:.1} /s | {:.1} /s | {:.1} /s |",
        rates.0, rates.1, rates.2
    );
    for (part, word) in [(0.5, "median"), (0.95, "95 %")] {
        let line = [at(&t, part), at(&e, part), at(&b, part)];
        println!(
            "| a run of one fork alone, {word} | {:.1} ms | {:.1} ms | {:.1} ms |",
            line[0], line[1], line[2]
        );
    }
    let (fork, same) = (at(&tf, 0.5), at(&ef, 0.5));
    println!("| its fork, start to end, median | {fork:.0} ms | {same:.0} ms | |");
    println!("| added to a fork over the embedded engine, median | {:.0} ms | | |", fork - same);
    println!("| added to a fork over a bare workflow, median | {:.0} ms | | |", fork - at(&b, 0.5));
    println!("\n| history of a fork | events | bytes |\n|---|---|---|");
    for turns in [1, turns] {
        let (events, bytes) = history(&service, &on_temporal, turns).await?;
        println!("| {turns} turns (limit {MAX_EVENTS}, {MAX_BYTES}) | {events} | {bytes} |");
        if events >= MAX_EVENTS || bytes >= MAX_BYTES {
            return Err(format!("{turns} turns: {events} events, {bytes} bytes are too much").into());
        }
    }
    Ok(())
}
