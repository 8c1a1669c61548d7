use std::sync::Arc;

use crate::postgres::PostgresStore;
use crate::sqlite::SqliteStore;
use crate::{Result, Store, StoreError};

/// Opens the store that `url` names: `sqlite:PATH` or a path for SQLite, `postgres://…` for PostgreSQL. Brings its
/// schema up to date.
pub async fn open(url: &str) -> Result<Arc<dyn Store>> {
    if url.starts_with("postgres://") || url.starts_with("postgresql://") {
        return Ok(Arc::new(PostgresStore::open(url).await?));
    }
    let path = match url.split_once(':') {
        Some(("sqlite", path)) => path.strip_prefix("//").unwrap_or(path),
        Some((scheme, _)) if scheme.len() > 1 && scheme.bytes().all(|b| b.is_ascii_lowercase()) => {
            return Err(StoreError::Invalid(format!(
                "{url:?} is not a store: use sqlite:PATH, a path, or postgres://…"
            )));
        }
        _ => url,
    };
    if path.is_empty() || path.starts_with(":memory:") {
        return Err(StoreError::Invalid(format!("{url:?} names no file")));
    }
    Ok(Arc::new(SqliteStore::open(path).await?))
}
