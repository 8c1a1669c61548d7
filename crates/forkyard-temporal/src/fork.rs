//! The workflow of one fork: drives the `Fork` machine from its start to the cleanup that always happens.

use std::collections::VecDeque;

use forkyard_core::Timestamp;
use forkyard_core::budget::Balance;
use forkyard_core::fork::{Fork, ForkInput, ForkStep};
use forkyard_core::task::{Effect, TaskKind, Wish};
use forkyard_engine::log;
use temporalio_macros::{workflow, workflow_methods};
use temporalio_sdk::{SyncWorkflowContext, WorkflowContext, WorkflowContextView, WorkflowResult};

use crate::search;
use crate::wheel::{Arrived, Frame, Noted, Outcome, TaskEnd, Wheel, now};
use crate::wire::{FORGIVING, ForkEnd, ForkStart, ForkStatus, TELLING};

/// A worker that was cut off leaves polls behind, which the service keeps for a minute and goes on giving tasks to: about ten of
/// each queue. So many tasks may come to nothing without counting as losses of a fork.
const MAX_UNHEARD: u32 = 20;

/// What signals leave for the driver.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Note {
    Wish(Wish),
    /// There may be a message.
    Message,
    Cancel,
    /// Its user lets go of the run.
    LetGo,
    TakeOver(Wish),
}

#[workflow]
pub struct ForkFlow {
    start: ForkStart,
    fork: Option<Fork>,
    notes: VecDeque<Note>,
}

impl Noted for ForkFlow {
    fn has_notes(&self) -> bool {
        !self.notes.is_empty()
    }
}

#[workflow_methods]
impl ForkFlow {
    #[init]
    pub fn new(_ctx: &WorkflowContextView, start: ForkStart) -> Self {
        ForkFlow { start, fork: None, notes: VecDeque::new() }
    }

    #[run(name = "ForkyardFork")]
    pub async fn run(ctx: &mut WorkflowContext<Self>) -> WorkflowResult<ForkEnd> {
        let start = ctx.state(|s| s.start.clone());
        crate::run::check_logic(start.logic)?;
        Driver::new(ctx, start).go().await
    }

    /// What its run wants of it now.
    #[signal]
    pub fn wish(&mut self, _ctx: &mut SyncWorkflowContext<Self>, wish: Wish) {
        self.notes.push_back(Note::Wish(wish));
    }
    #[signal]
    pub fn message_waiting(&mut self, _ctx: &mut SyncWorkflowContext<Self>) {
        self.notes.push_back(Note::Message);
    }
    #[signal]
    pub fn cancel(&mut self, _ctx: &mut SyncWorkflowContext<Self>) {
        self.notes.push_back(Note::Cancel);
    }
    #[signal]
    pub fn let_go(&mut self, _ctx: &mut SyncWorkflowContext<Self>) {
        self.notes.push_back(Note::LetGo);
    }
    #[signal]
    pub fn take_over(&mut self, _ctx: &mut SyncWorkflowContext<Self>, wish: Wish) {
        self.notes.push_back(Note::TakeOver(wish));
    }

    #[query]
    pub fn status(&self, _ctx: &WorkflowContextView) -> Option<ForkStatus> {
        let view = self.fork.as_ref()?.view();
        let views = self.fork.as_ref()?.views();
        let host = views.iter().find_map(|v| match v {
            forkyard_core::view::View::Sandbox(s) if Some(&s.id) == view.sandbox.as_ref() => s.host.clone(),
            _ => None,
        });
        let (phase, attempt, outcome, error) = (view.phase, view.attempt, view.outcome, view.error);
        Some(ForkStatus { phase, attempt, outcome, host, error })
    }
}

/// Why somebody looks into the store.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Looking {
    /// A message may wait.
    Message,
    /// What was in flight is lost: the next attempt begins.
    TakeOver { wish: Option<Wish>, let_go: bool, last_driven: Option<Timestamp> },
}

struct Driver<'a> {
    ctx: &'a WorkflowContext<ForkFlow>,
    wheel: Wheel<'a, ForkFlow>,
    start: ForkStart,
    looking: Option<Looking>,
    /// Since when nobody drives it, because its user let go.
    let_go: Option<Timestamp>,
    balance: Option<Balance>,
    /// Tasks that nobody took.
    unheard: u32,
    /// The phase that the service's search knows.
    shown: Option<String>,
}

impl<'a> Driver<'a> {
    fn new(ctx: &'a WorkflowContext<ForkFlow>, start: ForkStart) -> Driver<'a> {
        let frame = Frame {
            run: start.plan.run.clone(),
            fork: Some(start.plan.fork),
            store: start.store.clone(),
            lease: start.lease,
            pace: start.pace,
            counted: start.counted,
            logic: start.logic,
        };
        let wheel = Wheel::new(ctx, frame, 0);
        let (looking, let_go, balance) = (None, None, None);
        Driver { ctx, wheel, start, looking, let_go, balance, unheard: 0, shown: None }
    }

    async fn go(mut self) -> WorkflowResult<ForkEnd> {
        let now = now(self.ctx);
        let (fork, step) = Fork::start(now, self.start.plan.clone(), self.start.wish);
        self.ctx.state_mut(|s| s.fork = Some(fork));
        self.step(now, step);
        loop {
            while let Some(note) = self.next_note() {
                self.note(note);
            }
            self.show();
            self.wheel.flush();
            if let Some(result) = self.with(|f| f.is_ended().then(|| f.result()))
                && self.wheel.is_settled()
            {
                if self.start.searchable {
                    search::outcome(self.ctx, result.outcome);
                }
                return Ok(ForkEnd { result, balance: self.balance });
            }
            for arrived in self.wheel.next().await {
                self.arrived(arrived);
            }
        }
    }

    fn with<R>(&self, f: impl FnOnce(&Fork) -> R) -> R {
        self.ctx.state(|s| f(s.fork.as_ref().expect("it is there from the start")))
    }

    /// For whoever looks at it in Temporal's own pages.
    fn show(&mut self) {
        let (view, ended) = self.with(|f| (f.view(), f.is_ended()));
        let host = view.sandbox.as_ref().and_then(|id| self.wheel.host_of(id));
        let host = host.map(|h| format!(", host {h}")).unwrap_or_default();
        self.ctx.set_current_details(format!("attempt {}, {}{host}", view.attempt, view.phase));
        let told = self.start.searchable && self.start.logic >= TELLING;
        if told && !ended && self.shown.as_ref() != Some(&view.phase) {
            search::phase(self.ctx, &view.phase);
            self.shown = Some(view.phase);
        }
    }

    fn next_note(&mut self) -> Option<Note> {
        if self.wheel.hears_cancel() {
            return Some(Note::Cancel);
        }
        if !self.ctx.state(ForkFlow::has_notes) {
            return None;
        }
        self.ctx.state_mut(|s| s.notes.pop_front())
    }

    fn note(&mut self, note: Note) {
        match note {
            Note::Wish(wish) if self.let_go.is_none() => {
                self.input(ForkInput::Wish(wish));
                // A pause may have kept it from messages.
                if self.with(Fork::is_lingering) {
                    self.look(Looking::Message);
                }
            }
            // It is told anew when it is taken over.
            Note::Wish(_) => {}
            Note::Message => self.look(Looking::Message),
            Note::Cancel => {
                let paused = self.start.wish.paused;
                self.input(ForkInput::Wish(Wish { paused, cancelled: true }));
            }
            Note::LetGo => {
                self.wheel.let_go();
                self.let_go = Some(now(self.ctx));
            }
            Note::TakeOver(wish) => {
                let (let_go, last_driven) = (self.let_go.is_some(), self.let_go.or(Some(now(self.ctx))));
                self.look(Looking::TakeOver { wish: Some(wish), let_go, last_driven });
            }
        }
    }

    fn input(&mut self, input: ForkInput) {
        let now = now(self.ctx);
        let step = self.ctx.state_mut(|s| s.fork.as_mut().map(|f| f.handle(now, input)));
        self.step(now, step.unwrap_or_default());
    }

    fn step(&mut self, now: Timestamp, step: ForkStep) {
        let (views, sandbox) = self.with(|f| (f.views(), f.view().sandbox));
        let events = step.events.iter().map(|e| log::stored(now, e, sandbox.as_ref())).collect();
        self.wheel.note(events, views, &[]);
        for effect in step.effects {
            match effect {
                Effect::Perform(dispatch) => self.wheel.perform(dispatch),
                Effect::Cancel { serial } => self.wheel.cancel(serial),
                Effect::SetTimer { timer, at } => self.wheel.set_timer(timer, at),
                Effect::ClearTimer { timer } => self.wheel.clear_timer(timer),
                // A run's effect.
                Effect::Fork { .. } => {}
            }
        }
    }

    fn arrived(&mut self, arrived: Arrived) {
        match arrived {
            Arrived::Task { serial, kind, sandbox, ended, .. } => {
                if self.wheel.heard(serial, sandbox.as_ref(), &ended) {
                    self.task_ended(serial, kind, ended);
                }
            }
            Arrived::Timer(timer, n) => {
                if self.wheel.fired(timer, n) {
                    self.input(ForkInput::Timer(timer));
                }
            }
            Arrived::Looked(look) => match self.looking.take() {
                Some(Looking::TakeOver { wish, let_go, last_driven }) => {
                    // Whatever still runs belongs to the attempt before.
                    self.wheel.let_go();
                    self.let_go = None;
                    let journal_len = look.progress;
                    self.input(ForkInput::Takeover { wish, journal_len, last_driven, let_go });
                }
                Some(Looking::Message) if look.messages => self.input(ForkInput::Message),
                Some(Looking::Message) | None => {}
            },
            Arrived::Recorded(_)
            | Arrived::Inbox(_)
            | Arrived::ForkStarted(_)
            | Arrived::ForkEnded(..)
            | Arrived::Sent => {}
        }
    }

    fn task_ended(&mut self, serial: u64, kind: TaskKind, ended: TaskEnd) {
        let result = match ended.outcome(kind) {
            Outcome::Lost { let_go } => return self.lost(let_go),
            Outcome::Unheard => {
                self.unheard += 1;
                return self.lost(self.start.logic >= FORGIVING && self.unheard <= MAX_UNHEARD);
            }
            Outcome::Result(result, balance) => {
                self.balance = balance.or(self.balance.take());
                result
            }
        };
        self.input(ForkInput::Outcome { serial, result });
        if self.with(Fork::is_lingering) {
            self.look(Looking::Message);
        }
    }

    fn lost(&mut self, let_go: bool) {
        self.look(Looking::TakeOver { wish: None, let_go, last_driven: Some(now(self.ctx)) });
    }

    /// One look at a time; a takeover matters more than a message.
    fn look(&mut self, why: Looking) {
        match (self.looking, why) {
            (None, _) => {
                self.looking = Some(why);
                self.wheel.look();
            }
            (Some(Looking::Message), Looking::TakeOver { .. }) => self.looking = Some(why),
            (Some(_), _) => {}
        }
    }
}
