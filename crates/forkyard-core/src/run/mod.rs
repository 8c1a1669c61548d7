//! The run machine: prepares the base once, keeps up to `max_concurrent` forks going, ranks what comes back, and ends.
//!
//! | phase   | what happens                                       | leads to                                  |
//! |---------|----------------------------------------------------|-------------------------------------------|
//! | Prepare | PrepareBase                                        | Forks; Finish on its last error or cancel |
//! | Forks   | forks start and end; VerifyBase beside them        | Finish when none waits and none is live   |
//! | Finish  | what waits is written off, base sandboxes are destroyed | Ended                                |
//!
//! The base's sandbox is destroyed as soon as its snapshot is there. While paused nothing starts but destroys.

mod apply;
mod decide;
mod view;

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use crate::budget::{Balance, NearLimit};
use crate::fork::{ForkResult, SandboxEntry};
use crate::pending::{self, Pending, Slot, TaskEvent};
use crate::rank::Ranking;
use crate::spec::{ForkSpec, RunSpec};
use crate::task::{Base, Effect, TaskError, TaskResult, Timer, Verdict, Wish};
use crate::view::{ForkOutcome, RunOutcome};
use crate::{Attempt, ForkNum, RunId, SandboxId, Timestamp};

/// What a user wishes of a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "command")]
pub enum Command {
    Pause,
    Resume,
    /// Its user goes away: it stops at a safe point and stays resumable.
    Detach,
    Cancel,
    CancelFork {
        fork: ForkNum,
    },
    AddForks {
        forks: Vec<ForkSpec>,
    },
}

impl Command {
    /// A detached run is driven again for it.
    pub fn brings_back(&self) -> bool {
        match self {
            Command::Resume | Command::Cancel => true,
            Command::Pause | Command::Detach | Command::CancelFork { .. } | Command::AddForks { .. } => false,
        }
    }
    pub fn name(&self) -> &'static str {
        match self {
            Command::Pause => "pause",
            Command::Resume => "resume",
            Command::Detach => "detach",
            Command::Cancel => "cancel",
            Command::CancelFork { .. } => "cancel_fork",
            Command::AddForks { .. } => "add_forks",
        }
    }
}

#[derive(Debug, Clone, PartialEq)]
pub enum RunInput {
    Command(Command),
    Outcome {
        serial: u64,
        result: TaskResult,
    },
    Timer(Timer),
    ForkEnded(ForkResult),
    /// A new driver: what was in flight is lost. Commands that waited for it are heeded before anything is begun.
    Takeover {
        commands: Vec<Command>,
    },
    /// What the ledger says now.
    Spent(Balance),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RunPhase {
    Prepare,
    Forks,
    Finish,
    Ended,
}

/// A recorded fact. Names and meanings are for ever; see [`crate::event`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", content = "data")]
pub enum RunEvent {
    #[serde(rename = "run.submitted")]
    Submitted { id: RunId, spec: RunSpec },
    #[serde(rename = "run.task")]
    Task(TaskEvent),
    #[serde(rename = "run.gave_up")]
    GaveUp { slot: Slot, error: TaskError },
    #[serde(rename = "run.fork_started")]
    ForkStarted { fork: ForkNum },
    #[serde(rename = "run.fork_ended")]
    ForkEnded { result: ForkResult },
    #[serde(rename = "run.forks_added")]
    ForksAdded { forks: Vec<ForkSpec> },
    #[serde(rename = "run.paused")]
    Paused,
    #[serde(rename = "run.resumed")]
    Resumed,
    #[serde(rename = "run.detached")]
    Detached,
    #[serde(rename = "run.cancelled")]
    Cancelled,
    #[serde(rename = "run.fork_cancelled")]
    ForkCancelled { fork: ForkNum },
    #[serde(rename = "run.command_refused")]
    Refused { command: String, reason: String },
    /// A limit is used up to 80 %. Once for each.
    #[serde(rename = "run.budget_warning")]
    BudgetWarning(NearLimit),
    #[serde(rename = "run.phase_entered")]
    PhaseEntered { phase: RunPhase },
    #[serde(rename = "run.taken_over")]
    TakenOver { tenure: Attempt },
    #[serde(rename = "run.ended")]
    Ended { outcome: RunOutcome, ranking: Ranking },
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) enum ForkState {
    Waiting,
    Live,
    Ended(ForkResult),
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) struct RunFork {
    spec: ForkSpec,
    state: ForkState,
    cancelled: bool,
}

#[derive(Debug, Clone, Default, PartialEq)]
pub struct RunStep {
    pub events: Vec<RunEvent>,
    pub effects: Vec<Effect>,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Run {
    id: RunId,
    spec: RunSpec,
    phase: RunPhase,
    /// Tenures over the run: a driver's number, which makes its sandboxes' ids.
    tenure: Attempt,
    pending: Pending,
    paused: bool,
    detached: bool,
    cancelling: bool,
    base: Option<Base>,
    base_check_done: bool,
    base_verdict: Option<Verdict>,
    forks: Vec<RunFork>,
    /// Limits that were warned of; None is the run's own.
    warned: BTreeSet<Option<ForkNum>>,
    sandboxes: BTreeMap<SandboxId, SandboxEntry>,
    error: Option<String>,
    outcome: Option<RunOutcome>,
    ranking: Ranking,
    created_at: Timestamp,
    updated_at: Timestamp,
    ended_at: Option<Timestamp>,
}

impl Run {
    /// The first event of a run: what [`crate::spec::RunSpec::validate`] let pass.
    pub fn submit(now: Timestamp, id: RunId, spec: RunSpec) -> (Run, RunStep) {
        let run = Run::blank(now, id.clone(), spec.clone());
        (run, RunStep { events: vec![RunEvent::Submitted { id, spec }], effects: vec![] })
    }

    /// The state that these events led to; None if they do not begin with a submission.
    pub fn replay<'a>(events: impl IntoIterator<Item = (Timestamp, &'a RunEvent)>) -> Option<Run> {
        let mut events = events.into_iter();
        let mut run = match events.next() {
            Some((at, RunEvent::Submitted { id, spec })) => Run::blank(at, id.clone(), spec.clone()),
            _ => return None,
        };
        for (at, event) in events {
            run.apply(at, event);
        }
        Some(run)
    }

    pub fn handle(&mut self, now: Timestamp, input: RunInput) -> RunStep {
        let mut step = RunStep::default();
        let (timers, wishes) = match input {
            RunInput::Takeover { .. } => Default::default(),
            RunInput::Command(_)
            | RunInput::Outcome { .. }
            | RunInput::Timer(_)
            | RunInput::ForkEnded(_)
            | RunInput::Spent(_) => (self.pending.timers(), self.wishes()),
        };
        self.decide(now, input, &mut step);
        self.advance(now, &mut step);
        for event in &step.events {
            if let RunEvent::Task(t) = event {
                step.effects.extend(pending::dispatch(t));
            }
        }
        pending::timer_effects(&timers, &self.pending.timers(), &mut step.effects);
        for (fork, wish) in self.wishes() {
            if wishes.get(&fork) != Some(&wish) {
                step.effects.push(Effect::Fork { fork, wish });
            }
        }
        step
    }

    fn emit(&mut self, now: Timestamp, event: RunEvent, step: &mut RunStep) {
        self.apply(now, &event);
        step.events.push(event);
    }

    /// What it wants of its live forks.
    fn wishes(&self) -> BTreeMap<ForkNum, Wish> {
        self.forks
            .iter()
            .enumerate()
            .filter(|(_, f)| f.state == ForkState::Live)
            .map(|(n, f)| {
                let cancelled = self.cancelling || f.cancelled;
                (n as ForkNum, Wish { paused: self.paused, cancelled })
            })
            .collect()
    }

    pub fn id(&self) -> &RunId {
        &self.id
    }
    pub fn spec(&self) -> &RunSpec {
        &self.spec
    }
    pub fn phase(&self) -> RunPhase {
        self.phase
    }
    pub fn tenure(&self) -> Attempt {
        self.tenure
    }
    pub fn is_ended(&self) -> bool {
        self.phase == RunPhase::Ended
    }
    pub fn is_paused(&self) -> bool {
        self.paused
    }
    pub fn is_detached(&self) -> bool {
        self.detached
    }
    /// Some limit has not been warned of yet: whoever drives it looks into the ledger.
    pub fn minds_spending(&self) -> bool {
        let of_run = self.spec.budget.run.is_some() && !self.warned.contains(&None);
        let of_forks = self.spec.budget.fork.is_some()
            && (0..self.forks.len()).any(|n| !self.warned.contains(&Some(n as ForkNum)));
        of_run || of_forks
    }
    pub fn base(&self) -> Option<&Base> {
        self.base.as_ref()
    }
    pub fn base_verdict(&self) -> Option<&Verdict> {
        self.base_verdict.as_ref()
    }
    pub fn ranking(&self) -> &Ranking {
        &self.ranking
    }
    pub fn outcome(&self) -> Option<RunOutcome> {
        self.outcome
    }
    pub fn fork_spec(&self, fork: ForkNum) -> Option<&ForkSpec> {
        self.forks.get(fork as usize).map(|f| &f.spec)
    }
    pub fn fork_count(&self) -> usize {
        self.forks.len()
    }
    pub fn live_forks(&self) -> impl Iterator<Item = ForkNum> + '_ {
        self.forks.iter().enumerate().filter(|(_, f)| f.state == ForkState::Live).map(|(n, _)| n as ForkNum)
    }
    /// Of the forks that have ended, in order of their numbers.
    pub fn results(&self) -> impl Iterator<Item = &ForkResult> {
        self.forks.iter().filter_map(|f| match &f.state {
            ForkState::Ended(r) => Some(r),
            ForkState::Waiting | ForkState::Live => None,
        })
    }
    /// What a fork has to know when it starts; None before the base is there.
    pub fn fork_plan(&self, fork: ForkNum) -> Option<crate::fork::ForkPlan> {
        Some(crate::fork::ForkPlan {
            run: self.id.clone(),
            fork,
            spec: self.fork_spec(fork)?.clone(),
            base: self.base.clone()?,
            provider: self.spec.sandbox.provider,
            timeout: self.spec.fork_timeout,
            linger: self.spec.linger,
            keep: self.spec.keep,
            judges: self.spec.judges(),
        })
    }
}
