//! One attempt of a fork's agent.

use std::sync::Arc;
use std::time::Duration;

use forkyard_agent::inference::{Model, SessionSpec};
use forkyard_agent::{Agent, AgentConfig, AgentError, AgentEvent, AgentOutcome, JournalEntry, Stop};
use forkyard_core::policy::{PermissionMode, PolicyConfig};
use forkyard_core::sandbox::Labels;
use forkyard_core::spec::ForkSpec;
use forkyard_core::task::{AgentReport, AgentStop, Base, ErrorClass, Output, TaskError, TaskResult, Tokens};
use forkyard_core::{ForkNum, Millis, RunId, SandboxId, Usd};
use forkyard_sandbox::Sandbox;

use super::checkpoint::read;
use super::{Hands, Job, git_error, sandbox_gone};
use crate::ports::{BaseTree, ForkSink, HostCheckpoints, StoreInbox, StoreJournal, StoreLedger, Tenure};

/// Of the final answer, this much goes into the machine's log; the journal has all of it.
const MAX_RESPONSE_BYTES: usize = 64 << 10;
/// A settlement is one write; a store that is away for longer is not waited for.
const SETTLE_WITHIN: Duration = Duration::from_secs(2);
const SETTLE_POLL: Duration = Duration::from_millis(20);

impl Hands {
    pub(super) async fn run_agent(&self, job: &Job, id: &SandboxId, base: &Base) -> TaskResult {
        if job.spec.agent.in_sandbox {
            return self.run_inside(job, id, base).await;
        }
        let Some((fork, spec)) = job.fork.clone() else {
            return Err(TaskError::new(ErrorClass::Permanent, "an agent needs a fork"));
        };
        let permanent = |why: String| TaskError::new(ErrorClass::Permanent, why);
        let (inference, _) = self.models.open(&spec.model).map_err(permanent)?;
        let tenure = Tenure {
            store: self.store.clone(),
            run: job.run.clone(),
            fork,
            attempt: job.attempt,
            sandbox: id.clone(),
        };
        let sandbox = match self.provider(job)?.attach(id, job.attempt).await {
            Ok(sandbox) => sandbox,
            // What was done before it was lost is progress: only losses without any count against the fork.
            Err(e) => return Err(self.with_report(&tenure, sandbox_gone(e)).await),
        };
        let limited = job.spec.budget.run.is_some() || job.spec.budget.fork.is_some();
        let model: Arc<dyn Model> = Arc::new(inference.session(SessionSpec {
            key: format!("{}/{fork}/a{}", job.run, job.attempt),
            fork: Some(fork),
            ledger: Arc::new(StoreLedger::new(tenure.clone(), limited)),
            cancel: job.cancel.clone(),
        }));
        let entries = read(&*self.store, &job.run, fork).await?;
        let (config, policy) = self.agent_config(job, fork, &spec, base, &entries, &*sandbox).await?;
        drop(entries);
        let labels =
            Labels::from([("run".to_string(), job.run.to_string()), ("fork".to_string(), fork.to_string())]);
        let commit = crate::git::CommitId::new(&base.commit).map_err(git_error)?;
        let agent = Agent {
            model,
            checkpoints: Some(Arc::new(HostCheckpoints {
                sandbox: sandbox.clone(),
                provider: self.provider(job)?.clone(),
                store: self.store.clone(),
                run: job.run.clone(),
                fork,
                labels,
                base: BaseTree::new(self.git.clone(), &job.spec.repo.source, commit),
                travels: self.config.agent.travels,
            })),
            sandbox,
            journal: Arc::new(StoreJournal::new(tenure.clone())),
            inbox: Arc::new(StoreInbox::new(tenure.clone())),
            events: Arc::new(ForkSink {
                run: job.run.clone(),
                fork,
                heartbeat: job.heartbeat.clone(),
                onlooker: self.onlooker.clone(),
            }),
            policy,
            interceptors: self.config.interceptors.clone(),
            config,
        };
        match agent.run(job.cancel.clone()).await {
            Ok(outcome) => {
                let spent = self.spent(&tenure.run, tenure.fork).await;
                finished(AgentOutcome { cost: outcome.cost.max(spent), ..outcome })
            }
            Err(e) => Err(self.failed(&tenure, e).await),
        }
    }

    /// What a fork's agent is told, wherever it runs.
    pub(super) async fn agent_config(
        &self,
        job: &Job,
        fork: ForkNum,
        spec: &ForkSpec,
        base: &Base,
        entries: &[JournalEntry],
        sandbox: &dyn Sandbox,
    ) -> Result<(AgentConfig, PolicyConfig), TaskError> {
        let permanent = |why: String| TaskError::new(ErrorClass::Permanent, why);
        let (inference, model_name) = self.models.open(&spec.model).map_err(permanent)?;
        let mut policy = self.config.policy.clone();
        let plan = &job.spec.agent;
        policy.allowed_tools.extend(plan.allowed_tools.iter().cloned());
        policy.disallowed_tools.extend(plan.disallowed_tools.iter().cloned());
        policy.max_calls_per_turn =
            plan.max_tool_calls.map_or(policy.max_calls_per_turn, |most| most.min(policy.max_calls_per_turn));
        if let Some(mode) = &plan.permission_mode {
            policy.permission_mode = serde_json::from_value::<PermissionMode>(mode.clone().into())
                .map_err(|_| permanent(format!("{mode:?} is not a permission mode")))?;
        }
        let mut config = AgentConfig::new(job.run.clone(), fork, job.attempt, model_name, &spec.prompt);
        config.continuity = self.continuity(entries, sandbox).await?;
        config.context_tokens = inference.context_tokens(&config.model);
        config.effort = plan.effort;
        config.max_tokens = plan.max_output_tokens.unwrap_or(config.max_tokens);
        config.max_turns = job.spec.max_turns;
        config.lingers = job.spec.linger > Millis::ZERO;
        config.heartbeat = self.config.agent.heartbeat;
        config.keep_checkpoints = self.config.agent.keep_checkpoints;
        config.repo = crate::git::shown_url(&job.spec.repo.source);
        config.branch = base.branch.clone();
        config.prompt_template = spec.system_prompt.clone().or_else(|| plan.prompt_template.clone());
        config.hooks = self.config.hooks.clone();
        config.skills_dir = self.config.skills_dir.clone();
        config.log_dir = self.config.log_dir.as_ref().map(|d| d.join(job.run.as_str()));
        Ok((config, policy))
    }

    /// What the ledger says: also for answers that were lost with an attempt, which no journal knows of.
    pub(super) async fn spent(&self, run: &RunId, fork: ForkNum) -> Usd {
        let balance = self.store.balance(run).await.unwrap_or_default();
        balance.forks.get(&fork).map_or(Usd::ZERO, |f| f.spent)
    }

    /// The same once the agent has ended: a request that was broken off is settled in the background, and what stays open is
    /// closed at its worst case with the fork.
    async fn settled(&self, run: &RunId, fork: ForkNum) -> Usd {
        let give_up = tokio::time::Instant::now() + SETTLE_WITHIN;
        loop {
            let balance = self.store.balance(run).await.unwrap_or_default();
            let mine = balance.forks.get(&fork).copied().unwrap_or_default();
            if mine.reserved == Usd::ZERO || tokio::time::Instant::now() >= give_up {
                return mine.spent + mine.reserved;
            }
            tokio::time::sleep(SETTLE_POLL).await;
        }
    }

    /// What an agent that has ended, however it did, has done and spent.
    pub(super) async fn done_at_last(&self, run: &RunId, fork: ForkNum) -> Option<AgentReport> {
        let settled = self.settled(run, fork).await;
        let report = self.done(run, fork).await?;
        Some(AgentReport { cost: report.cost.max(settled), ..report })
    }

    /// What the journal says was done, and the ledger was spent, over all attempts. None: they can't be read.
    pub(super) async fn done(&self, run: &RunId, fork: ForkNum) -> Option<AgentReport> {
        let report = so_far(&read(&*self.store, run, fork).await.ok()?);
        let spent = self.spent(run, fork).await;
        Some(AgentReport { cost: report.cost.max(spent), ..report })
    }

    async fn failed(&self, tenure: &Tenure, e: AgentError) -> TaskError {
        let class = match &e {
            AgentError::Cancelled => ErrorClass::Cancelled,
            AgentError::SandboxLost(_) => ErrorClass::SandboxLost,
            // Somebody else has the fork: whatever is answered here is ignored.
            AgentError::Stale => ErrorClass::Permanent,
            e if e.is_retryable() => ErrorClass::Transient,
            AgentError::Journal(_) | AgentError::Model(_) | AgentError::Config(_) => ErrorClass::Permanent,
        };
        self.with_report(tenure, TaskError::new(class, e.to_string())).await
    }

    /// With what the journal says was done, and the ledger was spent.
    pub(super) async fn with_report(&self, tenure: &Tenure, mut error: TaskError) -> TaskError {
        error.partial = self.done(&tenure.run, tenure.fork).await;
        error
    }
}

pub(super) fn finished(outcome: AgentOutcome) -> TaskResult {
    let stop = match outcome.stop {
        Stop::EndTurn | Stop::MaxTokens => AgentStop::Finished,
        Stop::MaxTurns => AgentStop::MaxTurns,
        Stop::Refusal => AgentStop::Refused,
        Stop::BudgetExceeded => AgentStop::BudgetExceeded,
        Stop::Timeout | Stop::ContextTooLong => {
            let why = format!("the agent stopped: {}", outcome.stop.as_str());
            let mut e = TaskError::new(ErrorClass::Permanent, why);
            e.partial = Some(report(AgentStop::MaxTurns, &outcome));
            return Err(e);
        }
    };
    Ok(Output::Agent(report(stop, &outcome)))
}

fn report(stop: AgentStop, o: &AgentOutcome) -> AgentReport {
    let mut final_response = o.final_response.clone();
    if final_response.len() > MAX_RESPONSE_BYTES {
        let mut at = MAX_RESPONSE_BYTES;
        while !final_response.is_char_boundary(at) {
            at -= 1;
        }
        final_response.truncate(at);
    }
    AgentReport {
        stop,
        final_response,
        turns: o.turns,
        tool_calls: o.tool_calls,
        errors: o.errors.len() as u32,
        tokens: tokens(&o.usage),
        cost: o.cost,
    }
}

fn tokens(u: &forkyard_core::pricing::Usage) -> Tokens {
    Tokens {
        input: u.input,
        output: u.output,
        cache_write: u.cache_write_5m + u.cache_write_1h,
        cache_read: u.cache_read,
    }
}

/// What the journal says was done and spent.
fn so_far(entries: &[JournalEntry]) -> AgentReport {
    let mut r = AgentReport::default();
    let mut usage = forkyard_core::pricing::Usage::default();
    for e in entries {
        match &e.event {
            AgentEvent::AssistantMessage(m) => {
                r.turns = r.turns.max(m.turn);
                r.cost += m.cost;
                usage += m.usage;
            }
            AgentEvent::ToolCompleted(t) => {
                r.tool_calls += 1;
                r.errors += u32::from(t.is_error);
            }
            AgentEvent::Compacted { usage: u, cost, .. } => {
                r.cost += *cost;
                usage += *u;
            }
            AgentEvent::Interrupted { cost, .. } | AgentEvent::StreamError { cost, .. } => r.cost += *cost,
            _ => {}
        }
    }
    r.tokens = tokens(&usage);
    r
}
