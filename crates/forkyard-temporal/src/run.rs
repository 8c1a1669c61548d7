//! The workflow of a run: drives the `Run` machine, with a child workflow for each fork.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::future::poll_fn;
use std::rc::Rc;
use std::task::Poll;

use forkyard_core::budget::Balance;
use forkyard_core::run::{Command, Run, RunEvent, RunInput, RunStep};
use forkyard_core::task::{Effect, TaskKind, Wish};
use forkyard_core::view::{ForkOutcome, RunOutcome, RunStatus};
use forkyard_core::{ForkNum, Timestamp, Usd};
use forkyard_engine::log;
use forkyard_store::CommandId;
use temporalio_common::RetryPolicy;
use temporalio_macros::{workflow, workflow_methods};
use temporalio_sdk::{
    ActivityOptions, ChildWorkflowCancellationType, ChildWorkflowOptions, ParentClosePolicy,
    SignalWorkflowOptions, SyncWorkflowContext, WorkflowCancellationToken, WorkflowContext,
    WorkflowContextView, WorkflowResult, WorkflowTermination,
};

use crate::fork::ForkFlow;
use crate::hand::Hand;
use crate::search;
use crate::wheel::{Arrived, Frame, Noted, Outcome, SMALL, TaskEnd, Wheel, broken, now, said};
use crate::wire::{
    ForkStart, ForkSummary, LOGIC, Open, Opened, RunProgress, RunResults, RunStart, Said, Waiting,
    fork_workflow_id, summary,
};

/// What signals leave for the driver.
enum Note {
    Command(Command),
    /// Commands may wait in the store.
    Inbox,
    Spent(Balance),
    Say(Said),
}

#[workflow]
pub struct RunFlow {
    start: RunStart,
    run: Run,
    notes: VecDeque<Note>,
    /// By the last balance that it was told.
    spent: Usd,
}

impl Noted for RunFlow {
    fn has_notes(&self) -> bool {
        !self.notes.is_empty()
    }
}

#[workflow_methods]
impl RunFlow {
    #[init]
    pub fn new(_ctx: &WorkflowContextView, start: RunStart) -> Self {
        let (run, _) = Run::submit(start.submitted_at, start.run.clone(), start.spec.clone());
        RunFlow { start, run, notes: VecDeque::new(), spent: Usd::ZERO }
    }

    #[run(name = "ForkyardRun")]
    pub async fn run(ctx: &mut WorkflowContext<Self>) -> WorkflowResult<RunResults> {
        let start = ctx.state(|s| s.start.clone());
        check_logic(start.logic)?;
        let open =
            Open { run: start.run.clone(), store: start.store.clone(), owner: ctx.workflow_id().to_string() };
        let options = ActivityOptions::with_start_to_close_timeout(SMALL)
            .cancellation_token(WorkflowCancellationToken::new())
            .retry_policy(RetryPolicy::builder().maximum_interval(std::time::Duration::from_secs(60)).build())
            .summary("open the store")
            .build();
        let opened = ctx.execute_activity(Hand::open, open, options).await?;
        Driver::new(ctx, start, opened).go().await
    }

    #[signal]
    pub fn pause(&mut self, _ctx: &mut SyncWorkflowContext<Self>) {
        self.notes.push_back(Note::Command(Command::Pause));
    }
    #[signal]
    pub fn resume(&mut self, _ctx: &mut SyncWorkflowContext<Self>) {
        self.notes.push_back(Note::Command(Command::Resume));
    }
    #[signal]
    pub fn cancel(&mut self, _ctx: &mut SyncWorkflowContext<Self>) {
        self.notes.push_back(Note::Command(Command::Cancel));
    }
    #[signal]
    pub fn command(&mut self, _ctx: &mut SyncWorkflowContext<Self>, command: Command) {
        self.notes.push_back(Note::Command(command));
    }
    /// Goes on into the store's inbox, which the agent watches.
    #[signal]
    pub fn message(&mut self, _ctx: &mut SyncWorkflowContext<Self>, said: Said) {
        self.notes.push_back(Note::Say(said));
    }
    #[signal]
    pub fn commands_waiting(&mut self, _ctx: &mut SyncWorkflowContext<Self>) {
        self.notes.push_back(Note::Inbox);
    }
    #[signal]
    pub fn spent(&mut self, _ctx: &mut SyncWorkflowContext<Self>, balance: Balance) {
        self.notes.push_back(Note::Spent(balance));
    }

    #[query]
    pub fn progress(&self, _ctx: &WorkflowContextView) -> RunProgress {
        let view = self.run.view();
        RunProgress {
            progress: self.run.progress(),
            status: view.status.as_str().to_string(),
            total_cost_usd: cost(&self.run).max(self.spent).as_dollars(),
            paused: view.paused,
            cancelled: view.cancelling,
        }
    }
    #[query]
    pub fn results(&self, _ctx: &WorkflowContextView) -> RunResults {
        results(&self.run)
    }
}

/// A workflow of a newer release is left to newer workers.
pub fn check_logic(logic: u32) -> Result<(), WorkflowTermination> {
    // A panic fails the workflow's task, not the workflow: it is tried again, until a newer worker takes it.
    assert!(logic <= LOGIC, "this worker drives workflows up to logic {LOGIC}, not of {logic}: update it");
    Ok(())
}

/// Of the forks that have ended.
fn cost(run: &Run) -> Usd {
    run.results().filter_map(|r| r.report.as_ref()).fold(Usd::ZERO, |sum, r| sum + r.cost)
}

fn results(run: &Run) -> RunResults {
    let results: Vec<ForkSummary> = run.results().map(ForkSummary::of).collect();
    let successful = results.iter().filter(|r| r.status == ForkOutcome::Success).count() as u32;
    let view = run.view();
    RunResults {
        outcome: run.outcome(),
        winner: view.winner,
        ranking: view.ranking,
        total_forks: run.fork_count() as u32,
        successful,
        failed: results.len() as u32 - successful,
        total_cost_usd: cost(run).as_dollars(),
        total_duration_seconds: view.ended_at.unwrap_or(view.updated_at).since(view.created_at).0 / 1000,
        results,
    }
}

/// A child workflow.
#[derive(Default)]
struct Child {
    started: bool,
    /// What it was told last.
    told: Wish,
    /// What its run wants by now.
    wish: Wish,
}

struct Driver<'a> {
    ctx: &'a WorkflowContext<RunFlow>,
    wheel: Wheel<'a, RunFlow>,
    start: RunStart,
    opened: Opened,
    children: BTreeMap<ForkNum, Child>,
    /// Commands of the store that were taken; they stay there until that is recorded.
    heard: BTreeSet<CommandId>,
    reading: bool,
    /// News came while the inbox was read.
    read_again: bool,
    let_go: bool,
    messages: u64,
    shown: Option<RunStatus>,
}

impl<'a> Driver<'a> {
    fn new(ctx: &'a WorkflowContext<RunFlow>, start: RunStart, opened: Opened) -> Driver<'a> {
        let frame = Frame {
            run: start.run.clone(),
            fork: None,
            store: start.store.clone(),
            lease: opened.lease,
            pace: start.pace,
            counted: false,
            logic: start.logic,
        };
        Driver {
            ctx,
            wheel: Wheel::new(ctx, frame, opened.seq),
            start,
            opened,
            children: BTreeMap::new(),
            heard: BTreeSet::new(),
            reading: false,
            read_again: false,
            let_go: false,
            messages: 0,
            shown: None,
        }
    }

    async fn go(mut self) -> WorkflowResult<RunResults> {
        self.input(RunInput::Takeover { commands: vec![] }, &[]);
        self.read_inbox();
        loop {
            while let Some(note) = self.next_note() {
                self.note(note);
            }
            self.show();
            self.wheel.flush();
            if self.with(Run::is_ended) && self.wheel.is_settled() {
                let results = self.with(results);
                return match results.outcome {
                    Some(RunOutcome::Cancelled) => Err(WorkflowTermination::cancelled_with_details(results)),
                    Some(RunOutcome::Success | RunOutcome::Failed) | None => Ok(results),
                };
            }
            for arrived in self.wheel.next().await {
                self.arrived(arrived);
            }
        }
    }

    fn with<R>(&self, f: impl FnOnce(&Run) -> R) -> R {
        self.ctx.state(|s| f(&s.run))
    }

    fn next_note(&mut self) -> Option<Note> {
        if self.wheel.hears_cancel() {
            return Some(Note::Command(Command::Cancel));
        }
        if !self.ctx.state(RunFlow::has_notes) {
            return None;
        }
        self.ctx.state_mut(|s| s.notes.pop_front())
    }

    fn note(&mut self, note: Note) {
        match note {
            Note::Command(command) => self.command(command, &[]),
            Note::Inbox => self.read_inbox(),
            Note::Spent(balance) => self.spent(balance),
            Note::Say(said) => {
                self.messages += 1;
                let key = format!("{}/{}", self.ctx.run_id(), self.messages);
                self.wheel.tell(said, key);
            }
        }
    }

    fn spent(&mut self, balance: Balance) {
        self.ctx.state_mut(|s| s.spent = s.spent.max(balance.spent));
        self.input(RunInput::Spent(balance), &[]);
    }

    fn read_inbox(&mut self) {
        if self.reading {
            self.read_again = true;
            return;
        }
        self.reading = true;
        self.wheel.read_inbox();
    }

    fn command(&mut self, command: Command, consume: &[CommandId]) {
        let detached = self.with(Run::is_detached);
        if detached && command.brings_back() {
            self.input(RunInput::Takeover { commands: vec![command] }, consume);
            self.let_go = false;
            for (fork, child) in &self.children {
                if child.started {
                    self.wheel.push(signal(self.ctx, &self.start, *fork, ForkFlow::take_over, child.wish));
                }
            }
            return;
        }
        self.input(RunInput::Command(command), consume);
        if self.with(Run::is_detached) && !self.let_go {
            self.let_go = true;
            self.wheel.let_go();
            for (fork, _) in self.children.iter().filter(|(_, c)| c.started) {
                self.wheel.push(signal(self.ctx, &self.start, *fork, ForkFlow::let_go, ()));
            }
        }
    }

    fn input(&mut self, input: RunInput, consume: &[CommandId]) {
        let now = now(self.ctx);
        let step = self.ctx.state_mut(|s| s.run.handle(now, input));
        self.step(now, step, consume);
    }

    fn step(&mut self, now: Timestamp, step: RunStep, consume: &[CommandId]) {
        let stored = |e: &RunEvent| log::stored(now, e, None);
        let events = step.events.iter().map(stored).collect();
        let views = self.with(Run::views);
        self.wheel.note(events, views, consume);
        for effect in step.effects {
            match effect {
                Effect::Perform(dispatch) => self.wheel.perform(dispatch),
                Effect::Cancel { serial } => self.wheel.cancel(serial),
                Effect::SetTimer { timer, at } => self.wheel.set_timer(timer, at),
                Effect::ClearTimer { timer } => self.wheel.clear_timer(timer),
                Effect::Fork { fork, wish } => self.want_fork(fork, wish),
            }
        }
    }

    /// The fork is there, and knows what its run wants of it.
    fn want_fork(&mut self, fork: ForkNum, wish: Wish) {
        if let Some(child) = self.children.get_mut(&fork) {
            child.wish = wish;
            return self.tell(fork);
        }
        let Some(plan) = self.with(|r| r.fork_plan(fork)) else { return };
        self.children.insert(fork, Child { started: false, told: wish, wish });
        let spec = &self.start.spec;
        let start = ForkStart {
            // All of a run is of one release.
            logic: self.start.logic,
            wish,
            store: self.start.store.clone(),
            lease: self.opened.lease,
            pace: self.start.pace,
            searchable: self.start.searchable,
            counted: spec.budget.run.is_some() || spec.budget.fork.is_some(),
            plan,
        };
        let prompt = if self.start.sealed { "" } else { &start.plan.spec.prompt };
        let prompt = summary(prompt);
        let options = ChildWorkflowOptions::builder()
            .workflow_id(fork_workflow_id(&self.start.run, fork))
            // The run tells its forks when to stop.
            .cancellation_token(WorkflowCancellationToken::new())
            .cancel_type(ChildWorkflowCancellationType::WaitCancellationCompleted)
            .parent_close_policy(ParentClosePolicy::RequestCancel)
            .static_summary(format!("fork {fork} ({}): {prompt}", start.plan.spec.model));
        let options = match self.start.searchable {
            true => options.search_attributes(search::at_start(&self.start.run)).build(),
            false => options.build(),
        };
        let starting = self.ctx.start_child_workflow(ForkFlow::run, start, options);
        // Both are polled whenever anything happens, the second after the first.
        let started = Rc::new(Cell::new(None));
        let seen = started.clone();
        self.wheel.push(async move {
            let child = starting.await;
            started.set(Some(child.is_ok()));
            match child {
                Ok(child) => Arrived::ForkEnded(fork, child.result().await.map_err(|e| said(&e))),
                Err(e) => Arrived::ForkEnded(fork, Err(said(&e))),
            }
        });
        self.wheel.push(poll_fn(move |_| match seen.get() {
            Some(true) => Poll::Ready(Arrived::ForkStarted(fork)),
            Some(false) => Poll::Ready(Arrived::Sent),
            None => Poll::Pending,
        }));
    }

    /// Tells a fork what it does not know yet.
    fn tell(&mut self, fork: ForkNum) {
        let Some(child) = self.children.get_mut(&fork).filter(|c| c.started && c.told != c.wish) else {
            return;
        };
        child.told = child.wish;
        let wish = child.wish;
        self.wheel.push(signal(self.ctx, &self.start, fork, ForkFlow::wish, wish));
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
                    self.input(RunInput::Timer(timer), &[]);
                }
            }
            Arrived::Inbox(Waiting { commands, unreadable }) => {
                self.reading = false;
                self.wheel.note(vec![], vec![], &unreadable);
                for (id, command) in commands {
                    if self.heard.insert(id) && !self.with(Run::is_ended) {
                        self.command(command, &[id]);
                    }
                }
                if std::mem::take(&mut self.read_again) {
                    self.read_inbox();
                }
            }
            Arrived::ForkStarted(fork) => {
                if let Some(child) = self.children.get_mut(&fork) {
                    child.started = true;
                }
                self.tell(fork);
                if self.let_go {
                    self.wheel.push(signal(self.ctx, &self.start, fork, ForkFlow::let_go, ()));
                }
            }
            Arrived::ForkEnded(fork, ended) => {
                self.children.remove(&fork);
                match ended {
                    Ok(end) => {
                        // Before the run can end by it: the last request may be what passes a mark.
                        if let Some(balance) = end.balance {
                            self.spent(balance);
                        }
                        self.input(RunInput::ForkEnded(end.result), &[]);
                    }
                    Err(why) => self.input(RunInput::ForkEnded(broken(fork, why)), &[]),
                }
            }
            Arrived::Sent | Arrived::Recorded(_) | Arrived::Looked(_) => {}
        }
    }

    fn task_ended(&mut self, serial: u64, kind: TaskKind, ended: TaskEnd) {
        match ended.outcome(kind) {
            Outcome::Result(result, _) => self.input(RunInput::Outcome { serial, result }, &[]),
            Outcome::Lost { .. } | Outcome::Unheard => {
                self.wheel.let_go();
                self.input(RunInput::Takeover { commands: vec![] }, &[]);
            }
        }
    }

    /// For whoever looks at it in Temporal's own pages.
    fn show(&mut self) {
        let (status, p) = self.with(|r| (r.status(), r.progress()));
        self.ctx.set_current_details(format!(
            "{}: {} of {} forks ended ({} successful), {} at work, {} waiting",
            status.as_str(),
            p.completed + p.failed,
            p.total_forks,
            p.completed,
            p.in_progress,
            p.pending
        ));
        if self.start.searchable && self.shown != Some(status) {
            self.shown = Some(status);
            search::status(self.ctx, status);
        }
    }
}

/// To a child that has started. One that has ended since needs to know nothing.
fn signal<'a, S>(
    ctx: &'a WorkflowContext<RunFlow>,
    start: &RunStart,
    fork: ForkNum,
    signal: S,
    input: S::Input,
) -> impl Future<Output = Arrived> + 'a
where
    S: temporalio_common::SignalDefinition + 'static,
{
    let child = ctx.external_workflow(fork_workflow_id(&start.run, fork), None);
    let options =
        SignalWorkflowOptions::builder().cancellation_token(WorkflowCancellationToken::new()).build();
    async move {
        let _ = child.signal(signal, input, options).await;
        Arrived::Sent
    }
}
