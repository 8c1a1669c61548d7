//! The Temporal engine against the suite that every engine passes.

use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::sync::Arc;

use forkyard_engine::Engine;
use forkyard_store::Store;
use test_support::engines::{Rig, Worker};
use test_support::temporal::Temporal;

use super::child::Plan;

pub struct OnTemporal {
    pub server: Temporal,
    pub plan: Plan,
    store: Arc<dyn Store>,
    engine: Arc<dyn Engine>,
}

impl Rig for OnTemporal {
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
        Worker(self.plan.worker())
    }
}

pub async fn rig() -> Option<OnTemporal> {
    rig_on(None, None).await
}

/// On a store of one's own, or on SQLite; at an address of one's own, or on loopback.
pub async fn rig_on(url: Option<String>, at: Option<Ipv4Addr>) -> Option<OnTemporal> {
    let start = move || at.map_or_else(Temporal::start, Temporal::start_at);
    let server = tokio::task::spawn_blocking(start).await.unwrap()?;
    let mut plan = Plan::new(server.address());
    plan.url = url.unwrap_or(plan.url);
    let store = forkyard_store::open(&plan.url).await.unwrap();
    let engine = Arc::new(plan.engine(store.clone()).await);
    Some(OnTemporal { server, plan, store, engine })
}

test_support::engine_conformance!(rig);
