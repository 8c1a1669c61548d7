//! Reservations, and their running sums in the rows of the run and the fork: a decision reads three rows, however many
//! requests came before.

use std::collections::BTreeMap;

use forkyard_core::budget::{Ask, Balance, BudgetLimits, ForkBalance, Verdict};
use forkyard_core::{Attempt, ForkNum, RunId};
use sqlx::PgConnection;

use super::batch::Tx;
use super::log::{lock_run, run_number};
use crate::codec::{fork_num, int, no_fork, no_run, usd};
use crate::reservation::{self, Change, Held, Owner, RELEASED, RESERVED, SENT, SETTLED, Step};
use crate::{Reserve, Result, Sending};

async fn sums(conn: &mut PgConnection, n: i64) -> Result<Balance> {
    let (run, fork, spent, reserved): (Option<i64>, Option<i64>, i64, i64) =
        sqlx::query_as("SELECT budget_run, budget_fork, spent, reserved FROM runs WHERE n = $1")
            .bind(n)
            .fetch_one(conn)
            .await?;
    let limits = BudgetLimits { run: run.map(usd), fork: fork.map(usd) };
    Ok(Balance { limits, spent: usd(spent), reserved: usd(reserved), forks: BTreeMap::new() })
}

async fn fork_sums(conn: &mut PgConnection, n: i64, fork: ForkNum) -> Result<ForkBalance> {
    let found: Option<(i64, i64)> =
        sqlx::query_as("SELECT spent, reserved FROM forks WHERE run = $1 AND fork = $2")
            .bind(n)
            .bind(i64::from(fork))
            .fetch_optional(conn)
            .await?;
    let (spent, reserved) = found.unwrap_or_default();
    Ok(ForkBalance { spent: usd(spent), reserved: usd(reserved) })
}

async fn held(conn: &mut PgConnection, n: i64, request: &str) -> Result<Option<Held>> {
    let found: Option<(i64, i64, i64, i64)> = sqlx::query_as(
        "SELECT fork, attempt, amount, state FROM reservations WHERE run = $1 AND request = $2",
    )
    .bind(n)
    .bind(request)
    .fetch_optional(conn)
    .await?;
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

async fn owner(conn: &mut PgConnection, n: i64, run: &RunId, fork: ForkNum) -> Result<Owner> {
    let found: Option<(i64, bool)> =
        sqlx::query_as("SELECT attempt, ended FROM forks WHERE run = $1 AND fork = $2")
            .bind(n)
            .bind(i64::from(fork))
            .fetch_optional(conn)
            .await?;
    let (attempt, ended) = found.ok_or_else(|| no_fork(run, fork))?;
    Ok(Owner { attempt: crate::codec::attempt(attempt)?, ended })
}

pub(super) async fn reserve(tx: &mut Tx<'_>, run: &RunId, ask: &Ask) -> Result<Reserve> {
    let row = lock_run(tx.conn, run).await?;
    if let Some(current) = owner(tx.conn, row.n, run, ask.fork).await?.fences(ask.attempt)? {
        return Ok(Reserve::Stale { current });
    }
    if row.silent {
        return Ok(Reserve::Paused);
    }
    let before = held(tx.conn, row.n, &ask.request).await?;
    if let Some(held) = &before
        && reservation::again(held, ask)?
    {
        return Ok(Reserve::Granted);
    }
    let mut balance = sums(tx.conn, row.n).await?;
    balance.forks.insert(ask.fork, fork_sums(tx.conn, row.n, ask.fork).await?);
    match balance.judge(ask.fork, ask.worst) {
        Verdict::Short { available, outstanding } => return Ok(Reserve::Short { available, outstanding }),
        Verdict::Granted => {}
    }
    sqlx::query(
        "INSERT INTO reservations (run, request, fork, attempt, amount, state) VALUES ($1, $2, $3, $4, $5, $6)
         ON CONFLICT (run, request) DO UPDATE SET fork = excluded.fork, attempt = excluded.attempt,
             amount = excluded.amount, state = excluded.state",
    )
    .bind(row.n)
    .bind(&ask.request)
    .bind(i64::from(ask.fork))
    .bind(i64::from(ask.attempt.0))
    .bind(int(ask.worst.0))
    .bind(RESERVED)
    .execute(&mut *tx.conn)
    .await?;
    add(tx, row.n, ask.fork, Change { reserved: int(ask.worst.0), spent: 0 }).await?;
    tx.touch();
    Ok(Reserve::Granted)
}

/// Moves the sums of the run and the fork.
async fn add(tx: &mut Tx<'_>, n: i64, fork: ForkNum, change: Change) -> Result<()> {
    sqlx::query(
        "WITH of_run AS (UPDATE runs SET spent = spent + $3, reserved = reserved + $4 WHERE n = $1)
         UPDATE forks SET spent = spent + $3, reserved = reserved + $4 WHERE run = $1 AND fork = $2",
    )
    .bind(n)
    .bind(i64::from(fork))
    .bind(change.spent)
    .bind(change.reserved)
    .execute(&mut *tx.conn)
    .await?;
    Ok(())
}

/// One step of a reservation, decided in [`reservation`].
pub(super) async fn step(tx: &mut Tx<'_>, run: &RunId, request: &str, step: Step) -> Result<()> {
    let n = lock_run(tx.conn, run).await?.n;
    let held = held(tx.conn, n, request).await?.ok_or_else(|| reservation::unknown(run, request))?;
    write(tx, n, request, &held, step).await
}

pub(super) async fn mark_sent(tx: &mut Tx<'_>, run: &RunId, request: &str) -> Result<Sending> {
    let row = lock_run(tx.conn, run).await?;
    let held = held(tx.conn, row.n, request).await?.ok_or_else(|| reservation::unknown(run, request))?;
    let sending = held.may_send(owner(tx.conn, row.n, run, held.fork).await?, row.silent)?;
    if sending == Sending::Go {
        write(tx, row.n, request, &held, Step::Sent).await?;
    }
    Ok(sending)
}

async fn write(tx: &mut Tx<'_>, n: i64, request: &str, held: &Held, step: Step) -> Result<()> {
    let Some((after, change)) = held.step(step, request)? else { return Ok(()) };
    sqlx::query("UPDATE reservations SET amount = $3, state = $4 WHERE run = $1 AND request = $2")
        .bind(n)
        .bind(request)
        .bind(int(after.amount.0))
        .bind(reservation::column(after.state))
        .execute(&mut *tx.conn)
        .await?;
    if change != Change::default() {
        add(tx, n, held.fork, change).await?;
        tx.touch();
    }
    Ok(())
}

/// Attempts up to this one are over: what they left open is settled at its worst case, if it may have been sent, or free.
pub(super) async fn close_up_to(tx: &mut Tx<'_>, n: i64, fork: ForkNum, attempt: Attempt) -> Result<()> {
    let (reserved, sent): (i64, i64) = sqlx::query_as(
        "SELECT coalesce(sum(amount), 0)::bigint, coalesce(sum(amount) FILTER (WHERE state = $4), 0)::bigint
         FROM reservations WHERE run = $1 AND fork = $2 AND attempt <= $3 AND state < 2",
    )
    .bind(n)
    .bind(i64::from(fork))
    .bind(i64::from(attempt.0))
    .bind(SENT)
    .fetch_one(&mut *tx.conn)
    .await?;
    let closed = sqlx::query(
        "UPDATE reservations SET state = CASE state WHEN $4 THEN $5 ELSE $6 END
         WHERE run = $1 AND fork = $2 AND attempt <= $3 AND state < 2",
    )
    .bind(n)
    .bind(i64::from(fork))
    .bind(i64::from(attempt.0))
    .bind(SENT)
    .bind(SETTLED)
    .bind(RELEASED)
    .execute(&mut *tx.conn)
    .await?;
    if closed.rows_affected() > 0 {
        add(tx, n, fork, Change { reserved: -reserved, spent: sent }).await?;
    }
    Ok(())
}

/// In a transaction with one snapshot, so that the sums fit.
pub(super) async fn balance(conn: &mut PgConnection, run: &RunId) -> Result<Balance> {
    let n = run_number(conn, run).await?.ok_or_else(|| no_run(run))?;
    let mut balance = sums(conn, n).await?;
    let found: Vec<(i64, i64, i64)> = sqlx::query_as(
        "SELECT fork, spent, reserved FROM forks WHERE run = $1 AND (spent > 0 OR reserved > 0)",
    )
    .bind(n)
    .fetch_all(conn)
    .await?;
    for (fork, spent, reserved) in found {
        balance.forks.insert(fork_num(fork)?, ForkBalance { spent: usd(spent), reserved: usd(reserved) });
    }
    Ok(balance)
}
