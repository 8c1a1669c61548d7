//! Journals as releases wrote them, kept for ever: a resumed agent rebuilds its conversation from them, whichever release it is of.
//!
//! A file under `tests/fixtures/journals` is written once, by `cargo nextest run --workspace --run-ignored only -E
//! 'test(write_the_journal_of_this_version)'`, and never changed. Fields may come; what was recorded has to be read and mean the
//! same.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use forkyard_agent::Stop;
use forkyard_agent::event::*;
use forkyard_agent::inference::{Block, Image, RawJson, ResultPart, StopReason};
use forkyard_agent::ports::{CheckpointInfo, CheckpointKind, MessageKind, Priority};
use forkyard_core::policy::Rule;
use forkyard_core::pricing::Usage;
use forkyard_core::{Attempt, SandboxId, SnapshotId, Timestamp, Usd};
use serde_json::{Value, json};

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/journals")
}

/// Everything that was recorded is there.
fn assert_holds(recorded: &Value, now: &Value, at: &str) {
    match (recorded, now) {
        (Value::Object(recorded), Value::Object(now)) => {
            for (key, value) in recorded {
                assert_holds(value, now.get(key).unwrap_or(&Value::Null), &format!("{at}.{key}"));
            }
        }
        (recorded, now) => assert_eq!(recorded, now, "{at}"),
    }
}

/// Of a file, by line: the entry, and what was recorded.
fn read(path: &Path) -> Vec<(JournalEntry, Value)> {
    let text = std::fs::read_to_string(path).unwrap();
    let entry = |line: &str| {
        let mut line: Value = serde_json::from_str(line).unwrap();
        let at = Timestamp(line["at"].as_u64().unwrap());
        let version = u16::try_from(line["version"].as_u64().unwrap()).unwrap();
        let (kind, data) = (line["kind"].as_str().unwrap().to_string(), line["data"].take());
        (JournalEntry::from_stored(&kind, version, at, data.clone()).unwrap(), data)
    };
    text.lines().map(entry).collect()
}

#[test]
fn old_journals_are_read_as_what_they_meant() {
    for file in std::fs::read_dir(folder()).unwrap() {
        let path = file.unwrap().path();
        for (i, (entry, recorded)) in read(&path).iter().enumerate() {
            let (_, now) = entry.to_stored();
            assert_holds(recorded, &now, &format!("{}:{}", path.display(), i + 1));
        }
    }
}

/// A new kind does not compile until `kinds!` names it, and then the fixture has to hold it.
#[test]
fn every_kind_of_entry_has_a_fixture() {
    let path = folder().join(format!("v{EVENT_VERSION}.jsonl"));
    let seen: BTreeSet<&str> = read(&path).iter().map(|(entry, _)| entry.event.kind()).collect();
    let all: BTreeSet<&str> = AgentEvent::KINDS.iter().copied().collect();
    assert_eq!(seen, all);
}

// ---- how it was written

#[test]
#[ignore = "writes the fixture of a new version"]
fn write_the_journal_of_this_version() {
    let path = folder().join(format!("v{EVENT_VERSION}.jsonl"));
    assert!(!path.exists(), "{} is there: what was released is never changed", path.display());
    std::fs::create_dir_all(folder()).unwrap();
    let mut text = String::new();
    for (i, event) in all().into_iter().enumerate() {
        let subagent = (i % 5 == 4).then(|| "toolu_sub".to_string());
        let entry = JournalEntry { at: Timestamp(1_000_000 + i as u64), subagent, event };
        let (kind, data) = entry.to_stored();
        let line = json!({ "at": entry.at.0, "kind": kind, "version": EVENT_VERSION, "data": data });
        text.push_str(&format!("{line}\n"));
    }
    std::fs::write(path, text).unwrap();
}

/// One of each, with every field, and every case of what stands in them.
fn all() -> Vec<AgentEvent> {
    let sandbox_id = SandboxId::new("box1").unwrap();
    let usage = Usage { input: 10, output: 20, cache_write_5m: 30, cache_write_1h: 40, cache_read: 50 };
    let image = || Image { media_type: "image/png".into(), base64: "aGk=".into() };
    let raw = || RawJson::new("{ \"command\" : \"make\" }");
    let call = || "toolu_1".to_string();
    let content = vec![
        Block::text("let me see"),
        Block::Thinking { thinking: "hm".into(), signature: "c2ln".into() },
        Block::RedactedThinking { data: "c2VjcmV0".into() },
        Block::ToolUse { id: call(), name: "Bash".into(), input: raw() },
        Block::Other { json: RawJson::new("{\"type\":\"new\"}") },
    ];
    let said = |stop_reason| {
        AgentEvent::AssistantMessage(AssistantMessage {
            turn: 1,
            content: content.clone(),
            stop_reason,
            usage,
            cost: Usd(123),
            model: "m".into(),
            request_id: Some("req_1".into()),
            tries: 2,
        })
    };
    let checkpoint = |kind, snapshot: Option<&str>| AgentEvent::CheckpointCreated {
        turn: 1,
        position: 7,
        checkpoint: CheckpointInfo {
            id: "c1".into(),
            kind,
            snapshot: snapshot.map(|s| SnapshotId::new(s).unwrap()),
            at: Timestamp(5),
        },
        dropped: vec!["c0".into()],
    };
    let completed = |stop_reason| Completed {
        success: stop_reason == Stop::EndTurn,
        stop_reason,
        turns: 3,
        tool_calls: 4,
        errors: vec!["one".into()],
        cost_usd: 0.25,
        usage,
        final_output: "done".into(),
        branch_name: "main".into(),
        duration_ms: 1234,
    };
    let edited = |change_type| {
        AgentEvent::FileEdited(FileEdited {
            turn: 1,
            tool_use_id: call(),
            file_path: "src/a.rs".into(),
            change_type,
            lines_added: 2,
            lines_removed: 1,
            diff_preview: "-a\n+b\n".into(),
            full_diff: Some("-a\n+b\n".into()),
            full_diff_available: true,
            full_diff_size: 6,
        })
    };
    let mut all = vec![
        AgentEvent::Started(Started {
            sandbox_id: sandbox_id.clone(),
            fork_num: 2,
            attempt: Attempt(1),
            model: "m".into(),
            repo_url: "/repo".into(),
            branch: "main".into(),
            max_turns: 100,
            tools: vec!["Bash".into()],
        }),
        AgentEvent::Resumed(Resumed {
            sandbox_id,
            attempt: Attempt(2),
            rewound_to: Some(3),
            message: Some("what was lost".into()),
        }),
        AgentEvent::SystemMessage { text: "be brief".into() },
        AgentEvent::UserMessage {
            content: vec![
                Block::text("fix it"),
                Block::Image(image()),
                Block::ToolResult {
                    tool_use_id: call(),
                    content: vec![ResultPart::Text { text: "ok".into() }, ResultPart::Image(image())],
                    is_error: true,
                },
            ],
            shared_blocks: 1,
        },
        AgentEvent::ToolUse(ToolUse {
            turn: 1,
            tool: "Write".into(),
            tool_use_id: call(),
            input: json!({ "file_path": "a" }),
            rewritten: Some(raw()),
            plan: Some(FilePlan { before: Some("00".into()), after: "11".into() }),
        }),
        AgentEvent::Interrupted { turn: 1, tool_use_id: Some(call()), cost: Usd(5) },
        AgentEvent::Compacted { turn: 2, summary: "so far".into(), usage, cost: Usd(9) },
        checkpoint(CheckpointKind::Full, Some("s1")),
        checkpoint(CheckpointKind::Work, None),
        AgentEvent::SubagentInvoked {
            turn: 2,
            tool_use_id: call(),
            description: "look".into(),
            prompt: "look for it".into(),
        },
        AgentEvent::SubagentCompleted { turn: 2, tool_use_id: call(), success: true, turns: 3, cost: Usd(7) },
        AgentEvent::SkillInvoked { turn: 2, tool_use_id: call(), skill: "review".into(), trusted: true },
        AgentEvent::Error { turn: 2, error: "no".into() },
        AgentEvent::Waiting { turn: 3 },
        AgentEvent::Shutdown { turn: 3, reason: "stopped".into() },
        edited(ChangeType::Created),
        edited(ChangeType::Modified),
        AgentEvent::Completed(completed(Stop::EndTurn)),
    ];
    for stop in
        ["end_turn", "max_tokens", "stop_sequence", "tool_use", "pause_turn", "refusal", "something_new"]
    {
        all.push(said(StopReason::from(stop.to_string())));
    }
    for rule in [None, Some(Rule::BlockedCommand), Some(Rule::Interceptor)] {
        all.push(AgentEvent::ToolCompleted(ToolCompleted {
            turn: 1,
            tool: "Bash".into(),
            tool_use_id: call(),
            tool_input: json!({ "command": "make" }),
            tool_response: vec![ResultPart::Text { text: "no".into() }],
            is_error: rule.is_some(),
            denied_by: rule,
            cached: true,
            duration_ms: 12,
        }));
    }
    for kind in
        [MessageKind::UserMessage, MessageKind::Interrupt, MessageKind::GuardianNudge, MessageKind::System]
    {
        all.push(AgentEvent::MessageInjected {
            message_id: 3,
            kind,
            source: None,
            priority: Priority::Normal,
            content: "hello".into(),
            turn: 2,
        });
    }
    for error_type in [
        StreamErrorType::Sigkill,
        StreamErrorType::CommandFailed,
        StreamErrorType::StreamInit,
        StreamErrorType::Unknown,
    ] {
        all.push(AgentEvent::StreamError { turn: 2, error: "cut".into(), error_type, cost: Usd(3) });
    }
    for stop in [
        Stop::MaxTokens,
        Stop::Refusal,
        Stop::MaxTurns,
        Stop::BudgetExceeded,
        Stop::Timeout,
        Stop::ContextTooLong,
    ] {
        all.push(AgentEvent::Failed(completed(stop)));
    }
    all
}
