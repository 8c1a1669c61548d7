//! Between our types and a database's columns. Databases count in signed 64 bits; the bounds in [`crate::check`] keep
//! everything that is written inside them.

use forkyard_core::view::ForkView;
use forkyard_core::{Attempt, ForkNum, RunId, SandboxId, Timestamp, Usd};

use crate::{EventQuery, NewEvent, Recorded, Result, Source, StoreError, StreamId};

/// Position bits in an event's id; the run's number is above them.
pub(crate) const POSITION_BITS: u32 = 32;
pub(crate) const MAX_POSITION: u64 = (1 << POSITION_BITS) - 1;
/// In the columns of a stream: not a fork's, not a journal.
pub(crate) const NONE: i64 = -1;

/// Rows of one answer when the caller names no limit.
pub(crate) const MAX_ROWS: usize = 10_000;
/// Bytes of data of one answer: a page ends early when it is reached.
pub(crate) const MAX_ANSWER_BYTES: usize = 32 << 20;

pub(crate) fn rows(limit: usize) -> i64 {
    let limit = if limit == 0 { MAX_ROWS } else { limit.min(MAX_ROWS) };
    limit as i64
}

/// Saturates: a bound that is larger than anything stored means the same.
pub(crate) fn int(n: u64) -> i64 {
    i64::try_from(n).unwrap_or(i64::MAX)
}

/// What we wrote is never negative.
pub(crate) fn uint(n: i64) -> u64 {
    u64::try_from(n).unwrap_or(0)
}

pub(crate) fn usd(n: i64) -> Usd {
    Usd(uint(n))
}

pub(crate) fn stream_columns(stream: &StreamId) -> (i64, i64) {
    match stream {
        StreamId::Run(_) => (NONE, NONE),
        StreamId::Fork(_, fork) => (i64::from(*fork), NONE),
        StreamId::Journal(_, fork, attempt) => (i64::from(*fork), i64::from(attempt.0)),
    }
}

pub(crate) fn event_id(run: i64, position: u64) -> i64 {
    (run << POSITION_BITS) | int(position.min(MAX_POSITION))
}

/// The ids of the run's events with positions in `after + 1 .. before`, both ends included.
pub(crate) fn id_range(run: i64, after: u64, before: Option<u64>) -> (i64, i64) {
    if after >= MAX_POSITION {
        return (1, 0);
    }
    let last = before.map_or(MAX_POSITION, |b| b.saturating_sub(1).min(MAX_POSITION));
    (event_id(run, after + 1), event_id(run, last))
}

/// An event as its row has it.
pub(crate) struct EventRow {
    pub id: i64,
    pub fork: i64,
    pub attempt: i64,
    pub seq: i64,
    pub kind: String,
    pub version: i64,
    pub at: i64,
    pub source: String,
    pub sandbox: Option<String>,
    pub data: String,
}

impl EventRow {
    pub(crate) fn decode(self, run: &RunId) -> Result<Recorded> {
        let stream = match (u32::try_from(self.fork), u32::try_from(self.attempt)) {
            (Err(_), _) => StreamId::Run(run.clone()),
            (Ok(fork), Err(_)) => StreamId::Fork(run.clone(), fork),
            (Ok(fork), Ok(attempt)) => StreamId::Journal(run.clone(), fork, Attempt(attempt)),
        };
        Ok(Recorded {
            stream,
            seq: uint(self.seq),
            position: uint(self.id) & MAX_POSITION,
            event: NewEvent {
                kind: self.kind,
                version: u16::try_from(self.version)
                    .map_err(|_| corrupt("an event's version", &self.version.to_string()))?,
                at: Timestamp(uint(self.at)),
                source: source_from(&self.source)?,
                sandbox: self
                    .sandbox
                    .map(|s| SandboxId::new(s.as_str()).map_err(|_| corrupt("an event's sandbox", &s)))
                    .transpose()?,
                data: json("an event's data", &self.data)?,
            },
        })
    }
}

/// A page of events as it came from the database.
pub(crate) struct Page {
    pub events: Vec<Recorded>,
    /// There were no more rows: neither the limit nor the bytes ended it.
    pub exhausted: bool,
}

impl Page {
    /// Damage can make rows vanish without an error (SQLite has no checksums): what must be without a gap is checked to
    /// be. `number` counts from `after` + 1; `end` is the last that was there before the read, as far as it was asked for.
    pub(crate) fn unbroken(
        self,
        what: &impl std::fmt::Debug,
        number: impl Fn(&Recorded) -> u64,
        after: u64,
        end: u64,
        limit: i64,
    ) -> Result<Vec<Recorded>> {
        let mut last = after;
        for event in &self.events {
            if number(event) != last + 1 {
                return Err(gap(what, last + 1, number(event)));
            }
            last = number(event);
        }
        let full = self.events.len() as i64 >= limit;
        if self.exhausted && !full && last < end { Err(gap(what, last + 1, end)) } else { Ok(self.events) }
    }
}

fn gap(what: &impl std::fmt::Debug, missing: u64, found: u64) -> StoreError {
    StoreError::Corrupt(format!("{what:?}: event {missing} is missing, though there is {found}"))
}

pub(crate) fn corrupt(what: &str, value: &str) -> StoreError {
    StoreError::Corrupt(format!("{what}: {:?}", value.chars().take(200).collect::<String>()))
}

pub(crate) fn json<T: serde::de::DeserializeOwned>(what: &str, text: &str) -> Result<T> {
    serde_json::from_str(text).map_err(|e| StoreError::Corrupt(format!("{what}: {e}")))
}

pub(crate) fn source(source: Source) -> &'static str {
    match source {
        Source::System => "system",
        Source::Agent => "agent",
        Source::Worker => "worker",
    }
}

fn source_from(text: &str) -> Result<Source> {
    match text {
        "system" => Ok(Source::System),
        "agent" => Ok(Source::Agent),
        "worker" => Ok(Source::Worker),
        other => Err(corrupt("an event's source", other)),
    }
}

pub(crate) fn run_id(text: String) -> Result<RunId> {
    RunId::new(text.as_str()).map_err(|_| corrupt("a run's id", &text))
}

pub(crate) fn fork_num(n: i64) -> Result<ForkNum> {
    ForkNum::try_from(n).map_err(|_| corrupt("a fork's number", &n.to_string()))
}

pub(crate) fn attempt(n: i64) -> Result<Attempt> {
    u32::try_from(n).map(Attempt).map_err(|_| corrupt("an attempt", &n.to_string()))
}

pub(crate) fn no_run(run: &RunId) -> StoreError {
    StoreError::NotFound { what: format!("run {run}") }
}

pub(crate) fn no_fork(run: &RunId, fork: ForkNum) -> StoreError {
    StoreError::NotFound { what: format!("fork {run}/{fork}") }
}

/// Is `attempt` the one that may write?
pub(crate) fn fence(mine: Attempt, current: Attempt) -> Result<()> {
    match mine.cmp(&current) {
        std::cmp::Ordering::Equal => Ok(()),
        std::cmp::Ordering::Less => Err(StoreError::StaleAttempt { mine, current }),
        std::cmp::Ordering::Greater => {
            Err(StoreError::Invalid(format!("attempt {mine} has not begun: the fork is at {current}")))
        }
    }
}

/// The last attempt that is over once `view` is written where the fork was at `before`: its reservations are closed.
pub(crate) fn over(before: Option<Attempt>, view: &ForkView) -> Option<Attempt> {
    if view.lifecycle.is_ended() {
        Some(view.attempt)
    } else {
        before.filter(|before| *before < view.attempt).map(|_| Attempt(view.attempt.0 - 1))
    }
}

/// Blobs under `RUN/` belong to the run: the range of their keys, end excluded.
pub(crate) fn blob_range(run: &RunId) -> (String, String) {
    // '0' follows '/'.
    (format!("{run}/"), format!("{run}0"))
}

/// The range of kinds that a filter of a query means, end excluded; None: exactly this kind.
pub(crate) fn kind_range(filter: &str) -> Option<(String, String)> {
    // '/' follows '.'.
    filter.strip_suffix('.').map(|category| (filter.to_string(), format!("{category}/")))
}

impl EventQuery {
    /// The last position that the query asks for, if it asks for all of a range in order and the run is at `position`.
    pub(crate) fn last_of_all(&self, position: u64) -> Option<u64> {
        let all = self.fork.is_none() && self.kinds.is_empty() && !self.newest_first && self.skip == 0;
        all.then(|| self.before.map_or(position, |b| position.min(b.saturating_sub(1))))
    }
}
