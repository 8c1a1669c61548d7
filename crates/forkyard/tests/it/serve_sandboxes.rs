//! Sandboxes over the API: real ones.

use std::collections::{BTreeSet, HashMap};
use std::time::{Duration, Instant};

use bollard::query_parameters::ListContainersOptionsBuilder;
use forkyard_sandbox::docker::WARM_LABEL;
use futures::{SinkExt, StreamExt};
use reqwest::Method;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::client::IntoClientRequest;

use super::World;
use super::docker_fixture::{Daemon, IMAGE};
use super::observe::until;
use super::serve::{PATIENCE, Server};

#[tokio::test(flavor = "multi_thread")]
async fn a_sandbox_is_made_used_forked_and_removed() {
    let w = World::with_commit();
    let s = Server::start_with(&w, &["--port", "0", "--no-work"]);
    let made = json!({ "id": "box1", "network": "none", "memory_bytes": 256 << 20, "lifetime_ms": 600_000 });
    let first = s.ask(Method::POST, "/api/v1/sandboxes", Some(made.clone()), 201).await;
    assert_eq!((&first["id"], &first["status"]), (&json!("box1"), &json!("running")));
    s.ask(Method::POST, "/api/v1/sandboxes", Some(made), 201).await;
    let all = s.get("/api/v1/sandboxes").await;
    assert_eq!((all["sandboxes"].as_array().unwrap().len(), all["next_cursor"].is_null()), (1, true));
    let at = "/api/v1/sandboxes/box1";
    assert_eq!(s.get(at).await["limits"]["memory_bytes"], 256 << 20);
    assert_eq!(s.get("/api/v1/sandboxes/health").await["healthy"], true);

    // Files go in and come out as they are.
    let bytes: Vec<u8> = (0..=255).cycle().take(3 << 20).collect();
    let put = s.http.put(format!("{}{at}/files/content?path=data.bin&mode=600", s.url)).bearer_auth(&s.token);
    assert_eq!(put.body(bytes.clone()).send().await.unwrap().status().as_u16(), 204);
    let got = s.send(Method::GET, &format!("{at}/files/content?path=data.bin"), Some(&s.token), None).await;
    assert!(got.bytes().await.unwrap() == bytes, "other bytes than were sent");
    let part = s
        .send(
            Method::GET,
            &format!("{at}/files/content?path=data.bin&offset=256&length=4"),
            Some(&s.token),
            None,
        )
        .await;
    assert_eq!(part.bytes().await.unwrap(), &[0, 1, 2, 3][..]);
    let listed = s.get(&format!("{at}/files")).await;
    assert_eq!(
        (&listed["files"][0]["name"], &listed["files"][0]["mode"]),
        (&json!("data.bin"), &json!("0600"))
    );

    let run = json!({ "command": ["sh", "-c", "cat; echo $A >&2; exit 3"], "stdin": "from me", "env": { "A": "b" } });
    let ran = s.ask(Method::POST, &format!("{at}/exec"), Some(run), 200).await;
    assert_eq!(
        (&ran["exit_code"], &ran["stdout"], &ran["stderr"]),
        (&json!(3), &json!("from me"), &json!("b\n"))
    );
    let late = s
        .ask(
            Method::POST,
            &format!("{at}/exec"),
            Some(json!({ "command": ["sleep", "100"], "timeout_ms": 100 })),
            200,
        )
        .await;
    assert_eq!((&late["exit_code"], &late["timed_out"]), (&json!(124), &json!(true)));
    let streamed = s
        .ask(
            Method::POST,
            &format!("{at}/exec/stream"),
            Some(json!({ "command": ["printf", "hi\\377"] })),
            200,
        )
        .await;
    let text = streamed.as_str().unwrap();
    assert!(text.contains("event: stdout\ndata: {\"base64\":\"aGn/\"}"), "{text}");
    assert!(text.contains("event: exit\n") && text.contains("\"exit_code\":0"), "{text}");

    let children = s.ask(Method::POST, &format!("{at}/fork"), Some(json!({ "count": 2 })), 201).await;
    let child = children["sandboxes"][1].as_str().unwrap();
    s.ask(Method::DELETE, &format!("/api/v1/sandboxes/{child}/files?path=data.bin"), None, 204).await;
    assert_eq!(
        s.ask(Method::GET, &format!("/api/v1/sandboxes/{child}/files/content?path=data.bin"), None, 404)
            .await["error"]["code"],
        "file_not_found"
    );
    s.ask(Method::GET, &format!("{at}/files/content?path=data.bin&length=1"), None, 200).await;
    let snapshot = s.ask(Method::POST, &format!("{at}/snapshot"), Some(json!({ "id": "snap1" })), 201).await;
    assert_eq!(snapshot["id"], "snap1");
    let stats = s.get("/api/v1/sandboxes/stats").await;
    assert_eq!(stats["sandboxes"].as_array().unwrap().len(), 3, "{stats}");
    assert!(stats["sandboxes"].as_array().unwrap().iter().all(|s| s["healthy"] == true), "{stats}");
    assert!(s.get(&format!("{at}/stats")).await["disk_bytes"].as_u64().unwrap() > 0);
    assert_eq!(s.get(&format!("{at}/health")).await["healthy"], true);
    // What it used before is there for whoever asks late, and each question adds to it.
    let first = s.get(&format!("{at}/stats/history")).await;
    assert_eq!(
        (&first["running"], &first["limits"]["memory_bytes"]),
        (&json!(true), &json!(256 << 20)),
        "{first}"
    );
    let last = first["samples"].as_array().unwrap().last().unwrap()["at"].as_u64().unwrap();
    let busy = json!({ "command": ["sh", "-c", "i=0; while [ $i -lt 300000 ]; do i=$((i+1)); done"] });
    let later = until("it was asked again", async || {
        s.ask(Method::POST, &format!("{at}/exec"), Some(busy.clone()), 200).await;
        let more = s.get(&format!("{at}/stats/history?after={last}")).await;
        more["samples"]
            .as_array()
            .unwrap()
            .iter()
            .any(|s| s["cpu_percent"].as_f64() > Some(0.0))
            .then_some(more)
    })
    .await;
    assert!(later["samples"].as_array().unwrap().iter().all(|s| s["at"].as_u64() > Some(last)), "{later}");
    let unknown = s.get("/api/v1/sandboxes/nobody/stats/history").await;
    assert_eq!(unknown, json!({ "running": false, "limits": null, "samples": [] }));
    assert_eq!(s.ask(Method::POST, &format!("{at}/stop"), None, 200).await["status"], "stopped");
    assert_eq!(s.ask(Method::POST, &format!("{at}/start"), None, 200).await["status"], "running");

    for (method, path, body, status, code) in [
        (Method::POST, "/api/v1/sandboxes", json!({ "memory_bytes": 1 }), 422, "invalid"),
        (Method::POST, "/api/v1/sandboxes", json!({ "secrets": ["nonesuch"] }), 422, "invalid"),
        (Method::POST, "/api/v1/sandboxes", json!({ "image": "archive:/etc/passwd" }), 403, "path_refused"),
        (Method::POST, "/api/v1/sandboxes", json!({ "volumes": [] }), 400, "bad_request"),
        (Method::POST, "/api/v1/sandboxes/box1/exec", json!({ "command": [] }), 422, "invalid"),
        (Method::POST, "/api/v1/sandboxes/box1/exec", json!({ "command": ["a\0b"] }), 422, "invalid"),
        (
            Method::POST,
            "/api/v1/sandboxes/none/exec",
            json!({ "command": ["true"] }),
            404,
            "sandbox_not_found",
        ),
        (Method::POST, "/api/v1/sandboxes/box1/fork", json!({ "count": 101 }), 422, "invalid"),
        (Method::GET, "/api/v1/sandboxes/box1/task", Value::Null, 404, "sandbox_not_found"),
    ] {
        let answer = s.ask(method, path, Some(body), status).await;
        assert_eq!(answer["error"]["code"], code, "{path}: {answer}");
    }
    let all: Vec<String> = [s.get("/api/v1/sandboxes?limit=2").await, s.get("/api/v1/sandboxes").await]
        .iter()
        .map(|p| p["sandboxes"].as_array().unwrap().len().to_string())
        .collect();
    assert_eq!(all, ["2", "3"]);
    for id in ["box1", children["sandboxes"][0].as_str().unwrap(), child] {
        s.ask(Method::DELETE, &format!("/api/v1/sandboxes/{id}"), None, 204).await;
    }
    assert_eq!(w.run(&["sandbox", "list"]).stdout, "There is no sandbox.\n");
}

#[tokio::test(flavor = "multi_thread")]
async fn commands_end_with_the_token_that_started_them() {
    let w = World::with_commit();
    let s = Server::start_with(&w, &["--port", "0", "--no-work"]);
    s.ask(Method::POST, "/api/v1/sandboxes", Some(json!({ "id": "box1", "network": "none" })), 201).await;
    let at = "/api/v1/sandboxes/box1";
    let made = json!({ "name": "hands", "scope": "steer" });
    let made = s.ask(Method::POST, "/api/v1/tokens", Some(made), 201).await;
    let token = made["token"].as_str().unwrap();
    let command = |name: &str| json!({ "command": ["sh", "-c", format!("touch {name}; sleep 7777")] });
    let mut streamed = s
        .send(Method::POST, &format!("{at}/exec/stream"), Some(token), Some(command("streams")))
        .await
        .bytes_stream();
    let pty = format!("{}{at}/pty?token={token}", s.url.replace("http", "ws"));
    let (mut socket, _) = tokio_tungstenite::connect_async(pty.into_client_request().unwrap()).await.unwrap();
    let exec = format!("{at}/exec");
    let waited = s.send(Method::POST, &exec, Some(token), Some(command("waits")));
    let revoked = async {
        until("both commands run", async || {
            let there = s.get(&format!("{at}/files")).await.to_string();
            (there.contains("streams") && there.contains("waits")).then_some(())
        })
        .await;
        s.ask(Method::DELETE, &format!("/api/v1/tokens/{}", made["id"].as_str().unwrap()), None, 204).await;
        Instant::now()
    };
    let (answer, since) = tokio::join!(waited, revoked);
    assert_eq!(answer.status().as_u16(), 401);
    let ends = async {
        while let Some(piece) = streamed.next().await {
            assert!(!String::from_utf8_lossy(&piece.unwrap()).contains("event: exit"));
        }
        while let Some(Ok(_)) = socket.next().await {}
    };
    tokio::time::timeout(PATIENCE, ends).await.expect("they end");
    // Sooner than they would look by themselves.
    assert!(since.elapsed() < Duration::from_secs(10), "{:?}", since.elapsed());
    until("the commands are gone", async || {
        let look = json!({ "command": ["sh", "-c", "cat /proc/[0-9]*/comm 2>/dev/null | grep -x sleep"] });
        let ran = s.ask(Method::POST, &format!("{at}/exec"), Some(look), 200).await;
        (ran["stdout"] == "").then_some(())
    })
    .await;
    s.ask(Method::DELETE, at, None, 204).await;
}

/// An upload of `up.bin` whose body begins, as it is framed, and does not go on.
async fn begun(s: &Server, token: &str, framing: &str, body: &str) -> TcpStream {
    let mut stream = TcpStream::connect(s.url.trim_start_matches("http://")).await.unwrap();
    let head = format!(
        "PUT /api/v1/sandboxes/box1/files/content?path=up.bin HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\
         authorization: Bearer {token}\r\n{framing}\r\n\r\n{body}"
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    stream
}

/// What it is answered with: the status, and the error's code.
async fn answered(mut stream: TcpStream) -> (u16, String) {
    let mut answer = Vec::new();
    let read = async {
        // What was sent and not read makes a reset of the end.
        while let Ok(1..) = stream.read_buf(&mut answer).await {}
    };
    tokio::time::timeout(PATIENCE, read).await.expect("it is answered");
    let answer = String::from_utf8_lossy(&answer);
    let status = answer.split(' ').nth(1).and_then(|s| s.parse().ok()).unwrap_or_default();
    let code = answer.split("\"code\":\"").nth(1).and_then(|rest| rest.split('"').next());
    (status, code.unwrap_or(&answer).to_string())
}

#[tokio::test(flavor = "multi_thread")]
async fn an_upload_that_does_not_come_to_its_end_is_told_why() {
    const CHUNKED: &str = "transfer-encoding: chunked";
    let w = World::with_commit();
    let s = Server::start_with(&w, &["--port", "0", "--no-work"]);
    s.ask(Method::POST, "/api/v1/sandboxes", Some(json!({ "id": "box1", "network": "none" })), 201).await;
    let made = json!({ "name": "hands", "scope": "steer" });
    let made = s.ask(Method::POST, "/api/v1/tokens", Some(made), 201).await;
    let writes = async |n: usize| {
        until("the uploads are under way", async || {
            let deeds = s.get("/api/v1/audit?target=box1").await;
            let deeds = deeds["entries"].as_array().unwrap().iter();
            (deeds.filter(|e| e["action"] == "sandbox.write_file").count() == n).then_some(())
        })
        .await;
    };
    let silent = begun(&s, &s.token, CHUNKED, "5\r\nhello\r\n").await;
    let revoked = begun(&s, made["token"].as_str().unwrap(), CHUNKED, "5\r\nhello\r\n").await;
    writes(2).await;
    let since = Instant::now();
    s.ask(Method::DELETE, &format!("/api/v1/tokens/{}", made["id"].as_str().unwrap()), None, 204).await;
    assert_eq!(answered(revoked).await, (401, "token_revoked".into()));
    // Sooner than it would look by itself.
    assert!(since.elapsed() < Duration::from_secs(10), "{:?}", since.elapsed());
    let broken = begun(&s, &s.token, CHUNKED, "5\r\nhello\r\nnonsense\r\n").await;
    assert_eq!(answered(broken).await, (400, "bad_request".into()));
    // By what it says of itself: nothing of it is read, and nothing is recorded.
    let large = begun(&s, &s.token, &format!("content-length: {}", (1 << 30) + 1), "x").await;
    assert_eq!(answered(large).await, (413, "too_large".into()));
    assert_eq!(answered(silent).await, (408, "too_slow".into()));
    writes(3).await;
    until("nothing is left of any of them", async || {
        let there = s.get("/api/v1/sandboxes/box1/files").await.to_string();
        (!there.contains("up.bin")).then_some(())
    })
    .await;
    s.ask(Method::DELETE, "/api/v1/sandboxes/box1", None, 204).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_terminal_over_a_websocket() {
    let w = World::with_commit();
    let s = Server::start_with(&w, &["--port", "0", "--no-work"]);
    s.ask(Method::POST, "/api/v1/sandboxes", Some(json!({ "id": "box1", "network": "none" })), 201).await;
    let at = format!(
        "{}/api/v1/sandboxes/box1/pty?cols=90&rows=20&token={}",
        s.url.replace("http", "ws"),
        s.token
    );
    let (mut socket, _) = tokio_tungstenite::connect_async(at.into_client_request().unwrap()).await.unwrap();
    socket.send(Message::text(json!({ "resize": { "cols": 100, "rows": 30 } }).to_string())).await.unwrap();
    socket.send(Message::binary("stty size; echo $((6*7))x; exit 5\n")).await.unwrap();
    let (mut shown, mut exit) = (String::new(), Value::Null);
    while exit.is_null() {
        match tokio::time::timeout(PATIENCE, socket.next()).await.expect("it goes on") {
            Some(Ok(Message::Binary(b))) => shown.push_str(&String::from_utf8_lossy(&b)),
            Some(Ok(Message::Text(t))) => exit = serde_json::from_str::<Value>(&t).unwrap()["exit"].take(),
            Some(Ok(_)) => {}
            other => panic!("{other:?}: {shown}"),
        }
    }
    assert!(shown.contains("30 100") && shown.contains("42x"), "{shown}");
    assert_eq!(exit["exit_code"], 5);
    s.ask(Method::DELETE, "/api/v1/sandboxes/box1", None, 204).await;
}

/// Containers of the engine, by the names that they were made with; with `warm`, those that were started before somebody asked.
async fn containers(daemon: &Daemon, warm: bool) -> BTreeSet<String> {
    let label = format!("dev.forkyard.label.{WARM_LABEL}=ready");
    let filters = HashMap::from([("label".to_string(), vec![label])]);
    let mut options = ListContainersOptionsBuilder::default().all(true);
    if warm {
        options = options.filters(&filters);
    }
    let found = daemon.docker().unwrap().list_containers(Some(options.build())).await.unwrap();
    found.into_iter().map(|c| c.labels.unwrap()["dev.forkyard.sandbox"].clone()).collect()
}

/// As many as are kept are ready, and which.
async fn kept_ready(w: &World, daemon: &Daemon, count: usize) -> BTreeSet<String> {
    let since = Instant::now();
    while std::fs::read_dir(w.home().join("docker/ready")).map_or(0, Iterator::count) < count {
        assert!(since.elapsed() < PATIENCE, "no containers are kept ready");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    containers(daemon, true).await
}

#[tokio::test(flavor = "multi_thread")]
async fn containers_that_are_kept_ready_become_sandboxes_and_go_with_the_server() {
    let Some(daemon) = Daemon::start().await else { return };
    let w = World::with_commit();
    w.user_file(&format!("[docker]\nhost = {:?}\nwarm = 2\n", daemon.host()));
    let create = async |s: &Server, id: &str| {
        let body = json!({ "id": id, "provider": "docker", "image": IMAGE, "network": "none" });
        s.ask(Method::POST, "/api/v1/sandboxes", Some(body), 201).await;
    };
    let remove = async |s: &Server, id: &str| {
        s.ask(Method::DELETE, &format!("/api/v1/sandboxes/{id}"), None, 204).await;
    };
    let mut s = Server::start_with(&w, &["--port", "0", "--no-work"]);
    // The first of its kind says what is wanted.
    create(&s, "box1").await;
    remove(&s, "box1").await;
    let ready = kept_ready(&w, &daemon, 2).await;
    assert_eq!(ready.len(), 2);
    assert_eq!(s.get("/api/v1/sandboxes").await["sandboxes"], json!([]), "they are nobody's sandboxes");
    create(&s, "box2").await;
    let made_as = std::fs::read_link(w.home().join("docker/sandboxes/box2")).unwrap();
    assert!(ready.contains(made_as.to_str().unwrap()), "{made_as:?} of {ready:?}");
    let run = json!({ "command": ["sh", "-c", "echo in use > mark; cat mark"] });
    let ran = s.ask(Method::POST, "/api/v1/sandboxes/box2/exec", Some(run), 200).await;
    assert_eq!(ran["stdout"], "in use\n", "{ran}");

    // What was taken stays; what waited goes.
    let pid = rustix::process::Pid::from_child(&s.child);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    assert!(s.child.wait().unwrap().success());
    assert_eq!(containers(&daemon, false).await, BTreeSet::from([made_as.to_str().unwrap().to_string()]));

    // A server that is killed takes nothing with it: the next sweep does.
    s = Server::start_with(&w, &["--port", "0", "--no-work"]);
    remove(&s, "box2").await;
    create(&s, "box3").await;
    remove(&s, "box3").await;
    kept_ready(&w, &daemon, 2).await;
    s.child.kill().unwrap();
    s.child.wait().unwrap();
    assert!(!containers(&daemon, true).await.is_empty());
    let ran = w.run(&["cleanup", "--once"]);
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    assert_eq!(containers(&daemon, false).await, BTreeSet::new());
}
