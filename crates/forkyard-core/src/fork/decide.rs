//! What a fork does next.

use super::*;
use crate::pending::State;
use crate::task::{MAX_LOSSES, Task};

impl Fork {
    /// Records what an input says, if it is news.
    pub(super) fn decide(&mut self, now: Timestamp, input: ForkInput, step: &mut ForkStep) {
        if self.phase == Phase::Ended {
            return;
        }
        match input {
            ForkInput::Wish(wish) => self.wished(now, wish, step),
            ForkInput::Outcome { serial, result } => self.outcome_of(now, serial, result, step),
            ForkInput::Timer(timer) => self.timer(now, timer, step),
            ForkInput::Message => {
                if self.phase == Phase::Linger && self.decided.is_none() && !self.wish.paused {
                    self.emit(now, ForkEvent::MessageNoticed, step);
                }
            }
            ForkInput::Takeover { wish, journal_len, last_driven, let_go } => {
                let attempt = self.attempt.next();
                self.emit(now, ForkEvent::TakenOver { attempt, journal_len, last_driven, let_go }, step);
                if let Some(wish) = wish {
                    self.wished(now, wish, step);
                }
            }
        }
    }

    fn wished(&mut self, now: Timestamp, wish: Wish, step: &mut ForkStep) {
        // A cancel can't be taken back.
        let wish = Wish { cancelled: wish.cancelled || self.wish.cancelled, ..wish };
        if wish != self.wish {
            self.emit(now, ForkEvent::Wished { wish }, step);
        }
    }

    fn outcome_of(&mut self, now: Timestamp, serial: u64, result: TaskResult, step: &mut ForkStep) {
        let Some((slot, _)) = self.pending.running(serial) else { return };
        let is_main = *slot == Slot::Main;
        match result {
            Ok(output) => self.emit(now, ForkEvent::Task(TaskEvent::Succeeded { serial, output }), step),
            Err(error) if error.class == ErrorClass::SandboxLost && is_main && self.can_move_on() => {
                self.emit(now, ForkEvent::SandboxLost { serial, error }, step);
            }
            Err(error) => {
                if let Some(event) = self.pending.failure(now, serial, error) {
                    self.emit(now, ForkEvent::Task(event), step);
                }
            }
        }
    }

    /// A lost sandbox is replaced while its agent may still work.
    fn can_move_on(&self) -> bool {
        matches!(self.phase, Phase::Health | Phase::Agent)
            && self.decided.is_none()
            && self.sandbox_losses + 1 < MAX_LOSSES
    }

    fn timer(&mut self, now: Timestamp, timer: Timer, step: &mut ForkStep) {
        match timer {
            Timer::Deadline => match self.deadline() {
                Some(at) if at <= now && self.decided.is_none() => self.emit(now, ForkEvent::TimedOut, step),
                Some(at) if at > now => step.effects.push(Effect::SetTimer { timer, at }),
                Some(_) | None => {}
            },
            Timer::Linger => match self.linger_until {
                // A pause keeps messages from it: it waits anew afterwards.
                Some(_) if self.wish.paused => {}
                Some(at) if at <= now && self.phase == Phase::Linger => {
                    self.emit(now, ForkEvent::PhaseEntered { phase: Phase::Collect }, step);
                }
                Some(at) if at > now => step.effects.push(Effect::SetTimer { timer, at }),
                Some(_) | None => {}
            },
            // Advance starts it; early ones are set again.
            Timer::Retry(serial) => match self.pending.timers().get(&timer) {
                Some(at) if *at > now => step.effects.push(Effect::SetTimer { timer, at: *at }),
                Some(_) => self.retry(now, serial, step),
                None => {}
            },
        }
    }

    fn retry(&mut self, now: Timestamp, serial: u64, step: &mut ForkStep) {
        let Some(slot) = self.pending.due(serial, now).cloned() else { return };
        if self.wish.paused && slot == Slot::Main && self.holds_when_paused() {
            return;
        }
        self.start_again(now, slot, step);
    }

    fn start_again(&mut self, now: Timestamp, slot: Slot, step: &mut ForkStep) {
        let Some(entry) = self.pending.get(&slot) else { return };
        let task = entry.task.clone();
        // Each run of an agent is an attempt of its own: it fences off whatever the one before may still do.
        let attempt = match task {
            Task::RunAgent { .. } if entry.state != State::Lost => self.attempt.next(),
            _ => self.attempt,
        };
        self.start_task(now, slot, attempt, task, step);
    }

    fn start_task(&mut self, now: Timestamp, slot: Slot, attempt: Attempt, task: Task, step: &mut ForkStep) {
        let serial = self.pending.next_serial();
        self.emit(now, ForkEvent::Task(TaskEvent::Started { slot, serial, attempt, task }), step);
    }

    fn holds_when_paused(&self) -> bool {
        match self.phase {
            Phase::Budget | Phase::Create | Phase::Health | Phase::Agent | Phase::Verify => true,
            Phase::Linger | Phase::Collect | Phase::Publish | Phase::Cleanup | Phase::Ended => false,
        }
    }

    /// Goes on until there is nothing to do but wait.
    pub(super) fn advance(&mut self, now: Timestamp, step: &mut ForkStep) {
        while self.advance_once(now, step) {}
    }

    fn advance_once(&mut self, now: Timestamp, step: &mut ForkStep) -> bool {
        if self.phase == Phase::Ended {
            return false;
        }
        if let Some((slot, error)) = self.pending.hopeless() {
            self.emit(now, ForkEvent::GaveUp { slot, error }, step);
            return true;
        }
        // Lost destroys go on whatever the phase is.
        let lost = self
            .pending
            .iter()
            .find(|(s, e)| **s != Slot::Main && e.state == State::Lost)
            .map(|(s, _)| s.clone());
        if let Some(slot) = lost {
            self.start_again(now, slot, step);
            return true;
        }
        match self.pending.get(&Slot::Main).map(|e| e.state.clone()) {
            Some(State::Running { serial, stopping, .. }) => {
                if self.must_stop() && !stopping {
                    self.emit(now, ForkEvent::Task(TaskEvent::Stopping { serial }), step);
                }
                false
            }
            Some(state @ (State::Waiting { .. } | State::Lost)) => {
                if self.must_stop() {
                    self.emit(now, ForkEvent::PhaseEntered { phase: self.phase_after_stop() }, step);
                    return true;
                }
                let due = match state {
                    State::Waiting { until, .. } => until <= now,
                    State::Lost | State::Running { .. } => true,
                };
                if due && !(self.wish.paused && self.holds_when_paused()) {
                    self.start_again(now, Slot::Main, step);
                }
                false
            }
            None => self.advance_phase(now, step),
        }
    }

    /// The outcome is decided, and what runs now is not part of the ending.
    fn must_stop(&self) -> bool {
        match self.phase {
            Phase::Budget | Phase::Create | Phase::Health | Phase::Agent | Phase::Linger => {
                self.decided.is_some()
            }
            Phase::Verify => self.decided == Some(ForkOutcome::Cancelled),
            Phase::Collect | Phase::Publish | Phase::Cleanup | Phase::Ended => false,
        }
    }

    fn phase_after_stop(&self) -> Phase {
        match self.phase {
            Phase::Verify => Phase::Publish,
            _ if self.agent_ran => Phase::Collect,
            _ => Phase::Cleanup,
        }
    }

    fn advance_phase(&mut self, now: Timestamp, step: &mut ForkStep) -> bool {
        if self.must_stop() {
            self.emit(now, ForkEvent::PhaseEntered { phase: self.phase_after_stop() }, step);
            return true;
        }
        if self.wish.paused && self.holds_when_paused() {
            return false;
        }
        let base = self.plan.base.clone();
        let (attempt, task) = match self.phase {
            Phase::Budget => (self.attempt, Task::CheckBudget),
            Phase::Create => {
                let id = self.sandbox_id(Role::Work);
                (self.attempt, Task::CreateSandbox { sandbox: id, base })
            }
            Phase::Health => match self.work.clone() {
                Some(sandbox) => (self.attempt, Task::HealthCheck { sandbox }),
                None => return self.skip_to(now, Phase::Create, step),
            },
            Phase::Agent => match self.work.clone() {
                Some(sandbox) => {
                    let attempt = if self.agent_ran { self.attempt.next() } else { self.attempt };
                    (attempt, Task::RunAgent { sandbox, base })
                }
                None => return self.skip_to(now, Phase::Create, step),
            },
            Phase::Linger => {
                if self.linger_until.is_none() && !self.wish.paused {
                    self.emit(now, ForkEvent::Lingering { until: now + self.plan.linger }, step);
                }
                return false;
            }
            // A lost sandbox that was not replaced still has its last checkpoint: collect by any id it had.
            Phase::Collect => match self.work.clone().or_else(|| self.last_work()) {
                Some(sandbox) => (self.attempt, Task::Collect { sandbox, base }),
                None => return self.skip_to(now, Phase::Verify, step),
            },
            Phase::Verify => match &self.collected {
                Some(c) if self.plan.judges && self.decided != Some(ForkOutcome::Cancelled) => {
                    let commit = c.commit.clone();
                    (self.attempt, Task::Verify { sandbox: self.sandbox_id(Role::Verify), base, commit })
                }
                Some(_) | None => return self.skip_to(now, Phase::Publish, step),
            },
            Phase::Publish => match self.collected.clone() {
                Some(collected) => (self.attempt, Task::Publish { collected }),
                None => return self.skip_to(now, Phase::Cleanup, step),
            },
            Phase::Cleanup => return self.advance_cleanup(now, step),
            Phase::Ended => return false,
        };
        self.start_task(now, Slot::Main, attempt, task, step);
        false
    }

    fn skip_to(&mut self, now: Timestamp, phase: Phase, step: &mut ForkStep) -> bool {
        self.emit(now, ForkEvent::PhaseEntered { phase }, step);
        true
    }

    fn sandbox_id(&self, role: Role) -> SandboxId {
        SandboxId::derive(&self.plan.run, Some(self.plan.fork), self.attempt, role)
    }

    fn last_work(&self) -> Option<SandboxId> {
        self.sandboxes
            .iter()
            .filter(|(_, e)| e.role == Role::Work)
            .max_by_key(|(_, e)| e.created_at)
            .map(|(id, _)| id.clone())
    }

    fn advance_cleanup(&mut self, now: Timestamp, step: &mut ForkStep) -> bool {
        let todo = self.sandboxes.iter().find(|(id, e)| {
            matches!(e.state, SandboxState::Requested | SandboxState::Live)
                && self.pending.get(&Slot::Destroy((*id).clone())).is_none()
        });
        if let Some((id, e)) = todo {
            let id = id.clone();
            if self.plan.keep && e.state == SandboxState::Live && self.work.as_ref() == Some(&id) {
                self.emit(now, ForkEvent::HandedOver { sandbox: id }, step);
            } else {
                let task = Task::Destroy { sandbox: id.clone() };
                self.start_task(now, Slot::Destroy(id), self.attempt, task, step);
            }
            return true;
        }
        if !self.pending.is_empty() {
            return false;
        }
        let result = self.result();
        self.emit(now, ForkEvent::Ended { result }, step);
        true
    }
}
