//! Who may take a run from whom: nobody waits for a process that is gone.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use forkyard_core::spec::{ModelKnown, RunSpec};
use forkyard_core::task::{ErrorClass, TaskError, TaskResult};
use forkyard_core::{HostId, RunId};
use forkyard_engine::Engine;
use forkyard_engine::activity::{Activities, Job};
use forkyard_engine::clock::Clock;
use forkyard_engine::embedded::{DriveEnd, Embedded, EmbeddedConfig, Owner};
use test_support::memstore::MemStore;
use tokio_util::sync::CancellationToken;

struct Nothing;

#[async_trait]
impl Activities for Nothing {
    async fn perform(&self, _: Job) -> TaskResult {
        Err(TaskError::new(ErrorClass::Cancelled, "nothing is done here"))
    }
}

/// Longer than any test.
const LONG: Duration = Duration::from_secs(3600);

#[tokio::test]
async fn a_run_is_taken_from_a_dead_process_at_once_and_from_no_other() {
    let store: Arc<dyn forkyard_store::Store> = Arc::new(MemStore::default());
    let config = EmbeddedConfig::new(HostId::new("h1").unwrap(), "me");
    let engine = Embedded::new(
        store.clone(),
        Arc::new(Nothing),
        Arc::new(|_| ModelKnown::Priced),
        Clock::system(),
        config,
    );
    let me = Owner::me().unwrap().name("another");
    let words: Vec<&str> = me.split('.').collect();
    // The same number, but a process that began at another time.
    let dead = [&words[..2], &["1"], &words[3..]].concat().join(".");
    let elsewhere = [&words[..4], &["another-boot"], &words[5..]].concat().join(".").replace(words[2], "1");
    for (i, (owner, taken)) in [(dead.as_str(), true), (&me, false), (&elsewhere, false), ("somebody", false)]
        .into_iter()
        .enumerate()
    {
        let run = RunId::new(format!("run{i}")).unwrap();
        engine.submit(run.clone(), RunSpec::new("/repo", "p", "m", 1), None).await.unwrap();
        let lease = store.acquire(&run, owner, LONG).await.unwrap().unwrap();
        assert_eq!(engine.is_driven(&run).await.unwrap(), !taken, "{owner}");
        let stop = CancellationToken::new();
        stop.cancel();
        let end = engine.drive(&run, stop).await.unwrap();
        assert_eq!(end, taken.then_some(DriveEnd::Stopped), "{owner}");
        assert_eq!(store.renew(&run, lease.token, LONG, None).await.is_err(), taken, "{owner}");
        assert!(!engine.is_driving(&run));
    }
}
