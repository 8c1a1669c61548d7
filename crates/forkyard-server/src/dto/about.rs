//! This server and its machine.

use forkyard_core::spec::RunSpec;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::run::{NetworkMode, Provider};

/// What a page needs to know before it asks for anything.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct About {
    pub version: String,
    /// Milliseconds since 1970, by this server's clock.
    pub now: u64,
    /// Repositories of this machine are taken from below it; null: URLs alone.
    pub root: Option<String>,
    /// Names that a run can give as its model.
    pub models: Vec<String>,
    /// Names of secrets that a run may use.
    pub secrets: Vec<String>,
    pub max_forks: u32,
    pub defaults: Defaults,
}

/// What a run is where its request says nothing.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct Defaults {
    pub model: String,
    pub max_concurrent: u32,
    pub timeout_ms: u64,
    pub budget_usd: Option<f64>,
    pub fork_budget_usd: Option<f64>,
    pub max_turns: u32,
    pub setup: Option<String>,
    pub verify: Option<String>,
    pub score: Option<String>,
    pub protect: Vec<String>,
    pub linger_ms: u64,
    pub provider: Provider,
    pub network: NetworkMode,
    pub allow: Vec<String>,
}

impl From<&RunSpec> for Defaults {
    fn from(s: &RunSpec) -> Defaults {
        Defaults {
            model: s.forks.first().map(|f| f.model.clone()).unwrap_or_default(),
            max_concurrent: s.max_concurrent,
            timeout_ms: s.fork_timeout.0,
            budget_usd: s.budget.run.map(|u| u.as_dollars()),
            fork_budget_usd: s.budget.fork.map(|u| u.as_dollars()),
            max_turns: s.max_turns,
            setup: s.setup.clone(),
            verify: s.verify.clone(),
            score: s.score.clone(),
            protect: s.protect.clone(),
            linger_ms: s.linger.0,
            provider: s.sandbox.provider.into(),
            network: s.sandbox.network.mode.into(),
            allow: s.sandbox.network.allow.clone(),
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum CheckHealth {
    Good,
    /// Something optional is missing.
    Missing,
    /// As it was asked for: data can leave, or be changed, there.
    Open,
    /// Runs will fail.
    Bad,
}

/// One thing that `forkyard doctor` looked at.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Check {
    pub name: String,
    pub health: CheckHealth,
    pub found: String,
    pub fix: Option<String>,
}

#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct Checks {
    /// Nothing is bad.
    pub sound: bool,
    pub checks: Vec<Check>,
}
