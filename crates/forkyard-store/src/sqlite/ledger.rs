//! Reservations, and their running sums in the rows of the run and the fork: a decision reads three rows, however many
//! requests came before.

use std::collections::BTreeMap;

use forkyard_core::budget::{Ask, Balance, BudgetLimits, ForkBalance, Verdict};
use forkyard_core::{Attempt, ForkNum, RunId};
use rusqlite::{Connection, OptionalExtension, params};

use super::log::{run_number, run_row};
use super::writer::Tx;
use crate::codec::{fork_num, int, no_fork, no_run, usd};
use crate::reservation::{self, Change, Held, Owner, RELEASED, RESERVED, SETTLED, Step};
use crate::{Reserve, Result, Sending};

fn sums(conn: &Connection, n: i64) -> Result<Balance> {
    Ok(conn
        .prepare_cached("SELECT budget_run, budget_fork, spent, reserved FROM runs WHERE n = ?1")?
        .query_row([n], |r| {
            Ok(Balance {
                limits: BudgetLimits {
                    run: r.get::<_, Option<i64>>(0)?.map(usd),
                    fork: r.get::<_, Option<i64>>(1)?.map(usd),
                },
                spent: usd(r.get(2)?),
                reserved: usd(r.get(3)?),
                forks: BTreeMap::new(),
            })
        })?)
}

fn fork_sums(conn: &Connection, n: i64, fork: ForkNum) -> Result<ForkBalance> {
    let found = conn
        .prepare_cached("SELECT spent, reserved FROM forks WHERE run = ?1 AND fork = ?2")?
        .query_row((n, fork), |r| Ok(ForkBalance { spent: usd(r.get(0)?), reserved: usd(r.get(1)?) }))
        .optional()?;
    Ok(found.unwrap_or_default())
}

fn held(conn: &Connection, n: i64, request: &str) -> Result<Option<Held>> {
    let found: Option<(i64, i64, i64, i64)> = conn
        .prepare_cached(
            "SELECT fork, attempt, amount, state FROM reservations WHERE run = ?1 AND request = ?2",
        )?
        .query_row(params![n, request], |r| Ok((r.get(0)?, r.get(1)?, r.get(2)?, r.get(3)?)))
        .optional()?;
    found
        .map(|(fork, attempt, amount, state)| {
            Ok(Held {
                fork: fork_num(fork)?,
                attempt: crate::codec::attempt(attempt)?,
                amount: usd(amount),
                state: reservation::state(state)?,
            })
        })
        .transpose()
}

fn owner(conn: &Connection, n: i64, run: &RunId, fork: ForkNum) -> Result<Owner> {
    let (attempt, ended): (i64, bool) = conn
        .prepare_cached("SELECT attempt, ended FROM forks WHERE run = ?1 AND fork = ?2")?
        .query_row((n, fork), |r| Ok((r.get(0)?, r.get(1)?)))
        .optional()?
        .ok_or_else(|| no_fork(run, fork))?;
    Ok(Owner { attempt: crate::codec::attempt(attempt)?, ended })
}

pub(super) fn reserve(tx: &Tx<'_>, run: &RunId, ask: &Ask) -> Result<Reserve> {
    let row = run_row(tx, run)?;
    if let Some(current) = owner(tx, row.n, run, ask.fork)?.fences(ask.attempt)? {
        return Ok(Reserve::Stale { current });
    }
    if row.silent {
        return Ok(Reserve::Paused);
    }
    let before = held(tx, row.n, &ask.request)?;
    if let Some(held) = &before
        && reservation::again(held, ask)?
    {
        return Ok(Reserve::Granted);
    }
    let mut balance = sums(tx, row.n)?;
    balance.forks.insert(ask.fork, fork_sums(tx, row.n, ask.fork)?);
    match balance.judge(ask.fork, ask.worst) {
        Verdict::Short { available, outstanding } => return Ok(Reserve::Short { available, outstanding }),
        Verdict::Granted => {}
    }
    tx.prepare_cached(
        "INSERT OR REPLACE INTO reservations (run, request, fork, attempt, amount, state)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6)",
    )?
    .execute(params![row.n, ask.request, ask.fork, ask.attempt.0, int(ask.worst.0), RESERVED])?;
    add(tx, row.n, ask.fork, Change { reserved: int(ask.worst.0), spent: 0 })?;
    tx.touch(run);
    Ok(Reserve::Granted)
}

/// Moves the sums of the run and the fork.
fn add(tx: &Tx<'_>, n: i64, fork: ForkNum, change: Change) -> Result<()> {
    tx.prepare_cached("UPDATE runs SET spent = spent + ?2, reserved = reserved + ?3 WHERE n = ?1")?
        .execute((n, change.spent, change.reserved))?;
    tx.prepare_cached(
        "UPDATE forks SET spent = spent + ?3, reserved = reserved + ?4 WHERE run = ?1 AND fork = ?2",
    )?
    .execute((n, fork, change.spent, change.reserved))?;
    Ok(())
}

/// One step of a reservation, decided in [`reservation`].
pub(super) fn step(tx: &Tx<'_>, run: &RunId, request: &str, step: Step) -> Result<()> {
    let n = run_number(tx, run)?.ok_or_else(|| no_run(run))?;
    let held = held(tx, n, request)?.ok_or_else(|| reservation::unknown(run, request))?;
    write(tx, n, run, request, &held, step)
}

pub(super) fn mark_sent(tx: &Tx<'_>, run: &RunId, request: &str) -> Result<Sending> {
    let row = run_row(tx, run)?;
    let held = held(tx, row.n, request)?.ok_or_else(|| reservation::unknown(run, request))?;
    let sending = held.may_send(owner(tx, row.n, run, held.fork)?, row.silent)?;
    if sending == Sending::Go {
        write(tx, row.n, run, request, &held, Step::Sent)?;
    }
    Ok(sending)
}

fn write(tx: &Tx<'_>, n: i64, run: &RunId, request: &str, held: &Held, step: Step) -> Result<()> {
    let Some((after, change)) = held.step(step, request)? else { return Ok(()) };
    tx.prepare_cached("UPDATE reservations SET amount = ?3, state = ?4 WHERE run = ?1 AND request = ?2")?
        .execute(params![n, request, int(after.amount.0), reservation::column(after.state)])?;
    if change != Change::default() {
        add(tx, n, held.fork, change)?;
        tx.touch(run);
    }
    Ok(())
}

/// Attempts up to this one are over: what they left open is settled at its worst case, if it may have been sent, or free.
pub(super) fn close_up_to(tx: &Tx<'_>, n: i64, fork: ForkNum, attempt: Attempt) -> Result<()> {
    let (reserved, sent): (i64, i64) = tx
        .prepare_cached(
            "SELECT coalesce(sum(amount), 0), coalesce(sum(amount) FILTER (WHERE state = 1), 0)
             FROM reservations WHERE run = ?1 AND fork = ?2 AND attempt <= ?3 AND state < 2",
        )?
        .query_row((n, fork, attempt.0), |r| Ok((r.get(0)?, r.get(1)?)))?;
    let closed = tx
        .prepare_cached(
            "UPDATE reservations SET state = CASE state WHEN 1 THEN ?4 ELSE ?5 END
             WHERE run = ?1 AND fork = ?2 AND attempt <= ?3 AND state < 2",
        )?
        .execute((n, fork, attempt.0, SETTLED, RELEASED))?;
    if closed > 0 {
        add(tx, n, fork, Change { reserved: -reserved, spent: sent })?;
    }
    Ok(())
}

pub(super) fn balance(conn: &Connection, run: &RunId) -> Result<Balance> {
    let n = run_number(conn, run)?.ok_or_else(|| no_run(run))?;
    let mut balance = sums(conn, n)?;
    let mut select = conn.prepare_cached(
        "SELECT fork, spent, reserved FROM forks WHERE run = ?1 AND (spent > 0 OR reserved > 0)",
    )?;
    let mut rows = select.query([n])?;
    while let Some(r) = rows.next()? {
        let of_fork = ForkBalance { spent: usd(r.get(1)?), reserved: usd(r.get(2)?) };
        balance.forks.insert(fork_num(r.get(0)?)?, of_fork);
    }
    Ok(balance)
}
