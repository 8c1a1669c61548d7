//! Leases by the server's clock: hosts need not agree on the time.

use std::time::Duration;

use forkyard_core::{RunId, Timestamp};
use sqlx::{PgConnection, PgPool};

use super::batch::Tx;
use super::log::lock_run;
use crate::codec::{int, json, rows, run_id, uint};
use crate::{Holder, Lease, LeaseToken, Process, Result, StoreError};

async fn now_ms(conn: &mut PgConnection) -> Result<i64> {
    // Not now(): that is when the transaction began, and it may have waited for the row since.
    Ok(sqlx::query_scalar("SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint")
        .fetch_one(conn)
        .await?)
}

fn after(now: i64, ttl: Duration) -> i64 {
    now.saturating_add(i64::try_from(ttl.as_millis()).unwrap_or(i64::MAX))
}

pub(super) async fn acquire(
    tx: &mut Tx<'_>,
    run: &RunId,
    owner: &str,
    ttl: Duration,
) -> Result<Option<Lease>> {
    let row = lock_run(tx.conn, run).await?;
    let (token, holder, until, renewed): (i64, Option<String>, i64, Option<i64>) =
        sqlx::query_as("SELECT lease_token, lease_owner, lease_until, renewed_at FROM runs WHERE n = $1")
            .bind(row.n)
            .fetch_one(&mut *tx.conn)
            .await?;
    let now = now_ms(tx.conn).await?;
    if until > now && holder.is_some_and(|holder| holder != owner) {
        return Ok(None);
    }
    sqlx::query("UPDATE runs SET lease_token = $2, lease_owner = $3, lease_until = $4 WHERE n = $1")
        .bind(row.n)
        .bind(token + 1)
        .bind(owner)
        .bind(after(now, ttl))
        .execute(&mut *tx.conn)
        .await?;
    let last_driven = renewed.map(|ms| Timestamp(uint(ms)));
    Ok(Some(Lease { run: run.clone(), token: uint(token) + 1, last_driven }))
}

pub(super) async fn renew(
    tx: &mut Tx<'_>,
    run: &RunId,
    token: LeaseToken,
    ttl: Duration,
    driven: Option<Timestamp>,
) -> Result<()> {
    let row = lock_run(tx.conn, run).await?;
    if row.lease != Some(token) {
        return Err(StoreError::LeaseLost);
    }
    let now = now_ms(tx.conn).await?;
    sqlx::query("UPDATE runs SET lease_until = $2, renewed_at = coalesce($3, renewed_at) WHERE n = $1")
        .bind(row.n)
        .bind(after(now, ttl))
        .bind(driven.map(|at| int(at.0)))
        .execute(&mut *tx.conn)
        .await?;
    Ok(())
}

pub(super) async fn release(tx: &mut Tx<'_>, run: &RunId, token: LeaseToken) -> Result<()> {
    let given =
        sqlx::query("UPDATE runs SET lease_owner = NULL, lease_until = 0 WHERE id = $1 AND lease_token = $2")
            .bind(run.as_str())
            .bind(int(token))
            .execute(&mut *tx.conn)
            .await?;
    if given.rows_affected() > 0 {
        // Whoever waits to take over need not wait for the expiry.
        tx.touch();
    }
    Ok(())
}

pub(super) async fn holder(pool: &PgPool, run: &RunId) -> Result<Option<Holder>> {
    let found: Option<(String, i64)> = sqlx::query_as(
        "SELECT lease_owner, lease_token FROM runs
         WHERE id = $1 AND lease_owner IS NOT NULL
           AND lease_until > (extract(epoch FROM clock_timestamp()) * 1000)::bigint",
    )
    .bind(run.as_str())
    .fetch_optional(pool)
    .await?;
    Ok(found.map(|(owner, token)| Holder { owner, token: uint(token) }))
}

pub(super) async fn claimable(pool: &PgPool, limit: usize) -> Result<Vec<RunId>> {
    let found: Vec<String> = sqlx::query_scalar(
        "SELECT id FROM runs WHERE live AND embedded
           AND (lease_owner IS NULL OR lease_until <= (extract(epoch FROM clock_timestamp()) * 1000)::bigint)
           AND (NOT detached OR EXISTS (SELECT 1 FROM commands c WHERE c.run = runs.n AND c.pending))
         ORDER BY n LIMIT $1",
    )
    .bind(rows(limit))
    .fetch_all(pool)
    .await?;
    found.into_iter().map(run_id).collect()
}

pub(super) async fn announce(pool: &PgPool, id: &str, text: &str, ttl: Duration) -> Result<()> {
    sqlx::query("DELETE FROM processes WHERE until <= (extract(epoch FROM clock_timestamp()) * 1000)::bigint AND id <> $1")
        .bind(id)
        .execute(pool)
        .await?;
    sqlx::query(
        "INSERT INTO processes (id, until, data)
         VALUES ($1, (extract(epoch FROM clock_timestamp()) * 1000)::bigint + $2, $3)
         ON CONFLICT (id) DO UPDATE SET until = excluded.until, data = excluded.data",
    )
    .bind(id)
    .bind(MAX_TTL_MS.min(i64::try_from(ttl.as_millis()).unwrap_or(MAX_TTL_MS)))
    .bind(text)
    .execute(pool)
    .await?;
    Ok(())
}

/// Far beyond any process, and small enough to add.
const MAX_TTL_MS: i64 = 1 << 50;

pub(super) async fn processes(pool: &PgPool) -> Result<Vec<Process>> {
    let found: Vec<String> = sqlx::query_scalar(
        "SELECT data FROM processes WHERE until > (extract(epoch FROM clock_timestamp()) * 1000)::bigint ORDER BY id",
    )
    .fetch_all(pool)
    .await?;
    found.iter().map(|text| json("a process", text)).collect()
}
