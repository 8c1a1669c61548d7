//! A client that comes back has every event once, in order: through servers killed with -9 and through cut connections.

use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use futures::StreamExt;
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::task::AbortOnDropHandle;

use super::World;
use super::serve::{PATIENCE, Server};

/// A network between client and server that can be cut.
struct Network {
    url: String,
    /// Cuts that are asked for, and those that were made.
    wanted: Arc<AtomicUsize>,
    made: Arc<AtomicUsize>,
    _passing: AbortOnDropHandle<()>,
}

impl Network {
    /// To whoever is at this port when somebody connects.
    async fn to(port: &str) -> Network {
        let server = format!("127.0.0.1:{port}");
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let (wanted, made) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let counts = (wanted.clone(), made.clone());
        let passing = tokio::spawn(async move {
            loop {
                let (client, _) = listener.accept().await.unwrap();
                let server = TcpStream::connect(&server).await.unwrap();
                tokio::spawn(pass(client, server, counts.clone()));
            }
        });
        Network { url, wanted, made, _passing: AbortOnDropHandle::new(passing) }
    }

    /// What the server says next arrives in half, and then nothing.
    fn cut(&self) {
        self.wanted.fetch_add(1, Ordering::SeqCst);
    }
}

async fn pass(
    mut client: TcpStream,
    mut server: TcpStream,
    (wanted, made): (Arc<AtomicUsize>, Arc<AtomicUsize>),
) {
    let (mut asked, mut said) = (vec![0; 4096], vec![0; 4096]);
    loop {
        tokio::select! {
            n = client.read(&mut asked) => match n {
                Ok(n) if n > 0 && server.write_all(&asked[..n]).await.is_ok() => {}
                Ok(_) | Err(_) => return,
            },
            n = server.read(&mut said) => match n {
                // A killed server's end is the client's, too.
                Ok(0) | Err(_) => return,
                Ok(n) => {
                    let cut = wanted.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |w| w.checked_sub(1)).is_ok();
                    let part = if cut { n / 2 } else { n };
                    if client.write_all(&said[..part]).await.is_err() {
                        return;
                    }
                    if cut {
                        for end in [&client, &server] {
                            // Closed by a reset, as by a router that has forgotten the connection.
                            rustix::net::sockopt::set_socket_linger(end, Some(Duration::ZERO)).unwrap();
                        }
                        made.fetch_add(1, Ordering::SeqCst);
                        return;
                    }
                }
            },
        }
    }
}

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
    let network = Network::to(&port).await;
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
        let mut request = server.http.get(format!("{}/api/v1/runs/{run}/events/stream", network.url));
        if let Some(last) = seen.last() {
            request = request.header("last-event-id", last.to_string());
        }
        let response = match request.bearer_auth(&server.token).send().await {
            Ok(response) if response.status().as_u16() == 204 => break,
            Ok(response) => response.error_for_status().unwrap(),
            Err(e) => panic!("the server is there, but {e}"),
        };
        let stop_at = seen.len() + step;
        let (made, mut cutting) = (network.made.load(Ordering::SeqCst), false);
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
            if cutting {
                continue;
            }
            if seen.len() >= stop_at && cuts_left > 0 && left <= restarts / 2 {
                cuts_left -= 1;
                cutting = true;
                network.cut();
                // It is the network that ends it, not this client.
                continue;
            }
            if seen.len() >= stop_at && left > 0 {
                left -= 1;
                server.child.kill().unwrap();
                server.child.wait().unwrap();
                server = Server::start_with(&w, &["--port", &port, "--no-work"]);
                break;
            }
        }
        assert_eq!(network.made.load(Ordering::SeqCst), made + usize::from(cutting), "it was cut");
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
