//! This test program as a worker process: started again with a role, and killed by a test.

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use forkyard_core::spec::ModelKnown;
use forkyard_core::task::{TaskKind, TaskResult};
use forkyard_core::{Attempt, ForkNum, HostId, Millis, RunId};
use forkyard_engine::activity::{Activities, Job};
use forkyard_engine::clock::Clock;
use forkyard_engine::embedded::{Embedded, EmbeddedConfig};
use forkyard_engine::sweep::SweepConfig;
use forkyard_store::Store;
use forkyard_temporal::{Pace, Service, ServiceConfig, TemporalEngine, WorkerConfig, work};
use serde::{Deserialize, Serialize};
use test_support::net::Net;
use test_support::sim::files::{FileActivities, FileYard, host};
use tokio_util::sync::CancellationToken;

const PLAN: &str = "FORKYARD_TEMPORAL_TEST_PLAN";

/// What a worker has to know.
#[derive(Clone, Serialize, Deserialize)]
pub struct Plan {
    pub address: String,
    pub url: String,
    pub folder: PathBuf,
    pub host: HostId,
    /// How long a task that was stopped may take.
    pub grace: Millis,
    /// The network namespace that it is in, if not in the test's.
    pub netns: Option<String>,
    /// Its agents go on whatever happens to their store, and leave word of how they ended; it sweeps all the time.
    pub stubborn: bool,
}

impl Plan {
    pub fn new(address: String) -> Plan {
        let folder = tempfile::tempdir().unwrap();
        let path: PathBuf = folder.path().into();
        test_support::keep_until_exit(folder);
        let url = format!("sqlite:{}", path.join("store.db").display());
        let grace = Millis::secs(5);
        Plan { address, url, folder: path, host: host(), grace, netns: None, stubborn: false }
    }

    /// Where a stubborn agent says how it ended.
    pub fn word(&self, run: &RunId, fork: ForkNum, attempt: Attempt) -> PathBuf {
        self.folder.join("words").join(format!("{run}-{fork}-{attempt}"))
    }

    /// Short times: losses are what is tested, not waiting for them.
    pub fn service(&self) -> ServiceConfig {
        ServiceConfig {
            address: self.address.clone(),
            namespace: "default".into(),
            task_queue: "forkyard-test".into(),
            identity: "test".into(),
            pace: Pace { lost_after: Millis::secs(3), host_lost_after: Millis::secs(10), grace: self.grace },
            ..ServiceConfig::default()
        }
    }

    pub async fn connect(&self) -> Service {
        let begun = std::time::Instant::now();
        loop {
            match Service::connect(&self.service()).await {
                Ok(service) => return service,
                Err(e) => assert!(begun.elapsed() < Duration::from_secs(60), "{e}"),
            }
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    }

    fn activities(&self, store: Arc<dyn Store>) -> Arc<FileActivities> {
        let folder = self.folder.clone();
        Arc::new(FileActivities {
            host: self.host.clone(),
            folder,
            store,
            turns: 3,
            pace: Duration::from_millis(50),
        })
    }

    /// Of this process.
    pub fn desk(&self, store: Arc<dyn Store>) -> Embedded {
        let config = EmbeddedConfig::new(self.host.clone(), format!("desk{}", std::process::id()));
        let models = Arc::new(|_: &str| ModelKnown::Priced);
        Embedded::new(store.clone(), self.activities(store), models, Clock::system(), config)
    }

    pub async fn engine(&self, store: Arc<dyn Store>) -> TemporalEngine {
        TemporalEngine::new(self.desk(store), self.connect().await)
    }

    pub fn worker(&self) -> Child {
        let me = std::env::current_exe().unwrap();
        let mut command = match &self.netns {
            Some(name) => Net::enter(name, me),
            None => Command::new(me),
        };
        command
            .args(["--exact", "child::role", "--ignored", "--nocapture", "--test-threads=1"])
            .env(PLAN, serde_json::to_string(self).unwrap())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .unwrap()
    }
}

/// Agents that never fall silent, and leave word of how they ended.
struct Stubborn {
    plan: Plan,
    hands: Arc<FileActivities>,
}

#[async_trait]
impl Activities for Stubborn {
    async fn perform(&self, job: Job) -> TaskResult {
        if job.task.kind() != TaskKind::RunAgent {
            return self.hands.perform(job).await;
        }
        let heartbeat = job.heartbeat.clone();
        let fork = job.fork.as_ref().map_or(0, |f| f.0);
        let word = self.plan.word(&job.run, fork, job.attempt);
        let beating = async {
            loop {
                heartbeat.beat();
                tokio::time::sleep(Duration::from_millis(200)).await;
            }
        };
        let mut word = Word { path: word, said: ABORTED.into() };
        let result = tokio::select! {
            result = self.hands.perform(job) => result,
            () = beating => unreachable!("it beats for ever"),
        };
        word.said = format!("{result:?}");
        result
    }
}

/// What is said of an agent whose worker broke it off.
pub const ABORTED: &str = "aborted";

/// Left when it is dropped, in one piece: whoever finds it can read it.
struct Word {
    path: PathBuf,
    said: String,
}

impl Drop for Word {
    fn drop(&mut self) {
        let leave = || {
            let folder = self.path.parent().expect("a folder of words");
            std::fs::create_dir_all(folder)?;
            let draft = folder.with_extension(self.path.file_name().expect("a name"));
            std::fs::write(&draft, &self.said)?;
            std::fs::rename(draft, &self.path)
        };
        let _: std::io::Result<()> = leave();
    }
}
/// Not a test: what a started process does.
#[test]
#[ignore = "started by other tests"]
fn role() {
    let Ok(text) = std::env::var(PLAN) else { return };
    let plan: Plan = serde_json::from_str(&text).unwrap();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        let store = forkyard_store::open(&plan.url).await.unwrap();
        let sweep = match plan.stubborn {
            true => SweepConfig { interval: Duration::from_secs(1), ..SweepConfig::default() },
            false => SweepConfig::default(),
        };
        let config = WorkerConfig {
            host: plan.host.clone(),
            owner: format!("p{}", std::process::id()),
            host_limit: 64,
            beat: Duration::from_millis(500),
            grace: Duration::from_secs(5),
            heir: plan.desk(store.clone()),
            counted: None,
            sweep,
        };
        let hands = plan.activities(store.clone());
        let activities: Arc<dyn Activities> = match plan.stubborn {
            true => Arc::new(Stubborn { plan: plan.clone(), hands }),
            false => hands,
        };
        let yard = Arc::new(FileYard(plan.folder.clone()));
        let stop = CancellationToken::new();
        work(plan.connect().await, store, activities, yard, config, stop).await.unwrap();
    });
}
