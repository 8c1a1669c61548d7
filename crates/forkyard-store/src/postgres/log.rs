//! Streams and the views that follow from them.

use forkyard_core::view::{EngineKind, ForkView, RunStatus, RunView, SandboxView, View};
use forkyard_core::{Attempt, ForkNum, RunId, SandboxId};
use futures::TryStreamExt;
use sqlx::postgres::{PgArguments, PgRow};
use sqlx::{AssertSqlSafe, Executor, PgConnection, Postgres, QueryBuilder, Row};

use super::batch::Tx;
use super::ledger;
use crate::codec::{
    EventRow, MAX_ANSWER_BYTES, MAX_POSITION, POSITION_BITS, Page, event_id, fence, id_range, int,
    kind_range, no_fork, no_run, over, rows, run_id, source, stream_columns, uint,
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

/// Locks the run's row: from here to the commit nobody else writes to the run. What is read of the run before is not to
/// be trusted, so this comes first.
pub(super) async fn lock_run(conn: &mut PgConnection, run: &RunId) -> Result<RunRow> {
    let found: Option<(i64, i64, bool, i64, bool)> = sqlx::query_as(
        "SELECT n, position, paused OR detached, lease_token, lease_owner IS NOT NULL FROM runs WHERE id = $1 FOR UPDATE",
    )
    .bind(run.as_str())
    .fetch_optional(conn)
    .await?;
    let (n, position, silent, token, held) = found.ok_or_else(|| no_run(run))?;
    Ok(RunRow { n, position: uint(position), silent, lease: held.then_some(uint(token)) })
}

pub(super) async fn run_number(conn: &mut PgConnection, run: &RunId) -> Result<Option<i64>> {
    Ok(sqlx::query_scalar("SELECT n FROM runs WHERE id = $1").bind(run.as_str()).fetch_optional(conn).await?)
}

/// The fork's current attempt.
pub(super) async fn attempt(conn: &mut PgConnection, n: i64, fork: ForkNum) -> Result<Option<Attempt>> {
    let found: Option<i64> = sqlx::query_scalar("SELECT attempt FROM forks WHERE run = $1 AND fork = $2")
        .bind(n)
        .bind(i64::from(fork))
        .fetch_optional(conn)
        .await?;
    found.map(crate::codec::attempt).transpose()
}

pub(super) async fn create_run(
    tx: &mut Tx<'_>,
    new: &CreateRun,
    view: &RunView,
    events: &[String],
    views: &[String],
) -> Result<Created> {
    let made: Option<i64> = sqlx::query_scalar(
        "INSERT INTO runs (id, key, live, embedded, paused, detached) VALUES ($1, $2, false, false, false, false)
         ON CONFLICT DO NOTHING RETURNING n",
    )
    .bind(new.run.as_str())
    .bind(&new.key)
    .fetch_optional(&mut *tx.conn)
    .await?;
    let stream = StreamId::Run(new.run.clone());
    let Some(n) = made else {
        let by_key: Option<String> = sqlx::query_scalar("SELECT id FROM runs WHERE key = $1")
            .bind(&new.key)
            .fetch_optional(&mut *tx.conn)
            .await?;
        return match by_key {
            Some(id) => Ok(Created::Existing(run_id(id)?)),
            None => {
                let n = run_number(tx.conn, &new.run).await?.ok_or_else(|| no_run(&new.run))?;
                Err(StoreError::Conflict { expected: 0, actual: length(tx.conn, n, &stream).await? })
            }
        };
    };
    sqlx::query("INSERT INTO run_views (run, id, live, created_at, view) VALUES ($1, $2, false, $3, '')")
        .bind(n)
        .bind(new.run.as_str())
        .bind(int(view.created_at.0))
        .execute(&mut *tx.conn)
        .await?;
    write_views(tx, n, &new.views, views).await?;
    write_events(tx, n, Appended { seq: 0, position: 0 }, &stream, &new.events, events).await?;
    tx.touch();
    Ok(Created::New)
}

pub(super) async fn append(
    tx: &mut Tx<'_>,
    append: &Append,
    events: &[String],
    views: &[String],
) -> Result<Appended> {
    let run = lock_run(tx.conn, append.stream.run()).await?;
    if run.lease != Some(append.lease) {
        return Err(StoreError::LeaseLost);
    }
    // Before the fence: what was written before and is written again is known, whichever attempt has the fork by now.
    let seq = expect(tx, run.n, &append.stream, append.expected).await?;
    write_views(tx, run.n, &append.views, views).await?;
    let at = Appended { seq, position: run.position };
    let appended = write_events(tx, run.n, at, &append.stream, &append.events, events).await?;
    super::inbox::consume(tx, run.n, &append.consume).await?;
    tx.touch();
    Ok(appended)
}

pub(super) async fn append_journal(
    tx: &mut Tx<'_>,
    append: &AppendJournal,
    events: &[String],
) -> Result<Appended> {
    let run = lock_run(tx.conn, &append.run).await?;
    let current =
        attempt(tx.conn, run.n, append.fork).await?.ok_or_else(|| no_fork(&append.run, append.fork))?;
    fence(append.attempt, current)?;
    let stream = StreamId::Journal(append.run.clone(), append.fork, append.attempt);
    let seq = expect(tx, run.n, &stream, append.expected).await?;
    let at = Appended { seq, position: run.position };
    let appended = write_events(tx, run.n, at, &stream, &append.events, events).await?;
    super::inbox::deliver(tx, run.n, append.fork, &append.deliver).await?;
    tx.touch();
    Ok(appended)
}

async fn length(conn: &mut PgConnection, n: i64, stream: &StreamId) -> Result<u64> {
    let (fork, attempt) = stream_columns(stream);
    let length: Option<i64> =
        sqlx::query_scalar("SELECT length FROM streams WHERE run = $1 AND fork = $2 AND attempt = $3")
            .bind(n)
            .bind(fork)
            .bind(attempt)
            .fetch_optional(conn)
            .await?;
    Ok(uint(length.unwrap_or(0)))
}

/// The length of the stream, if it is what the caller thought.
async fn expect(tx: &mut Tx<'_>, n: i64, stream: &StreamId, expected: u64) -> Result<u64> {
    let actual = length(tx.conn, n, stream).await?;
    if actual == expected { Ok(actual) } else { Err(StoreError::Conflict { expected, actual }) }
}

async fn write_events(
    tx: &mut Tx<'_>,
    n: i64,
    at: Appended,
    stream: &StreamId,
    events: &[NewEvent],
    texts: &[String],
) -> Result<Appended> {
    let Appended { seq: actual, position } = at;
    if events.is_empty() {
        return Ok(at);
    }
    let count = events.len() as u64;
    if position + count > MAX_POSITION {
        return Err(StoreError::Invalid(format!("run {} has no room for more events", stream.run())));
    }
    let (fork, attempt) = stream_columns(stream);
    let done = Appended { seq: actual + count, position: position + count };
    // One statement for all: events, the stream's length, the run's position.
    sqlx::query(
        "WITH written AS (
             INSERT INTO events (id, run, fork, attempt, seq, kind, version, at, source, sandbox, data)
             SELECT $1 + i, $2, $3, $4, $5 + i, kind, version, at, source, sandbox, data
             FROM unnest($6::text[], $7::bigint[], $8::bigint[], $9::text[], $10::text[], $11::text[])
                  WITH ORDINALITY AS e (kind, version, at, source, sandbox, data, i)
         ), grown AS (
             INSERT INTO streams (run, fork, attempt, length) VALUES ($2, $3, $4, $12)
             ON CONFLICT (run, fork, attempt) DO UPDATE SET length = excluded.length
         )
         UPDATE runs SET position = $13 WHERE n = $2",
    )
    .bind(event_id(n, position))
    .bind(n)
    .bind(fork)
    .bind(attempt)
    .bind(int(actual))
    .bind(events.iter().map(|e| e.kind.as_str()).collect::<Vec<_>>())
    .bind(events.iter().map(|e| i64::from(e.version)).collect::<Vec<_>>())
    .bind(events.iter().map(|e| int(e.at.0)).collect::<Vec<_>>())
    .bind(events.iter().map(|e| source(e.source)).collect::<Vec<_>>())
    .bind(events.iter().map(|e| e.sandbox.as_ref().map(SandboxId::as_str)).collect::<Vec<_>>())
    .bind(texts)
    .bind(int(done.seq))
    .bind(int(done.position))
    .execute(&mut *tx.conn)
    .await?;
    Ok(done)
}

async fn write_views(tx: &mut Tx<'_>, n: i64, views: &[View], texts: &[String]) -> Result<()> {
    for (view, text) in views.iter().zip(texts) {
        match view {
            View::Run(view) => write_run(tx, n, view, text).await?,
            View::Fork(view) => write_fork(tx, n, view, text).await?,
            View::Sandbox(view) => write_sandbox(tx, n, view, text).await?,
        }
    }
    Ok(())
}

async fn write_run(tx: &mut Tx<'_>, n: i64, view: &RunView, text: &str) -> Result<()> {
    sqlx::query(
        "WITH small AS (
             UPDATE runs SET live = $2, embedded = $3, paused = $4, detached = $5, budget_run = $6, budget_fork = $7
             WHERE n = $1
         )
         UPDATE run_views SET live = $2, created_at = $8, view = $9, ended_as = $10 WHERE run = $1",
    )
    .bind(n)
    .bind(view.status != RunStatus::Ended)
    .bind(view.engine == EngineKind::Embedded)
    .bind(view.paused)
    .bind(view.detached)
    .bind(view.limits.run.map(|l| int(l.0)))
    .bind(view.limits.fork.map(|l| int(l.0)))
    .bind(int(view.created_at.0))
    .bind(text)
    .bind(ended_as(view))
    .execute(&mut *tx.conn)
    .await?;
    write_words(tx.conn, n, view).await
}

/// They hardly ever change, and then nothing is written.
pub(super) async fn write_words(conn: &mut PgConnection, n: i64, view: &RunView) -> Result<()> {
    sqlx::query(
        "INSERT INTO run_words (run, words) VALUES ($1, $2)
         ON CONFLICT (run) DO UPDATE SET words = excluded.words WHERE run_words.words <> excluded.words",
    )
    .bind(n)
    .bind(searched(view))
    .execute(conn)
    .await?;
    Ok(())
}

async fn write_fork(tx: &mut Tx<'_>, n: i64, view: &ForkView, text: &str) -> Result<()> {
    let current = attempt(tx.conn, n, view.fork).await?;
    if let Some(current) = current
        && view.attempt < current
    {
        return Err(StoreError::StaleAttempt { mine: view.attempt, current });
    }
    sqlx::query(
        "INSERT INTO forks (run, fork, attempt, ended, view) VALUES ($1, $2, $3, $4, $5)
         ON CONFLICT (run, fork) DO UPDATE SET attempt = excluded.attempt, ended = excluded.ended, view = excluded.view",
    )
    .bind(n)
    .bind(i64::from(view.fork))
    .bind(i64::from(view.attempt.0))
    .bind(view.lifecycle.is_ended())
    .bind(text)
    .execute(&mut *tx.conn)
    .await?;
    match over(current, view) {
        Some(last) => ledger::close_up_to(tx, n, view.fork, last).await,
        None => Ok(()),
    }
}

pub(super) async fn write_sandbox(tx: &mut Tx<'_>, n: i64, view: &SandboxView, text: &str) -> Result<()> {
    sqlx::query(
        "INSERT INTO sandboxes (id, run, state, created_at, view) VALUES ($1, $2, $3, $4, $5)
         ON CONFLICT (id) DO UPDATE SET run = excluded.run, state = excluded.state,
             created_at = excluded.created_at, view = excluded.view",
    )
    .bind(view.id.as_str())
    .bind(n)
    .bind(view.state.as_str())
    .bind(int(view.created_at.0))
    .bind(text)
    .execute(&mut *tx.conn)
    .await?;
    Ok(())
}

const COLUMNS: &str = "id, fork, attempt, seq, kind, version, at, source, sandbox, data";

fn event_row(r: &PgRow) -> sqlx::Result<EventRow> {
    Ok(EventRow {
        id: r.try_get(0)?,
        fork: r.try_get(1)?,
        attempt: r.try_get(2)?,
        seq: r.try_get(3)?,
        kind: r.try_get(4)?,
        version: r.try_get(5)?,
        at: r.try_get(6)?,
        source: r.try_get(7)?,
        sandbox: r.try_get(8)?,
        data: r.try_get(9)?,
    })
}

async fn select<'q>(
    conn: &mut PgConnection,
    run: &RunId,
    query: sqlx::query::Query<'q, Postgres, PgArguments>,
    max_bytes: usize,
) -> Result<Page> {
    let mut found = conn.fetch(query);
    let (mut events, mut bytes) = (Vec::new(), 0);
    while let Some(row) = found.try_next().await? {
        let row = event_row(&row)?;
        bytes += row.data.len();
        if bytes > max_bytes && !events.is_empty() {
            return Ok(Page { events, exhausted: false });
        }
        events.push(row.decode(run)?);
    }
    Ok(Page { events, exhausted: true })
}

pub(super) async fn read_stream(
    conn: &mut PgConnection,
    stream: &StreamId,
    after: u64,
    limit: usize,
) -> Result<Vec<Recorded>> {
    let Some(n) = run_number(conn, stream.run()).await? else { return Ok(Vec::new()) };
    let (fork, attempt) = stream_columns(stream);
    let end = length(conn, n, stream).await?;
    let sql = format!(
        "SELECT {COLUMNS} FROM events WHERE run = $1 AND fork = $2 AND attempt = $3 AND seq > $4 ORDER BY seq LIMIT $5"
    );
    let query =
        sqlx::query(AssertSqlSafe(sql)).bind(n).bind(fork).bind(attempt).bind(int(after)).bind(rows(limit));
    let page = select(conn, stream.run(), query, MAX_ANSWER_BYTES).await?;
    page.unbroken(stream, |e| e.seq, after, end, rows(limit))
}

pub(super) async fn read_journals(
    conn: &mut PgConnection,
    run: &RunId,
    fork: ForkNum,
) -> Result<Vec<Recorded>> {
    let Some(n) = run_number(conn, run).await? else { return Ok(Vec::new()) };
    let attempts: Vec<(i64, i64)> = sqlx::query_as(
        "SELECT attempt, length FROM streams WHERE run = $1 AND fork = $2 AND attempt >= 0 ORDER BY attempt",
    )
    .bind(n)
    .bind(i64::from(fork))
    .fetch_all(&mut *conn)
    .await?;
    let sql =
        format!("SELECT {COLUMNS} FROM events WHERE run = $1 AND fork = $2 AND attempt = $3 ORDER BY seq");
    let mut all = Vec::new();
    for (attempt, length) in attempts {
        let query = sqlx::query(AssertSqlSafe(sql.clone())).bind(n).bind(i64::from(fork)).bind(attempt);
        let page = select(conn, run, query, usize::MAX).await?;
        let stream = StreamId::Journal(run.clone(), fork, crate::codec::attempt(attempt)?);
        all.extend(page.unbroken(&stream, |e| e.seq, 0, uint(length), i64::MAX)?);
    }
    Ok(all)
}

pub(super) async fn read_run(
    conn: &mut PgConnection,
    run: &RunId,
    query: &EventQuery,
) -> Result<Vec<Recorded>> {
    let Some(n) = run_number(conn, run).await? else { return Ok(Vec::new()) };
    let position = last_position(conn, run).await?;
    let mut sql = range(n, query);
    finish(&mut sql, query);
    let page = select(conn, run, sql.build(), MAX_ANSWER_BYTES).await?;
    match query.last_of_all(position) {
        Some(end) => page.unbroken(run, |e| e.position, query.after, end, rows(query.limit)),
        None => Ok(page.events),
    }
}

pub(super) async fn read_sandbox(
    conn: &mut PgConnection,
    sandbox: &SandboxId,
    query: &EventQuery,
) -> Result<Vec<Recorded>> {
    // A sandbox is of one run.
    let owner: Option<(i64, String)> = sqlx::query_as(
        "SELECT n, id FROM runs WHERE n = (SELECT id >> $2 FROM events WHERE sandbox = $1 ORDER BY id DESC LIMIT 1)",
    )
    .bind(sandbox.as_str())
    .bind(POSITION_BITS as i32)
    .fetch_optional(&mut *conn)
    .await?;
    let Some((n, run)) = owner else { return Ok(Vec::new()) };
    let mut sql = range(n, query);
    sql.push(" AND sandbox = ").push_bind(sandbox.as_str());
    finish(&mut sql, query);
    Ok(select(conn, &run_id(run)?, sql.build(), MAX_ANSWER_BYTES).await?.events)
}

pub(super) async fn count_sandbox(
    conn: &mut PgConnection,
    sandbox: &SandboxId,
    query: &EventQuery,
) -> Result<u64> {
    let mut sql = QueryBuilder::new("SELECT count(*) FROM events WHERE sandbox = ");
    sql.push_bind(sandbox.as_str());
    filter(&mut sql, query);
    let found: i64 = sql.build_query_scalar().fetch_one(conn).await?;
    Ok(uint(found))
}

fn range(n: i64, query: &EventQuery) -> QueryBuilder<Postgres> {
    let (from, to) = id_range(n, query.after, query.before);
    let mut sql = QueryBuilder::new(format!("SELECT {COLUMNS} FROM events WHERE id BETWEEN "));
    sql.push_bind(from).push(" AND ").push_bind(to);
    sql
}

/// Which events a query is about.
fn filter(sql: &mut QueryBuilder<Postgres>, query: &EventQuery) {
    if let Some(fork) = query.fork {
        sql.push(" AND fork = ").push_bind(i64::from(fork));
    }
    if !query.kinds.is_empty() {
        sql.push(" AND (false");
        for kind in &query.kinds {
            match kind_range(kind) {
                Some((from, to)) => {
                    sql.push(" OR (kind >= ").push_bind(from).push(" AND kind < ").push_bind(to).push(")");
                }
                None => {
                    sql.push(" OR kind = ").push_bind(kind.clone());
                }
            }
        }
        sql.push(")");
    }
}

/// The rest of a query: which, in which order, how many.
fn finish(sql: &mut QueryBuilder<Postgres>, query: &EventQuery) {
    filter(sql, query);
    sql.push(if query.newest_first { " ORDER BY id DESC LIMIT " } else { " ORDER BY id LIMIT " });
    sql.push_bind(rows(query.limit)).push(" OFFSET ").push_bind(int(query.skip as u64));
}

pub(super) async fn last_position(conn: &mut PgConnection, run: &RunId) -> Result<u64> {
    let found: Option<i64> = sqlx::query_scalar("SELECT position FROM runs WHERE id = $1")
        .bind(run.as_str())
        .fetch_optional(conn)
        .await?;
    Ok(uint(found.unwrap_or(0)))
}
