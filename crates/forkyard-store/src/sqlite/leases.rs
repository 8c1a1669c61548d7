use std::time::Duration;

use forkyard_core::{RunId, Timestamp};
use rusqlite::{Connection, OptionalExtension, params};

use super::clock::Clock;
use super::log::run_row;
use super::writer::Tx;
use crate::codec::{int, json, rows, run_id, uint};
use crate::{Holder, Lease, LeaseToken, Process, Result, StoreError};

pub(super) fn acquire(
    tx: &Tx<'_>,
    clock: &Clock,
    run: &RunId,
    owner: &str,
    ttl: Duration,
) -> Result<Option<Lease>> {
    let row = run_row(tx, run)?;
    let (token, holder, boot, until, renewed): (i64, Option<String>, Option<String>, i64, Option<i64>) = tx
        .prepare_cached(
            "SELECT lease_token, lease_owner, lease_boot, lease_until, renewed_at FROM runs WHERE n = ?1",
        )?
        .query_row([row.n], |r| Ok((r.get(0)?, r.get(1)?, r.get(2)?, r.get(3)?, r.get(4)?)))?;
    let valid = boot.as_deref() == Some(&clock.boot) && until > clock.now_ms();
    if valid && holder.is_some_and(|holder| holder != owner) {
        return Ok(None);
    }
    tx.prepare_cached(
        "UPDATE runs SET lease_token = ?2, lease_owner = ?3, lease_boot = ?4, lease_until = ?5 WHERE n = ?1",
    )?
    .execute(params![row.n, token + 1, owner, clock.boot, clock.until(ttl)])?;
    let last_driven = renewed.map(|ms| Timestamp(uint(ms)));
    Ok(Some(Lease { run: run.clone(), token: uint(token) + 1, last_driven }))
}

pub(super) fn renew(
    tx: &Tx<'_>,
    clock: &Clock,
    run: &RunId,
    token: LeaseToken,
    ttl: Duration,
    driven: Option<Timestamp>,
) -> Result<()> {
    let row = run_row(tx, run)?;
    if row.lease != Some(token) {
        return Err(StoreError::LeaseLost);
    }
    tx.prepare_cached(
        "UPDATE runs SET lease_boot = ?2, lease_until = ?3, renewed_at = coalesce(?4, renewed_at) WHERE n = ?1",
    )?
    .execute(params![row.n, clock.boot, clock.until(ttl), driven.map(|at| int(at.0))])?;
    Ok(())
}

pub(super) fn release(tx: &Tx<'_>, run: &RunId, token: LeaseToken) -> Result<()> {
    let given = tx
        .prepare_cached(
            "UPDATE runs SET lease_owner = NULL, lease_until = 0 WHERE id = ?1 AND lease_token = ?2",
        )?
        .execute(params![run.as_str(), int(token)])?;
    if given > 0 {
        // Whoever waits to take over need not wait for the expiry.
        tx.touch(run);
    }
    Ok(())
}

pub(super) fn holder(conn: &Connection, clock: &Clock, run: &RunId) -> Result<Option<Holder>> {
    let mut select = conn.prepare_cached(
        "SELECT lease_owner, lease_token FROM runs
         WHERE id = ?1 AND lease_owner IS NOT NULL AND lease_boot = ?2 AND lease_until > ?3",
    )?;
    let found = select
        .query_row(params![run.as_str(), clock.boot, clock.now_ms()], |r| {
            Ok((r.get(0)?, r.get::<_, i64>(1)?))
        })
        .optional()?;
    Ok(found.map(|(owner, token)| Holder { owner, token: uint(token) }))
}

pub(super) fn claimable(conn: &Connection, clock: &Clock, limit: usize) -> Result<Vec<RunId>> {
    let mut select = conn.prepare_cached(
        "SELECT id FROM runs WHERE live = 1 AND embedded = 1
           AND (lease_owner IS NULL OR lease_boot IS NOT ?1 OR lease_until <= ?2)
           AND (detached = 0 OR EXISTS (SELECT 1 FROM commands c WHERE c.run = runs.n AND c.pending = 1))
         ORDER BY n LIMIT ?3",
    )?;
    let found = select.query_map(params![clock.boot, clock.now_ms(), rows(limit)], |r| r.get(0))?;
    found.map(|id| run_id(id?)).collect()
}

pub(super) fn announce(tx: &Tx<'_>, clock: &Clock, id: &str, text: &str, ttl: Duration) -> Result<()> {
    tx.prepare_cached("DELETE FROM processes WHERE boot <> ?1 OR until <= ?2")?
        .execute(params![clock.boot, clock.now_ms()])?;
    tx.prepare_cached("INSERT OR REPLACE INTO processes (id, boot, until, data) VALUES (?1, ?2, ?3, ?4)")?
        .execute(params![id, clock.boot, clock.until(ttl), text])?;
    Ok(())
}

pub(super) fn processes(conn: &Connection, clock: &Clock) -> Result<Vec<Process>> {
    let mut select =
        conn.prepare_cached("SELECT data FROM processes WHERE boot = ?1 AND until > ?2 ORDER BY id")?;
    let found = select.query_map(params![clock.boot, clock.now_ms()], |r| r.get::<_, String>(0))?;
    found.map(|text| json("a process", &text?)).collect()
}
