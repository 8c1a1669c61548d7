//! What is seen live and kept by nobody.

use forkyard_core::Timestamp;
use serde::{Deserialize, Serialize};

use crate::event::JournalEntry;
use crate::inference::Notice;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OutputStream {
    Stdout,
    Stderr,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "live", rename_all = "snake_case")]
pub enum LiveEvent {
    Text {
        subagent: Option<String>,
        text: String,
    },
    Thinking {
        subagent: Option<String>,
        text: String,
    },
    ToolStart {
        subagent: Option<String>,
        tool_use_id: String,
        tool: String,
    },
    ToolInput {
        subagent: Option<String>,
        json: String,
    },
    /// What was shown of the answer is void: it starts over.
    Reset {
        subagent: Option<String>,
    },
    Notice {
        notice: Notice,
    },
    ToolOutput {
        tool_use_id: String,
        stream: OutputStream,
        text: String,
    },
    /// Every 30 s, whatever the agent waits for.
    Heartbeat {
        timestamp: Timestamp,
        status: String,
        event_count: u64,
    },
}

/// Gets live events, and journal entries once they are durable. Must not block; dropping is fine.
pub trait EventSink: Send + Sync {
    fn live(&self, event: LiveEvent);
    fn recorded(&self, _entries: &[JournalEntry]) {}
}

/// Shows nothing.
#[derive(Debug, Default)]
pub struct NoSink;

impl EventSink for NoSink {
    fn live(&self, _: LiveEvent) {}
}
