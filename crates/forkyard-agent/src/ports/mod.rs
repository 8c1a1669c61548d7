//! What the agent needs from outside. Implemented over the store by the engine.

mod checkpoints;
mod inbox;
mod journal;
mod ledger;
mod memory_ledger;
mod sink;

pub use checkpoints::{CheckpointError, CheckpointInfo, CheckpointKind, Checkpoints};
pub use inbox::{Inbox, InboxMessage, MAX_MESSAGE_CHARS, MessageId, MessageKind, NoInbox, Priority, Speaker};
pub use journal::{Journal, JournalError};
pub use ledger::{Ask, Grant, Ledger, LedgerError, ReservationId, Sent};
pub use memory_ledger::{MemoryBudget, MemoryLedger};
pub use sink::{EventSink, LiveEvent, NoSink, OutputStream};
