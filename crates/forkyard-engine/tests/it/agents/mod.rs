//! Agents in real processes, on real stores, asking a real HTTP server that streams like a model's API. The processes are killed.

mod kills;
mod memory;
mod moments;
mod spending;

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::Duration;

use forkyard_core::Usd;
use forkyard_core::pricing::{PriceBook, Usage};
use serde::Serialize;
use serde::de::DeserializeOwned;
use test_support::model_server::ModelServer;

const ROLE: &str = "FORKYARD_AGENTS_TEST_ROLE";
const PLAN: &str = "FORKYARD_AGENTS_TEST_PLAN";
/// Long enough for the slowest machine; a test that hangs says so.
const PATIENCE: Duration = Duration::from_secs(300);
const MODEL: &str = "sonnet";

fn is_full_scale() -> bool {
    std::env::var("FORKYARD_TEST_SCALE").is_ok_and(|s| s == "full")
}

/// This program as another process. Killed with its test, if it has not ended.
struct Process(Child);

impl Process {
    fn start(role: &str, plan: &impl Serialize) -> Process {
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "agents::role", "--ignored", "--nocapture", "--test-threads=1"])
            .env(ROLE, role)
            .env(PLAN, serde_json::to_string(plan).unwrap())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        Process(child)
    }
    /// What it says, until it ends. What the test harness says is left out; it does not end its line before the first one.
    fn lines(&mut self) -> impl Iterator<Item = String> + use<> {
        let out: BufReader<ChildStdout> = BufReader::new(self.0.stdout.take().expect("read once"));
        out.lines().map_while(Result::ok).filter_map(|l| l.split_once("> ").map(|(_, said)| said.to_string()))
    }
    /// SIGKILL.
    fn kill(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// In one write: a killed process must not leave half a line that looks whole.
fn say(line: impl std::fmt::Display) {
    let mut out = std::io::stdout().lock();
    out.write_all(format!("> {line}\n").as_bytes()).unwrap();
    out.flush().unwrap();
}

/// Not a test: what a started process does.
#[test]
#[ignore = "started by other tests"]
fn role() {
    let Ok(role) = std::env::var(ROLE) else { return };
    fn plan<T: DeserializeOwned>() -> T {
        serde_json::from_str(&std::env::var(PLAN).unwrap()).unwrap()
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        match role.as_str() {
            "spend" => spending::spend(plan()).await,
            "drive" => kills::drive(plan()).await,
            other => panic!("no such role: {other}"),
        }
    });
}

fn sqlite_url() -> String {
    let folder = tempfile::tempdir().unwrap();
    let url = format!("sqlite:{}", folder.path().join("store.db").display());
    test_support::keep_until_exit(folder);
    url
}

/// What the server charged, in money.
fn billed(server: &ModelServer) -> Usd {
    let book = PriceBook::default();
    let facts = book.get(MODEL).unwrap();
    let usage = |b: test_support::model_server::Bill| Usage {
        input: b.input,
        output: b.output,
        cache_write_5m: b.cache_write_5m,
        cache_write_1h: b.cache_write_1h,
        cache_read: b.cache_read,
    };
    server.bills().into_iter().map(|b| facts.cost(&usage(b))).sum()
}

async fn until<F: Future<Output = bool>>(what: &str, mut ask: impl FnMut() -> F) {
    let wait = async {
        while !ask().await {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(PATIENCE, wait).await.unwrap_or_else(|_| panic!("{what}: not within {PATIENCE:?}"));
}
