//! PostgreSQL: the suite of all stores, and what only a server has to bear.

mod conformance {
    use std::sync::Arc;

    use forkyard_store::Store;
    use test_support::postgres::Postgres;

    async fn empty() -> Arc<dyn Store> {
        forkyard_store::open(&Postgres::shared().database()).await.unwrap()
    }

    forkyard_store::conformance!(empty);
}
