use std::collections::BTreeMap;

use super::*;

const WRITERS: u32 = 8;
const STEPS: u64 = 40;

/// Many writers on many streams of one run, and a reader who follows by position alone.
pub async fn a_tailing_reader_misses_nothing<F: Future<Output = Arc<dyn Store>>>(make: impl Fn() -> F) {
    let store = make().await;
    let (run, lease) = start(&store, "a", WRITERS).await;
    let total = 1 + u64::from(WRITERS) * STEPS * 3 + STEPS;
    let mut tasks = tokio::task::JoinSet::new();
    for fork in 0..WRITERS {
        let (store, run) = (store.clone(), run.clone());
        tasks.spawn(async move {
            for i in 0..STEPS {
                let done =
                    store.append_journal(entry(&run, fork, 1, i * 2, events("agent.a", 2))).await.unwrap();
                assert_eq!(done.seq, i * 2 + 2);
                let stream = StreamId::Fork(run.clone(), fork);
                let machine = Append { stream, ..step(&run, lease, i, events("fork.a", 1), vec![]) };
                store.append(machine).await.unwrap();
            }
        });
    }
    {
        let (store, run) = (store.clone(), run.clone());
        tasks.spawn(async move {
            for i in 0..STEPS {
                store.append(step(&run, lease, 1 + i, events("run.a", 1), vec![])).await.unwrap();
            }
        });
    }
    let tail = async {
        let mut watch = store.watch(Some(&run));
        let mut seen: Vec<Recorded> = Vec::new();
        while (seen.len() as u64) < total {
            let after = seen.last().map_or(0, |e| e.position);
            let page =
                store.read_run(&run, &EventQuery { after, limit: 50, ..Default::default() }).await.unwrap();
            if page.is_empty() {
                watch.changed().await;
            }
            seen.extend(page);
        }
        seen
    };
    let seen = patiently("every event is read", tail).await;
    while let Some(done) = tasks.join_next().await {
        done.unwrap();
    }
    assert_eq!(seen.iter().map(|e| e.position).collect::<Vec<_>>(), (1..=total).collect::<Vec<_>>());
    let mut streams: BTreeMap<StreamId, u64> = BTreeMap::new();
    for e in &seen {
        let length = streams.entry(e.stream.clone()).or_default();
        *length += 1;
        assert_eq!(e.seq, *length, "{:?} is in order", e.stream);
    }
    assert_eq!(streams.len() as u32, 1 + 2 * WRITERS);
    assert_eq!(store.read_run(&run, &EventQuery::default()).await.unwrap(), seen);
}

/// Rivals with one lease and one expected sequence: one writes, the others are told.
pub async fn one_of_many_rivals_wins_each_step<F: Future<Output = Arc<dyn Store>>>(make: impl Fn() -> F) {
    let store = make().await;
    let (run, lease) = start(&store, "a", 1).await;
    for round in 1..6 {
        let mut rivals = tokio::task::JoinSet::new();
        for _ in 0..8 {
            let (store, run) = (store.clone(), run.clone());
            rivals.spawn(
                async move { store.append(step(&run, lease, round, events("run.a", 1), vec![])).await },
            );
        }
        let answers = rivals.join_all().await;
        assert_eq!(answers.iter().filter(|a| a.is_ok()).count(), 1, "{answers:?}");
        let conflict = Err(StoreError::Conflict { expected: round, actual: round + 1 });
        assert_eq!(answers.iter().filter(|a| **a == conflict).count(), 7, "{answers:?}");
    }
    assert_eq!(store.last_position(&run).await.unwrap(), 6);
}
