//! SQLite: the suite of all stores, and what only a file on one host has to bear.

mod conformance {
    use std::sync::Arc;

    use forkyard_store::Store;

    /// The folder goes when the test's process does; nextest gives each test a process.
    async fn empty() -> Arc<dyn Store> {
        let folder = tempfile::tempdir().unwrap();
        let store = forkyard_store::open(folder.path().join("store.db").to_str().unwrap()).await.unwrap();
        test_support::keep_until_exit(folder);
        store
    }

    forkyard_store::conformance!(empty);
}

use forkyard_core::SandboxId;
use forkyard_core::view::View;
use forkyard_store::StoreError;
use forkyard_store::conformance::{LONG, entry, event, events, fork_view, patiently, run_id, start, step};
use serde_json::json;

/// Another program holds the write lock for a while: writes wait, reads do not.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_held_write_lock_is_waited_for() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store.db");
    let store = forkyard_store::open(path.to_str().unwrap()).await.unwrap();
    let (run, _) = start(&store, "a", 1).await;
    let other = rusqlite::Connection::open(&path).unwrap();
    other.execute_batch("BEGIN IMMEDIATE").unwrap();
    let append = {
        let (store, run) = (store.clone(), run.clone());
        tokio::spawn(async move { store.append_journal(entry(&run, 0, 1, 0, events("agent.a", 1))).await })
    };
    assert_eq!(store.last_position(&run).await.unwrap(), 1);
    assert!(!append.is_finished());
    other.execute_batch("ROLLBACK").unwrap();
    assert_eq!(patiently("the lock is free", append).await.unwrap().unwrap().seq, 1);
}

/// Boot time starts anew with the machine, so a lease of another boot has ended, whatever its number says.
#[tokio::test]
async fn a_lease_of_another_boot_has_ended() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store.db");
    let store = forkyard_store::open(path.to_str().unwrap()).await.unwrap();
    let (run, token) = start(&store, "a", 1).await;
    assert_eq!(store.acquire(&run, "other", LONG).await.unwrap(), None);
    let conn = rusqlite::Connection::open(&path).unwrap();
    conn.execute("UPDATE runs SET lease_boot = 'another'", []).unwrap();
    assert_eq!(store.claimable(0).await.unwrap(), std::slice::from_ref(&run));
    let lease = store.acquire(&run, "other", LONG).await.unwrap().unwrap();
    assert!(lease.token > token);
}

#[tokio::test]
async fn sandbox_events_are_a_view_for_everybody() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store.db");
    let store = forkyard_store::open(path.to_str().unwrap()).await.unwrap();
    let (run, lease) = start(&store, "a", 1).await;
    let mut about = event("sandbox.created", json!({ "x": 1 }));
    about.sandbox = Some(SandboxId::new("box1").unwrap());
    store.append(step(&run, lease, 1, vec![about, event("run.a", json!(2))], vec![])).await.unwrap();
    let row: (String, String, String, String, i64) = rusqlite::Connection::open(&path)
        .unwrap()
        .query_row(
            "SELECT sandbox_id, event_type, event_data, source, created_at FROM sandbox_events ORDER BY id",
            [],
            |r| Ok((r.get(0)?, r.get(1)?, r.get(2)?, r.get(3)?, r.get(4)?)),
        )
        .unwrap();
    assert_eq!(row, ("box1".into(), "sandbox.created".into(), "{\"x\":1}".into(), "system".into(), 1_000));
}

/// One request is refused, its neighbours in the same transaction are written.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refused_request_does_not_spoil_its_batch() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store.db");
    let store = forkyard_store::open(path.to_str().unwrap()).await.unwrap();
    let (run, _) = start(&store, "a", 40).await;
    // While the lock is held, all of them wait and make up one batch.
    let other = rusqlite::Connection::open(&path).unwrap();
    other.execute_batch("BEGIN IMMEDIATE").unwrap();
    let mut tasks = tokio::task::JoinSet::new();
    for fork in 0..40 {
        let (store, run) = (store.clone(), run.clone());
        tasks.spawn(async move {
            let expected = if fork % 3 == 0 { 7 } else { 0 };
            (fork, store.append_journal(entry(&run, fork, 1, expected, events("agent.a", 2))).await.is_ok())
        });
    }
    tokio::task::yield_now().await;
    other.execute_batch("ROLLBACK").unwrap();
    while let Some(done) = tasks.join_next().await {
        let (fork, ok) = done.unwrap();
        assert_eq!(ok, fork % 3 != 0);
        assert_eq!(store.journal_len(&run_id("a"), fork).await.unwrap(), if ok { 2 } else { 0 });
    }
}

/// Prompts and transcripts are nobody else's business.
#[tokio::test]
async fn the_files_are_the_owners_alone() {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store.db");
    let store = forkyard_store::open(path.to_str().unwrap()).await.unwrap();
    start(&store, "a", 1).await;
    let mut names = Vec::new();
    for file in std::fs::read_dir(folder.path()).unwrap() {
        let file = file.unwrap();
        names.push(file.file_name().into_string().unwrap());
        assert_eq!(file.metadata().unwrap().permissions().mode() & 0o777, 0o600, "{names:?}");
    }
    names.sort();
    assert_eq!(names, ["store.db", "store.db-shm", "store.db-wal"]);
}

/// What a process remembers of the journals' ends holds only until another one writes.
#[tokio::test]
async fn entries_of_two_processes_follow_each_other() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store.db");
    let one = forkyard_store::open(path.to_str().unwrap()).await.unwrap();
    let other = forkyard_store::open(path.to_str().unwrap()).await.unwrap();
    let (run, lease) = start(&one, "a", 2).await;
    let mut position = one.last_position(&run).await.unwrap();
    for round in 0..3 {
        for (store, fork) in [(&one, 0), (&one, 1), (&other, 0), (&other, 1)] {
            let at = store.journal_len(&run, fork).await.unwrap();
            let done = store.append_journal(entry(&run, fork, 1, at, events("agent.a", 2))).await.unwrap();
            position += 2;
            assert_eq!((done.seq, done.position), (at + 2, position), "round {round}, fork {fork}");
        }
    }
    // The other process takes the fork over; the first has just written under the attempt that is now old.
    let taken = vec![View::Fork(fork_view(&run, 0, 2))];
    other.append(step(&run, lease, 1, vec![event("run.a", json!(1))], taken)).await.unwrap();
    let stale = one.append_journal(entry(&run, 0, 1, 12, events("agent.a", 1))).await;
    assert!(matches!(stale, Err(StoreError::StaleAttempt { .. })), "{stale:?}");
    assert_eq!(one.last_position(&run).await.unwrap(), position + 1);
}
