//! Agents in sandboxes of their own, without a repository: a task in, an answer and files out.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use forkyard_agent::inference::SessionSpec;
use forkyard_agent::ports::{Journal, JournalError, MemoryBudget, MessageId, NoInbox, NoSink};
use forkyard_agent::{Agent, AgentConfig, Interceptor, JournalEntry, ToolRequest, ToolResponse, Verdict};
use forkyard_core::{Attempt, RunId, Usd};
use forkyard_sandbox::GlobRequest;
use futures::future::BoxFuture;
use serde::Serialize;
use tokio_util::sync::CancellationToken;

use super::error::Result;
use super::sandboxes::{Sandbox, SandboxConfig, Sandboxes};
use crate::commands::fork::check_model;
use crate::error::CliError;
use crate::yard::{Yard, random_text};

/// Captured files of one task, each and in number.
const MAX_CAPTURED_BYTES: u64 = 16 << 20;
const MAX_CAPTURED: usize = 200;

type Handler = Arc<dyn Fn(ToolRequest, Sandbox) -> BoxFuture<'static, Verdict> + Send + Sync>;

/// What an agent is to do, and where.
#[derive(Clone)]
pub struct AgentTask {
    prompt: String,
    name: Option<String>,
    model: Option<String>,
    system_prompt: Option<String>,
    sandbox: SandboxConfig,
    inside: Option<Sandbox>,
    auto_cleanup: bool,
    capture: Vec<String>,
    max_turns: Option<u32>,
    timeout: Option<Duration>,
    budget: Option<f64>,
    handlers: Vec<(String, Handler)>,
}

impl AgentTask {
    pub fn new(prompt: impl Into<String>) -> AgentTask {
        AgentTask {
            prompt: prompt.into(),
            name: None,
            model: None,
            system_prompt: None,
            sandbox: SandboxConfig::new(),
            inside: None,
            auto_cleanup: true,
            capture: Vec::new(),
            max_turns: None,
            timeout: None,
            budget: None,
            handlers: Vec::new(),
        }
    }
    /// What its result is called.
    pub fn name(mut self, name: impl Into<String>) -> AgentTask {
        self.name = Some(name.into());
        self
    }
    /// `sonnet`, `openai:NAME`, `script:FILE` …; the setting `model` if not given.
    pub fn model(mut self, model: impl Into<String>) -> AgentTask {
        self.model = Some(model.into());
        self
    }
    /// A template; the built-in one if not given.
    pub fn system_prompt(mut self, text: impl Into<String>) -> AgentTask {
        self.system_prompt = Some(text.into());
        self
    }
    /// How its sandbox is made.
    pub fn sandbox(mut self, config: SandboxConfig) -> AgentTask {
        self.sandbox = config;
        self
    }
    /// Work in a sandbox that is there already. It is never destroyed by the executor.
    pub fn inside(mut self, sandbox: &Sandbox) -> AgentTask {
        self.inside = Some(sandbox.clone());
        self
    }
    /// Destroy the sandbox when the agent has ended; so it is unless this says no.
    pub fn auto_cleanup(mut self, yes: bool) -> AgentTask {
        self.auto_cleanup = yes;
        self
    }
    /// Bring back the files that match, such as `**/*.js`.
    pub fn capture(mut self, glob: impl Into<String>) -> AgentTask {
        self.capture.push(glob.into());
        self
    }
    pub fn max_turns(mut self, turns: u32) -> AgentTask {
        self.max_turns = Some(turns);
        self
    }
    /// Time that the agent may take; the setting `run.timeout` if not given.
    pub fn timeout(mut self, timeout: Duration) -> AgentTask {
        self.timeout = Some(timeout);
        self
    }
    /// Most that it may cost, in dollars.
    pub fn budget(mut self, dollars: f64) -> AgentTask {
        self.budget = Some(dollars);
        self
    }
    /// Asks `handler` about every call of a tool (`*`: of all tools) before it runs: it may allow, refuse, change or answer it.
    /// What it changes is judged by the policy again.
    pub fn intercept<F, Fut>(mut self, tool: impl Into<String>, handler: F) -> AgentTask
    where
        F: Fn(ToolRequest, Sandbox) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Verdict> + Send + 'static,
    {
        let handler: Handler = Arc::new(move |request, sandbox| Box::pin(handler(request, sandbox)));
        self.handlers.push((tool.into(), handler));
        self
    }
}

/// What an agent did.
#[derive(Debug, Clone, Serialize)]
#[non_exhaustive]
pub struct AgentResult {
    pub name: Option<String>,
    pub sandbox_id: String,
    pub success: bool,
    /// Its last words.
    pub output: String,
    pub turns: u32,
    pub tool_calls: u32,
    /// Failed and refused tool calls, and what else went wrong on the way.
    pub errors: Vec<String>,
    /// Calls that policy, a hook or an interceptor refused.
    pub denied: u32,
    pub total_tokens: u64,
    /// In dollars.
    pub total_cost: f64,
    /// In seconds.
    pub execution_time: f64,
    /// Why it did not succeed.
    pub error: Option<String>,
    /// Captured files by their path below `/workspace`.
    pub files: BTreeMap<String, Vec<u8>>,
}

/// An agent at work, or a sandbox that was kept.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ActiveAgent {
    pub sandbox_id: String,
    pub name: Option<String>,
    /// None once it has ended and only its sandbox is left.
    pub task: Option<String>,
}

/// Runs agents, each in a sandbox of its own.
#[derive(Clone)]
pub struct Agents {
    yard: Arc<Yard>,
    sandboxes: Sandboxes,
    active: Arc<Mutex<BTreeMap<String, (ActiveAgent, CancellationToken)>>>,
}

impl Agents {
    pub(super) fn new(yard: Arc<Yard>) -> Agents {
        Agents { sandboxes: Sandboxes::new(yard.clone()), yard, active: Arc::default() }
    }

    /// Runs one agent to its end. That it does not succeed is no error: the result says so. If this is dropped on the way, the
    /// sandbox stays until [`Agents::clean_up`] or its lifetime's end.
    pub async fn execute(&self, task: AgentTask) -> Result<AgentResult> {
        let model = task.model.clone().unwrap_or_else(|| self.yard.settings.model.clone());
        // Before a sandbox is made for nothing.
        check_model(&self.yard, &model)?;
        let budget = budget(task.budget)?;
        let (sandbox, ours) = match &task.inside {
            Some(sandbox) => (sandbox.clone(), false),
            None => (self.sandboxes.create(task.sandbox.clone()).await?, true),
        };
        let cancel = CancellationToken::new();
        let at_work = ActiveAgent {
            sandbox_id: sandbox.id().to_string(),
            name: task.name.clone(),
            task: Some(task.prompt.clone()),
        };
        self.lock().insert(sandbox.id().to_string(), (at_work, cancel.clone()));
        let result = self.work(&task, &model, &sandbox, budget, cancel).await;
        let keep = ours && !task.auto_cleanup;
        if keep {
            if let Some((active, _)) = self.lock().get_mut(sandbox.id()) {
                active.task = None;
            }
            return result;
        }
        self.lock().remove(sandbox.id());
        let destroyed = if ours { sandbox.destroy().await } else { Ok(()) };
        let result = result?;
        destroyed?;
        Ok(result)
    }

    /// Runs all of them at once; results in the order of the tasks.
    pub async fn execute_parallel(
        &self,
        tasks: impl IntoIterator<Item = AgentTask>,
    ) -> Vec<Result<AgentResult>> {
        futures::future::join_all(tasks.into_iter().map(|task| self.execute(task))).await
    }

    /// Agents at work, and sandboxes that were kept.
    pub fn active(&self) -> Vec<ActiveAgent> {
        self.lock().values().map(|(active, _)| active.clone()).collect()
    }

    /// The sandbox of an agent at work, or one that was kept.
    pub async fn sandbox(&self, id: &str) -> Result<Sandbox> {
        self.sandboxes.get(id).await
    }

    /// Stops the agents that are at work and destroys every sandbox that this executor made; says how many.
    pub async fn clean_up(&self) -> Result<usize> {
        let active = std::mem::take(&mut *self.lock());
        for (_, cancel) in active.values() {
            cancel.cancel();
        }
        self.sandboxes.destroy_all().await
    }

    async fn work(
        &self,
        task: &AgentTask,
        model: &str,
        sandbox: &Sandbox,
        budget: MemoryBudget,
        cancel: CancellationToken,
    ) -> Result<AgentResult> {
        let s = &self.yard.settings;
        let (inference, model_name) = self.yard.models.open(model).map_err(CliError::usage)?;
        let run = RunId::new(format!("a{}", random_text(9)))?;
        let attempt = Attempt(1);
        let session = SessionSpec {
            key: format!("{run}/0/a1"),
            fork: Some(0),
            ledger: Arc::new(budget.ledger(0, attempt)),
            cancel: cancel.clone(),
        };
        let mut config = AgentConfig::new(run, 0, attempt, model_name, &task.prompt);
        config.max_turns = task.max_turns.unwrap_or(s.max_turns);
        config.prompt_template = task.system_prompt.clone();
        config.hooks = s.tables.hooks.clone();
        config.skills_dir = Some(s.home.join("skills")).filter(|d| d.is_dir());
        config.log_dir = s.log_dir.clone();
        let timeout = task.timeout.unwrap_or(s.timeout.as_duration());
        config.deadline = Some(tokio::time::Instant::now() + timeout);
        let handlers = task.handlers.iter().map(|(tool, handler)| -> Arc<dyn Interceptor> {
            let (tool, handler, sandbox) = (tool.clone(), handler.clone(), sandbox.clone());
            Arc::new(Asks { tool, handler, sandbox })
        });
        let agent = Agent {
            model: Arc::new(inference.session(session)),
            sandbox: sandbox.inner(),
            journal: Arc::new(MemoryJournal::default()),
            inbox: Arc::new(NoInbox),
            checkpoints: None,
            events: Arc::new(NoSink),
            policy: s.tables.policy.clone(),
            interceptors: handlers.collect(),
            config,
        };
        let outcome = agent.run(cancel).await.map_err(|e| CliError::failure(e.to_string()))?;
        Ok(AgentResult {
            name: task.name.clone(),
            sandbox_id: sandbox.id().to_string(),
            success: outcome.success,
            output: outcome.final_response,
            turns: outcome.turns,
            tool_calls: outcome.tool_calls,
            errors: outcome.errors,
            denied: outcome.denied,
            total_tokens: outcome.usage.total(),
            total_cost: outcome.cost.as_dollars(),
            execution_time: outcome.duration.0 as f64 / 1000.0,
            error: (!outcome.success).then(|| format!("the agent stopped: {}", outcome.stop.as_str())),
            files: captured(sandbox, &task.capture).await?,
        })
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, (ActiveAgent, CancellationToken)>> {
        self.active.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn budget(dollars: Option<f64>) -> Result<MemoryBudget> {
    match dollars {
        None => Ok(MemoryBudget::unlimited()),
        Some(d) => match Usd::from_dollars(d) {
            Some(limit) => Ok(MemoryBudget::of_run(limit)),
            None => Err(CliError::usage(format!("budget = {d} can't be used"))
                .hint("give dollars, from 0 to 1000000")
                .into()),
        },
    }
}

async fn captured(sandbox: &Sandbox, globs: &[String]) -> Result<BTreeMap<String, Vec<u8>>> {
    let inner = sandbox.inner();
    let mut files = BTreeMap::new();
    for pattern in globs {
        let request = GlobRequest { pattern: pattern.clone(), path: None, max: MAX_CAPTURED };
        for path in inner.glob(request).await? {
            if files.len() >= MAX_CAPTURED || files.contains_key(&path) {
                continue;
            }
            // A link to nowhere or a socket is no reason to lose the answer.
            if let Ok(data) = inner.read_file(&format!("/workspace/{path}"), 0, MAX_CAPTURED_BYTES).await {
                files.insert(path, data.to_vec());
            }
        }
    }
    Ok(files)
}

/// A user's handler of one tool.
struct Asks {
    tool: String,
    handler: Handler,
    sandbox: Sandbox,
}

#[async_trait]
impl Interceptor for Asks {
    async fn before(&self, request: &ToolRequest) -> Verdict {
        if self.tool != "*" && self.tool != request.tool {
            return Verdict::Allow;
        }
        (self.handler)(request.clone(), self.sandbox.clone()).await
    }
    async fn after(&self, _: &ToolRequest, _: &mut ToolResponse) {}
}

/// The journal of an agent that lives and dies with this process.
#[derive(Default)]
struct MemoryJournal(Mutex<Vec<JournalEntry>>);

#[async_trait]
impl Journal for MemoryJournal {
    async fn read(&self) -> Result<Vec<JournalEntry>, JournalError> {
        Ok(self.0.lock().unwrap_or_else(PoisonError::into_inner).clone())
    }
    async fn append(&self, entries: &[JournalEntry], _: &[MessageId]) -> Result<u64, JournalError> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.extend_from_slice(entries);
        Ok(all.len() as u64)
    }
}
