//! The embedded engine against the suite that every engine passes.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use forkyard_engine::Engine;
use forkyard_store::Store;
use test_support::engines::{Rig, Worker};

use super::child::Plan;

struct Embedded {
    plan: Plan,
    store: Arc<dyn Store>,
    engine: Arc<dyn Engine>,
}

impl Rig for Embedded {
    fn engine(&self) -> Arc<dyn Engine> {
        self.engine.clone()
    }
    fn store(&self) -> Arc<dyn Store> {
        self.store.clone()
    }
    fn folder(&self) -> PathBuf {
        self.plan.folder.clone()
    }
    fn worker(&self) -> Worker {
        Worker(self.plan.process("drive"))
    }
}

async fn rig() -> Option<Embedded> {
    let folder = tempfile::tempdir().unwrap();
    let path: PathBuf = folder.path().into();
    test_support::keep_until_exit(folder);
    let url = format!("sqlite:{}", path.join("store.db").display());
    let plan = Plan { url, folder: path, turns: 3, pace: Duration::from_millis(50), host_limit: 0 };
    let store = forkyard_store::open(&plan.url).await.unwrap();
    let engine = Arc::new(plan.engine(store.clone(), "submitter"));
    Some(Embedded { plan, store, engine })
}

test_support::engine_conformance!(rig);
