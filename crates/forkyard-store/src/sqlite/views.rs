use forkyard_core::view::{ForkView, RunView, SandboxState, SandboxView};
use forkyard_core::{ForkNum, RunId, SandboxId, Timestamp};
use rusqlite::types::Value as Sql;
use rusqlite::{Connection, OptionalExtension, params, params_from_iter};

use super::clock::Clock;
use super::log::{run_number, write_sandbox};
use super::writer::{Tx, prune_changes};
use crate::codec::{blob_range, int, json, no_run, rows, uint};
use crate::search::outcome;
use crate::{Result, RunCounts, RunQuery, SandboxQuery, StoreError, Words};

pub(super) fn run(conn: &Connection, run: &RunId) -> Result<Option<RunView>> {
    let text: Option<String> = conn
        .prepare_cached("SELECT view FROM run_views WHERE run = (SELECT n FROM runs WHERE id = ?1)")?
        .query_row([run.as_str()], |r| r.get(0))
        .optional()?;
    text.map(|t| json("the view of a run", &t)).transpose()
}

pub(super) fn runs(conn: &Connection, query: &RunQuery) -> Result<Vec<RunView>> {
    let mut sql = "SELECT view FROM run_views WHERE 1".to_string();
    let mut values = vec![Sql::Integer(rows(query.limit))];
    if query.live {
        sql.push_str(" AND live = 1");
    }
    if !query.outcomes.is_empty() {
        let any: Vec<String> = query.outcomes.iter().map(|o| format!("'{}'", outcome(*o))).collect();
        sql.push_str(&format!(" AND ended_as IN ({})", any.join(", ")));
    }
    if let Some((at, id)) = &query.before {
        sql.push_str(" AND (created_at, id) < (?2, ?3)");
        values.extend([Sql::Integer(int(at.0)), Sql::Text(id.as_str().into())]);
    }
    with_words(&mut sql, &mut values, &query.words);
    sql.push_str(" ORDER BY created_at DESC, id DESC LIMIT ?1");
    collect(conn, &sql, values, "the view of a run")
}

/// Only the small rows of words are read until a run is found.
fn with_words(sql: &mut String, values: &mut Vec<Sql>, words: &Words) {
    for word in words.iter() {
        values.push(Sql::Text(word.into()));
        sql.push_str(&format!(
            " AND (SELECT instr(words, ?{}) FROM run_words WHERE run_words.run = run_views.run)",
            values.len()
        ));
    }
}

pub(super) fn count_runs(conn: &Connection, words: &Words) -> Result<RunCounts> {
    let mut sql = "SELECT ended_as, count(*) FROM run_views WHERE 1".to_string();
    let mut values = Vec::new();
    with_words(&mut sql, &mut values, words);
    sql.push_str(" GROUP BY ended_as");
    let mut counts = RunCounts::default();
    let mut select = conn.prepare_cached(&sql)?;
    let mut found = select.query(params_from_iter(values))?;
    while let Some(row) = found.next()? {
        counts.add(row.get::<_, Option<String>>(0)?.as_deref(), uint(row.get(1)?));
    }
    Ok(counts)
}

fn collect<T: serde::de::DeserializeOwned>(
    conn: &Connection,
    sql: &str,
    values: Vec<Sql>,
    what: &str,
) -> Result<Vec<T>> {
    let mut select = conn.prepare_cached(sql)?;
    let found = select.query_map(params_from_iter(values), |r| r.get::<_, String>(0))?;
    found.map(|text| json(what, &text?)).collect()
}

pub(super) fn forks(conn: &Connection, run: &RunId) -> Result<Vec<ForkView>> {
    let Some(n) = run_number(conn, run)? else { return Ok(Vec::new()) };
    let sql = "SELECT view FROM forks WHERE run = ?1 ORDER BY fork";
    collect(conn, sql, vec![Sql::Integer(n)], "the view of a fork")
}

pub(super) fn fork(conn: &Connection, run: &RunId, fork: ForkNum) -> Result<Option<ForkView>> {
    let text: Option<String> = conn
        .prepare_cached(
            "SELECT view FROM forks WHERE run = (SELECT n FROM runs WHERE id = ?1) AND fork = ?2",
        )?
        .query_row(params![run.as_str(), fork], |r| r.get(0))
        .optional()?;
    text.map(|t| json("the view of a fork", &t)).transpose()
}

pub(super) fn sandboxes(conn: &Connection, query: &SandboxQuery) -> Result<Vec<SandboxView>> {
    let mut values = vec![Sql::Integer(rows(query.limit))];
    let mut sql = "SELECT view FROM sandboxes WHERE 1".to_string();
    if let Some(run) = &query.run {
        let Some(n) = run_number(conn, run)? else { return Ok(Vec::new()) };
        values.push(Sql::Integer(n));
        sql.push_str(&format!(" AND run = ?{}", values.len()));
    }
    if !query.states.is_empty() {
        let states: Vec<String> = query.states.iter().map(|s| format!("'{}'", s.as_str())).collect();
        sql.push_str(&format!(" AND state IN ({})", states.join(", ")));
    }
    sql.push_str(" ORDER BY created_at, id LIMIT ?1");
    collect(conn, &sql, values, "the view of a sandbox")
}

pub(super) fn sandbox_destroyed(tx: &Tx<'_>, sandbox: &SandboxId) -> Result<()> {
    let found: Option<(i64, String)> = tx
        .prepare_cached("SELECT run, view FROM sandboxes WHERE id = ?1")?
        .query_row([sandbox.as_str()], |r| Ok((r.get(0)?, r.get(1)?)))
        .optional()?;
    let (n, text) = found.ok_or_else(|| StoreError::NotFound { what: format!("sandbox {sandbox}") })?;
    let mut view: SandboxView = json("the view of a sandbox", &text)?;
    if view.state == SandboxState::Destroyed {
        return Ok(());
    }
    view.state = SandboxState::Destroyed;
    view.updated_at = Timestamp(uint(Clock::wall_ms()));
    let text = serde_json::to_string(&view).map_err(|e| StoreError::Invalid(e.to_string()))?;
    write_sandbox(tx, n, &view, &text)?;
    tx.touch(&view.run);
    Ok(())
}

pub(super) fn journal_len(conn: &Connection, run: &RunId, fork: ForkNum) -> Result<u64> {
    let sum: i64 = conn
        .prepare_cached(
            "SELECT count(*) FROM events
             WHERE run = (SELECT n FROM runs WHERE id = ?1) AND fork = ?2 AND attempt >= 0",
        )?
        .query_row(params![run.as_str(), fork], |r| r.get(0))?;
    Ok(uint(sum))
}

pub(super) fn delete_run(tx: &Tx<'_>, run: &RunId) -> Result<()> {
    let found: Option<(i64, bool)> = tx
        .prepare_cached("SELECT n, live FROM runs WHERE id = ?1")?
        .query_row([run.as_str()], |r| Ok((r.get(0)?, r.get(1)?)))
        .optional()?;
    let (n, live) = found.ok_or_else(|| no_run(run))?;
    if live {
        return Err(StoreError::Invalid(format!("run {run} has not ended: cancel it first")));
    }
    let owed: Option<String> = tx
        .prepare_cached(
            "SELECT id FROM sandboxes WHERE run = ?1 AND state IN ('requested', 'live', 'owed') LIMIT 1",
        )?
        .query_row([n], |r| r.get(0))
        .optional()?;
    if let Some(owed) = owed {
        return Err(StoreError::Invalid(format!(
            "run {run} can't be deleted yet: sandbox {owed} still has to be destroyed"
        )));
    }
    for table in
        ["run_views", "run_words", "forks", "sandboxes", "events", "commands", "messages", "reservations"]
    {
        tx.execute(&format!("DELETE FROM {table} WHERE run = ?1"), [n])?;
    }
    let (from, to) = blob_range(run);
    tx.execute("DELETE FROM blobs WHERE key >= ?1 AND key < ?2", (from, to))?;
    tx.execute("DELETE FROM runs WHERE n = ?1", [n])?;
    tx.touch(run);
    prune_changes(tx)
}

pub(super) fn put_blob(tx: &Tx<'_>, key: &str, data: &[u8]) -> Result<()> {
    tx.prepare_cached("INSERT OR REPLACE INTO blobs (key, data) VALUES (?1, ?2)")?.execute((key, data))?;
    Ok(())
}

pub(super) fn blob(conn: &Connection, key: &str) -> Result<Option<Vec<u8>>> {
    Ok(conn
        .prepare_cached("SELECT data FROM blobs WHERE key = ?1")?
        .query_row([key], |r| r.get(0))
        .optional()?)
}

pub(super) fn delete_blob(tx: &Tx<'_>, key: &str) -> Result<()> {
    tx.prepare_cached("DELETE FROM blobs WHERE key = ?1")?.execute([key])?;
    Ok(())
}

pub(super) fn identity(conn: &Connection) -> Result<String> {
    Ok(conn.prepare_cached("SELECT value FROM meta WHERE name = 'identity'")?.query_row([], |r| r.get(0))?)
}
