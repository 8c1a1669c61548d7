//! How often and how much a sandbox may send, route by route.

use std::time::{Duration, Instant};

use axum::body::{Body, Bytes};
use axum::http::Request;
use forkyard_engine::models::ModelsConfig;
use forkyard_server::inside::router;
use hyper::service::Service;
use hyper_util::service::TowerToHyperService;
use reqwest::{Method, Response};
use serde_json::{Value, json};
use test_support::model_server::{ModelServer, Reply};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::inside::{ask, at_work, models, request, send};
use crate::world::World;

const PATIENCE: Duration = Duration::from_secs(60);

/// Asks until it is refused for its number; how often it was not, and what the refusal was.
async fn flood(w: &World, token: &str, method: Method, path: &str, body: Option<Value>) -> (u32, Response) {
    let mut passed = 0;
    loop {
        let answer = send(w, method.clone(), path, Some(token), body.clone()).await;
        if answer.status().as_u16() == 429 {
            return (passed, answer);
        }
        passed += 1;
        assert!(passed < 1000, "{method} {path} goes on");
    }
}

#[tokio::test]
async fn every_route_has_its_count_whatever_is_answered() {
    let at = |path: &str| format!("/api/v1/sandboxes/s1/{path}");
    let heartbeat = json!({ "event_type": "agent.heartbeat" });
    let no_model = json!({ "model": "nobody's", "max_tokens": 1, "stream": true, "messages": [] });
    for (method, path, body, most) in [
        (Method::POST, at("events"), Some(json!({ "event_type": "agent.note" })), 100),
        (Method::POST, at("events"), Some(json!({ "event_type": "run.ended" })), 100),
        (Method::POST, at("events"), Some(json!({ "nonsense": 1 })), 100),
        (Method::POST, at("events"), Some(heartbeat), 10),
        (Method::GET, at("messages"), None, 30),
        (Method::GET, at("messages?wait_ms=1"), None, 30),
        (Method::GET, at("messages?wait_ms=nonsense"), None, 30),
        (Method::GET, at("task"), None, 60),
        (Method::GET, at("journal"), None, 60),
        (Method::POST, at("journal"), Some(json!({ "position": 0, "entries": [] })), 100),
        (Method::POST, at("task-complete"), Some(json!({ "success": false })), 60),
        (Method::POST, "/v1/messages".into(), Some(no_model.clone()), 60),
        (Method::POST, "/v1/messages".into(), Some(json!("nonsense")), 60),
        (Method::POST, "/v1/messages/count_tokens".into(), Some(no_model), 60),
    ] {
        // Each in a world of its own: some are counted together.
        let (w, _driver, token) = at_work(ModelsConfig::default(), None).await;
        let begin = Instant::now();
        let (passed, refusal) = flood(&w, &token, method.clone(), &path, body).await;
        // Time passes and gives some back.
        let more = (begin.elapsed().as_secs_f64() * f64::from(most) / 60.0).ceil() as u32;
        assert!((most..=most + more + 1).contains(&passed), "{method} {path}: {passed} passed");
        let wait: u32 = refusal.headers()["retry-after"].to_str().unwrap().parse().unwrap();
        assert!((1..=60_u32.div_ceil(most)).contains(&wait), "{method} {path}: {wait} s");
    }
}

#[tokio::test]
async fn whoever_really_waited_is_not_counted() {
    let (w, _driver, token) = at_work(ModelsConfig::default(), None).await;
    let at = "/api/v1/sandboxes/s1/messages";
    for _ in 0..3 {
        let begin = Instant::now();
        assert_eq!(ask(&w, Method::GET, &format!("{at}?wait_ms=1200"), &token, None).await.0, 200);
        assert!(begin.elapsed() >= Duration::from_millis(1200));
    }
    let (passed, _) = flood(&w, &token, Method::GET, at, None).await;
    assert!(passed >= 30, "{passed}");
}

#[tokio::test]
async fn answers_that_stream_are_not_counted() {
    let server = ModelServer::start().await;
    server.brain(|_| Reply::text("ok"));
    let (w, _driver, token) = at_work(models(server.url()), None).await;
    for n in 0..70 {
        let answer = send(&w, Method::POST, "/v1/messages", Some(&token), Some(request(json!({})))).await;
        assert_eq!(answer.status().as_u16(), 200, "{n}");
        answer.bytes().await.unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn whoever_only_looks_is_not_waited_for() {
    let (w, _driver, token) = at_work(ModelsConfig::default(), None).await;
    for path in ["task", "journal", "messages"] {
        let body = Body::from_stream(futures::stream::pending::<Result<Bytes, std::io::Error>>());
        let request = Request::get(format!("/api/v1/sandboxes/s1/{path}"))
            .header("authorization", format!("Bearer {token}"))
            .body(body)
            .unwrap();
        let since = tokio::time::Instant::now();
        let answer = TowerToHyperService::new(router(w.inside.clone())).call(request).await.unwrap();
        assert_eq!(answer.status().as_u16(), 200, "{path}");
        assert!(since.elapsed() < Duration::from_secs(1), "{path}: {:?}", since.elapsed());
    }
}

/// The head of a request whose body does not come.
async fn without_its_body(w: &World, token: &str, length: usize) -> TcpStream {
    let mut stream = TcpStream::connect(w.url.trim_start_matches("http://")).await.unwrap();
    let head = format!(
        "POST /v1/messages HTTP/1.1\r\nhost: localhost\r\nx-api-key: {token}\r\ncontent-length: {length}\r\n\r\n{{"
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    stream
}

#[tokio::test]
async fn a_place_is_taken_before_the_body_is_read() {
    let server = ModelServer::start().await;
    let (w, _driver, token) = at_work(models(server.url()), None).await;
    // All places are taken by requests whose bodies are on their way.
    let mut waiting = Vec::new();
    for _ in 0..32 {
        waiting.push(without_its_body(&w, &token, 1000).await);
    }
    // One more that says that it is large is refused without it: nothing of it is waited for.
    let refused = async {
        loop {
            let mut stream = without_its_body(&w, &token, 32 << 20).await;
            let mut answer = [0; 12];
            // Those before may not have been looked at yet; then this one waits for its body as they do.
            match tokio::time::timeout(Duration::from_secs(5), stream.read_exact(&mut answer)).await {
                Ok(read) => {
                    read.unwrap();
                    return answer;
                }
                Err(_) => waiting.push(stream),
            }
        }
    };
    let answer = tokio::time::timeout(PATIENCE, refused).await.expect("it is refused");
    assert_eq!(&answer, b"HTTP/1.1 429");
}
