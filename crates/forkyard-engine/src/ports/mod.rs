//! The agent's ports over the store.

mod checkpoints;

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
pub use forkyard_agent::JournalEntry;
use forkyard_agent::event::EVENT_VERSION;
use forkyard_agent::ports::{
    Ask, EventSink, Grant, Inbox, InboxMessage, Journal, JournalError, Ledger, LedgerError, MessageId,
    ReservationId, Sent,
};
pub use forkyard_agent::ports::{LiveEvent, MessageKind, Priority, Speaker};
use forkyard_core::pricing::Usage;
use forkyard_core::{Attempt, ForkNum, RunId, SandboxId, Usd};
use forkyard_store::{AppendJournal, NewEvent, Reserve, Sending, Source, Store, StoreError};
use serde::{Deserialize, Serialize};
use tokio::sync::Mutex;
use tokio::time::Instant;

use crate::activity::Heartbeat;

pub use checkpoints::{BaseTree, HostCheckpoints, checkpoint_key, decode_work};

/// How long a store that is away is waited for, try by try, before an attempt ends. The next one goes on from the journal.
const STORE_WAITS: [Duration; 6] = [
    Duration::from_millis(50),
    Duration::from_millis(200),
    Duration::from_millis(800),
    Duration::from_secs(2),
    Duration::from_secs(5),
    Duration::from_secs(10),
];

/// Which attempt of which fork.
#[derive(Clone)]
pub struct Tenure {
    pub store: Arc<dyn Store>,
    pub run: RunId,
    pub fork: ForkNum,
    pub attempt: Attempt,
    pub sandbox: SandboxId,
}

pub struct StoreJournal {
    tenure: Tenure,
    /// Entries of this attempt's journal, and of all journals of the fork.
    counts: Mutex<(u64, u64)>,
}

impl StoreJournal {
    pub fn new(tenure: Tenure) -> StoreJournal {
        StoreJournal { tenure, counts: Mutex::new((0, 0)) }
    }
}

/// The agent's own entries. Beside them stands what somebody inside a sandbox testified.
pub(crate) fn is_journal(r: &forkyard_store::Recorded) -> bool {
    r.event.source == Source::Agent
}

fn journal_error(e: StoreError) -> JournalError {
    match e {
        StoreError::StaleAttempt { .. } | StoreError::LeaseLost | StoreError::Conflict { .. } => {
            JournalError::Stale
        }
        StoreError::Corrupt(why) => JournalError::Unreadable(why),
        e @ (StoreError::NotFound { .. }
        | StoreError::Invalid(_)
        | StoreError::Full(_)
        | StoreError::Unavailable(_)) => JournalError::Unavailable(e.to_string()),
    }
}

#[async_trait]
impl Journal for StoreJournal {
    async fn read(&self) -> Result<Vec<JournalEntry>, JournalError> {
        let t = &self.tenure;
        let mut counts = self.counts.lock().await;
        let stored = patiently(|| t.store.read_journals(&t.run, t.fork)).await.map_err(journal_error)?;
        let mine = |s: &forkyard_store::StreamId| matches!(s, forkyard_store::StreamId::Journal(_, _, attempt) if *attempt == t.attempt);
        let total = stored.iter().filter(|r| is_journal(r)).count() as u64;
        *counts = (stored.iter().filter(|r| mine(&r.stream)).count() as u64, total);
        stored
            .into_iter()
            .filter(is_journal)
            .map(|r| {
                JournalEntry::from_stored(&r.event.kind, r.event.version, r.event.at, r.event.data)
                    .map_err(|e| JournalError::Unreadable(e.to_string()))
            })
            .collect()
    }

    async fn append(&self, entries: &[JournalEntry], delivered: &[MessageId]) -> Result<u64, JournalError> {
        let t = &self.tenure;
        let mut counts = self.counts.lock().await;
        let events: Vec<NewEvent> = entries
            .iter()
            .map(|e| {
                let (kind, data) = e.to_stored();
                NewEvent {
                    kind: kind.into(),
                    version: EVENT_VERSION,
                    at: e.at,
                    source: Source::Agent,
                    sandbox: Some(t.sandbox.clone()),
                    data,
                }
            })
            .collect();
        let (expected, n) = (counts.0, events.len() as u64);
        let append = AppendJournal {
            run: t.run.clone(),
            fork: t.fork,
            attempt: t.attempt,
            expected,
            events,
            deliver: delivered.to_vec(),
        };
        let mut waits = STORE_WAITS.iter();
        let mut in_doubt = false;
        loop {
            match t.store.append_journal(append.clone()).await {
                Ok(_) => break,
                // Only this attempt writes here: the try before this one got through.
                Err(StoreError::Conflict { actual, .. }) if in_doubt && actual == expected + n => break,
                Err(e) if e.is_retryable() => match waits.next() {
                    Some(wait) => {
                        in_doubt = true;
                        tokio::time::sleep(*wait).await;
                    }
                    None => return Err(journal_error(e)),
                },
                Err(e) => return Err(journal_error(e)),
            }
        }
        counts.0 += n;
        counts.1 += n;
        Ok(counts.1)
    }
}

async fn patiently<'f, T>(
    ask: impl Fn() -> futures::future::BoxFuture<'f, Result<T, StoreError>> + Send,
) -> Result<T, StoreError> {
    let mut waits = STORE_WAITS.iter();
    loop {
        match ask().await {
            Err(e) if e.is_retryable() => match waits.next() {
                Some(wait) => tokio::time::sleep(*wait).await,
                None => return Err(e),
            },
            answer => return answer,
        }
    }
}

/// A message as the inbox keeps it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoredText {
    #[serde(rename = "type")]
    pub kind: MessageKind,
    pub content: String,
    /// Unsaid: whoever the kind says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<Speaker>,
    #[serde(default, skip_serializing_if = "Priority::is_normal")]
    pub priority: Priority,
}

impl StoredText {
    pub fn new(kind: MessageKind, content: impl Into<String>) -> StoredText {
        StoredText { kind, content: content.into(), source: None, priority: Priority::Normal }
    }
    /// What a user says.
    pub fn user(content: impl Into<String>) -> StoredText {
        StoredText::new(MessageKind::UserMessage, content)
    }
    pub fn speaker(&self) -> Speaker {
        self.source.unwrap_or(match self.kind {
            MessageKind::UserMessage | MessageKind::Interrupt => Speaker::User,
            MessageKind::GuardianNudge => Speaker::Guardian,
            MessageKind::System => Speaker::System,
        })
    }
}

/// A busy run changes at every step of every fork: its inboxes are looked into this often at most.
const INBOX_EVERY: Duration = Duration::from_millis(100);

pub struct StoreInbox {
    tenure: Tenure,
    news: Mutex<News>,
}

struct News {
    watch: forkyard_store::Watch,
    /// Something changed that nobody was told of. Stays if the one who waits is dropped.
    unseen: bool,
    not_before: Instant,
}

impl StoreInbox {
    pub fn new(tenure: Tenure) -> StoreInbox {
        let watch = tenure.store.watch(Some(&tenure.run));
        StoreInbox { tenure, news: Mutex::new(News { watch, unseen: false, not_before: Instant::now() }) }
    }
}

#[async_trait]
impl Inbox for StoreInbox {
    async fn pending(&self) -> Result<Vec<InboxMessage>, JournalError> {
        let t = &self.tenure;
        let stored = patiently(|| t.store.pending_messages(&t.run, t.fork)).await.map_err(journal_error)?;
        Ok(stored
            .into_iter()
            .filter_map(|m| {
                let StoredText { kind, content, source, priority } = serde_json::from_value(m.data).ok()?;
                Some(InboxMessage { id: m.id, kind, source, priority, content, at: m.at })
            })
            .collect())
    }
    async fn wait(&self) {
        let mut news = self.news.lock().await;
        if !news.unseen {
            news.watch.changed().await;
            news.unseen = true;
        }
        tokio::time::sleep_until(news.not_before).await;
        news.unseen = false;
        news.not_before = Instant::now() + INBOX_EVERY;
    }
}

pub struct StoreLedger {
    tenure: Tenure,
    limited: bool,
}

impl StoreLedger {
    pub fn new(tenure: Tenure, limited: bool) -> StoreLedger {
        StoreLedger { tenure, limited }
    }
}

fn ledger_error(e: StoreError) -> LedgerError {
    if e.is_retryable() {
        LedgerError::Unavailable(e.to_string())
    } else {
        LedgerError::Broken(e.to_string())
    }
}

/// Closed already: the first settlement counts.
fn closed_is_fine(r: Result<(), StoreError>) -> Result<(), LedgerError> {
    match r {
        Ok(()) | Err(StoreError::Invalid(_)) => Ok(()),
        Err(e) => Err(ledger_error(e)),
    }
}

#[async_trait]
impl Ledger for StoreLedger {
    fn limited(&self) -> bool {
        self.limited
    }
    async fn reserve(&self, ask: Ask) -> Result<Grant, LedgerError> {
        let t = &self.tenure;
        let id = ReservationId(ask.request.clone());
        let ask = forkyard_core::budget::Ask {
            fork: t.fork,
            attempt: t.attempt,
            request: ask.request,
            worst: ask.worst,
        };
        Ok(match t.store.reserve(&t.run, ask).await.map_err(ledger_error)? {
            Reserve::Granted => Grant::Granted { id },
            Reserve::Short { available, outstanding } => Grant::Short { available, outstanding },
            Reserve::Paused => Grant::Paused,
            Reserve::Stale { .. } => Grant::Stale,
        })
    }
    async fn sent(&self, id: &ReservationId) -> Result<Sent, LedgerError> {
        match self.tenure.store.mark_sent(&self.tenure.run, &id.0).await {
            Ok(Sending::Go) => Ok(Sent::Go),
            Ok(Sending::Paused) => Ok(Sent::Paused),
            // Or it is closed: whoever did that owns the fork.
            Ok(Sending::Stale { .. }) | Err(StoreError::Invalid(_)) => Ok(Sent::Stale),
            Err(e) => Err(ledger_error(e)),
        }
    }
    async fn shrink(&self, id: &ReservationId, worst: Usd) -> Result<(), LedgerError> {
        closed_is_fine(self.tenure.store.shrink(&self.tenure.run, &id.0, worst).await)
    }
    async fn settle(&self, id: &ReservationId, cost: Usd, _: &Usage) -> Result<(), LedgerError> {
        closed_is_fine(self.tenure.store.settle(&self.tenure.run, &id.0, cost).await)
    }
    async fn release(&self, id: &ReservationId) -> Result<(), LedgerError> {
        closed_is_fine(self.tenure.store.release_reservation(&self.tenure.run, &id.0).await)
    }
    fn changed(&self) -> futures::future::BoxFuture<'static, ()> {
        let mut watch = self.tenure.store.watch(Some(&self.tenure.run));
        Box::pin(async move { watch.changed().await })
    }
}

/// Live events of all forks of this process, for whoever looks on.
pub trait Onlooker: Send + Sync {
    fn live(&self, run: &RunId, fork: ForkNum, event: &LiveEvent);
    /// Durable by now.
    fn recorded(&self, run: &RunId, fork: ForkNum, entries: &[JournalEntry]);
}

pub struct ForkSink {
    pub run: RunId,
    pub fork: ForkNum,
    pub heartbeat: Heartbeat,
    pub onlooker: Option<Arc<dyn Onlooker>>,
}

impl EventSink for ForkSink {
    fn live(&self, event: LiveEvent) {
        self.heartbeat.beat();
        if let Some(o) = &self.onlooker {
            o.live(&self.run, self.fork, &event);
        }
    }
    fn recorded(&self, entries: &[JournalEntry]) {
        self.heartbeat.beat();
        if let Some(o) = &self.onlooker {
            o.recorded(&self.run, self.fork, entries);
        }
    }
}
