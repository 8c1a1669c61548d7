//! Events over a WebSocket, by a client of another making.

use std::time::Duration;

use futures::{SinkExt, StreamExt};
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio_tungstenite::tungstenite::client::IntoClientRequest;
use tokio_tungstenite::tungstenite::{Error, Message};
use tokio_tungstenite::{MaybeTlsStream, WebSocketStream, connect_async};

use crate::world::World;

const PATIENCE: Duration = Duration::from_secs(60);

type Socket = WebSocketStream<MaybeTlsStream<TcpStream>>;

async fn connect(w: &World, query: &str, headers: &[(&str, &str)]) -> Result<Socket, u16> {
    let at = format!("{}/api/v1/ws/events{query}", w.url.replace("http://", "ws://"));
    let mut request = at.into_client_request().unwrap();
    for (name, value) in headers {
        let name: tokio_tungstenite::tungstenite::http::HeaderName = name.parse().unwrap();
        request.headers_mut().insert(name, value.parse().unwrap());
    }
    match connect_async(request).await {
        Ok((socket, _)) => Ok(socket),
        Err(Error::Http(response)) => Err(response.status().as_u16()),
        Err(e) => panic!("{e}"),
    }
}

async fn next(socket: &mut Socket) -> Value {
    loop {
        match tokio::time::timeout(PATIENCE, socket.next()).await.expect("it goes on") {
            Some(Ok(Message::Text(text))) => return serde_json::from_str(&text).unwrap(),
            Some(Ok(_)) => {}
            other => panic!("{other:?}"),
        }
    }
}

async fn say(socket: &mut Socket, what: Value) {
    socket.send(Message::text(what.to_string())).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn runs_are_subscribed_to_and_left() {
    let w = World::new().await;
    let (mut a, mut b) = (w.run("ra").await, w.run("rb").await);
    a.write(2, "x").await;
    let auth = format!("Bearer {}", w.token);
    let mut socket = connect(&w, "?entity_ids=ra&after=1", &[("authorization", &auth)]).await.unwrap();
    for position in [2, 3] {
        let told = next(&mut socket).await;
        assert_eq!((&told["event"]["run"], &told["event"]["position"]), (&json!("ra"), &json!(position)));
    }
    assert_eq!(next(&mut socket).await, json!({ "caught_up": { "run": "ra", "position": 3 } }));
    say(&mut socket, json!({ "subscribe": { "run": "rb", "after": 0, "types": ["run.*"] } })).await;
    assert_eq!(next(&mut socket).await["event"]["type"], "run.submitted");
    assert_eq!(next(&mut socket).await["caught_up"]["run"], "rb");
    b.write(1, "x").await;
    a.write(1, "x").await;
    assert_eq!(next(&mut socket).await["event"]["run"], "ra");
    say(&mut socket, json!({ "unsubscribe": { "run": "ra" } })).await;
    say(&mut socket, json!({ "subscribe": { "run": "nope" } })).await;
    assert_eq!(next(&mut socket).await["error"]["code"], "run_not_found");
    say(&mut socket, json!({ "dance": 1 })).await;
    assert_eq!(next(&mut socket).await["error"]["code"], "bad_request");
    a.write(1, "x").await;
    b.end().await;
    assert_eq!(next(&mut socket).await["event"]["type"], "run.ended");
    assert_eq!(next(&mut socket).await["end"]["run"], "rb");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_names_no_run_hears_of_all() {
    let w = World::new().await;
    let mut a = w.run("ra").await;
    a.write(3, "old").await;
    let mut socket = connect(&w, &format!("?token={}&event_types=test.*,run.*", w.token), &[]).await.unwrap();
    loop {
        let told = next(&mut socket).await;
        if told["caught_up"]["run"] == "ra" {
            break;
        }
        assert!(told["event"]["data"]["text"] != "old", "{told}");
    }
    let mut b = w.run("rb").await;
    assert_eq!(next(&mut socket).await["event"]["type"], "run.submitted");
    b.write(1, "new").await;
    loop {
        let told = next(&mut socket).await;
        if told["event"]["data"]["text"] == "new" {
            break;
        }
        assert!(told["event"]["data"]["text"] != "old", "{told}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sandbox_is_watched_by_its_id() {
    let w = World::new().await;
    let mut a = w.run("ra").await;
    // After what the run itself says: 2, 3, 4.
    for sandbox in ["s1", "s2", "s3"] {
        a.write_of(sandbox).await;
    }
    let auth = format!("Bearer {}", w.token);
    let about = |told: &Value| (told["event"]["sandbox_id"].clone(), told["event"]["position"].clone());
    let mut one = connect(&w, "?entity_ids=s2&after=0", &[("authorization", &auth)]).await.unwrap();
    assert_eq!(about(&next(&mut one).await), (json!("s2"), json!(3)));
    assert_eq!(next(&mut one).await["caught_up"]["run"], "ra");
    // Several of one run are watched together.
    let mut two = connect(&w, "?entity_ids=s1,s3&after=0", &[("authorization", &auth)]).await.unwrap();
    assert_eq!(about(&next(&mut two).await), (json!("s1"), json!(2)));
    assert_eq!(about(&next(&mut two).await), (json!("s3"), json!(4)));
    assert_eq!(next(&mut two).await["caught_up"]["run"], "ra");
    for sandbox in ["s1", "s2"] {
        a.write_of(sandbox).await;
    }
    assert_eq!(about(&next(&mut one).await), (json!("s2"), json!(6)));
    assert_eq!(about(&next(&mut two).await), (json!("s1"), json!(5)));
    say(&mut one, json!({ "subscribe": { "sandbox": "s3", "after": 0 } })).await;
    assert_eq!(about(&next(&mut one).await), (json!("s3"), json!(4)));
    assert_eq!(next(&mut one).await["caught_up"]["run"], "ra");
    for wrong in [json!({ "sandbox": "s1", "run": "ra" }), json!({ "sandbox": "s1", "fork": 0 }), json!({})] {
        say(&mut one, json!({ "subscribe": wrong })).await;
        assert_eq!(next(&mut one).await["error"]["code"], "bad_request");
    }
    say(&mut one, json!({ "subscribe": { "sandbox": "nope" } })).await;
    assert_eq!(next(&mut one).await["error"]["code"], "sandbox_not_found");
}

/// After this, what was said before is heeded.
async fn heeded(socket: &mut Socket) {
    say(socket, json!("ping")).await;
    assert_eq!(next(socket).await, json!({ "pong": {} }));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn parts_of_a_run_are_watched_beside_each_other_and_left_one_by_one() {
    let w = World::new().await;
    let mut a = w.run("ra").await;
    for sandbox in ["s1", "s2"] {
        a.write_of(sandbox).await;
    }
    let auth = format!("Bearer {}", w.token);
    let position = |told: &Value| told["event"]["position"].as_u64();
    let mut socket = connect(&w, "?entity_ids=s1", &[("authorization", &auth)]).await.unwrap();
    assert_eq!(next(&mut socket).await["caught_up"]["position"], 3);
    say(&mut socket, json!({ "subscribe": { "sandbox": "s2" } })).await;
    assert_eq!(next(&mut socket).await["caught_up"]["position"], 3);
    // 4 and 5: both are told.
    for sandbox in ["s1", "s2"] {
        a.write_of(sandbox).await;
    }
    assert_eq!(position(&next(&mut socket).await), Some(4));
    assert_eq!(position(&next(&mut socket).await), Some(5));
    say(&mut socket, json!({ "unsubscribe": { "sandbox": "s1" } })).await;
    heeded(&mut socket).await;
    // 6 is not, 7 is.
    for sandbox in ["s1", "s2"] {
        a.write_of(sandbox).await;
    }
    assert_eq!(position(&next(&mut socket).await), Some(7));
    // With the run itself all of it is told, each event once, also when a part is named after it.
    say(&mut socket, json!({ "subscribe": { "run": "ra", "after": 5 } })).await;
    assert_eq!(position(&next(&mut socket).await), Some(6));
    assert_eq!(position(&next(&mut socket).await), Some(7));
    assert_eq!(next(&mut socket).await["caught_up"]["position"], 7);
    say(&mut socket, json!({ "subscribe": { "sandbox": "s1" } })).await;
    assert_eq!(next(&mut socket).await["caught_up"]["position"], 7);
    a.write_of("s1").await;
    a.write(1, "of the run").await;
    assert_eq!(position(&next(&mut socket).await), Some(8));
    assert_eq!(position(&next(&mut socket).await), Some(9));
    // The run goes with all that was named of it.
    say(&mut socket, json!({ "unsubscribe": { "run": "ra" } })).await;
    heeded(&mut socket).await;
    a.write_of("s2").await;
    heeded(&mut socket).await;
    for wrong in [json!({}), json!({ "run": "ra", "sandbox": "s1" }), json!({ "fork": 0 })] {
        say(&mut socket, json!({ "unsubscribe": wrong })).await;
        assert_eq!(next(&mut socket).await["error"]["code"], "bad_request");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_part_has_its_own_types_and_its_own_position() {
    let w = World::new().await;
    let mut a = w.run("ra").await;
    // 2, 3, 4.
    for sandbox in ["s1", "s2", "s1"] {
        a.write_of(sandbox).await;
    }
    let auth = format!("Bearer {}", w.token);
    let position = |told: &Value| told["event"]["position"].as_u64();
    let query = "?entity_ids=ra&event_types=run.*&after=0";
    let mut socket = connect(&w, query, &[("authorization", &auth)]).await.unwrap();
    assert_eq!(next(&mut socket).await["event"]["type"], "run.submitted");
    assert_eq!(next(&mut socket).await["caught_up"]["position"], 4);
    say(&mut socket, json!({ "subscribe": { "sandbox": "s1", "after": 2 } })).await;
    // Neither what the run has told before, nor what comes before the part's own position.
    assert_eq!(position(&next(&mut socket).await), Some(4));
    assert_eq!(next(&mut socket).await["caught_up"]["position"], 4);
    for sandbox in ["s2", "s1"] {
        a.write_of(sandbox).await;
    }
    assert_eq!(position(&next(&mut socket).await), Some(6));
    a.end().await;
    assert_eq!(next(&mut socket).await["event"]["type"], "run.ended");
    assert_eq!(next(&mut socket).await["end"]["run"], "ra");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_named_is_bounded_and_looked_for_in_the_store_first() {
    let w = World::with_mute_provider().await;
    let mut a = w.run("ra").await;
    a.write_of("s1").await;
    let auth = format!("Bearer {}", w.token);
    let status = async |ids: Vec<String>| {
        let (query, headers) = (format!("?entity_ids={}", ids.join(",")), [("authorization", auth.as_str())]);
        let connected = connect(&w, &query, &headers);
        tokio::time::timeout(PATIENCE, connected).await.expect("no machine is asked").err()
    };
    assert_eq!(status((0..201).map(|n| format!("x{n}")).collect()).await, Some(429));
    assert_eq!(status(["ra", "s1"].repeat(150).into_iter().map(Into::into).collect()).await, None);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whoever_hears_of_all_is_told_that_some_are_left_out() {
    let w = World::new().await;
    let mut runs = Vec::new();
    for n in 0..203 {
        runs.push(w.run(&format!("r{n}")).await);
    }
    let mut socket = connect(&w, &format!("?token={}", w.token), &[]).await.unwrap();
    let (mut watched, mut errors) = (std::collections::BTreeSet::new(), Vec::new());
    while watched.len() < 200 || errors.is_empty() {
        let mut told = next(&mut socket).await;
        if let Some(run) = told["caught_up"]["run"].as_str() {
            watched.insert(run.to_string());
        } else {
            errors.push(told["error"].take());
        }
    }
    assert_eq!((watched.len(), errors.len()), (200, 1));
    assert_eq!(errors[0]["code"], "too_many");
    assert!(errors[0]["message"].as_str().unwrap().starts_with("203 runs are under way"), "{errors:?}");
    assert!(errors[0]["hint"].as_str().unwrap().contains("entity_ids"), "{errors:?}");
    // Where one ends, another comes in its place.
    let (ended, next_one) =
        (runs.iter_mut().find(|r| watched.contains(r.id.as_str())).unwrap(), |told: &Value| {
            told["caught_up"]["run"].as_str().is_some_and(|run| !watched.contains(run))
        });
    ended.end().await;
    while !next_one(&next(&mut socket).await) {}
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn other_sites_and_strangers_get_no_socket() {
    let w = World::new().await;
    let auth = format!("Bearer {}", w.token);
    let status = async |query: &str, headers: &[(&str, &str)]| connect(&w, query, headers).await.err();
    assert_eq!(status("", &[]).await, Some(401));
    assert_eq!(status("?token=fy_x_y", &[]).await, Some(401));
    assert_eq!(status("", &[("authorization", &auth), ("origin", "https://evil.example")]).await, Some(403));
    assert_eq!(status("?entity_ids=nope", &[("authorization", &auth)]).await, Some(404));
    assert_eq!(status("?entity_types=planet", &[("authorization", &auth)]).await, Some(422));
    assert_eq!(status("", &[("authorization", &auth), ("origin", &w.url)]).await, None);
}
