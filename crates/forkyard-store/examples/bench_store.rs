//! Figures of the stores, as a Markdown table or with `--json`: durable appends against a bare SQLite loop with the same
//! durability and batch, reading a long run, and how soon another process hears of a command.
//!
//! `cargo run --release -p forkyard-store --example bench_store -- [--json] [--quick]`

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use forkyard_store::conformance::{command, entry, event, run_id, start};
use forkyard_store::{EventQuery, NewEvent, Store, StreamId};
use rusqlite::Connection;
use serde_json::json;
use test_support::postgres::Postgres;

/// Forks that append at once, each to its own journal.
const WRITERS: u32 = 64;
/// A turn's journal entry is of this order.
const DATA_BYTES: usize = 500;
const ROUNDS: usize = 15;

struct Figure {
    name: String,
    value: f64,
    unit: &'static str,
}

struct Figures(Vec<Figure>);

impl Figures {
    fn add(&mut self, name: impl Into<String>, value: f64, unit: &'static str) {
        self.0.push(Figure { name: name.into(), value, unit });
    }

    fn print(&self, as_json: bool) {
        if as_json {
            let all: serde_json::Map<_, _> = self
                .0
                .iter()
                .map(|f| (f.name.clone(), json!({ "value": f.value, "unit": f.unit })))
                .collect();
            println!("{}", serde_json::Value::from(all));
            return;
        }
        println!("| figure | value |\n|---|---|");
        for f in &self.0 {
            println!("| {} | {} {} |", f.name, number(f.value), f.unit);
        }
    }
}

fn number(value: f64) -> String {
    match value.abs() {
        v if v >= 100.0 => format!("{value:.0}"),
        v if v >= 1.0 => format!("{value:.2}"),
        _ => format!("{value:.3}"),
    }
}

#[tokio::main]
async fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let [role, url] = arguments.as_slice()
        && role == "--hear"
    {
        return hear(url).await;
    }
    let has = |flag: &str| arguments.iter().any(|a| a == flag);
    let quick = has("--quick");
    let mut figures = Figures(Vec::new());
    let folder = tempfile::tempdir().expect("a temporary folder");

    sqlite_appends(folder.path(), if quick { 2_000 } else { 20_000 }, &mut figures).await;
    let url = format!("sqlite:{}", folder.path().join("read.db").display());
    read(&url, "sqlite", if quick { 10_000 } else { 100_000 }, &mut figures).await;
    latency(&url, "sqlite", if quick { 30 } else { 300 }, &mut figures).await;

    let server = Postgres::start_with(&["-c", "fsync=on"]);
    let url = server.database();
    postgres_appends(&url, if quick { 1_000 } else { 10_000 }, &mut figures).await;
    let url = server.database();
    read(&url, "postgres", if quick { 10_000 } else { 100_000 }, &mut figures).await;
    latency(&url, "postgres", if quick { 30 } else { 300 }, &mut figures).await;
    figures.print(has("--json"));
}

fn entry_event() -> NewEvent {
    event("agent.turn", json!({ "text": "x".repeat(DATA_BYTES) }))
}

/// `total` appends of one event by [`WRITERS`] tasks; appends per second.
async fn append(store: &Arc<dyn Store>, runs: &[&str], total: u64) -> f64 {
    let begun = Instant::now();
    let mut tasks = tokio::task::JoinSet::new();
    for writer in 0..WRITERS {
        let store = store.clone();
        let run = run_id(runs[writer as usize % runs.len()]);
        tasks.spawn(async move {
            let mut at = store.journal_len(&run, writer).await.expect("the fork is there");
            for _ in 0..total / u64::from(WRITERS) {
                at = store
                    .append_journal(entry(&run, writer, 1, at, vec![entry_event()]))
                    .await
                    .expect("written")
                    .seq;
            }
        });
    }
    while let Some(done) = tasks.join_next().await {
        done.expect("no writer fails");
    }
    total as f64 / begun.elapsed().as_secs_f64()
}

async fn sqlite_appends(folder: &Path, total: u64, figures: &mut Figures) {
    let path = folder.join("append.db");
    let store = forkyard_store::open(path.to_str().expect("a plain path")).await.expect("it opens");
    let runs = ["a", "b", "c", "d"];
    for run in runs {
        start(&store, run, WRITERS).await;
    }
    let commits = || -> i64 {
        let conn = Connection::open(&path).expect("it opens");
        conn.query_row("SELECT max(change) FROM changes", [], |r| r.get(0)).expect("numbered")
    };
    let (mut ours, mut bare, mut plain, mut batches) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let mut loops =
        [true, false].map(|indexed| Bare::new(&folder.join(format!("bare-{indexed}.db")), indexed));
    // Turn by turn, so that all see the same machine; the first round only makes the files as large as they get.
    for round in 0..=ROUNDS {
        let before = commits();
        let rate = append(&store, &runs, total).await;
        let batch = (total as f64 / (commits() - before) as f64).round().max(1.0) as u64;
        let rates = loops.each_mut().map(|bare| tokio::task::block_in_place(|| bare.run(total, batch)));
        if round > 0 {
            ours.push(rate);
            batches.push(batch as f64);
            bare.push(rates[0]);
            plain.push(rates[1]);
        }
    }
    let ratios = |of: &[f64]| median(ours.iter().zip(of).map(|(ours, of)| ours / of).collect());
    let (to_bare, to_plain) = (ratios(&bare), ratios(&plain));
    let (ours, bare, plain) = (median(ours), median(bare), median(plain));
    figures.add(format!("sqlite: durable appends, {WRITERS} writers"), ours, "/s");
    figures.add("sqlite: appends in one commit", median(batches), "");
    figures.add("bare loop, same table, indexes, durability and batch", bare, "/s");
    figures.add("bare loop, one table without an index", plain, "/s");
    figures.add("ratio to the bare loop, round by round (target 0.7)", to_bare, "");
    figures.add("ratio to the bare loop without an index, round by round", to_plain, "");
    let alone = Instant::now();
    let run = run_id("a");
    let at = store.journal_len(&run, 0).await.expect("the fork is there");
    let count = (total / 40).max(20);
    for i in 0..count {
        store.append_journal(entry(&run, 0, 1, at + i, vec![entry_event()])).await.expect("written");
    }
    figures.add("sqlite: one append alone", alone.elapsed().as_secs_f64() * 1e3 / count as f64, "ms");
}

/// What SQLite gives to a program that only inserts the events.
struct Bare {
    conn: Connection,
    written: u64,
}

impl Bare {
    fn new(path: &Path, indexed: bool) -> Bare {
        let conn = Connection::open(path).expect("it opens");
        conn.execute_batch("PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL;").expect("settings");
        let plain = "CREATE TABLE events (id INTEGER PRIMARY KEY, run INTEGER, fork INTEGER, attempt INTEGER,
             seq INTEGER, kind TEXT, version INTEGER, at INTEGER, source TEXT, sandbox TEXT, data TEXT)";
        let schema = if indexed { include_str!("../migrations/sqlite/0001_start.sql") } else { plain };
        conn.execute_batch(schema).expect("the schema");
        Bare { conn, written: 0 }
    }

    fn run(&mut self, total: u64, batch: u64) -> f64 {
        let data = serde_json::to_string(&entry_event().data).expect("JSON");
        let end = self.written + total;
        let begun = Instant::now();
        let mut insert = self
            .conn
            .prepare("INSERT INTO events VALUES (?1, 1, ?2, 1, ?3, 'agent.turn', 1, 1000, 'agent', NULL, ?4)")
            .expect("a statement");
        while self.written < end {
            self.conn.execute_batch("BEGIN IMMEDIATE").expect("begun");
            for _ in 0..batch.min(end - self.written) {
                let (fork, seq) = (self.written % u64::from(WRITERS), self.written / u64::from(WRITERS));
                insert.execute((self.written as i64, fork as i64, seq as i64, &data)).expect("inserted");
                self.written += 1;
            }
            self.conn.execute_batch("COMMIT").expect("committed");
        }
        total as f64 / begun.elapsed().as_secs_f64()
    }
}

async fn postgres_appends(url: &str, total: u64, figures: &mut Figures) {
    let store = forkyard_store::open(url).await.expect("it opens");
    let runs = ["a", "b", "c", "d"];
    for run in runs {
        start(&store, run, WRITERS).await;
    }
    let mut many = Vec::new();
    let mut one = Vec::new();
    for _ in 0..3 {
        many.push(append(&store, &runs, total).await);
        one.push(append(&store, &runs[..1], total).await);
    }
    figures.add(format!("postgres: durable appends, {WRITERS} writers, 4 runs"), median(many), "/s");
    figures.add(format!("postgres: durable appends, {WRITERS} writers, 1 run"), median(one), "/s");
}

async fn read(url: &str, name: &str, count: u64, figures: &mut Figures) {
    let store = forkyard_store::open(url).await.expect("it opens");
    let (run, _) = start(&store, "a", 1).await;
    let mut at = 0;
    while at < count - 1 {
        let list = vec![entry_event(); (count - 1 - at).min(1000) as usize];
        at = store.append_journal(entry(&run, 0, 1, at, list)).await.expect("written").seq;
    }
    let mut times = Vec::new();
    for _ in 0..3 {
        let begun = Instant::now();
        let mut last = 0;
        loop {
            let query = EventQuery { after: last, ..Default::default() };
            let page = store.read_run(&run, &query).await.expect("read");
            let Some(event) = page.last() else { break };
            last = event.position;
        }
        assert_eq!(last, count);
        times.push(begun.elapsed().as_secs_f64());
    }
    figures.add(format!("{name}: reading a run of {count} events"), median(times) * 1e3, "ms");
    let begun = Instant::now();
    let tail = EventQuery { newest_first: true, limit: 100, ..Default::default() };
    assert_eq!(store.read_run(&run, &tail).await.expect("read").len(), 100);
    figures.add(format!("{name}: its newest 100"), begun.elapsed().as_secs_f64() * 1e3, "ms");
    let begun = Instant::now();
    let stream = StreamId::Journal(run, 0, forkyard_core::Attempt(1));
    assert_eq!(store.read_stream(&stream, count / 2, 100).await.expect("read").len(), 100);
    figures.add(
        format!("{name}: 100 from the middle of a stream"),
        begun.elapsed().as_secs_f64() * 1e3,
        "ms",
    );
}

/// The same clock in both processes.
fn now_us() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000 + now.tv_nsec as u64 / 1000
}

/// Commands put by this process, taken by another: from before the put to when the other has read it.
async fn latency(url: &str, name: &str, count: u64, figures: &mut Figures) {
    let store = forkyard_store::open(url).await.expect("it opens");
    let run = run_id("a");
    let mut child = Command::new(std::env::current_exe().expect("this program"))
        .args(["--hear", url])
        .stdout(Stdio::piped())
        .spawn()
        .expect("it starts");
    let mut lines = BufReader::new(child.stdout.take().expect("piped")).lines();
    assert_eq!(lines.next().expect("it says so").expect("text"), "ready");
    for i in 0..count {
        // Not in step with anybody's polling.
        tokio::time::sleep(Duration::from_micros(5_000 + i * 7_919 % 40_000)).await;
        store.put_command(&run, command(None, json!(now_us()))).await.expect("put");
    }
    store.put_command(&run, command(None, json!("end"))).await.expect("put");
    let mut all: Vec<f64> = lines.map(|l| l.expect("text").parse::<f64>().expect("a number") / 1e3).collect();
    child.wait().expect("it ends");
    assert_eq!(all.len() as u64, count);
    all.sort_by(f64::total_cmp);
    for (what, at) in [("median", 0.5), ("90 %", 0.9), ("99 %", 0.99), ("longest", 1.0)] {
        let index = ((all.len() - 1) as f64 * at) as usize;
        figures.add(format!("{name}: command to another process, {what}"), all[index], "ms");
    }
}

async fn hear(url: &str) {
    let store = forkyard_store::open(url).await.expect("it opens");
    let run = run_id("a");
    let mut watch = store.watch(Some(&run));
    println!("ready");
    let mut last = 0;
    loop {
        for command in store.pending_commands(&run).await.expect("read") {
            if command.id <= last {
                continue;
            }
            last = command.id;
            match command.data.as_u64() {
                Some(put) => println!("{}", now_us() - put),
                None => return,
            }
        }
        watch.changed().await;
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
