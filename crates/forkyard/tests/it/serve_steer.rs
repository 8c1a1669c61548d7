//! A run under way, steered over the API.

use reqwest::Method;
use serde_json::{Value, json};

use super::World;
use super::serve::Server;

/// Works until it is told to stop waiting.
const WAITS: &str = r#"
name = "waits"
[[turn]]
text = "I wait."
tools = [{ name = "Bash", input = { command = "while ! [ -e go ]; do sleep 0.05; done" } }]
[[turn]]
text = "Done."
"#;

pub async fn started(w: &World, s: &Server, forks: u32) -> String {
    w.write(&w.script(), WAITS);
    let body = json!({ "repo": w.repo(), "prompt": "wait", "model": w.model(), "forks": forks, "sandbox": { "network": "none" } });
    let run = s.ask(Method::POST, "/api/v1/runs", Some(body), 201).await["id"].as_str().unwrap().to_string();
    event(s, &run, "agent.tool_use", forks as usize).await;
    run
}

/// Until the run has this many events of this kind: the last.
async fn event(s: &Server, run: &str, kind: &str, n: usize) -> Value {
    let at = format!("/api/v1/runs/{run}/events?types={kind}");
    let page = s.until(&at, |p| p["events"].as_array().unwrap().len() >= n).await;
    page["events"][n - 1].clone()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fork_that_waits_for_its_turn_is_cancelled_and_never_begins() {
    let w = World::with_commit();
    let s = Server::start(&w);
    w.write(&w.script(), WAITS);
    let body = json!({ "repo": w.repo(), "prompt": "wait", "model": w.model(), "forks": 2, "max_concurrent": 1,
        "sandbox": { "network": "none" } });
    let run = s.ask(Method::POST, "/api/v1/runs", Some(body), 201).await["id"].as_str().unwrap().to_string();
    event(&s, &run, "agent.tool_use", 1).await;
    let at = format!("/api/v1/runs/{run}");
    s.ask(Method::POST, &format!("{at}/forks/2/cancel"), None, 404).await;
    for fork in [1, 0] {
        s.ask(Method::POST, &format!("{at}/forks/{fork}/cancel"), None, 202).await;
    }
    s.until(&at, |r| r["status"] == "ended").await;
    let begun = s.get(&format!("{at}/events?types=agent.tool_use")).await;
    assert_eq!(begun["events"].as_array().unwrap().len(), 1, "{begun}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_is_paused_talked_to_added_to_and_cancelled() {
    let w = World::with_commit();
    let s = Server::start(&w);
    // Two are interrupted and end; one waits on.
    let run = started(&w, &s, 3).await;
    let at = format!("/api/v1/runs/{run}");
    let post =
        async |path: &str, body: Option<Value>| s.ask(Method::POST, &format!("{at}{path}"), body, 202).await;
    post("/pause", None).await;
    s.until(&at, |r| r["paused"] == true).await;
    post("/resume", None).await;
    s.until(&at, |r| r["paused"] == false).await;

    let sent = post("/forks/0/messages", Some(json!({ "content": "one\u{7}\nmore" }))).await;
    assert_eq!(sent["status"], "queued");
    post("/forks/0/interrupt", Some(json!({ "content": "stop that" }))).await;
    event(&s, &run, "agent.message_injected", 2).await;
    for (body, status) in [
        (json!({ "content": "" }), 422),
        (json!({ "content": "x".repeat(10_001) }), 422),
        (json!({ "content": "x", "type": "shout" }), 400),
    ] {
        s.ask(Method::POST, &format!("{at}/forks/0/messages"), Some(body), status).await;
    }

    // The same agent by its sandbox.
    let sandbox = s.get(&format!("{at}/forks/1")).await["sandbox_id"].as_str().unwrap().to_string();
    let inside = format!("/api/v1/sandboxes/{sandbox}");
    let task = s.get(&format!("{inside}/task")).await;
    assert_eq!((&task["status"], &task["task_id"]), (&json!("running"), &json!(format!("{run}/1"))));
    let interventions = format!("{inside}/interventions");
    for (field, value) in [("source", "somebody"), ("priority", "high"), ("inject_mode", "now")] {
        let refused = s.ask(Method::POST, &interventions, Some(json!({ "message": "x", field: value })), 400);
        assert_eq!(refused.await["error"]["code"], "bad_request", "{field}");
    }
    // What waits is read by its priority, once somebody stops what the agent does.
    let later = json!({ "message": "later", "source": "system" });
    let soon = json!({ "message": "soon", "priority": "urgent", "inject_mode": "next_turn" });
    let now = json!({ "message": "now", "source": "guardian", "inject_mode": "immediate" });
    let mut meant = Vec::new();
    for said in [later, soon, now] {
        let mut answer = s.ask(Method::POST, &interventions, Some(said), 202).await;
        assert!(answer["message_id"].is_u64() && answer["status"] == "queued", "{answer}");
        meant.push(["type", "source", "priority", "inject_mode"].map(|key| answer[key].take()));
    }
    let expected = [
        ["system", "system", "normal", "next_turn"],
        ["user_message", "user", "urgent", "next_turn"],
        ["interrupt", "guardian", "normal", "immediate"],
    ];
    assert_eq!(meant, expected);
    event(&s, &run, "agent.message_injected", 5).await;
    let told = s.get(&format!("{at}/events?types=agent.message_injected&fork=1")).await;
    let told: Vec<[&Value; 3]> = told["events"]
        .as_array()
        .unwrap()
        .iter()
        .map(|e| ["content", "source", "priority"].map(|key| &e["data"][key]))
        .collect();
    let expected = [
        [json!("soon"), json!("user"), json!("urgent")],
        [json!("later"), json!("system"), Value::Null],
        [json!("now"), json!("guardian"), Value::Null],
    ];
    assert_eq!(told, expected.each_ref().map(|e| e.each_ref()));
    let past = s.get(&interventions).await;
    let me = s.get("/api/v1/session").await["token_id"].take();
    assert!(past["interventions"].as_array().unwrap().iter().all(|p| p["token_id"] == me), "{past}");
    let past: Vec<[&Value; 5]> = past["interventions"]
        .as_array()
        .unwrap()
        .iter()
        .map(|p| ["message", "type", "source", "priority", "inject_mode"].map(|key| &p[key]))
        .collect();
    let expected = [
        ["now", "interrupt", "guardian", "normal", "immediate"],
        ["soon", "user_message", "user", "urgent", "next_turn"],
        ["later", "system", "system", "normal", "next_turn"],
    ];
    assert_eq!(past, expected);
    let events = s.get(&format!("{inside}/events?limit=1&event_type=agent.tool_use")).await;
    assert_eq!(
        (&events["total_count"], &events["events"][0]["event_type"]),
        (&json!(1), &json!("agent.tool_use"))
    );
    assert!(s.get(&format!("{inside}/trajectory")).await["events"].as_array().unwrap().len() > 1);

    post("/forks", Some(json!({ "forks": 1, "prompt": "another" }))).await;
    s.until(&at, |r| r["progress"]["total_forks"] == 4).await;
    s.ask(Method::POST, &format!("{at}/forks"), Some(json!({ "forks": 98 })), 422).await;
    s.ask(Method::POST, &format!("{at}/forks"), Some(json!({ "forks": 4_000_000_000_u32 })), 422).await;
    post("/forks/3/cancel", None).await;
    s.until(&format!("{at}/forks"), |f| f["forks"][3]["outcome"] == "cancelled").await;
    post("/cancel", None).await;
    let ended = s.until(&at, |r| r["status"] == "ended").await;
    assert_eq!(ended["outcome"], "cancelled");
    let late =
        s.ask(Method::POST, &format!("{at}/forks/0/messages"), Some(json!({ "content": "x" })), 409).await;
    assert_eq!(late["error"]["code"], "ended");

    let deeds = s.get(&format!("/api/v1/audit?target={run}")).await;
    let actions: Vec<&str> =
        deeds["entries"].as_array().unwrap().iter().rev().map(|e| e["action"].as_str().unwrap()).collect();
    let expected = [
        "run.create",
        "run.pause",
        "run.resume",
        "fork.message",
        "fork.message",
        "fork.message",
        "fork.message",
        "fork.message",
        "run.add_forks",
        "run.cancel_fork",
        "run.cancel",
    ];
    assert_eq!(actions, expected);
    assert_eq!(w.run(&["sandbox", "list"]).stdout, "There is no sandbox.\n");
}

#[tokio::test(flavor = "multi_thread")]
async fn whoever_steers_at_the_machine_itself_is_in_the_audit_trail_too() {
    let w = World::with_commit();
    let s = Server::start(&w);
    let run = w.started();
    event(&s, &run, "agent.tool_use", 2).await;
    let fork = format!("{run}/0");
    let sandbox = async |n: u32| {
        let fork = s.get(&format!("/api/v1/runs/{run}/forks/{n}")).await;
        fork["sandbox_id"].as_str().unwrap().to_string()
    };
    let (first, second) = (sandbox(0).await, sandbox(1).await);
    let token = w.json(&["token", "create", "laptop", "--json"])["id"].as_str().unwrap().to_string();
    for args in [
        &["message", &fork, "look here"][..],
        &["message", &fork, "stop", "--interrupt"],
        &["pause", &run],
        &["resume", &run, "--no-wait"],
        &["add", &run, "-p", "another"],
        &["sandbox", "exec", &second, "true"],
        &["cancel", &format!("{run}/1"), "--no-wait"],
        &["cancel", &run],
        &["cleanup", "--once", "--max-age", "1d"],
        &["gc", "--older-than", "365d"],
        &["stop-cleanup"],
        &["token", "revoke", &token],
    ] {
        let ran = w.run(args);
        assert_eq!(ran.code, 0, "{args:?}: {}{}", ran.stdout, ran.stderr);
    }
    let deeds = s.get("/api/v1/audit").await;
    let deeds: Vec<&Value> = deeds["entries"].as_array().unwrap().iter().rev().collect();
    let said: Vec<(&str, &str)> =
        deeds.iter().map(|d| (d["action"].as_str().unwrap(), d["target"].as_str().unwrap())).collect();
    let expected = [
        ("run.create", run.as_str()),
        ("token.create", "laptop"),
        ("fork.message", &fork),
        ("fork.message", &fork),
        ("run.pause", &run),
        ("run.resume", &run),
        ("run.add_forks", &run),
        ("sandbox.exec", &second),
        ("run.cancel_fork", &run),
        ("run.cancel", &run),
        ("server.cleanup", "server"),
        ("server.gc", "server"),
        ("server.stop_cleanup", "server"),
        ("token.revoke", &token),
    ];
    assert_eq!(said, expected);
    let user = std::process::Command::new("id").arg("-un").output().unwrap().stdout;
    let user = format!("local:{}", String::from_utf8(user).unwrap().trim());
    for deed in &deeds {
        assert_eq!((&deed["who"], &deed["token_id"]), (&json!(user), &json!("local")), "{deed}");
    }
    assert_eq!(deeds[0]["detail"]["prompts"], json!(["add a line"]));
    assert_eq!(deeds[2]["detail"], json!({ "type": "user_message", "content": "look here" }));
    assert_eq!(deeds[3]["detail"]["type"], "interrupt");
    assert_eq!(deeds[6]["detail"]["prompts"], json!(["another"]));
    assert_eq!(deeds[7]["detail"]["command"], "true");
    // What was said at the machine is among what was said to the agent.
    let past = s.get(&format!("/api/v1/sandboxes/{first}/interventions")).await;
    assert_eq!(past["interventions"][1]["message"], "look here", "{past}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_servers_run_goes_on_under_the_next_one() {
    let w = World::with_commit();
    let mut s = Server::start(&w);
    let run = started(&w, &s, 1).await;
    s.child.kill().unwrap();
    s.child.wait().unwrap();
    let s = Server::start(&w);
    let fork = s.get(&format!("/api/v1/runs/{run}/forks/0")).await;
    let sandbox = fork["sandbox_id"].as_str().unwrap();
    let go = json!({ "command": ["touch", "/workspace/go"] });
    s.ask(Method::POST, &format!("/api/v1/sandboxes/{sandbox}/exec"), Some(go), 200).await;
    let ended = s.until(&format!("/api/v1/runs/{run}"), |r| r["status"] == "ended").await;
    assert_eq!(ended["outcome"], "success", "{ended}");
    // The call was not made twice.
    let calls = s.get(&format!("/api/v1/runs/{run}/events?types=agent.tool_use")).await;
    assert_eq!(calls["events"].as_array().unwrap().len(), 1);
    assert_eq!(w.run(&["sandbox", "list"]).stdout, "There is no sandbox.\n");
}

#[tokio::test(flavor = "multi_thread")]
async fn words_are_seen_while_they_are_spoken() {
    let w = World::with_commit();
    let s = Server::start(&w);
    let slow =
        "name = \"slow\"\n[[turn]]\ntext = \"one two three four five six seven eight\"\nword_ms = 100\n";
    w.write(&w.script(), slow);
    let body =
        json!({ "repo": w.repo(), "prompt": "talk", "model": w.model(), "sandbox": { "network": "none" } });
    let run = s.ask(Method::POST, "/api/v1/runs", Some(body), 201).await["id"].as_str().unwrap().to_string();
    let told = s.get(&format!("/api/v1/runs/{run}/events/stream?live=true")).await;
    let mut said = String::new();
    let mut batches = 0;
    for frame in told.as_str().unwrap().split("\n\n").filter_map(|f| f.strip_prefix("event: live\ndata: ")) {
        let delta: Value = serde_json::from_str(frame).unwrap();
        said.push_str(delta["delta"]["text"].as_str().unwrap_or_default());
        batches += 1;
    }
    assert!(said.contains("three") && batches > 1, "{batches}: {said:?}");
    let quiet = s.get(&format!("/api/v1/runs/{run}/events/stream")).await;
    assert!(!quiet.as_str().unwrap().contains("event: live"));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_audit_trail_and_tokens_that_are_over_are_kept_as_long_as_the_settings_say() {
    let w = World::with_commit();
    w.ended(&[]);
    let revoked = w.json(&["token", "create", "revoked", "--json"])["id"].as_str().unwrap().to_string();
    w.run(&["token", "revoke", &revoked]);
    w.json(&["token", "create", "expired", "--expires", "1ms", "--json"]);
    w.json(&["token", "create", "valid", "--json"]);
    let names = |t: &Value| -> Vec<String> {
        let all = t["tokens"].as_array().unwrap().iter();
        all.map(|t| t["name"].as_str().unwrap().to_string()).collect()
    };
    // As it is, nothing is old enough.
    let s = Server::start_with(&w, &["--port", "0", "--no-work"]);
    s.until("/api/v1/tokens", |t| names(t) == ["revoked", "expired", "valid", "owner"]).await;
    assert_eq!(s.get("/api/v1/audit").await["entries"].as_array().unwrap().len(), 5);
    drop(s);
    // Older than a second by the time that it is looked at.
    std::thread::sleep(std::time::Duration::from_millis(1100));
    let short = ["--set", "retention.audit=1s", "--set", "retention.tokens=1s"];
    let s = Server::start_with(&w, &[&["--port", "0", "--no-work"], &short[..]].concat());
    s.until("/api/v1/tokens", |t| names(t) == ["valid", "owner"]).await;
    s.until("/api/v1/audit", |a| a["entries"].as_array().unwrap().is_empty()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn old_runs_are_removed_if_the_settings_say_so() {
    let w = World::with_commit();
    let (run, live) = (w.ended(&[]), {
        w.write(&w.script(), WAITS);
        let ran = w.fork(&["--no-wait", "--json"]);
        serde_json::from_str::<Value>(&ran.stdout).unwrap()["run"].as_str().unwrap().to_string()
    });
    // Older than a second by the time that it is looked at.
    std::thread::sleep(std::time::Duration::from_millis(1100));
    let s = Server::start_with(&w, &["--port", "0", "--no-work", "--set", "retention.runs=1s"]);
    let left = s.until("/api/v1/runs", |r| r["runs"].as_array().unwrap().len() == 1).await;
    assert_eq!(left["runs"][0]["id"], live.as_str());
    assert_eq!(
        s.ask(Method::GET, &format!("/api/v1/runs/{run}/events"), None, 404).await["error"]["code"],
        "run_not_found"
    );
    assert!(!w.git(&["for-each-ref", "refs/forkyard"]).contains(&run));
    assert_eq!(w.run(&["cancel", &live]).code, 0);
}
