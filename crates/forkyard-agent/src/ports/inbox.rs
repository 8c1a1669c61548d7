//! What others say to a running agent.

use async_trait::async_trait;
use forkyard_core::Timestamp;
use serde::{Deserialize, Serialize};

use super::JournalError;

pub type MessageId = u64;

/// Longest message that reaches a model; longer ones are cut.
pub const MAX_MESSAGE_CHARS: usize = 10_000;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MessageKind {
    UserMessage,
    /// Stops the running tool call.
    Interrupt,
    GuardianNudge,
    System,
}

impl MessageKind {
    /// Whether calls that have not started wait for the model to think again.
    pub fn holds_calls(self) -> bool {
        match self {
            MessageKind::UserMessage | MessageKind::Interrupt | MessageKind::GuardianNudge => true,
            MessageKind::System => false,
        }
    }
}

/// Who speaks, where a message's kind does not say it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Speaker {
    Guardian,
    User,
    System,
}

/// Of what waits, the urgent is read first.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Priority {
    #[default]
    Normal,
    Urgent,
}

impl Priority {
    pub fn is_normal(&self) -> bool {
        *self == Priority::Normal
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct InboxMessage {
    pub id: MessageId,
    pub kind: MessageKind,
    pub source: Option<Speaker>,
    pub priority: Priority,
    pub content: String,
    pub at: Timestamp,
}

impl InboxMessage {
    /// In the order in which an agent reads them: urgent ones first, the oldest first among equals.
    pub fn in_order(mut pending: Vec<InboxMessage>) -> Vec<InboxMessage> {
        pending.sort_by_key(|m| (std::cmp::Reverse(m.priority), m.id));
        pending
    }
}

/// Messages for one fork. One is delivered by the journal append that records it, so it is never lost and never said twice.
#[async_trait]
pub trait Inbox: Send + Sync {
    /// Not delivered yet, in any order. Asked before every tool call: must be cheap when there is nothing.
    async fn pending(&self) -> Result<Vec<InboxMessage>, JournalError>;

    /// Returns once there may be a message that the last `pending` did not give. May return early, never sleeps through one.
    async fn wait(&self);
}

/// Nobody says anything.
#[derive(Debug, Default)]
pub struct NoInbox;

#[async_trait]
impl Inbox for NoInbox {
    async fn pending(&self) -> Result<Vec<InboxMessage>, JournalError> {
        Ok(Vec::new())
    }
    async fn wait(&self) {
        std::future::pending::<()>().await;
    }
}
