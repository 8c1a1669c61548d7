//! Histories replay: those of old releases, kept as fixtures, and those that tests have just made.

use std::path::{Path, PathBuf};

use forkyard_core::{ForkNum, RunId};
use forkyard_temporal::Service;
use forkyard_temporal::cleanup::CleanupFlow;
use forkyard_temporal::fork::ForkFlow;
use forkyard_temporal::run::RunFlow;
use temporalio_client::WorkflowHistory;
use temporalio_sdk::workflow_replayer::{WorkflowReplayer, WorkflowReplayerOptions};

pub fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures")
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
    let mut seen = 0;
    for entry in std::fs::read_dir(fixtures()).unwrap() {
        let path = entry.unwrap().path();
        replay(std::fs::read(&path).unwrap()).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        seen += 1;
    }
    assert!(seen >= 4, "{seen} fixtures");
}

/// A replayer that accepts everything would prove nothing.
#[test]
fn another_history_is_refused() {
    let path = fixtures().join("plain-0.json");
    let text = std::fs::read_to_string(&path).unwrap();
    let other = text.replace("\"health_check\"", "\"collect\"");
    assert_ne!(text, other);
    replay(other.into_bytes()).unwrap_err();
}
