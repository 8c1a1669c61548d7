//! One conformance suite for engines: the same scenarios, word for word, whoever drives the machines.
//!
//! Workers are processes of their own and can be killed; sandboxes are folders (see [`crate::sim::files`]), everything else is
//! real. A fork's prompt says how its agent behaves: `turns=5 pace=100 fails=check_budget:2`.

use std::collections::BTreeMap;
use std::future::Future;
use std::path::PathBuf;
use std::process::Child;
use std::sync::Arc;
use std::time::Duration;

use forkyard_core::run::Command;
use forkyard_core::spec::{ForkSpec, RunSpec};
use forkyard_core::view::{ForkOutcome, RunOutcome, RunStatus, RunView, SandboxState};
use forkyard_core::{ForkNum, Millis, RunId, Usd};
use forkyard_engine::Engine;
use forkyard_store::{EventQuery, Recorded, SandboxQuery, Store};

use crate::sim::files::COST;

/// Long enough for the slowest machine; a scenario that hangs says so.
const PATIENCE: Duration = Duration::from_secs(420);

/// An engine under test.
pub trait Rig: Send + Sync {
    fn engine(&self) -> Arc<dyn Engine>;
    fn store(&self) -> Arc<dyn Store>;
    /// Where sandboxes and results are.
    fn folder(&self) -> PathBuf;
    /// A new worker process.
    fn worker(&self) -> Worker;
}

/// Killed at the end of the test that started it, if it has not ended.
pub struct Worker(pub Child);

impl Worker {
    /// As `kill -9` does.
    pub fn kill(&mut self) {
        self.0.kill().expect("it was not reaped yet");
        self.0.wait().expect("it is ours");
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Every scenario by its name, as a test of its own: `conformance!(rig)`, where `rig` is an async function that makes one, or None
/// where what it needs is not here.
#[macro_export]
macro_rules! engine_conformance {
    ($rig:path) => {
        $crate::engine_conformance!($rig;
            forks_up_to_a_limit, a_pause_holds_everything, a_detached_run_waits_for_its_user, a_cancel_keeps_what_was_done,
            one_fork_is_cancelled, money_runs_out, a_limit_is_warned_of_once, time_runs_out, errors_are_tried_again,
            what_never_works_fails, a_message_brings_an_agent_back, forks_are_added, a_lost_sandbox_is_replaced,
            a_killed_worker_changes_nothing, the_same_key_is_the_same_run, what_has_ended_takes_no_commands,
            the_impossible_is_refused_and_leaves_no_trace, nothing_is_spent_of_nothing, all_forks_are_cancelled_one_by_one);
    };
    ($rig:path; $($scenario:ident),+) => {
        $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn $scenario() {
            if let Some(rig) = $rig().await {
                $crate::engines::$scenario(&rig).await;
            }
        })+
    };
}

pub async fn until<F: Future<Output = bool>>(what: &str, mut ask: impl FnMut() -> F) {
    let wait = async {
        while !ask().await {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(PATIENCE, wait).await.unwrap_or_else(|_| panic!("{what}: not within {PATIENCE:?}"));
}

fn spec(prompt: &str, forks: u32) -> RunSpec {
    let mut spec = RunSpec::new("/repo", prompt, "m", forks);
    spec.verify = Some("true".into());
    spec
}

fn calls(turns: usize) -> String {
    (0..turns).map(|t| format!("call-{t} ")).collect()
}

/// One run on a rig.
pub struct Trial {
    pub id: RunId,
    store: Arc<dyn Store>,
    engine: Arc<dyn Engine>,
    folder: PathBuf,
}

impl Trial {
    pub async fn start(rig: &dyn Rig, name: &str, spec: RunSpec) -> Trial {
        let engine = rig.engine();
        let id = engine.submit(RunId::new(name).expect("a valid id"), spec, None).await.expect("a valid run");
        Trial { id, store: rig.store(), engine, folder: rig.folder() }
    }
    async fn command(&self, command: Command) {
        self.engine.command(&self.id, command, None).await.expect("a live run takes commands");
    }
    pub async fn view(&self) -> RunView {
        self.store.run(&self.id).await.expect("the store answers").expect("it is there")
    }
    pub async fn ended(&self) -> RunView {
        until(&format!("{} ends", self.id), || async { self.view().await.status == RunStatus::Ended }).await;
        self.view().await
    }
    async fn at_work(&self, fork: ForkNum, turns: usize) {
        let journal = || async { self.store.journal_len(&self.id, fork).await.unwrap_or(0) >= turns as u64 };
        until(&format!("{}/{fork} is at work", self.id), journal).await;
    }
    async fn phase(&self, fork: ForkNum, phase: &str) {
        let is = || async {
            self.store.fork(&self.id, fork).await.is_ok_and(|f| f.is_some_and(|f| f.phase == phase))
        };
        until(&format!("{}/{fork} is {phase}", self.id), is).await;
    }
    async fn journals(&self) -> u64 {
        let mut sum = 0;
        for fork in 0..self.view().await.progress.total_forks {
            sum += self.store.journal_len(&self.id, fork).await.unwrap_or(0);
        }
        sum
    }
    async fn events(&self, kinds: &[&str]) -> Vec<Recorded> {
        let query =
            EventQuery { kinds: kinds.iter().map(ToString::to_string).collect(), ..EventQuery::default() };
        self.store.read_run(&self.id, &query).await.expect("the store answers")
    }
    async fn outcomes(&self) -> Vec<Option<ForkOutcome>> {
        self.store.forks(&self.id).await.expect("the store answers").iter().map(|f| f.outcome).collect()
    }
    pub fn result(&self, fork: ForkNum) -> String {
        std::fs::read_to_string(self.folder.join(format!("results/{}-{fork}", self.id))).unwrap_or_default()
    }
    /// What has to hold at the end of every run.
    pub async fn clean(&self) {
        let left: Vec<String> = std::fs::read_dir(self.folder.join("sandboxes"))
            .into_iter()
            .flatten()
            .flatten()
            .filter(|e| std::fs::read_to_string(e.path().join("run")).is_ok_and(|r| r == self.id.as_str()))
            .map(|e| e.file_name().to_string_lossy().into_owned())
            .collect();
        assert!(left.is_empty(), "leaked: {left:?}");
        let query = SandboxQuery { run: Some(self.id.clone()), ..SandboxQuery::default() };
        for sandbox in self.store.sandboxes(&query).await.expect("the store answers") {
            assert_eq!(sandbox.state, SandboxState::Destroyed, "{sandbox:?}");
        }
        let balance = self.store.balance(&self.id).await.expect("the store answers");
        assert_eq!(balance.reserved, Usd::ZERO, "a run that has ended holds no money");
        self.replays().await;
    }
    /// The log gives back the rows that readers saw.
    async fn replays(&self) {
        use forkyard_engine::log;
        let (run, _) =
            log::load_run(&*self.store, &self.id).await.expect("it can be read").expect("it is there");
        assert_eq!(run.view(), self.view().await);
        for seen in self.store.forks(&self.id).await.expect("the store answers") {
            if let Some((fork, _)) =
                log::load_fork(&*self.store, &self.id, seen.fork).await.expect("it can be read")
            {
                assert_eq!(fork.view(), seen);
            }
        }
    }
}

pub async fn forks_up_to_a_limit(rig: &dyn Rig) {
    let _worker = rig.worker();
    let mut spec = spec("turns=3 pace=50", 5);
    spec.max_concurrent = 2;
    let run = Trial::start(rig, "limits", spec).await;
    let view = run.ended().await;
    assert_eq!(
        (view.outcome, view.winner),
        (Some(RunOutcome::Success), Some(4)),
        "the score is the fork's number"
    );
    assert_eq!(view.ranking, [4, 3, 2, 1, 0]);
    let (mut live, mut most) = (0_i32, 0);
    for e in run.events(&["run.fork_started", "run.fork_ended"]).await {
        live += if e.event.kind == "run.fork_started" { 1 } else { -1 };
        most = most.max(live);
    }
    assert_eq!((live, most), (0, 2));
    for fork in 0..5 {
        assert_eq!(run.result(fork), calls(3));
    }
    run.clean().await;
}

pub async fn a_pause_holds_everything(rig: &dyn Rig) {
    let _worker = rig.worker();
    let mut spec = spec("turns=12 pace=100", 3);
    spec.max_concurrent = 2;
    let run = Trial::start(rig, "paused", spec).await;
    run.at_work(0, 2).await;
    run.command(Command::Pause).await;
    until("it is paused", || async { run.view().await.paused }).await;
    // The requests that were under way come to their end, and nothing else is sent.
    until("nothing moves", || async {
        let now = run.journals().await;
        tokio::time::sleep(Duration::from_millis(500)).await;
        now == run.journals().await
    })
    .await;
    let before = run.journals().await;
    assert!(run.view().await.outcome.is_none());
    run.command(Command::Resume).await;
    assert_eq!(run.ended().await.outcome, Some(RunOutcome::Success));
    assert!(run.journals().await > before, "it went on");
    for fork in 0..3 {
        assert_eq!(run.result(fork), calls(12));
    }
    run.clean().await;
}

pub async fn a_detached_run_waits_for_its_user(rig: &dyn Rig) {
    let _worker = rig.worker();
    let run = Trial::start(rig, "detached", spec("turns=20 pace=100", 2)).await;
    run.at_work(0, 2).await;
    run.command(Command::Detach).await;
    until("it is detached", || async { run.view().await.detached }).await;
    until("nothing moves", || async {
        let now = run.journals().await;
        tokio::time::sleep(Duration::from_millis(500)).await;
        now == run.journals().await
    })
    .await;
    let attempt = run.store.attempt(&run.id, 0).await.unwrap().unwrap();
    run.command(Command::Resume).await;
    assert_eq!(run.ended().await.outcome, Some(RunOutcome::Success));
    assert!(run.store.attempt(&run.id, 0).await.unwrap().unwrap() > attempt, "a new tenure is a new attempt");
    for fork in 0..2 {
        assert_eq!(run.result(fork), calls(20), "each command once");
    }
    run.clean().await;
}

pub async fn a_cancel_keeps_what_was_done(rig: &dyn Rig) {
    let _worker = rig.worker();
    let mut spec = spec("turns=1000 pace=100", 3);
    spec.max_concurrent = 2;
    let run = Trial::start(rig, "cancelled", spec).await;
    run.at_work(0, 2).await;
    run.command(Command::Cancel).await;
    assert_eq!(run.ended().await.outcome, Some(RunOutcome::Cancelled));
    assert!(run.outcomes().await.iter().all(|o| *o == Some(ForkOutcome::Cancelled)));
    assert!(run.result(0).starts_with(&calls(2)), "what was done is collected");
    run.clean().await;
}

pub async fn one_fork_is_cancelled(rig: &dyn Rig) {
    let _worker = rig.worker();
    let run = Trial::start(rig, "onefork", spec("turns=10 pace=100", 2)).await;
    run.at_work(1, 1).await;
    run.command(Command::CancelFork { fork: 1 }).await;
    assert_eq!(run.ended().await.outcome, Some(RunOutcome::Success));
    assert_eq!(run.outcomes().await, [Some(ForkOutcome::Success), Some(ForkOutcome::Cancelled)]);
    run.clean().await;
}

pub async fn money_runs_out(rig: &dyn Rig) {
    let _worker = rig.worker();
    let mut spec = spec("turns=50 pace=10", 2);
    let limit = Usd(COST.0 * 20);
    spec.budget.run = Some(limit);
    let run = Trial::start(rig, "poor", spec).await;
    run.ended().await;
    assert!(run.outcomes().await.contains(&Some(ForkOutcome::BudgetExceeded)), "{:?}", run.outcomes().await);
    let balance = run.store.balance(&run.id).await.unwrap();
    assert!(balance.spent <= limit, "{balance:?}");
    run.clean().await;
}

pub async fn a_limit_is_warned_of_once(rig: &dyn Rig) {
    let _worker = rig.worker();
    // At the end 80 % are spent, and there is room for another request's worst case until then.
    let mut spec = spec("turns=100 pace=2", 2);
    spec.max_concurrent = 1;
    spec.budget.run = Some(Usd(COST.0 * 200 * 100 / 80));
    let run = Trial::start(rig, "warned", spec).await;
    assert_eq!(run.ended().await.outcome, Some(RunOutcome::Success));
    let warnings = run.events(&["run.budget_warning"]).await;
    assert_eq!(warnings.len(), 1, "{warnings:?}");
    run.clean().await;
}

pub async fn time_runs_out(rig: &dyn Rig) {
    let _worker = rig.worker();
    let mut spec = spec("turns=1000 pace=100", 1);
    spec.fork_timeout = Millis::secs(3);
    let run = Trial::start(rig, "slow", spec).await;
    run.ended().await;
    assert_eq!(run.outcomes().await, [Some(ForkOutcome::Timeout)]);
    assert!(run.result(0).starts_with("call-0 "), "what was done is collected");
    run.clean().await;
}

pub async fn errors_are_tried_again(rig: &dyn Rig) {
    let _worker = rig.worker();
    let run = Trial::start(rig, "retried", spec("turns=2 pace=10 fails=check_budget:2", 1)).await;
    assert_eq!(run.ended().await.outcome, Some(RunOutcome::Success));
    let failed = run.events(&["fork.task_failed"]).await;
    assert_eq!(failed.len(), 2, "{failed:?}");
    run.clean().await;
}

pub async fn what_never_works_fails(rig: &dyn Rig) {
    let _worker = rig.worker();
    let run = Trial::start(rig, "refused", spec("turns=2 pace=10 refuses=create_sandbox", 2)).await;
    assert_eq!(run.ended().await.outcome, Some(RunOutcome::Failed));
    assert_eq!(run.outcomes().await, [Some(ForkOutcome::Failed); 2]);
    let error = run.store.fork(&run.id, 0).await.unwrap().unwrap().error.unwrap();
    assert!(error.starts_with("create_sandbox: "), "{error}");
    run.clean().await;
}

pub async fn a_message_brings_an_agent_back(rig: &dyn Rig) {
    let _worker = rig.worker();
    let mut spec = spec("turns=2 pace=10", 1);
    spec.linger = Millis::secs(4);
    let run = Trial::start(rig, "lingering", spec).await;
    run.phase(0, "lingering").await;
    let message = serde_json::json!({ "type": "user_message", "content": "and one more thing" });
    run.engine.message(&run.id, 0, message, None).await.unwrap();
    until("it is delivered", || async { run.store.pending_messages(&run.id, 0).await.unwrap().is_empty() })
        .await;
    assert_eq!(run.ended().await.outcome, Some(RunOutcome::Success));
    assert_eq!(run.events(&["agent.message_injected"]).await.len(), 1);
    assert_eq!(run.events(&["fork.message_noticed"]).await.len(), 1);
    run.clean().await;
}

pub async fn forks_are_added(rig: &dyn Rig) {
    let _worker = rig.worker();
    let spec = spec("turns=10 pace=100", 1);
    let more: Vec<ForkSpec> = vec![spec.forks[0].clone(); 2];
    let run = Trial::start(rig, "growing", spec).await;
    run.at_work(0, 1).await;
    run.command(Command::AddForks { forks: more }).await;
    let view = run.ended().await;
    assert_eq!((view.outcome, view.progress.total_forks), (Some(RunOutcome::Success), 3));
    assert_eq!(run.outcomes().await, [Some(ForkOutcome::Success); 3]);
    run.clean().await;
}

pub async fn a_lost_sandbox_is_replaced(rig: &dyn Rig) {
    let _worker = rig.worker();
    let run = Trial::start(rig, "moved", spec("turns=6 pace=20 loses=2", 1)).await;
    assert_eq!(run.ended().await.outcome, Some(RunOutcome::Success));
    assert_eq!(run.events(&["fork.sandbox_lost"]).await.len(), 1);
    run.clean().await;
}

pub async fn a_killed_worker_changes_nothing(rig: &dyn Rig) {
    let mut first = rig.worker();
    let mut spec = spec("turns=15 pace=100", 3);
    spec.max_concurrent = 2;
    let run = Trial::start(rig, "crashed", spec).await;
    run.at_work(0, 3).await;
    first.kill();
    let _second = rig.worker();
    let view = run.ended().await;
    assert_eq!((view.outcome, view.winner), (Some(RunOutcome::Success), Some(2)));
    assert_eq!(view.ranking, [2, 1, 0]);
    for fork in 0..3 {
        assert_eq!(run.result(fork), calls(15), "each command once, in order");
    }
    run.clean().await;
}

pub async fn the_same_key_is_the_same_run(rig: &dyn Rig) {
    let _worker = rig.worker();
    let engine = rig.engine();
    let mut ids = BTreeMap::new();
    for name in ["first", "second"] {
        let id = RunId::new(name).unwrap();
        let made = engine.submit(id, spec("turns=1 pace=1", 1), Some("key".into())).await.unwrap();
        ids.insert(name, made);
    }
    assert_eq!(ids["first"], ids["second"]);
    let run = Trial { id: ids["first"].clone(), store: rig.store(), engine, folder: rig.folder() };
    assert_eq!(run.ended().await.outcome, Some(RunOutcome::Success));
    assert_eq!(run.events(&["run.submitted"]).await.len(), 1);
    run.clean().await;
}

pub async fn what_has_ended_takes_no_commands(rig: &dyn Rig) {
    let _worker = rig.worker();
    let run = Trial::start(rig, "over", spec("turns=1 pace=1", 1)).await;
    run.ended().await;
    let engine = rig.engine();
    assert!(engine.command(&run.id, Command::Pause, None).await.is_err());
    assert!(engine.message(&run.id, 0, serde_json::json!({}), None).await.is_err());
    assert!(engine.command(&RunId::new("nobody").unwrap(), Command::Pause, None).await.is_err());
    run.clean().await;
}

pub async fn the_impossible_is_refused_and_leaves_no_trace(rig: &dyn Rig) {
    type Change = fn(&mut RunSpec);
    let cases: [(&str, Change); 7] = [
        ("forks", |s| s.forks.clear()),
        ("forks", |s| s.forks = vec![s.forks[0].clone(); 101]),
        ("max_concurrent", |s| s.max_concurrent = 0),
        ("fork_timeout_ms", |s| s.fork_timeout = Millis::ZERO),
        ("fork_timeout_ms", |s| s.fork_timeout = Millis(u64::MAX)),
        ("linger_ms", |s| s.linger = Millis(u64::MAX)),
        ("forks[0].prompt", |s| s.forks[0].prompt = String::new()),
    ];
    let (engine, id) = (rig.engine(), RunId::new("impossible").expect("a valid id"));
    for (field, change) in cases {
        let mut wrong = spec("turns=1 pace=1", 1);
        change(&mut wrong);
        let refused = engine.submit(id.clone(), wrong, None).await.expect_err(field).to_string();
        assert!(refused.contains(field), "{field}: {refused}");
        assert!(rig.store().run(&id).await.expect("the store answers").is_none(), "{field} is stored");
    }
    // Nor can it be had in two steps.
    let _worker = rig.worker();
    let one = spec("turns=1000 pace=100", 1);
    let forks = vec![one.forks[0].clone(); 100];
    let run = Trial::start(rig, "full", one).await;
    assert!(engine.command(&run.id, Command::AddForks { forks }, None).await.is_err());
    run.at_work(0, 1).await;
    run.command(Command::Cancel).await;
    assert_eq!(run.ended().await.progress.total_forks, 1);
    run.clean().await;
}

pub async fn nothing_is_spent_of_nothing(rig: &dyn Rig) {
    let _worker = rig.worker();
    let mut spec = spec("turns=5 pace=10", 3);
    spec.budget.run = Some(Usd::ZERO);
    let run = Trial::start(rig, "penniless", spec).await;
    assert_eq!(run.ended().await.outcome, Some(RunOutcome::Failed));
    assert_eq!(run.outcomes().await, [Some(ForkOutcome::BudgetExceeded); 3]);
    assert_eq!(run.store.balance(&run.id).await.expect("the store answers").spent, Usd::ZERO);
    run.clean().await;
}

/// More forks than may work at once: those that wait are cancelled, too.
pub async fn all_forks_are_cancelled_one_by_one(rig: &dyn Rig) {
    let _worker = rig.worker();
    let mut spec = spec("turns=1000 pace=100", 4);
    spec.max_concurrent = 2;
    let run = Trial::start(rig, "each", spec).await;
    run.at_work(0, 1).await;
    for fork in 0..4 {
        run.command(Command::CancelFork { fork }).await;
    }
    assert_eq!(run.ended().await.outcome, Some(RunOutcome::Failed));
    // One that never began has no row of its own: the run's log has all of them.
    let ended = run.events(&["run.fork_ended"]).await;
    let outcomes: Vec<_> = ended.iter().map(|e| &e.event.data["result"]["outcome"]).collect();
    assert_eq!(outcomes, ["cancelled"; 4]);
    run.clean().await;
}
