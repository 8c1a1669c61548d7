//! What goes into a store and comes out of it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use forkyard_core::view::{RunOutcome, View};
use forkyard_core::{Attempt, ForkNum, HostId, RunId, SandboxId, Timestamp, Usd};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokio::sync::{Notify, watch};

use crate::Words;

/// Largest stored event, command or message, as JSON text. Transcripts are split by turn, files go to blobs.
pub const MAX_DATA_BYTES: usize = 16 << 20;
/// Largest blob: a `work` checkpoint's bound.
pub const MAX_BLOB_BYTES: usize = 64 << 20;
/// Commands and messages that may wait, per run and per fork.
pub const MAX_PENDING: usize = 1000;

/// One writer at a time each.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum StreamId {
    Run(RunId),
    Fork(RunId, ForkNum),
    Journal(RunId, ForkNum, Attempt),
}

impl StreamId {
    pub fn run(&self) -> &RunId {
        match self {
            StreamId::Run(run) | StreamId::Fork(run, _) | StreamId::Journal(run, _, _) => run,
        }
    }
    pub fn fork(&self) -> Option<ForkNum> {
        match self {
            StreamId::Run(_) => None,
            StreamId::Fork(_, fork) | StreamId::Journal(_, fork, _) => Some(*fork),
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Source {
    /// A machine or the orchestrator.
    System,
    /// The agent's own journal.
    Agent,
    /// Testimony of a worker inside a sandbox.
    Worker,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct NewEvent {
    /// `category.action`; never renamed.
    pub kind: String,
    pub version: u16,
    pub at: Timestamp,
    pub source: Source,
    /// The sandbox that it is about.
    pub sandbox: Option<SandboxId>,
    pub data: Value,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Recorded {
    pub stream: StreamId,
    /// From 1 in its stream.
    pub seq: u64,
    /// From 1 in its run.
    pub position: u64,
    #[serde(flatten)]
    pub event: NewEvent,
}

#[derive(Debug, Clone)]
pub struct CreateRun {
    pub run: RunId,
    /// Idempotency key of the submitter.
    pub key: Option<String>,
    pub events: Vec<NewEvent>,
    pub views: Vec<View>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Created {
    New,
    /// The key was used before, for this run.
    Existing(RunId),
}

#[derive(Debug, Clone)]
pub struct Append {
    /// A run's or a fork's stream.
    pub stream: StreamId,
    pub lease: LeaseToken,
    /// Events that the stream has.
    pub expected: u64,
    pub events: Vec<NewEvent>,
    pub views: Vec<View>,
    /// Commands that this step has answered.
    pub consume: Vec<CommandId>,
}

#[derive(Debug, Clone)]
pub struct AppendJournal {
    pub run: RunId,
    pub fork: ForkNum,
    pub attempt: Attempt,
    pub expected: u64,
    pub events: Vec<NewEvent>,
    /// Messages that the agent has taken in with these entries.
    pub deliver: Vec<MessageId>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Appended {
    /// The stream's length now.
    pub seq: u64,
    /// The run's last position now.
    pub position: u64,
}

#[derive(Debug, Clone, Default)]
pub struct EventQuery {
    /// Only positions greater than this.
    pub after: u64,
    /// Only positions smaller than this.
    pub before: Option<u64>,
    pub fork: Option<ForkNum>,
    /// Exact kinds, or a category with a dot at the end (`agent.`); empty: all.
    pub kinds: Vec<String>,
    pub newest_first: bool,
    /// Of those, as many are left out first.
    pub skip: usize,
    /// 0: the store's own bound.
    pub limit: usize,
}

pub type CommandId = u64;
pub type MessageId = u64;
pub type LeaseToken = u64;

#[derive(Debug, Clone, PartialEq)]
pub struct NewCommand {
    pub key: Option<String>,
    pub data: Value,
    pub at: Timestamp,
}

#[derive(Debug, Clone, PartialEq)]
pub struct StoredCommand {
    pub id: CommandId,
    pub data: Value,
    pub at: Timestamp,
}

#[derive(Debug, Clone, PartialEq)]
pub struct NewMessage {
    pub key: Option<String>,
    pub data: Value,
    pub at: Timestamp,
}

#[derive(Debug, Clone, PartialEq)]
pub struct StoredMessage {
    pub id: MessageId,
    pub data: Value,
    pub at: Timestamp,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lease {
    pub run: RunId,
    pub token: LeaseToken,
    /// Until when a tenure before this one has driven the run, by the clock of that one; None if none has said so. The store has
    /// no part in it: between two clocks nothing could be measured.
    pub last_driven: Option<Timestamp>,
}

/// Who has a run's lease.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holder {
    pub owner: String,
    pub token: LeaseToken,
}

/// A live process that shares the store.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Process {
    pub id: String,
    pub host: HostId,
    pub kind: ProcessKind,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ProcessKind {
    /// Drives the runs that it was started for.
    Cli,
    /// Drives whatever is claimable.
    Worker,
    Server,
    /// Works for a Temporal service, whichever runs that gives it.
    Temporal,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reserve {
    Granted,
    Short { available: Usd, outstanding: bool },
    Paused,
    Stale { current: Attempt },
}

/// May a request leave? See [`crate::Ledger::mark_sent`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sending {
    Go,
    Paused,
    Stale { current: Attempt },
}

#[derive(Debug, Clone, Default)]
pub struct RunQuery {
    /// Only those that have not ended.
    pub live: bool,
    /// Only those that ended in one of these ways; empty: all.
    pub outcomes: Vec<RunOutcome>,
    /// Only those in which these words occur.
    pub words: Words,
    /// Older than this one (a cursor).
    pub before: Option<(Timestamp, RunId)>,
    pub limit: usize,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RunCounts {
    pub all: u64,
    pub live: u64,
    pub success: u64,
    pub failed: u64,
    pub cancelled: u64,
}

#[derive(Debug, Clone, Default)]
pub struct SandboxQuery {
    pub run: Option<RunId>,
    pub states: Vec<forkyard_core::view::SandboxState>,
    pub limit: usize,
}

/// See [`crate::Views::watch`].
#[derive(Debug, Clone)]
pub struct Watch(News);

#[derive(Debug, Clone)]
enum News {
    Channel(watch::Receiver<u64>),
    Bell { bell: Arc<Bell>, heard: u64 },
}

impl Watch {
    pub fn new(receiver: watch::Receiver<u64>) -> Watch {
        Watch(News::Channel(receiver))
    }
    /// Changes before this call count too, if they were not seen yet. Pends for ever once the store is gone.
    pub async fn changed(&mut self) {
        match &mut self.0 {
            News::Channel(receiver) => {
                if receiver.changed().await.is_err() {
                    std::future::pending::<()>().await;
                }
            }
            News::Bell { bell, heard } => *heard = bell.after(*heard).await,
        }
    }
}

/// Wakes its watchers in the order in which they came to wait; a channel of tokio's does so at random, and then a simulation
/// could not be repeated.
#[derive(Debug, Default)]
pub struct Bell {
    rings: AtomicU64,
    waiting: Notify,
}

impl Bell {
    pub fn ring(&self) {
        self.rings.fetch_add(1, Ordering::SeqCst);
        self.waiting.notify_waiters();
    }
    pub fn rings(&self) -> u64 {
        self.rings.load(Ordering::SeqCst)
    }
    /// Returns with the number of rings once it is not `heard` any more.
    pub async fn after(&self, heard: u64) -> u64 {
        loop {
            let mut waiting = std::pin::pin!(self.waiting.notified());
            // From here on no ring is missed.
            waiting.as_mut().enable();
            let rings = self.rings();
            if rings != heard {
                return rings;
            }
            waiting.await;
        }
    }
    pub fn watch(self: &Arc<Self>) -> Watch {
        Watch(News::Bell { bell: self.clone(), heard: self.rings() })
    }
}
