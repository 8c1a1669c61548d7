//! Deterministic simulation: one seed makes a world (runs, processes, faults, users), virtual time makes it fast, and the real
//! machines and the real embedded engine live in it. Whatever a seed does can be done again by that seed.
//!
//! What is simulated: the outside world (sandboxes, a model that bills, git refs), processes that crash or stand still, a store
//! that is slow, fails before or after it wrote, and users who pause, cancel, detach, add forks and send messages. What is
//! real: `Run`, `Fork`, `Embedded`, leases, timers, retries, the sweep.

mod activities;
mod check;
pub mod files;
mod process;
mod scenario;
mod store;
mod world;

use std::sync::Arc;
use std::time::Duration;

use forkyard_core::view::{ForkOutcome, RunOutcome};
use forkyard_core::{Millis, RunId, Timestamp};
use forkyard_engine::clock::Clock;
use forkyard_engine::embedded::{Embedded, EmbeddedConfig};
use forkyard_engine::{Engine, sweep};
use forkyard_store::{ProcessKind, SandboxQuery, Store};
use tokio_util::sync::CancellationToken;

use crate::memstore::{MemStore, StoreBug};
use activities::{SimActivities, SimYard};
use process::Proc;
use scenario::Scenario;
use store::{Shadow, SimStore};
use world::World;

/// A bug that is planted to see that it is found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bug {
    LostEvent,
    DoubleEffect,
    LeakedSandbox,
    OverspentBudget,
    StaleAttempt,
    SentWhilePaused,
}

impl Bug {
    pub const ALL: [Bug; 6] = [
        Bug::LostEvent,
        Bug::DoubleEffect,
        Bug::LeakedSandbox,
        Bug::OverspentBudget,
        Bug::StaleAttempt,
        Bug::SentWhilePaused,
    ];

    fn in_store(self) -> Option<StoreBug> {
        match self {
            Bug::LostEvent => Some(StoreBug::LosesEvents),
            Bug::OverspentBudget => Some(StoreBug::Overspends),
            Bug::StaleAttempt => Some(StoreBug::AcceptsStaleAttempts),
            Bug::SentWhilePaused => Some(StoreBug::SendsWhilePaused),
            Bug::DoubleEffect | Bug::LeakedSandbox => None,
        }
    }
}

/// What a seed did.
#[derive(Debug, Clone, Default)]
pub struct Report {
    pub seed: u64,
    pub events: u64,
    pub crashes: u64,
    pub virtual_ms: u64,
    /// What became of each run, and of its forks in order.
    pub outcomes: Vec<(Option<RunOutcome>, Vec<Option<ForkOutcome>>)>,
    /// Empty: all invariants held.
    pub violations: Vec<String>,
}

impl Report {
    /// One line that does it again.
    pub fn reproduction(&self) -> String {
        format!(
            "cargo run --release -p test-support --features sim --example simulate -- --seed {}",
            self.seed
        )
    }
}

/// Nothing takes longer than this in virtual time; a run that does hangs.
const HORIZON: Duration = Duration::from_secs(2 * 3600);

/// Runs one seed to its end.
pub fn run_seed(seed: u64, bug: Option<Bug>) -> Report {
    run(Scenario::random(seed), bug)
}

/// The plain scenario of one run, whose process dies right after its `append`th append.
pub fn crash_after(append: u64) -> Report {
    run(Scenario::plain(append), None)
}

fn run(scenario: Scenario, bug: Option<Bug>) -> Report {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .expect("a runtime without IO can always be made");
    runtime.block_on(simulate(scenario, bug))
}

async fn simulate(scenario: Scenario, bug: Option<Bug>) -> Report {
    let start = tokio::time::Instant::now();
    let seed = scenario.seed;
    let bugs: Vec<StoreBug> = bug.into_iter().filter_map(Bug::in_store).collect();
    let mem = Arc::new(MemStore::new(&bugs));
    let world = Arc::new(World::new(seed, bug, scenario.faults.clone()));
    let shadow = Arc::new(Shadow::default());
    let clock = Clock::at(Timestamp(1_700_000_000_000));

    let mut procs: Vec<Process> = vec![];
    for i in 0..scenario.processes {
        procs.push(Process::start(i, &scenario, &mem, &world, &shadow, clock));
    }
    // Somebody outside of all processes: submits, commands, looks.
    let outside: Arc<dyn Store> = mem.clone();
    let user = Embedded::new(
        outside.clone(),
        Arc::new(SimActivities::new(world.clone(), Proc::immortal(), outside.clone())),
        Arc::new(|_| forkyard_core::spec::ModelKnown::Priced),
        clock,
        EmbeddedConfig::new(world.host(), "user"),
    );
    let mut violations: Vec<String> = vec![];
    for (id, spec) in &scenario.runs {
        if let Err(e) = user.submit(id.clone(), spec.clone(), None).await {
            violations.push(format!("a valid run was refused: {e}"));
        }
    }
    let mut crashes = 0;
    for action in &scenario.actions {
        tokio::time::sleep(action.after).await;
        crashes += u64::from(scenario::act(action, &user, &mut procs).await);
    }
    // The user comes back and everybody works again: every run has to end now.
    for p in &procs {
        p.proc.resume();
    }
    let ids: Vec<RunId> = scenario.runs.iter().map(|(id, _)| id.clone()).collect();
    let deadline = start + HORIZON;
    while tokio::time::Instant::now() < deadline {
        for p in &mut procs {
            if p.restart_if_dead() {
                crashes += 1;
            }
        }
        let mut live = false;
        for id in &ids {
            let view = outside.run(id).await.ok().flatten();
            if view.is_some_and(|v| v.outcome.is_none()) {
                live = true;
                let _ = user.command(id, forkyard_core::run::Command::Resume, None).await;
            }
        }
        if !live {
            break;
        }
        tokio::time::sleep(Duration::from_secs(20)).await;
    }
    // Whoever was paused gets to do what it still wanted to, then all goes home and the sweep has the last word.
    tokio::time::sleep(Duration::from_secs(30)).await;
    for p in &mut procs {
        p.kill();
    }
    world.be_kind();
    check::check_leaks(&outside.sandboxes(&SandboxQuery::default()).await.unwrap_or_default(), &world);
    let yard = SimYard(world.clone());
    for _ in 0..3 {
        let late = clock.now() + Millis::minutes(600);
        if let Err(e) = sweep::sweep(&*outside, &yard, &world.host(), late, Millis::minutes(180)).await {
            violations.push(format!("the sweep failed: {e}"));
        }
    }
    let lasted = Millis(start.elapsed().as_millis() as u64);
    let events = check::check(&mem, &world, &shadow, &scenario, lasted, &mut violations).await;
    let mut outcomes = vec![];
    for id in &ids {
        let run = outside.run(id).await.ok().flatten().and_then(|v| v.outcome);
        let forks = outside.forks(id).await.unwrap_or_default();
        outcomes.push((run, forks.into_iter().map(|f| f.outcome).collect()));
    }
    let virtual_ms = start.elapsed().as_millis() as u64;
    Report { seed, events, crashes, virtual_ms, outcomes, violations }
}

/// A worker process: an engine, its store connection, and the task it runs in.
pub(crate) struct Process {
    pub proc: Arc<Proc>,
    make: Box<dyn Fn(Arc<Proc>) -> tokio::task::JoinHandle<()> + Send + Sync>,
    task: tokio::task::JoinHandle<()>,
}

impl Process {
    fn start(
        i: usize,
        scenario: &Scenario,
        mem: &Arc<MemStore>,
        world: &Arc<World>,
        shadow: &Arc<Shadow>,
        clock: Clock,
    ) -> Process {
        let (mem, world, shadow) = (mem.clone(), world.clone(), shadow.clone());
        let (host_limit, crash_after, seed) = (scenario.host_limit, scenario.crash_after, scenario.seed);
        let make = move |proc: Arc<Proc>| {
            // Every process finds the wall clock where somebody has put it in the meantime.
            let mut rng = fastrand::Rng::with_seed(seed ^ ((i as u64) << 32) ^ (proc.generation << 40));
            let jumped = clock.now() - Millis::minutes(12 * 60) + Millis::minutes(rng.u64(0..24 * 60));
            let clock = Clock::at(jumped);
            let store: Arc<dyn Store> = Arc::new(SimStore::new(
                mem.clone(),
                world.clone(),
                shadow.clone(),
                proc.clone(),
                crash_after,
            ));
            let activities = Arc::new(SimActivities::new(world.clone(), proc.clone(), store.clone()));
            let mut config = EmbeddedConfig::new(world.host(), format!("p{i}g{}", proc.generation));
            config.host_limit = host_limit;
            let models = Arc::new(|_: &str| forkyard_core::spec::ModelKnown::Priced);
            let engine = Embedded::new(store, activities, models, clock, config);
            tokio::spawn(async move { engine.work(ProcessKind::Worker, CancellationToken::new()).await })
        };
        let proc = Proc::new(0);
        let task = make(proc.clone());
        Process { proc, make: Box::new(make), task }
    }
    /// Everything of it is gone at once, at whatever point it was.
    pub fn kill(&mut self) {
        self.proc.die();
        self.task.abort();
    }
    /// True if it had died.
    pub fn restart_if_dead(&mut self) -> bool {
        if self.proc.is_alive() {
            return false;
        }
        self.task.abort();
        self.proc = Proc::new(self.proc.generation + 1);
        self.task = (self.make)(self.proc.clone());
        true
    }
}
