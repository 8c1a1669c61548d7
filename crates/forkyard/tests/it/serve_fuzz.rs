//! The API against its own description, by schemathesis: whatever it is sent, no answer is a fault of the server or
//! other than the description says, and each operation has been seen to succeed.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::process::Command;

use reqwest::Method;
use serde_json::{Value, json};
use test_support::model_server::{ModelServer, Reply};

use super::World;
use super::in_sandbox_wire::{self, at_work};
use super::serve::Server;

const CHECKS: &str =
    "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance";

/// Operations that schemathesis can't have a success of: what is in its way, and the test that has one.
const ELSEWHERE: [(&str, &str); 3] = [
    (
        "DELETE /api/v1/session",
        "wants a browser's cookie: serve::a_login_link_works_once_and_its_cookie_is_for_our_pages_alone",
    ),
    ("GET /api/v1/sandboxes/{sandbox}/pty", "a WebSocket: serve_sandboxes::a_terminal_over_a_websocket"),
    ("GET /api/v1/ws/events", "a WebSocket: forkyard-server, websocket::runs_are_subscribed_to_and_left"),
];

/// Operations after which the others would miss something. They come last, for things that were made for them.
const ENDING: [&str; 10] = [
    "DELETE /api/v1/sandboxes/{sandbox}",
    "DELETE /api/v1/sandboxes/{sandbox}/files",
    "DELETE /api/v1/snapshots/{snapshot}",
    "DELETE /api/v1/tokens/{token}",
    "POST /api/v1/cleanup",
    "POST /api/v1/gc",
    "POST /api/v1/sandboxes/{sandbox}/pause",
    "POST /api/v1/sandboxes/{sandbox}/resume",
    "POST /api/v1/sandboxes/{sandbox}/start",
    "POST /api/v1/sandboxes/{sandbox}/stop",
];

/// Put there by `cargo xtask setup`.
fn schemathesis() -> Option<PathBuf> {
    let target = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).parent()?.to_path_buf();
    let program = Some(target.join("tools/schemathesis/bin/schemathesis")).filter(|p| p.is_file());
    let required = std::env::var_os("FORKYARD_TEST_REQUIRE").is_some();
    assert!(program.is_some() || !required, "schemathesis is missing: cargo xtask setup");
    program
}

/// As schemathesis names it, and as it is named here.
fn name(method: &str, path: &str) -> String {
    format!("{} {path}", method.to_uppercase())
}

/// Every operation of a description by its name, with what is said of it.
fn operations(described: &Value) -> BTreeMap<String, &Value> {
    let items = described["paths"].as_object().unwrap().iter();
    items
        .flat_map(|(path, item)| {
            item.as_object().unwrap().iter().map(|(method, operation)| (name(method, path), operation))
        })
        .collect()
}

/// Each answer that a report tells of: to which operation, with which status.
fn answers(report: &str) -> BTreeSet<(String, u64)> {
    let mut all = BTreeSet::new();
    for line in report.lines() {
        let event: Value = serde_json::from_str(line).unwrap();
        let recorder = &event["ScenarioFinished"]["recorder"];
        for (id, case) in recorder["cases"].as_object().into_iter().flatten() {
            let (case, answer) = (&case["value"], &recorder["interactions"][id]["response"]);
            if let (Some(method), Some(path), Some(status)) =
                (case["method"].as_str(), case["path"].as_str(), answer["status_code"].as_u64())
            {
                all.insert((name(method, path), status));
            }
        }
    }
    all
}

/// Sends what the description allows and what it does not to these operations, and has every answer checked: which came.
/// `settings` are of schemathesis itself.
fn fuzz(
    w: &World,
    s: &Server,
    described: &Value,
    operations: &[&str],
    settings: &str,
) -> BTreeSet<(String, u64)> {
    let full = std::env::var("FORKYARD_TEST_SCALE").is_ok_and(|s| s == "full");
    // From a file: of an address it would leave out the very one that it read the description from.
    let [file, config, report] =
        ["openapi.json", "schemathesis.toml", "report.ndjson"].map(|name| w.dir.path().join(name));
    w.write(&file, &described.to_string());
    // The stream of what goes on has no end: its first event is looked at.
    w.write(&config, &format!("max-stream-events = 1\n{settings}"));
    let done = Command::new(schemathesis().unwrap())
        .arg("--config-file")
        .arg(&config)
        .arg("run")
        .arg(&file)
        .args(["--url", &s.url, "--no-color", "--seed", "7", "--checks", CHECKS])
        .args(["--max-examples", if full { "100" } else { "3" }])
        .args(operations.iter().flat_map(|name| ["--include-name", name]))
        .args(["--report", "ndjson", "--report-ndjson-path"])
        .arg(&report)
        .current_dir(w.dir.path())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&done.stdout);
    assert!(done.status.success(), "{said}{}", String::from_utf8_lossy(&done.stderr));
    let answers = answers(&std::fs::read_to_string(report).unwrap());
    let untested: Vec<_> = operations.iter().filter(|o| !answers.iter().any(|(to, _)| to == *o)).collect();
    assert!(untested.is_empty(), "{untested:?}: {said}");
    answers
}

/// What schemathesis made is gone with it.
async fn remove_sandboxes(s: &Server) {
    loop {
        let made = s.get("/api/v1/sandboxes?limit=500").await;
        let made = made["sandboxes"].as_array().unwrap();
        if made.is_empty() {
            return;
        }
        for sandbox in made {
            let id = sandbox["id"].as_str().unwrap();
            s.ask(Method::DELETE, &format!("/api/v1/sandboxes/{id}"), None, 204).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_answer_is_as_described() {
    if schemathesis().is_none() {
        return;
    }
    let w = World::with_commit();
    // So that there is something to find.
    w.ended(&[]);
    let s = Server::start_with(&w, &["--port", "0", "--no-work"]);
    let described = s.get("/api/v1/openapi.json").await;
    let operations = operations(&described);
    let all: Vec<&str> = operations.keys().map(String::as_str).collect();
    fuzz(&w, &s, &described, &all, &format!("headers = {{ Authorization = \"Bearer {}\" }}\n", s.token));
    remove_sandboxes(&s).await;
}

/// What is there for operations to succeed with.
struct Things {
    repo: String,
    model: String,
    /// A run with two results and a captured file, and the sandbox of its first fork.
    ended: String,
    worked: String,
    /// Of the sandbox that the fork of [`at_work`] is in.
    inside: String,
    /// A user's token, by its id.
    spare: String,
    /// Of a login link.
    code: String,
}

impl Things {
    async fn make(w: &World, s: &Server, ended: String) -> Things {
        let fork = s.get(&format!("/api/v1/runs/{ended}/forks/0")).await;
        for id in ["kept", "halted", "doomed"] {
            let body = json!({ "id": id, "network": "none", "lifetime_ms": 3_600_000 });
            s.ask(Method::POST, "/api/v1/sandboxes", Some(body), 201).await;
        }
        let kept = "/api/v1/sandboxes/kept";
        let put = s.http.put(format!("{}{kept}/files/content?path=note", s.url)).bearer_auth(&s.token);
        assert_eq!(put.body("text").send().await.unwrap().status().as_u16(), 204);
        s.ask(Method::POST, &format!("{kept}/snapshot"), Some(json!({ "id": "frozen" })), 201).await;
        let spare = json!({ "name": "spare", "scope": "read" });
        let spare = s.ask(Method::POST, "/api/v1/tokens", Some(spare), 201).await;
        let inside = at_work(w).await;
        // By its events it is known who works in a sandbox.
        let events = format!("/api/v1/sandboxes/{}/events", in_sandbox_wire::SANDBOX);
        let heard = json!({ "event_type": "agent.heartbeat" });
        assert_eq!(s.send(Method::POST, &events, Some(&inside), Some(heard)).await.status().as_u16(), 201);
        Things {
            repo: w.repo().display().to_string(),
            model: w.model(),
            ended,
            worked: fork["sandbox_id"].as_str().unwrap().into(),
            inside,
            spare: spare["id"].as_str().unwrap().into(),
            code: s.login.split_once("code=").unwrap().1.into(),
        }
    }

    /// What a parameter may be, where nobody would hit upon it.
    fn values(&self, operation: &str, parameter: &str) -> Option<Value> {
        let (at_work, inside) = (in_sandbox_wire::RUN, in_sandbox_wire::SANDBOX);
        let path = operation.split(' ').nth(1).unwrap();
        let last = path.rsplit('/').next().unwrap();
        let reads = operation.starts_with("GET ");
        Some(match (parameter, last) {
            ("run", _) if reads => json!([self.ended, at_work]),
            ("run", _) => json!([at_work]),
            ("fork", _) if path.contains("{fork}") => json!([0]),
            ("sandbox", "trajectory") => json!([self.worked, inside]),
            ("sandbox", "events" | "interventions" | "journal" | "messages" | "task" | "task-complete") => {
                json!([inside])
            }
            ("sandbox", "pause" | "resume" | "start" | "stop") => json!(["halted"]),
            ("sandbox", "{sandbox}") if !reads => json!(["doomed"]),
            ("sandbox", _) => json!(["kept"]),
            ("snapshot", _) => json!(["frozen"]),
            ("token", "{token}") => json!([self.spare]),
            ("path", "files") if reads => json!(["."]),
            ("path", _) if path.contains("{sandbox}") => json!(["note"]),
            ("path", _) => json!(["a.txt"]),
            ("code", "login") => json!([self.code]),
            // Nobody is made to wait for long.
            ("wait_ms", _) => json!([0, 50]),
            _ => return None,
        })
    }

    /// A body that succeeds, where hardly any other does.
    fn body(&self, operation: &str) -> Option<Value> {
        let entry =
            json!({ "event_type": "agent.waiting", "version": 1, "at": 5, "event_data": { "turn": 1 } });
        let question = json!([{ "role": "user", "content": [{ "type": "text", "text": "ping" }] }]);
        let old = json!({ "older_than_ms": 86_400_000, "dry_run": true });
        let within_sandbox = operation.strip_prefix("POST /api/v1/sandboxes/{sandbox}");
        Some(match within_sandbox.unwrap_or(operation) {
            "/events" => json!({ "event_type": "test.noted", "event_data": { "n": 1 } }),
            "/exec" | "/exec/stream" => json!({ "command": ["echo", "hi"] }),
            "/fork" => json!({ "count": 1 }),
            "/interventions" => json!({ "message": "hurry" }),
            "/journal" => json!({ "position": 0, "entries": [entry] }),
            "/messages" => json!({ "content": "hello" }),
            "/snapshot" => json!({ "id": "another" }),
            "/task-complete" => json!({ "success": true, "final_output": "Done." }),
            "POST /api/v1/cleanup" | "POST /api/v1/gc" => old,
            "POST /api/v1/runs" => json!({ "repo": self.repo, "prompt": "add a line", "model": self.model }),
            "POST /api/v1/runs/{run}/forks" => json!({ "forks": 1, "prompt": "another" }),
            "POST /api/v1/runs/{run}/forks/{fork}/interrupt" => json!({ "content": "stop" }),
            "POST /api/v1/runs/{run}/forks/{fork}/messages" => json!({ "content": "hello" }),
            "POST /api/v1/sandboxes" => json!({ "id": "made", "network": "none", "lifetime_ms": 3_600_000 }),
            "POST /api/v1/tokens" => json!({ "name": "made", "scope": "read" }),
            "POST /v1/messages" => {
                json!({ "model": "haiku", "max_tokens": 20, "stream": true, "messages": question })
            }
            "POST /v1/messages/count_tokens" => json!({ "model": "haiku", "messages": question }),
            _ => return None,
        })
    }

    /// Puts these things into a description.
    fn put_into(&self, described: &mut Value) {
        for (path, item) in described["paths"].as_object_mut().unwrap() {
            for (method, operation) in item.as_object_mut().unwrap() {
                let name = name(method, path);
                let parameters = operation.get_mut("parameters").and_then(Value::as_array_mut);
                for parameter in parameters.into_iter().flatten() {
                    if let Some(values) = self.values(&name, parameter["name"].as_str().unwrap()) {
                        parameter["schema"] = json!({ "enum": values });
                    }
                }
                if let Some(body) = self.body(&name) {
                    operation["requestBody"]["content"]["application/json"]["example"] = body;
                }
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_operation_succeeds_as_described() {
    if schemathesis().is_none() {
        return;
    }
    let w = World::with_commit();
    let model = ModelServer::start().await;
    model.brain(|_| Reply::text("pong"));
    w.user_file(&format!(
        "[anthropic]\napi_key = \"sk-ant-of-the-fuzz-test\"\nbase_url = {:?}\n",
        model.url()
    ));
    let ended = w.ended(&["-f", "2", "--capture", "a.txt"]);
    let s = Server::start_with(&w, &["--port", "0", "--no-work"]);
    let things = Things::make(&w, &s, ended).await;
    // Each way in has its token, and each operation is tried with what is known to be good before anything else.
    let settings = format!(
        "[auth.openapi]\ntoken = {{ bearer = {:?} }}\nsandbox = {{ bearer = {:?} }}\n[phases.examples]\nfill-missing = true\n",
        s.token, things.inside
    );
    let mut described = s.get("/api/v1/openapi.json").await;
    things.put_into(&mut described);
    let operations = operations(&described);
    let lasting: Vec<&str> = operations.keys().map(String::as_str).filter(|o| !ENDING.contains(o)).collect();
    let mut answers = fuzz(&w, &s, &described, &lasting, &settings);
    answers.extend(fuzz(&w, &s, &described, &ENDING, &settings));
    // A success is one that the description has.
    let succeeded = |name: &str, operation: &Value| {
        let described = |status: u64| operation["responses"].get(status.to_string()).is_some();
        answers.iter().any(|(to, status)| to == name && *status < 400 && described(*status))
    };
    let failing = operations.iter().filter(|(name, operation)| !succeeded(name, operation));
    let failing: Vec<&str> = failing.map(|(name, _)| name.as_str()).collect();
    assert_eq!(failing, ELSEWHERE.map(|(name, _)| name), "{answers:?}");
    remove_sandboxes(&s).await;
}
