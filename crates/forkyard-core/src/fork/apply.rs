//! How events change a fork. Nothing else does, so that replay gives back what was.

use super::*;
use crate::pending::Loss;
use crate::task::Output;
use crate::task::{Task, TaskKind};

impl Fork {
    pub(super) fn blank(at: Timestamp, plan: ForkPlan, wish: Wish) -> Fork {
        let mut fork = Fork {
            plan,
            phase: Phase::Budget,
            attempt: Attempt(1),
            pending: Pending::default(),
            wish,
            driven: Millis::ZERO,
            since: None,
            last_driven: None,
            sandboxes: BTreeMap::new(),
            work: None,
            agent_ran: false,
            decided: wish.cancelled.then_some(ForkOutcome::Cancelled),
            reached: None,
            report: None,
            collected: None,
            verdict: None,
            error: None,
            journal_len: 0,
            sandbox_losses: 0,
            linger_until: None,
            created_at: at,
            updated_at: at,
            ended_at: None,
        };
        fork.count_time(at);
        fork
    }

    pub fn apply(&mut self, at: Timestamp, event: &ForkEvent) {
        self.updated_at = at;
        match event {
            ForkEvent::Started { .. } => {}
            ForkEvent::Task(task) => self.apply_task(at, task),
            ForkEvent::Wished { wish } => {
                if self.wish.paused && !wish.paused {
                    self.linger_until = None;
                }
                self.wish = *wish;
                if wish.cancelled && self.phase <= Phase::Verify {
                    self.decided = Some(ForkOutcome::Cancelled);
                }
            }
            ForkEvent::TimedOut => {
                self.decided = self.decided.or(Some(ForkOutcome::Timeout));
                self.set_error(format!("the fork used up its {}", self.plan.timeout));
            }
            ForkEvent::PhaseEntered { phase } => {
                self.pending.abandon(&Slot::Main);
                self.enter(*phase);
            }
            ForkEvent::Lingering { until } => self.linger_until = Some(*until),
            ForkEvent::MessageNoticed => {
                self.linger_until = None;
                self.enter(Phase::Agent);
            }
            ForkEvent::SandboxLost { serial, error } => {
                let failed = TaskEvent::Failed { serial: *serial, error: error.clone(), retry_at: None };
                self.pending.apply(&failed);
                self.note_partial(error);
                self.sandbox_losses += 1;
                self.attempt = self.attempt.next();
                self.work = None;
                self.enter(Phase::Create);
            }
            ForkEvent::TakenOver { attempt, journal_len, last_driven, let_go } => {
                self.attempt = *attempt;
                let loss = match (*let_go, *journal_len > self.journal_len) {
                    (true, _) => Loss::Uncounted,
                    (false, true) => Loss::AfterProgress,
                    (false, false) => Loss::Counted,
                };
                self.journal_len = *journal_len;
                self.pending.lose_all(at, loss);
                // By the new driver's clock, which may be behind.
                self.linger_until = self.linger_until.map(|until| until.min(at + self.plan.linger));
                if let Some(since) = self.since {
                    // What was said before the last driver came is by another clock than its own.
                    let said = last_driven.filter(|_| *last_driven != self.last_driven);
                    self.driven = self.driven + said.unwrap_or(since).since(since);
                    self.since = Some(at);
                }
                self.last_driven = *last_driven;
            }
            ForkEvent::GaveUp { slot, error } => {
                let kind = self.pending.get(slot).map(|e| e.task.clone());
                self.pending.abandon(slot);
                if let Some(task) = kind {
                    self.task_failed(at, &task, error);
                }
            }
            ForkEvent::HandedOver { sandbox } => self.set_sandbox(at, sandbox, SandboxState::HandedOver),
            ForkEvent::Ended { .. } => {
                self.phase = Phase::Ended;
                self.ended_at = Some(at);
            }
        }
        self.count_time(at);
    }

    fn apply_task(&mut self, at: Timestamp, event: &TaskEvent) {
        let task = match event {
            TaskEvent::Succeeded { serial, .. } | TaskEvent::Failed { serial, retry_at: None, .. } => {
                self.pending.running(*serial).map(|(_, e)| e.task.clone())
            }
            TaskEvent::Started { .. } | TaskEvent::Failed { .. } | TaskEvent::Stopping { .. } => None,
        };
        self.pending.apply(event);
        match event {
            TaskEvent::Started { attempt, task, .. } => self.task_started(at, *attempt, task),
            TaskEvent::Succeeded { output, .. } => {
                if let Some(task) = task {
                    self.task_succeeded(at, &task, output);
                }
            }
            TaskEvent::Failed { error, retry_at, .. } => {
                self.note_partial(error);
                if let (Some(task), None) = (task, retry_at) {
                    self.task_failed(at, &task, error);
                }
            }
            TaskEvent::Stopping { .. } => {}
        }
    }

    fn task_started(&mut self, at: Timestamp, attempt: Attempt, task: &Task) {
        self.attempt = attempt;
        if let Some(id) = task.creates() {
            let role = if task.kind() == TaskKind::Verify { Role::Verify } else { Role::Work };
            if role == Role::Work {
                self.work = Some(id.clone());
            }
            self.sandboxes.entry(id.clone()).or_insert(SandboxEntry {
                role,
                state: SandboxState::Requested,
                host: None,
                created_at: at,
                updated_at: at,
            });
        }
        if task.kind() == TaskKind::RunAgent {
            self.agent_ran = true;
        }
    }

    fn task_succeeded(&mut self, at: Timestamp, task: &Task, output: &Output) {
        // Whatever makes progress starts the count of losses again.
        match (task, output) {
            (Task::CheckBudget, _) => self.enter(Phase::Create),
            (Task::CreateSandbox { sandbox, .. }, output) => {
                self.set_sandbox(at, sandbox, SandboxState::Live);
                if let (Output::Created { host }, Some(e)) = (output, self.sandboxes.get_mut(sandbox)) {
                    e.host = Some(host.clone());
                }
                self.enter(Phase::Health);
            }
            (Task::HealthCheck { .. }, _) => self.enter(Phase::Agent),
            (Task::RunAgent { .. }, output) => {
                if let Output::Agent(report) = output {
                    let (outcome, reason) = report.stop.outcome();
                    self.reached = Some(outcome);
                    self.error =
                        self.error.take().filter(|_| self.decided.is_some()).or(reason.map(String::from));
                    self.report = Some(report.clone());
                }
                let waits = self.plan.linger > Millis::ZERO && self.reached == Some(ForkOutcome::Success);
                self.enter(if waits { Phase::Linger } else { Phase::Collect });
            }
            (Task::Collect { .. }, output) => {
                if let Output::Collected(c) = output {
                    let mut collected = c.clone();
                    if let Some(done) = collected.done.take() {
                        self.note_done(done);
                    }
                    self.collected = Some(collected);
                }
                self.enter(Phase::Verify);
            }
            (Task::Verify { .. }, output) => {
                if let Output::Verified(v) = output {
                    self.verdict = Some(v.clone());
                }
                self.enter(Phase::Publish);
            }
            (Task::Publish { .. }, _) => self.enter(Phase::Cleanup),
            (Task::Destroy { sandbox }, _) => self.set_sandbox(at, sandbox, SandboxState::Destroyed),
            (Task::PrepareBase { .. } | Task::VerifyBase { .. }, _) => {}
        }
    }

    fn task_failed(&mut self, at: Timestamp, task: &Task, error: &TaskError) {
        if let Task::Destroy { sandbox } = task {
            return self.set_sandbox(at, sandbox, SandboxState::Owed);
        }
        // What we stopped ourselves is not an error.
        let stopped = error.class == ErrorClass::Cancelled && self.decided.is_some();
        let reached = match error.class {
            ErrorClass::BudgetExceeded => ForkOutcome::BudgetExceeded,
            ErrorClass::Transient
            | ErrorClass::Permanent
            | ErrorClass::SandboxLost
            | ErrorClass::Cancelled => ForkOutcome::Failed,
        };
        if !stopped {
            self.set_error(format!("{}: {}", task.kind().as_str(), error.message));
        }
        match task.kind() {
            TaskKind::CheckBudget | TaskKind::CreateSandbox | TaskKind::HealthCheck => {
                self.reached = Some(reached);
                self.enter(if self.agent_ran { Phase::Collect } else { Phase::Cleanup });
            }
            TaskKind::RunAgent => {
                self.reached = Some(reached);
                self.enter(Phase::Collect);
            }
            // Work that can't be brought home is no success.
            TaskKind::Collect => {
                self.reached = self.reached.map(|r| if r == ForkOutcome::Success { reached } else { r });
                self.enter(Phase::Verify);
            }
            // The result is there, but nobody vouches for it.
            TaskKind::Verify => self.enter(Phase::Publish),
            TaskKind::Publish => {
                self.reached = self.reached.map(|r| if r == ForkOutcome::Success { reached } else { r });
                self.enter(Phase::Cleanup);
            }
            TaskKind::PrepareBase | TaskKind::VerifyBase | TaskKind::Destroy => {}
        }
    }

    fn enter(&mut self, phase: Phase) {
        self.phase = phase;
    }

    fn note_partial(&mut self, error: &TaskError) {
        if let Some(partial) = &error.partial {
            let before = self.report.as_ref().map_or(0, |r| r.turns);
            if partial.turns > before {
                self.sandbox_losses = 0;
            }
            self.report = Some(partial.clone());
        }
    }

    /// Counts only grow: what the agent itself reported stays where it says more.
    fn note_done(&mut self, done: AgentReport) {
        let Some(report) = &mut self.report else {
            self.report = Some(done);
            return;
        };
        report.turns = report.turns.max(done.turns);
        report.tool_calls = report.tool_calls.max(done.tool_calls);
        report.errors = report.errors.max(done.errors);
        report.cost = report.cost.max(done.cost);
        if done.tokens.total() > report.tokens.total() {
            report.tokens = done.tokens;
        }
    }

    fn set_sandbox(&mut self, at: Timestamp, id: &SandboxId, state: SandboxState) {
        if let Some(e) = self.sandboxes.get_mut(id) {
            e.state = state;
            e.updated_at = at;
        }
    }

    fn set_error(&mut self, error: String) {
        self.error.get_or_insert(error);
    }

    /// Time counts from the start to the end of the agent, unless the run is paused.
    fn count_time(&mut self, at: Timestamp) {
        let counts = self.phase <= Phase::Agent && !self.wish.paused;
        match (self.since, counts) {
            (None, true) => self.since = Some(at),
            (Some(since), false) => {
                self.driven = self.driven + at.since(since);
                self.since = None;
            }
            (None, false) | (Some(_), true) => {}
        }
    }
}
