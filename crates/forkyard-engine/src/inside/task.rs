//! What an agent inside is told about its task: one value, and the same in variables for programs that read those.

use std::collections::BTreeMap;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use forkyard_agent::{AgentConfig, Continuity};
use forkyard_core::policy::PolicyConfig;
use forkyard_core::sandbox::Root;
use forkyard_core::spec::{Effort, RunSpec};
use forkyard_core::{Attempt, ForkNum, RunId, SandboxId, Usd};
use serde::{Deserialize, Serialize};

/// A variable of a program can be no longer than this on Linux, with its name.
const MAX_VARIABLE_BYTES: usize = 120 << 10;

/// The whole task, as JSON.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TaskData {
    pub run: RunId,
    pub fork: ForkNum,
    pub attempt: Attempt,
    pub sandbox: SandboxId,
    pub model: String,
    pub prompt: String,
    pub repo: String,
    pub branch: String,
    pub max_tokens: u32,
    pub max_turns: u32,
    pub context_tokens: u64,
    pub effort: Option<Effort>,
    pub prompt_template: Option<String>,
    pub lingers: bool,
    pub heartbeat_ms: u64,
    /// Where the sandbox replaced a lost one: the journal position that its files belong to, and why.
    pub replaced: Option<(u64, String)>,
    /// Advice: whoever works inside judges its own calls.
    pub policy: PolicyConfig,
}

impl TaskData {
    pub fn new(sandbox: SandboxId, config: &AgentConfig, policy: PolicyConfig) -> TaskData {
        TaskData {
            run: config.run.clone(),
            fork: config.fork,
            attempt: config.attempt,
            sandbox,
            model: config.model.clone(),
            prompt: config.task.clone(),
            repo: config.repo.clone(),
            branch: config.branch.clone(),
            max_tokens: config.max_tokens,
            max_turns: config.max_turns,
            context_tokens: config.context_tokens,
            effort: config.effort,
            prompt_template: config.prompt_template.clone(),
            lingers: config.lingers,
            heartbeat_ms: u64::try_from(config.heartbeat.as_millis()).unwrap_or(u64::MAX),
            replaced: match &config.continuity {
                Continuity::Same => None,
                Continuity::Replaced { position, reason } => Some((*position, reason.clone())),
            },
            policy,
        }
    }

    /// What the agent's own loop is told.
    pub fn config(&self) -> AgentConfig {
        let mut config =
            AgentConfig::new(self.run.clone(), self.fork, self.attempt, &self.model, &self.prompt);
        config.continuity = match &self.replaced {
            None => Continuity::Same,
            Some((position, reason)) => Continuity::Replaced { position: *position, reason: reason.clone() },
        };
        config.repo.clone_from(&self.repo);
        config.branch.clone_from(&self.branch);
        config.max_tokens = self.max_tokens;
        config.max_turns = self.max_turns;
        config.context_tokens = self.context_tokens;
        config.effort = self.effort;
        config.prompt_template.clone_from(&self.prompt_template);
        config.lingers = self.lingers;
        config.heartbeat = std::time::Duration::from_millis(self.heartbeat_ms);
        // Only from outside can a checkpoint be made.
        config.keep_checkpoints = 0;
        config
    }

    /// `RUN/N`.
    pub fn task_id(&self) -> String {
        format!("{}/{}", self.run, self.fork)
    }

    pub fn to_base64(&self) -> String {
        BASE64_STANDARD.encode(serde_json::to_vec(self).unwrap_or_default())
    }

    pub fn from_base64(text: &str) -> Result<TaskData, String> {
        let json = BASE64_STANDARD.decode(text.trim()).map_err(|e| format!("is not base64: {e}"))?;
        serde_json::from_slice(&json).map_err(|e| format!("is not a task: {e}"))
    }

    /// The variables of a worker, by the names that agents in sandboxes know. What does not fit into a variable is left out;
    /// the task's file has it.
    pub fn variables(&self, spec: &RunSpec, resumes: bool) -> BTreeMap<String, String> {
        let list = |items: &[String]| items.join(",");
        let budget = spec.budget.fork.or(spec.budget.run).map(Usd::as_dollars);
        let limits = &spec.sandbox.limits;
        let mode = serde_json::to_value(self.policy.permission_mode).unwrap_or_default();
        let (image, snapshot) = match &spec.sandbox.root {
            Root::Image(image) => (Some(image.clone()), None),
            Root::Snapshot(id) => (None, Some(id.to_string())),
            Root::Default | Root::Directory(_) => (None, None),
        };
        let some = [
            ("SANDBOX_ID", Some(self.sandbox.to_string())),
            ("TASK_ID", Some(self.task_id())),
            ("TASK_DESCRIPTION", Some(self.prompt.clone())),
            ("TASK_DATA_BASE64", Some(self.to_base64())),
            ("BRANCH_NAME", Some(self.branch.clone())),
            ("MODEL", Some(self.model.clone())),
            ("MAX_TURNS", Some(self.max_turns.to_string())),
            ("MAX_BUDGET_USD", budget.map(|b| b.to_string())),
            ("PERMISSION_MODE", mode.as_str().map(str::to_string)),
            ("ALLOWED_TOOLS", Some(list(&self.policy.allowed_tools))),
            ("DISALLOWED_TOOLS", Some(list(&self.policy.disallowed_tools))),
            ("HEARTBEAT_INTERVAL", Some((self.heartbeat_ms as f64 / 1000.0).to_string())),
            ("RESUME_SESSION_ID", resumes.then(|| self.task_id())),
            ("FORK_SESSION", Some("false".into())),
            ("SANDBOX_MEMORY_GB", limits.memory_bytes.map(bytes_as_gib)),
            ("SANDBOX_CPU", limits.cpus.map(|c| c.to_string())),
            ("SANDBOX_DISK_GB", limits.disk_bytes.map(bytes_as_gib)),
            ("SANDBOX_IMAGE", image),
            ("SANDBOX_SNAPSHOT", snapshot),
        ];
        some.into_iter()
            .filter_map(|(name, value)| Some((name, value?)))
            .filter(|(_, value)| value.len() <= MAX_VARIABLE_BYTES && !value.contains('\0'))
            .map(|(name, value)| (name.to_string(), value))
            .collect()
    }
}

pub fn bytes_as_gib(bytes: u64) -> String {
    (bytes as f64 / (1_u64 << 30) as f64).to_string()
}
