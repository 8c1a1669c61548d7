//! Drivers that end at a certain moment of a turn, which odd moments would rarely meet: its results are durable, and its
//! checkpoint is not made, or made and not recorded.

use std::os::unix::process::ExitStatusExt;

use forkyard_agent::AgentEvent;
use forkyard_core::{ForkNum, RunId};
use forkyard_engine::ports::{JournalEntry, LiveEvent, Onlooker};
use forkyard_sandbox::Provider;
use rustix::process::{Signal, getpid, kill_process};
use test_support::model_server::{Gate, Seen};

use super::kills::{Loss, TURNS, Trial, script};
use super::{Process, until};

/// A turn whose command appends to files, with others before and after it.
const TURN: u32 = 7;

/// Kills its process the moment a turn's results are durable. Nothing runs between that and the checkpoint.
pub struct EndsItself {
    pub turn: u32,
}

impl Onlooker for EndsItself {
    fn live(&self, _: &RunId, _: ForkNum, _: &LiveEvent) {}
    fn recorded(&self, _: &RunId, _: ForkNum, entries: &[JournalEntry]) {
        let results =
            |e: &JournalEntry| matches!(&e.event, AgentEvent::ToolCompleted(done) if done.turn == self.turn);
        if entries.iter().any(results) {
            kill_process(getpid(), Signal::KILL).unwrap();
            unreachable!("it was killed");
        }
    }
}

/// The turns of the journal that have an entry of this kind.
async fn turns(trial: &Trial, kind: &str) -> Vec<u32> {
    let entries = trial.store.read_journals(&trial.run, 0).await.unwrap();
    let of_kind = entries.iter().filter(|e| e.event.kind == kind);
    of_kind.filter_map(|e| u32::try_from(e.event.data["turn"].as_u64()?).ok()).collect()
}

/// Snapshots that were made for the checkpoint of a turn.
async fn frozen(trial: &Trial, turn: u32) -> usize {
    let all = trial.plan.provider().snapshots().await.unwrap();
    all.iter().filter(|s| s.labels.get("turn") == Some(&turn.to_string())).count()
}

/// Goes on to the end, and has the same to show as one that nobody disturbed.
async fn goes_on(trial: &Trial, loss: Loss) {
    trial.lose(loss).await;
    let mut plan = trial.plan.clone();
    plan.dies_after = None;
    let driver = Process::start("drive", &plan);
    until("the run ends", || trial.ended()).await;
    drop(driver);
    trial.check().await;
    if loss == Loss::Process {
        assert_eq!(trial.server.seen().len(), TURNS + 1, "nothing is asked twice");
        let ran = turns(trial, "agent.tool_completed").await;
        assert_eq!(ran, (1..=u32::try_from(TURNS).unwrap()).collect::<Vec<_>>(), "nothing runs twice");
    }
}

async fn ends_between_results_and_checkpoint(loss: Loss) {
    let mut trial = Trial::new(loss, script).await;
    trial.plan.dies_after = Some(TURN);
    let mut driver = Process::start("drive", &trial.plan);
    let status = driver.0.wait().unwrap();
    assert_eq!(status.signal(), Some(Signal::KILL.as_raw()));
    assert!(turns(&trial, "agent.tool_completed").await.contains(&TURN), "its results are durable");
    assert_eq!(frozen(&trial, TURN).await, 0, "its checkpoint is not made");
    goes_on(&trial, loss).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_driver_that_ends_between_results_and_checkpoint() {
    ends_between_results_and_checkpoint(Loss::Process).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_driver_and_a_sandbox_that_end_between_results_and_checkpoint() {
    ends_between_results_and_checkpoint(Loss::Sandbox).await;
}

/// While the model is asked for the next turn, the checkpoint is made and its entry waits for the next append.
async fn ends_between_checkpoint_and_its_entry(loss: Loss) {
    let gate = Gate::default();
    let held = gate.clone();
    let trial = Trial::new(loss, move |seen: &Seen| {
        let turns = seen.messages().iter().filter(|m| m["role"] == "assistant").count();
        let reply = script(seen);
        if turns == TURN as usize { reply.gate(&held) } else { reply }
    })
    .await;
    let asked = || {
        let seen = trial.server.seen();
        seen.iter().any(|s| s.messages().iter().filter(|m| m["role"] == "assistant").count() == TURN as usize)
    };
    let mut driver = Process::start("drive", &trial.plan);
    until("the next turn is asked for", || async { asked() }).await;
    driver.kill();
    assert_eq!(frozen(&trial, TURN).await, 1, "its checkpoint is made");
    assert!(!turns(&trial, "agent.checkpoint_created").await.contains(&TURN), "and nobody knows of it");
    // For whoever asks again, and for the one that is gone.
    gate.open(2);
    trial.lose(loss).await;
    let driver = Process::start("drive", &trial.plan);
    until("the run ends", || trial.ended()).await;
    drop(driver);
    trial.check().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_driver_that_ends_between_a_checkpoint_and_its_entry() {
    ends_between_checkpoint_and_its_entry(Loss::Process).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_driver_and_a_sandbox_that_end_between_a_checkpoint_and_its_entry() {
    ends_between_checkpoint_and_its_entry(Loss::Sandbox).await;
}
