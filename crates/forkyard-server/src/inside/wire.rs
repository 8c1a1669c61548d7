//! What the worker protocol sends and answers; both its ends use it.

use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::{IntoParams, ToSchema};

use crate::dto::fork::{InterventionSource, MessageType, Priority, normal};

pub const MAX_EVENT_TYPE_CHARS: usize = 100;
/// Of testimony, as JSON text.
pub const MAX_EVENT_DATA_BYTES: usize = 100 << 10;
/// An event with its frame.
pub const MAX_EVENT_BODY_BYTES: usize = 128 << 10;
/// A turn's entries: the largest answer of a model and the results of its tools.
pub const MAX_JOURNAL_BODY_BYTES: usize = 16 << 20;
pub const MAX_ENTRIES: usize = 500;
pub const MAX_EVENT_ID_CHARS: usize = 100;
pub const MAX_WAIT_MS: u64 = 60_000;
/// Of a completion report.
pub const MAX_OUTPUT_CHARS: usize = 50_000;

#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum EventSource {
    #[default]
    Agent,
    Worker,
    System,
}

/// Something that happened inside.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct PostEvent {
    /// At most 100 characters of A-Z, a-z, 0-9, `_` and `.`.
    #[schema(max_length = 100, pattern = "^[A-Za-z0-9_.]+$")]
    pub event_type: String,
    /// At most 100 KB.
    #[serde(default)]
    pub event_data: serde_json::Map<String, Value>,
    /// Who says so; it is recorded as testimony from inside whoever that is.
    #[serde(default)]
    pub source: EventSource,
    /// Makes the same event twice one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(max_length = 100)]
    pub event_id: Option<String>,
}

#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Received {
    /// `received`.
    pub status: String,
    pub sandbox_id: String,
    pub event_type: String,
    /// Its own id, or its position in the run.
    pub event_id: String,
    /// Milliseconds since 1970.
    pub timestamp: u64,
}

/// An entry of the agent's journal.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct JournalEntry {
    pub event_type: String,
    pub version: u16,
    /// Milliseconds since 1970.
    pub at: u64,
    pub event_data: Value,
}

/// Entries to append, all or none.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct AppendJournal {
    /// How many entries the fork's journals have before them. The same entries at the same position are appended once.
    pub position: u64,
    #[schema(max_items = 500)]
    pub entries: Vec<JournalEntry>,
    /// Messages that the agent has taken in with them.
    #[serde(default)]
    #[schema(max_items = 1000)]
    pub delivered: Vec<u64>,
}

#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Appended {
    /// How many entries the fork's journals have now.
    pub position: u64,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct ReadJournal {
    /// Entries that are known already.
    pub after: Option<u64>,
    #[param(minimum = 1, maximum = 500)]
    pub limit: Option<u32>,
}

#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct JournalPage {
    pub entries: Vec<JournalEntry>,
    /// For the next page, as `after`; null at the end.
    pub next_after: Option<u64>,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct ReadInbox {
    /// Only messages with a larger id.
    pub after: Option<u64>,
    /// How long to wait for one, if there is none.
    #[param(maximum = 60000)]
    pub wait_ms: Option<u64>,
}

#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct InboxMessage {
    pub id: u64,
    #[serde(rename = "type")]
    pub kind: MessageType,
    /// Who speaks, where the type does not say it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<InterventionSource>,
    /// Urgent ones are to be read before the others that wait.
    #[serde(default = "normal")]
    pub priority: Priority,
    pub content: String,
    /// Milliseconds since 1970.
    pub at: u64,
}

#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct InboxPage {
    /// Not delivered yet, oldest first. An append to the journal delivers them.
    pub messages: Vec<InboxMessage>,
}

/// Why whoever worked inside has stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum StopReason {
    EndTurn,
    MaxTokens,
    Refusal,
    MaxTurns,
    BudgetExceeded,
    Timeout,
    ContextTooLong,
}

/// The work is done, or will not be.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct TaskComplete {
    pub success: bool,
    /// `end_turn` if it says nothing and succeeded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub stop_reason: Option<StopReason>,
    /// The last words; at most 50,000 characters.
    #[serde(default)]
    #[schema(max_length = 50000)]
    pub final_output: String,
    #[serde(default)]
    pub turns: u32,
    #[serde(default)]
    pub tool_calls: u32,
}

#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Reported {
    /// `received`.
    pub status: String,
    /// RUN/N.
    pub task_id: String,
}
