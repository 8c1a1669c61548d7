//! A worker over a line that loses answers and breaks heartbeats: everything counts once, and nothing that passes holds the
//! key.

use std::collections::BTreeMap;
use std::process::Stdio;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::response::Response;
use forkyard_agent::AgentConfig;
use forkyard_core::policy::PolicyConfig;
use forkyard_core::run::Run;
use forkyard_core::spec::RunSpec;
use forkyard_core::view::{ForkView, Lifecycle, View};
use forkyard_core::{Attempt, HostId, Millis, RunId, SandboxId, Usd};
use forkyard_engine::clock::Clock;
use forkyard_engine::inside::{Claims, TOKEN_LIFETIME, TaskData, Tokens};
use forkyard_engine::log;
use forkyard_store::CreateRun;
use serde_json::json;
use test_support::model_server::{ModelServer, Reply};
use tokio::net::TcpListener;

use super::World;
use super::serve::Server;

/// Of [`at_work`].
pub const RUN: &str = "rwire";
pub const SANDBOX: &str = "s1";
const KEY: &str = "sk-ant-api03-of-the-wire-test";
/// Heartbeats that a gateway answers.
const LOST_BEATS: usize = 3;

/// What passed the line, and what it did to it.
#[derive(Clone, Default)]
struct Line(Arc<Mutex<Passed>>);

#[derive(Default)]
struct Passed {
    traffic: Vec<u8>,
    beats: usize,
    /// By address: how often it was asked. Every other answer is lost.
    asked: BTreeMap<String, usize>,
    lost: usize,
}

async fn pass(State((line, to)): State<(Line, String)>, request: Request) -> Response {
    let (head, body) = request.into_parts();
    let body = axum::body::to_bytes(body, 64 << 20).await.unwrap();
    let path = head.uri.path_and_query().unwrap().to_string();
    let text = String::from_utf8_lossy(&body).into_owned();
    let gateway = || Response::builder().status(502).body(Body::from("bad gateway")).unwrap();
    {
        let mut passed = line.0.lock().unwrap();
        passed.traffic.extend_from_slice(format!("{path} {:?} {text}\n", head.headers).as_bytes());
        if text.contains("agent.heartbeat") {
            passed.beats += 1;
            if passed.beats <= LOST_BEATS {
                return gateway();
            }
        }
    }
    let mut passing = reqwest::Client::new().request(head.method, format!("{to}{path}")).body(body.to_vec());
    for (name, value) in head.headers.iter().filter(|(name, _)| *name != "host" && *name != "content-length")
    {
        passing = passing.header(name, value);
    }
    let Ok(answer) = passing.send().await else { return gateway() };
    let (status, headers) = (answer.status(), answer.headers().clone());
    let bytes = answer.bytes().await.unwrap_or_default();
    let mut passed = line.0.lock().unwrap();
    passed.traffic.extend_from_slice(format!("{status} {headers:?} ").as_bytes());
    passed.traffic.extend_from_slice(&bytes);
    let once = path.ends_with("/journal") || path.ends_with("/task-complete");
    if once && !text.is_empty() {
        let asked = passed.asked.entry(path).or_default();
        *asked += 1;
        if *asked % 2 == 1 {
            passed.lost += 1;
            return gateway();
        }
    }
    let mut response = Response::new(Body::from(bytes));
    *response.status_mut() = status;
    for (name, value) in headers.iter().filter(|(n, _)| *n != "transfer-encoding" && *n != "content-length") {
        response.headers_mut().insert(name, value.clone());
    }
    response
}

/// A run with one fork at work in a sandbox `s1`, as its driver would have written it, though nobody drives it: the token of
/// that sandbox.
pub async fn at_work(w: &World) -> String {
    let url = w.home().join("forkyard.db").display().to_string();
    let store = forkyard_store::open(&url).await.unwrap();
    let host = HostId::new(std::fs::read_to_string(w.home().join("host-id")).unwrap().trim()).unwrap();
    let tokens = Tokens::open(store.clone(), host, &w.home()).unwrap();
    let (id, sandbox) = (RunId::new(RUN).unwrap(), SandboxId::new(SANDBOX).unwrap());
    let now = Clock::system().now();
    let spec = RunSpec::new(w.repo().display().to_string(), "do it", "sonnet", 1);
    let (run, step) = Run::submit(now, id.clone(), spec);
    let fork = ForkView {
        run: id.clone(),
        fork: 0,
        attempt: Attempt(1),
        lifecycle: Lifecycle::Running,
        phase: "agent".into(),
        outcome: None,
        sandbox: Some(sandbox.clone()),
        name: None,
        model: "sonnet".into(),
        verified: None,
        score: None,
        turns: 0,
        tool_calls: 0,
        cost: Usd::ZERO,
        tokens: 0,
        diff: None,
        driven: Millis::ZERO,
        created_at: now,
        updated_at: now,
        started_at: None,
        ended_at: None,
        error: None,
    };
    let events = step.events.iter().map(|e| log::stored(now, e, None)).collect();
    let views = run.views().into_iter().chain([View::Fork(fork)]).collect();
    store.create_run(CreateRun { run: id.clone(), key: None, events, views }).await.unwrap();
    let claims = Claims { sandbox, run: id, fork: 0, attempt: Attempt(1), expires_at: now + TOKEN_LIFETIME };
    tokens.issue(&claims).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_sent_twice_counts_once_and_a_gateways_errors_are_borne() {
    let w = World::with_commit();
    let model = ModelServer::start().await;
    w.user_file(&format!("[anthropic]\napi_key = {KEY:?}\nbase_url = {:?}\n", model.url()));
    model.push(Reply::tool("Bash", json!({ "command": "true" })));
    model.push(Reply::text("Done."));
    let s = Server::start_with(&w, &["--port", "0", "--no-work"]);
    let token = at_work(&w).await;
    let line = Line::default();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let routes = axum::Router::new().fallback(pass).with_state((line.clone(), s.url.clone()));
    tokio::spawn(async move { axum::serve(listener, routes).await.unwrap() });

    let mut config = AgentConfig::new(RunId::new(RUN).unwrap(), 0, Attempt(1), "sonnet", "do it");
    config.heartbeat = Duration::from_millis(200);
    let task = TaskData::new(SandboxId::new(SANDBOX).unwrap(), &config, PolicyConfig::default());
    let dir = w.dir.path().join("worker");
    let done = tokio::process::Command::new(env!("CARGO_BIN_EXE_forkyard"))
        .args(["worker", "--in-sandbox"])
        .env_clear()
        .env("PATH", "/usr/bin:/bin")
        .env("CALLBACK_URL", &url)
        .env("FORKYARD_TOKEN", &token)
        .env("TASK_DATA_BASE64", task.to_base64())
        .env("FORKYARD_WORKER_DIR", &dir)
        .stdin(Stdio::null())
        .output()
        .await
        .unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));

    let page = s.get(&format!("/api/v1/runs/{RUN}/events?limit=500&types=agent.*,worker.*")).await;
    let events = page["events"].as_array().unwrap();
    let kinds: Vec<&str> =
        events.iter().map(|e| e["type"].as_str().unwrap()).filter(|k| *k != "agent.heartbeat").collect();
    assert_eq!(
        kinds,
        [
            "agent.started",
            "agent.system_message",
            "agent.user_message",
            "agent.assistant_message",
            "agent.tool_use",
            "agent.tool_completed",
            "agent.assistant_message",
            "agent.completed",
            "worker.task_completed"
        ]
    );
    let passed = line.0.lock().unwrap();
    // It was bad indeed, and the worker bore it.
    assert!(passed.beats >= LOST_BEATS && passed.lost >= 4, "{} {}", passed.beats, passed.lost);
    let traffic = String::from_utf8_lossy(&passed.traffic);
    assert!(traffic.contains("message_start") && traffic.contains("/v1/messages"), "nothing passed");
    assert!(!traffic.contains(KEY), "the key passed");
    assert_eq!(model.seen().len(), 2);
    assert!(model.seen().iter().all(|r| r.headers["x-api-key"] == KEY));
}
