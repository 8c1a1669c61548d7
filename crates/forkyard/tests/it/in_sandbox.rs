//! Agents that run inside their sandboxes: the real program in a real sandbox, a real server that is killed with -9 in the
//! middle, and a model behind real HTTP whose key must never be found inside.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use reqwest::Method;
use serde_json::{Value, json};
use test_support::model_server::{Cut, ModelServer, Reply, Seen};

use super::World;
use super::docker_fixture::{Daemon, IMAGE};
use super::serve::{PATIENCE, Server};

/// A yard whose model is a server of the test, with a key that was never written anywhere before.
pub struct Yard {
    pub w: World,
    pub model: ModelServer,
    key: String,
}

impl Yard {
    pub async fn new(more: &str) -> Yard {
        let w = World::with_commit();
        let model = ModelServer::start().await;
        let name = w.dir.path().file_name().unwrap().to_str().unwrap();
        let name: String = name.chars().filter(char::is_ascii_alphanumeric).collect();
        let key = format!("sk-ant-api03-{}-{name}-secret", std::process::id());
        w.user_file(&format!(
            "[anthropic]\napi_key = {key:?}\nbase_url = {:?}\n[engine]\nheartbeat_interval = \"300ms\"\n{more}",
            model.url()
        ));
        Yard { w, model, key }
    }

    pub fn body(&self) -> Value {
        json!({
            "repo": self.w.repo(), "prompt": "add a line", "model": "sonnet", "forks": 1, "budget_usd": 5,
            "sandbox": { "network": "none" }, "agent": { "in_sandbox": true },
        })
    }
}

pub async fn start(s: &Server, body: Value) -> String {
    let made = s.ask(Method::POST, "/api/v1/runs", Some(body), 201).await;
    made["id"].as_str().unwrap().to_string()
}

/// The events of a run, of these kinds.
async fn events(s: &Server, run: &str, kinds: &str) -> Vec<Value> {
    let kinds = if kinds.is_empty() { String::new() } else { format!("&types={kinds}") };
    let page = s.get(&format!("/api/v1/runs/{run}/events?limit=500{kinds}")).await;
    page["events"].as_array().unwrap().clone()
}

async fn ended(s: &Server, run: &str) -> Value {
    let ended = s.until(&format!("/api/v1/runs/{run}"), |r| r["status"] == "ended").await;
    let all = events(s, run, "").await;
    assert_eq!(ended["outcome"], "success", "{ended}\n{all:#?}");
    ended
}

/// Results of tools that the model has been told.
pub fn told(seen: &Seen) -> usize {
    let blocks = seen.messages().iter().flat_map(|m| m["content"].as_array().into_iter().flatten());
    blocks.filter(|b| b["type"] == "tool_result").count()
}

/// Whoever may only look does not get what money is spent with, by whatever way.
async fn the_token_is_not_for_readers(s: &Server, sandbox: &str) {
    let made = json!({ "name": "reader", "scope": "read" });
    let reader = s.ask(Method::POST, "/api/v1/tokens", Some(made), 201).await["token"].clone();
    let at = format!("/api/v1/sandboxes/{sandbox}");
    let links = "ln -s /home/user/.forkyard /tmp/dir; ln -s ../home/user/.forkyard/token /tmp/file; \
        ln -s /tmp/file /tmp/twice; mkdir -p /workspace/.forkyard; echo mine > /workspace/.forkyard/note";
    let links = json!({ "command": ["sh", "-c", links] });
    assert_eq!(s.ask(Method::POST, &format!("{at}/exec"), Some(links), 200).await["exit_code"], 0);
    let own = ["/home/user/.forkyard", "/home/user/../user/.forkyard/", "/tmp/dir", "/proc/self"];
    let files = [
        "/home/user/.forkyard/token",
        "/home/user//./.forkyard/token",
        "../home/user/.forkyard/token",
        "/tmp/dir/token",
        "/tmp/file",
        "/tmp/twice",
        "/proc/1/environ",
    ];
    let ways = own.map(|p| format!("{at}/files?path={p}"));
    for way in ways.into_iter().chain(files.map(|p| format!("{at}/files/content?path={p}"))) {
        let answer = s.send(Method::GET, &way, reader.as_str(), None).await;
        let (status, text) = (answer.status().as_u16(), answer.text().await.unwrap());
        assert!(
            status == 403 && text.contains("path_refused") && !text.contains("fys_"),
            "{way}: {status} {text}"
        );
    }
    let read = async |path: &str| {
        let way = format!("{at}/files/content?path={path}");
        let answer = s.send(Method::GET, &way, reader.as_str(), None).await;
        (answer.status().as_u16(), answer.text().await.unwrap())
    };
    // A repository's own folder of that name is the repository's.
    assert_eq!(read(".forkyard/note").await, (200, "mine\n".into()));
    assert_eq!(read("/tmp/nothing").await.0, 404);
    s.ask(Method::GET, &format!("{at}/files/content?path=/home/user/.forkyard/token"), None, 200).await;
}

async fn until<T>(what: &str, mut look: impl AsyncFnMut() -> Option<T>) -> T {
    let since = Instant::now();
    loop {
        if let Some(found) = look().await {
            return found;
        }
        assert!(since.elapsed() < PATIENCE, "{what} does not come");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_inside_reaches_the_model_and_its_user() {
    let y = Yard::new("").await;
    y.model.brain(|seen| match told(seen) {
        _ if seen.body["model"].as_str().is_some_and(|m| m.contains("haiku")) => Reply::text("pong"),
        // Another client of the same endpoint, as it is used by agents of others.
        0 => Reply::tool(
            "Bash",
            json!({ "command": "curl -s -m 60 -x http://127.0.0.1:3128 $ANTHROPIC_BASE_URL/v1/messages \
                -H \"x-api-key: $(cat $FORKYARD_TOKEN_FILE)\" -H 'anthropic-version: 2023-06-01' -H 'content-type: application/json' \
                -d '{\"model\":\"haiku\",\"max_tokens\":2000,\"stream\":true,\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"text\",\"text\":\"ping\"}]}]}'; \
                curl -s -o /dev/null -w ' users=%{http_code}' -x http://127.0.0.1:3128 http://forkyard.internal/api/v1/runs" }),
        ),
        1 => Reply::tool("Write", json!({ "file_path": "a.txt", "content": "one\ntwo\n" })),
        2 => Reply::tool("Bash", json!({ "command": "touch waits; sleep 600" })),
        _ => Reply::text("Done and well."),
    });
    let s = Server::start(&y.w);
    let run = start(&s, y.body()).await;
    let at = format!("/api/v1/runs/{run}");
    // Its long command runs; an interrupt ends it at once.
    until("the third call", async || {
        let calls = events(&s, &run, "agent.tool_use").await;
        calls
            .iter()
            .any(|e| e["data"]["input"]["command"].as_str().is_some_and(|c| c.contains("waits")))
            .then_some(())
    })
    .await;
    let fork = s.get(&format!("{at}/forks/0")).await;
    assert_eq!(fork["lifecycle"], "RUNNING");
    let sandbox = fork["sandbox_id"].as_str().unwrap().to_string();
    the_token_is_not_for_readers(&s, &sandbox).await;
    let interrupt = json!({ "content": "That is enough.", "type": "interrupt" });
    s.ask(Method::POST, &format!("/api/v1/sandboxes/{sandbox}/messages"), Some(interrupt), 202).await;
    ended(&s, &run).await;

    let results = events(&s, &run, "agent.tool_completed").await;
    let said = results[0]["data"]["tool_response"].to_string();
    assert!(said.contains("message_start") && said.contains("pong") && said.contains("users=404"), "{said}");
    assert!(!events(&s, &run, "agent.message_injected").await.is_empty());
    let diff = s.get(&format!("{at}/forks/0/diff?path=a.txt")).await;
    assert!(diff["patch"].as_str().unwrap().contains("+two"), "{diff}");
    // Who was there, from the first sign of life to the report.
    let first = &events(&s, &run, "agent.").await[0];
    assert_eq!((&first["type"], &first["source"]), (&json!("agent.heartbeat"), &json!("worker")));
    assert_eq!(events(&s, &run, "worker.task_completed").await.len(), 1);
    let task = s.get(&format!("/api/v1/sandboxes/{sandbox}/task")).await;
    assert_eq!((&task["status"], &task["task_id"]), (&json!("completed"), &json!(format!("{run}/0"))));
    let trajectory = s.get(&format!("/api/v1/sandboxes/{sandbox}/trajectory")).await;
    assert!(trajectory["heartbeats"]["count"].as_u64().unwrap() > 0);
    // All of it was paid for: the agent's turns, and the request of the other client.
    let requests = y.model.seen();
    assert!(requests.iter().all(|r| r.headers["x-api-key"] == y.key));
    assert!(requests.iter().any(|r| r.body["model"].as_str().unwrap().contains("haiku")));
    assert_eq!(y.model.bills().len(), 5);
    let spent = s.get(&format!("{at}/forks/0")).await["cost_usd"].as_f64().unwrap();
    assert!(spent > 0.0 && spent < 5.0, "{spent}");
}

/// Kills the server while a command runs and again while the model thinks. `search` prints how often the key is found inside.
async fn through_kills(y: &Yard, body: Value, search: &str) {
    let lost = Arc::new(AtomicUsize::new(0));
    let (losing, search) = (lost.clone(), search.to_string());
    y.model.brain(move |seen| match told(seen) {
        0 => Reply::tool("Write", json!({ "file_path": "a.txt", "content": "one\ntwo\n" })),
        1 => Reply::tool(
            "Bash",
            json!({ "command": "touch started; while ! [ -e go ]; do sleep 0.05; done; echo once >> count; cat count" }),
        ),
        2 if losing.fetch_add(1, Ordering::SeqCst) == 0 => Reply::text("never heard").cut(Cut::HangAfter(2)),
        2 => Reply::tool("Bash", json!({ "command": search })),
        _ => Reply::text("Done and well."),
    });
    let mut s = Server::start(&y.w);
    let run = start(&s, body).await;
    let fork_at = format!("/api/v1/runs/{run}/forks/0");
    let file = async |s: &Server, sandbox: &str, name: &str| {
        let path = format!("/api/v1/sandboxes/{sandbox}/files/content?path={name}");
        let got = s.send(Method::GET, &path, Some(&s.token), None).await;
        if got.status().is_success() { Some(got.text().await.unwrap()) } else { None }
    };
    let sandbox = until("the sandbox", async || {
        let fork = s.send(Method::GET, &fork_at, Some(&s.token), None).await;
        fork.json::<Value>().await.ok()?["sandbox_id"].as_str().map(str::to_string)
    })
    .await;
    until("the command", async || file(&s, &sandbox, "started").await).await;
    no_process_holds(&y.key, &sandbox);

    s.child.kill().unwrap();
    s.child.wait().unwrap();
    s = Server::start(&y.w);
    // Somebody has taken it over, and the worker goes on for that one.
    s.until(&fork_at, |f| f["attempt"].as_u64() >= Some(2)).await;
    let put = s.http.put(format!("{}/api/v1/sandboxes/{sandbox}/files/content?path=go", s.url));
    assert!(put.bearer_auth(&s.token).body("").send().await.unwrap().status().is_success());
    until("the model's silence", async || (lost.load(Ordering::SeqCst) > 0).then_some(())).await;

    s.child.kill().unwrap();
    s.child.wait().unwrap();
    s = Server::start(&y.w);
    ended(&s, &run).await;

    let fork = s.get(&fork_at).await;
    assert!(fork["attempt"].as_u64() >= Some(3), "{fork}");
    // Nothing was started twice, and nobody had to begin again.
    let count = |kind: &'static str| {
        let (s, run) = (&s, &run);
        async move { events(s, run, kind).await.len() }
    };
    assert_eq!(count("agent.started").await, 1);
    assert_eq!(count("agent.resumed").await, 0, "the worker itself was never lost");
    assert_eq!(count("agent.tool_use").await, 3);
    assert_eq!(count("agent.tool_completed").await, 3);
    assert_eq!(count("agent.completed").await, 1);
    assert_eq!(count("worker.task_completed").await, 1);
    let patch = s.get(&format!("{fork_at}/diff")).await["patch"].as_str().unwrap().to_string();
    assert!(patch.contains("+two") && patch.matches("+once").count() == 1, "{patch}");
    let results = events(&s, &run, "agent.tool_completed").await;
    let found = results[2]["data"]["tool_response"][0]["text"].as_str().unwrap().to_string();
    assert!(found.contains("files=0"), "{found}");
    // Nor is it in anything that was recorded, here or in the sandbox's own answers.
    let recorded = serde_json::to_string(&events(&s, &run, "").await).unwrap();
    assert!(!recorded.contains(&y.key));
    // The answer that was lost with the server counts at its worst case; it was asked for again once.
    assert_eq!(y.model.bills().len(), 5);
}

/// Looks from the host at the processes of a sandbox, which from inside are closed to each other: the worker is among them,
/// the key in none.
fn no_process_holds(key: &str, sandbox: &str) {
    let names = std::fs::read_dir("/proc").unwrap().filter_map(|e| e.ok()?.file_name().into_string().ok());
    let pids: Vec<String> = names.filter(|name| name.bytes().all(|b| b.is_ascii_digit())).collect();
    // Processes come and go: what is gone holds nothing.
    let read = |pid: &str, what: &str| std::fs::read(format!("/proc/{pid}/{what}")).unwrap_or_default();
    let space = |pid: &str| std::fs::read_link(format!("/proc/{pid}/ns/pid")).ok();
    let own = format!("SANDBOX_ID={sandbox}");
    let is_worker = |pid: &&String| read(pid, "environ").split(|b| *b == 0).any(|v| v == own.as_bytes());
    let worker = pids.iter().find(is_worker).expect("the worker's environment can be read");
    let inside = space(worker).expect("the worker runs");
    assert_ne!(Some(&inside), space("self").as_ref(), "the worker is in its sandbox");
    let all: Vec<&String> = pids.iter().filter(|pid| space(pid).as_ref() == Some(&inside)).collect();
    assert!(all.len() >= 2, "the worker and who started it: {all:?}");
    for pid in all {
        for what in ["environ", "cmdline"] {
            let held = String::from_utf8_lossy(&read(pid, what)).into_owned();
            assert!(!held.contains(key), "{what} of {pid} has the key");
        }
    }
}

/// A command that looks for the key in all files, and prints how often it is there. It holds the key only in halves.
fn search(key: &str, before: &str, which: &str) -> String {
    let (a, b) = key.split_at(key.len() / 2);
    format!(
        "k='{a}''{b}'; {before} \
         n=$(find / \\( -path /proc -o -path /sys \\) -prune -o -type f {which} -print0 2>/dev/null | \
             xargs -0 grep -lF -- \"$k\" 2>/dev/null | wc -l); echo files=$n"
    )
}

#[tokio::test(flavor = "multi_thread")]
async fn the_work_goes_on_through_servers_that_are_killed() {
    let y = Yard::new("").await;
    // What was not changed since the key came to be can't hold it; the time of a change can't be set back.
    let search = search(&y.key, "touch -d '1 hour ago' /tmp/ref;", "-cnewer /tmp/ref");
    through_kills(&y, y.body(), &search).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_same_in_a_container() {
    let Some(daemon) = Daemon::start_for(&[Path::new(env!("CARGO_BIN_EXE_forkyard"))]).await else { return };
    let y = Yard::new(&format!("[docker]\nhost = {:?}\n", daemon.host())).await;
    let search = search(&y.key, "", "");
    let mut body = y.body();
    body["sandbox"] = json!({ "network": "none", "provider": "docker", "image": IMAGE });
    through_kills(&y, body, &search).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_is_killed_is_followed_by_another() {
    let y = Yard::new("").await;
    // The agent ends its own worker, once.
    let killing = "[ -e killed ] || { touch killed; for p in /proc/[0-9]*; do \
                   tr '\\0' ' ' < $p/cmdline 2>/dev/null | grep -q 'worker --in-[s]andbox' && kill -9 ${p#/proc/}; done; sleep 1; }; \
                   echo on >> a.txt";
    y.model.brain(move |seen| match told(seen) {
        0 => Reply::tool("Bash", json!({ "command": killing })),
        _ => Reply::text("Done and well."),
    });
    let s = Server::start(&y.w);
    let run = start(&s, y.body()).await;
    ended(&s, &run).await;
    assert_eq!(events(&s, &run, "agent.resumed").await.len(), 1);
    assert_eq!(events(&s, &run, "agent.completed").await.len(), 1);
    let errors = serde_json::to_string(&events(&s, &run, "fork.").await).unwrap();
    assert!(
        errors.contains("SIGKILL") && errors.contains("out of memory?"),
        "the end has a diagnosis: {errors}"
    );
    let diff = s.get(&format!("/api/v1/runs/{run}/forks/0/diff?path=a.txt")).await;
    assert_eq!(diff["patch"].as_str().unwrap().matches("+on").count(), 1, "{diff}");
}

#[tokio::test(flavor = "multi_thread")]
async fn models_that_are_not_served_inside_are_refused_at_once() {
    let y = Yard::new("").await;
    let s = Server::start(&y.w);
    let mut body = y.body();
    body["model"] = y.w.model().into();
    let run = start(&s, body).await;
    let ended = s.until(&format!("/api/v1/runs/{run}"), |r| r["status"] == "ended").await;
    assert_eq!(ended["outcome"], "failed");
    assert!(ended["error"].as_str().unwrap().contains("in_sandbox"), "{ended}");
}
