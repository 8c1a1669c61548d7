//! Real driver processes on real stores, killed, stopped, out of disk and cut off: every run ends as if nothing had
//! happened.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use forkyard_core::spec::RunSpec;
use forkyard_core::view::{ForkOutcome, RunOutcome, RunStatus, SandboxState};
use forkyard_core::{ForkNum, Millis, RunId, Timestamp, Usd};
use forkyard_engine::{Engine, sweep};
use forkyard_store::{ProcessKind, SandboxQuery, Store, StoreError};
use rustix::process::Signal;
use test_support::postgres::Postgres;
use test_support::sim::files::{self, COST, FileYard};
use tokio_util::sync::CancellationToken;

use super::child::{Driver, Plan, fill};

/// Long enough for the slowest machine; a test that hangs says so.
const PATIENCE: Duration = Duration::from_secs(300);
const BUDGET: Usd = Usd(1_000_000);

struct Scale {
    kills: usize,
    runs: u32,
    forks: u32,
    at_once: u32,
    turns: usize,
    pace: Duration,
    host_limit: usize,
}

/// Runs have to last longer than all kills together, at 300 to 900 ms each.
fn scale() -> Scale {
    let full = std::env::var("FORKYARD_TEST_SCALE").is_ok_and(|s| s == "full");
    let ms = Duration::from_millis;
    if full {
        Scale { kills: 50, runs: 20, forks: 8, at_once: 2, turns: 40, pace: ms(300), host_limit: 0 }
    } else {
        Scale { kills: 5, runs: 4, forks: 4, at_once: 1, turns: 10, pace: ms(100), host_limit: 0 }
    }
}

/// What a run came to; the same for every way that leads there.
#[derive(Debug, PartialEq)]
struct Result {
    outcome: Option<RunOutcome>,
    ranking: Vec<ForkNum>,
    winner: Option<ForkNum>,
    forks: Vec<(Option<ForkOutcome>, Option<bool>, u32, String)>,
}

struct Trial {
    plan: Plan,
    store: Arc<dyn Store>,
    runs: Vec<RunId>,
}

impl Trial {
    async fn new(url: String, scale: &Scale) -> Trial {
        let folder = tempfile::tempdir().unwrap();
        let path: PathBuf = folder.path().into();
        test_support::keep_until_exit(folder);
        let plan =
            Plan { url, folder: path, turns: scale.turns, pace: scale.pace, host_limit: scale.host_limit };
        Trial::submit(plan, scale).await
    }

    async fn submit(plan: Plan, scale: &Scale) -> Trial {
        let store = forkyard_store::open(&plan.url).await.unwrap();
        let engine = plan.engine(store.clone(), "submitter");
        let mut runs = vec![];
        for i in 0..scale.runs {
            let mut spec = RunSpec::new("/repo", "p", "m", scale.forks);
            spec.max_concurrent = scale.at_once;
            spec.verify = Some("true".into());
            spec.budget.run = Some(BUDGET);
            let id = RunId::new(format!("run{i}")).unwrap();
            runs.push(engine.submit(id, spec, None).await.unwrap());
        }
        Trial { plan, store, runs }
    }

    /// By one engine in this process that nobody disturbs.
    async fn undisturbed(scale: &Scale) -> BTreeMap<RunId, Result> {
        let quick = Scale { pace: Duration::from_millis(1), ..*scale };
        let trial = Trial::new(sqlite_url(), &quick).await;
        let stop = CancellationToken::new();
        let engine = trial.plan.engine(trial.store.clone(), "undisturbed");
        let work = tokio::spawn({
            let stop = stop.clone();
            async move { engine.work(ProcessKind::Worker, stop).await }
        });
        trial.ended().await;
        stop.cancel();
        work.await.unwrap();
        trial.results().await
    }

    async fn live(&self) -> usize {
        let mut live = 0;
        for run in &self.runs {
            // A store that is away says nothing of the run.
            let ended =
                self.store.run(run).await.ok().flatten().is_some_and(|v| v.status == RunStatus::Ended);
            live += usize::from(!ended);
        }
        live
    }

    async fn ended(&self) {
        until("all runs end", || async { self.live().await == 0 }).await;
    }

    async fn position(&self) -> u64 {
        let mut sum = 0;
        for run in &self.runs {
            sum += self.store.last_position(run).await.unwrap_or(0);
        }
        sum
    }

    async fn results(&self) -> BTreeMap<RunId, Result> {
        let mut all = BTreeMap::new();
        for run in &self.runs {
            let view = self.store.run(run).await.unwrap().unwrap();
            let forks = self.store.forks(run).await.unwrap().into_iter().map(|f| {
                let file = self.plan.folder.join(format!("results/{run}-{}", f.fork));
                (f.outcome, f.verified, f.turns, std::fs::read_to_string(file).unwrap_or_default())
            });
            let forks = forks.collect();
            all.insert(
                run.clone(),
                Result { outcome: view.outcome, ranking: view.ranking, winner: view.winner, forks },
            );
        }
        all
    }

    /// Everything that has to hold at the end, however it was reached.
    async fn check(&self, scale: &Scale) {
        assert_eq!(self.results().await, Trial::undisturbed(scale).await);
        for run in &self.runs {
            // Each command once, in order.
            let calls: String = (0..scale.turns).map(|t| format!("call-{t} ")).collect();
            for fork in 0..scale.forks {
                let file = self.plan.folder.join(format!("results/{run}-{fork}"));
                assert_eq!(std::fs::read_to_string(file).unwrap(), calls, "{run}/{fork}");
            }
            let balance = self.store.balance(run).await.unwrap();
            assert_eq!(balance.reserved, Usd::ZERO, "{run} has ended and holds no money");
            let least = u64::from(scale.forks) * scale.turns as u64 * COST.0;
            assert!(balance.spent.0 >= least && balance.spent <= BUDGET, "{balance:?}");
        }
        let left: Vec<_> = std::fs::read_dir(self.plan.folder.join("sandboxes")).unwrap().collect();
        assert!(left.is_empty(), "leaked: {left:?}");
        for sandbox in self.store.sandboxes(&SandboxQuery::default()).await.unwrap() {
            assert_eq!(sandbox.state, SandboxState::Destroyed, "{sandbox:?}");
        }
    }

    /// Kills one driver after the other at odd moments; each is replaced at once.
    async fn kill_at_random(&self, scale: &Scale, drivers: &mut [Driver]) {
        let mut rng = fastrand::Rng::with_seed(7);
        for kill in 0..scale.kills {
            let before = self.position().await;
            until("somebody drives", || async { self.position().await > before }).await;
            tokio::time::sleep(Duration::from_millis(rng.u64(300..900))).await;
            assert!(self.live().await > 0, "all runs had ended before kill {kill}: they are too short");
            let victim = rng.usize(0..drivers.len());
            drivers[victim].kill();
            drivers[victim] = self.plan.driver();
        }
    }
}

async fn until<F: Future<Output = bool>>(what: &str, mut ask: impl FnMut() -> F) {
    let wait = async {
        while !ask().await {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(PATIENCE, wait).await.unwrap_or_else(|_| panic!("{what}: not within {PATIENCE:?}"));
}

fn sqlite_url() -> String {
    let folder = tempfile::tempdir().unwrap();
    let url = format!("sqlite:{}", folder.path().join("store.db").display());
    test_support::keep_until_exit(folder);
    url
}

async fn drivers(trial: &Trial, n: usize) -> Vec<Driver> {
    (0..n).map(|_| trial.plan.driver()).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_drivers_change_nothing_on_sqlite() {
    let scale = scale();
    let trial = Trial::new(sqlite_url(), &scale).await;
    let mut drivers = drivers(&trial, 2).await;
    trial.kill_at_random(&scale, &mut drivers).await;
    trial.ended().await;
    trial.check(&scale).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_drivers_change_nothing_on_postgres() {
    let scale = scale();
    let url = tokio::task::spawn_blocking(|| Postgres::shared().database()).await.unwrap();
    let trial = Trial::new(url, &scale).await;
    let mut drivers = drivers(&trial, 3).await;
    trial.kill_at_random(&scale, &mut drivers).await;
    trial.ended().await;
    trial.check(&scale).await;
}

/// At the end at least 80 % of the limit are spent, whatever is lost with a driver; the limit itself is never reached.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_limit_is_warned_of_once_although_drivers_are_killed() {
    let scale = Scale {
        kills: 3,
        runs: 0,
        forks: 2,
        at_once: 1,
        turns: 100,
        pace: Duration::from_millis(20),
        host_limit: 0,
    };
    let mut trial = Trial::new(sqlite_url(), &scale).await;
    let spent = u64::from(scale.forks) * scale.turns as u64 * COST.0;
    let mut spec = RunSpec::new("/repo", "p", "m", scale.forks);
    spec.max_concurrent = scale.at_once;
    spec.budget.run = Some(Usd(spent * 100 / 80));
    let engine = trial.plan.engine(trial.store.clone(), "submitter");
    trial.runs.push(engine.submit(RunId::new("warned").unwrap(), spec, None).await.unwrap());
    let mut drivers = drivers(&trial, 2).await;
    trial.kill_at_random(&scale, &mut drivers).await;
    trial.ended().await;
    let kinds = vec!["run.budget_warning".to_string()];
    let query = forkyard_store::EventQuery { kinds, ..Default::default() };
    let warnings = trial.store.read_run(&trial.runs[0], &query).await.unwrap();
    assert_eq!(warnings.len(), 1, "{warnings:?}");
    let at = warnings[0].event.data["spent"].as_u64().unwrap();
    assert!(at >= spent && warnings[0].event.data["fork"].is_null(), "{warnings:?}");
}

/// SIGSTOP until another has taken over, then SIGCONT.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stopped_driver_that_comes_back_changes_nothing() {
    // Slow, so that a stop seldom comes in the middle of a commit.
    let scale = Scale {
        kills: 0,
        runs: 1,
        forks: 2,
        at_once: 2,
        turns: 12,
        pace: Duration::from_millis(400),
        host_limit: 0,
    };
    let trial = Trial::new(sqlite_url(), &scale).await;
    let run = &trial.runs[0];
    let attempt = || async { trial.store.attempt(run, 0).await.ok().flatten().map_or(0, |a| a.0) };
    let first = trial.plan.driver();
    until("the first drives", || async { trial.store.journal_len(run, 0).await.unwrap_or(0) > 2 }).await;
    let second = trial.plan.driver();
    let mut taken = false;
    for _ in 0..10 {
        let before = attempt().await;
        first.signal(Signal::STOP);
        // Stopped in the middle of a commit it holds the database's lock, and nobody can do anything: then again.
        let over = async {
            while attempt().await == before {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        taken = tokio::time::timeout(Duration::from_secs(8), over).await.is_ok();
        if taken {
            break;
        }
        first.signal(Signal::CONT);
    }
    assert!(taken, "the second did not take over");
    let journal = trial.store.journal_len(run, 0).await.unwrap();
    until("the second makes progress", || async {
        trial.store.journal_len(run, 0).await.unwrap_or(0) > journal
    })
    .await;
    first.signal(Signal::CONT);
    trial.ended().await;
    // What the first still had in hand may have made a sandbox anew: the sweep's business.
    let yard = FileYard(trial.plan.folder.clone());
    sweep::sweep(&*trial.store, &yard, &files::host(), Timestamp(u64::MAX / 4), Millis::minutes(1))
        .await
        .unwrap();
    trial.check(&scale).await;
    drop((first, second));
}

/// Two processes drive a run each, one is killed and a third takes over from it: together they never have more forks at work than
/// their host may have, and neither has to wait for the other's last.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_processes_of_a_host_share_its_limit() {
    let pace = Duration::from_millis(50);
    let scale = Scale { kills: 0, runs: 2, forks: 8, at_once: 8, turns: 20, pace, host_limit: 2 };
    let trial = Trial::new(sqlite_url(), &scale).await;
    let mut drivers: Vec<Driver> = trial.runs.iter().map(|run| trial.plan.driver_of(run)).collect();
    let at_work = |run: &RunId| {
        let (run, store) = (run.clone(), trial.store.clone());
        async move {
            let mut entries = 0;
            for fork in 0..8 {
                entries += store.journal_len(&run, fork).await.unwrap_or(0);
            }
            entries > 0
        }
    };
    for run in &trial.runs {
        until("both are at work", || at_work(run)).await;
    }
    assert_eq!(trial.live().await, 2, "neither waits for the other's last fork");
    drivers[0].kill();
    drivers[0] = trial.plan.driver();
    trial.ended().await;
    assert_eq!(trial.plan.most_at_once(), scale.host_limit);
    trial.check(&scale).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_postgres_that_dies_is_survived() {
    let scale = Scale {
        kills: 0,
        runs: 3,
        forks: 3,
        at_once: 3,
        turns: 20,
        pace: Duration::from_millis(100),
        host_limit: 0,
    };
    let server = tokio::task::spawn_blocking(Postgres::start).await.unwrap();
    let trial = Trial::new(server.database(), &scale).await;
    let drivers = drivers(&trial, 3).await;
    for _ in 0..2 {
        let before = trial.position().await;
        until("work goes on", || async { trial.position().await > before + 20 }).await;
        assert!(trial.live().await > 0);
        tokio::task::block_in_place(|| server.restart());
    }
    trial.ended().await;
    trial.check(&scale).await;
    drop(drivers);
}

#[test]
fn a_full_disk_is_survived() {
    let folder = tempfile::tempdir().unwrap();
    let (folder, pace) = (folder.path().into(), Duration::from_millis(50));
    let plan = Plan { url: String::new(), folder, turns: 20, pace, host_limit: 0 };
    plan.with_mounts("full").succeed();
}

/// In a process with mounts of its own: the store's small disk fills up in the middle of the work and is freed again.
pub async fn on_a_full_disk(mut plan: Plan) {
    let disk = plan.folder.join("disk");
    std::fs::create_dir_all(&disk).unwrap();
    let mount = ["-t", "tmpfs", "-o", "size=8m", "forkyard-test"];
    assert!(std::process::Command::new("mount").args(mount).arg(&disk).status().unwrap().success());
    plan.url = format!("sqlite:{}", disk.join("store.db").display());
    let (turns, pace) = (plan.turns, plan.pace);
    let scale = Scale { kills: 0, runs: 2, forks: 3, at_once: 3, turns, pace, host_limit: 0 };
    let trial = Trial::submit(plan, &scale).await;
    let engine = trial.plan.engine(trial.store.clone(), "full");
    let stop = CancellationToken::new();
    let work = tokio::spawn({
        let stop = stop.clone();
        async move { engine.work(ProcessKind::Worker, stop).await }
    });
    let before = trial.position().await;
    until("work is under way", || async { trial.position().await > before + 30 }).await;
    let ballast = disk.join("ballast");
    fill(&ballast);
    // Larger than what is left in the log's last pages: refused, and it says why.
    let refused = trial.store.put_blob("ballast", &vec![1; 1 << 20]).await.unwrap_err();
    assert!(matches!(refused, StoreError::Full(_)), "{refused:?}");
    assert!(trial.live().await > 0);
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert!(trial.live().await > 0, "nothing can end on a full disk");
    std::fs::remove_file(&ballast).unwrap();
    trial.ended().await;
    trial.check(&scale).await;
    stop.cancel();
    work.await.unwrap();
}
