//! Runs: as they are asked for, and as they are shown.

use std::collections::BTreeMap;

use forkyard_core::budget::Balance;
use forkyard_core::sandbox;
use forkyard_core::view::{self, RunView};
use forkyard_engine::git::shown_url;
use forkyard_store::{MAX_SEARCH_BYTES, MAX_WORDS, RunQuery, Words};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use super::fork::Fork;
use super::mirror;
use crate::error::{ApiError, Result};

mirror!(RunStatus of view::RunStatus, "snake_case" { Pending, Preparing, Running, Finishing, Ended });
mirror!(RunOutcome of view::RunOutcome, "snake_case" { Success, Failed, Cancelled });
mirror!(EngineKind of view::EngineKind, "snake_case" { Embedded, Temporal });
mirror!(Provider of sandbox::ProviderKind, "lowercase" { Local, Docker, E2b, Daytona });
mirror!(Effort of forkyard_core::spec::Effort, "snake_case" { Low, Medium, High, Max });
mirror!(NetworkMode of sandbox::NetworkMode, "lowercase" { None, Isolated, Bridge });

/// One submitted job.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Run {
    pub id: String,
    pub engine: EngineKind,
    pub status: RunStatus,
    /// Once it has ended.
    pub outcome: Option<RunOutcome>,
    pub paused: bool,
    /// Its user let go of it: nobody takes it over until it is resumed.
    pub detached: bool,
    pub cancelling: bool,
    /// Without credentials.
    pub repo: String,
    pub branch: Option<String>,
    /// Of its first fork.
    pub prompt: String,
    pub budget_usd: Option<f64>,
    pub fork_budget_usd: Option<f64>,
    /// Milliseconds since 1970.
    pub created_at: u64,
    pub updated_at: u64,
    pub ended_at: Option<u64>,
    pub progress: Progress,
    pub error: Option<String>,
    /// Best first, once ended.
    pub ranking: Vec<u32>,
    /// Named only if something judged the results.
    pub winner: Option<u32>,
    /// In lists: what it has cost so far.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub cost_usd: Option<f64>,
}

#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Progress {
    pub total_forks: u32,
    pub pending: u32,
    pub in_progress: u32,
    pub completed: u32,
    pub failed: u32,
}

impl From<&RunView> for Run {
    fn from(v: &RunView) -> Run {
        Run {
            id: v.id.to_string(),
            engine: v.engine.into(),
            status: v.status.into(),
            outcome: v.outcome.map(Into::into),
            paused: v.paused,
            detached: v.detached,
            cancelling: v.cancelling,
            repo: shown_url(&v.repo),
            branch: v.branch.clone(),
            prompt: v.prompt.clone(),
            budget_usd: v.limits.run.map(|u| u.as_dollars()),
            fork_budget_usd: v.limits.fork.map(|u| u.as_dollars()),
            created_at: v.created_at.0,
            updated_at: v.updated_at.0,
            ended_at: v.ended_at.map(|t| t.0),
            progress: Progress {
                total_forks: v.progress.total_forks,
                pending: v.progress.pending,
                in_progress: v.progress.in_progress,
                completed: v.progress.completed,
                failed: v.progress.failed,
            },
            error: v.error.clone(),
            ranking: v.ranking.clone(),
            winner: v.winner,
            cost_usd: None,
        }
    }
}

/// A run with its forks and its money.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct RunDetail {
    #[serde(flatten)]
    pub run: Run,
    pub forks: Vec<Fork>,
    pub spent_usd: f64,
    /// Set aside for requests under way.
    pub reserved_usd: f64,
    /// The position of its last event.
    pub position: u64,
}

impl RunDetail {
    pub fn new(view: &RunView, forks: &[view::ForkView], balance: &Balance, position: u64) -> RunDetail {
        RunDetail {
            run: view.into(),
            forks: forks.iter().map(|f| with_spent(f, balance)).collect(),
            spent_usd: balance.spent.as_dollars(),
            reserved_usd: balance.reserved.as_dollars(),
            position,
        }
    }
}

/// While an agent works the ledger is ahead of its report.
fn with_spent(fork: &view::ForkView, balance: &Balance) -> Fork {
    let spent = balance.forks.get(&fork.fork).map_or(0.0, |b| b.spent.as_dollars());
    let shown = Fork::from(fork);
    Fork { cost_usd: shown.cost_usd.max(spent), ..shown }
}

#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct RunPage {
    pub runs: Vec<Run>,
    /// For the next page; null at the end.
    pub next_cursor: Option<String>,
    /// If they were asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub counts: Option<RunCounts>,
}

/// All runs that a search finds, by how they are.
#[derive(Debug, Clone, Copy, Serialize, Deserialize, ToSchema)]
pub struct RunCounts {
    pub all: u64,
    pub live: u64,
    pub success: u64,
    pub failed: u64,
    pub cancelled: u64,
}

impl From<forkyard_store::RunCounts> for RunCounts {
    fn from(c: forkyard_store::RunCounts) -> RunCounts {
        let forkyard_store::RunCounts { all, live, success, failed, cancelled } = c;
        RunCounts { all, live, success, failed, cancelled }
    }
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct ListRuns {
    /// Only runs that have not ended.
    pub live: Option<bool>,
    /// Only runs that ended in one of these ways, with commas between them: `success`, `failed`, `cancelled`.
    pub outcome: Option<String>,
    /// Only runs in whose id, repository, branch or prompt (its first 16 KiB) all these words occur, as they stand or as
    /// parts of others; case does not matter.
    #[param(max_length = 1000)]
    pub search: Option<String>,
    /// Also count all runs that the search finds, by how they are.
    pub counts: Option<bool>,
    #[param(minimum = 1, maximum = 500)]
    pub limit: Option<u32>,
    /// `next_cursor` of the page before.
    pub cursor: Option<String>,
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct FollowRuns {
    /// As in the list of runs.
    pub live: Option<bool>,
    /// As in the list of runs.
    pub outcome: Option<String>,
    /// As in the list of runs.
    #[param(max_length = 1000)]
    pub search: Option<String>,
}

/// What became of one run: one of the two.
#[derive(Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RunNews {
    /// It is new or has changed, and is one of those that are asked for.
    Run(Box<Run>),
    /// There is no such run, or it is none of those any more.
    Gone(String),
}

/// Which runs are asked for.
pub fn wanted(live: Option<bool>, outcome: Option<&str>, search: Option<&str>) -> Result<RunQuery> {
    let live = live.unwrap_or(false);
    let mut outcomes = vec![];
    for word in outcome.into_iter().flat_map(|o| o.split(',')) {
        outcomes.push(match word.trim() {
            "success" => view::RunOutcome::Success,
            "failed" => view::RunOutcome::Failed,
            "cancelled" => view::RunOutcome::Cancelled,
            other => {
                return Err(ApiError::field(
                    "outcome",
                    other,
                    "is not known",
                    "write success, failed, cancelled",
                ));
            }
        });
    }
    if live && !outcomes.is_empty() {
        let fix = "ask for the one or the other";
        return Err(ApiError::field(
            "outcome",
            outcome.unwrap_or_default(),
            "is of no run that is live",
            fix,
        ));
    }
    let search = search.unwrap_or_default();
    let words = Words::parse(search).map_err(|_| {
        let fix = format!("give at most {MAX_WORDS} words, {MAX_SEARCH_BYTES} bytes together");
        ApiError::field("search", search, "is too long", &fix)
    })?;
    Ok(RunQuery { live, outcomes, words, ..RunQuery::default() })
}

/// What a run is to be. What is left out is as the server's settings say.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CreateRun {
    /// A URL, or an absolute path below the server's root.
    pub repo: String,
    /// Branch, tag or commit to start from.
    #[serde(default)]
    pub branch: Option<String>,
    /// Carry uncommitted changes of a local repository.
    #[serde(default)]
    pub dirty: bool,
    /// What the agents are to do.
    pub prompt: String,
    #[serde(default)]
    pub model: Option<String>,
    /// How many; by default one, or one for each variant.
    #[serde(default)]
    #[schema(minimum = 1, maximum = 100)]
    pub forks: Option<u32>,
    /// What makes forks differ, dealt out in order and again from the start.
    #[serde(default)]
    pub variants: Vec<Variant>,
    #[serde(default)]
    #[schema(minimum = 1, maximum = 100)]
    pub max_concurrent: Option<u32>,
    #[serde(default)]
    pub timeout_ms: Option<u64>,
    #[serde(default)]
    pub budget_usd: Option<f64>,
    #[serde(default)]
    pub fork_budget_usd: Option<f64>,
    #[serde(default)]
    pub max_turns: Option<u32>,
    #[serde(default)]
    pub setup: Option<String>,
    #[serde(default)]
    pub verify: Option<String>,
    #[serde(default)]
    pub score: Option<String>,
    #[serde(default)]
    pub protect: Option<Vec<String>>,
    #[serde(default)]
    pub capture: Option<Vec<String>>,
    #[serde(default)]
    pub linger_ms: Option<u64>,
    /// Hand the sandboxes over instead of destroying them.
    #[serde(default)]
    pub keep: bool,
    #[serde(default)]
    pub until_verified: Option<UntilVerified>,
    #[serde(default)]
    pub sandbox: Option<SandboxPlan>,
    #[serde(default)]
    pub agent: Option<AgentPlan>,
}

/// What one fork has that others have not.
#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Variant {
    pub name: Option<String>,
    pub prompt: Option<String>,
    pub model: Option<String>,
    pub system_prompt: Option<String>,
    /// An image, a snapshot or a sandbox of its own to start from, instead of the run's.
    pub image: Option<String>,
    pub snapshot: Option<String>,
    /// It works in a child of this sandbox, which stays as it is.
    pub sandbox: Option<String>,
    pub memory_bytes: Option<u64>,
    pub cpus: Option<f64>,
    pub disk_bytes: Option<u64>,
    pub processes: Option<u32>,
    pub network_bytes_per_s: Option<u64>,
    pub capture: Option<Vec<String>>,
}

/// Start more forks until this many are verified.
#[derive(Debug, Clone, Copy, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct UntilVerified {
    pub verified: u32,
    pub max_forks: u32,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct SandboxPlan {
    pub provider: Option<Provider>,
    /// A registry reference; `oci:PATH` and `archive:PATH` below the server's root.
    pub image: Option<String>,
    /// A snapshot to start from.
    pub snapshot: Option<String>,
    pub memory_bytes: Option<u64>,
    pub cpus: Option<f64>,
    pub disk_bytes: Option<u64>,
    pub processes: Option<u32>,
    /// Bytes a second and direction.
    pub network_bytes_per_s: Option<u64>,
    pub env: Option<BTreeMap<String, String>>,
    pub strict: Option<bool>,
    /// A disk of its own for the sandbox, whose limit the kernel keeps.
    pub disk_image: Option<bool>,
    pub network: Option<NetworkMode>,
    /// Hosts that it may reach besides the default list.
    pub allow: Option<Vec<String>>,
    pub no_default_allow: Option<bool>,
    /// Names of secrets of the server's configuration.
    pub secrets: Option<Vec<String>>,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct AgentPlan {
    pub permission_mode: Option<PermissionMode>,
    pub allowed_tools: Option<Vec<String>>,
    pub disallowed_tools: Option<Vec<String>>,
    /// Template of the agent's system prompt.
    pub prompt_template: Option<String>,
    /// Of one turn.
    pub max_tool_calls: Option<u32>,
    pub effort: Option<Effort>,
    /// Tokens of one answer.
    pub max_output_tokens: Option<u32>,
    /// The agent itself runs inside its sandbox and reaches the model only through this server.
    pub in_sandbox: Option<bool>,
}

/// What the agent may do without being asked about it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub enum PermissionMode {
    Default,
    AcceptEdits,
    Plan,
    BypassPermissions,
}

impl PermissionMode {
    /// As the core's specification has it.
    pub fn as_str(self) -> &'static str {
        match self {
            PermissionMode::Default => "default",
            PermissionMode::AcceptEdits => "acceptEdits",
            PermissionMode::Plan => "plan",
            PermissionMode::BypassPermissions => "bypassPermissions",
        }
    }
}

/// A command was accepted; whoever drives the run does it.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct Accepted {
    pub run: String,
    /// `pause`, `resume`, `cancel`, `cancel_fork`, `add_forks`.
    pub command: String,
}

impl Accepted {
    pub fn new(run: &RunView, command: &str) -> Accepted {
        Accepted { run: run.id.to_string(), command: command.to_string() }
    }
}

/// More forks for a live run: like its first one, or as these say.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct AddForks {
    #[serde(default)]
    #[schema(minimum = 1, maximum = 100)]
    pub forks: Option<u32>,
    #[serde(default)]
    pub prompt: Option<String>,
    #[serde(default)]
    pub model: Option<String>,
}
