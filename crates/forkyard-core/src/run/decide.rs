//! What a run does next.

use super::*;
use crate::Role;
use crate::pending::State;
use crate::rank::rank;
use crate::spec::MAX_FORKS;
use crate::task::Task;
use crate::view::SandboxState;

impl Run {
    /// Records what an input says, if it is news.
    pub(super) fn decide(&mut self, now: Timestamp, input: RunInput, step: &mut RunStep) {
        match input {
            RunInput::Command(command) => self.command(now, command, step),
            RunInput::Outcome { serial, result } => self.outcome_of(now, serial, result, step),
            RunInput::Timer(timer) => self.timer(now, timer, step),
            RunInput::ForkEnded(result) => {
                let live = self.forks.get(result.fork as usize).is_some_and(|f| f.state == ForkState::Live);
                if live {
                    self.emit(now, RunEvent::ForkEnded { result }, step);
                }
            }
            RunInput::Takeover { commands } => {
                if self.phase != RunPhase::Ended {
                    self.emit(now, RunEvent::TakenOver { tenure: self.tenure.next() }, step);
                }
                for command in commands {
                    self.command(now, command, step);
                }
            }
            RunInput::Spent(balance) => {
                for near in balance.near_limits() {
                    if self.phase != RunPhase::Ended && !self.warned.contains(&near.fork) {
                        self.emit(now, RunEvent::BudgetWarning(near), step);
                    }
                }
            }
        }
    }

    fn command(&mut self, now: Timestamp, command: Command, step: &mut RunStep) {
        let name = command.name();
        let refused = match &command {
            _ if self.phase == RunPhase::Ended => Some("the run has ended".to_string()),
            Command::Cancel if self.cancelling => None,
            Command::Pause | Command::AddForks { .. } if self.cancelling => {
                Some("the run is being cancelled".into())
            }
            Command::Pause | Command::Cancel | Command::AddForks { .. } if self.phase == RunPhase::Finish => {
                Some("all forks have ended: the run is finishing".into())
            }
            Command::AddForks { forks } if forks.is_empty() => Some("no forks were given".into()),
            Command::AddForks { forks } if self.forks.len() + forks.len() > MAX_FORKS as usize => {
                Some(format!(
                    "the run would have {} forks; at most {MAX_FORKS} are possible",
                    self.forks.len() + forks.len()
                ))
            }
            Command::CancelFork { fork } => match self.forks.get(*fork as usize).map(|f| &f.state) {
                None => Some(format!(
                    "the run has no fork {fork}; its forks are 0 to {}",
                    self.forks.len().saturating_sub(1)
                )),
                Some(ForkState::Ended(_)) => Some(format!("fork {fork} has ended")),
                Some(ForkState::Waiting | ForkState::Live) => None,
            },
            Command::Pause
            | Command::Resume
            | Command::Detach
            | Command::Cancel
            | Command::AddForks { .. } => None,
        };
        if let Some(reason) = refused {
            return self.emit(now, RunEvent::Refused { command: name.into(), reason }, step);
        }
        let event = match command {
            Command::Pause if self.paused => return,
            Command::Pause => RunEvent::Paused,
            Command::Resume if !self.paused && !self.detached => return,
            Command::Resume => RunEvent::Resumed,
            Command::Detach if self.detached => return,
            Command::Detach => RunEvent::Detached,
            Command::Cancel if self.cancelling => return,
            Command::Cancel => RunEvent::Cancelled,
            Command::CancelFork { fork } => RunEvent::ForkCancelled { fork },
            Command::AddForks { forks } => RunEvent::ForksAdded { forks },
        };
        self.emit(now, event, step);
    }

    fn outcome_of(&mut self, now: Timestamp, serial: u64, result: TaskResult, step: &mut RunStep) {
        if self.pending.running(serial).is_none() {
            return;
        }
        match result {
            Ok(output) => self.emit(now, RunEvent::Task(TaskEvent::Succeeded { serial, output }), step),
            Err(error) => {
                if let Some(event) = self.pending.failure(now, serial, error) {
                    self.emit(now, RunEvent::Task(event), step);
                }
            }
        }
    }

    fn timer(&mut self, now: Timestamp, timer: Timer, step: &mut RunStep) {
        if let Some(at) = self.pending.timers().get(&timer).filter(|at| **at > now) {
            step.effects.push(Effect::SetTimer { timer, at: *at });
        }
        // What is due, advance starts.
    }

    /// Goes on until there is nothing to do but wait.
    pub(super) fn advance(&mut self, now: Timestamp, step: &mut RunStep) {
        // Before its first driver, and while its user wants it left alone, a run does nothing.
        if self.tenure == Attempt(0) || self.detached {
            return;
        }
        while self.advance_once(now, step) {}
    }

    fn advance_once(&mut self, now: Timestamp, step: &mut RunStep) -> bool {
        if self.phase == RunPhase::Ended {
            return false;
        }
        self.advance_hopeless(now, step)
            || self.advance_stops(now, step)
            || self.advance_again(now, step)
            || self.advance_destroys(now, step)
            || match self.phase {
                RunPhase::Prepare => self.advance_prepare(now, step),
                RunPhase::Forks => self.advance_forks(now, step),
                RunPhase::Finish => self.advance_finish(now, step),
                RunPhase::Ended => false,
            }
    }

    fn advance_hopeless(&mut self, now: Timestamp, step: &mut RunStep) -> bool {
        match self.pending.hopeless() {
            Some((slot, error)) => {
                self.emit(now, RunEvent::GaveUp { slot, error }, step);
                true
            }
            None => false,
        }
    }

    /// A cancelled run stops what is not cleanup.
    fn advance_stops(&mut self, now: Timestamp, step: &mut RunStep) -> bool {
        if !self.cancelling {
            return false;
        }
        let found = self.pending.iter().find_map(|(slot, e)| match (slot, &e.state) {
            (Slot::Main | Slot::BaseCheck, State::Running { serial, stopping: false, .. }) => {
                Some(RunEvent::Task(TaskEvent::Stopping { serial: *serial }))
            }
            (Slot::Main | Slot::BaseCheck, State::Waiting { .. } | State::Lost) => {
                let error = TaskError::new(crate::task::ErrorClass::Cancelled, "the run was cancelled");
                Some(RunEvent::GaveUp { slot: slot.clone(), error })
            }
            (Slot::Main | Slot::BaseCheck, State::Running { .. }) | (Slot::Destroy(_), _) => None,
        });
        match found {
            Some(event) => {
                self.emit(now, event, step);
                true
            }
            None => false,
        }
    }

    /// Starts what was lost with its driver or waited for its next try.
    fn advance_again(&mut self, now: Timestamp, step: &mut RunStep) -> bool {
        let paused = self.paused;
        let found = self.pending.iter().find(|(slot, e)| {
            let due = match e.state {
                State::Lost => true,
                State::Waiting { until, .. } => until <= now,
                State::Running { .. } => false,
            };
            due && (!paused || matches!(slot, Slot::Destroy(_)))
        });
        match found.map(|(slot, e)| (slot.clone(), e.task.clone())) {
            Some((slot, task)) => {
                self.start_task(now, slot, task, step);
                true
            }
            None => false,
        }
    }

    /// A sandbox whose task has ended, in whatever way, is not needed any more.
    fn advance_destroys(&mut self, now: Timestamp, step: &mut RunStep) -> bool {
        let busy: Vec<&SandboxId> = self.pending.iter().filter_map(|(_, e)| e.task.creates()).collect();
        let found = self.sandboxes.iter().find(|(id, e)| {
            matches!(e.state, SandboxState::Requested | SandboxState::Live)
                && !busy.contains(id)
                && self.pending.get(&Slot::Destroy((*id).clone())).is_none()
        });
        match found.map(|(id, _)| id.clone()) {
            Some(id) => {
                self.start_task(now, Slot::Destroy(id.clone()), Task::Destroy { sandbox: id }, step);
                true
            }
            None => false,
        }
    }

    fn start_task(&mut self, now: Timestamp, slot: Slot, task: Task, step: &mut RunStep) {
        let serial = self.pending.next_serial();
        let attempt = self.tenure;
        self.emit(now, RunEvent::Task(TaskEvent::Started { slot, serial, attempt, task }), step);
    }

    fn sandbox_id(&self, role: Role) -> SandboxId {
        SandboxId::derive(&self.id, None, self.tenure, role)
    }

    fn advance_prepare(&mut self, now: Timestamp, step: &mut RunStep) -> bool {
        if self.pending.get(&Slot::Main).is_some() {
            return false;
        }
        if self.cancelling {
            self.emit(now, RunEvent::PhaseEntered { phase: RunPhase::Finish }, step);
            return true;
        }
        if !self.paused {
            let task = Task::PrepareBase { sandbox: self.sandbox_id(Role::Base) };
            self.start_task(now, Slot::Main, task, step);
        }
        false
    }

    fn advance_forks(&mut self, now: Timestamp, step: &mut RunStep) -> bool {
        let held = self.paused || self.cancelling;
        if let (false, false, Some(base), true) = (held, self.base_check_done, &self.base, self.spec.judges())
            && self.pending.get(&Slot::BaseCheck).is_none()
        {
            let task = Task::VerifyBase { sandbox: self.sandbox_id(Role::Verify), base: base.clone() };
            self.start_task(now, Slot::BaseCheck, task, step);
            return true;
        }
        let waiting = self.forks.iter().position(|f| f.state == ForkState::Waiting);
        let live = self.live_forks().count();
        let verified = self.results().filter(|r| r.verified()).count() as u32;
        let enough = self.spec.until_verified.is_some_and(|u| verified >= u.verified);
        match waiting.map(|n| n as ForkNum) {
            Some(n) if self.cancelling || self.forks[n as usize].cancelled => {
                self.write_off(now, n, ForkOutcome::Cancelled, None, step);
                true
            }
            Some(n) if enough => {
                let why = Some("not needed: enough forks are verified".into());
                self.write_off(now, n, ForkOutcome::Cancelled, why, step);
                true
            }
            Some(n) if !held && live < self.spec.max_concurrent as usize => {
                self.emit(now, RunEvent::ForkStarted { fork: n }, step);
                true
            }
            Some(_) => {
                // A later one may have been cancelled while it waits.
                let gone = self.forks.iter().position(|f| f.state == ForkState::Waiting && f.cancelled);
                match gone {
                    Some(n) => {
                        self.write_off(now, n as ForkNum, ForkOutcome::Cancelled, None, step);
                        true
                    }
                    None => false,
                }
            }
            None => self.advance_more(now, live, verified, step),
        }
    }

    /// Nothing waits: spawn more if more verified ones are wanted, else finish when the last one has ended.
    fn advance_more(&mut self, now: Timestamp, live: usize, verified: u32, step: &mut RunStep) -> bool {
        if let Some(u) = self.spec.until_verified
            && !self.cancelling
            && !self.paused
        {
            let missing = u.verified.saturating_sub(verified + live as u32);
            let room = u.max_forks.saturating_sub(self.forks.len() as u32);
            let n = missing.min(room) as usize;
            if n > 0 {
                let first = self.forks.len();
                let forks =
                    (first..first + n).map(|i| self.spec.forks[i % self.spec.forks.len()].clone()).collect();
                self.emit(now, RunEvent::ForksAdded { forks }, step);
                return true;
            }
        }
        if live == 0 {
            self.emit(now, RunEvent::PhaseEntered { phase: RunPhase::Finish }, step);
            return true;
        }
        false
    }

    fn write_off(
        &mut self,
        now: Timestamp,
        n: ForkNum,
        outcome: ForkOutcome,
        why: Option<String>,
        step: &mut RunStep,
    ) {
        self.emit(now, RunEvent::ForkEnded { result: ForkResult::unstarted(n, outcome, why) }, step);
    }

    fn advance_finish(&mut self, now: Timestamp, step: &mut RunStep) -> bool {
        let waiting = self.forks.iter().position(|f| f.state == ForkState::Waiting);
        if let Some(n) = waiting {
            let (outcome, why) = if self.cancelling {
                (ForkOutcome::Cancelled, None)
            } else {
                (ForkOutcome::Failed, self.error.clone())
            };
            self.write_off(now, n as ForkNum, outcome, why, step);
            return true;
        }
        if !self.pending.is_empty() {
            return false;
        }
        let results: Vec<ForkResult> = self.results().cloned().collect();
        let ranking = rank(&results, self.spec.judges(), self.base_verdict.as_ref());
        let succeeded = |r: &ForkResult| match self.spec.verify {
            Some(_) => r.verified(),
            None => r.outcome == ForkOutcome::Success,
        };
        let outcome = if self.cancelling {
            RunOutcome::Cancelled
        } else if results.iter().any(succeeded) {
            RunOutcome::Success
        } else {
            RunOutcome::Failed
        };
        self.emit(now, RunEvent::Ended { outcome, ranking }, step);
        true
    }
}
