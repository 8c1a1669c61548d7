//! What readers see: rows that a driver writes together with the events they follow from. A view is a pure function of
//! a machine's state, so it can always be made again by replay.

use serde::{Deserialize, Serialize};

use crate::budget::BudgetLimits;
use crate::sandbox::ProviderKind;
use crate::{Attempt, ForkNum, HostId, Millis, Role, RunId, SandboxId, Timestamp, Usd};

/// One row to write.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum View {
    Run(RunView),
    Fork(ForkView),
    Sandbox(SandboxView),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RunStatus {
    Pending,
    Preparing,
    Running,
    /// Every fork has ended; sandboxes are being cleaned up.
    Finishing,
    Ended,
}

impl RunStatus {
    pub fn as_str(self) -> &'static str {
        match self {
            RunStatus::Pending => "pending",
            RunStatus::Preparing => "preparing",
            RunStatus::Running => "running",
            RunStatus::Finishing => "finishing",
            RunStatus::Ended => "ended",
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RunOutcome {
    /// At least one fork succeeded (with verify: is verified).
    Success,
    Failed,
    Cancelled,
}

/// Who keeps a run's log and timers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EngineKind {
    #[default]
    Embedded,
    Temporal,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RunView {
    pub id: RunId,
    pub engine: EngineKind,
    pub status: RunStatus,
    pub outcome: Option<RunOutcome>,
    /// No new fork and no new request while set; the store's ledger refuses to reserve.
    pub paused: bool,
    /// Its user let go of it: nobody takes it over until a command arrives.
    pub detached: bool,
    pub cancelling: bool,
    pub repo: String,
    pub branch: Option<String>,
    pub prompt: String,
    pub limits: BudgetLimits,
    pub created_at: Timestamp,
    pub updated_at: Timestamp,
    pub ended_at: Option<Timestamp>,
    pub progress: Progress,
    pub error: Option<String>,
    /// Best first, once ended.
    pub ranking: Vec<ForkNum>,
    pub winner: Option<ForkNum>,
}

/// How far a run has come.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Progress {
    pub total_forks: u32,
    pub pending: u32,
    pub in_progress: u32,
    pub completed: u32,
    pub failed: u32,
}

/// Where a fork stands, as the API names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum Lifecycle {
    Pending,
    Creating,
    Running,
    Completing,
    Completed,
    Failed,
}

impl Lifecycle {
    /// Nothing follows.
    pub fn is_ended(self) -> bool {
        match self {
            Lifecycle::Completed | Lifecycle::Failed => true,
            Lifecycle::Pending | Lifecycle::Creating | Lifecycle::Running | Lifecycle::Completing => false,
        }
    }
}

/// How a fork ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ForkOutcome {
    Success,
    Failed,
    Timeout,
    Cancelled,
    BudgetExceeded,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ForkView {
    pub run: RunId,
    pub fork: ForkNum,
    /// Fences journal, ledger and exec: a smaller one is refused everywhere.
    pub attempt: Attempt,
    pub lifecycle: Lifecycle,
    /// What it does, in the machine's own words: `creating`, `agent`, `lingering` …
    pub phase: String,
    pub outcome: Option<ForkOutcome>,
    pub sandbox: Option<SandboxId>,
    pub name: Option<String>,
    pub model: String,
    pub verified: Option<bool>,
    pub score: Option<f64>,
    pub turns: u32,
    pub tool_calls: u32,
    pub cost: Usd,
    pub tokens: u64,
    pub diff: Option<DiffStat>,
    /// Time that counted against its limit.
    pub driven: Millis,
    pub created_at: Timestamp,
    pub updated_at: Timestamp,
    pub started_at: Option<Timestamp>,
    pub ended_at: Option<Timestamp>,
    pub error: Option<String>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct DiffStat {
    pub files: u64,
    pub added: u64,
    pub removed: u64,
}

impl DiffStat {
    pub fn lines(&self) -> u64 {
        self.added + self.removed
    }
    pub fn is_empty(&self) -> bool {
        self.files == 0
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SandboxState {
    /// Creation was asked for: it may exist.
    Requested,
    Live,
    /// The user has it now; it ends at its deadline.
    HandedOver,
    Destroyed,
    /// Destroying failed for good: the orphan sweep of its host has to do it.
    Owed,
}

impl SandboxState {
    pub fn as_str(self) -> &'static str {
        match self {
            SandboxState::Requested => "requested",
            SandboxState::Live => "live",
            SandboxState::HandedOver => "handed_over",
            SandboxState::Destroyed => "destroyed",
            SandboxState::Owed => "owed",
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SandboxView {
    pub id: SandboxId,
    pub run: RunId,
    pub fork: Option<ForkNum>,
    pub role: Role,
    pub provider: ProviderKind,
    pub host: Option<HostId>,
    pub state: SandboxState,
    pub created_at: Timestamp,
    pub updated_at: Timestamp,
}
