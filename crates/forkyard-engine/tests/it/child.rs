//! This test program as a driver process: started again with a role, killed, stopped and continued by a test.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use forkyard_core::spec::ModelKnown;
use forkyard_core::task::{TaskKind, TaskResult};
use forkyard_core::{HostId, RunId};
use forkyard_engine::activity::{Activities, Job};
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
    /// Forks that all processes may have at once; 0: each may have many.
    pub host_limit: usize,
}

impl Plan {
    fn encode(&self, role: &str) -> String {
        let (folder, pace) = (self.folder.display(), self.pace.as_millis());
        format!("{role}\n{}\n{folder}\n{}\n{pace}\n{}", self.url, self.turns, self.host_limit)
    }
    fn decode(text: &str) -> (String, Plan) {
        let words: Vec<&str> = text.split('\n').collect();
        let [role, url, folder, turns, pace, host_limit] = words[..] else { panic!("{text:?}") };
        let pace = Duration::from_millis(pace.parse().unwrap());
        let (turns, host_limit) = (turns.parse().unwrap(), host_limit.parse().unwrap());
        (role.into(), Plan { url: url.into(), folder: folder.into(), turns, pace, host_limit })
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
        let mut activities: Arc<dyn Activities> = Arc::new(activities);
        if self.host_limit > 0 {
            config.host_limit = self.host_limit;
            config.places = Some(self.folder.join("places"));
            activities = Arc::new(Counted { activities, folder: self.folder.clone() });
        }
        Embedded::new(store, activities, Arc::new(|_| ModelKnown::Priced), Clock::system(), config)
    }

    /// The most agents that were at work at once, over all processes.
    pub fn most_at_once(&self) -> usize {
        let seen = std::fs::read_to_string(self.folder.join("counts.log")).unwrap_or_default();
        seen.lines().map(|n| n.parse().unwrap()).max().unwrap_or(0)
    }

    /// Drives one run and ends, as `fork` does.
    pub fn driver_of(&self, run: &RunId) -> Driver {
        Driver::spawn(Command::new(std::env::current_exe().unwrap()), self, run.as_str())
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
            run => drive_one(&plan, &RunId::new(run).unwrap()).await,
        }
    });
}

async fn engine(plan: &Plan) -> Embedded {
    let store = loop {
        match forkyard_store::open(&plan.url).await {
            Ok(store) => break store,
            Err(e) if e.is_retryable() => tokio::time::sleep(Duration::from_millis(50)).await,
            Err(e) => panic!("{e}"),
        }
    };
    plan.engine(store, &format!("p{}", std::process::id()))
}

async fn drive(plan: &Plan) {
    engine(plan).await.work(ProcessKind::Worker, CancellationToken::new()).await;
}

async fn drive_one(plan: &Plan, run: &RunId) {
    engine(plan).await.drive(run, CancellationToken::new()).await.unwrap();
}

/// Counts the agents that are at work in all processes, whenever one begins.
struct Counted {
    activities: Arc<dyn Activities>,
    folder: PathBuf,
}

impl Counted {
    /// A locked file for each agent: the kernel unlocks those of a process that was killed.
    fn begin(&self, job: &Job) -> std::io::Result<File> {
        let agents = self.folder.join("agents");
        std::fs::create_dir_all(&agents)?;
        let door = File::create(self.folder.join("door"))?;
        door.lock()?;
        let fork = job.fork.as_ref().map_or(0, |f| f.0);
        let mine = File::create(agents.join(format!("{}-{fork}-{}", job.run, job.attempt)))?;
        mine.lock()?;
        let mut at_work = 0;
        for entry in std::fs::read_dir(agents)? {
            at_work += usize::from(File::open(entry?.path())?.try_lock().is_err());
        }
        let mut log = File::options().create(true).append(true).open(self.folder.join("counts.log"))?;
        writeln!(log, "{at_work}")?;
        Ok(mine)
    }
}

#[async_trait]
impl Activities for Counted {
    async fn perform(&self, job: Job) -> TaskResult {
        let _at_work = (job.task.kind() == TaskKind::RunAgent).then(|| self.begin(&job).unwrap());
        self.activities.perform(job).await
    }
}

/// Takes what is left of a disk.
pub fn fill(file: &Path) {
    let mut out = std::fs::File::create(file).unwrap();
    let block = vec![0_u8; 64 << 10];
    while out.write_all(&block).is_ok() {}
}
