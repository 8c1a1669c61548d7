use sqlx::{Connection, PgConnection, PgPool};

use crate::{Result, StoreError};

/// In order; never changed once released, only added to.
const MIGRATIONS: &[&str] = &[
    include_str!("../../migrations/postgres/0001_start.sql"),
    include_str!("../../migrations/postgres/0002_ended_forks.sql"),
    include_str!("../../migrations/postgres/0003_access.sql"),
];
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
    sqlx::query("DELETE FROM schema_version").execute(&mut *conn).await?;
    sqlx::query("INSERT INTO schema_version (version) VALUES ($1)")
        .bind(MIGRATIONS.len() as i64)
        .execute(&mut *conn)
        .await?;
    Ok(())
}
