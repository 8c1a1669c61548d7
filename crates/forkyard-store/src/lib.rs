//! Where events, journals, ledgers and views live.
//!
//! Small traits and their sum, [`Store`]; SQLite for one host, PostgreSQL for many. What every implementation holds:
//!
//! - **Durable before Ok.** A write that returned Ok survives the process and the machine.
//! - **Atomic.** Events, the views that follow from them, consumed commands and delivered messages of one call are written
//!   together or not at all.
//! - **Fenced.** A machine's stream takes events only from the holder of the run's current lease at the expected sequence;
//!   a journal only from the fork's current attempt.
//! - **Positions.** Every event of a run, of any stream, gets the run's next position, in commit order: whoever has read up
//!   to P can never miss a later commit with a smaller number.

pub mod access;
mod changes;
pub mod check;
mod codec;
#[cfg(feature = "conformance")]
pub mod conformance;
mod error;
mod hub;
mod open;
pub mod postgres;
mod reservation;
mod search;
pub mod sqlite;
mod types;

use std::time::Duration;

use async_trait::async_trait;
use forkyard_core::budget::{Ask, Balance};
use forkyard_core::view::{ForkView, RunView, SandboxView};
use forkyard_core::{Attempt, ForkNum, RunId, SandboxId, Timestamp, Usd};

pub use access::{AuditEntry, AuditQuery, Deed, Scope, Token};
pub use changes::{Changed, Changes, Followers};
pub use error::StoreError;
pub use open::open;
pub use search::{MAX_SEARCH_BYTES, MAX_WORDS, Words};
pub use types::*;

pub type Result<T, E = StoreError> = std::result::Result<T, E>;

pub trait Store: EventLog + Inbox + Leases + Ledger + Views + Access + Send + Sync {}
impl<T: EventLog + Inbox + Leases + Ledger + Views + Access + Send + Sync> Store for T {}

/// The streams. Answers are pages: at most the limit (0: the store's own bound), fewer when their data gets large; only an
/// empty one is the end.
#[async_trait]
pub trait EventLog {
    /// The first events of a run, with its view. With a key that was used before: the run that it made, and nothing is
    /// written. [`StoreError::Conflict`] if the run is there without the key.
    async fn create_run(&self, run: CreateRun) -> Result<Created>;

    /// One step of a machine. Where a [`forkyard_core::view::View::Fork`] raises the fork's attempt, the reservations that
    /// older attempts left open are closed with it (sent ones at their worst case); where it ends the fork, all of the
    /// fork's. One that lowers the attempt is refused. All views are of the stream's run. Commands that were consumed before, or are not the run's, are left alone.
    async fn append(&self, append: Append) -> Result<Appended>;

    /// Entries of an attempt's journal. `expected` is the number of entries that the attempt's journal had.
    async fn append_journal(&self, append: AppendJournal) -> Result<Appended>;

    /// One stream in order, from the sequence after `after` (0: from the start).
    async fn read_stream(&self, stream: &StreamId, after: u64, limit: usize) -> Result<Vec<Recorded>>;

    /// A run's events by position.
    async fn read_run(&self, run: &RunId, query: &EventQuery) -> Result<Vec<Recorded>>;

    /// What was reported of one sandbox, by position (newest first if the query says so).
    async fn read_sandbox(&self, sandbox: &SandboxId, query: &EventQuery) -> Result<Vec<Recorded>>;

    /// How many events of these kinds (as a query has them) were reported of one sandbox.
    async fn count_sandbox(&self, sandbox: &SandboxId, kinds: &[String]) -> Result<u64>;

    /// All journals of a fork, attempt after attempt, each in order.
    async fn read_journals(&self, run: &RunId, fork: ForkNum) -> Result<Vec<Recorded>>;

    /// The position of the run's last event; 0 if there is none.
    async fn last_position(&self, run: &RunId) -> Result<u64>;
}

/// What people say to a run and to its agents.
#[async_trait]
pub trait Inbox {
    /// With a key that was used before: the id it got then.
    async fn put_command(&self, run: &RunId, command: NewCommand) -> Result<CommandId>;
    /// Not consumed yet, oldest first. Consumed by [`Append::consume`].
    async fn pending_commands(&self, run: &RunId) -> Result<Vec<StoredCommand>>;

    async fn put_message(&self, run: &RunId, fork: ForkNum, message: NewMessage) -> Result<MessageId>;
    /// Not delivered yet, oldest first. Delivered by [`AppendJournal::deliver`].
    async fn pending_messages(&self, run: &RunId, fork: ForkNum) -> Result<Vec<StoredMessage>>;
}

/// The right to drive a run. Expiry is judged by one clock of the store that no wall-clock jump moves (one host: boot time;
/// PostgreSQL: the server's).
#[async_trait]
pub trait Leases {
    /// None while another's lease is valid. A new tenure has a larger token than all before it, also for the same owner.
    async fn acquire(&self, run: &RunId, owner: &str, ttl: Duration) -> Result<Option<Lease>>;
    /// Err([`StoreError::LeaseLost`]) if somebody else has it, or had it since. Late is not lost. `driven` is until when the
    /// holder has driven the run, for whoever comes after it ([`Lease::last_driven`]); None leaves what was said before.
    async fn renew(
        &self,
        run: &RunId,
        token: LeaseToken,
        ttl: Duration,
        driven: Option<Timestamp>,
    ) -> Result<()>;
    /// Ok if it is not ours any more.
    async fn release(&self, run: &RunId, token: LeaseToken) -> Result<()>;
    /// Whose lease is valid now. Whoever knows that the holder is gone may release it by its token.
    async fn holder(&self, run: &RunId) -> Result<Option<Holder>>;
    /// Live runs of the embedded engine that nobody drives and somebody should: not detached, or with a pending command.
    async fn claimable(&self, limit: usize) -> Result<Vec<RunId>>;

    /// Says that a process is there and what it does; forgotten after `ttl`.
    async fn announce(&self, process: &Process, ttl: Duration) -> Result<()>;
    async fn processes(&self) -> Result<Vec<Process>>;
}

/// Money. See [`forkyard_core::budget`]: the decision is made there, under this store's lock.
#[async_trait]
pub trait Ledger {
    /// Atomic across processes. Refused while the run is paused or detached, and to all but the current attempt of a fork that has not
    /// ended (whose attempts are all stale). A request
    /// that is open has its money already; one that was released is a new ask; one that was settled is
    /// [`StoreError::Invalid`], since asking again would be sending again.
    async fn reserve(&self, run: &RunId, ask: Ask) -> Result<Reserve>;
    // The steps of a reservation can be repeated: a caller whose answer was lost asks again. Other steps on a closed one
    // are Invalid.
    /// The last question before a request leaves, answered by what holds at that moment: only after [`Sending::Go`] may
    /// it be sent. Any other answer leaves the reservation as it is.
    async fn mark_sent(&self, run: &RunId, request: &str) -> Result<Sending>;
    async fn shrink(&self, run: &RunId, request: &str, worst: Usd) -> Result<()>;
    async fn settle(&self, run: &RunId, request: &str, cost: Usd) -> Result<()>;
    /// A sent one is settled at its worst case. Ok if it is closed.
    async fn release_reservation(&self, run: &RunId, request: &str) -> Result<()>;
    async fn balance(&self, run: &RunId) -> Result<Balance>;
}

/// What readers ask for, and small things with a name.
#[async_trait]
pub trait Views {
    async fn run(&self, run: &RunId) -> Result<Option<RunView>>;
    /// Newest first.
    async fn runs(&self, query: &RunQuery) -> Result<Vec<RunView>>;
    /// All runs in which these words occur, by how they are.
    async fn count_runs(&self, words: &Words) -> Result<RunCounts>;
    async fn forks(&self, run: &RunId) -> Result<Vec<ForkView>>;
    async fn fork(&self, run: &RunId, fork: ForkNum) -> Result<Option<ForkView>>;
    async fn sandboxes(&self, query: &SandboxQuery) -> Result<Vec<SandboxView>>;
    /// The orphan sweep has destroyed it (Owed -> Destroyed). Ok if it was destroyed before.
    async fn sandbox_destroyed(&self, sandbox: &SandboxId) -> Result<()>;
    /// The number of entries in all journals of the fork: grows while its agent makes progress.
    async fn journal_len(&self, run: &RunId, fork: ForkNum) -> Result<u64>;
    /// The fork's current attempt, without the rest of its view.
    async fn attempt(&self, run: &RunId, fork: ForkNum) -> Result<Option<Attempt>>;

    /// Removes an ended run with all that belongs to it, blobs whose key starts with `RUN/` included. Refused while one of
    /// its sandboxes may still have to be destroyed.
    async fn delete_run(&self, run: &RunId) -> Result<()>;

    async fn put_blob(&self, key: &str, data: &[u8]) -> Result<()>;
    async fn blob(&self, key: &str) -> Result<Option<Vec<u8>>>;
    async fn delete_blob(&self, key: &str) -> Result<()>;

    /// Wakes when something of the run (or of any run, if None) may have changed: events, commands, messages, money,
    /// by this or another process. Coalesces, may wake for nothing, never misses.
    fn watch(&self, run: Option<&RunId>) -> Watch;
    /// Says which runs may have changed since this call, by this or another process. Never misses.
    fn changes(&self) -> Changes;

    /// A name of this store: workers that share it share runs.
    async fn identity(&self) -> Result<String>;
}

/// Who may use the API, and what was done with it.
#[async_trait]
pub trait Access {
    /// Refused if the id is taken. Sessions that have expired by its time of creation are forgotten.
    async fn put_token(&self, token: Token) -> Result<()>;
    async fn token(&self, id: &str) -> Result<Option<Token>>;
    /// Oldest first, revoked and expired ones included.
    async fn tokens(&self) -> Result<Vec<Token>>;
    /// With the sessions that it opened. Ok if it was revoked before.
    async fn revoke_token(&self, id: &str, at: Timestamp) -> Result<()>;

    /// Forgets tokens that were revoked or have expired before then, with their sessions: how many.
    async fn forget_tokens(&self, before: Timestamp) -> Result<u64>;

    async fn put_audit(&self, deed: Deed) -> Result<u64>;
    /// Forgets what was done before then, at most [`FORGET_AT_ONCE`] of the oldest: how many.
    async fn forget_deeds(&self, before: Timestamp) -> Result<u64>;
    /// Newest first.
    async fn audit(&self, query: &AuditQuery) -> Result<Vec<AuditEntry>>;
}
