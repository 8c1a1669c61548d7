//! The simulation's store holds what the real ones hold, so what the simulation shows is true of them.

use std::sync::Arc;

use forkyard_store::Store;
use test_support::memstore::MemStore;

async fn store() -> Arc<dyn Store> {
    Arc::new(MemStore::default())
}

forkyard_store::conformance!(store);
