//! How an agent's work ended.

use forkyard_core::Millis;
use forkyard_core::Usd;
use forkyard_core::pricing::Usage;
use forkyard_sandbox::SandboxError;
use serde::{Deserialize, Serialize};

use crate::inference::InferenceError;
use crate::ports::JournalError;

/// Why it stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Stop {
    /// The model had nothing more to do.
    EndTurn,
    /// The last answer was cut at its token limit and the model could not be brought to finish.
    MaxTokens,
    Refusal,
    MaxTurns,
    BudgetExceeded,
    Timeout,
    /// The conversation does not fit the model even after compaction.
    ContextTooLong,
}

impl Stop {
    pub fn is_success(self) -> bool {
        match self {
            Stop::EndTurn | Stop::MaxTokens => true,
            Stop::Refusal | Stop::MaxTurns | Stop::BudgetExceeded | Stop::Timeout | Stop::ContextTooLong => {
                false
            }
        }
    }
    pub fn as_str(self) -> &'static str {
        match self {
            Stop::EndTurn => "end_turn",
            Stop::MaxTokens => "max_tokens",
            Stop::Refusal => "refusal",
            Stop::MaxTurns => "max_turns",
            Stop::BudgetExceeded => "budget_exceeded",
            Stop::Timeout => "timeout",
            Stop::ContextTooLong => "context_too_long",
        }
    }
}

#[derive(Debug, Clone, PartialEq)]
pub struct AgentOutcome {
    pub success: bool,
    pub stop: Stop,
    pub final_response: String,
    pub turns: u32,
    /// Subagents' included.
    pub tool_calls: u32,
    /// Failed and refused tool calls, and what else went wrong on the way; the last ones, bounded.
    pub errors: Vec<String>,
    /// Calls that policy, a hook or an interceptor refused.
    pub denied: u32,
    /// Over all attempts, subagents and compactions.
    pub usage: Usage,
    pub cost: Usd,
    /// Of this attempt.
    pub duration: Millis,
}

/// Why there is no outcome (yet).
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// The caller's wish. Commands under way go on, and the next attempt takes them over.
    #[error("cancelled")]
    Cancelled,
    /// A newer attempt owns the fork: stop without a word.
    #[error("a newer attempt owns this fork")]
    Stale,
    #[error(transparent)]
    Journal(JournalError),
    /// The sandbox does not answer. The next attempt re-attaches or goes on from the last checkpoint.
    #[error("the sandbox is lost: {0}")]
    SandboxLost(SandboxError),
    #[error(transparent)]
    Model(InferenceError),
    /// The configuration can't work: a template, a skill folder.
    #[error("{0}")]
    Config(String),
}

impl AgentError {
    /// Another attempt may get further.
    pub fn is_retryable(&self) -> bool {
        match self {
            AgentError::Cancelled | AgentError::Stale | AgentError::Config(_) => false,
            AgentError::Journal(JournalError::Unavailable(_)) | AgentError::SandboxLost(_) => true,
            AgentError::Journal(JournalError::Stale | JournalError::Unreadable(_)) => false,
            AgentError::Model(e) => e.is_retryable(),
        }
    }
}

impl From<JournalError> for AgentError {
    fn from(e: JournalError) -> AgentError {
        match e {
            JournalError::Stale => AgentError::Stale,
            e @ (JournalError::Unavailable(_) | JournalError::Unreadable(_)) => AgentError::Journal(e),
        }
    }
}
