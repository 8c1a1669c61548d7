//! How events change a run. Nothing else does, so that replay gives back what was.

use super::*;
use crate::Role;
use crate::pending::Loss;
use crate::task::{Output, Task, TaskKind};
use crate::view::SandboxState;

impl Run {
    pub(super) fn blank(at: Timestamp, id: RunId, spec: RunSpec) -> Run {
        let forks = spec.forks.iter().cloned().map(RunFork::waiting).collect();
        Run {
            id,
            spec,
            phase: RunPhase::Prepare,
            tenure: Attempt(0),
            pending: Pending::default(),
            paused: false,
            detached: false,
            cancelling: false,
            base: None,
            base_check_done: false,
            base_verdict: None,
            forks,
            warned: BTreeSet::new(),
            sandboxes: BTreeMap::new(),
            error: None,
            outcome: None,
            ranking: Ranking::default(),
            created_at: at,
            updated_at: at,
            ended_at: None,
        }
    }

    pub fn apply(&mut self, at: Timestamp, event: &RunEvent) {
        self.updated_at = at;
        match event {
            RunEvent::Submitted { .. } | RunEvent::Refused { .. } => {}
            RunEvent::Task(task) => self.apply_task(at, task),
            RunEvent::GaveUp { slot, error } => {
                let task = self.pending.get(slot).map(|e| e.task.clone());
                self.pending.abandon(slot);
                if let Some(task) = task {
                    self.task_failed(at, &task, error);
                }
            }
            RunEvent::ForkStarted { fork } => {
                if let Some(f) = self.forks.get_mut(*fork as usize) {
                    f.state = ForkState::Live;
                }
            }
            RunEvent::ForkEnded { result } => {
                if let Some(f) = self.forks.get_mut(result.fork as usize) {
                    f.state = ForkState::Ended(result.clone());
                }
            }
            RunEvent::ForksAdded { forks } => self.forks.extend(forks.iter().cloned().map(RunFork::waiting)),
            RunEvent::Paused => self.paused = true,
            RunEvent::Resumed => (self.paused, self.detached) = (false, false),
            RunEvent::Detached => self.detached = true,
            // Whoever cancels wants it to end: it is driven again.
            RunEvent::Cancelled => (self.cancelling, self.detached) = (true, false),
            RunEvent::ForkCancelled { fork } => {
                if let Some(f) = self.forks.get_mut(*fork as usize) {
                    f.cancelled = true;
                }
            }
            RunEvent::BudgetWarning(near) => {
                self.warned.insert(near.fork);
            }
            RunEvent::PhaseEntered { phase } => {
                self.pending.abandon(&Slot::Main);
                self.phase = *phase;
            }
            RunEvent::TakenOver { tenure } => {
                self.tenure = *tenure;
                self.pending.lose_all(at, if self.detached { Loss::Uncounted } else { Loss::Counted });
            }
            RunEvent::Ended { outcome, ranking } => {
                self.phase = RunPhase::Ended;
                self.outcome = Some(*outcome);
                self.ranking = ranking.clone();
                self.ended_at = Some(at);
            }
        }
    }

    fn apply_task(&mut self, at: Timestamp, event: &TaskEvent) {
        let task = match event {
            TaskEvent::Succeeded { serial, .. } | TaskEvent::Failed { serial, retry_at: None, .. } => {
                self.pending.running(*serial).map(|(_, e)| e.task.clone())
            }
            TaskEvent::Started { .. } | TaskEvent::Failed { .. } | TaskEvent::Stopping { .. } => None,
        };
        self.pending.apply(event);
        match (event, task) {
            (TaskEvent::Started { task, .. }, _) => {
                if let Some(id) = task.creates() {
                    let role = if task.kind() == TaskKind::VerifyBase { Role::Verify } else { Role::Base };
                    self.sandboxes.entry(id.clone()).or_insert(SandboxEntry {
                        role,
                        state: SandboxState::Requested,
                        host: None,
                        created_at: at,
                        updated_at: at,
                    });
                }
            }
            (TaskEvent::Succeeded { output, .. }, Some(task)) => self.task_succeeded(at, &task, output),
            (TaskEvent::Failed { error, .. }, Some(task)) => self.task_failed(at, &task, error),
            (TaskEvent::Succeeded { .. } | TaskEvent::Failed { .. } | TaskEvent::Stopping { .. }, _) => {}
        }
    }

    fn task_succeeded(&mut self, at: Timestamp, task: &Task, output: &Output) {
        match (task, output) {
            (Task::PrepareBase { sandbox }, Output::Base(base)) => {
                if let Some(e) = self.sandboxes.get_mut(sandbox) {
                    e.host = Some(base.host.clone());
                }
                self.set_sandbox(at, sandbox, SandboxState::Live);
                self.base = Some(base.clone());
                self.phase = RunPhase::Forks;
            }
            (Task::VerifyBase { sandbox, .. }, output) => {
                self.set_sandbox(at, sandbox, SandboxState::Live);
                self.base_check_done = true;
                if let Output::BaseVerified(v) = output {
                    self.base_verdict = Some(v.clone());
                }
            }
            (Task::Destroy { sandbox }, _) => self.set_sandbox(at, sandbox, SandboxState::Destroyed),
            // An activity that answers with something else has a bug; without a base the run can't go on.
            (Task::PrepareBase { .. }, _) => {
                self.error.get_or_insert_with(|| "prepare_base answered with something else".into());
                self.phase = RunPhase::Finish;
            }
            (
                Task::CheckBudget
                | Task::CreateSandbox { .. }
                | Task::HealthCheck { .. }
                | Task::RunAgent { .. }
                | Task::Collect { .. }
                | Task::Verify { .. }
                | Task::Publish { .. },
                _,
            ) => {}
        }
    }

    fn task_failed(&mut self, at: Timestamp, task: &Task, error: &TaskError) {
        match task.kind() {
            TaskKind::PrepareBase => {
                if !self.cancelling {
                    self.error.get_or_insert_with(|| format!("prepare_base: {}", error.message));
                }
                self.phase = RunPhase::Finish;
            }
            TaskKind::VerifyBase => self.base_check_done = true,
            TaskKind::Destroy => {
                if let Task::Destroy { sandbox } = task {
                    self.set_sandbox(at, sandbox, SandboxState::Owed);
                }
            }
            TaskKind::CheckBudget
            | TaskKind::CreateSandbox
            | TaskKind::HealthCheck
            | TaskKind::RunAgent
            | TaskKind::Collect
            | TaskKind::Verify
            | TaskKind::Publish => {}
        }
    }

    fn set_sandbox(&mut self, at: Timestamp, id: &SandboxId, state: SandboxState) {
        if let Some(e) = self.sandboxes.get_mut(id) {
            e.state = state;
            e.updated_at = at;
        }
    }
}

impl RunFork {
    fn waiting(spec: ForkSpec) -> RunFork {
        RunFork { spec, state: ForkState::Waiting, cancelled: false }
    }
}
