//! What a sandbox's token opens and what it does not, endpoint by endpoint as the description has them; the worker protocol;
//! and the model behind it.

use std::time::Duration;

use forkyard_core::budget::Balance;
use forkyard_core::{Attempt, RunId, SandboxId, Timestamp, Usd};
use forkyard_engine::clock::Clock;
use forkyard_engine::inside::{Claims, TOKEN_LIFETIME};
use forkyard_engine::models::ModelsConfig;
use forkyard_server::inside::{Vouched, router};
use forkyard_store::{Inbox, Ledger, NewMessage};
use reqwest::{Method, Response};
use serde_json::{Value, json};
use test_support::model_server::{Cut, Gate, ModelServer, Reply};
use tokio::net::TcpListener;

use crate::world::{Driver, World};

const PATIENCE: Duration = Duration::from_secs(60);
const KEY: &str = "sk-ant-never-inside";

fn claims(sandbox: &str, attempt: u32) -> Claims {
    Claims {
        sandbox: SandboxId::new(sandbox).unwrap(),
        run: RunId::new("r1").unwrap(),
        fork: 0,
        attempt: Attempt(attempt),
        expires_at: Clock::system().now() + TOKEN_LIFETIME,
    }
}

pub async fn send(
    w: &World,
    method: Method,
    path: &str,
    token: Option<&str>,
    body: Option<Value>,
) -> Response {
    let mut request = w.http.request(method, format!("{}{path}", w.url)).timeout(PATIENCE);
    if let Some(token) = token {
        request = request.bearer_auth(token);
    }
    if let Some(body) = body {
        request = request.json(&body);
    }
    request.send().await.unwrap()
}

/// The status, and the answer as JSON.
pub async fn ask(w: &World, method: Method, path: &str, token: &str, body: Option<Value>) -> (u16, Value) {
    let response = send(w, method, path, Some(token), body).await;
    let status = response.status().as_u16();
    (status, response.json().await.unwrap_or_default())
}

/// A run with one fork at work in `s1`, and that one's token.
pub async fn at_work(models: ModelsConfig, budget: Option<Usd>) -> (World, Driver, String) {
    let w = World::with(models).await;
    let mut driver = w.run_with("r1", budget).await;
    driver.fork(1, "s1").await;
    let token = w.tokens.issue(&claims("s1", 1)).await.unwrap();
    (w, driver, token)
}

fn flipped(token: &str) -> String {
    let last = if token.ends_with('0') { '1' } else { '0' };
    format!("{}{last}", &token[..token.len() - 1])
}

/// Every operation of the description: where it is, and who may use it.
async fn operations(w: &World) -> Vec<(Method, String, bool, bool)> {
    let described: Value =
        send(w, Method::GET, "/api/v1/openapi.json", None, None).await.json().await.unwrap();
    let mut all = Vec::new();
    for (path, item) in described["paths"].as_object().unwrap() {
        for (method, operation) in item.as_object().unwrap() {
            let ways = operation["security"].as_array().unwrap();
            let by = |scheme: &str| ways.iter().any(|w| w.get(scheme).is_some());
            let path = path.replace("{sandbox}", "s1").replace("{fork}", "0").replace("{run}", "nobody");
            let path: Vec<&str> =
                path.split('/').map(|p| if p.starts_with('{') { "nobody" } else { p }).collect();
            let method = Method::from_bytes(method.to_uppercase().as_bytes()).unwrap();
            all.push((method, path.join("/"), by("token"), by("sandbox")));
        }
    }
    all
}

#[tokio::test]
async fn a_sandbox_token_opens_its_own_routes_and_nothing_else() {
    let (w, mut driver, old) = at_work(ModelsConfig::default(), None).await;
    driver.fork(2, "s1").await;
    let good = w.tokens.issue(&claims("s1", 2)).await.unwrap();
    let other = w.tokens.issue(&claims("s2", 2)).await.unwrap();
    let over = Claims { expires_at: Timestamp(1), ..claims("s1", 2) };
    let expired = w.tokens.issue(&over).await.unwrap();
    let revoked = w.tokens.issue(&claims("s1", 2)).await.unwrap();
    w.tokens.revoke(&revoked).await.unwrap();
    let forged = flipped(&good);
    // Another attempt's number under a signature that was made for this one.
    let raised = good.replacen("_0_2_", "_0_3_", 1);
    assert_ne!(raised, good);
    let bad = [
        (None, 401, "unauthenticated"),
        (Some("nonsense"), 401, "unauthenticated"),
        (Some("fys_"), 401, "unauthenticated"),
        (Some(forged.as_str()), 401, "unauthenticated"),
        (Some(raised.as_str()), 401, "unauthenticated"),
        (Some(revoked.as_str()), 401, "unauthenticated"),
        (Some(expired.as_str()), 401, "token_expired"),
        (Some(old.as_str()), 403, "stale_attempt"),
    ];
    let (mut inside, mut users) = (0, 0);
    for (method, path, by_user, by_sandbox) in operations(&w).await {
        let at = format!("{method} {path}");
        let code = async |token: Option<&str>| {
            let response = send(&w, method.clone(), &path, token, None).await;
            let status = response.status().as_u16();
            // Where errors have another's shape, the code is in a header.
            let named = response.headers().get("x-forkyard-code").map(|v| v.to_str().unwrap().to_string());
            let body: Value = response.json().await.unwrap_or_default();
            (status, named.unwrap_or_else(|| body["error"]["code"].as_str().unwrap_or_default().to_string()))
        };
        if !by_user && !by_sandbox {
            continue;
        }
        for (token, status, name) in bad {
            assert_eq!(code(token).await, (status, name.to_string()), "{at} {token:?}");
        }
        if by_sandbox {
            inside += 1;
            let (status, name) = code(Some(&good)).await;
            assert!(!matches!(status, 401 | 403 | 404 | 500..), "{at}: {status} {name}");
            if path.contains("s1") {
                assert_eq!(code(Some(&other)).await, (403, "other_sandbox".into()), "{at}");
            }
            if !by_user {
                assert_eq!(code(Some(&w.token)).await, (403, "wrong_scope".into()), "{at}");
            }
        } else {
            users += 1;
            assert_eq!(code(Some(&good)).await, (403, "wrong_scope".into()), "{at}");
        }
    }
    assert!(inside >= 8 && users > 40, "{inside} {users}");
    // Only hashes are kept.
    assert!(
        !w.store.blobs().iter().any(|b| String::from_utf8_lossy(b).contains(&good)),
        "the token itself is stored"
    );
}

#[tokio::test]
async fn inside_there_is_nothing_of_the_users() {
    let (w, _driver, token) = at_work(ModelsConfig::default(), None).await;
    let other = w.tokens.issue(&claims("s2", 1)).await.unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let id = SandboxId::new("s1").unwrap();
    let routes = router(w.inside.clone()).layer(axum::Extension(Vouched(id)));
    tokio::spawn(async move { axum::serve(listener, routes).await.unwrap() });
    let get = async |path: &str, token: &str| {
        w.http.get(format!("{url}{path}")).bearer_auth(token).send().await.unwrap().status().as_u16()
    };
    assert_eq!(get("/api/v1/sandboxes/s1/task", &token).await, 200);
    assert_eq!(get("/api/v1/sandboxes/s1/messages", &token).await, 200);
    // A token that was carried over from another sandbox is of no use here, whatever it names.
    assert_eq!(get("/api/v1/sandboxes/s2/task", &other).await, 403);
    assert_eq!(get("/api/v1/sandboxes/s1/task", &other).await, 403);
    for (method, path, _, by_sandbox) in operations(&w).await {
        let ask = async |token: &str| {
            let request = w.http.request(method.clone(), format!("{url}{path}"));
            request.bearer_auth(token).send().await.unwrap().status().as_u16()
        };
        if by_sandbox {
            assert_eq!(ask(&w.token).await, 401, "{method} {path}");
        } else {
            let status = ask(&token).await;
            assert!(matches!(status, 404 | 405), "{method} {path}: {status}");
        }
    }
}

#[tokio::test]
async fn testimony_is_bounded_and_counted_once() {
    let (w, _driver, token) = at_work(ModelsConfig::default(), None).await;
    let at = "/api/v1/sandboxes/s1/events";
    let post = async |kind: &str, data: Value, id: Option<&str>| {
        let mut body = json!({ "event_type": kind, "event_data": data, "source": "agent" });
        if let Some(id) = id {
            body["event_id"] = id.into();
        }
        ask(&w, Method::POST, at, &token, Some(body)).await
    };
    assert_eq!(ask(&w, Method::GET, "/api/v1/sandboxes/s1/task", &token, None).await.1["status"], "assigned");
    let (status, answer) = post("agent.message", json!({ "text": "hello" }), Some("e1")).await;
    assert_eq!((status, &answer["status"], &answer["event_id"]), (201, &json!("received"), &json!("e1")));
    assert_eq!(post("agent.message", json!({ "text": "again" }), Some("e1")).await.0, 201);
    // Somebody was heard of: the task is picked up, though the machine does not know it yet.
    assert_eq!(ask(&w, Method::GET, "/api/v1/sandboxes/s1/task", &token, None).await.1["status"], "running");
    for (kind, data, status) in [
        ("", json!({}), 422),
        ("agent message", json!({}), 422),
        (&"x".repeat(101), json!({}), 422),
        ("fork.ended", json!({}), 422),
        ("worker.task_completed", json!({}), 422),
        ("agent.checkpoint_created", json!({ "turn": 1 }), 422),
        ("agent.completed", json!({ "success": true }), 422),
        ("agent.message", json!({ "text": "x".repeat(100 << 10) }), 413),
        ("agent.message", json!({ "text": "x".repeat(300 << 10) }), 413),
    ] {
        assert_eq!(post(kind, data, None).await.0, status, "{kind}");
    }
    let seen =
        ask(&w, Method::GET, "/api/v1/sandboxes/s1/events?event_type=agent.message", &w.token, None).await.1;
    assert_eq!((&seen["total_count"], &seen["events"][0]["source"]), (&json!(1), &json!("worker")), "{seen}");
    // Time passes and gives some back; a flood ends soon all the same. Each kind of request has its own count.
    for (kind, least, most) in [("agent.heartbeat", 10, 60), ("agent.message", 80, 300)] {
        let mut taken = 0;
        loop {
            let body = json!({ "event_type": kind });
            let answer = send(&w, Method::POST, at, Some(&token), Some(body)).await;
            match answer.status().as_u16() {
                201 => taken += 1,
                status => {
                    assert_eq!((status, answer.headers().contains_key("retry-after")), (429, true));
                    break;
                }
            }
        }
        assert!((least..=most).contains(&taken), "{kind} {taken}");
    }
    assert_eq!(ask(&w, Method::GET, "/api/v1/sandboxes/s1/messages", &token, None).await.0, 200);
}

#[tokio::test]
async fn a_journal_takes_the_same_entries_once_and_delivers_messages() {
    let (w, mut driver, token) = at_work(ModelsConfig::default(), None).await;
    let at = "/api/v1/sandboxes/s1/journal";
    let entry = |turn: u32| json!({ "event_type": "agent.waiting", "version": 1, "at": 5, "event_data": { "turn": turn } });
    let append = async |token: &str, position: u64, turn: u32, delivered: &[u64]| {
        let body = json!({ "position": position, "entries": [entry(turn)], "delivered": delivered });
        ask(&w, Method::POST, at, token, Some(body)).await
    };
    let run = RunId::new("r1").unwrap();
    let data = json!({ "type": "interrupt", "content": "stop" });
    let message = NewMessage { key: None, data, at: Timestamp(3) };
    let id = w.store.put_message(&run, 0, message).await.unwrap();
    assert_eq!(append(&token, 0, 1, &[]).await, (200, json!({ "position": 1 })));
    // Testimony in between moves nothing.
    let beat = json!({ "event_type": "agent.heartbeat" });
    assert_eq!(ask(&w, Method::POST, "/api/v1/sandboxes/s1/events", &token, Some(beat)).await.0, 201);
    assert_eq!(append(&token, 0, 1, &[]).await, (200, json!({ "position": 1 })));
    assert_eq!(append(&token, 0, 2, &[]).await.0, 409);
    assert_eq!(append(&token, 5, 2, &[]).await.0, 409);
    let inbox =
        async |token: &str| ask(&w, Method::GET, "/api/v1/sandboxes/s1/messages", token, None).await.1;
    assert_eq!(
        inbox(&token).await["messages"],
        json!([{ "id": id, "type": "interrupt", "content": "stop", "priority": "normal", "at": 3 }])
    );
    assert_eq!(append(&token, 1, 2, &[id]).await, (200, json!({ "position": 2 })));
    assert_eq!(inbox(&token).await["messages"], json!([]));
    // The next attempt goes on where this one was.
    driver.fork(2, "s1").await;
    let next = w.tokens.issue(&claims("s1", 2)).await.unwrap();
    assert_eq!(append(&token, 2, 3, &[]).await.0, 403);
    assert_eq!(append(&next, 1, 2, &[]).await, (200, json!({ "position": 2 })));
    assert_eq!(append(&next, 2, 3, &[]).await, (200, json!({ "position": 3 })));
    let read = ask(&w, Method::GET, &format!("{at}?limit=2"), &next, None).await.1;
    assert_eq!((read["entries"].as_array().unwrap().len(), &read["next_after"]), (2, &json!(2)));
    let read = ask(&w, Method::GET, &format!("{at}?after=2"), &next, None).await.1;
    assert_eq!((&read["entries"], &read["next_after"]), (&json!([entry(3)]), &Value::Null));
    let nonsense = json!({ "position": 3, "entries": [
        { "event_type": "agent.tool_use", "version": 1, "at": 5, "event_data": {} }] });
    assert_eq!(
        ask(&w, Method::POST, at, &next, Some(nonsense)).await.0,
        422,
        "what can't be read back is refused"
    );
}

#[tokio::test]
async fn a_message_wakes_whoever_waits() {
    let (w, mut driver, token) = at_work(ModelsConfig::default(), None).await;
    let at = "/api/v1/sandboxes/s1/messages";
    assert_eq!(ask(&w, Method::GET, &format!("{at}?wait_ms=60001"), &token, None).await.0, 422);
    let run = RunId::new("r1").unwrap();
    let waiting = format!("{at}?wait_ms=60000");
    let (answer, _) = tokio::join!(ask(&w, Method::GET, &waiting, &token, None), async {
        // It may or may not wait by then: both ways it gets the message.
        tokio::task::yield_now().await;
        let data = json!({ "type": "user_message", "content": "hi" });
        w.store.put_message(&run, 0, NewMessage { key: None, data, at: Timestamp(3) }).await.unwrap();
    });
    assert_eq!(answer.1["messages"][0]["content"], "hi");
    let waiting = format!("{at}?after={}&wait_ms=60000", answer.1["messages"][0]["id"]);
    let (answer, ()) = tokio::join!(ask(&w, Method::GET, &waiting, &token, None), async {
        driver.fork(2, "s1").await;
    });
    assert_eq!((answer.0, &answer.1["error"]["code"]), (403, &json!("stale_attempt")));
}

#[tokio::test]
async fn the_end_is_reported_once_and_makes_sense() {
    let (w, _driver, token) = at_work(ModelsConfig::default(), None).await;
    let report = async |body: Value| {
        ask(&w, Method::POST, "/api/v1/sandboxes/s1/task-complete", &token, Some(body)).await.0
    };
    assert_eq!(report(json!({ "success": false })).await, 422);
    assert_eq!(report(json!({ "success": true, "stop_reason": "max_turns" })).await, 422);
    assert_eq!(report(json!({ "success": true, "final_output": "x".repeat(50_001) })).await, 422);
    assert_eq!(report(json!({ "success": true, "final_output": "done", "turns": 2 })).await, 200);
    assert_eq!(report(json!({ "success": true, "final_output": "done", "turns": 2 })).await, 200);
    let at = "/api/v1/sandboxes/s1/events?event_type=worker.task_completed";
    assert_eq!(ask(&w, Method::GET, at, &w.token, None).await.1["total_count"], 1);
}

pub fn models(url: &str) -> ModelsConfig {
    ModelsConfig { anthropic_key: Some(KEY.into()), anthropic_url: Some(url.into()), ..Default::default() }
}

pub fn request(extra: Value) -> Value {
    let mut body = json!({
        "model": "sonnet", "max_tokens": 4096, "stream": true,
        "messages": [{ "role": "user", "content": [{ "type": "text", "text": "go" }] }],
    });
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

async fn balance(w: &World) -> Balance {
    w.store.balance(&RunId::new("r1").unwrap()).await.unwrap()
}

/// As Anthropic's own clients ask.
async fn infer(w: &World, token: &str, body: Value) -> Response {
    let request = w.http.post(format!("{}/v1/messages", w.url)).header("x-api-key", token);
    request.header("anthropic-version", "2023-06-01").json(&body).timeout(PATIENCE).send().await.unwrap()
}

#[tokio::test]
async fn the_model_answers_under_the_runs_budget_and_our_key() {
    let server = ModelServer::start().await;
    let (w, _driver, token) = at_work(models(server.url()), Some(Usd::dollars(1))).await;
    server.push(Reply::text("hello").header("x-account", KEY).pings());
    let answer = infer(&w, &token, request(json!({}))).await;
    assert_eq!(answer.status().as_u16(), 200);
    assert!(answer.headers()["content-type"].to_str().unwrap().starts_with("text/event-stream"));
    assert!(!format!("{:?}", answer.headers()).contains(KEY), "{:?}", answer.headers());
    let text = answer.text().await.unwrap();
    assert!(text.starts_with("event: message_start") && text.contains("hello") && !text.contains(KEY));
    let seen = &server.seen()[0];
    assert_eq!(
        (seen.headers["x-api-key"].as_str(), seen.body["model"].as_str()),
        (KEY, Some("claude-sonnet-5-5"))
    );
    assert!(!seen.raw.contains("fys_") && !seen.headers.values().any(|v| v.contains("fys_")));
    let after = balance(&w).await;
    assert!(after.spent > Usd::ZERO && after.reserved == Usd::ZERO);
    assert_eq!(after.forks[&0].spent, after.spent);

    // An asker that goes away leaves the worst case behind.
    server.push(Reply::text("long").cut(Cut::HangAfter(2)));
    drop(infer(&w, &token, request(json!({}))).await);
    let until = tokio::time::Instant::now() + PATIENCE;
    while balance(&w).await.reserved > Usd::ZERO {
        assert!(tokio::time::Instant::now() < until, "it stays reserved");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert!(balance(&w).await.spent.0 >= after.spent.0 + 4000 * 10_000, "{:?}", balance(&w).await);

    for (extra, status, kind) in [
        (json!({ "model": "script:/etc/passwd" }), 400, "invalid_request_error"),
        (json!({ "model": "openai:gpt" }), 400, "invalid_request_error"),
        (json!({ "service_tier": "priority" }), 400, "invalid_request_error"),
        (json!({ "max_tokens": 100_000, "system": "x".repeat(2 << 20) }), 402, "billing_error"),
    ] {
        let refused = infer(&w, &token, request(extra.clone())).await;
        assert_eq!(refused.status().as_u16(), status, "{kind}");
        let body: Value = refused.json().await.unwrap();
        assert_eq!((&body["type"], &body["error"]["type"]), (&json!("error"), &json!(kind)), "{body}");
    }
    let count = w.http.post(format!("{}/v1/messages/count_tokens", w.url)).header("x-api-key", &token);
    let body = json!({ "model": "sonnet", "messages": [{ "role": "user", "content": [{ "type": "text", "text": "go" }] }] });
    let counted: Value = count.json(&body).send().await.unwrap().json().await.unwrap();
    assert!(counted["input_tokens"].as_u64().unwrap() > 0, "{counted}");
}

#[tokio::test]
async fn an_answer_that_does_not_stream_is_paid_for_too() {
    let usage = json!({ "input_tokens": 10, "output_tokens": 7 });
    let whole = json!({ "id": "m", "type": "message", "role": "assistant", "model": "claude-sonnet-5-5", "usage": usage,
        "content": [{ "type": "text", "text": "hello" }], "stop_reason": "end_turn" });
    let counted = axum::Json(json!({ "input_tokens": 10 }));
    let routes = axum::Router::new()
        .route("/v1/messages", axum::routing::post(async move || axum::Json(whole)))
        .route("/v1/messages/count_tokens", axum::routing::post(async move || counted));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move { axum::serve(listener, routes).await.unwrap() });
    let (w, _driver, token) = at_work(models(&url), Some(Usd::dollars(1))).await;
    let answer = infer(&w, &token, request(json!({ "stream": false }))).await;
    assert_eq!(answer.status().as_u16(), 200);
    assert_eq!(answer.json::<Value>().await.unwrap()["content"][0]["text"], "hello");
    let now = balance(&w).await;
    assert!(
        now.reserved == Usd::ZERO && now.spent > Usd::ZERO && now.spent < Usd::nanos(1_000_000),
        "{now:?}"
    );
}

#[tokio::test]
async fn many_at_once_never_overshoot() {
    let server = ModelServer::start().await;
    // For about three worst cases of the 20 that are asked for.
    let budget = Usd::nanos(3 * 4096 * 10_000 + 1_000_000);
    let (w, _driver, token) = at_work(models(server.url()), Some(budget)).await;
    let gate = Gate::default();
    let held = gate.clone();
    server.brain(move |_| Reply::text("ok").output(4000).gate(&held));
    let all = futures::future::join_all((0..20).map(|_| infer(&w, &token, request(json!({})))));
    let opening = async {
        for _ in 0..20 {
            let now = balance(&w).await;
            assert!(now.spent + now.reserved <= budget, "{now:?}");
            gate.open(1);
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        gate.open(1000);
    };
    let (answers, ()) = tokio::join!(all, opening);
    let mut statuses = Vec::new();
    for answer in answers {
        statuses.push(answer.status().as_u16());
        answer.bytes().await.unwrap();
    }
    assert!(statuses.iter().all(|s| matches!(s, 200 | 402)), "{statuses:?}");
    assert!(statuses.contains(&200) && statuses.contains(&402), "{statuses:?}");
    let now = balance(&w).await;
    assert!(now.spent <= budget && now.reserved == Usd::ZERO, "{now:?}");
}
