//! Distributions as a Markdown table: how soon a command from another process reaches a driver, how soon a killed driver's
//! run goes on in another process. Leases are those that users have.
//!
//! `cargo run --release -p forkyard-engine --example bench_engine -- [--quick]`

use std::path::Path;
use std::process::{Child, Command as Process, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use forkyard_core::run::Command;
use forkyard_core::spec::{ModelKnown, RunSpec};
use forkyard_core::{HostId, Millis, RunId};
use forkyard_engine::Engine;
use forkyard_engine::clock::Clock;
use forkyard_engine::embedded::{Embedded, EmbeddedConfig};
use forkyard_store::{ProcessKind, Store};
use test_support::postgres::Postgres;
use test_support::sim::files::FileActivities;
use tokio_util::sync::CancellationToken;

type Failure = Box<dyn std::error::Error + Send + Sync>;

/// Turns of an agent that does not end while it is measured.
const TURNS: usize = 1_000_000;
const PACE: Duration = Duration::from_millis(200);

fn engine(store: Arc<dyn Store>, folder: &Path, owner: &str) -> Embedded {
    let folder = folder.to_path_buf();
    let host = test_support::sim::files::host();
    let activities = FileActivities { host, folder, store: store.clone(), turns: TURNS, pace: PACE };
    let config = EmbeddedConfig::new(HostId::new("files").expect("a valid id"), owner);
    Embedded::new(store, Arc::new(activities), Arc::new(|_| ModelKnown::Priced), Clock::system(), config)
}

/// Killed when it is dropped.
struct Driver(Child);

impl Driver {
    fn start(url: &str, folder: &Path) -> Result<Driver, Failure> {
        let me = std::env::current_exe()?;
        let child = Process::new(me).arg("--drive").arg(url).arg(folder).stdin(Stdio::null()).spawn()?;
        Ok(Driver(child))
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

async fn drive(url: &str, folder: &Path) -> Result<(), Failure> {
    let store = forkyard_store::open(url).await?;
    let owner = format!("p{}", std::process::id());
    engine(store, folder, &owner).work(ProcessKind::Worker, CancellationToken::new()).await;
    Ok(())
}

struct Bench {
    store: Arc<dyn Store>,
    user: Embedded,
    run: RunId,
    folder: tempfile::TempDir,
    url: String,
}

impl Bench {
    async fn new(url: String) -> Result<Bench, Failure> {
        let folder = tempfile::tempdir()?;
        let store = forkyard_store::open(&url).await?;
        let user = engine(store.clone(), folder.path(), "user");
        let mut spec = RunSpec::new("/repo", "p", "m", 2);
        spec.fork_timeout = Millis::minutes(600);
        let run = user.submit(RunId::new("run0")?, spec, None).await?;
        Ok(Bench { store, user, run, folder, url })
    }

    fn driver(&self) -> Result<Driver, Failure> {
        Driver::start(&self.url, self.folder.path())
    }

    async fn progress(&self) -> Result<(), Failure> {
        let before = self.store.journal_len(&self.run, 0).await?;
        while self.store.journal_len(&self.run, 0).await? <= before {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        Ok(())
    }

    /// Milliseconds from a command until what it asks for is recorded.
    async fn commands(&self, n: usize) -> Result<Vec<f64>, Failure> {
        let _driver = self.driver()?;
        self.progress().await?;
        let mut took = vec![];
        for i in 0..n {
            let pause = i % 2 == 0;
            let mut watch = self.store.watch(Some(&self.run));
            let begun = Instant::now();
            self.user.command(&self.run, if pause { Command::Pause } else { Command::Resume }, None).await?;
            while self.store.run(&self.run).await?.is_none_or(|v| v.paused != pause) {
                watch.changed().await;
            }
            took.push(begun.elapsed().as_secs_f64() * 1e3);
        }
        Ok(took)
    }

    /// Milliseconds from a driver's death until the next attempt has begun in another process.
    async fn takeovers(&self, n: usize) -> Result<Vec<f64>, Failure> {
        let mut first = self.driver()?;
        let mut took = vec![];
        for _ in 0..n {
            self.progress().await?;
            let second = self.driver()?;
            // Somebody who is there and waits, not one who has to start.
            while self.store.processes().await?.len() < 2 {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            let before = self.store.attempt(&self.run, 0).await?;
            let begun = Instant::now();
            drop(first);
            while self.store.attempt(&self.run, 0).await? == before {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
            took.push(begun.elapsed().as_secs_f64() * 1e3);
            first = second;
        }
        Ok(took)
    }
}

fn row(name: &str, mut ms: Vec<f64>) {
    ms.sort_by(f64::total_cmp);
    let at = |q: f64| ms[((ms.len() - 1) as f64 * q).round() as usize];
    println!(
        "| {name} | {} | {:.0} | {:.0} | {:.0} | {:.0} |",
        ms.len(),
        at(0.0),
        at(0.5),
        at(0.95),
        at(1.0)
    );
}

#[tokio::main]
async fn main() -> Result<(), Failure> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    if let [role, url, folder] = &args[..]
        && role == "--drive"
    {
        return drive(url, Path::new(folder)).await;
    }
    let quick = args.iter().any(|a| a == "--quick");
    let (commands, takeovers) = if quick { (20, 2) } else { (200, 15) };
    println!("| figure (ms) | n | min | median | p95 | max |\n|---|---|---|---|---|---|");
    let folder = tempfile::tempdir()?;
    let sqlite = |name: &str| format!("sqlite:{}", folder.path().join(name).display());
    let postgres = || tokio::task::block_in_place(|| Postgres::shared().database());
    for (kind, urls) in
        [("SQLite", [sqlite("a.db"), sqlite("b.db")]), ("PostgreSQL", [postgres(), postgres()])]
    {
        let [a, b] = urls;
        row(&format!("command to another process, {kind}"), Bench::new(a).await?.commands(commands).await?);
        row(&format!("takeover after kill -9, {kind}"), Bench::new(b).await?.takeovers(takeovers).await?);
    }
    Ok(())
}
