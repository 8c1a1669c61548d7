use forkyard_core::{ForkNum, RunId, Timestamp};
use sqlx::PgConnection;

use super::batch::Tx;
use super::log::{attempt, lock_run, run_number};
use crate::codec::{int, json, no_fork, uint};
use crate::{
    CommandId, MAX_PENDING, MessageId, NewCommand, NewMessage, Result, StoreError, StoredCommand,
    StoredMessage,
};

pub(super) async fn put_command(
    tx: &mut Tx<'_>,
    run: &RunId,
    new: &NewCommand,
    text: &str,
) -> Result<CommandId> {
    let row = lock_run(tx.conn, run).await?;
    if let Some(key) = &new.key {
        let found: Option<i64> = sqlx::query_scalar("SELECT id FROM commands WHERE run = $1 AND key = $2")
            .bind(row.n)
            .bind(key)
            .fetch_optional(&mut *tx.conn)
            .await?;
        if let Some(id) = found {
            return Ok(uint(id));
        }
    }
    let waiting: i64 = sqlx::query_scalar("SELECT count(*) FROM commands WHERE run = $1 AND pending")
        .bind(row.n)
        .fetch_one(&mut *tx.conn)
        .await?;
    if uint(waiting) as usize >= MAX_PENDING {
        return Err(StoreError::Invalid(format!("{waiting} commands wait for run {run} already")));
    }
    let id: i64 =
        sqlx::query_scalar("INSERT INTO commands (run, key, at, data) VALUES ($1, $2, $3, $4) RETURNING id")
            .bind(row.n)
            .bind(&new.key)
            .bind(int(new.at.0))
            .bind(text)
            .fetch_one(&mut *tx.conn)
            .await?;
    tx.touch();
    Ok(uint(id))
}

pub(super) async fn pending_commands(conn: &mut PgConnection, run: &RunId) -> Result<Vec<StoredCommand>> {
    let Some(n) = run_number(conn, run).await? else { return Ok(Vec::new()) };
    let found: Vec<(i64, i64, String)> =
        sqlx::query_as("SELECT id, at, data FROM commands WHERE run = $1 AND pending ORDER BY id")
            .bind(n)
            .fetch_all(conn)
            .await?;
    let stored = |(id, at, text): (i64, i64, String)| {
        Ok(StoredCommand { id: uint(id), at: Timestamp(uint(at)), data: json("a command", &text)? })
    };
    found.into_iter().map(stored).collect()
}

/// What was answered before stays answered.
pub(super) async fn consume(tx: &mut Tx<'_>, n: i64, commands: &[CommandId]) -> Result<()> {
    if commands.is_empty() {
        return Ok(());
    }
    sqlx::query(
        "WITH forgotten AS (DELETE FROM commands WHERE run = $1 AND id = ANY($2) AND key IS NULL)
         UPDATE commands SET pending = false, data = '' WHERE run = $1 AND id = ANY($2) AND key IS NOT NULL",
    )
    .bind(n)
    .bind(commands.iter().map(|id| int(*id)).collect::<Vec<_>>())
    .execute(&mut *tx.conn)
    .await?;
    Ok(())
}

pub(super) async fn put_message(
    tx: &mut Tx<'_>,
    run: &RunId,
    fork: ForkNum,
    new: &NewMessage,
    text: &str,
) -> Result<MessageId> {
    let row = lock_run(tx.conn, run).await?;
    attempt(tx.conn, row.n, fork).await?.ok_or_else(|| no_fork(run, fork))?;
    let of = i64::from(fork);
    if let Some(key) = &new.key {
        let found: Option<i64> =
            sqlx::query_scalar("SELECT id FROM messages WHERE run = $1 AND fork = $2 AND key = $3")
                .bind(row.n)
                .bind(of)
                .bind(key)
                .fetch_optional(&mut *tx.conn)
                .await?;
        if let Some(id) = found {
            return Ok(uint(id));
        }
    }
    let waiting: i64 =
        sqlx::query_scalar("SELECT count(*) FROM messages WHERE run = $1 AND fork = $2 AND pending")
            .bind(row.n)
            .bind(of)
            .fetch_one(&mut *tx.conn)
            .await?;
    if uint(waiting) as usize >= MAX_PENDING {
        return Err(StoreError::Invalid(format!("{waiting} messages wait for fork {run}/{fork} already")));
    }
    let id: i64 = sqlx::query_scalar(
        "INSERT INTO messages (run, fork, key, at, data) VALUES ($1, $2, $3, $4, $5) RETURNING id",
    )
    .bind(row.n)
    .bind(of)
    .bind(&new.key)
    .bind(int(new.at.0))
    .bind(text)
    .fetch_one(&mut *tx.conn)
    .await?;
    tx.touch();
    Ok(uint(id))
}

pub(super) async fn pending_messages(
    conn: &mut PgConnection,
    run: &RunId,
    fork: ForkNum,
) -> Result<Vec<StoredMessage>> {
    let Some(n) = run_number(conn, run).await? else { return Ok(Vec::new()) };
    let found: Vec<(i64, i64, String)> = sqlx::query_as(
        "SELECT id, at, data FROM messages WHERE run = $1 AND fork = $2 AND pending ORDER BY id",
    )
    .bind(n)
    .bind(i64::from(fork))
    .fetch_all(conn)
    .await?;
    let stored = |(id, at, text): (i64, i64, String)| {
        Ok(StoredMessage { id: uint(id), at: Timestamp(uint(at)), data: json("a message", &text)? })
    };
    found.into_iter().map(stored).collect()
}

/// What was delivered before stays delivered.
pub(super) async fn deliver(tx: &mut Tx<'_>, n: i64, fork: ForkNum, messages: &[MessageId]) -> Result<()> {
    if messages.is_empty() {
        return Ok(());
    }
    sqlx::query(
        "WITH forgotten AS (DELETE FROM messages WHERE run = $1 AND fork = $3 AND id = ANY($2) AND key IS NULL)
         UPDATE messages SET pending = false, data = ''
         WHERE run = $1 AND fork = $3 AND id = ANY($2) AND key IS NOT NULL",
    )
    .bind(n)
    .bind(messages.iter().map(|id| int(*id)).collect::<Vec<_>>())
    .bind(i64::from(fork))
    .execute(&mut *tx.conn)
    .await?;
    Ok(())
}
