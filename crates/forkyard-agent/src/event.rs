//! What an agent records. The journal is the event log: readers see these events, and a resumed agent rebuilds its
//! conversation from them alone. Names and meanings never change; a payload that has to change gets a new version.

use forkyard_core::policy::Rule;
use forkyard_core::pricing::Usage;
use forkyard_core::{Attempt, ForkNum, SandboxId, Timestamp, Usd};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::inference::{Block, RawJson, ResultPart, StopReason};
use crate::outcome::Stop;
use crate::ports::{CheckpointInfo, MessageId, MessageKind, Priority, Speaker};

/// The version that this program writes. All kinds share it.
pub const EVENT_VERSION: u16 = 1;

/// One recorded fact, with its time and whose conversation it belongs to.
#[derive(Debug, Clone, PartialEq)]
pub struct JournalEntry {
    pub at: Timestamp,
    /// The call that started the subagent which this is about; None is the fork's own agent.
    pub subagent: Option<String>,
    pub event: AgentEvent,
}

/// Adjacently tagged, so that kind and data can be stored apart.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", content = "data")]
pub enum AgentEvent {
    #[serde(rename = "agent.started")]
    Started(Started),
    /// Another attempt goes on.
    #[serde(rename = "agent.resumed")]
    Resumed(Resumed),
    /// The system prompt. Never changes within a conversation: thinking and caches depend on it.
    #[serde(rename = "agent.system_message")]
    SystemMessage { text: String },
    /// What the conversation starts with.
    #[serde(rename = "agent.user_message")]
    UserMessage { content: Vec<Block>, shared_blocks: usize },
    #[serde(rename = "agent.assistant_message")]
    AssistantMessage(AssistantMessage),
    /// A call is about to run: judged, and not run again by a later attempt without asking the sandbox for it.
    #[serde(rename = "agent.tool_use")]
    ToolUse(ToolUse),
    #[serde(rename = "agent.tool_completed")]
    ToolCompleted(ToolCompleted),
    #[serde(rename = "agent.file_edited")]
    FileEdited(FileEdited),
    #[serde(rename = "agent.message_injected")]
    MessageInjected {
        message_id: MessageId,
        kind: MessageKind,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        source: Option<Speaker>,
        #[serde(default, skip_serializing_if = "Priority::is_normal")]
        priority: Priority,
        content: String,
        turn: u32,
    },
    #[serde(rename = "agent.interrupted")]
    Interrupted {
        turn: u32,
        tool_use_id: Option<String>,
        /// What the request that was broken off may have cost.
        #[serde(default)]
        cost: Usd,
    },
    /// The conversation so far was replaced by its first message and this summary.
    #[serde(rename = "agent.compacted")]
    Compacted { turn: u32, summary: String, usage: Usage, cost: Usd },
    #[serde(rename = "agent.checkpoint_created")]
    CheckpointCreated {
        turn: u32,
        position: u64,
        checkpoint: CheckpointInfo,
        /// Ids of older ones that are not kept any longer.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        dropped: Vec<String>,
    },
    #[serde(rename = "agent.subagent_invoked")]
    SubagentInvoked { turn: u32, tool_use_id: String, description: String, prompt: String },
    #[serde(rename = "agent.subagent_completed")]
    SubagentCompleted { turn: u32, tool_use_id: String, success: bool, turns: u32, cost: Usd },
    #[serde(rename = "agent.skill_invoked")]
    SkillInvoked { turn: u32, tool_use_id: String, skill: String, trusted: bool },
    #[serde(rename = "agent.error")]
    Error { turn: u32, error: String },
    #[serde(rename = "agent.stream_error")]
    StreamError {
        turn: u32,
        error: String,
        error_type: StreamErrorType,
        /// What requests without an answer may have cost.
        #[serde(default)]
        cost: Usd,
    },
    /// The task is done and the agent stays for messages.
    #[serde(rename = "agent.waiting")]
    Waiting { turn: u32 },
    #[serde(rename = "agent.completed")]
    Completed(Completed),
    /// It ended without having finished.
    #[serde(rename = "agent.failed")]
    Failed(Completed),
    /// Stopped from outside, in order; somebody may go on.
    #[serde(rename = "agent.shutdown")]
    Shutdown { turn: u32, reason: String },
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Started {
    pub sandbox_id: SandboxId,
    pub fork_num: ForkNum,
    pub attempt: Attempt,
    pub model: String,
    pub repo_url: String,
    pub branch: String,
    pub max_turns: u32,
    pub tools: Vec<String>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Resumed {
    pub sandbox_id: SandboxId,
    pub attempt: Attempt,
    /// The journal position that the conversation went back to, where the sandbox was lost: what came after did not happen
    /// as far as files and conversation go, though it was paid for.
    pub rewound_to: Option<u64>,
    /// What the model is told about it.
    pub message: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct AssistantMessage {
    pub turn: u32,
    /// As it came, to be sent back as it came.
    pub content: Vec<Block>,
    pub stop_reason: StopReason,
    pub usage: Usage,
    pub cost: Usd,
    pub model: String,
    pub request_id: Option<String>,
    pub tries: u32,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ToolUse {
    pub turn: u32,
    pub tool: String,
    pub tool_use_id: String,
    /// For readers: long texts are shortened. The model's own is in its message.
    pub input: Value,
    /// What an interceptor made of it, whole; this runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rewritten: Option<RawJson>,
    /// For calls that replace a file: how a later attempt tells whether it happened.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub plan: Option<FilePlan>,
}

/// SHA-256 of a file before and after; None where there was no file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FilePlan {
    pub before: Option<String>,
    pub after: String,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ToolCompleted {
    pub turn: u32,
    pub tool: String,
    pub tool_use_id: String,
    /// For readers: long texts are shortened.
    pub tool_input: Value,
    /// What the model gets, whole.
    pub tool_response: Vec<ResultPart>,
    pub is_error: bool,
    /// Which rule of the policy refused it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub denied_by: Option<Rule>,
    #[serde(default)]
    pub cached: bool,
    pub duration_ms: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ChangeType {
    Created,
    Modified,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct FileEdited {
    pub turn: u32,
    pub tool_use_id: String,
    pub file_path: String,
    pub change_type: ChangeType,
    pub lines_added: u64,
    pub lines_removed: u64,
    /// The first lines of the unified diff.
    pub diff_preview: String,
    /// None if it is too long or could not be made.
    pub full_diff: Option<String>,
    pub full_diff_available: bool,
    /// In characters.
    pub full_diff_size: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StreamErrorType {
    Sigkill,
    CommandFailed,
    StreamInit,
    Unknown,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Completed {
    pub success: bool,
    pub stop_reason: Stop,
    pub turns: u32,
    pub tool_calls: u32,
    pub errors: Vec<String>,
    pub cost_usd: f64,
    pub usage: Usage,
    pub final_output: String,
    pub branch_name: String,
    pub duration_ms: u64,
}

macro_rules! kinds {
    ($($case:pat => $kind:literal,)+) => {
        impl AgentEvent {
            /// All there are.
            pub const KINDS: &'static [&'static str] = &[$($kind),+];

            /// `agent.…`
            pub fn kind(&self) -> &'static str {
                match self { $($case => $kind,)+ }
            }
        }
    };
}

kinds! {
    AgentEvent::Started(_) => "agent.started",
    AgentEvent::Resumed(_) => "agent.resumed",
    AgentEvent::SystemMessage { .. } => "agent.system_message",
    AgentEvent::UserMessage { .. } => "agent.user_message",
    AgentEvent::AssistantMessage(_) => "agent.assistant_message",
    AgentEvent::ToolUse(_) => "agent.tool_use",
    AgentEvent::ToolCompleted(_) => "agent.tool_completed",
    AgentEvent::FileEdited(_) => "agent.file_edited",
    AgentEvent::MessageInjected { .. } => "agent.message_injected",
    AgentEvent::Interrupted { .. } => "agent.interrupted",
    AgentEvent::Compacted { .. } => "agent.compacted",
    AgentEvent::CheckpointCreated { .. } => "agent.checkpoint_created",
    AgentEvent::SubagentInvoked { .. } => "agent.subagent_invoked",
    AgentEvent::SubagentCompleted { .. } => "agent.subagent_completed",
    AgentEvent::SkillInvoked { .. } => "agent.skill_invoked",
    AgentEvent::Error { .. } => "agent.error",
    AgentEvent::StreamError { .. } => "agent.stream_error",
    AgentEvent::Waiting { .. } => "agent.waiting",
    AgentEvent::Completed(_) => "agent.completed",
    AgentEvent::Failed(_) => "agent.failed",
    AgentEvent::Shutdown { .. } => "agent.shutdown",
}

/// Why a stored entry can't be read.
#[derive(Debug, thiserror::Error)]
#[error("{kind} version {version}: {detail}")]
pub struct UnreadableEvent {
    pub kind: String,
    pub version: u16,
    pub detail: String,
}

impl JournalEntry {
    /// Kind and data as a store keeps them. The subagent stands in the data.
    pub fn to_stored(&self) -> (&'static str, Value) {
        let mut data = match serde_json::to_value(&self.event) {
            Ok(Value::Object(mut tagged)) => tagged.remove("data").unwrap_or_default(),
            // Only a map with other keys than texts fails to serialise; there is none in an event.
            Ok(_) | Err(_) => Value::Object(Map::new()),
        };
        if let (Some(subagent), Value::Object(map)) = (&self.subagent, &mut data) {
            map.insert("subagent".to_string(), Value::String(subagent.clone()));
        }
        (self.event.kind(), data)
    }

    pub fn from_stored(
        kind: &str,
        version: u16,
        at: Timestamp,
        mut data: Value,
    ) -> Result<JournalEntry, UnreadableEvent> {
        let unreadable = |detail: String| UnreadableEvent { kind: kind.to_string(), version, detail };
        if version != EVENT_VERSION {
            return Err(unreadable("written by a newer program".to_string()));
        }
        let subagent = match data.as_object_mut().and_then(|map| map.remove("subagent")) {
            Some(Value::String(id)) => Some(id),
            Some(other) => return Err(unreadable(format!("subagent is {other}"))),
            None => None,
        };
        let tagged = Value::Object(Map::from_iter([
            ("type".to_string(), Value::String(kind.to_string())),
            ("data".to_string(), data),
        ]));
        let event = serde_json::from_value(tagged).map_err(|e| unreadable(e.to_string()))?;
        Ok(JournalEntry { at, subagent, event })
    }
}
