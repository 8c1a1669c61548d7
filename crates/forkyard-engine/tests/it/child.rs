//! This test program as a driver process: started again with a role, killed, stopped and continued by a test.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use forkyard_core::HostId;
use forkyard_core::spec::ModelKnown;
use forkyard_engine::clock::Clock;
use forkyard_engine::embedded::{Embedded, EmbeddedConfig};
use forkyard_store::{ProcessKind, Store};
use test_support::sim::files::{self, FileActivities};
use tokio_util::sync::CancellationToken;

const PLAN: &str = "FORKYARD_ENGINE_TEST_PLAN";

/// What a driver has to know.
#[derive(Clone)]
pub struct Plan {
    pub url: String,
    pub folder: PathBuf,
    pub turns: usize,
    pub pace: Duration,
}

impl Plan {
    fn encode(&self, role: &str) -> String {
        format!("{role}\n{}\n{}\n{}\n{}", self.url, self.folder.display(), self.turns, self.pace.as_millis())
    }
    fn decode(text: &str) -> (String, Plan) {
        let words: Vec<&str> = text.split('\n').collect();
        let [role, url, folder, turns, pace] = words[..] else { panic!("{text:?}") };
        let pace = Duration::from_millis(pace.parse().unwrap());
        (role.into(), Plan { url: url.into(), folder: folder.into(), turns: turns.parse().unwrap(), pace })
    }

    /// An engine with short leases: takeovers are what is tested, not waiting for them.
    pub fn engine(&self, store: Arc<dyn Store>, owner: &str) -> Embedded {
        let folder = self.folder.clone();
        let (store, turns, pace) = (store, self.turns, self.pace);
        let activities = FileActivities { host: files::host(), folder, store: store.clone(), turns, pace };
        let mut config = EmbeddedConfig::new(HostId::new("files").unwrap(), owner);
        config.lease_ttl = Duration::from_millis(1000);
        config.renew_every = Duration::from_millis(250);
        config.store_retry = Duration::from_millis(50);
        Embedded::new(store, Arc::new(activities), Arc::new(|_| ModelKnown::Priced), Clock::system(), config)
    }

    pub fn driver(&self) -> Driver {
        Driver::spawn(Command::new(std::env::current_exe().unwrap()), self, "drive")
    }

    /// This program, in another role.
    pub fn process(&self, role: &str) -> Child {
        command(Command::new(std::env::current_exe().unwrap()), self, role).spawn().unwrap()
    }

    /// With mounts of its own, that end with it. Needs no root where user namespaces are allowed.
    pub fn with_mounts(&self, role: &str) -> Driver {
        let mut command = Command::new("unshare");
        command.args(["--mount", "--map-root-user"]).arg(std::env::current_exe().unwrap());
        Driver::spawn(command, self, role)
    }
}

fn command(mut program: Command, plan: &Plan, role: &str) -> Command {
    program
        .args(["--exact", "child::role", "--ignored", "--nocapture", "--test-threads=1"])
        .env(PLAN, plan.encode(role))
        .stdin(Stdio::null())
        .stdout(Stdio::null());
    program
}

/// Killed at the end of the test that started it, if it has not ended.
pub struct Driver(Child);

impl Driver {
    fn spawn(program: Command, plan: &Plan, role: &str) -> Driver {
        Driver(command(program, plan, role).spawn().unwrap())
    }
    pub fn kill(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
    pub fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_child(&self.0);
        rustix::process::kill_process(pid, signal).unwrap();
    }
    #[track_caller]
    pub fn succeed(mut self) {
        assert!(self.0.wait().unwrap().success());
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Not a test: what a started process does.
#[test]
#[ignore = "started by other tests"]
fn role() {
    let Ok(text) = std::env::var(PLAN) else { return };
    let (role, plan) = Plan::decode(&text);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        match role.as_str() {
            "drive" => drive(&plan).await,
            "full" => super::processes::on_a_full_disk(plan).await,
            other => panic!("no such role: {other}"),
        }
    });
}

async fn drive(plan: &Plan) {
    let store = loop {
        match forkyard_store::open(&plan.url).await {
            Ok(store) => break store,
            Err(e) if e.is_retryable() => tokio::time::sleep(Duration::from_millis(50)).await,
            Err(e) => panic!("{e}"),
        }
    };
    let owner = format!("p{}", std::process::id());
    plan.engine(store, &owner).work(ProcessKind::Worker, CancellationToken::new()).await;
}

/// Takes what is left of a disk.
pub fn fill(file: &Path) {
    let mut out = std::fs::File::create(file).unwrap();
    let block = vec![0_u8; 64 << 10];
    while out.write_all(&block).is_ok() {}
}
