//! One attempt of a fork's agent.

use std::sync::Arc;

use forkyard_agent::inference::{Model, SessionSpec};
use forkyard_agent::ports::SnapshotCheckpoints;
use forkyard_agent::{
    Agent, AgentConfig, AgentError, AgentEvent, AgentOutcome, Continuity, JournalEntry, Stop,
};
use forkyard_core::policy::PermissionMode;
use forkyard_core::sandbox::Labels;
use forkyard_core::task::{AgentReport, AgentStop, Base, ErrorClass, Output, TaskError, TaskResult, Tokens};
use forkyard_core::{ForkNum, RunId, SandboxId, SnapshotId};
use forkyard_store::Store;

use super::{Hands, Job, sandbox_gone, store_error};
use crate::ports::{ForkSink, StoreInbox, StoreJournal, StoreLedger, Tenure};

/// Of the final answer, this much goes into the machine's log; the journal has all of it.
const MAX_RESPONSE_BYTES: usize = 64 << 10;

impl Hands {
    pub(super) async fn run_agent(&self, job: &Job, id: &SandboxId, base: &Base) -> TaskResult {
        let Some((fork, spec)) = job.fork.clone() else {
            return Err(TaskError::new(ErrorClass::Permanent, "an agent needs a fork"));
        };
        let permanent = |why: String| TaskError::new(ErrorClass::Permanent, why);
        let sandbox = self.provider(job)?.attach(id, job.attempt).await.map_err(sandbox_gone)?;
        let (inference, model_name) = self.models.open(&spec.model).map_err(permanent)?;
        let tenure = Tenure {
            store: self.store.clone(),
            run: job.run.clone(),
            fork,
            attempt: job.attempt,
            sandbox: id.clone(),
        };
        let limited = job.spec.budget.run.is_some() || job.spec.budget.fork.is_some();
        let model: Arc<dyn Model> = Arc::new(inference.session(SessionSpec {
            key: format!("{}/{fork}/a{}", job.run, job.attempt),
            fork: Some(fork),
            ledger: Arc::new(StoreLedger::new(tenure.clone(), limited)),
            cancel: job.cancel.clone(),
        }));
        let mut policy = self.config.policy.clone();
        let plan = &job.spec.agent;
        policy.allowed_tools.extend(plan.allowed_tools.iter().cloned());
        policy.disallowed_tools.extend(plan.disallowed_tools.iter().cloned());
        if let Some(mode) = &plan.permission_mode {
            policy.permission_mode = serde_json::from_value::<PermissionMode>(mode.clone().into())
                .map_err(|_| permanent(format!("{mode:?} is not a permission mode")))?;
        }
        let mut config = AgentConfig::new(job.run.clone(), fork, job.attempt, model_name, &spec.prompt);
        config.continuity = self.continuity(&tenure, id).await?;
        config.max_turns = job.spec.max_turns;
        config.repo = crate::git::shown_url(&job.spec.repo.source);
        config.branch = base.branch.clone();
        config.prompt_template = spec.system_prompt.clone().or_else(|| plan.prompt_template.clone());
        config.hooks = self.config.hooks.clone();
        config.skills_dir = self.config.skills_dir.clone();
        config.log_dir = self.config.log_dir.as_ref().map(|d| d.join(job.run.as_str()));
        let labels =
            Labels::from([("run".to_string(), job.run.to_string()), ("fork".to_string(), fork.to_string())]);
        let agent = Agent {
            model,
            checkpoints: Some(Arc::new(SnapshotCheckpoints {
                sandbox: sandbox.clone(),
                prefix: format!("{}f{fork}", job.run),
                labels,
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
            interceptors: vec![],
            config,
        };
        match agent.run(job.cancel.clone()).await {
            Ok(outcome) => finished(outcome),
            Err(e) => Err(self.failed(&tenure, e).await),
        }
    }

    /// How the sandbox relates to the journal: the one it was written in, or another, made from the last checkpoint.
    async fn continuity(&self, tenure: &Tenure, id: &SandboxId) -> Result<Continuity, TaskError> {
        let entries = read(&*tenure.store, &tenure.run, tenure.fork).await?;
        let last = entries.iter().rev().find_map(|e| match &e.event {
            AgentEvent::Started(s) => Some(&s.sandbox_id),
            AgentEvent::Resumed(r) => Some(&r.sandbox_id),
            _ => None,
        });
        Ok(match last {
            Some(before) if before != id => Continuity::Replaced {
                position: checkpoint_in(&entries).map_or(0, |c| c.1),
                reason: format!("sandbox {before} was lost"),
            },
            Some(_) | None => Continuity::Same,
        })
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
        let mut error = TaskError::new(class, e.to_string());
        error.partial = read(&*tenure.store, &tenure.run, tenure.fork).await.ok().map(|j| so_far(&j));
        error
    }
}

fn finished(outcome: AgentOutcome) -> TaskResult {
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
            _ => {}
        }
    }
    r.tokens = tokens(&usage);
    r
}

async fn read(store: &dyn Store, run: &RunId, fork: ForkNum) -> Result<Vec<JournalEntry>, TaskError> {
    let stored = store.read_journals(run, fork).await.map_err(store_error)?;
    stored
        .into_iter()
        .map(|r| {
            JournalEntry::from_stored(&r.event.kind, r.event.version, r.event.at, r.event.data)
                .map_err(|e| TaskError::new(ErrorClass::Permanent, e.to_string()))
        })
        .collect()
}

/// The last full one that still holds.
fn checkpoint_in(entries: &[JournalEntry]) -> Option<(SnapshotId, u64)> {
    let held = forkyard_agent::checkpoints(entries);
    held.into_iter().rev().find_map(|(position, c)| c.snapshot.clone().map(|s| (s, position)))
}

/// The last full checkpoint of a fork, and the journal position that it belongs to.
pub(super) async fn last_checkpoint(
    store: &dyn Store,
    run: &RunId,
    fork: ForkNum,
) -> Result<Option<(SnapshotId, u64)>, TaskError> {
    Ok(checkpoint_in(&read(store, run, fork).await?))
}
