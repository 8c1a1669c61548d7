//! Machines rebuilt from a real store.

use std::time::Duration;

use forkyard_core::run::{Run, RunEvent, RunInput};
use forkyard_core::spec::RunSpec;
use forkyard_core::{RunId, Timestamp};
use forkyard_engine::log;
use forkyard_store::{Append, CreateRun, StreamId};

/// Large events make the store's pages short: none may be taken for the last.
#[tokio::test]
async fn a_log_of_large_events_is_read_to_its_end() {
    let folder = tempfile::tempdir().unwrap();
    let store = forkyard_store::open(folder.path().join("s.db").to_str().unwrap()).await.unwrap();
    let now = Timestamp(1_000);
    let (mut run, step) = Run::submit(now, RunId::new("a").unwrap(), RunSpec::new("/repo", "p", "m", 1));
    let mut events = step.events;
    let large = RunEvent::Refused { command: "x".into(), reason: "y".repeat(12 << 20) };
    events.extend(vec![large; 4]);
    events.extend(run.handle(now, RunInput::Takeover { commands: vec![] }).events);
    let first = log::stored(now, &events[0], None);
    let new = CreateRun { run: run.id().clone(), key: None, events: vec![first], views: run.views() };
    store.create_run(new).await.unwrap();
    let lease = store.acquire(run.id(), "me", Duration::from_secs(60)).await.unwrap().unwrap();
    let append = Append {
        stream: StreamId::Run(run.id().clone()),
        lease: lease.token,
        expected: 1,
        events: events[1..].iter().map(|e| log::stored(now, e, None)).collect(),
        views: vec![],
        consume: vec![],
    };
    store.append(append).await.unwrap();
    let (again, length) = log::load_run(&*store, run.id()).await.unwrap().unwrap();
    assert_eq!(length, events.len() as u64);
    assert_eq!(again.tenure(), run.tenure(), "what came after the large ones counts");
}
