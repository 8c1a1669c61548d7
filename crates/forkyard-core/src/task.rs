//! What machines ask the outside world to do, what comes back, and how often it is tried.

use serde::{Deserialize, Serialize};

use crate::view::{DiffStat, ForkOutcome};
use crate::{Attempt, ForkNum, HostId, Millis, SandboxId, SnapshotId, Usd};

/// Work for an activity. Idempotent: its sandbox id, commit or base is its key, whatever the number of tries.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "task")]
pub enum Task {
    /// Fetch, check out, set up, snapshot.
    PrepareBase {
        sandbox: SandboxId,
    },
    /// Does the base itself pass?
    VerifyBase {
        sandbox: SandboxId,
        base: Base,
    },
    CheckBudget,
    CreateSandbox {
        sandbox: SandboxId,
        base: Base,
    },
    HealthCheck {
        sandbox: SandboxId,
    },
    /// Continues from the fork's journals, if there are any; a journal that speaks of another sandbox means that it was lost.
    RunAgent {
        sandbox: SandboxId,
        base: Base,
    },
    Collect {
        sandbox: SandboxId,
        base: Base,
    },
    Verify {
        sandbox: SandboxId,
        base: Base,
        commit: String,
    },
    /// Make the result visible where the user looks for it.
    Publish {
        collected: Collected,
    },
    Destroy {
        sandbox: SandboxId,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TaskKind {
    PrepareBase,
    VerifyBase,
    CheckBudget,
    CreateSandbox,
    HealthCheck,
    RunAgent,
    Collect,
    Verify,
    Publish,
    Destroy,
}

impl Task {
    pub fn kind(&self) -> TaskKind {
        match self {
            Task::PrepareBase { .. } => TaskKind::PrepareBase,
            Task::VerifyBase { .. } => TaskKind::VerifyBase,
            Task::CheckBudget => TaskKind::CheckBudget,
            Task::CreateSandbox { .. } => TaskKind::CreateSandbox,
            Task::HealthCheck { .. } => TaskKind::HealthCheck,
            Task::RunAgent { .. } => TaskKind::RunAgent,
            Task::Collect { .. } => TaskKind::Collect,
            Task::Verify { .. } => TaskKind::Verify,
            Task::Publish { .. } => TaskKind::Publish,
            Task::Destroy { .. } => TaskKind::Destroy,
        }
    }
    /// The sandbox that this may bring into being.
    pub fn creates(&self) -> Option<&SandboxId> {
        match self {
            Task::PrepareBase { sandbox }
            | Task::VerifyBase { sandbox, .. }
            | Task::CreateSandbox { sandbox, .. }
            | Task::Verify { sandbox, .. } => Some(sandbox),
            Task::CheckBudget
            | Task::HealthCheck { .. }
            | Task::RunAgent { .. }
            | Task::Collect { .. }
            | Task::Publish { .. }
            | Task::Destroy { .. } => None,
        }
    }
}

/// The prepared start of a run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Base {
    pub commit: String,
    pub branch: String,
    pub snapshot: SnapshotId,
    pub host: HostId,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Output {
    Base(Base),
    BaseVerified(Verdict),
    /// There is money left to start with.
    BudgetOk,
    Created {
        host: HostId,
    },
    Healthy,
    Agent(AgentReport),
    Collected(Collected),
    Verified(Verdict),
    Published {
        reference: String,
    },
    Destroyed,
}

/// What an agent did, over all attempts so far.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AgentReport {
    pub stop: AgentStop,
    pub final_response: String,
    pub turns: u32,
    pub tool_calls: u32,
    pub errors: u32,
    pub tokens: Tokens,
    pub cost: Usd,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tokens {
    pub input: u64,
    pub output: u64,
    pub cache_write: u64,
    pub cache_read: u64,
}

impl Tokens {
    pub fn total(&self) -> u64 {
        self.input + self.output + self.cache_write + self.cache_read
    }
}

/// Why an agent stopped.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AgentStop {
    #[default]
    Finished,
    MaxTurns,
    /// The model refused to go on.
    Refused,
    BudgetExceeded,
}

impl AgentStop {
    pub fn outcome(self) -> (ForkOutcome, Option<&'static str>) {
        match self {
            AgentStop::Finished => (ForkOutcome::Success, None),
            AgentStop::MaxTurns => (ForkOutcome::Failed, Some("max_turns: the agent used all its turns")),
            AgentStop::Refused => (ForkOutcome::Failed, Some("refused: the model declined to go on")),
            AgentStop::BudgetExceeded => (
                ForkOutcome::BudgetExceeded,
                Some("budget_exceeded: no further request fits into the budget"),
            ),
        }
    }
}

/// A result as the host has checked it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Collected {
    pub commit: String,
    pub diff: DiffStat,
    /// The sandbox was gone: this is its last checkpoint.
    pub from_checkpoint: bool,
    pub captured: Vec<String>,
    /// Test files that were edited though nothing protected them.
    pub edited_tests: Vec<String>,
    /// Commits that the agent made; what it did not commit is one more on top of them.
    #[serde(default)]
    pub commits: u32,
    /// Why commits that were made inside are not among the result's: their files are.
    #[serde(default)]
    pub commits_left_out: Option<String>,
    /// Protected files that it changed: they are as in the base when it is judged.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub put_back: Vec<String>,
    /// What journal and ledger said by then. An agent that was stopped or lost has not said it itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub done: Option<AgentReport>,
}

/// What verify and score said.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Verdict {
    /// None: no verify command.
    pub passed: Option<bool>,
    pub score: Option<f64>,
    /// Why the score command gave no score: `exit 3`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub score_error: Option<String>,
    pub exit_code: Option<i32>,
    /// The end of what it printed.
    pub output: String,
}

/// Why a task did not succeed, by what the machine does next.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ErrorClass {
    /// Trying again may help: counted against the task's row in the table.
    Transient,
    /// It will never work.
    Permanent,
    /// The sandbox is gone; a new one from the last checkpoint may go on.
    SandboxLost,
    BudgetExceeded,
    /// It was asked to stop and did.
    Cancelled,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TaskError {
    pub class: ErrorClass,
    pub message: String,
    /// What an agent had done before it failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub partial: Option<AgentReport>,
}

impl TaskError {
    pub fn new(class: ErrorClass, message: impl Into<String>) -> TaskError {
        TaskError { class, message: message.into(), partial: None }
    }
}

pub type TaskResult = Result<Output, TaskError>;

/// One row of the retry table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RetryRow {
    /// Errors that a task may return, all in all; the last one is final.
    pub attempts: u32,
    pub first: Millis,
    pub backoff: u32,
    /// How long one try may take.
    pub limit: Millis,
}

/// Lost workers are not errors, but a task that was lost this often without any progress is given up.
pub const MAX_LOSSES: u32 = 5;

const fn row(attempts: u32, first_s: u64, limit_s: u64) -> RetryRow {
    RetryRow { attempts, first: Millis::secs(first_s), backoff: 2, limit: Millis::secs(limit_s) }
}

impl TaskKind {
    /// The retry table. An agent's limit is its fork's timeout, which the machine keeps itself.
    pub const fn retry(self) -> RetryRow {
        match self {
            TaskKind::PrepareBase => row(3, 5, 3600),
            TaskKind::VerifyBase => row(2, 5, 1800),
            TaskKind::CheckBudget => row(3, 1, 60),
            TaskKind::CreateSandbox => row(3, 5, 300),
            TaskKind::HealthCheck => row(1, 0, 60),
            TaskKind::RunAgent => row(2, 10, 8 * 24 * 3600),
            TaskKind::Collect => row(3, 2, 60),
            TaskKind::Verify => row(2, 5, 1800),
            TaskKind::Publish => row(3, 2, 120),
            TaskKind::Destroy => row(3, 2, 120),
        }
    }
    pub const fn as_str(self) -> &'static str {
        match self {
            TaskKind::PrepareBase => "prepare_base",
            TaskKind::VerifyBase => "verify_base",
            TaskKind::CheckBudget => "check_budget",
            TaskKind::CreateSandbox => "create_sandbox",
            TaskKind::HealthCheck => "health_check",
            TaskKind::RunAgent => "run_agent",
            TaskKind::Collect => "collect",
            TaskKind::Verify => "verify",
            TaskKind::Publish => "publish",
            TaskKind::Destroy => "destroy",
        }
    }
}

impl RetryRow {
    /// How long to wait after the `errors`th error; None: that was the last.
    pub fn delay(&self, errors: u32) -> Option<Millis> {
        (errors < self.attempts).then(|| {
            Millis(
                self.first.0.saturating_mul(u64::from(self.backoff).saturating_pow(errors.saturating_sub(1))),
            )
        })
    }
}

/// A task on its way to an activity.
#[derive(Debug, Clone, PartialEq)]
pub struct Dispatch {
    /// Unique in its machine; an outcome with another one is ignored.
    pub serial: u64,
    pub attempt: Attempt,
    pub limit: Millis,
    pub task: Task,
}

/// What a machine wants to be so. Engines make it so, and again after a crash: every effect can be repeated.
#[derive(Debug, Clone, PartialEq)]
pub enum Effect {
    Perform(Dispatch),
    /// The outcome still comes.
    Cancel {
        serial: u64,
    },
    /// Replaces a timer of the same name.
    SetTimer {
        timer: Timer,
        at: crate::Timestamp,
    },
    ClearTimer {
        timer: Timer,
    },
    /// Run only: the fork exists, and knows this of its run.
    Fork {
        fork: ForkNum,
        wish: Wish,
    },
}

/// What a run wants of a fork that it has started. Level, not edge: saying it twice changes nothing.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Wish {
    pub paused: bool,
    pub cancelled: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Timer {
    /// The fork's time is up.
    Deadline,
    Linger,
    /// A task's next try.
    Retry(u64),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_retry_table_is_the_documented_one() {
        let delays = |k: TaskKind| (1..9).map_while(|n| k.retry().delay(n)).map(|d| d.0).collect::<Vec<_>>();
        assert_eq!(delays(TaskKind::CreateSandbox), [5000, 10_000]);
        assert_eq!(delays(TaskKind::RunAgent), [10_000]);
        assert_eq!(delays(TaskKind::Destroy), [2000, 4000]);
        assert_eq!(delays(TaskKind::HealthCheck), [0_u64; 0]);
    }
}
