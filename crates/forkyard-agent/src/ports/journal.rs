//! The log of everything that an agent did: the only thing a conversation is rebuilt from.

use async_trait::async_trait;

use super::MessageId;
use crate::event::JournalEntry;

/// The journal of one fork, written by one attempt.
#[async_trait]
pub trait Journal: Send + Sync {
    /// All entries of the fork, attempt after attempt, each in order.
    async fn read(&self) -> Result<Vec<JournalEntry>, JournalError>;

    /// Appends all or none, durable before Ok, and marks `delivered` as delivered in the same step. Answers with the number of
    /// entries that the fork's journals have now: the position after the last one.
    async fn append(&self, entries: &[JournalEntry], delivered: &[MessageId]) -> Result<u64, JournalError>;
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum JournalError {
    /// A newer attempt owns the fork: stop without a word.
    #[error("a newer attempt owns this fork")]
    Stale,
    /// The store was not reached. Nothing may be assumed about the last append; the attempt ends and the next one reads.
    #[error("the journal can't be reached: {0}")]
    Unavailable(String),
    /// An entry that this version can't read.
    #[error("the journal can't be read: {0}")]
    Unreadable(String),
}
