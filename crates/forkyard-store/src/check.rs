//! Bounds of what may be written, the same for every store. Each returns the JSON text that was measured, so that it is
//! made once.

use forkyard_core::view::{RunView, View};
use forkyard_core::{RunId, Timestamp, Usd};
use serde_json::Value;

use crate::{
    Append, AppendJournal, CreateRun, EventQuery, MAX_BLOB_BYTES, MAX_DATA_BYTES, NewEvent, Result,
    StoreError, StreamId,
};

/// Longest name given by a caller: idempotency keys, requests, owners, blob keys. Enough for a path of ids, and small
/// enough for an index.
pub const MAX_KEY_BYTES: usize = 512;
/// Longest kind of an event.
pub const MAX_KIND_BYTES: usize = 128;
/// Events, views or ids in one call: a step writes a handful; more is a mistake.
pub const MAX_ITEMS: usize = 10_000;
/// Deepest nesting of stored JSON. Parsers stop at 128, and readers wrap what they got.
pub const MAX_DEPTH: usize = 100;
/// Filters in one query.
pub const MAX_KINDS: usize = 64;

fn invalid<T>(text: impl Into<String>) -> Result<T> {
    Err(StoreError::Invalid(text.into()))
}

/// A caller's name for something. NUL is refused because PostgreSQL's text can't hold it.
pub fn key(what: &str, key: &str) -> Result<()> {
    if key.is_empty() || key.len() > MAX_KEY_BYTES {
        return invalid(format!("{what} has {} bytes: use 1 to {MAX_KEY_BYTES}", key.len()));
    }
    if key.contains('\0') {
        return invalid(format!("{what} contains a NUL character"));
    }
    Ok(())
}

pub fn optional_key(what: &str, key: Option<&str>) -> Result<()> {
    key.map_or(Ok(()), |k| self::key(what, k))
}

/// Its text.
pub fn data(what: &str, data: &Value) -> Result<String> {
    if !shallow(data, MAX_DEPTH) {
        return invalid(format!("{what} is nested deeper than {MAX_DEPTH} levels"));
    }
    text(what, data)
}

fn text(what: &str, data: &impl serde::Serialize) -> Result<String> {
    let text =
        serde_json::to_string(data).map_err(|e| StoreError::Invalid(format!("{what} is not JSON: {e}")))?;
    if text.len() > MAX_DATA_BYTES {
        return invalid(format!(
            "{what} has {} bytes as JSON; at most {MAX_DATA_BYTES} are stored",
            text.len()
        ));
    }
    Ok(text)
}

fn shallow(value: &Value, levels: usize) -> bool {
    match value {
        Value::Array(items) => levels > 0 && items.iter().all(|v| shallow(v, levels - 1)),
        Value::Object(map) => levels > 0 && map.values().all(|v| shallow(v, levels - 1)),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => true,
    }
}

/// Databases count in signed 64 bits.
pub fn time(what: &str, at: Timestamp) -> Result<()> {
    if i64::try_from(at.0).is_err() { invalid(format!("{what} {} is out of range", at.0)) } else { Ok(()) }
}

pub fn amount(what: &str, amount: Usd) -> Result<()> {
    if amount > Usd::MAX_LIMIT {
        return invalid(format!("{what} of {amount} is more than {}", Usd::MAX_LIMIT));
    }
    Ok(())
}

fn count(what: &str, n: usize) -> Result<()> {
    if n > MAX_ITEMS { invalid(format!("{n} {what} in one call; at most {MAX_ITEMS}")) } else { Ok(()) }
}

pub fn events(events: &[NewEvent]) -> Result<Vec<String>> {
    count("events", events.len())?;
    events
        .iter()
        .map(|e| {
            if e.kind.is_empty() || e.kind.len() > MAX_KIND_BYTES || e.kind.chars().any(char::is_control) {
                return invalid(format!(
                    "an event's kind is 1 to {MAX_KIND_BYTES} printable bytes, not {:?}",
                    e.kind
                ));
            }
            time("an event's time", e.at)?;
            data(&format!("the data of {}", e.kind), &e.data)
        })
        .collect()
}

/// All of `run`.
pub fn views(run: &RunId, views: &[View]) -> Result<Vec<String>> {
    count("views", views.len())?;
    views
        .iter()
        .map(|view| {
            let (owner, created_at, json) = match view {
                View::Run(v) => {
                    amount("the run's budget", v.limits.run.unwrap_or_default())?;
                    amount("the forks' budget", v.limits.fork.unwrap_or_default())?;
                    (&v.id, v.created_at, text("the view of the run", v)?)
                }
                View::Fork(v) => (&v.run, v.created_at, text("the view of a fork", v)?),
                View::Sandbox(v) => (&v.run, v.created_at, text("the view of a sandbox", v)?),
            };
            time("a view's created_at", created_at)?;
            if owner != run {
                return invalid(format!("a view of run {owner} can't be written with events of run {run}"));
            }
            Ok(json)
        })
        .collect()
}

/// A new run's own view: it has exactly one.
pub fn create_run(run: &CreateRun) -> Result<&RunView> {
    optional_key("the idempotency key", run.key.as_deref())?;
    let mut found = run.views.iter().filter_map(|v| match v {
        View::Run(v) => Some(v),
        View::Fork(_) | View::Sandbox(_) => None,
    });
    match (found.next(), found.next()) {
        (Some(view), None) => Ok(view),
        _ => invalid("a new run is written with exactly one view of the run"),
    }
}

pub fn append(append: &Append) -> Result<()> {
    count("commands to consume", append.consume.len())?;
    match append.stream {
        StreamId::Run(_) | StreamId::Fork(..) => Ok(()),
        StreamId::Journal(..) => invalid("a journal is written with append_journal"),
    }
}

pub fn append_journal(append: &AppendJournal) -> Result<()> {
    count("messages to deliver", append.deliver.len())
}

pub fn process(process: &crate::Process) -> Result<String> {
    text("a process", process)
}

pub fn query(query: &EventQuery) -> Result<()> {
    if query.kinds.len() > MAX_KINDS {
        return invalid(format!("{} kinds in one query; at most {MAX_KINDS}", query.kinds.len()));
    }
    if query.kinds.iter().any(|k| k.contains('\0') || k.len() > MAX_KIND_BYTES) {
        return invalid("a kind in the query is not a kind");
    }
    Ok(())
}

pub fn blob(key: &str, data: &[u8]) -> Result<()> {
    self::key("a blob's key", key)?;
    if data.len() > MAX_BLOB_BYTES {
        return invalid(format!(
            "blob {key:?} has {} bytes; at most {MAX_BLOB_BYTES} are stored",
            data.len()
        ));
    }
    Ok(())
}
