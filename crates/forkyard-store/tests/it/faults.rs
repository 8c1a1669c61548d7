//! A disk that fills up, a server that dies, files that are not what they should be.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use forkyard_core::view::{RunOutcome, RunStatus};
use forkyard_core::{Attempt, RunId, Timestamp};
use forkyard_store::conformance::{
    LONG, entry, event, events, patiently, run_id, start, start_with, step, until,
};
use forkyard_store::postgres::PostgresStore;
use forkyard_store::{EventQuery, RunCounts, RunQuery, Store, StoreError, StreamId, Words};
use serde_json::json;
use test_support::postgres::Postgres;

use super::child::{Process, retry};

#[test]
fn a_full_disk_is_said_and_survived() {
    let folder = tempfile::tempdir().unwrap();
    Process::start_with_mounts("full", folder.path().to_str().unwrap()).succeed();
}

/// In a process with mounts of its own: a small disk at `folder` fills up and is freed again.
pub async fn full(folder: &str) {
    let mounted = std::process::Command::new("mount")
        .args(["-t", "tmpfs", "-o", "size=6m", "forkyard-test", folder])
        .status()
        .unwrap();
    assert!(mounted.success());
    let ballast = Path::new(folder).join("ballast");
    let store = forkyard_store::open(&format!("{folder}/store.db")).await.unwrap();
    let (run, lease) = start(&store, "a", 2).await;
    let kilobytes = |n: usize| event("agent.big", json!("x".repeat(n << 10)));
    let mut answered = [0_u64, 0];
    for round in 0..3 {
        // Somebody else takes the space.
        let _ = std::fs::write(&ballast, vec![0_u8; 8 << 20]);
        let refused = patiently("the disk is full", async {
            loop {
                let big = entry(&run, 0, 1, answered[0], vec![kilobytes(100)]);
                match store.append_journal(big).await {
                    Ok(done) => answered[0] = done.seq,
                    Err(error) => return error,
                }
            }
        })
        .await;
        assert!(matches!(refused, StoreError::Full(_)), "{refused:?}");
        assert!(refused.is_retryable() && refused.to_string().contains("disk is full"), "{refused}");
        // Reads go on, and show what was answered with Ok and nothing of what was refused.
        assert_eq!(store.journal_len(&run, 0).await.unwrap(), answered[0], "round {round}");
        // Those who retry get through when there is space again; so does everything else.
        let waiting: Vec<_> = (0..8)
            .map(|i| {
                let (store, run) = (store.clone(), run.clone());
                tokio::spawn(async move {
                    retry(|| store.put_command(&run, forkyard_store::conformance::command(None, json!(i))))
                        .await
                })
            })
            .collect();
        std::fs::remove_file(&ballast).unwrap();
        for task in waiting {
            patiently("commands are taken", task).await.unwrap();
        }
        let small =
            retry(|| store.append_journal(entry(&run, 1, 1, answered[1], events("agent.a", 1)))).await;
        answered[1] = small.seq;
    }
    retry(|| store.append(step(&run, lease, 1, events("run.a", 1), vec![]))).await;
    assert_eq!(store.pending_commands(&run).await.unwrap().len(), 24);
    drop(store);
    let conn = rusqlite::Connection::open(format!("{folder}/store.db")).unwrap();
    let check: String = conn.query_row("PRAGMA integrity_check", [], |r| r.get(0)).unwrap();
    assert_eq!(check, "ok");
}

/// Killed and restarted three times while four tasks append.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_dies_is_survived() {
    let server = Arc::new(Postgres::start());
    let url = server.database();
    let store = forkyard_store::open(&url).await.unwrap();
    let (run, lease) = start(&store, "a", 4).await;
    let stop = Arc::new(AtomicBool::new(false));
    let mut writers = tokio::task::JoinSet::new();
    for fork in 0..4_u32 {
        let (store, run, stop) = (store.clone(), run.clone(), stop.clone());
        writers.spawn(async move {
            let (mut at, mut answered, mut failures) = (0, Vec::new(), 0);
            while !stop.load(Ordering::Relaxed) {
                match store.append_journal(entry(&run, fork, 1, at, events("agent.a", 1))).await {
                    Ok(done) => {
                        at = done.seq;
                        answered.push(done);
                    }
                    // It may have been written: whoever gets this has to look.
                    Err(StoreError::Unavailable(_)) => {
                        failures += 1;
                        at = retry(|| store.journal_len(&run, fork)).await;
                    }
                    Err(other) => panic!("{other:?}"),
                }
            }
            (fork, answered, failures)
        });
    }
    let mut watch = store.watch(Some(&run));
    for _ in 0..3 {
        let before = retry(|| store.last_position(&run)).await;
        until("work goes on", || async {
            (store.last_position(&run).await.unwrap_or(0) > before + 20).then_some(())
        })
        .await;
        let server = server.clone();
        tokio::task::spawn_blocking(move || {
            server.kill();
            server.restart();
        })
        .await
        .unwrap();
    }
    let before = retry(|| store.last_position(&run)).await;
    until("work goes on", || async {
        (store.last_position(&run).await.unwrap_or(0) > before + 20).then_some(())
    })
    .await;
    stop.store(true, Ordering::Relaxed);
    let mut failures = 0;
    while let Some(done) = writers.join_next().await {
        let (fork, answered, failed) = done.unwrap();
        failures += failed;
        let seen = store.read_stream(&StreamId::Journal(run.clone(), fork, Attempt(1)), 0, 0).await.unwrap();
        for done in answered {
            assert_eq!(seen[done.seq as usize - 1].position, done.position, "answered with Ok: is there");
        }
    }
    assert!(failures > 0, "the server was away");
    let all = store.read_run(&run, &EventQuery::default()).await.unwrap();
    assert!(all.iter().enumerate().all(|(i, e)| e.position == i as u64 + 1));
    // Leases and watches outlive it too.
    retry(|| store.renew(&run, lease, LONG, None)).await;
    patiently("changes were noticed", watch.changed()).await;
    let other = forkyard_store::open(&url).await.unwrap();
    // Changes of another instance are heard on the new connection.
    let mut watch = store.watch(Some(&run));
    other.put_command(&run, forkyard_store::conformance::command(None, json!(1))).await.unwrap();
    patiently("the listener is back", async {
        while store.pending_commands(&run).await.unwrap().is_empty() {
            watch.changed().await;
        }
    })
    .await;
}

/// Stopped, not dead: nothing breaks off, and nothing answers. Whoever asks is told so, and all goes on with the server.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_stands_still_is_said() {
    let server = Postgres::start();
    let url = server.database();
    let open = || PostgresStore::open_with(&url, Duration::from_secs(2));
    let store: Arc<dyn Store> = Arc::new(open().await.unwrap());
    let (run, lease) = start(&store, "a", 1).await;
    let mut watch = store.watch(Some(&run));
    // One call is in the middle of its statement: it waits for the run's row.
    let pool = sqlx::PgPool::connect(&url).await.unwrap();
    let mut other = pool.begin().await.unwrap();
    sqlx::query("SELECT 1 FROM runs FOR UPDATE").execute(&mut *other).await.unwrap();
    let renewing = tokio::spawn({
        let (store, run) = (store.clone(), run.clone());
        async move { store.renew(&run, lease, LONG, None).await }
    });
    until("it waits for the row", || async {
        let waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'";
        let waits: i64 = sqlx::query_scalar(waits).fetch_one(&pool).await.unwrap();
        (waits > 0).then_some(())
    })
    .await;
    let still = server.stand_still();
    let refused = patiently("the call ends", renewing).await.unwrap().unwrap_err();
    let said = |refused: &StoreError| matches!(refused, StoreError::Unavailable(text) if text.contains("PostgreSQL"));
    assert!(said(&refused) && refused.to_string().contains("has not answered within 2 s"), "{refused}");
    // More than there are connections, of every kind.
    let mut calls = tokio::task::JoinSet::new();
    for i in 0..8 {
        let (store, run) = (store.clone(), run.clone());
        calls.spawn({
            let (store, run) = (store.clone(), run.clone());
            async move { store.run(&run).await.map(drop) }
        });
        calls.spawn({
            let (store, run) = (store.clone(), run.clone());
            async move { store.read_run(&run, &EventQuery::default()).await.map(drop) }
        });
        calls.spawn({
            let (store, run) = (store.clone(), run.clone());
            async move { store.append_journal(entry(&run, 0, 1, 0, events("agent.a", 1))).await.map(drop) }
        });
        calls.spawn(async move { store.put_blob(&format!("{run}/{i}"), b"x").await });
    }
    let again = url.clone();
    calls.spawn(async move { PostgresStore::open_with(&again, Duration::from_secs(2)).await.map(drop) });
    patiently("all calls end", async {
        while let Some(ended) = calls.join_next().await {
            let refused = ended.unwrap().unwrap_err();
            assert!(said(&refused), "{refused}");
        }
    })
    .await;
    drop(still);
    other.rollback().await.unwrap();
    // What was asked for may have been done: whoever asks again looks first.
    patiently("work goes on", async {
        loop {
            let at = retry(|| store.journal_len(&run, 0)).await;
            match store.append_journal(entry(&run, 0, 1, at, events("agent.a", 1))).await {
                Ok(_) => break,
                Err(StoreError::Conflict { .. } | StoreError::Unavailable(_)) => {}
                Err(other) => panic!("{other}"),
            }
        }
    })
    .await;
    patiently("changes are noticed", watch.changed()).await;
    let other: Arc<dyn Store> = Arc::new(open().await.unwrap());
    let mut watch = store.watch(Some(&run));
    other.put_command(&run, forkyard_store::conformance::command(None, json!(1))).await.unwrap();
    patiently("the listener is there", async {
        while store.pending_commands(&run).await.unwrap().is_empty() {
            watch.changed().await;
        }
    })
    .await;
}

#[tokio::test]
async fn files_that_are_no_store_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store.db");
    std::fs::write(&path, "not a database at all ".repeat(500)).unwrap();
    let refused = forkyard_store::open(path.to_str().unwrap()).await.err().unwrap();
    assert!(matches!(&refused, StoreError::Corrupt(text) if text.contains("store.db")), "{refused:?}");
    assert!(std::fs::read(&path).unwrap().starts_with(b"not a database"), "nothing was changed");

    for (url, names) in [
        ("", "names no file"),
        ("sqlite:", "names no file"),
        ("sqlite::memory:", "names no file"),
        ("mysql://x/y", "postgres://"),
        ("http://x", "postgres://"),
        ("postgres://host:notaport/x", "PostgreSQL URL"),
    ] {
        let refused = forkyard_store::open(url).await.err().unwrap();
        assert!(matches!(&refused, StoreError::Invalid(text) if text.contains(names)), "{url}: {refused:?}");
    }
    let nowhere = folder.path().join("store.db/below/a/file");
    let refused = forkyard_store::open(nowhere.to_str().unwrap()).await.err().unwrap();
    assert!(matches!(&refused, StoreError::Unavailable(_)), "{refused:?}");
    for path in ["new/folder/store.db", "sqlite:scheme.db"] {
        let (scheme, rest) = path.split_once(':').map_or(("", path), |(s, r)| (s, r));
        let separator = if scheme.is_empty() { "" } else { ":" };
        let url = format!("{scheme}{separator}{}", folder.path().join(rest).display());
        forkyard_store::open(&url).await.unwrap();
        assert!(folder.path().join(rest).exists());
    }
}

/// Only the first to open a file changes it to a write-ahead log. SQLite does not wait with that for whoever is about to write,
/// as another first one is: it refuses at once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_new_file_is_waited_for() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store.db").display().to_string();
    let other = rusqlite::Connection::open(&path).unwrap();
    other.execute_batch("BEGIN IMMEDIATE").unwrap();
    let mut opening = tokio::spawn(async move { forkyard_store::open(&path).await.map(drop) });
    let early = tokio::time::timeout(Duration::from_millis(500), &mut opening).await;
    assert!(early.is_err(), "it did not wait: {early:?}");
    other.execute_batch("ROLLBACK").unwrap();
    opening.await.unwrap().unwrap();
}

/// A page in the middle is overwritten: reads say so, and do not give nonsense back.
#[tokio::test]
async fn a_damaged_file_is_said() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store.db");
    let run = run_id("a");
    {
        let store = forkyard_store::open(path.to_str().unwrap()).await.unwrap();
        start(&store, "a", 1).await;
        for i in 0..200 {
            let big = event("agent.a", json!("y".repeat(2000)));
            store.append_journal(entry(&run, 0, 1, i, vec![big])).await.unwrap();
        }
    }
    // The log has to be in the file, and the store's threads may end late.
    let conn = rusqlite::Connection::open(&path).unwrap();
    until("nobody else reads", || async {
        let busy: bool = conn.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |r| r.get(0)).unwrap();
        (!busy).then_some(())
    })
    .await;
    drop(conn);
    let mut bytes = std::fs::read(&path).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle..middle + 64 * 1024].fill(0xa5);
    let damaged = folder.path().join("damaged.db");
    std::fs::write(&damaged, bytes).unwrap();
    let store = forkyard_store::open(damaged.to_str().unwrap()).await.unwrap();
    let read = store.read_run(&run, &EventQuery::default()).await;
    let refused = read.map(|events| events.len()).unwrap_err();
    assert!(matches!(refused, StoreError::Corrupt(_)), "{refused:?}");
    assert!(!refused.is_retryable());
}

#[tokio::test]
async fn a_newer_schema_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store.db");
    drop(forkyard_store::open(path.to_str().unwrap()).await.unwrap());
    rusqlite::Connection::open(&path).unwrap().execute("UPDATE schema_version SET version = 99", []).unwrap();
    let refused = forkyard_store::open(path.to_str().unwrap()).await.err().unwrap();
    assert!(
        matches!(&refused, StoreError::Invalid(text) if text.contains("99") && text.contains("newer")),
        "{refused}"
    );

    let url = Postgres::shared().database();
    drop(forkyard_store::open(&url).await.unwrap());
    let pool = sqlx::PgPool::connect(&url).await.unwrap();
    sqlx::query("UPDATE schema_version SET version = 99").execute(&pool).await.unwrap();
    let refused = forkyard_store::open(&url).await.err().unwrap();
    assert!(
        matches!(&refused, StoreError::Invalid(text) if text.contains("99") && text.contains("newer")),
        "{refused}"
    );
}

#[tokio::test]
async fn a_server_that_is_not_there_is_said() {
    let folder = tempfile::tempdir().unwrap();
    let url = format!("postgres://nobody:secret@localhost/x?host={}", folder.path().display());
    let refused = forkyard_store::open(&url).await.err().unwrap();
    assert!(matches!(&refused, StoreError::Unavailable(_)), "{refused:?}");
    assert!(!refused.to_string().contains("secret"));
    let url = Postgres::shared().database().replace("/t0", "/other");
    let refused = forkyard_store::open(&url).await.err().unwrap();
    assert!(matches!(&refused, StoreError::Unavailable(text) if text.contains("other")), "{refused:?}");
}

/// What undoes the migration that brought the search: a store as the program before it left it.
const BEFORE_SEARCH: [&str; 4] = [
    "DROP TABLE run_words",
    "DROP INDEX run_views_by_end",
    "ALTER TABLE run_views DROP COLUMN ended_as",
    "UPDATE schema_version SET version = version - 1",
];

async fn two_runs(store: &Arc<dyn Store>) {
    start_with(store, "a", 0, |v| v.prompt = "Größer".into()).await;
    start_with(store, "b", 0, |v| {
        (v.status, v.outcome, v.created_at) = (RunStatus::Ended, Some(RunOutcome::Failed), Timestamp(9))
    })
    .await;
}

async fn two_are_found(store: &Arc<dyn Store>) {
    let found = async |query| store.runs(&query).await.unwrap().into_iter().map(|v| v.id).collect::<Vec<_>>();
    let words = Words::parse("GRÖSS").unwrap();
    assert_eq!(found(RunQuery { words, ..Default::default() }).await, Vec::<RunId>::new());
    let words = Words::parse("GRÖßer").unwrap();
    assert_eq!(found(RunQuery { words, ..Default::default() }).await, [run_id("a")]);
    let outcomes = vec![RunOutcome::Failed];
    assert_eq!(found(RunQuery { outcomes, ..Default::default() }).await, [run_id("b")]);
    let counts = RunCounts { all: 2, live: 1, failed: 1, ..Default::default() };
    assert_eq!(store.count_runs(&Words::default()).await.unwrap(), counts);
}

#[tokio::test]
async fn runs_of_an_older_store_are_found() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store.db");
    two_runs(&forkyard_store::open(path.to_str().unwrap()).await.unwrap()).await;
    rusqlite::Connection::open(&path).unwrap().execute_batch(&BEFORE_SEARCH.join(";")).unwrap();
    two_are_found(&forkyard_store::open(path.to_str().unwrap()).await.unwrap()).await;
    let url = tokio::task::spawn_blocking(|| Postgres::shared().database()).await.unwrap();
    two_runs(&forkyard_store::open(&url).await.unwrap()).await;
    let pool = sqlx::PgPool::connect(&url).await.unwrap();
    for statement in BEFORE_SEARCH {
        sqlx::query(statement).execute(&pool).await.unwrap();
    }
    two_are_found(&forkyard_store::open(&url).await.unwrap()).await;
}
