//! Streams and the views that follow from them.

use forkyard_core::view::{EngineKind, ForkView, RunStatus, RunView, SandboxView, View};
use forkyard_core::{ForkNum, RunId, SandboxId};
use rusqlite::types::Value as Sql;
use rusqlite::{Connection, OptionalExtension, Row, params, params_from_iter};

use super::ledger;
use super::writer::Tx;
use crate::codec::{
    EventRow, MAX_ANSWER_BYTES, MAX_POSITION, Page, event_id, fence, id_range, int, kind_range, no_run, over,
    rows, run_id, source, stream_columns, uint,
};
use crate::search::{ended_as, searched};
use crate::{
    Append, AppendJournal, Appended, CreateRun, Created, EventQuery, LeaseToken, NewEvent, Recorded, Result,
    StoreError, StreamId,
};

/// What a write needs to know of its run.
pub(super) struct RunRow {
    pub n: i64,
    pub position: u64,
    /// It is paused, or its user has detached: nothing may be sent for it.
    pub silent: bool,
    /// None while nobody has it.
    pub lease: Option<LeaseToken>,
}

pub(super) fn run_row(conn: &Connection, run: &RunId) -> Result<RunRow> {
    conn.prepare_cached(
        "SELECT n, position, paused OR detached, lease_token, lease_owner IS NOT NULL FROM runs WHERE id = ?1",
    )?
    .query_row([run.as_str()], |r| {
        Ok(RunRow {
            n: r.get(0)?,
            position: uint(r.get(1)?),
            silent: r.get(2)?,
            lease: r.get::<_, bool>(4)?.then_some(uint(r.get(3)?)),
        })
    })
    .optional()?
    .ok_or_else(|| no_run(run))
}

pub(super) fn run_number(conn: &Connection, run: &RunId) -> Result<Option<i64>> {
    Ok(conn
        .prepare_cached("SELECT n FROM runs WHERE id = ?1")?
        .query_row([run.as_str()], |r| r.get(0))
        .optional()?)
}

/// The fork's current attempt.
pub(super) fn attempt(conn: &Connection, n: i64, fork: ForkNum) -> Result<Option<forkyard_core::Attempt>> {
    let found: Option<i64> = conn
        .prepare_cached("SELECT attempt FROM forks WHERE run = ?1 AND fork = ?2")?
        .query_row((n, fork), |r| r.get(0))
        .optional()?;
    found.map(crate::codec::attempt).transpose()
}

pub(super) fn create_run(
    tx: &Tx<'_>,
    new: &CreateRun,
    view: &RunView,
    events: &[String],
    views: &[String],
) -> Result<Created> {
    if let Some(key) = &new.key {
        let made: Option<String> = tx
            .prepare_cached("SELECT id FROM runs WHERE key = ?1")?
            .query_row([key], |r| r.get(0))
            .optional()?;
        if let Some(made) = made {
            return Ok(Created::Existing(run_id(made)?));
        }
    }
    let stream = StreamId::Run(new.run.clone());
    if let Some(n) = run_number(tx, &new.run)? {
        return Err(StoreError::Conflict { expected: 0, actual: length(tx, n, &stream)? });
    }
    tx.prepare_cached(
        "INSERT INTO runs (id, key, live, embedded, paused, detached) VALUES (?1, ?2, 0, 0, 0, 0)",
    )?
    .execute(params![new.run.as_str(), new.key])?;
    let n = tx.last_insert_rowid();
    tx.prepare_cached("INSERT INTO run_views (run, id, live, created_at, view) VALUES (?1, ?2, 0, ?3, '')")?
        .execute(params![n, new.run.as_str(), int(view.created_at.0)])?;
    write_views(tx, n, &new.views, views)?;
    write_events(tx, n, Appended { seq: 0, position: 0 }, &stream, &new.events, events)?;
    tx.touch(&new.run);
    Ok(Created::New)
}

pub(super) fn append(tx: &Tx<'_>, append: &Append, events: &[String], views: &[String]) -> Result<Appended> {
    let run = run_row(tx, append.stream.run())?;
    if run.lease != Some(append.lease) {
        return Err(StoreError::LeaseLost);
    }
    let length = length(tx, run.n, &append.stream)?;
    // Before the fence: what was written before and is written again is known, whichever attempt has the fork by now.
    expect(append.expected, length)?;
    write_views(tx, run.n, &append.views, views)?;
    let at = Appended { seq: length, position: run.position };
    let appended = write_events(tx, run.n, at, &append.stream, &append.events, events)?;
    for command in &append.consume {
        super::inbox::consume(tx, run.n, *command)?;
    }
    tx.touch(append.stream.run());
    Ok(appended)
}

/// Refuses before it writes anything, and reads what it must know from the writer's memory of the journals' heads.
pub(super) fn append_journal(tx: &Tx<'_>, append: &AppendJournal, events: &[String]) -> Result<Appended> {
    let (run, fork) = (&append.run, append.fork);
    let head = tx.heads().journal(tx, run, fork)?;
    fence(append.attempt, head.attempt)?;
    expect(append.expected, head.length)?;
    room(run, head.position, append.events.len())?;
    tx.past_refusal();
    let at = Appended { seq: head.length, position: head.position };
    let stream = StreamId::Journal(run.clone(), fork, append.attempt);
    let at = insert_events(tx, head.n, at, &stream, &append.events, events)?;
    tx.heads().moved(run, fork, at.position, at.seq);
    for message in &append.deliver {
        super::inbox::deliver(tx, head.n, fork, *message)?;
    }
    tx.touch(run);
    Ok(at)
}

pub(super) fn length(conn: &Connection, n: i64, stream: &StreamId) -> Result<u64> {
    let (fork, attempt) = stream_columns(stream);
    let length: Option<i64> = conn
        .prepare_cached(
            "SELECT seq FROM events WHERE run = ?1 AND fork = ?2 AND attempt = ?3 ORDER BY seq DESC LIMIT 1",
        )?
        .query_row((n, fork, attempt), |r| r.get(0))
        .optional()?;
    Ok(uint(length.unwrap_or(0)))
}

fn write_events(
    tx: &Tx<'_>,
    n: i64,
    at: Appended,
    stream: &StreamId,
    events: &[NewEvent],
    texts: &[String],
) -> Result<Appended> {
    room(stream.run(), at.position, events.len())?;
    let at = insert_events(tx, n, at, stream, events, texts)?;
    if !events.is_empty() {
        tx.prepare_cached("UPDATE runs SET position = ?2 WHERE n = ?1")?.execute((n, int(at.position)))?;
    }
    Ok(at)
}

fn expect(expected: u64, actual: u64) -> Result<()> {
    if actual == expected { Ok(()) } else { Err(StoreError::Conflict { expected, actual }) }
}

fn room(run: &RunId, position: u64, events: usize) -> Result<()> {
    if position + events as u64 > MAX_POSITION {
        return Err(StoreError::Invalid(format!("run {run} has no room for more events")));
    }
    Ok(())
}

/// Puts the events at the end of a stream; the run's position is left to the caller.
fn insert_events(
    tx: &Tx<'_>,
    n: i64,
    mut at: Appended,
    stream: &StreamId,
    events: &[NewEvent],
    texts: &[String],
) -> Result<Appended> {
    if events.is_empty() {
        return Ok(at);
    }
    let (fork, attempt) = stream_columns(stream);
    let mut insert = tx.prepare_cached(
        "INSERT INTO events (id, run, fork, attempt, seq, kind, version, at, source, sandbox, data)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11)",
    )?;
    for (event, text) in events.iter().zip(texts) {
        at.seq += 1;
        at.position += 1;
        insert.execute(params![
            event_id(n, at.position),
            n,
            fork,
            attempt,
            int(at.seq),
            event.kind,
            event.version,
            int(event.at.0),
            source(event.source),
            event.sandbox.as_ref().map(SandboxId::as_str),
            text
        ])?;
    }
    Ok(at)
}

fn write_views(tx: &Tx<'_>, n: i64, views: &[View], texts: &[String]) -> Result<()> {
    for (view, text) in views.iter().zip(texts) {
        match view {
            View::Run(view) => write_run(tx, n, view, text)?,
            View::Fork(view) => write_fork(tx, n, view, text)?,
            View::Sandbox(view) => write_sandbox(tx, n, view, text)?,
        }
    }
    Ok(())
}

fn write_run(tx: &Tx<'_>, n: i64, view: &RunView, text: &str) -> Result<()> {
    let live = view.status != RunStatus::Ended;
    let embedded = view.engine == EngineKind::Embedded;
    tx.prepare_cached(
        "UPDATE runs SET live = ?2, embedded = ?3, paused = ?4, detached = ?5, budget_run = ?6, budget_fork = ?7
         WHERE n = ?1",
    )?
    .execute(params![
        n,
        live,
        embedded,
        view.paused,
        view.detached,
        view.limits.run.map(|l| int(l.0)),
        view.limits.fork.map(|l| int(l.0))
    ])?;
    tx.prepare_cached(
        "UPDATE run_views SET live = ?2, created_at = ?3, ended_as = ?4, view = ?5 WHERE run = ?1",
    )?
    .execute(params![n, live, int(view.created_at.0), ended_as(view), text])?;
    write_words(tx, n, view)
}

/// They hardly ever change, and then nothing is written.
pub(super) fn write_words(conn: &Connection, n: i64, view: &RunView) -> Result<()> {
    conn.prepare_cached(
        "INSERT INTO run_words (run, words) VALUES (?1, ?2)
         ON CONFLICT (run) DO UPDATE SET words = excluded.words WHERE words <> excluded.words",
    )?
    .execute(params![n, searched(view)])?;
    Ok(())
}

fn write_fork(tx: &Tx<'_>, n: i64, view: &ForkView, text: &str) -> Result<()> {
    let before = attempt(tx, n, view.fork)?;
    match before {
        None => {
            tx.prepare_cached(
                "INSERT INTO forks (run, fork, attempt, ended, view) VALUES (?1, ?2, ?3, ?4, ?5)",
            )?
            .execute(params![n, view.fork, view.attempt.0, view.lifecycle.is_ended(), text])?;
        }
        Some(current) if view.attempt < current => {
            return Err(StoreError::StaleAttempt { mine: view.attempt, current });
        }
        Some(_) => {
            tx.prepare_cached(
                "UPDATE forks SET attempt = ?3, ended = ?4, view = ?5 WHERE run = ?1 AND fork = ?2",
            )?
            .execute(params![n, view.fork, view.attempt.0, view.lifecycle.is_ended(), text])?;
        }
    }
    match over(before, view) {
        Some(last) => ledger::close_up_to(tx, n, view.fork, last),
        None => Ok(()),
    }
}

pub(super) fn write_sandbox(tx: &Tx<'_>, n: i64, view: &SandboxView, text: &str) -> Result<()> {
    tx.prepare_cached(
        "INSERT OR REPLACE INTO sandboxes (id, run, state, created_at, view) VALUES (?1, ?2, ?3, ?4, ?5)",
    )?
    .execute(params![view.id.as_str(), n, view.state.as_str(), int(view.created_at.0), text])?;
    Ok(())
}

const COLUMNS: &str = "id, fork, attempt, seq, kind, version, at, source, sandbox, data";

fn event_row(r: &Row<'_>) -> rusqlite::Result<EventRow> {
    Ok(EventRow {
        id: r.get(0)?,
        fork: r.get(1)?,
        attempt: r.get(2)?,
        seq: r.get(3)?,
        kind: r.get(4)?,
        version: r.get(5)?,
        at: r.get(6)?,
        source: r.get(7)?,
        sandbox: r.get(8)?,
        data: r.get(9)?,
    })
}

fn select(conn: &Connection, run: &RunId, sql: &str, values: Vec<Sql>, max_bytes: usize) -> Result<Page> {
    let mut select = conn.prepare_cached(sql)?;
    let mut found = select.query(params_from_iter(values))?;
    let (mut events, mut bytes) = (Vec::new(), 0);
    while let Some(row) = found.next()? {
        let row = event_row(row)?;
        bytes += row.data.len();
        if bytes > max_bytes && !events.is_empty() {
            return Ok(Page { events, exhausted: false });
        }
        events.push(row.decode(run)?);
    }
    Ok(Page { events, exhausted: true })
}

pub(super) fn read_stream(
    conn: &Connection,
    stream: &StreamId,
    after: u64,
    limit: usize,
) -> Result<Vec<Recorded>> {
    let Some(n) = run_number(conn, stream.run())? else { return Ok(Vec::new()) };
    let (fork, attempt) = stream_columns(stream);
    let end = length(conn, n, stream)?;
    let sql = format!(
        "SELECT {COLUMNS} FROM events WHERE run = ?1 AND fork = ?2 AND attempt = ?3 AND seq > ?4 ORDER BY seq LIMIT ?5"
    );
    let values = [n, fork, attempt, int(after), rows(limit)].map(Sql::Integer).to_vec();
    let page = select(conn, stream.run(), &sql, values, MAX_ANSWER_BYTES)?;
    page.unbroken(stream, |e| e.seq, after, end, rows(limit))
}

pub(super) fn read_journals(conn: &Connection, run: &RunId, fork: ForkNum) -> Result<Vec<Recorded>> {
    let Some(n) = run_number(conn, run)? else { return Ok(Vec::new()) };
    let attempts: Vec<(i64, i64)> = conn
        .prepare_cached(
            "SELECT attempt, max(seq) FROM events WHERE run = ?1 AND fork = ?2 AND attempt >= 0
             GROUP BY attempt ORDER BY attempt",
        )?
        .query_map((n, fork), |r| Ok((r.get(0)?, r.get(1)?)))?
        .collect::<rusqlite::Result<_>>()?;
    let sql =
        format!("SELECT {COLUMNS} FROM events WHERE run = ?1 AND fork = ?2 AND attempt = ?3 ORDER BY seq");
    let mut all = Vec::new();
    for (attempt, length) in attempts {
        let values = [n, i64::from(fork), attempt].map(Sql::Integer).to_vec();
        let page = select(conn, run, &sql, values, usize::MAX)?;
        let stream = StreamId::Journal(run.clone(), fork, crate::codec::attempt(attempt)?);
        all.extend(page.unbroken(&stream, |e| e.seq, 0, uint(length), i64::MAX)?);
    }
    Ok(all)
}

pub(super) fn read_run(conn: &Connection, run: &RunId, query: &EventQuery) -> Result<Vec<Recorded>> {
    let Some(n) = run_number(conn, run)? else { return Ok(Vec::new()) };
    let (from, to) = id_range(n, query.after, query.before);
    let mut sql = format!("SELECT {COLUMNS} FROM events WHERE id BETWEEN ?1 AND ?2");
    let mut values = vec![Sql::Integer(from), Sql::Integer(to)];
    filter(&mut sql, &mut values, query);
    order(&mut sql, &mut values, query);
    let page = select(conn, run, &sql, values, MAX_ANSWER_BYTES)?;
    match query.last_of_all(last_position(conn, run)?) {
        Some(end) => page.unbroken(run, |e| e.position, query.after, end, rows(query.limit)),
        None => Ok(page.events),
    }
}

pub(super) fn read_sandbox(
    conn: &Connection,
    sandbox: &SandboxId,
    query: &EventQuery,
) -> Result<Vec<Recorded>> {
    // A sandbox is of one run.
    let owner: Option<(i64, String)> = conn
        .prepare_cached(
            "SELECT n, id FROM runs WHERE n = (SELECT id >> 32 FROM events WHERE sandbox = ?1 ORDER BY id DESC LIMIT 1)",
        )?
        .query_row([sandbox.as_str()], |r| Ok((r.get(0)?, r.get(1)?)))
        .optional()?;
    let Some((n, run)) = owner else { return Ok(Vec::new()) };
    let (from, to) = id_range(n, query.after, query.before);
    let mut sql = format!("SELECT {COLUMNS} FROM events WHERE id BETWEEN ?1 AND ?2 AND sandbox = ?3");
    let mut values = vec![Sql::Integer(from), Sql::Integer(to), Sql::Text(sandbox.as_str().into())];
    filter(&mut sql, &mut values, query);
    order(&mut sql, &mut values, query);
    Ok(select(conn, &run_id(run)?, &sql, values, MAX_ANSWER_BYTES)?.events)
}

pub(super) fn count_sandbox(conn: &Connection, sandbox: &SandboxId, query: &EventQuery) -> Result<u64> {
    let mut sql = "SELECT count(*) FROM events WHERE sandbox = ?1".to_string();
    let mut values = vec![Sql::Text(sandbox.as_str().into())];
    filter(&mut sql, &mut values, query);
    let found: i64 = conn.prepare_cached(&sql)?.query_row(params_from_iter(values), |r| r.get(0))?;
    Ok(uint(found))
}

/// Which events a query is about.
fn filter(sql: &mut String, values: &mut Vec<Sql>, query: &EventQuery) {
    let mut bind = |value: Sql| {
        values.push(value);
        format!("?{}", values.len())
    };
    if let Some(fork) = query.fork {
        sql.push_str(&format!(" AND fork = {}", bind(Sql::Integer(i64::from(fork)))));
    }
    if !query.kinds.is_empty() {
        let any: Vec<String> = query
            .kinds
            .iter()
            .map(|kind| match kind_range(kind) {
                Some((from, to)) => {
                    format!("(kind >= {} AND kind < {})", bind(Sql::Text(from)), bind(Sql::Text(to)))
                }
                None => format!("kind = {}", bind(Sql::Text(kind.clone()))),
            })
            .collect();
        sql.push_str(&format!(" AND ({})", any.join(" OR ")));
    }
}

/// In which order, and how many.
fn order(sql: &mut String, values: &mut Vec<Sql>, query: &EventQuery) {
    let order = if query.newest_first { "DESC" } else { "ASC" };
    let (limit, skip) = (values.len() + 1, values.len() + 2);
    values.extend([Sql::Integer(rows(query.limit)), Sql::Integer(int(query.skip as u64))]);
    sql.push_str(&format!(" ORDER BY id {order} LIMIT ?{limit} OFFSET ?{skip}"));
}

pub(super) fn last_position(conn: &Connection, run: &RunId) -> Result<u64> {
    let found: Option<i64> = conn
        .prepare_cached("SELECT position FROM runs WHERE id = ?1")?
        .query_row([run.as_str()], |r| r.get(0))
        .optional()?;
    Ok(uint(found.unwrap_or(0)))
}
