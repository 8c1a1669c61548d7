//! This test program as a worker process: started again with a role, and killed by a test.

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use forkyard_core::spec::ModelKnown;
use forkyard_core::{HostId, Millis};
use forkyard_engine::clock::Clock;
use forkyard_engine::embedded::{Embedded, EmbeddedConfig};
use forkyard_engine::sweep::SweepConfig;
use forkyard_store::Store;
use forkyard_temporal::{Pace, Service, ServiceConfig, TemporalEngine, WorkerConfig, work};
use serde::{Deserialize, Serialize};
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
}

impl Plan {
    pub fn new(address: String) -> Plan {
        let folder = tempfile::tempdir().unwrap();
        let path: PathBuf = folder.path().into();
        test_support::keep_until_exit(folder);
        let url = format!("sqlite:{}", path.join("store.db").display());
        Plan { address, url, folder: path, host: host() }
    }

    /// Short times: losses are what is tested, not waiting for them.
    pub fn service(&self) -> ServiceConfig {
        ServiceConfig {
            address: self.address.clone(),
            namespace: "default".into(),
            task_queue: "forkyard-test".into(),
            identity: "test".into(),
            pace: Pace {
                lost_after: Millis::secs(3),
                host_lost_after: Millis::secs(10),
                grace: Millis::secs(5),
            },
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

    pub async fn engine(&self, store: Arc<dyn Store>) -> TemporalEngine {
        let config = EmbeddedConfig::new(self.host.clone(), "submitter");
        let models = Arc::new(|_: &str| ModelKnown::Priced);
        let desk =
            Embedded::new(store.clone(), self.activities(store.clone()), models, Clock::system(), config);
        TemporalEngine::new(store, Arc::new(desk), self.connect().await)
    }

    pub fn worker(&self) -> Child {
        Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "child::role", "--ignored", "--nocapture", "--test-threads=1"])
            .env(PLAN, serde_json::to_string(self).unwrap())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .unwrap()
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
        let config = WorkerConfig {
            host: plan.host.clone(),
            owner: format!("p{}", std::process::id()),
            host_limit: 64,
            beat: Duration::from_millis(500),
            grace: Duration::from_secs(5),
            sweep: SweepConfig::default(),
        };
        let activities = plan.activities(store.clone());
        let yard = Arc::new(FileYard(plan.folder.clone()));
        let stop = CancellationToken::new();
        work(plan.connect().await, store, activities, yard, config, stop).await.unwrap();
    });
}
