//! Messages to a running agent.

use forkyard_agent::AgentEvent;
use forkyard_agent::ports::{MessageKind, Priority, Speaker};
use serde_json::json;

use crate::agent_support::{Crash, Fork, ScriptModel, bash, call, last_text, say};

#[tokio::test]
async fn a_message_reaches_the_model_before_the_next_call_runs() {
    let mut fork = Fork::list(vec![
        call(&[
            ("Bash", json!({ "command": "gate g" })),
            ("Bash", json!({ "command": "append /workspace/log never" })),
        ]),
        say("understood"),
    ]);
    let run = tokio::spawn(fork.agent(None).run(fork.cancel.clone()));
    fork.world.until(|w| !w.ran().is_empty()).await;
    fork.stored.say(MessageKind::UserMessage, "Use the other file.\u{7}");
    fork.world.open("g");
    assert!(run.await.unwrap().unwrap().success);
    assert_eq!(fork.world.ran(), ["gate g"], "the running call ends, the next one waits");
    let seen = last_text(&fork.model.last());
    assert!(
        seen.contains("not run: a message arrived")
            && seen.contains("[Message from the user]\nUse the other file.")
    );
    assert!(!seen.contains('\u{7}'));
    assert_eq!(fork.stored.waiting(), 0);
}

#[tokio::test]
async fn an_interrupt_stops_the_running_command() {
    let mut fork = Fork::list(vec![bash("hang"), say("stopped")]);
    let run = tokio::spawn(fork.agent(None).run(fork.cancel.clone()));
    fork.world.until(|w| !w.ran().is_empty()).await;
    // Another message does not.
    fork.stored.say(MessageKind::System, "Just so you know.");
    fork.stored.say(MessageKind::Interrupt, "Stop that.");
    let outcome = run.await.unwrap().unwrap();
    assert_eq!(outcome.final_response, "stopped");
    assert!(fork.stored.results()[0].contains("[interrupted"));
    let seen = last_text(&fork.model.last());
    assert!(
        seen.contains("interrupted the work]\nStop that.")
            && seen.contains("[Note from the system]\nJust so")
    );
    assert!(fork.stored.kinds().contains(&"agent.interrupted"));
}

#[tokio::test]
async fn what_is_urgent_is_read_first_and_whoever_interrupts_is_named() {
    let mut fork = Fork::list(vec![bash("hang"), say("stopped")]);
    let run = tokio::spawn(fork.agent(None).run(fork.cancel.clone()));
    fork.world.until(|w| !w.ran().is_empty()).await;
    fork.stored.say(MessageKind::System, "first said");
    fork.stored.intervene(MessageKind::System, None, Priority::Urgent, "urgent");
    let guardian = Some(Speaker::Guardian);
    fork.stored.intervene(MessageKind::Interrupt, guardian, Priority::Normal, "last said");
    run.await.unwrap().unwrap();
    let seen = last_text(&fork.model.last());
    assert!(seen.contains("[The supervisor of this task interrupted the work]\nlast said"), "{seen}");
    let at = |text: &str| seen.find(text).unwrap();
    assert!(at("urgent") < at("first said") && at("first said") < at("last said"), "{seen}");
    let told: Vec<(Option<Speaker>, Priority)> = fork
        .stored
        .events()
        .into_iter()
        .filter_map(|e| match e {
            AgentEvent::MessageInjected { source, priority, .. } => Some((source, priority)),
            _ => None,
        })
        .collect();
    let expected = [(None, Priority::Urgent), (None, Priority::Normal), (guardian, Priority::Normal)];
    assert_eq!(told, expected);
}

#[tokio::test]
async fn a_note_of_the_system_holds_nothing_up() {
    let mut fork = Fork::list(vec![bash("append /workspace/log x"), say("ok")]);
    fork.stored.say(MessageKind::System, "Half of the time is over.");
    fork.run().await.unwrap();
    assert_eq!(fork.world.ran().len(), 1);
    assert!(fork.model.requests()[0].messages.len() == 1, "it is part of the first question");
    assert!(last_text(&fork.model.requests()[0]).contains("Half of the time"));
}

#[tokio::test]
async fn a_message_after_the_last_answer_is_answered() {
    let model = ScriptModel::new(|request, n| {
        Ok(match n {
            0 => say("done"),
            _ => say(&format!("again: {}", last_text(request))),
        })
    });
    let mut fork = Fork::new(model);
    assert_eq!(fork.run().await.unwrap().final_response, "done");
    // Somebody writes to a fork that has ended: its next attempt goes on.
    fork.stored.say(MessageKind::UserMessage, "One more thing.");
    let outcome = fork.run().await.unwrap();
    assert!(outcome.final_response.contains("One more thing."));
    // Without a message it only repeats its outcome.
    let requests = fork.model.requests().len();
    assert_eq!(fork.run().await.unwrap().final_response, outcome.final_response);
    assert_eq!(fork.model.requests().len(), requests);
}

#[tokio::test]
async fn one_that_lingers_says_that_it_waits_and_goes_on_when_it_is_started_again() {
    let model = ScriptModel::new(|_, n| Ok(say(&format!("answer {n}"))));
    let mut fork = Fork::new(model);
    fork.config.lingers = true;
    fork.run().await.unwrap();
    assert_eq!(fork.stored.kinds()[4..], ["agent.completed", "agent.waiting"]);
    fork.stored.say(MessageKind::GuardianNudge, "Are the tests green?");
    let outcome = fork.run().await.unwrap();
    assert_eq!((outcome.final_response.as_str(), outcome.turns), ("answer 1", 2));
    assert!(last_text(&fork.model.last()).contains("[Guidance from the supervisor"));
    assert_eq!(fork.stored.kinds().iter().filter(|k| **k == "agent.waiting").count(), 2);
}

#[tokio::test]
async fn a_message_during_a_subagent_reaches_it_and_its_parent() {
    let model = ScriptModel::new(|request, n| {
        Ok(match (request.system.contains("You are a subagent"), n) {
            (false, 0) => call(&[("Task", json!({ "description": "d", "prompt": "p" }))]),
            (true, 0) => call(&[
                ("Bash", json!({ "command": "gate g" })),
                ("Bash", json!({ "command": "append /workspace/log never" })),
            ]),
            (_, _) => say(&last_text(request)),
        })
    });
    let mut fork = Fork::new(model);
    let run = tokio::spawn(fork.agent(None).run(fork.cancel.clone()));
    fork.world.until(|w| !w.ran().is_empty()).await;
    fork.stored.say(MessageKind::UserMessage, "Only look.");
    fork.world.open("g");
    let outcome = run.await.unwrap().unwrap();
    assert_eq!(fork.world.ran(), ["gate g"]);
    let requests = fork.model.requests();
    assert!(last_text(&requests[2]).contains("Only look."), "the subagent");
    assert!(outcome.final_response.contains("[Message from the user]\nOnly look."), "the parent");
}

#[tokio::test]
async fn messages_are_said_once_whatever_crashes() {
    let seen = |fork: &Fork| {
        let injected = |e: &AgentEvent| matches!(e, AgentEvent::MessageInjected { .. });
        fork.stored.events().iter().filter(|e| injected(e)).count()
    };
    for how in [Crash::BeforeWrite, Crash::AfterWrite] {
        for appends in 0..8 {
            let mut fork =
                Fork::list(vec![bash("append /workspace/log a"), bash("append /workspace/log b"), say("ok")]);
            fork.stored.say(MessageKind::System, "first");
            let crashed = fork.run_until(appends, how).await.is_err();
            fork.stored.say(MessageKind::System, "second");
            if !crashed {
                break;
            }
            fork.run().await.unwrap();
            assert_eq!((seen(&fork), fork.stored.waiting()), (2, 0), "{how:?} {appends}");
            assert_eq!(fork.world.file("/workspace/log").unwrap(), "a\nb\n");
        }
    }
}
