//! Requests that are sent twice under one key: one effect, one answer, one line in the audit trail.

use reqwest::Method;
use serde_json::{Value, json};

use super::World;
use super::serve::{PATIENCE, Server};
use super::serve_steer::started;

async fn send(s: &Server, path: &str, key: &str, body: &Value) -> (u16, Value) {
    let request = s.http.post(format!("{}/api/v1{path}", s.url)).bearer_auth(&s.token).timeout(PATIENCE);
    let response = request.header("idempotency-key", key).json(body).send().await.unwrap();
    (response.status().as_u16(), response.json().await.unwrap())
}

/// Twice the same, also at the same time, and once something else: what it was answered with.
async fn twice(s: &Server, path: &str, key: &str, body: Value, other: Value, status: u16) -> Value {
    let (first, again) = tokio::join!(send(s, path, key, &body), send(s, path, key, &body));
    assert_eq!(first.0, status, "{path}: {first:?}");
    assert_eq!(first, again, "{path}");
    assert_eq!(send(s, path, key, &body).await, first, "{path}");
    let (status, refused) = send(s, path, key, &other).await;
    let code = refused["error"]["code"].as_str();
    assert_eq!((status, code), (409, Some("idempotency_key_reused")), "{path}: {refused}");
    first.1
}

/// What was done to it, oldest first: actions and details.
async fn deeds(s: &Server, target: &str) -> Vec<(String, Value)> {
    let deeds = s.get(&format!("/api/v1/audit?target={target}")).await;
    let deeds = deeds["entries"].as_array().unwrap().iter().rev();
    deeds.map(|e| (e["action"].as_str().unwrap().to_string(), e["detail"].clone())).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn sandboxes_are_made_forked_and_snapshotted_once() {
    let w = World::with_commit();
    let s = Server::start_with(&w, &["--port", "0", "--no-work"]);
    let small = |lifetime: u64| json!({ "network": "none", "lifetime_ms": lifetime });
    let made = twice(&s, "/sandboxes", "k", small(600_000), small(700_000), 201).await;
    let id = made["id"].as_str().unwrap();
    let at = format!("/sandboxes/{id}");
    let children =
        twice(&s, &format!("{at}/fork"), "k", json!({ "count": 2 }), json!({ "count": 1 }), 201).await;
    assert_eq!(children["sandboxes"].as_array().unwrap().len(), 2);
    twice(&s, &format!("{at}/snapshot"), "k", json!({}), json!({ "id": "other" }), 201).await;
    assert_eq!(s.get("/api/v1/sandboxes").await["sandboxes"].as_array().unwrap().len(), 3);
    assert_eq!(s.get("/api/v1/snapshots").await["snapshots"].as_array().unwrap().len(), 1);
    let actions: Vec<String> = deeds(&s, id).await.into_iter().map(|(action, _)| action).collect();
    assert_eq!(actions, ["sandbox.create", "sandbox.fork", "sandbox.snapshot"]);
    // What was refused was not done: the key is still good for what is right.
    assert_eq!(send(&s, "/sandboxes", "k2", &json!({ "memory_bytes": 1 })).await.0, 422);
    assert_eq!(send(&s, "/sandboxes", "k2", &small(600_000)).await.0, 201);
    // Another server over the same store knows the keys.
    drop(s);
    let s = Server::start_with(&w, &["--port", "0", "--no-work"]);
    assert_eq!(send(&s, "/sandboxes", "k", &small(600_000)).await, (201, made.clone()));
    assert_eq!(send(&s, "/sandboxes", "k", &small(700_000)).await.0, 409);
    for sandbox in s.get("/api/v1/sandboxes").await["sandboxes"].as_array().unwrap() {
        let id = sandbox["id"].as_str().unwrap();
        s.ask(Method::DELETE, &format!("/api/v1/sandboxes/{id}"), None, 204).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn messages_are_sent_and_forks_added_once_and_the_trail_says_which() {
    let w = World::with_commit();
    let s = Server::start(&w);
    let run = started(&w, &s, 1).await;
    let at = format!("/runs/{run}");
    let say = |text: &str| json!({ "content": text });
    let sent = twice(&s, &format!("{at}/forks/0/messages"), "k", say("one"), say("two"), 202).await;
    assert_eq!(sent["status"], "queued");
    let add = |prompt: &str| json!({ "forks": 2, "prompt": prompt });
    twice(&s, &format!("{at}/forks"), "k", add("another"), add("yet another"), 202).await;
    s.until(&format!("/api/v1{at}"), |r| r["progress"]["total_forks"] == 3).await;
    s.ask(Method::POST, &format!("/api/v1{at}/forks/2/cancel"), None, 202).await;
    s.ask(Method::POST, &format!("/api/v1{at}/cancel"), None, 202).await;
    s.until(&format!("/api/v1{at}"), |r| r["status"] == "ended").await;
    assert_eq!(s.get(&format!("/api/v1{at}/forks")).await["forks"].as_array().unwrap().len(), 3);
    let deeds = deeds(&s, &run).await;
    let actions: Vec<&str> = deeds.iter().map(|(action, _)| action.as_str()).collect();
    assert_eq!(actions, ["run.create", "fork.message", "run.add_forks", "run.cancel_fork", "run.cancel"]);
    assert_eq!((&deeds[2].1["count"], &deeds[2].1["prompts"]), (&json!(2), &json!(["another"])));
    assert_eq!(deeds[3].1["fork"], 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn interventions_and_interrupts_are_sent_once() {
    let w = World::with_commit();
    let s = Server::start(&w);
    // One is interrupted and ends; the other waits on.
    let run = started(&w, &s, 2).await;
    let at = format!("/runs/{run}");
    let sandbox = s.get(&format!("/api/v1{at}/forks/0")).await["sandbox_id"].as_str().unwrap().to_string();
    let say = |text: &str| json!({ "message": text, "priority": "urgent", "inject_mode": "next_turn" });
    let interventions = format!("/sandboxes/{sandbox}/interventions");
    let sent = twice(&s, &interventions, "k1", say("one"), say("two"), 202).await;
    assert_eq!((&sent["status"], &sent["priority"]), (&json!("queued"), &json!("urgent")));
    let stop = |text: &str| json!({ "content": text });
    twice(&s, &format!("{at}/forks/0/interrupt"), "k2", stop("stop"), stop("stop that"), 202).await;
    s.ask(Method::POST, &format!("/api/v1{at}/cancel"), None, 202).await;
    s.until(&format!("/api/v1{at}"), |r| r["status"] == "ended").await;
    let deeds = deeds(&s, &run).await;
    let actions: Vec<&str> = deeds.iter().map(|(action, _)| action.as_str()).collect();
    assert_eq!(actions, ["run.create", "fork.message", "fork.message", "run.cancel"]);
}
