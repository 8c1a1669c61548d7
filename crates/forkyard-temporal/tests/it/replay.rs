//! Histories replay: those of old releases, kept as fixtures, and those that tests have just made.

use std::path::{Path, PathBuf};

use forkyard_core::{ForkNum, RunId};
use forkyard_temporal::Service;
use forkyard_temporal::cleanup::CleanupFlow;
use forkyard_temporal::fork::ForkFlow;
use forkyard_temporal::run::RunFlow;
use forkyard_temporal::wire::LOGIC;
use temporalio_client::WorkflowHistory;
use temporalio_sdk::workflow_replayer::{WorkflowReplayer, WorkflowReplayerOptions};

/// Those that workflows of this logic left.
pub fn fixtures(logic: u32) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/fixtures/logic{logic}"))
}

fn read(logic: u32) -> Vec<(PathBuf, Vec<u8>)> {
    let entries = std::fs::read_dir(fixtures(logic));
    let entries = entries.unwrap_or_else(|e| panic!("no histories of logic {logic}, write them: {e}"));
    entries.map(|e| e.unwrap().path()).map(|path| (path.clone(), std::fs::read(path).unwrap())).collect()
}

/// What a history came to, if the workflows of this release do what it says.
async fn replays(json: &[u8]) -> Result<(), String> {
    let history = WorkflowHistory::from_json(json).map_err(|e| e.to_string())?;
    let options = WorkflowReplayerOptions::new()
        .register_workflow::<RunFlow>()
        .and_then(|o| o.register_workflow::<ForkFlow>())
        .and_then(|o| o.register_workflow::<CleanupFlow>())
        .map_err(|e| e.to_string())?
        .build();
    let replayer = WorkflowReplayer::new(options).map_err(|e| e.to_string())?;
    // The replayer's futures stay on one thread.
    replayer.replay_workflow(history).await.map_err(|e| format!("{e:?}"))
}

pub fn replay(json: Vec<u8>) -> Result<(), String> {
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        tokio::task::LocalSet::new().block_on(&runtime, replays(&json))
    })
    .join()
    .unwrap_or_else(|_| Err("the replay broke off".into()))
}

/// All histories of a run, by name: its own and those of its forks.
pub async fn histories(service: &Service, run: &RunId, forks: ForkNum) -> Vec<(String, Vec<u8>)> {
    let mut all = vec![];
    let own = service.run_handle(run).fetch_history(Default::default());
    all.push((format!("{run}"), own.to_json().await.unwrap()));
    for fork in 0..forks {
        let history = service.fork_handle(run, fork).fetch_history(Default::default());
        all.push((format!("{run}-{fork}"), history.to_json().await.unwrap()));
    }
    all
}

#[test]
fn old_histories_replay() {
    for logic in 1..=LOGIC {
        let histories = read(logic);
        assert!(histories.len() >= 9, "{} histories of logic {logic}", histories.len());
        for (path, history) in histories {
            replay(history).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        }
    }
}

/// Whatever workflows of this release do is in a history that every release after it replays.
#[test]
fn every_activity_and_signal_is_in_a_history() {
    let all: String = read(LOGIC).into_iter().map(|(_, h)| String::from_utf8(h).unwrap()).collect();
    for activity in ACTIVITIES {
        let scheduled = format!("\"activity_type\":{{\"name\":\"{activity}\"}}");
        assert!(all.contains(&scheduled), "no history of logic {LOGIC} has the activity {activity}");
    }
    for signal in SIGNALS {
        let signalled = format!("\"signal_name\":\"{signal}\"");
        assert!(all.contains(&signalled), "no history of logic {LOGIC} has the signal {signal}");
    }
}

const ACTIVITIES: &[&str] = &[
    "open",
    "record",
    "inbox",
    "look",
    "tell",
    "hosts",
    "sweep",
    "prepare_base",
    "verify_base",
    "check_budget",
    "create_sandbox",
    "health_check",
    "run_agent",
    "collect",
    "verify",
    "publish",
    "cleanup_sandbox",
];

const SIGNALS: &[&str] = &[
    "pause",
    "resume",
    "cancel",
    "command",
    "message",
    "commands_waiting",
    "spent",
    "wish",
    "message_waiting",
    "let_go",
    "take_over",
    "stop",
];

/// A replayer that accepts everything would prove nothing.
#[test]
fn another_history_is_refused() {
    let path = fixtures(1).join("plain-0.json");
    let text = std::fs::read_to_string(&path).unwrap();
    let other = text.replace("\"health_check\"", "\"collect\"");
    assert_ne!(text, other);
    replay(other.into_bytes()).unwrap_err();
}
