use forkyard_core::{ForkNum, RunId, Timestamp};
use rusqlite::{Connection, OptionalExtension, params};

use super::log::{attempt, run_number, run_row};
use super::writer::Tx;
use crate::codec::{int, json, no_fork, uint};
use crate::{
    CommandId, MAX_PENDING, MessageId, NewCommand, NewMessage, Result, StoreError, StoredCommand,
    StoredMessage,
};

pub(super) fn put_command(tx: &Tx<'_>, run: &RunId, new: &NewCommand, text: &str) -> Result<CommandId> {
    let row = run_row(tx, run)?;
    if let Some(key) = &new.key {
        let found: Option<i64> = tx
            .prepare_cached("SELECT id FROM commands WHERE run = ?1 AND key = ?2")?
            .query_row(params![row.n, key], |r| r.get(0))
            .optional()?;
        if let Some(id) = found {
            return Ok(uint(id));
        }
    }
    let waiting: u32 = tx
        .prepare_cached("SELECT count(*) FROM commands WHERE run = ?1 AND pending = 1")?
        .query_row([row.n], |r| r.get(0))?;
    if waiting as usize >= MAX_PENDING {
        return Err(StoreError::Invalid(format!("{waiting} commands wait for run {run} already")));
    }
    tx.prepare_cached("INSERT INTO commands (run, key, at, data) VALUES (?1, ?2, ?3, ?4)")?
        .execute(params![row.n, new.key, int(new.at.0), text])?;
    tx.touch(run);
    Ok(uint(tx.last_insert_rowid()))
}

pub(super) fn pending_commands(conn: &Connection, run: &RunId) -> Result<Vec<StoredCommand>> {
    let Some(n) = run_number(conn, run)? else { return Ok(Vec::new()) };
    let mut select =
        conn.prepare_cached("SELECT id, at, data FROM commands WHERE run = ?1 AND pending = 1 ORDER BY id")?;
    let mut rows = select.query([n])?;
    let mut found = Vec::new();
    while let Some(r) = rows.next()? {
        let data = json("a command", r.get_ref(2)?.as_str().map_err(rusqlite::Error::from)?)?;
        found.push(StoredCommand { id: uint(r.get(0)?), at: Timestamp(uint(r.get(1)?)), data });
    }
    Ok(found)
}

/// What was answered before stays answered.
pub(super) fn consume(tx: &Tx<'_>, n: i64, command: CommandId) -> Result<()> {
    tx.prepare_cached("DELETE FROM commands WHERE id = ?2 AND run = ?1 AND key IS NULL")?
        .execute((n, int(command)))?;
    tx.prepare_cached("UPDATE commands SET pending = 0, data = '' WHERE id = ?2 AND run = ?1")?
        .execute((n, int(command)))?;
    Ok(())
}

pub(super) fn put_message(
    tx: &Tx<'_>,
    run: &RunId,
    fork: ForkNum,
    new: &NewMessage,
    text: &str,
) -> Result<MessageId> {
    let row = run_row(tx, run)?;
    attempt(tx, row.n, fork)?.ok_or_else(|| no_fork(run, fork))?;
    if let Some(key) = &new.key {
        let found: Option<i64> = tx
            .prepare_cached("SELECT id FROM messages WHERE run = ?1 AND fork = ?2 AND key = ?3")?
            .query_row(params![row.n, fork, key], |r| r.get(0))
            .optional()?;
        if let Some(id) = found {
            return Ok(uint(id));
        }
    }
    let waiting: u32 = tx
        .prepare_cached("SELECT count(*) FROM messages WHERE run = ?1 AND fork = ?2 AND pending = 1")?
        .query_row((row.n, fork), |r| r.get(0))?;
    if waiting as usize >= MAX_PENDING {
        return Err(StoreError::Invalid(format!("{waiting} messages wait for fork {run}/{fork} already")));
    }
    tx.prepare_cached("INSERT INTO messages (run, fork, key, at, data) VALUES (?1, ?2, ?3, ?4, ?5)")?
        .execute(params![row.n, fork, new.key, int(new.at.0), text])?;
    tx.touch(run);
    Ok(uint(tx.last_insert_rowid()))
}

pub(super) fn pending_messages(conn: &Connection, run: &RunId, fork: ForkNum) -> Result<Vec<StoredMessage>> {
    let Some(n) = run_number(conn, run)? else { return Ok(Vec::new()) };
    let mut select = conn.prepare_cached(
        "SELECT id, at, data FROM messages WHERE run = ?1 AND fork = ?2 AND pending = 1 ORDER BY id",
    )?;
    let mut rows = select.query((n, fork))?;
    let mut found = Vec::new();
    while let Some(r) = rows.next()? {
        let data = json("a message", r.get_ref(2)?.as_str().map_err(rusqlite::Error::from)?)?;
        found.push(StoredMessage { id: uint(r.get(0)?), at: Timestamp(uint(r.get(1)?)), data });
    }
    Ok(found)
}

/// What was delivered before stays delivered.
pub(super) fn deliver(tx: &Tx<'_>, n: i64, fork: ForkNum, message: MessageId) -> Result<()> {
    tx.prepare_cached("DELETE FROM messages WHERE id = ?3 AND run = ?1 AND fork = ?2 AND key IS NULL")?
        .execute((n, fork, int(message)))?;
    tx.prepare_cached("UPDATE messages SET pending = 0, data = '' WHERE id = ?3 AND run = ?1 AND fork = ?2")?
        .execute((n, fork, int(message)))?;
    Ok(())
}
