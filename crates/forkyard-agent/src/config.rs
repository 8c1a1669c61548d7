//! What an agent is told to do, and how.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use forkyard_core::{Attempt, ForkNum, RunId};
use serde::{Deserialize, Serialize};

use crate::inference::Effort;

/// Turns that a task may take.
pub const DEFAULT_MAX_TURNS: u32 = 100;
/// Output of one answer; enough for a large file in one call.
pub const DEFAULT_MAX_TOKENS: u32 = 32_000;
/// Tokens that the current models read.
pub const DEFAULT_CONTEXT_TOKENS: u64 = 200_000;
pub const DEFAULT_HEARTBEAT: Duration = Duration::from_secs(30);

#[derive(Debug, Clone)]
pub struct AgentConfig {
    pub run: RunId,
    pub fork: ForkNum,
    pub attempt: Attempt,
    /// What happened to the sandbox that the journal speaks of.
    pub continuity: Continuity,
    pub model: String,
    pub effort: Option<Effort>,
    pub max_tokens: u32,
    pub max_turns: u32,
    /// A conversation is compacted before it reaches this.
    pub context_tokens: u64,
    /// The fork's timeout, as the caller counts it.
    pub deadline: Option<tokio::time::Instant>,
    pub repo: String,
    pub branch: String,
    pub task: String,
    /// A user's own system prompt (minijinja); the built-in one if None.
    pub prompt_template: Option<String>,
    /// From the user's configuration only: they run on the host.
    pub hooks: Vec<HookConfig>,
    /// A folder of the user with one folder per skill; read on the host.
    pub skills_dir: Option<PathBuf>,
    pub log_dir: Option<PathBuf>,
    pub heartbeat: Duration,
    /// How long a finished agent stays for messages.
    pub linger: Option<Duration>,
    /// Added to the environment of every command.
    pub env: BTreeMap<String, String>,
    /// Keep a checkpoint after each turn that changed files.
    pub checkpoints: bool,
}

impl AgentConfig {
    /// The defaults around what has none.
    pub fn new(
        run: RunId,
        fork: ForkNum,
        attempt: Attempt,
        model: impl Into<String>,
        task: impl Into<String>,
    ) -> AgentConfig {
        AgentConfig {
            run,
            fork,
            attempt,
            continuity: Continuity::Same,
            model: model.into(),
            effort: None,
            max_tokens: DEFAULT_MAX_TOKENS,
            max_turns: DEFAULT_MAX_TURNS,
            context_tokens: DEFAULT_CONTEXT_TOKENS,
            deadline: None,
            repo: String::new(),
            branch: String::new(),
            task: task.into(),
            prompt_template: None,
            hooks: Vec::new(),
            skills_dir: None,
            log_dir: None,
            heartbeat: DEFAULT_HEARTBEAT,
            linger: None,
            env: BTreeMap::new(),
            checkpoints: true,
        }
    }
}

/// How the sandbox relates to the journal's entries.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Continuity {
    /// New with an empty journal, or the one that the journal was written with.
    #[default]
    Same,
    /// Another one, made from the checkpoint at this journal position (0: from the base).
    Replaced { position: u64, reason: String },
}

/// An external command that judges calls, in the shape of Claude Code's hooks: JSON on stdin, a decision by exit code or JSON.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HookConfig {
    pub event: HookEvent,
    /// Tools that it is asked about: names with `|` and `*`; empty or `*` for all.
    #[serde(default)]
    pub matcher: String,
    /// Run by `sh -c` on the host.
    pub command: String,
    #[serde(default = "default_hook_timeout_ms")]
    pub timeout_ms: u64,
}

/// As in Claude Code.
fn default_hook_timeout_ms() -> u64 {
    60_000
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum HookEvent {
    PreToolUse,
    PostToolUse,
}
