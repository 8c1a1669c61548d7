//! Going on after a crash: at every append of the journal, and after the loss of the sandbox.

use std::collections::BTreeSet;
use std::sync::Arc;

use async_trait::async_trait;
use forkyard_agent::inference::{DeltaSink, InferenceError, Model, TurnRequest, TurnResponse};
use forkyard_agent::{AgentError, AgentEvent, Continuity, Stop, checkpoints};
use forkyard_core::Usd;
use serde_json::json;
use tokio_util::sync::CancellationToken;

use crate::agent_support::{Answer, Crash, Fork, ScriptModel, bash, call, last_text, message_text, say};

/// Commands that are not idempotent, edits, a subagent, calls in one turn, a refusal, reads, a repeated id.
fn answers() -> Vec<Answer> {
    vec![
        bash("append /workspace/log one"),
        call(&[
            ("Write", json!({ "file_path": "a.txt", "content": "x = 1\n" })),
            ("Bash", json!({ "command": "append /workspace/log two" })),
            ("Read", json!({ "file_path": "a.txt" })),
        ]),
        // Applied twice it would find its own result and fail; applied to a missing write it could not work.
        call(&[(
            "Edit",
            json!({ "file_path": "a.txt", "old_string": "x = 1", "new_string": "x = 1\ny = 2" }),
        )]),
        call(&[
            ("Bash", json!({ "command": "reboot" })),
            ("Bash", json!({ "command": "append /workspace/log three" })),
        ]),
        call(&[("Task", json!({ "description": "part", "prompt": "Do a part." }))]),
        call(&[
            (
                "Edit",
                json!({ "file_path": "a.txt", "old_string": "2", "new_string": "22", "replace_all": true }),
            ),
            ("Write", json!({ "file_path": "b.txt", "content": "same" })),
            ("Write", json!({ "file_path": "b.txt", "content": "same again" })),
        ]),
        bash("append /workspace/log four"),
        say("finished"),
    ]
}

fn fork() -> Fork {
    Fork::new(ScriptModel::new(|request, n| {
        if request.system.contains("You are a subagent") {
            let part = [
                bash("append /workspace/log sub one"),
                bash("append /workspace/log sub two"),
                say("part done"),
            ];
            return Ok(part[n].clone());
        }
        Ok(answers()[n].clone())
    }))
}

const LOG: &str = "one\ntwo\nthree\nsub one\nsub two\nfour\n";

#[tokio::test]
async fn a_crash_at_every_append_changes_nothing() {
    let mut whole = fork();
    let expected = whole.run().await.unwrap();
    assert_eq!(whole.world.file("/workspace/log").unwrap(), LOG);
    assert_eq!(whole.world.file("/workspace/a.txt").unwrap(), "x = 1\ny = 22\n");
    let requests = whole.model.requests().len();
    for how in [Crash::BeforeWrite, Crash::AfterWrite] {
        let mut crashes = 0;
        for appends in 0.. {
            let mut fork = fork();
            match fork.run_until(appends, how).await {
                Ok(_) => break,
                Err(e) => assert!(matches!(e, AgentError::Journal(_)), "{e}"),
            }
            crashes += 1;
            let outcome =
                fork.run().await.unwrap_or_else(|e| panic!("after {appends} appends ({how:?}): {e}"));
            let context = format!("after {appends} appends ({how:?})");
            assert_eq!(fork.world.files(), whole.world.files(), "{context}");
            assert_eq!(fork.world.ran(), whole.world.ran(), "each command once, {context}");
            assert_eq!((outcome.stop, outcome.turns), (Stop::EndTurn, expected.turns), "{context}");
            assert_eq!(outcome.tool_calls, expected.tool_calls, "{context}");
            let extra = fork.model.requests().len() - requests;
            assert!(extra <= 1, "at most one request is asked again, {context}");
            assert_eq!(outcome.cost, expected.cost, "the journal has every answer once, {context}");
        }
        assert!(crashes > 20, "{crashes}");
    }
}

#[tokio::test]
async fn crashes_one_after_the_other_still_end() {
    let mut fork = fork();
    let mut attempts = 0;
    // Each attempt gets two appends further, its own first one included.
    while let Err(e) =
        fork.run_until(2, if attempts % 2 == 0 { Crash::BeforeWrite } else { Crash::AfterWrite }).await
    {
        assert!(matches!(e, AgentError::Journal(_)));
        attempts += 1;
        assert!(attempts < 200, "no progress");
    }
    assert!(attempts > 5);
    assert_eq!(fork.world.file("/workspace/log").unwrap(), LOG);
    assert_eq!(fork.world.file("/workspace/a.txt").unwrap(), "x = 1\ny = 22\n");
}

#[tokio::test]
async fn a_command_that_still_runs_is_taken_over() {
    let mut fork = Fork::list(vec![
        bash("append /workspace/log begin && gate g && append /workspace/log end && echo out"),
        say("ok"),
    ]);
    let first = tokio::spawn(fork.agent(None).run(fork.cancel.clone()));
    fork.world.until(|w| !w.ran().is_empty()).await;
    // The process is gone; the command is not.
    first.abort();
    assert!(first.await.unwrap_err().is_cancelled());
    let second = tokio::spawn(fork.agent(None).run(fork.cancel.clone()));
    fork.world.open("g");
    assert!(second.await.unwrap().unwrap().success);
    assert_eq!(fork.world.ran().len(), 1);
    assert_eq!(fork.world.file("/workspace/log").unwrap(), "begin\nend\n");
    assert_eq!(fork.stored.results(), ["out\n"]);
}

#[tokio::test]
async fn cancelling_leaves_the_command_to_the_next_attempt() {
    let mut fork = Fork::list(vec![bash("gate g && echo late"), say("ok")]);
    let cancel = fork.cancel.clone();
    let first = tokio::spawn(fork.agent(None).run(cancel.clone()));
    fork.world.until(|w| !w.ran().is_empty()).await;
    cancel.cancel();
    assert!(matches!(first.await.unwrap(), Err(AgentError::Cancelled)));
    assert!(fork.stored.kinds().contains(&"agent.shutdown"));
    fork.cancel = Default::default();
    fork.world.open("g");
    assert!(fork.run().await.unwrap().success);
    assert_eq!((fork.world.ran().len(), fork.stored.results()), (1, vec!["late\n".to_string()]));
}

/// Whoever cancels hears of an answer by its payment, before the agent has it.
struct PaidFor(Arc<ScriptModel>, CancellationToken);

#[async_trait]
impl Model for PaidFor {
    async fn turn(
        &self,
        request: &TurnRequest,
        deltas: &mut dyn DeltaSink,
    ) -> Result<TurnResponse, InferenceError> {
        let answer = self.0.turn(request, deltas).await;
        deltas.answered();
        self.1.cancel();
        tokio::task::yield_now().await;
        answer
    }
}

#[tokio::test]
async fn an_answer_that_is_paid_for_is_kept() {
    let mut fork = Fork::list(vec![bash("echo a"), say("ok")]);
    let mut agent = fork.agent(None);
    agent.model = Arc::new(PaidFor(fork.model.clone(), fork.cancel.clone()));
    assert!(matches!(agent.run(fork.cancel.clone()).await, Err(AgentError::Cancelled)));
    fork.cancel = Default::default();
    assert!(fork.run().await.unwrap().success);
    assert_eq!((fork.model.requests().len(), fork.world.ran().len()), (2, 1), "nothing is asked twice");
}

#[tokio::test]
async fn background_commands_are_taken_over() {
    let model = ScriptModel::new(|request, n| {
        let id = request.messages.iter().map(message_text).find_map(|t| {
            t.split_whitespace().find(|w| w.starts_with("bash_")).map(|w| w.trim_end_matches('.').to_string())
        });
        Ok(match n {
            0 => call(&[("Bash", json!({ "command": "echo served && gate g", "run_in_background": true }))]),
            1 => bash("gate h"),
            2 => call(&[("BashOutput", json!({ "bash_id": id }))]),
            _ => say("ok"),
        })
    });
    let mut fork = Fork::new(model);
    let first = tokio::spawn(fork.agent(None).run(fork.cancel.clone()));
    fork.world.until(|w| w.ran().len() == 2).await;
    first.abort();
    let _ = first.await;
    fork.world.open("h");
    fork.run().await.unwrap();
    assert_eq!(fork.world.ran().len(), 2);
    assert!(fork.stored.results()[2].contains("[running] echo served"), "{:?}", fork.stored.results());
}

#[tokio::test]
async fn an_older_attempt_stops_without_a_word() {
    let mut fork = Fork::list(vec![bash("gate g"), say("ok")]);
    let first = tokio::spawn(fork.agent(None).run(fork.cancel.clone()));
    fork.world.until(|w| !w.ran().is_empty()).await;
    let second = fork.agent(None);
    fork.world.open("g");
    let entries = fork.stored.len();
    // Its command ends, but what it does next in the sandbox is refused.
    let error = first.await.unwrap().unwrap_err();
    assert!(matches!(error, AgentError::Stale), "{error}");
    assert!(fork.stored.len() <= entries + 1);
    assert!(second.run(fork.cancel.clone()).await.unwrap().success);
    assert_eq!(fork.world.ran().len(), 1);
}

#[tokio::test]
async fn a_lost_sandbox_goes_on_from_the_last_checkpoint_and_says_what_was_lost() {
    let model = ScriptModel::new(|request, n| {
        let told = request.messages.iter().map(message_text).any(|t| t.contains("The sandbox was lost"));
        Ok(match (n, told) {
            (0, _) => bash("append /workspace/log one"),
            (1, false) => bash("append /workspace/log two && gate never"),
            (1, true) => bash("append /workspace/log two again"),
            _ => say("ok"),
        })
    });
    let mut fork = Fork::new(model);
    let first = tokio::spawn(fork.agent(None).run(fork.cancel.clone()));
    fork.world.until(|w| w.file("/workspace/log").is_some_and(|l| l.contains("two"))).await;
    first.abort();
    let _ = first.await;
    fork.world.kill();
    let lost = fork.run().await.unwrap_err();
    assert!(matches!(lost, AgentError::SandboxLost(_)) && lost.is_retryable(), "{lost}");

    let checkpoint = fork.stored.events().into_iter().rev().find_map(|e| match e {
        AgentEvent::CheckpointCreated { position, checkpoint, .. } => Some((position, checkpoint.id)),
        _ => None,
    });
    let (position, id) = checkpoint.unwrap();
    fork.world = fork.world.restore(&id);
    fork.config.continuity = Continuity::Replaced { position, reason: "host rebooted".to_string() };
    // A crash in the middle of the recovery is recovered from as well, and the checkpoint still holds.
    assert!(fork.run_until(1, Crash::AfterWrite).await.is_err());
    let entries = fork.stored.entries();
    assert_eq!(
        checkpoints(&entries).iter().map(|(p, c)| (*p, c.id.clone())).collect::<Vec<_>>(),
        [(position, id)]
    );
    let outcome = fork.run().await.unwrap();
    assert!(outcome.success);
    assert_eq!(fork.world.file("/workspace/log").unwrap(), "one\ntwo again\n");
    let told: String = fork.model.last().messages.iter().map(message_text).collect();
    assert!(told.contains("host rebooted") && told.contains("append /workspace/log two"), "{told}");
    assert!(!told.contains("gate never\n"), "the lost answer itself is not in the conversation");
    assert_eq!(outcome.cost, Usd::cents(4), "what was lost was paid for");
}

#[tokio::test]
async fn a_sandbox_lost_before_any_checkpoint_starts_over_with_the_task() {
    let model = ScriptModel::new(|request, n| {
        Ok(if n == 0 { bash("append /workspace/log x") } else { say(&last_text(request)) })
    });
    let mut fork = Fork::new(model);
    fork.config.keep_checkpoints = 0;
    // The appends: opening, answer with its call.
    assert!(fork.run_until(2, Crash::BeforeWrite).await.is_err());
    fork.world = crate::agent_world::World::new();
    fork.config.continuity = Continuity::Replaced { position: 0, reason: "gone".to_string() };
    fork.run().await.unwrap();
    assert_eq!(fork.world.ran(), ["append /workspace/log x"]);
    let first = &fork.model.last().messages[0];
    let text = message_text(first);
    assert!(text.starts_with("Do the task.") && text.contains("The sandbox was lost (gone)"), "{text}");
}

/// Ends a future after so many polls: as if the process had died there.
struct Fuse<F> {
    inner: Option<std::pin::Pin<Box<F>>>,
    polls: usize,
}

impl<F: Future> Future for Fuse<F> {
    type Output = Option<F::Output>;
    fn poll(
        mut self: std::pin::Pin<&mut Self>,
        cx: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Self::Output> {
        if self.polls == 0 {
            self.inner = None;
            return std::task::Poll::Ready(None);
        }
        self.polls -= 1;
        match self.inner.as_mut() {
            Some(inner) => inner.as_mut().poll(cx).map(Some),
            None => std::task::Poll::Ready(None),
        }
    }
}

#[tokio::test]
async fn a_death_at_every_poll_changes_nothing() {
    let mut whole = fork();
    whole.run().await.unwrap();
    let mut deaths = 0;
    for polls in 0.. {
        let mut fork = fork();
        let agent = fork.agent(None).run(fork.cancel.clone());
        if let Some(outcome) = (Fuse { inner: Some(Box::pin(agent)), polls }).await {
            outcome.unwrap();
            break;
        }
        deaths += 1;
        fork.run().await.unwrap();
        assert_eq!(fork.world.files(), whole.world.files(), "after {polls} polls");
        assert_eq!(fork.world.ran(), whole.world.ran(), "after {polls} polls");
    }
    assert!(deaths > 20, "{deaths}");
}

#[tokio::test]
async fn a_bounded_number_of_checkpoints_is_kept_whatever_crashes() {
    let turns = || (0..6).map(|n| bash(&format!("append /workspace/log {n}"))).chain([say("ok")]).collect();
    let held = |fork: &Fork| {
        let entries = fork.stored.entries();
        checkpoints(&entries).iter().map(|(_, c)| c.id.clone()).collect::<Vec<_>>()
    };
    let made = |fork: &Fork| {
        let id = |e: AgentEvent| match e {
            AgentEvent::CheckpointCreated { checkpoint, .. } => Some(checkpoint.id),
            _ => None,
        };
        fork.stored.events().into_iter().filter_map(id).collect::<Vec<_>>()
    };
    for crash_at in [None, Some(5), Some(8), Some(11)] {
        let mut fork = Fork::list(turns());
        fork.config.keep_checkpoints = 2;
        if let Some(appends) = crash_at {
            assert!(fork.run_until(appends, Crash::AfterWrite).await.is_err());
        }
        fork.run().await.unwrap();
        let made = made(&fork);
        // One that was not recorded before the crash is not made again: the next turn's is.
        assert!(made.len() == 6 || crash_at.is_some() && made.len() == 5, "{made:?}");
        let (older, kept) = made.split_at(made.len() - 2);
        assert_eq!(held(&fork), kept, "{crash_at:?}");
        // The last one that was displaced goes with the next, which never came.
        let removed: BTreeSet<String> = fork.removed.lock().unwrap().iter().cloned().collect();
        let wanted: BTreeSet<String> = older[..older.len() - 1].iter().cloned().collect();
        assert_eq!(removed, wanted, "{crash_at:?}");
    }
}
