use forkyard_core::view::RunView;
use sqlx::{Connection, PgConnection, PgPool};

use super::log::write_words;
use crate::codec::json;
use crate::search::ended_as;
use crate::{Result, StoreError};

/// In order; never changed once released, only added to.
const MIGRATIONS: &[&str] = &[
    include_str!("../../migrations/postgres/0001_start.sql"),
    include_str!("../../migrations/postgres/0002_ended_forks.sql"),
    include_str!("../../migrations/postgres/0003_access.sql"),
    include_str!("../../migrations/postgres/0004_search.sql"),
];
/// From this version on runs are found by words.
const SEARCHED: usize = 4;
/// Any number that only Forkyard uses: processes that start at once migrate one after the other.
const LOCK: i64 = 0x666f_726b_7961_7264;

pub(super) async fn migrate(pool: &PgPool) -> Result<()> {
    let mut conn = pool.acquire().await?;
    let mut tx = conn.begin().await?;
    sqlx::query("SELECT pg_advisory_xact_lock($1)").bind(LOCK).execute(&mut *tx).await?;
    run(&mut tx).await?;
    Ok(tx.commit().await?)
}

async fn run(conn: &mut PgConnection) -> Result<()> {
    sqlx::raw_sql("CREATE TABLE IF NOT EXISTS schema_version (version BIGINT NOT NULL)")
        .execute(&mut *conn)
        .await?;
    let found: Option<i64> =
        sqlx::query_scalar("SELECT version FROM schema_version").fetch_optional(&mut *conn).await?;
    let version = usize::try_from(found.unwrap_or(0)).unwrap_or(usize::MAX);
    if version > MIGRATIONS.len() {
        return Err(StoreError::Invalid(format!(
            "the database has schema version {version}, and this program knows {} at most: use a newer forkyard",
            MIGRATIONS.len()
        )));
    }
    if version == MIGRATIONS.len() {
        return Ok(());
    }
    for migration in &MIGRATIONS[version..] {
        sqlx::raw_sql(*migration).execute(&mut *conn).await?;
    }
    if version < SEARCHED {
        fill_search(conn).await?;
    }
    sqlx::query("DELETE FROM schema_version").execute(&mut *conn).await?;
    sqlx::query("INSERT INTO schema_version (version) VALUES ($1)")
        .bind(MIGRATIONS.len() as i64)
        .execute(&mut *conn)
        .await?;
    Ok(())
}

/// What is folded here, and not by the database, is filled in here for the runs that are there.
async fn fill_search(conn: &mut PgConnection) -> Result<()> {
    let found: Vec<i64> = sqlx::query_scalar("SELECT run FROM run_views").fetch_all(&mut *conn).await?;
    for n in found {
        let text: String = sqlx::query_scalar("SELECT view FROM run_views WHERE run = $1")
            .bind(n)
            .fetch_one(&mut *conn)
            .await?;
        let view: RunView = match json("the view of a run", &text) {
            Ok(view) => view,
            // Whoever asks for that run is told; the others can be used.
            Err(error) => {
                tracing::warn!(%error, "a run can't be found by words");
                continue;
            }
        };
        sqlx::query("UPDATE run_views SET ended_as = $2 WHERE run = $1")
            .bind(n)
            .bind(ended_as(&view))
            .execute(&mut *conn)
            .await?;
        write_words(conn, n, &view).await?;
    }
    Ok(())
}
