//! Watchers of a run: everything once, in order, however slow they are.

use std::time::Duration;

use forkyard_server::stream::{Filter, Tail, Told};
use futures::StreamExt;

use crate::world::World;

const PATIENCE: Duration = Duration::from_secs(60);

/// Reads to the end what comes after a position: positions of events, and how often it was told to catch up.
async fn read(mut tail: Tail, after: u64) -> (Vec<u64>, usize) {
    let (mut seen, mut behind) = (vec![], 0);
    // Whoever was slow from the first moment has seen nothing but where it began.
    let last = |seen: &[u64]| seen.last().copied().unwrap_or(after);
    while let Some(told) = tokio::time::timeout(PATIENCE, tail.next()).await.expect("it goes on") {
        match told {
            Told::Event(line) => {
                assert!(line.json.is_some(), "an event without its data");
                seen.push(line.position);
            }
            Told::CatchUp { position } => {
                assert_eq!(position, last(&seen));
                behind += 1;
            }
            Told::CaughtUp { .. } | Told::Live { .. } => {}
            Told::End { position } => assert_eq!(position, last(&seen)),
        }
    }
    (seen, behind)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn watchers_that_come_at_any_time_see_everything_once() {
    let w = World::new().await;
    let mut d = w.run("r1").await;
    let mut watchers = tokio::task::JoinSet::new();
    for round in 0..20 {
        d.write(17, "x").await;
        for after in [0, round * 3] {
            let tail = Tail::open(&w.app, d.id.clone(), after, Filter::default()).await.unwrap();
            watchers.spawn(async move { (after, read(tail, after).await.0) });
        }
    }
    // Too large to be handed around: taken from the store.
    d.write(3, &"y".repeat(100_000)).await;
    d.write(5, "x").await;
    d.end().await;
    while let Some(done) = watchers.join_next().await {
        let (after, seen) = done.unwrap();
        assert_eq!(seen, (after + 1..=d.length).collect::<Vec<_>>());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_watcher_that_falls_behind_is_told_and_misses_nothing() {
    let w = World::new().await;
    let mut d = w.run("r1").await;
    let mut slow = Tail::open(&w.app, d.id.clone(), 0, Filter::default()).await.unwrap();
    let mut seen = vec![];
    // As far as what was there when it came.
    loop {
        match slow.next().await.unwrap() {
            Told::Event(line) => seen.push(line.position),
            Told::CaughtUp { .. } => break,
            other => panic!("{other:?}"),
        }
    }
    // Many more than anybody may be behind, while it does not look. Somebody else keeps up, so they were handed around.
    let quick = tokio::spawn(read(Tail::open(&w.app, d.id.clone(), 1, Filter::default()).await.unwrap(), 1));
    d.write(3000, "x").await;
    d.end().await;
    assert_eq!(quick.await.unwrap().0.len(), 3001);
    let (rest, behind) = {
        let (mut rest, mut behind) = (vec![], 0);
        while let Some(told) = tokio::time::timeout(PATIENCE, slow.next()).await.unwrap() {
            match told {
                Told::Event(line) => rest.push(line.position),
                Told::CatchUp { .. } => behind += 1,
                Told::CaughtUp { .. } | Told::Live { .. } | Told::End { .. } => {}
            }
        }
        (rest, behind)
    };
    assert_eq!(behind, 1);
    seen.extend(rest);
    assert_eq!(seen, (1..=d.length).collect::<Vec<_>>());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_filter_passes_what_is_asked_for_alone() {
    let w = World::new().await;
    let mut d = w.run("r1").await;
    d.write(5, "x").await;
    let filter = Filter { fork: None, kinds: vec!["run.".into()] };
    let tail = Tail::open(&w.app, d.id.clone(), 0, filter).await.unwrap();
    let reading = tokio::spawn(async move {
        let (mut tail, mut kinds) = (tail, vec![]);
        while let Some(told) = tail.next().await {
            if let Told::Event(line) = told {
                kinds.push(line.kind.clone());
            }
        }
        kinds
    });
    d.write(5, "x").await;
    d.end().await;
    assert_eq!(reading.await.unwrap(), ["run.submitted", "run.ended"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_ends_when_its_token_or_its_run_does() {
    let w = World::new().await;
    let mut d = w.run("r1").await;
    let at = format!("{}/api/v1/runs/r1/events/stream", w.url);
    let response = w.http.get(&at).bearer_auth(&w.token).send().await.unwrap();
    assert_eq!(response.headers()["content-type"], "text/event-stream");
    let mut body = response.bytes_stream();
    d.write(2, "x").await;
    d.end().await;
    let mut text = String::new();
    while let Some(piece) = tokio::time::timeout(PATIENCE, body.next()).await.unwrap() {
        text.push_str(std::str::from_utf8(&piece.unwrap()).unwrap());
    }
    let ids: Vec<&str> = text.lines().filter_map(|l| l.strip_prefix("id: ")).collect();
    assert_eq!(ids, ["1", "2", "3", "4"]);
    assert!(
        text.contains("event: caught_up") && text.contains("event: end\ndata: {\"position\":4}"),
        "{text}"
    );
    assert!(!text.contains("hunter2"), "a password: {text}");
    // A browser that comes back is told to stay away.
    let again = |id: &str| w.http.get(&at).bearer_auth(&w.token).header("last-event-id", id).send();
    assert_eq!(again("4").await.unwrap().status().as_u16(), 204);
    assert_eq!(again("x").await.unwrap().status().as_u16(), 422);
    let rest = again("3").await.unwrap().text().await.unwrap();
    assert!(rest.contains("id: 4\n") && !rest.contains("id: 3\n"), "{rest}");
}
