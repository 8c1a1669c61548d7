//! Forks, and what they came to.

use forkyard_core::view::{self, ForkView};
use forkyard_engine::git::CommitInfo;
use forkyard_engine::ports::{self, MessageKind, Speaker};
use forkyard_store::Recorded;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::mirror;

mirror!(Lifecycle of view::Lifecycle, "SCREAMING_SNAKE_CASE" { Pending, Creating, Running, Completing, Completed, Failed });
mirror!(ForkOutcome of view::ForkOutcome, "snake_case" { Success, Failed, Timeout, Cancelled, BudgetExceeded });

/// One branch of a run: one agent working in one sandbox.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Fork {
    pub run: String,
    pub fork: u32,
    /// Grows at every takeover.
    pub attempt: u32,
    pub lifecycle: Lifecycle,
    /// What it does: `create`, `agent`, `linger`, `verify` …
    pub phase: String,
    /// Once it has ended.
    pub outcome: Option<ForkOutcome>,
    pub sandbox_id: Option<String>,
    pub name: Option<String>,
    pub model: String,
    /// Null where nothing judged it.
    pub verified: Option<bool>,
    pub score: Option<f64>,
    pub turns: u32,
    pub tool_calls: u32,
    pub cost_usd: f64,
    pub tokens: u64,
    pub diff: Option<DiffStat>,
    /// Time that counted against its limit.
    pub driven_ms: u64,
    /// Milliseconds since 1970.
    pub created_at: u64,
    pub updated_at: u64,
    pub started_at: Option<u64>,
    pub ended_at: Option<u64>,
    pub error: Option<String>,
}

#[derive(Debug, Clone, Copy, Serialize, Deserialize, ToSchema)]
pub struct DiffStat {
    pub files: u64,
    pub added: u64,
    pub removed: u64,
}

impl From<&ForkView> for Fork {
    fn from(v: &ForkView) -> Fork {
        Fork {
            run: v.run.to_string(),
            fork: v.fork,
            attempt: v.attempt.0,
            lifecycle: v.lifecycle.into(),
            phase: v.phase.clone(),
            outcome: v.outcome.map(Into::into),
            sandbox_id: v.sandbox.as_ref().map(ToString::to_string),
            name: v.name.clone(),
            model: v.model.clone(),
            verified: v.verified,
            score: v.score,
            turns: v.turns,
            tool_calls: v.tool_calls,
            cost_usd: v.cost.as_dollars(),
            tokens: v.tokens,
            diff: v.diff.map(|d| DiffStat { files: d.files, added: d.added, removed: d.removed }),
            driven_ms: v.driven.0,
            created_at: v.created_at.0,
            updated_at: v.updated_at.0,
            started_at: v.started_at.map(|t| t.0),
            ended_at: v.ended_at.map(|t| t.0),
            error: v.error.clone(),
        }
    }
}

#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct ForkList {
    pub forks: Vec<Fork>,
}

mirror!(
    /// How a message is meant.
    MessageType of MessageKind, "snake_case" { UserMessage, Interrupt, GuardianNudge, System }
);

mirror!(
    /// Who speaks.
    InterventionSource of Speaker, "snake_case" { Guardian, User, System }
);

mirror!(
    /// Of what waits for an agent, the urgent is read first.
    Priority of ports::Priority, "snake_case" { Normal, Urgent }
);

pub(crate) fn normal() -> Priority {
    Priority::Normal
}

fn user_message() -> MessageType {
    MessageType::UserMessage
}

/// What to say to an agent.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Message {
    /// At most 10,000 characters; control characters are dropped.
    pub content: String,
    #[serde(rename = "type", default = "user_message")]
    pub kind: MessageType,
}

#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Interrupt {
    /// Why, and what to do instead.
    pub content: String,
}

#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct Queued {
    #[schema(example = "queued")]
    pub status: String,
    pub message_id: u64,
}

/// A point that a fork can be resumed or forked from.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct Checkpoint {
    /// Of the event that recorded it.
    pub position: u64,
    pub at: u64,
    pub sandbox_id: Option<String>,
    pub turn: u64,
    /// How it is kept, as the agent recorded it.
    pub checkpoint: serde_json::Value,
}

impl From<Recorded> for Checkpoint {
    fn from(mut r: Recorded) -> Checkpoint {
        Checkpoint {
            position: r.position,
            at: r.event.at.0,
            sandbox_id: r.event.sandbox.map(Into::into),
            turn: r.event.data["turn"].as_u64().unwrap_or(0),
            checkpoint: r.event.data["checkpoint"].take(),
        }
    }
}

/// What a commit says of itself.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Commit {
    pub id: String,
    pub author: String,
    /// Milliseconds since 1970.
    pub at: u64,
    pub subject: String,
}

impl From<CommitInfo> for Commit {
    fn from(c: CommitInfo) -> Commit {
        Commit { id: c.id, author: c.author, at: c.at.0, subject: c.subject }
    }
}

#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct Commits {
    /// Newest first, at most 100.
    pub commits: Vec<Commit>,
}

#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct Checkpoints {
    pub checkpoints: Vec<Checkpoint>,
    /// For the next page, as `after`; null at the end.
    pub next_after: Option<u64>,
}
