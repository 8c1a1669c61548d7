//! How long events take to reach those who watch, and answers to come, with a store that is full. Prints a Markdown table.
//!
//! `--quick` does a tenth of everything.

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use forkyard_core::run::{Command, Run};
use forkyard_core::spec::RunSpec;
use forkyard_core::{ForkNum, RunId, Timestamp};
use forkyard_engine::clock::Clock;
use forkyard_engine::git::{Git, GitConfig};
use forkyard_engine::models::{Models, ModelsConfig};
use forkyard_engine::sandboxes::Sandboxes;
use forkyard_engine::{Engine, EngineError, log};
use forkyard_server::access::make_token;
use forkyard_server::{App, Parts, serve};
use forkyard_store::{Append, CreateRun, MessageId, NewEvent, Scope, Source, Store, StreamId};
use futures::StreamExt;
use serde_json::{Value, json};
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio_tungstenite::connect_async;
use tokio_tungstenite::tungstenite::Message;
use tokio_util::sync::CancellationToken;

/// Nobody drives here: the benchmark writes what drivers would.
struct NoDriver;

#[async_trait]
impl Engine for NoDriver {
    async fn submit(&self, _: RunId, _: RunSpec, _: Option<String>) -> Result<RunId, EngineError> {
        Err(EngineError::Refused("nobody drives".into()))
    }
    async fn command(&self, _: &RunId, _: Command, _: Option<String>) -> Result<(), EngineError> {
        Err(EngineError::Refused("nobody drives".into()))
    }
    async fn message(
        &self,
        _: &RunId,
        _: ForkNum,
        _: Value,
        _: Option<String>,
    ) -> Result<MessageId, EngineError> {
        Err(EngineError::Refused("nobody drives".into()))
    }
}

struct Scale {
    runs: usize,
    events: usize,
    requests: usize,
    watched: usize,
    seconds: u64,
}

#[derive(Clone)]
struct Bench {
    store: Arc<dyn Store>,
    url: String,
    token: String,
    http: reqwest::Client,
    begun: Instant,
}

/// What a server has to keep to, however many watch it.
const MAX_DELIVERY: Duration = Duration::from_millis(250);
const MAX_READ: Duration = Duration::from_millis(20);
/// While events are delivered; the clients of the benchmark are in the same process.
const MAX_GROWTH_MIB: u64 = 256;

/// What it did not keep to.
type Failures = Vec<String>;

#[tokio::main]
async fn main() -> ExitCode {
    rustls::crypto::ring::default_provider().install_default().expect("the first");
    let quick = std::env::args().any(|a| a == "--quick");
    let scale = if quick {
        Scale { runs: 1000, events: 100_000, requests: 500, watched: 10, seconds: 5 }
    } else {
        Scale { runs: 10_000, events: 1_000_000, requests: 5000, watched: 100, seconds: 30 }
    };
    let dir = tempfile::tempdir().expect("a folder");
    let store =
        forkyard_store::open(dir.path().join("bench.db").to_str().expect("UTF-8")).await.expect("a store");
    let stop = CancellationToken::new();
    let app = App::new(parts(store.clone(), stop.clone()));
    let token = make_token(&*store, Timestamp(1), "bench", Scope::Admin, None).await.expect("a token").text;
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let url = format!("http://{}", listener.local_addr().expect("an address"));
    tokio::spawn(serve(listener, app.router(), None, stop.clone()));
    let b = Bench { store, url, token, http: reqwest::Client::new(), begun: Instant::now() };

    fill(&b, &scale).await;
    println!("| what | p50 | p99 | most | notes |\n|---|---|---|---|---|");
    let mut failures = reads(&b, &scale).await;
    failures.extend(many_runs(&b, &scale).await);
    failures.extend(one_run(&b, &scale).await);
    stop.cancel();
    for failure in &failures {
        eprintln!("failed: {failure}");
    }
    if failures.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn parts(store: Arc<dyn Store>, stop: CancellationToken) -> Parts {
    let home = tempfile::tempdir().expect("a folder");
    let models = Arc::new(Models::new(ModelsConfig::default()));
    let host = forkyard_core::HostId::new("h1").expect("letters and digits");
    let tokens = forkyard_engine::inside::Tokens::open(store.clone(), host, home.path()).expect("a key");
    let clock = Clock::system();
    let inside =
        forkyard_server::inside::Inside::new(store.clone(), models.clone(), tokens, clock, stop.clone());
    Parts {
        store,
        engine: Arc::new(NoDriver),
        git: Arc::new(Git::new(GitConfig {
            dir: "/nonexistent".into(),
            env: BTreeMap::new(),
            github_token: None,
            timeout: Duration::from_secs(1),
        })),
        models,
        inside,
        sandboxes: Sandboxes::new(BTreeMap::new()),
        clock: Clock::system(),
        defaults: RunSpec::new("", "", "sonnet", 1),
        prompt_prefix: None,
        root: None,
        secrets: Default::default(),
        chores: None,
        hosts: vec![],
        secure: false,
        stop,
    }
}

/// Writes one run's events.
struct Writer {
    store: Arc<dyn Store>,
    run: RunId,
    lease: u64,
    length: u64,
}

impl Writer {
    async fn new(b: &Bench, name: String) -> Writer {
        let run = RunId::new(name).expect("letters and digits");
        let spec =
            RunSpec::new("https://example.org/r", "a prompt of the usual length, more or less", "sonnet", 1);
        let (state, step) = Run::submit(Clock::system().now(), run.clone(), spec);
        let events = step.events.iter().map(|e| log::stored(Timestamp(1), e, None)).collect();
        b.store
            .create_run(CreateRun { run: run.clone(), key: None, events, views: state.views() })
            .await
            .expect("a run");
        let lease = b
            .store
            .acquire(&run, "bench", Duration::from_secs(3600))
            .await
            .expect("a store")
            .expect("a lease");
        Writer { store: b.store.clone(), run, lease: lease.token, length: 1 }
    }

    async fn write(&mut self, n: usize, data: impl Fn() -> Value) {
        let event = || NewEvent {
            kind: "test.noted".into(),
            version: 1,
            at: Timestamp(2),
            source: Source::System,
            sandbox: None,
            data: data(),
        };
        let append = Append {
            stream: StreamId::Run(self.run.clone()),
            lease: self.lease,
            expected: self.length,
            events: (0..n).map(|_| event()).collect(),
            views: vec![],
            consume: vec![],
        };
        self.store.append(append).await.expect("an append");
        self.length += n as u64;
    }
}

async fn fill(b: &Bench, scale: &Scale) {
    let mut making = JoinSet::new();
    let (each, rest) = (scale.events / scale.runs, scale.runs);
    for n in 0..rest {
        let b = b.clone();
        making.spawn(async move {
            let mut w = Writer::new(&b, format!("old{n}")).await;
            w.write(each, || json!({ "text": "x".repeat(200) })).await;
        });
        if making.len() >= 64 {
            making.join_next().await;
        }
    }
    while making.join_next().await.is_some() {}
    eprintln!(
        "filled with {} runs and {} events in {:.0} s",
        scale.runs,
        scale.events,
        b.begun.elapsed().as_secs_f64()
    );
}

/// Prints a row, and says if its p99 is more than it may be.
fn row(what: &str, mut took: Vec<Duration>, notes: &str, most: Duration) -> Option<String> {
    took.sort();
    let at = |q: f64| took.get(((took.len() as f64 * q) as usize).min(took.len().saturating_sub(1)));
    let ms = |d: Option<&Duration>| d.map_or("–".into(), |d| format!("{:.1} ms", d.as_secs_f64() * 1000.0));
    println!("| {what} | {} | {} | {} | {notes} |", ms(at(0.5)), ms(at(0.99)), ms(took.last()));
    match at(0.99) {
        Some(p99) if *p99 <= most => None,
        Some(p99) => Some(format!("{what}: p99 is {p99:.1?}, more than {most:?}")),
        None => Some(format!("{what}: nothing was measured")),
    }
}

/// What watchers were told, beside what they should have been.
struct Delivered {
    took: Vec<Duration>,
    expected: u64,
    /// Before and after, in MiB.
    memory: (u64, u64),
}

impl Delivered {
    fn notes(&self, rate: &str, clients: usize) -> String {
        let ((before, after), told) = (self.memory, self.took.len());
        let expected = self.expected;
        format!(
            "{rate}; {told} of {expected} deliveries to {clients} clients; 20 that never read; {before} to {after} MiB"
        )
    }

    fn row(self, what: &str, notes: &str) -> Failures {
        let (told, (before, after)) = (self.took.len() as u64, self.memory);
        let mut failures: Failures = row(what, self.took, notes, MAX_DELIVERY).into_iter().collect();
        if told != self.expected {
            failures.push(format!("{what}: {told} deliveries instead of {}", self.expected));
        }
        let grown = after.saturating_sub(before);
        if grown > MAX_GROWTH_MIB {
            failures.push(format!("{what}: memory grew by {grown} MiB, more than {MAX_GROWTH_MIB}"));
        }
        failures
    }
}

async fn reads(b: &Bench, scale: &Scale) -> Failures {
    let mut failures = vec![];
    for (what, path) in [
        ("list of runs", "/api/v1/runs?limit=50"),
        ("one run", "/api/v1/runs/old{n}"),
        ("page of events", "/api/v1/runs/old{n}/events?limit=100"),
    ] {
        let mut clients = JoinSet::new();
        for client in 0..8 {
            let (b, runs, requests) = (b.clone(), scale.runs, scale.requests / 8);
            clients.spawn(async move {
                let mut took = vec![];
                for i in 0..requests {
                    // Any order that is not the order they were made in.
                    let n = (client * 7919 + i * 104_729) % runs;
                    let at = format!("{}{}", b.url, path.replace("{n}", &n.to_string()));
                    let since = Instant::now();
                    let answer = b.http.get(at).bearer_auth(&b.token).send().await.expect("an answer");
                    assert!(answer.status().is_success());
                    answer.bytes().await.expect("a body");
                    took.push(since.elapsed());
                }
                took
            });
        }
        let took: Vec<Duration> = clients.join_all().await.concat();
        let notes =
            format!("{} requests by 8 clients, {} runs, {} events", took.len(), scale.runs, scale.events);
        failures.extend(row(what, took, &notes, MAX_READ));
    }
    failures
}

/// Latencies of the events in a piece of a stream, and their number.
fn arrivals(begun: Instant, text: &str, took: &mut Vec<Duration>) {
    for found in text.split("\"sent\":").skip(1) {
        let digits: String = found.chars().take_while(char::is_ascii_digit).collect();
        if let Ok(sent) = digits.parse() {
            took.push(begun.elapsed().saturating_sub(Duration::from_micros(sent)));
        }
    }
}

async fn sse(b: Bench, run: String, stop: CancellationToken) -> Vec<Duration> {
    let at = format!("{}/api/v1/runs/{run}/events/stream", b.url);
    let response = b.http.get(at).bearer_auth(&b.token).send().await.expect("a stream");
    let (mut body, mut took, mut rest) = (response.bytes_stream(), vec![], String::new());
    loop {
        let piece = tokio::select! {
            () = stop.cancelled() => return took,
            piece = body.next() => piece,
        };
        let Some(Ok(piece)) = piece else { return took };
        rest.push_str(&String::from_utf8_lossy(&piece));
        if let Some(end) = rest.rfind("\n\n") {
            arrivals(b.begun, &rest[..end], &mut took);
            rest.drain(..end);
        }
    }
}

async fn websocket(b: Bench, run: String, stop: CancellationToken) -> Vec<Duration> {
    let at = format!("{}/api/v1/ws/events?token={}&entity_ids={run}", b.url.replace("http", "ws"), b.token);
    let (mut socket, _) = connect_async(at).await.expect("a socket");
    let mut took = vec![];
    loop {
        let message = tokio::select! {
            () = stop.cancelled() => return took,
            message = socket.next() => message,
        };
        match message {
            Some(Ok(Message::Text(text))) => arrivals(b.begun, &text, &mut took),
            Some(Ok(_)) => {}
            Some(Err(_)) | None => return took,
        }
    }
}

/// Asks for a stream and never reads it.
async fn deaf(b: &Bench, run: &str) -> TcpStream {
    let mut stream = TcpStream::connect(b.url.trim_start_matches("http://")).await.expect("a connection");
    let ask = format!(
        "GET /api/v1/runs/{run}/events/stream HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {}\r\n\r\n",
        b.token
    );
    stream.write_all(ask.as_bytes()).await.expect("a request");
    stream
}

fn resident_mib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|l| l.strip_prefix("VmRSS:")).unwrap_or_default();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap_or(0) / 1024
}

async fn many_runs(b: &Bench, scale: &Scale) -> Failures {
    let mut writers = vec![];
    for n in 0..scale.watched {
        writers.push(Writer::new(b, format!("live{n}")).await);
    }
    let stop = CancellationToken::new();
    let mut clients = JoinSet::new();
    for n in 0..scale.watched {
        for _ in 0..2 {
            clients.spawn(sse(b.clone(), format!("live{n}"), stop.clone()));
            clients.spawn(websocket(b.clone(), format!("live{n}"), stop.clone()));
        }
    }
    let mut never = vec![];
    for n in 0..20 {
        never.push(deaf(b, &format!("live{}", n % scale.watched)).await);
    }
    tokio::time::sleep(Duration::from_secs(2)).await;
    let before = resident_mib();
    let (running, written) = (Arc::new(AtomicBool::new(true)), Arc::new(AtomicU64::new(0)));
    let mut writing = JoinSet::new();
    for mut w in writers {
        let (running, written, begun) = (running.clone(), written.clone(), b.begun);
        writing.spawn(async move {
            // 20 a second each, as an agent that talks and works would.
            let mut tick = tokio::time::interval(Duration::from_millis(50));
            while running.load(Ordering::Relaxed) {
                tick.tick().await;
                w.write(1, || json!({ "sent": begun.elapsed().as_micros() as u64, "text": "x".repeat(500) }))
                    .await;
                written.fetch_add(1, Ordering::Relaxed);
            }
        });
    }
    tokio::time::sleep(Duration::from_secs(scale.seconds)).await;
    running.store(false, Ordering::Relaxed);
    while writing.join_next().await.is_some() {}
    tokio::time::sleep(Duration::from_secs(2)).await;
    stop.cancel();
    let took: Vec<Duration> = clients.join_all().await.concat();
    let written = written.load(Ordering::Relaxed);
    let delivered = Delivered { took, expected: written * 4, memory: (before, resident_mib()) };
    let rate = format!("{} events/s over {} runs", written / scale.seconds, scale.watched);
    let notes = delivered.notes(&rate, scale.watched * 4);
    delivered.row("delivery, a run each", &notes)
}

async fn one_run(b: &Bench, scale: &Scale) -> Failures {
    let mut w = Writer::new(b, "popular".into()).await;
    let stop = CancellationToken::new();
    let mut clients = JoinSet::new();
    let half = scale.watched * 2;
    for _ in 0..half {
        clients.spawn(sse(b.clone(), "popular".into(), stop.clone()));
        clients.spawn(websocket(b.clone(), "popular".into(), stop.clone()));
    }
    let mut never = vec![];
    for _ in 0..20 {
        never.push(deaf(b, "popular").await);
    }
    tokio::time::sleep(Duration::from_secs(2)).await;
    let (before, begun) = (resident_mib(), b.begun);
    let mut tick = tokio::time::interval(Duration::from_millis(20));
    let total = scale.seconds * 50;
    for _ in 0..total {
        tick.tick().await;
        w.write(1, || json!({ "sent": begun.elapsed().as_micros() as u64, "text": "x".repeat(500) })).await;
    }
    tokio::time::sleep(Duration::from_secs(2)).await;
    stop.cancel();
    let took: Vec<Duration> = clients.join_all().await.concat();
    let expected = total * half as u64 * 2;
    let delivered = Delivered { took, expected, memory: (before, resident_mib()) };
    let notes = delivered.notes("50 events/s", half * 2);
    delivered.row("delivery, one run", &notes)
}
