//! PostgreSQL: the suite of all stores, and what only a server has to bear.

mod conformance {
    use std::sync::Arc;

    use forkyard_store::Store;
    use test_support::postgres::Postgres;

    async fn empty() -> Arc<dyn Store> {
        let url = tokio::task::spawn_blocking(|| Postgres::shared().database()).await.unwrap();
        forkyard_store::open(&url).await.unwrap()
    }

    forkyard_store::conformance!(in one test: empty);
}
