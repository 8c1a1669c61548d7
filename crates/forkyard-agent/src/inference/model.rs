//! The one thing that the turn loop needs from a model.

use std::sync::atomic::{AtomicBool, Ordering};

use async_trait::async_trait;
use forkyard_core::Usd;
use forkyard_core::pricing::Usage;
use forkyard_core::spec::Effort;
use serde::{Deserialize, Serialize};

use super::{Block, InferenceError, Message, StopReason, ToolDef};

/// Answers one turn. Dropping the future cancels the request at once; what it may have cost stays accounted for.
#[async_trait]
pub trait Model: Send + Sync {
    async fn turn(
        &self,
        request: &TurnRequest,
        deltas: &mut dyn DeltaSink,
    ) -> Result<TurnResponse, InferenceError>;

    /// Of all requests so far, also those that failed or were dropped.
    fn total_cost(&self) -> Usd {
        Usd::ZERO
    }
}

/// One request. The parts that all forks of a run share come first, so that they share the provider's prompt cache:
/// tools, system, and the first `shared_blocks` blocks of the first message. What differs per fork comes after them.
#[derive(Debug, Clone, PartialEq)]
pub struct TurnRequest {
    /// A model's name or alias.
    pub model: String,
    /// The same for all forks of a run.
    pub system: String,
    pub tools: Vec<ToolDef>,
    pub messages: Vec<Message>,
    /// How many of the first message's leading blocks all forks of the run have in common.
    pub shared_blocks: usize,
    /// The most that is asked for; less may be sent when money is short.
    pub max_tokens: u32,
    pub effort: Option<Effort>,
    /// `main` (or nothing) for the agent's own; each subagent's has a name; a request that sums one up has a name that begins with
    /// that one's. Each one's last reported size is used for its next estimate.
    pub conversation: String,
}

impl TurnRequest {
    pub fn new(model: impl Into<String>, messages: Vec<Message>, max_tokens: u32) -> TurnRequest {
        TurnRequest {
            model: model.into(),
            system: String::new(),
            tools: Vec::new(),
            messages,
            shared_blocks: 0,
            max_tokens,
            effort: None,
            conversation: String::new(),
        }
    }

    /// The agent's own conversation, not a subagent's.
    pub fn is_main(&self) -> bool {
        matches!(self.conversation.as_str(), "" | "main")
    }
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TurnResponse {
    /// To be appended to the conversation as it is.
    pub content: Vec<Block>,
    pub stop_reason: StopReason,
    /// Of the try that succeeded.
    pub usage: Usage,
    /// Of all tries of this turn: lost answers count at their worst case.
    pub cost: Usd,
    /// The provider's name for the request, for its support.
    pub request_id: Option<String>,
    /// Which model answered, by the provider's word.
    pub model: String,
    /// Requests that this turn took.
    pub tries: u32,
}

impl TurnResponse {
    /// All text, without thinking.
    pub fn text(&self) -> String {
        let parts = self
            .content
            .iter()
            .filter_map(|b| if let Block::Text { text } = b { Some(text.as_str()) } else { None });
        parts.collect::<Vec<_>>().join("")
    }
}

/// What is seen of an answer while it streams. `index` is the block's place in the answer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Delta<'a> {
    Text {
        index: usize,
        text: &'a str,
    },
    Thinking {
        index: usize,
        text: &'a str,
    },
    ToolStart {
        index: usize,
        id: &'a str,
        name: &'a str,
    },
    ToolInput {
        index: usize,
        json: &'a str,
    },
    /// The try failed and the turn starts over: what was shown of it is void.
    Reset,
    Notice(&'a Notice),
}

/// Why a turn takes longer than the model does.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "notice", rename_all = "snake_case")]
pub enum Notice {
    Retrying {
        retry: u32,
        delay_ms: u64,
        error: String,
    },
    /// The budget is held by other requests' reservations; goes on when one is settled.
    WaitingForBudget {
        needed: Usd,
        available: Usd,
    },
    WaitingWhilePaused,
    RateLimited {
        delay_ms: u64,
    },
    /// Money is short: fewer output tokens are asked for.
    LoweredMaxTokens {
        from: u32,
        to: u32,
    },
}

/// Gets deltas as they arrive. Must not block: it is called between two reads of the stream.
pub trait DeltaSink: Send {
    fn delta(&mut self, delta: Delta<'_>);
    /// The answer is there as a whole, and is being paid for: whoever gives up on it now pays for nothing.
    fn answered(&mut self) {}
}

/// Remembers whether an answer is there as a whole.
pub(crate) struct Heard<'a> {
    pub deltas: &'a mut dyn DeltaSink,
    pub answered: &'a AtomicBool,
}

impl DeltaSink for Heard<'_> {
    fn delta(&mut self, delta: Delta<'_>) {
        self.deltas.delta(delta);
    }

    fn answered(&mut self) {
        self.answered.store(true, Ordering::Relaxed);
        self.deltas.answered();
    }
}

/// Sees nothing.
#[derive(Debug, Default)]
pub struct Silent;

impl DeltaSink for Silent {
    fn delta(&mut self, _: Delta<'_>) {}
}

/// Keeps the visible text and the notices: for tests and simple callers.
#[derive(Debug, Default)]
pub struct Collect {
    pub text: String,
    pub thinking: String,
    pub tool_input: String,
    pub resets: u32,
    pub notices: Vec<Notice>,
}

impl DeltaSink for Collect {
    fn delta(&mut self, delta: Delta<'_>) {
        match delta {
            Delta::Text { text, .. } => self.text.push_str(text),
            Delta::Thinking { text, .. } => self.thinking.push_str(text),
            Delta::ToolStart { .. } => {}
            Delta::ToolInput { json, .. } => self.tool_input.push_str(json),
            Delta::Reset => {
                self.text.clear();
                self.thinking.clear();
                self.tool_input.clear();
                self.resets += 1;
            }
            Delta::Notice(notice) => self.notices.push(notice.clone()),
        }
    }
}
