//! The fork machine: one agent working in one sandbox, from the budget check to the cleanup that always happens.
//!
//! | phase   | task          | success          | last error                  | cancel, timeout       |
//! |---------|---------------|------------------|-----------------------------|-----------------------|
//! | Budget  | CheckBudget   | Create           | Cleanup                     | Cleanup               |
//! | Create  | CreateSandbox | Health           | Cleanup                     | Cleanup               |
//! | Health  | HealthCheck   | Agent            | Cleanup                     | Cleanup               |
//! | Agent   | RunAgent      | Linger / Collect | Collect; sandbox lost: Create | Collect             |
//! | Linger  | (a timer)     | Agent (message), Collect (time) | –            | Collect               |
//! | Collect | Collect       | Verify           | Verify (skipped)            | goes on               |
//! | Verify  | Verify        | Publish          | Publish (not verified)      | Publish (cancel only) |
//! | Publish | Publish       | Cleanup          | Cleanup                     | goes on               |
//! | Cleanup | Destroy each  | Ended            | owed to the sweep, Ended    | goes on               |
//!
//! While paused no task of Budget, Create, Health, Agent and Verify starts; the rest goes on, so that nothing leaks.
//! Collect and everything after it happens whatever the outcome is. Before an agent ran there is nothing to collect.

mod apply;
mod decide;
mod view;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::pending::{self, Pending, Slot, TaskEvent};
use crate::sandbox::ProviderKind;
use crate::spec::ForkSpec;
use crate::task::{
    AgentReport, Base, Collected, Effect, ErrorClass, TaskError, TaskResult, Timer, Verdict, Wish,
};
use crate::view::{ForkOutcome, SandboxState};
use crate::{Attempt, ForkNum, HostId, Millis, Role, RunId, SandboxId, Timestamp};

/// What a fork knows from its start.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ForkPlan {
    pub run: RunId,
    pub fork: ForkNum,
    pub spec: ForkSpec,
    pub base: Base,
    pub provider: ProviderKind,
    pub timeout: Millis,
    pub linger: Millis,
    pub keep: bool,
    /// Verify or score follows.
    pub judges: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    Budget,
    Create,
    Health,
    Agent,
    Linger,
    Collect,
    Verify,
    Publish,
    Cleanup,
    Ended,
}

#[derive(Debug, Clone, PartialEq)]
pub enum ForkInput {
    /// What its run wants of it now.
    Wish(Wish),
    Outcome {
        serial: u64,
        result: TaskResult,
    },
    Timer(Timer),
    /// A message waits in the inbox.
    Message,
    /// A new driver: everything that was in flight is lost.
    Takeover {
        /// What its run wants of it by now; None: what it wanted before.
        wish: Option<Wish>,
        /// Where the agent's last progress stands. If it is where it was, the loss counts.
        journal_len: u64,
        /// Until when the driver before it drove, by that one's clock; what another one before said is no news.
        last_driven: Option<Timestamp>,
        /// The driver before let go on purpose: nothing counts as lost.
        let_go: bool,
    },
}

/// A recorded fact. Names and meanings are for ever; see [`crate::event`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", content = "data")]
pub enum ForkEvent {
    #[serde(rename = "fork.started")]
    Started { plan: ForkPlan, wish: Wish },
    #[serde(rename = "fork.task")]
    Task(TaskEvent),
    /// What its run wants of it has changed.
    #[serde(rename = "fork.wished")]
    Wished { wish: Wish },
    #[serde(rename = "fork.timed_out")]
    TimedOut,
    #[serde(rename = "fork.phase_entered")]
    PhaseEntered { phase: Phase },
    #[serde(rename = "fork.lingering")]
    Lingering { until: Timestamp },
    #[serde(rename = "fork.message_noticed")]
    MessageNoticed,
    /// Its work sandbox is gone; the next attempt goes on in a new one.
    #[serde(rename = "fork.sandbox_lost")]
    SandboxLost { serial: u64, error: TaskError },
    #[serde(rename = "fork.taken_over")]
    TakenOver {
        attempt: Attempt,
        journal_len: u64,
        last_driven: Option<Timestamp>,
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        let_go: bool,
    },
    #[serde(rename = "fork.gave_up")]
    GaveUp { slot: Slot, error: TaskError },
    #[serde(rename = "fork.sandbox_handed_over")]
    HandedOver { sandbox: SandboxId },
    #[serde(rename = "fork.ended")]
    Ended { result: ForkResult },
}

/// What a fork came to; all that ranking and reports need.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ForkResult {
    pub fork: ForkNum,
    pub outcome: ForkOutcome,
    pub attempt: Attempt,
    pub sandbox: Option<SandboxId>,
    pub report: Option<AgentReport>,
    pub collected: Option<Collected>,
    pub verdict: Option<Verdict>,
    pub driven: Millis,
    pub error: Option<String>,
}

impl ForkResult {
    /// A fork that never started.
    pub fn unstarted(fork: ForkNum, outcome: ForkOutcome, error: Option<String>) -> ForkResult {
        ForkResult {
            fork,
            outcome,
            attempt: Attempt(0),
            sandbox: None,
            report: None,
            collected: None,
            verdict: None,
            driven: Millis::ZERO,
            error,
        }
    }
    pub fn verified(&self) -> bool {
        self.verdict.as_ref().is_some_and(|v| v.passed == Some(true))
    }
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) struct SandboxEntry {
    pub role: Role,
    pub state: SandboxState,
    pub host: Option<HostId>,
    pub created_at: Timestamp,
    pub updated_at: Timestamp,
}

/// What one input leads to.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ForkStep {
    pub events: Vec<ForkEvent>,
    pub effects: Vec<Effect>,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Fork {
    plan: ForkPlan,
    phase: Phase,
    attempt: Attempt,
    pending: Pending,
    wish: Wish,
    /// Counted time before `since`.
    driven: Millis,
    /// Since when time counts; None while paused and in phases that have limits of their own.
    since: Option<Timestamp>,
    /// Until when it had been driven when its last driver came, as that one was told.
    last_driven: Option<Timestamp>,
    sandboxes: BTreeMap<SandboxId, SandboxEntry>,
    work: Option<SandboxId>,
    agent_ran: bool,
    /// Cancelled or timed out: decided before the agent's own end.
    decided: Option<ForkOutcome>,
    reached: Option<ForkOutcome>,
    report: Option<AgentReport>,
    collected: Option<Collected>,
    verdict: Option<Verdict>,
    error: Option<String>,
    journal_len: u64,
    /// Losses of the work sandbox without a new turn in between.
    sandbox_losses: u32,
    linger_until: Option<Timestamp>,
    created_at: Timestamp,
    updated_at: Timestamp,
    ended_at: Option<Timestamp>,
}

impl Fork {
    /// A new fork, and its first step.
    pub fn start(now: Timestamp, plan: ForkPlan, wish: Wish) -> (Fork, ForkStep) {
        let mut fork = Fork::blank(now, plan.clone(), wish);
        let mut step = ForkStep { events: vec![ForkEvent::Started { plan, wish }], effects: vec![] };
        fork.advance(now, &mut step);
        fork.finish_step(&BTreeMap::new(), &mut step);
        (fork, step)
    }

    /// The state that these events led to; None if they do not begin with a start.
    pub fn replay<'a>(events: impl IntoIterator<Item = (Timestamp, &'a ForkEvent)>) -> Option<Fork> {
        let mut events = events.into_iter();
        let mut fork = match events.next() {
            Some((at, ForkEvent::Started { plan, wish })) => Fork::blank(at, plan.clone(), *wish),
            _ => return None,
        };
        for (at, event) in events {
            fork.apply(at, event);
        }
        Some(fork)
    }

    pub fn handle(&mut self, now: Timestamp, input: ForkInput) -> ForkStep {
        let mut step = ForkStep::default();
        // A new driver has no timers: it is told all of them.
        let before = match input {
            ForkInput::Takeover { .. } => BTreeMap::new(),
            ForkInput::Wish(_) | ForkInput::Outcome { .. } | ForkInput::Timer(_) | ForkInput::Message => {
                self.timers()
            }
        };
        self.decide(now, input, &mut step);
        self.advance(now, &mut step);
        self.finish_step(&before, &mut step);
        step
    }

    fn finish_step(&self, before: &BTreeMap<Timer, Timestamp>, step: &mut ForkStep) {
        for event in &step.events {
            if let ForkEvent::Task(t) = event {
                step.effects.extend(pending::dispatch(t));
            }
        }
        pending::timer_effects(before, &self.timers(), &mut step.effects);
    }

    fn emit(&mut self, now: Timestamp, event: ForkEvent, step: &mut ForkStep) {
        self.apply(now, &event);
        step.events.push(event);
    }

    pub fn plan(&self) -> &ForkPlan {
        &self.plan
    }
    pub fn phase(&self) -> Phase {
        self.phase
    }
    pub fn attempt(&self) -> Attempt {
        self.attempt
    }
    pub fn is_ended(&self) -> bool {
        self.phase == Phase::Ended
    }
    /// It waits for messages: whoever drives it looks into the inbox.
    pub fn is_lingering(&self) -> bool {
        self.phase == Phase::Linger
    }
    /// Serials of the tasks in flight.
    pub fn running(&self) -> impl Iterator<Item = u64> + '_ {
        self.pending.iter().filter_map(|(_, e)| match e.state {
            pending::State::Running { serial, .. } => Some(serial),
            pending::State::Waiting { .. } | pending::State::Lost => None,
        })
    }
}
