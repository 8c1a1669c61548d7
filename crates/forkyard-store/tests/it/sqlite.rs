//! SQLite: the suite of all stores, and what only a file on one host has to bear.

mod conformance {
    use std::sync::Arc;

    use forkyard_store::Store;

    /// The folder goes when the test's process does; nextest gives each test a process.
    async fn empty() -> Arc<dyn Store> {
        let folder = tempfile::tempdir().unwrap();
        let store = forkyard_store::open(folder.path().join("store.db").to_str().unwrap()).await.unwrap();
        test_support::keep_until_exit(folder);
        store
    }

    forkyard_store::conformance!(empty);
}
