//! Several processes on one store, on both kinds of it.

use std::collections::BTreeSet;
use std::sync::Arc;

use forkyard_core::Usd;
use forkyard_store::conformance::{entry, events, patiently, start, until};
use forkyard_store::{EventQuery, Store};
use test_support::postgres::Postgres;

use super::child::Process;

fn sqlite_url() -> String {
    let folder = tempfile::tempdir().unwrap();
    let url = format!("sqlite:{}", folder.path().join("store.db").display());
    test_support::keep_until_exit(folder);
    url
}

fn postgres_url() -> String {
    Postgres::shared().database()
}

macro_rules! on_both {
    ($($case:ident),+ $(,)?) => {
        mod on_sqlite {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $case() {
                super::$case(super::sqlite_url()).await;
            })+
        }
        mod on_postgres {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $case() {
                super::$case(super::postgres_url()).await;
            })+
        }
    };
}

on_both!(
    a_killed_writer_loses_nothing,
    a_watcher_in_another_process_misses_nothing,
    processes_never_overshoot_together,
    a_reader_follows_writers_of_other_processes,
    processes_that_start_at_once_share_one_store,
);

async fn all_events(store: &Arc<dyn Store>) -> Vec<forkyard_store::Recorded> {
    let run = forkyard_store::conformance::run_id("a");
    let mut seen: Vec<forkyard_store::Recorded> = Vec::new();
    loop {
        let after = seen.last().map_or(0, |e| e.position);
        let page = store.read_run(&run, &EventQuery { after, ..Default::default() }).await.unwrap();
        if page.is_empty() {
            return seen;
        }
        seen.extend(page);
    }
}

/// SIGKILL in the middle of appends: every one that was answered with Ok is there, and nothing is torn.
async fn a_killed_writer_loses_nothing(url: String) {
    let store = forkyard_store::open(&url).await.unwrap();
    start(&store, "a", 4).await;
    let mut answered = BTreeSet::new();
    let full = std::env::var("FORKYARD_TEST_SCALE").is_ok_and(|scale| scale == "full");
    for round in 0..if full { 60 } else { 6 } {
        let mut writer = Process::start("write", &url, "0 4 1000000");
        let mut lines = writer.lines();
        for _ in 0..5 + round * 23 {
            answered.insert(lines.next().expect("it writes until it is killed"));
        }
        writer.kill();
        answered.extend(lines);
    }
    let seen = all_events(&store).await;
    let positions: Vec<u64> = seen.iter().map(|e| e.position).collect();
    assert_eq!(positions, (1..=seen.len() as u64).collect::<Vec<_>>());
    for words in &answered {
        let [ok, fork, seq, position] = words.as_slice() else { panic!("{words:?}") };
        assert_eq!(ok, "ok");
        let found = &seen[position.parse::<usize>().unwrap() - 1];
        assert_eq!((found.stream.fork(), found.seq), (fork.parse().ok(), seq.parse().unwrap()), "{words:?}");
    }
    // Each append was of two events: both are there or none.
    for fork in 0..4 {
        assert_eq!(store.journal_len(&forkyard_store::conformance::run_id("a"), fork).await.unwrap() % 2, 0);
    }
    assert!(answered.len() > 300, "{}", answered.len());
    if let Some(path) = url.strip_prefix("sqlite:") {
        let check: String = rusqlite::Connection::open(path)
            .unwrap()
            .query_row("PRAGMA integrity_check", [], |r| r.get(0))
            .unwrap();
        assert_eq!(check, "ok");
    }
}

async fn a_watcher_in_another_process_misses_nothing(url: String) {
    let store = forkyard_store::open(&url).await.unwrap();
    let (run, _) = start(&store, "a", 1).await;
    const LAST: u64 = 30;
    let mut watcher = Process::start("watch", &url, LAST);
    let mut lines = watcher.lines();
    // One change at a time: each has to wake it, or this waits for ever.
    let follow = tokio::task::spawn_blocking(move || {
        let mut at = 0;
        move |wanted: u64| {
            while at < wanted {
                let words = lines.next().expect("it watches until the last change");
                at = words[1].parse().unwrap();
            }
        }
    });
    let mut follow = follow.await.unwrap();
    for position in 1..=LAST {
        if position > 1 {
            store.append_journal(entry(&run, 0, 1, position - 2, events("agent.a", 1))).await.unwrap();
        }
        follow = patiently(
            "the watcher wakes",
            tokio::task::spawn_blocking(move || {
                follow(position);
                follow
            }),
        )
        .await
        .unwrap();
    }
    watcher.succeed();
}

async fn processes_never_overshoot_together(url: String) {
    let store = forkyard_store::open(&url).await.unwrap();
    let (run, _) = start(&store, "a", 3).await;
    let mut spenders: Vec<Process> = (0..3).map(|fork| Process::start("spend", &url, fork)).collect();
    let outputs: Vec<_> = spenders.iter_mut().map(Process::lines).collect();
    let watching = {
        let (store, run) = (store.clone(), run.clone());
        tokio::spawn(async move {
            loop {
                let balance = store.balance(&run).await.unwrap();
                assert!(balance.spent + balance.reserved <= Usd(1_000), "{balance:?}");
                tokio::time::sleep(std::time::Duration::from_millis(5)).await;
            }
        })
    };
    let spent = tokio::task::spawn_blocking(|| {
        outputs.into_iter().flatten().map(|words| words[1].parse::<u64>().unwrap()).sum::<u64>()
    });
    let spent = patiently("all is spent", spent).await.unwrap();
    assert!(!watching.is_finished(), "the balance was never above the budget");
    watching.abort();
    spenders.into_iter().for_each(Process::succeed);
    let balance = store.balance(&run).await.unwrap();
    assert_eq!((balance.spent, balance.reserved), (Usd(spent), Usd(0)));
    assert!(spent > 1_000 - 7 && spent <= 1_000, "{spent}");
}

async fn a_reader_follows_writers_of_other_processes(url: String) {
    let store = forkyard_store::open(&url).await.unwrap();
    let (run, _) = start(&store, "a", 6).await;
    const STEPS: u64 = 40;
    let total = 1 + 6 * STEPS * 2;
    let writers: Vec<Process> = [(0, 2), (2, 4), (4, 6)]
        .map(|(from, to)| {
            let mut writer = Process::start("write", &url, format!("{from} {to} {STEPS}"));
            // Somebody has to read it.
            let lines = writer.lines();
            std::thread::spawn(move || lines.for_each(drop));
            writer
        })
        .into();
    let tail = async {
        let mut watch = store.watch(Some(&run));
        let mut last = 0;
        while last < total {
            let query = EventQuery { after: last, limit: 17, ..Default::default() };
            let page = store.read_run(&run, &query).await.unwrap();
            if page.is_empty() {
                watch.changed().await;
            }
            for e in page {
                assert_eq!(e.position, last + 1, "no gap, in order");
                last = e.position;
            }
        }
    };
    patiently("every event is read", tail).await;
    writers.into_iter().for_each(Process::succeed);
    assert_eq!(all_events(&store).await.len() as u64, total);
}

async fn processes_that_start_at_once_share_one_store(url: String) {
    let mut openers: Vec<Process> = (0..4).map(|_| Process::start("open", &url, "")).collect();
    let identities: BTreeSet<Vec<String>> = openers.iter_mut().flat_map(Process::lines).collect();
    openers.into_iter().for_each(Process::succeed);
    assert_eq!(identities.len(), 1, "{identities:?}");
    let store = until("it opens", || async { forkyard_store::open(&url).await.ok() }).await;
    assert_eq!(vec![store.identity().await.unwrap()], *identities.first().unwrap());
}
