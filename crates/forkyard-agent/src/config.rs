//! What an agent is told to do, and how.

use std::path::PathBuf;
use std::time::Duration;

use forkyard_core::spec::Effort;
use forkyard_core::{Attempt, ForkNum, RunId};
use serde::{Deserialize, Serialize};

/// Turns that a task may take.
pub const DEFAULT_MAX_TURNS: u32 = 100;
/// Output of one answer; enough for a large file in one call.
pub const DEFAULT_MAX_TOKENS: u32 = 32_000;
pub const DEFAULT_HEARTBEAT: Duration = Duration::from_secs(30);
/// Going back one step is what checkpoints are for; a few more help when the newest can't be read.
pub const DEFAULT_KEEP_CHECKPOINTS: u32 = 3;

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
    /// When it has to end, for a caller that has no machine to count a fork's time.
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
    /// Whoever runs the agent starts it again when a message comes in after its end: it says that it waits.
    pub lingers: bool,
    /// One is made after each turn that changed files; this many are kept. 0: none is made.
    pub keep_checkpoints: u32,
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
            context_tokens: forkyard_core::pricing::DEFAULT_CONTEXT_TOKENS,
            deadline: None,
            repo: String::new(),
            branch: String::new(),
            task: task.into(),
            prompt_template: None,
            hooks: Vec::new(),
            skills_dir: None,
            log_dir: None,
            heartbeat: DEFAULT_HEARTBEAT,
            lingers: false,
            keep_checkpoints: DEFAULT_KEEP_CHECKPOINTS,
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
