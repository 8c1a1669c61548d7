//! A client that comes back has every event once, in order: through servers killed with -9 and through cut connections.

use std::process::{Child, Command, Stdio};
use std::time::Instant;

use futures::StreamExt;
use serde_json::Value;

use super::World;
use super::serve::{PATIENCE, Server};

/// An agent that makes this many calls.
fn busy(calls: usize) -> String {
    let turn = "[[turn]]\ntext = \"On.\"\ntools = [{ name = \"Bash\", input = { command = \"true\" } }]\n";
    format!("name = \"busy\"\n{}[[turn]]\ntext = \"Done.\"\n", turn.repeat(calls))
}

/// Drives the run, whatever happens to the server.
fn driver(w: &World, turns: &str) -> Child {
    Command::new(env!("CARGO_BIN_EXE_forkyard"))
        .args(["fork", "-p", "go on", "-m", &w.model(), "--network", "none", "-f", "2", "--max-turns", turns])
        .current_dir(w.repo())
        .env_clear()
        .env("PATH", "/usr/local/bin:/usr/bin:/bin")
        .env("FORKYARD_HOME", w.home())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn events_arrive_once_and_in_order_through_restarts_and_cuts() {
    let full = std::env::var("FORKYARD_TEST_SCALE").is_ok_and(|s| s == "full");
    let (restarts, cuts, calls) = if full { (20, 5, 300) } else { (2, 1, 30) };
    let w = World::with_commit();
    w.write(&w.script(), &busy(calls));
    let mut server = Server::start_with(&w, &["--port", "0", "--no-work"]);
    let port = server.port();
    let mut driver = driver(&w, "1000");
    let found = server.until("/api/v1/runs", |r| !r["runs"].as_array().unwrap().is_empty()).await;
    let run = found["runs"][0]["id"].as_str().unwrap().to_string();

    let (mut seen, mut ended) = (Vec::<u64>::new(), false);
    let (mut left, mut cuts_left) = (restarts, cuts);
    // What happens next, after how many more events.
    let step = calls * 4 / (restarts + cuts + 1);
    let since = Instant::now();
    while !ended {
        assert!(since.elapsed() < PATIENCE * 10, "it takes too long: {} events", seen.len());
        let mut request = server.http.get(format!("{}/api/v1/runs/{run}/events/stream", server.url));
        if let Some(last) = seen.last() {
            request = request.header("last-event-id", last.to_string());
        }
        let response = match request.bearer_auth(&server.token).send().await {
            Ok(response) if response.status().as_u16() == 204 => break,
            Ok(response) => response.error_for_status().unwrap(),
            Err(e) => panic!("the server is there, but {e}"),
        };
        let stop_at = seen.len() + step;
        let mut body = response.bytes_stream();
        let mut text = String::new();
        while let Some(Ok(piece)) = tokio::time::timeout(PATIENCE, body.next()).await.expect("it goes on") {
            text.push_str(std::str::from_utf8(&piece).unwrap());
            // Only whole frames were received: one that was cut comes again.
            while let Some(end) = text.find("\n\n") {
                let frame: String = text.drain(..end + 2).collect();
                ended |= frame.starts_with("event: end");
                if let Some(id) = frame.lines().find_map(|l| l.strip_prefix("id: ")) {
                    let data = frame.lines().find_map(|l| l.strip_prefix("data: ")).unwrap();
                    let event: Value = serde_json::from_str(data).unwrap();
                    assert_eq!(event["position"].to_string(), id);
                    seen.push(id.parse().unwrap());
                }
            }
            if seen.len() >= stop_at && cuts_left > 0 && left <= restarts / 2 {
                cuts_left -= 1;
                break;
            }
            if seen.len() >= stop_at && left > 0 {
                left -= 1;
                server.child.kill().unwrap();
                server.child.wait().unwrap();
                server = Server::start_with(&w, &["--port", &port, "--no-work"]);
                break;
            }
        }
    }
    assert!(driver.wait().unwrap().success());
    assert_eq!((left, cuts_left), (0, 0), "the run was over too soon: {} events", seen.len());
    let recorded = w.run(&["events", &run, "--json"]).stdout.lines().count() as u64;
    assert_eq!(seen, (1..=recorded).collect::<Vec<_>>());
    // And the browser is told to stay away.
    let last = seen.last().unwrap().to_string();
    let request = server.http.get(format!("{}/api/v1/runs/{run}/events/stream", server.url));
    let again = request.bearer_auth(&server.token).header("last-event-id", last).send().await.unwrap();
    assert_eq!(again.status().as_u16(), 204);
}
