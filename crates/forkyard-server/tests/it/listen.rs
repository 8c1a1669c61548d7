//! Connections of those who say nothing, and bodies that do not come.

use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::Request;
use axum::response::Response;
use http_body_util::BodyExt;
use hyper::service::Service;
use hyper_util::service::TowerToHyperService;
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::world::World;

const PATIENCE: Duration = Duration::from_secs(60);

/// Few enough for a process that may open a thousand files; the bounds themselves are counted where they stand.
const SILENT: usize = 300;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_silent_do_not_keep_others_out_and_are_let_go_of() {
    let w = World::new().await;
    let at = w.url.trim_start_matches("http://").to_string();
    let mut silent = Vec::new();
    for _ in 0..SILENT {
        silent.push(TcpStream::connect(&at).await.unwrap());
    }
    // The beginning of what every version of HTTP could be says as little as nothing.
    for stream in silent.iter_mut().step_by(2) {
        stream.write_all(b"P").await.unwrap();
    }
    let health = async || {
        let request = w.http.get(format!("{}/api/v1/health", w.url)).timeout(PATIENCE);
        request.send().await.unwrap().status().as_u16()
    };
    assert_eq!(health().await, 200);
    for stream in &mut silent {
        let read = tokio::time::timeout(PATIENCE, stream.read(&mut [0])).await.expect("it is closed");
        // An end, or a reset where a byte was not read.
        assert!(matches!(read, Ok(0) | Err(_)), "{read:?}");
    }
    assert_eq!(health().await, 200);
}

/// What a request is answered with whose body does not come. Time is skipped where there is nothing to do but wait, so it is
/// the router that is asked.
async fn without_body(w: &World, method: &str, at: &str) -> Response {
    let body = Body::from_stream(futures::stream::pending::<Result<Bytes, std::io::Error>>());
    let request = Request::builder()
        .method(method.to_uppercase().as_str())
        .uri(at)
        .header("host", "localhost")
        .header("content-type", "application/json")
        .header("authorization", format!("Bearer {}", w.token))
        .body(body)
        .unwrap();
    TowerToHyperService::new(w.app.router()).call(request).await.unwrap()
}

#[tokio::test(start_paused = true)]
async fn a_body_that_nobody_reads_is_not_waited_for() {
    let w = World::new().await;
    let described = forkyard_server::routes::openapi();
    let (mut public, mut all) = (0, 0);
    for (path, item) in described["paths"].as_object().unwrap() {
        for (method, operation) in item.as_object().unwrap() {
            if operation.get("requestBody").is_some() {
                continue;
            }
            let at = path.replace("{fork}", "0").replace(['{', '}'], "");
            let since = tokio::time::Instant::now();
            let status = without_body(&w, method, &at).await.status().as_u16();
            assert!(since.elapsed() < Duration::from_secs(1), "{method} {path}: {:?}", since.elapsed());
            assert!(status != 408, "{method} {path}");
            public += u32::from(operation["security"] == serde_json::json!([{}]));
            all += 1;
        }
    }
    assert!(public >= 5 && all > 40, "{public} of {all}");
}

#[tokio::test(start_paused = true)]
async fn a_body_that_does_not_come_is_not_waited_for_on_any_route() {
    let w = World::new().await;
    let described = forkyard_server::routes::openapi();
    let mut asked = 0;
    for (path, item) in described["paths"].as_object().unwrap() {
        for (method, operation) in item.as_object().unwrap() {
            let ways = operation["security"].as_array().unwrap();
            let users = ways.iter().any(|way| way.get("token").is_some());
            if !users || operation.get("requestBody").is_none() {
                continue;
            }
            let at = path.replace("{run}", "r1").replace("{fork}", "0").replace("{sandbox}", "s1");
            let answer = without_body(&w, method, &format!("{at}?path=x")).await;
            let status = answer.status().as_u16();
            let text = answer.into_body().collect().await.unwrap().to_bytes();
            let answer: Value = serde_json::from_slice(&text).unwrap_or_default();
            // One that takes its body as it comes looks for its sandbox first; with one it is tested where there are any.
            let expected = if method == "put" { (404, "sandbox_not_found") } else { (408, "too_slow") };
            assert_eq!(
                (status, answer["error"]["code"].as_str()),
                (expected.0, Some(expected.1)),
                "{method} {path}"
            );
            asked += 1;
        }
    }
    assert!(asked > 10, "{asked}");
}
