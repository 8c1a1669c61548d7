//! The list of runs: searched in all of them, followed as it changes.

use std::time::Duration;

use bytes::Bytes;
use forkyard_core::Usd;
use forkyard_core::budget::Ask;
use forkyard_store::Ledger;
use futures::stream::BoxStream;
use futures::{Stream, StreamExt};
use serde_json::{Value, json};

use crate::world::World;

const PATIENCE: Duration = Duration::from_secs(60);

async fn get(w: &World, path: &str) -> (u16, Value) {
    let response = w.http.get(format!("{}/api/v1{path}", w.url)).bearer_auth(&w.token).send().await.unwrap();
    (response.status().as_u16(), response.json().await.unwrap())
}

fn ids(page: &Value) -> Vec<&str> {
    page["runs"].as_array().unwrap().iter().map(|r| r["id"].as_str().unwrap()).collect()
}

/// Messages of a stream, one by one.
struct Messages {
    body: BoxStream<'static, Result<Bytes, reqwest::Error>>,
    rest: String,
}

impl Messages {
    async fn open(w: &World, query: &str) -> Messages {
        let at = format!("{}/api/v1/runs/stream?{query}", w.url);
        let response = w.http.get(at).bearer_auth(&w.token).send().await.unwrap();
        assert_eq!(response.headers()["content-type"], "text/event-stream");
        Messages::over(response.bytes_stream())
    }

    fn over(body: impl Stream<Item = Result<Bytes, reqwest::Error>> + Send + 'static) -> Messages {
        Messages { body: body.boxed(), rest: String::new() }
    }

    /// The name and the data of the next; pings and the time to wait are none.
    async fn next(&mut self) -> (String, Value) {
        loop {
            if let Some((message, rest)) = self.rest.split_once("\n\n") {
                let field =
                    |name: &str| message.lines().find_map(|l| l.strip_prefix(name)).map(str::to_string);
                let (name, data) = (field("event: "), field("data: "));
                self.rest = rest.to_string();
                match data {
                    Some(data) => return (name.unwrap_or_default(), serde_json::from_str(&data).unwrap()),
                    None => continue,
                }
            }
            let piece = tokio::time::timeout(PATIENCE, self.body.next()).await.expect("it goes on");
            self.rest.push_str(std::str::from_utf8(&piece.expect("it is open").unwrap()).unwrap());
        }
    }

    /// The next of this kind that is so.
    async fn until(&mut self, kind: &str, holds: impl Fn(&Value) -> bool) -> Value {
        loop {
            let (name, data) = self.next().await;
            assert_eq!(name, "", "{data}");
            if let Some(news) = data.get(kind).filter(|n| holds(n)) {
                return news.clone();
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn all_runs_are_searched_page_by_page() {
    let w = World::new().await;
    for i in 0..30 {
        let mut d =
            w.run_of(&format!("r{i:02}"), if i % 3 == 0 { "Fix the PARSER" } else { "other things" }).await;
        if i % 2 == 0 {
            d.end().await;
        }
    }
    let (mut found, mut cursor) = (vec![], String::new());
    loop {
        let (status, page) = get(&w, &format!("/runs?search=parser%20fix&limit=3&counts=true{cursor}")).await;
        assert_eq!(status, 200);
        assert_eq!(
            page["counts"],
            json!({ "all": 10, "live": 5, "success": 5, "failed": 0, "cancelled": 0 })
        );
        found.extend(ids(&page).into_iter().map(String::from));
        match page["next_cursor"].as_str() {
            Some(next) => cursor = format!("&cursor={next}"),
            None => break,
        }
    }
    found.sort();
    assert_eq!(found, (0..30).step_by(3).map(|i| format!("r{i:02}")).collect::<Vec<_>>());
    for (query, n) in [
        ("search=parser&live=true", 5),
        ("search=parser&outcome=success", 5),
        ("outcome=failed,cancelled", 0),
        ("outcome=failed,%20success", 15),
        ("search=r07", 1),
        // The repository without its credentials, as it is shown.
        ("search=example.org", 30),
        ("search=hunter2", 0),
        ("search=%25", 0),
    ] {
        assert_eq!(ids(&get(&w, &format!("/runs?{query}")).await.1).len(), n, "{query}");
    }
    assert!(get(&w, "/runs").await.1.get("counts").is_none());
    for (query, field) in [
        ("outcome=great", "outcome"),
        ("outcome=success&live=true", "outcome"),
        (&format!("search={}", "a+".repeat(17)), "search"),
        (&format!("search={}", "a".repeat(1001)), "search"),
    ] {
        for path in ["/runs", "/runs/stream"] {
            let (status, answer) = get(&w, &format!("{path}?{query}")).await;
            assert_eq!((status, &answer["error"]["fields"][0]["field"]), (422, &json!(field)), "{query}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_list_is_followed_by_what_changes() {
    let w = World::new().await;
    let mut all = Messages::open(&w, "").await;
    let mut live = Messages::open(&w, "live=true&search=PARSER").await;
    let mut none = Messages::open(&w, "search=nothing").await;
    for messages in [&mut all, &mut live, &mut none] {
        assert_eq!(messages.next().await, ("again".into(), json!({})));
    }
    let mut d = w.run_of("r1", "Fix the parser").await;
    let seen = all.until("run", |r| r["id"] == "r1").await;
    assert_eq!((&seen["prompt"], &seen["cost_usd"]), (&json!("Fix the parser"), &json!(0.0)));
    assert_eq!(seen["repo"], "https://***@example.org/r");
    live.until("run", |r| r["id"] == "r1").await;
    // Money is news, though no event says it.
    d.fork(1, "s1").await;
    let ask =
        Ask { fork: 0, attempt: forkyard_core::Attempt(1), request: "q".into(), worst: Usd(5_000_000_000) };
    w.store.reserve(&d.id, ask).await.unwrap();
    w.store.settle(&d.id, "q", Usd(2_000_000_000)).await.unwrap();
    all.until("run", |r| r["cost_usd"] == json!(2.0)).await;
    // One that ends is none of the live ones any more; one that nobody asked for is not told.
    w.run_of("r2", "other things").await;
    all.until("run", |r| r["id"] == "r2").await;
    d.end().await;
    all.until("run", |r| r["id"] == "r1" && r["outcome"] == "success").await;
    loop {
        let (_, data) = live.next().await;
        if data == json!({ "gone": "r1" }) {
            break;
        }
        assert_eq!(data["run"]["id"], "r1", "{data}");
    }
    // Whoever asked for something else heard nothing of it all.
    w.run_of("r3", "nothing but this").await;
    assert_eq!(none.next().await.1["run"]["id"], "r3");
}

/// What changed before the list was read is in the list, what changes after it is told: whoever comes in the middle of
/// it all ends with the same picture as the store.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whoever_comes_in_the_middle_misses_nothing() {
    let w = World::new().await;
    let rounds = 20;
    let mut watchers = tokio::task::JoinSet::new();
    for i in 0..rounds {
        let mut messages = Messages::open(&w, "").await;
        let (http, url, token) = (w.http.clone(), w.url.clone(), w.token.clone());
        watchers.spawn(async move {
            let mut known = std::collections::BTreeMap::new();
            while !(known.len() == rounds && known.values().all(|outcome| *outcome == json!("success"))) {
                let (name, data) = messages.next().await;
                if name == "again" {
                    let at = format!("{url}/api/v1/runs?limit=500");
                    let page: Value =
                        http.get(at).bearer_auth(&token).send().await.unwrap().json().await.unwrap();
                    for run in page["runs"].as_array().unwrap() {
                        known.insert(run["id"].to_string(), run["outcome"].clone());
                    }
                } else {
                    known.insert(data["run"]["id"].to_string(), data["run"]["outcome"].clone());
                }
            }
        });
        w.run_of(&format!("r{i}"), "a").await.end().await;
    }
    while let Some(done) =
        tokio::time::timeout(PATIENCE, watchers.join_next()).await.expect("all of them end")
    {
        done.unwrap();
    }
}
