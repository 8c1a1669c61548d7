//! Where what comes from inside a sandbox is taken in: the journal of an agent that runs there, and testimony of whoever has
//! the token. Both go to the attempt's journal stream, which refuses an attempt that is not the fork's current one.
//!
//! Everything can be sent again. A journal's entries name the position that they begin at; testimony may carry an id.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex as StdMutex, PoisonError};

use forkyard_agent::JournalEntry;
use forkyard_agent::event::{AgentEvent, EVENT_VERSION};
use forkyard_core::{Attempt, ForkNum, RunId, Timestamp};
use forkyard_store::{AppendJournal, MessageId, NewEvent, Recorded, Source, Store, StoreError, StreamId};
use serde_json::Value;
use tokio::sync::Mutex;

use super::Claims;
use crate::ports::is_journal;

/// Whether only a journal has such entries: a checkpoint or an end that anybody could claim would be worth nothing.
pub fn is_journal_kind(kind: &str) -> bool {
    AgentEvent::KINDS.contains(&kind)
}

/// Attempts whose state is remembered; those that are forgotten are read again.
const MAX_SEATS: usize = 1000;
/// Ids of testimony that are remembered for one attempt, newest last.
const MAX_IDS: usize = 10_000;
/// Another process of the same store may write the same stream in between.
const TRIES: u32 = 5;
/// Entries of one answer.
pub const MAX_JOURNAL_PAGE: usize = 500;
/// Where testimony's id stands in its data.
const ID_FIELD: &str = "event_id";

/// An entry of a journal as it travels.
#[derive(Debug, Clone, PartialEq)]
pub struct Entry {
    pub kind: String,
    pub version: u16,
    pub at: Timestamp,
    pub data: Value,
}

/// What somebody inside says happened.
#[derive(Debug, Clone, PartialEq)]
pub struct Testimony {
    pub id: Option<String>,
    pub kind: String,
    pub at: Timestamp,
    /// An object.
    pub data: Value,
}

#[derive(Debug, thiserror::Error)]
pub enum DeskError {
    #[error("a newer attempt owns this fork")]
    Stale,
    /// Somebody else wrote at that position.
    #[error("the journal has {have} entries and others stand at that position")]
    Elsewhere { have: u64 },
    #[error("{0}")]
    Invalid(String),
    #[error(transparent)]
    Store(StoreError),
}

impl From<StoreError> for DeskError {
    fn from(e: StoreError) -> DeskError {
        match e {
            StoreError::StaleAttempt { .. } => DeskError::Stale,
            StoreError::Invalid(why) => DeskError::Invalid(why),
            e => DeskError::Store(e),
        }
    }
}

type SeatKey = (RunId, ForkNum, Attempt);

pub struct Desk {
    store: Arc<dyn Store>,
    seats: StdMutex<HashMap<SeatKey, Arc<Mutex<Option<Seat>>>>>,
}

/// Where one attempt's writing stands.
struct Seat {
    /// Events of the attempt's own stream.
    length: u64,
    /// Entries in the journals of the fork, all attempts together.
    entries: u64,
    /// Testimony by its id, with its position in the run.
    ids: BTreeMap<String, u64>,
}

impl Desk {
    pub fn new(store: Arc<dyn Store>) -> Desk {
        Desk { store, seats: StdMutex::default() }
    }

    fn seat(&self, c: &Claims) -> Arc<Mutex<Option<Seat>>> {
        let mut seats = self.seats.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (c.run.clone(), c.fork, c.attempt);
        if seats.len() >= MAX_SEATS && !seats.contains_key(&key) {
            // Those in use live on with whoever uses them.
            seats.clear();
        }
        seats.entry(key).or_default().clone()
    }

    async fn load(&self, c: &Claims) -> Result<Seat, StoreError> {
        let all = self.store.read_journals(&c.run, c.fork).await?;
        let own = StreamId::Journal(c.run.clone(), c.fork, c.attempt);
        let ids = all
            .iter()
            .filter(|r| !is_journal(r))
            .filter_map(|r| Some((r.event.data.get(ID_FIELD)?.as_str()?.to_string(), r.position)));
        Ok(Seat {
            length: all.iter().filter(|r| r.stream == own).count() as u64,
            entries: all.iter().filter(|r| is_journal(r)).count() as u64,
            ids: ids.collect(),
        })
    }

    /// Takes entries in that begin at `position` of the fork's journals, and marks messages as delivered with them. Answers
    /// with the number of entries that there are now. The same entries again are taken in once.
    pub async fn record(
        &self,
        c: &Claims,
        position: u64,
        entries: &[Entry],
        delivered: &[MessageId],
    ) -> Result<u64, DeskError> {
        // What is recorded can be read back, whoever sent it.
        for e in entries {
            JournalEntry::from_stored(&e.kind, e.version, e.at, e.data.clone())
                .map_err(|e| DeskError::Invalid(format!("not an entry of a journal: {e}")))?;
        }
        let seat = self.seat(c);
        let mut seat = seat.lock().await;
        let n = entries.len() as u64;
        for _ in 0..TRIES {
            let state = match seat.take() {
                Some(state) => state,
                None => self.load(c).await?,
            };
            if position != state.entries {
                let have = state.entries;
                *seat = Some(state);
                return if self.has(c, position, entries).await? {
                    Ok(position + n)
                } else {
                    Err(DeskError::Elsewhere { have })
                };
            }
            let events = entries
                .iter()
                .map(|e| NewEvent {
                    kind: e.kind.clone(),
                    version: e.version,
                    at: e.at,
                    source: Source::Agent,
                    sandbox: Some(c.sandbox.clone()),
                    data: e.data.clone(),
                })
                .collect();
            match self.append(c, state.length, events, delivered.to_vec()).await {
                Ok(_) => {
                    let entries = state.entries + n;
                    *seat = Some(Seat { length: state.length + n, entries, ..state });
                    return Ok(entries);
                }
                // Read again: another process was there, or our own answer was lost.
                Err(StoreError::Conflict { .. }) => {}
                Err(e) => return Err(e.into()),
            }
        }
        Err(DeskError::Store(StoreError::Unavailable("the journal is written by too many at once".into())))
    }

    async fn append(
        &self,
        c: &Claims,
        expected: u64,
        events: Vec<NewEvent>,
        deliver: Vec<MessageId>,
    ) -> Result<u64, StoreError> {
        let append =
            AppendJournal { run: c.run.clone(), fork: c.fork, attempt: c.attempt, expected, events, deliver };
        Ok(self.store.append_journal(append).await?.position)
    }

    /// Whether these very entries stand at a position.
    async fn has(&self, c: &Claims, position: u64, entries: &[Entry]) -> Result<bool, StoreError> {
        let all = self.store.read_journals(&c.run, c.fork).await?;
        let from = usize::try_from(position).unwrap_or(usize::MAX);
        let there: Vec<&Recorded> =
            all.iter().filter(|r| is_journal(r)).skip(from).take(entries.len()).collect();
        Ok(!entries.is_empty()
            && there.len() == entries.len()
            && there
                .iter()
                .zip(entries)
                .all(|(r, e)| r.event.kind == e.kind && r.event.at == e.at && r.event.data == e.data))
    }

    /// Entries of the fork's journals from a position on, and whether there may be more.
    pub async fn journal(
        &self,
        c: &Claims,
        after: u64,
        limit: usize,
    ) -> Result<(Vec<Entry>, bool), DeskError> {
        let all = self.store.read_journals(&c.run, c.fork).await?;
        let from = usize::try_from(after).unwrap_or(usize::MAX);
        let mut rest = all.into_iter().filter(is_journal).skip(from);
        let page: Vec<Entry> = rest
            .by_ref()
            .take(limit.min(MAX_JOURNAL_PAGE))
            .map(|r| Entry {
                kind: r.event.kind,
                version: r.event.version,
                at: r.event.at,
                data: r.event.data,
            })
            .collect();
        Ok((page, rest.next().is_some()))
    }

    /// Takes testimony in; answers with its position in the run. With an id that was used before: where that one stands.
    pub async fn testify(&self, c: &Claims, t: &Testimony) -> Result<u64, DeskError> {
        let seat = self.seat(c);
        let mut seat = seat.lock().await;
        let mut data = t.data.clone();
        if let (Some(id), Value::Object(map)) = (&t.id, &mut data) {
            map.insert(ID_FIELD.to_string(), Value::String(id.clone()));
        }
        for _ in 0..TRIES {
            let mut state = match seat.take() {
                Some(state) => state,
                None => self.load(c).await?,
            };
            if let Some(known) = t.id.as_ref().and_then(|id| state.ids.get(id)).copied() {
                *seat = Some(state);
                return Ok(known);
            }
            let event = NewEvent {
                kind: t.kind.clone(),
                version: EVENT_VERSION,
                at: t.at,
                source: Source::Worker,
                sandbox: Some(c.sandbox.clone()),
                data: data.clone(),
            };
            match self.append(c, state.length, vec![event], vec![]).await {
                Ok(position) => {
                    state.length += 1;
                    if let Some(id) = &t.id {
                        if state.ids.len() >= MAX_IDS {
                            state.ids.clear();
                        }
                        state.ids.insert(id.clone(), position);
                    }
                    *seat = Some(state);
                    return Ok(position);
                }
                Err(StoreError::Conflict { .. }) => {}
                Err(e) => return Err(e.into()),
            }
        }
        Err(DeskError::Store(StoreError::Unavailable("the journal is written by too many at once".into())))
    }
}
