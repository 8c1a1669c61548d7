//! Activities over the simulated world. The agent is a small one of its own: each turn reserves, asks the model, runs one
//! command by its call id, writes its journal; it continues from the journal as the real one does.

use std::sync::Arc;

use async_trait::async_trait;
use forkyard_core::budget::Ask;
use forkyard_core::task::*;
use forkyard_core::view::DiffStat;
use forkyard_core::{Attempt, ForkNum, RunId, SandboxId, SnapshotId, Timestamp, Usd};
use forkyard_engine::activity::{Activities, Job};
use forkyard_engine::sweep::{Found, Yard};
use forkyard_store::{AppendJournal, NewEvent, Reserve, Sending, Source, Store, StoreError};

use super::Bug;
use super::process::Proc;
use super::world::{SimSandbox, World};

/// What one answer of the model costs at most, and in fact.
const WORST: Usd = Usd(100);
/// Turns that an agent needs.
pub const TURNS: usize = 3;

pub struct SimActivities {
    world: Arc<World>,
    proc: Arc<Proc>,
    store: Arc<dyn Store>,
}

fn fail(class: ErrorClass, why: &str) -> TaskError {
    TaskError::new(class, why)
}

impl SimActivities {
    pub fn new(world: Arc<World>, proc: Arc<Proc>, store: Arc<dyn Store>) -> SimActivities {
        SimActivities { world, proc, store }
    }

    async fn once(&self, job: &Job) -> TaskResult {
        self.proc.gate().await;
        tokio::select! {
            biased;
            () = job.cancel.cancelled() => return Err(fail(ErrorClass::Cancelled, "stopped")),
            () = self.world.take_time(800) => {}
        }
        self.proc.gate().await;
        let faults = self.world.faults();
        if self.world.chance(faults.transient) {
            return Err(fail(ErrorClass::Transient, "simulated"));
        }
        if self.world.chance(faults.permanent) {
            return Err(fail(ErrorClass::Permanent, "simulated"));
        }
        let now = Timestamp(tokio::time::Instant::now().elapsed().as_millis() as u64);
        match &job.task {
            Task::PrepareBase { sandbox } => {
                self.create(job, sandbox, vec![], now);
                Ok(Output::Base(Base {
                    commit: "c0".into(),
                    branch: "main".into(),
                    snapshot: SnapshotId::new(format!("{}base", job.run)).expect("a valid id"),
                    host: self.world.host(),
                }))
            }
            Task::VerifyBase { sandbox, .. } => {
                self.create(job, sandbox, vec![], now);
                Ok(Output::BaseVerified(Verdict { passed: Some(false), ..Default::default() }))
            }
            Task::CheckBudget => match self.store.balance(&job.run).await {
                Ok(b) if b.is_exhausted(self.fork(job)) && b.spent > Usd::ZERO => {
                    Err(fail(ErrorClass::BudgetExceeded, "nothing is left"))
                }
                Ok(_) => Ok(Output::BudgetOk),
                Err(e) => Err(fail(ErrorClass::Transient, &e.to_string())),
            },
            Task::CreateSandbox { sandbox, .. } => {
                let key = (job.run.clone(), self.fork(job));
                let files = self.world.with(|w| w.checkpoints.get(&key).cloned()).unwrap_or_default();
                self.create(job, sandbox, files, now);
                Ok(Output::Created { host: self.world.host() })
            }
            Task::HealthCheck { sandbox } => {
                let alive = self.world.with(|w| w.sandboxes.get(sandbox).is_some_and(|s| s.alive));
                if alive { Ok(Output::Healthy) } else { Err(fail(ErrorClass::SandboxLost, "it is gone")) }
            }
            Task::RunAgent { sandbox, .. } => self.agent(job, sandbox).await,
            Task::Collect { sandbox, .. } => {
                let key = (job.run.clone(), self.fork(job));
                let lines = self.world.with(|w| {
                    let here = w.sandboxes.get(sandbox).filter(|s| s.alive).map(|s| s.ran.len());
                    here.or_else(|| w.checkpoints.get(&key).map(Vec::len)).unwrap_or(0)
                });
                Ok(Output::Collected(Collected {
                    commit: format!("c{lines}"),
                    diff: DiffStat { files: u64::from(lines > 0), added: lines as u64, removed: 0 },
                    from_checkpoint: false,
                    captured: vec![],
                    edited_tests: vec![],
                    ..Default::default()
                }))
            }
            Task::Verify { sandbox, commit, .. } => {
                self.create(job, sandbox, vec![], now);
                let passed = *commit == format!("c{TURNS}");
                Ok(Output::Verified(Verdict { passed: Some(passed), ..Default::default() }))
            }
            Task::Publish { .. } => {
                let key = (job.run.clone(), self.fork(job));
                self.world.with(|w| *w.published.entry(key).or_default() += 1);
                Ok(Output::Published { reference: format!("refs/forkyard/{}", job.run) })
            }
            Task::Destroy { sandbox } => {
                if self.world.bug != Some(Bug::LeakedSandbox) || self.world.chance(50) {
                    destroy(&self.world, sandbox);
                }
                self.world.with(|w| w.destroyed.insert(sandbox.clone()));
                Ok(Output::Destroyed)
            }
        }
    }

    fn fork(&self, job: &Job) -> ForkNum {
        job.fork.as_ref().map_or(0, |f| f.0)
    }

    /// Idempotent by id; a newer attempt takes it over.
    fn create(&self, job: &Job, id: &SandboxId, ran: Vec<(String, u32)>, now: Timestamp) {
        self.world.with(|w| {
            let zombie = w.destroyed.contains(id);
            let s = w.sandboxes.entry(id.clone()).or_insert(SimSandbox {
                zombie,
                run: job.run.clone(),
                alive: true,
                attempt: job.attempt,
                created_at: now,
                ran,
            });
            s.attempt = s.attempt.max(job.attempt);
        });
    }

    async fn agent(&self, job: &Job, sandbox: &SandboxId) -> TaskResult {
        let fork = self.fork(job);
        let lost = |e: StoreError| match e {
            StoreError::StaleAttempt { .. } => fail(ErrorClass::Permanent, "a newer attempt owns the fork"),
            e => fail(ErrorClass::Transient, &e.to_string()),
        };
        // Attach: from here on older attempts are refused by the sandbox.
        let attached = self.world.with(|w| match w.sandboxes.get_mut(sandbox) {
            Some(s) if s.alive && s.attempt <= job.attempt => {
                s.attempt = job.attempt;
                Some(s.ran.len())
            }
            Some(_) | None => None,
        });
        let Some(ran) = attached else { return Err(fail(ErrorClass::SandboxLost, "it is gone")) };
        let journals = self.store.read_journals(&job.run, fork).await.map_err(lost)?;
        // What the journal says of this sandbox; or, in a new one, what its checkpoint has.
        let here = journals.iter().filter(|j| j.event.sandbox.as_ref() == Some(sandbox));
        let last = here.filter_map(|j| j.event.data["turn"].as_u64()).max();
        let mut turn = last.map_or(ran, |t| t as usize + 1).min(TURNS);
        let mut seq = 0;
        let heard: Vec<u64> =
            self.store.pending_messages(&job.run, fork).await.map_err(lost)?.iter().map(|m| m.id).collect();
        // As the real one: every attempt says that it is there, which is no progress.
        let resumed = entry("agent.resumed", sandbox, serde_json::json!({}));
        seq = self.journal(job, fork, seq, resumed, vec![]).await.map_err(lost)?;
        if !heard.is_empty() {
            let entry = entry("agent.message_injected", sandbox, serde_json::json!({}));
            seq = self.journal(job, fork, seq, entry, heard).await.map_err(lost)?;
        }
        while turn < TURNS {
            job.heartbeat.beat();
            let request = format!("f{fork}a{}t{turn}", job.attempt);
            'sent: loop {
                let ask = Ask { fork, attempt: job.attempt, request: request.clone(), worst: WORST };
                match self.store.reserve(&job.run, ask).await.map_err(lost)? {
                    Reserve::Granted => match self.store.mark_sent(&job.run, &request).await.map_err(lost)? {
                        Sending::Go => break 'sent,
                        Sending::Stale { .. } => return Err(fail(ErrorClass::Permanent, "stale")),
                        Sending::Paused => {
                            self.store.release_reservation(&job.run, &request).await.map_err(lost)?;
                        }
                    },
                    Reserve::Stale { .. } => return Err(fail(ErrorClass::Permanent, "stale")),
                    Reserve::Short { outstanding: false, .. } => {
                        return Ok(self.report(AgentStop::BudgetExceeded, turn));
                    }
                    Reserve::Short { .. } | Reserve::Paused => {
                        job.heartbeat.beat();
                        tokio::select! {
                            biased;
                            () = job.cancel.cancelled() => return Err(fail(ErrorClass::Cancelled, "stopped")),
                            () = tokio::time::sleep(std::time::Duration::from_secs(1)) => {}
                        }
                        self.proc.gate().await;
                    }
                }
            }
            self.proc.gate().await;
            // The model bills, whatever becomes of its answer.
            let cost = Usd(1 + self.world.below(WORST.0));
            self.world.with(|w| *w.billed.entry(job.run.clone()).or_default() += cost);
            tokio::select! {
                biased;
                () = job.cancel.cancelled() => {
                    let _ = self.store.settle(&job.run, &request, cost).await;
                    return Err(fail(ErrorClass::Cancelled, "stopped"));
                }
                () = self.world.take_time(3000) => {}
            }
            self.proc.gate().await;
            self.store.settle(&job.run, &request, cost).await.map_err(lost)?;
            self.exec(sandbox, job.attempt, &format!("call{turn}"))?;
            self.world.take_time(2000).await;
            self.proc.gate().await;
            let entry = entry("agent.assistant_message", sandbox, serde_json::json!({ "turn": turn }));
            seq = self.journal(job, fork, seq, entry, vec![]).await.map_err(lost)?;
            self.checkpoint(&job.run, fork, sandbox, job.attempt);
            turn += 1;
            if self.world.chance(self.world.faults().sandbox_lost) {
                destroy(&self.world, sandbox);
                let mut e = fail(ErrorClass::SandboxLost, "it died");
                e.partial = Some(AgentReport { turns: turn as u32, ..Default::default() });
                return Err(e);
            }
        }
        Ok(self.report(AgentStop::Finished, turn))
    }

    async fn journal(
        &self,
        job: &Job,
        fork: ForkNum,
        expected: u64,
        entry: NewEvent,
        deliver: Vec<u64>,
    ) -> Result<u64, StoreError> {
        let (run, attempt, events) = (job.run.clone(), job.attempt, vec![entry]);
        let append = AppendJournal { run, fork, attempt, expected, events, deliver };
        Ok(self.store.append_journal(append).await?.seq)
    }

    fn report(&self, stop: AgentStop, turns: usize) -> Output {
        Output::Agent(AgentReport { stop, turns: turns as u32, ..Default::default() })
    }

    /// By call id: a command that ran is handed over, not run again.
    fn exec(&self, sandbox: &SandboxId, attempt: Attempt, call: &str) -> Result<(), TaskError> {
        self.world.with(|w| match w.sandboxes.get_mut(sandbox) {
            Some(s) if !s.alive => Err(fail(ErrorClass::SandboxLost, "it is gone")),
            Some(s) if s.attempt > attempt && self.world.bug != Some(Bug::StaleAttempt) => {
                Err(fail(ErrorClass::Permanent, "a newer attempt owns the sandbox"))
            }
            Some(s) => {
                match s.ran.iter_mut().find(|(c, _)| c == call) {
                    Some((_, n)) if self.world.bug == Some(Bug::DoubleEffect) => *n += 1,
                    Some(_) => {}
                    None => s.ran.push((call.into(), 1)),
                }
                Ok(())
            }
            None => Err(fail(ErrorClass::SandboxLost, "it is gone")),
        })
    }

    fn checkpoint(&self, run: &RunId, fork: ForkNum, sandbox: &SandboxId, attempt: Attempt) {
        self.world.with(|w| {
            if let Some(s) = w.sandboxes.get(sandbox).filter(|s| s.alive && s.attempt == attempt) {
                let ran = s.ran.clone();
                w.checkpoints.insert((run.clone(), fork), ran);
            }
        });
    }
}

fn entry(kind: &str, sandbox: &SandboxId, data: serde_json::Value) -> NewEvent {
    NewEvent {
        kind: kind.into(),
        version: 1,
        at: Timestamp(0),
        source: Source::Agent,
        sandbox: Some(sandbox.clone()),
        data,
    }
}

fn destroy(world: &World, id: &SandboxId) {
    world.with(|w| {
        if let Some(s) = w.sandboxes.get_mut(id) {
            s.alive = false;
        }
    });
}

#[async_trait]
impl Activities for SimActivities {
    async fn perform(&self, job: Job) -> TaskResult {
        let first = self.once(&job).await;
        // Again from the start, as after a crash that nobody noticed. An agent's turns are not repeated within an attempt.
        if job.task.kind() != TaskKind::RunAgent
            && first.is_ok()
            && self.world.chance(self.world.faults().repeat)
        {
            let second = self.once(&job).await;
            return if second.is_ok() { second } else { first };
        }
        first
    }
}

pub struct SimYard(pub Arc<World>);

#[async_trait]
impl Yard for SimYard {
    async fn list(&self) -> Result<Vec<Found>, String> {
        Ok(self.0.with(|w| {
            w.sandboxes
                .iter()
                .filter(|(_, s)| s.alive)
                .map(|(id, s)| Found { id: id.clone(), run: Some(s.run.clone()), created_at: s.created_at })
                .collect()
        }))
    }
    async fn destroy(&self, id: &SandboxId) -> Result<(), String> {
        destroy(&self.0, id);
        Ok(())
    }
}
