use std::time::{SystemTime, UNIX_EPOCH};

use forkyard_core::view::{ForkView, RunView, SandboxState, SandboxView};
use forkyard_core::{ForkNum, RunId, SandboxId, Timestamp};
use sqlx::{PgPool, Postgres, QueryBuilder};

use super::batch::Tx;
use super::log::{lock_run, write_sandbox};
use crate::codec::{blob_range, int, json, rows, run_id, uint};
use crate::search::outcome;
use crate::{Result, RunCounts, RunQuery, SandboxQuery, StoreError, Words};

pub(super) async fn run(pool: &PgPool, run: &RunId) -> Result<Option<RunView>> {
    let text: Option<String> =
        sqlx::query_scalar("SELECT view FROM run_views WHERE run = (SELECT n FROM runs WHERE id = $1)")
            .bind(run.as_str())
            .fetch_optional(pool)
            .await?;
    text.map(|t| json("the view of a run", &t)).transpose()
}

pub(super) async fn runs(pool: &PgPool, query: &RunQuery) -> Result<Vec<RunView>> {
    let mut sql = QueryBuilder::new("SELECT view FROM run_views WHERE true");
    if query.live {
        sql.push(" AND live");
    }
    if !query.outcomes.is_empty() {
        let any: Vec<&str> = query.outcomes.iter().map(|o| outcome(*o)).collect();
        sql.push(" AND ended_as = ANY(").push_bind(any).push(")");
    }
    with_words(&mut sql, &query.words);
    if let Some((at, id)) = &query.before {
        sql.push(" AND (created_at, id) < (")
            .push_bind(int(at.0))
            .push(", ")
            .push_bind(id.as_str())
            .push(")");
    }
    sql.push(" ORDER BY created_at DESC, id DESC LIMIT ").push_bind(rows(query.limit));
    collect(pool, sql, "the view of a run").await
}

fn with_words(sql: &mut QueryBuilder<Postgres>, words: &Words) {
    for word in words.iter() {
        sql.push(" AND EXISTS (SELECT FROM run_words WHERE run_words.run = run_views.run AND strpos(words, ")
            .push_bind(word.to_string())
            .push(") > 0)");
    }
}

pub(super) async fn count_runs(pool: &PgPool, words: &Words) -> Result<RunCounts> {
    let mut sql = QueryBuilder::new("SELECT ended_as, count(*) FROM run_views WHERE true");
    with_words(&mut sql, words);
    sql.push(" GROUP BY ended_as");
    let found: Vec<(Option<String>, i64)> = sql.build_query_as().fetch_all(pool).await?;
    let mut counts = RunCounts::default();
    for (ended_as, runs) in found {
        counts.add(ended_as.as_deref(), uint(runs));
    }
    Ok(counts)
}

async fn collect<T: serde::de::DeserializeOwned>(
    pool: &PgPool,
    mut sql: QueryBuilder<Postgres>,
    what: &str,
) -> Result<Vec<T>> {
    let found: Vec<String> = sql.build_query_scalar().fetch_all(pool).await?;
    found.iter().map(|text| json(what, text)).collect()
}

pub(super) async fn forks(pool: &PgPool, run: &RunId) -> Result<Vec<ForkView>> {
    let mut sql = QueryBuilder::new("SELECT view FROM forks WHERE run = (SELECT n FROM runs WHERE id = ");
    sql.push_bind(run.as_str()).push(") ORDER BY fork");
    collect(pool, sql, "the view of a fork").await
}

pub(super) async fn fork(pool: &PgPool, run: &RunId, fork: ForkNum) -> Result<Option<ForkView>> {
    let text: Option<String> = sqlx::query_scalar(
        "SELECT view FROM forks WHERE run = (SELECT n FROM runs WHERE id = $1) AND fork = $2",
    )
    .bind(run.as_str())
    .bind(i64::from(fork))
    .fetch_optional(pool)
    .await?;
    text.map(|t| json("the view of a fork", &t)).transpose()
}

pub(super) async fn sandboxes(pool: &PgPool, query: &SandboxQuery) -> Result<Vec<SandboxView>> {
    let mut sql = QueryBuilder::new("SELECT view FROM sandboxes WHERE true");
    if let Some(run) = &query.run {
        sql.push(" AND run = (SELECT n FROM runs WHERE id = ").push_bind(run.as_str()).push(")");
    }
    if !query.states.is_empty() {
        let states: Vec<&str> = query.states.iter().map(|s| s.as_str()).collect();
        sql.push(" AND state = ANY(").push_bind(states).push(")");
    }
    sql.push(" ORDER BY created_at, id LIMIT ").push_bind(rows(query.limit));
    collect(pool, sql, "the view of a sandbox").await
}

/// The run whose row is to be locked before the sandbox's is written.
pub(super) async fn run_of_sandbox(pool: &PgPool, sandbox: &SandboxId) -> Result<RunId> {
    let found: Option<String> = sqlx::query_scalar(
        "SELECT runs.id FROM sandboxes JOIN runs ON runs.n = sandboxes.run WHERE sandboxes.id = $1",
    )
    .bind(sandbox.as_str())
    .fetch_optional(pool)
    .await?;
    run_id(found.ok_or_else(|| no_sandbox(sandbox))?)
}

fn no_sandbox(sandbox: &SandboxId) -> StoreError {
    StoreError::NotFound { what: format!("sandbox {sandbox}") }
}

pub(super) async fn sandbox_destroyed(tx: &mut Tx<'_>, run: &RunId, sandbox: &SandboxId) -> Result<()> {
    let n = lock_run(tx.conn, run).await?.n;
    let text: Option<String> = sqlx::query_scalar("SELECT view FROM sandboxes WHERE id = $1 AND run = $2")
        .bind(sandbox.as_str())
        .bind(n)
        .fetch_optional(&mut *tx.conn)
        .await?;
    let mut view: SandboxView = json("the view of a sandbox", &text.ok_or_else(|| no_sandbox(sandbox))?)?;
    if view.state == SandboxState::Destroyed {
        return Ok(());
    }
    view.state = SandboxState::Destroyed;
    view.updated_at =
        Timestamp(SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_millis() as u64));
    let text = serde_json::to_string(&view).map_err(|e| StoreError::Invalid(e.to_string()))?;
    write_sandbox(tx, n, &view, &text).await?;
    tx.touch();
    Ok(())
}

pub(super) async fn journal_len(pool: &PgPool, run: &RunId, fork: ForkNum) -> Result<u64> {
    let sum: i64 = sqlx::query_scalar(
        "SELECT coalesce(sum(length), 0)::bigint FROM streams
         WHERE run = (SELECT n FROM runs WHERE id = $1) AND fork = $2 AND attempt >= 0",
    )
    .bind(run.as_str())
    .bind(i64::from(fork))
    .fetch_one(pool)
    .await?;
    Ok(uint(sum))
}

pub(super) async fn delete_run(tx: &mut Tx<'_>, run: &RunId) -> Result<()> {
    let n = lock_run(tx.conn, run).await?.n;
    let live: bool =
        sqlx::query_scalar("SELECT live FROM runs WHERE n = $1").bind(n).fetch_one(&mut *tx.conn).await?;
    if live {
        return Err(StoreError::Invalid(format!("run {run} has not ended: cancel it first")));
    }
    let owed: Option<String> = sqlx::query_scalar(
        "SELECT id FROM sandboxes WHERE run = $1 AND state IN ('requested', 'live', 'owed') LIMIT 1",
    )
    .bind(n)
    .fetch_optional(&mut *tx.conn)
    .await?;
    if let Some(owed) = owed {
        return Err(StoreError::Invalid(format!(
            "run {run} can't be deleted yet: sandbox {owed} still has to be destroyed"
        )));
    }
    for delete in [
        "DELETE FROM run_views WHERE run = $1",
        "DELETE FROM run_words WHERE run = $1",
        "DELETE FROM forks WHERE run = $1",
        "DELETE FROM sandboxes WHERE run = $1",
        "DELETE FROM streams WHERE run = $1",
        "DELETE FROM events WHERE run = $1",
        "DELETE FROM commands WHERE run = $1",
        "DELETE FROM messages WHERE run = $1",
        "DELETE FROM reservations WHERE run = $1",
        "DELETE FROM runs WHERE n = $1",
    ] {
        sqlx::query(delete).bind(n).execute(&mut *tx.conn).await?;
    }
    let (from, to) = blob_range(run);
    sqlx::query("DELETE FROM blobs WHERE key >= $1 AND key < $2")
        .bind(from)
        .bind(to)
        .execute(&mut *tx.conn)
        .await?;
    tx.touch();
    Ok(())
}

pub(super) async fn put_blob(pool: &PgPool, key: &str, data: &[u8]) -> Result<()> {
    sqlx::query(
        "INSERT INTO blobs (key, data) VALUES ($1, $2) ON CONFLICT (key) DO UPDATE SET data = excluded.data",
    )
    .bind(key)
    .bind(data)
    .execute(pool)
    .await?;
    Ok(())
}

pub(super) async fn blob(pool: &PgPool, key: &str) -> Result<Option<Vec<u8>>> {
    Ok(sqlx::query_scalar("SELECT data FROM blobs WHERE key = $1").bind(key).fetch_optional(pool).await?)
}

pub(super) async fn delete_blob(pool: &PgPool, key: &str) -> Result<()> {
    sqlx::query("DELETE FROM blobs WHERE key = $1").bind(key).execute(pool).await?;
    Ok(())
}

pub(super) async fn identity(pool: &PgPool) -> Result<String> {
    Ok(sqlx::query_scalar("SELECT value FROM meta WHERE name = 'identity'").fetch_one(pool).await?)
}
