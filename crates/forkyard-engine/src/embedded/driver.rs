//! One run, driven: inputs in, events appended, effects out, until it ends or is not ours any more.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use forkyard_core::ForkNum;
use forkyard_core::fork::{Fork, ForkInput, ForkResult, ForkStep};
use forkyard_core::run::{Command, Run, RunInput, RunStep};
use forkyard_core::spec::RunSpec;
use forkyard_core::task::{Effect, Wish};
use forkyard_core::{RunId, Timestamp, Usd};
use forkyard_store::{Append, CommandId, Lease, StoreError, StreamId};
use futures::future::BoxFuture;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::Inner;
use super::slots::Slot;
use super::tasks::{Ended, Tasks};
use super::timers::{Machine, Timers};
use crate::activity::Job;
use crate::{EngineError, log};

/// Why a driver let go of its run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DriveEnd {
    Ended,
    /// Its user detached: it stays until somebody resumes it.
    Detached,
    /// Another process drives it now.
    Lost,
    /// This process was asked to stop; another may take over at once.
    Stopped,
}

struct LiveFork {
    machine: Fork,
    seq: u64,
    spec: Arc<forkyard_core::spec::ForkSpec>,
    /// None: taken over from the driver before, and there is no room for it yet. Until then it is held as if it were paused.
    slot: Option<Slot>,
}

struct Driver<'a> {
    inner: &'a Inner,
    id: RunId,
    lease: Lease,
    spec: Arc<RunSpec>,
    run: Run,
    run_seq: u64,
    forks: BTreeMap<ForkNum, LiveFork>,
    /// What the run wants of forks, also of those that wait for room on this host.
    wishes: BTreeMap<ForkNum, Wish>,
    /// Forks that have ended without their run having heard of it.
    unheard: BTreeSet<ForkNum>,
    /// Forks of the driver before, until they are taken over: where their agents' last progress stands.
    inherited: BTreeMap<ForkNum, u64>,
    timers: Timers,
    tasks: Tasks,
    /// Forks in the queue for room.
    queued: JoinSet<(ForkNum, Slot)>,
    /// The driver before let go on purpose.
    let_go: bool,
    /// When the ledger is looked at next, if something changed and a limit has not been warned of.
    money_due: Option<Instant>,
    /// The run is detached: when it is let go, whatever is still under way.
    leave_at: Option<Instant>,
    /// All of the run is this tenure's.
    took_over: &'a AtomicBool,
}

/// How long the requests under way of a run that its user lets go may take: they are paid for, so their answers are kept.
const LEAVE_WITHIN: Duration = Duration::from_secs(60);
/// Spending is looked at this often at most: every settlement is a change, and a warning is for people.
const MONEY_EVERY: Duration = Duration::from_secs(1);

enum Stop {
    LeaseLost,
    Error(EngineError),
}

impl From<StoreError> for Stop {
    fn from(e: StoreError) -> Stop {
        match e {
            StoreError::LeaseLost => Stop::LeaseLost,
            e => Stop::Error(e.into()),
        }
    }
}
impl From<EngineError> for Stop {
    fn from(e: EngineError) -> Stop {
        match e {
            EngineError::Store(e) => e.into(),
            e => Stop::Error(e),
        }
    }
}

/// Which runs may be driven.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Scope {
    /// Those whose base is on this host, or nowhere yet.
    Host,
    /// Whichever it is: it only ends.
    Anywhere,
}

pub(super) async fn drive(
    inner: &Inner,
    run: &RunId,
    lease: Lease,
    stop: CancellationToken,
    scope: Scope,
) -> Result<DriveEnd, EngineError> {
    let token = lease.token;
    let took_over = AtomicBool::new(false);
    let driven = async {
        let Some((state, seq)) = log::load_run(&*inner.store, run).await? else {
            return Err(Stop::Error(EngineError::NoSuchRun(run.clone())));
        };
        if state.is_ended() {
            return Ok(DriveEnd::Ended);
        }
        let config = &inner.config;
        if let Some(base) = state.base().filter(|base| scope == Scope::Host && base.host != config.host) {
            let (run, host) = (run.clone(), base.host.clone());
            return Err(Stop::Error(EngineError::OtherHost { run, host }));
        }
        let mut driver = Driver {
            inner,
            id: run.clone(),
            lease,
            spec: Arc::new(state.spec().clone()),
            run: state,
            run_seq: seq,
            forks: BTreeMap::new(),
            wishes: BTreeMap::new(),
            unheard: BTreeSet::new(),
            inherited: BTreeMap::new(),
            timers: Timers::default(),
            tasks: Tasks::new(inner.activities.clone(), config.lost_after, config.cancel_grace),
            queued: JoinSet::new(),
            let_go: false,
            money_due: None,
            leave_at: None,
            took_over: &took_over,
        };
        let end = driver.go(stop).await?;
        driver.tasks.stop_all().await;
        Ok(end)
    };
    let ended = tokio::select! {
        biased;
        end = driven => end,
        () = renew(inner, run, token, &took_over) => Err(Stop::LeaseLost),
    };
    match ended {
        Ok(end) => {
            if let (DriveEnd::Detached | DriveEnd::Stopped, driven @ Some(_)) =
                (end, driven_until(inner, &took_over))
            {
                let _ = inner.store.renew(run, token, inner.config.lease_ttl, driven).await;
            }
            // If this fails the lease runs out by itself.
            let _ = inner.store.release(run, token).await;
            Ok(end)
        }
        Err(Stop::LeaseLost) => Ok(DriveEnd::Lost),
        Err(Stop::Error(e)) => {
            let _ = inner.store.release(run, token).await;
            Err(e)
        }
    }
}

/// Until when this tenure has driven, by the clock of the events that it recorded. Nothing before all of the run is taken over:
/// what is not goes on from where the tenure before left it, by that one's clock.
fn driven_until(inner: &Inner, took_over: &AtomicBool) -> Option<Timestamp> {
    took_over.load(Ordering::Relaxed).then(|| inner.clock.now())
}

/// Returns when the lease is lost. A store that is away does not mean that: appends are fenced anyway.
async fn renew(inner: &Inner, run: &RunId, token: u64, took_over: &AtomicBool) {
    loop {
        tokio::time::sleep(inner.config.renew_every).await;
        let driven = driven_until(inner, took_over);
        match inner.store.renew(run, token, inner.config.lease_ttl, driven).await {
            Ok(()) => {}
            Err(StoreError::LeaseLost) => return,
            Err(e) => tracing::warn!(%run, "could not renew the lease: {e}"),
        }
    }
}

impl Driver<'_> {
    async fn go(&mut self, stop: CancellationToken) -> Result<DriveEnd, Stop> {
        // From before the first look at the inbox, so that nothing falls between.
        let mut watch = self.inner.store.watch(Some(&self.id));
        let commands = self.inbox().await?;
        if self.run.is_detached() && !commands.iter().any(|(_, c)| c.brings_back()) {
            // It is told, and goes on being left alone.
            for (id, command) in commands {
                self.run_input(RunInput::Command(command), vec![id]).await?;
            }
            return Ok(DriveEnd::Detached);
        }
        self.take_over(commands).await?;
        self.took_over.store(true, Ordering::Relaxed);
        // Before anything begins by this clock: what was said before is by another.
        let (ttl, token) = (self.inner.config.lease_ttl, self.lease.token);
        let driven = Some(self.inner.clock.now());
        self.patiently(|| self.inner.store.renew(&self.id, token, ttl, driven)).await?;
        self.read_inbox().await?;
        self.mind_money().await?;
        loop {
            if self.run.is_ended() {
                return Ok(DriveEnd::Ended);
            }
            if self.may_leave().await? {
                return Ok(DriveEnd::Detached);
            }
            let leave_at = self.leave_at;
            let leave = async {
                match leave_at {
                    Some(at) => tokio::time::sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            let next_timer = self.timers.next().map(|at| self.inner.clock.instant(at));
            let timer = async {
                match next_timer {
                    Some(at) => tokio::time::sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            let money_due = self.money_due;
            let money = async {
                match money_due {
                    Some(at) => tokio::time::sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                biased;
                () = stop.cancelled() => return Ok(DriveEnd::Stopped),
                (machine, serial, ended) = self.tasks.next() => self.task_ended(machine, serial, ended).await?,
                Some(Ok((fork, slot))) = self.queued.join_next(), if leave_at.is_none() => {
                    self.start_fork(fork, slot).await?;
                }
                () = leave => {}
                () = timer => self.fire_timers().await?,
                () = money => self.mind_money().await?,
                () = watch.changed() => {
                    if self.run.minds_spending() {
                        self.money_due.get_or_insert_with(|| Instant::now() + MONEY_EVERY);
                    }
                    self.read_inbox().await?;
                }
            }
        }
    }

    /// Whether the run is detached and nothing is under way that was paid for. Nothing new is sent meanwhile: the ledger refuses.
    async fn may_leave(&mut self) -> Result<bool, Stop> {
        if !self.run.is_detached() {
            self.leave_at = None;
            return Ok(false);
        }
        let at = *self.leave_at.get_or_insert_with(|| Instant::now() + LEAVE_WITHIN);
        let balance = self.patiently(|| self.inner.store.balance(&self.id)).await?;
        Ok(balance.reserved == Usd(0) || Instant::now() >= at)
    }

    /// A store that is away is waited for: the lease decides how long.
    async fn patiently<'f, T>(
        &self,
        ask: impl Fn() -> BoxFuture<'f, Result<T, StoreError>> + Send,
    ) -> Result<T, Stop> {
        loop {
            match ask().await {
                Err(e) if e.is_retryable() => {
                    tracing::warn!(run = %self.id, "the store does not answer, trying again: {e}");
                    tokio::time::sleep(self.inner.config.store_retry).await;
                }
                answer => return Ok(answer?),
            }
        }
    }

    async fn progress(&self, fork: ForkNum) -> Result<u64, Stop> {
        self.patiently(|| Box::pin(log::progress(&*self.inner.store, &self.id, fork))).await
    }

    async fn load_fork(&self, fork: ForkNum) -> Result<Option<(Fork, u64)>, Stop> {
        loop {
            match log::load_fork(&*self.inner.store, &self.id, fork).await {
                Err(e) if e.is_retryable() => tokio::time::sleep(self.inner.config.store_retry).await,
                answer => return Ok(answer?),
            }
        }
    }

    /// The run first, with the commands that waited: what its forks then begin is what it wants by now.
    async fn take_over(&mut self, commands: Vec<(CommandId, Command)>) -> Result<(), Stop> {
        self.let_go = self.run.is_detached();
        let mut ended: Vec<ForkResult> = vec![];
        for fork in self.run.live_forks().collect::<Vec<_>>() {
            if let Some((machine, seq)) = self.load_fork(fork).await? {
                if machine.is_ended() {
                    // It ended, but its run had not heard.
                    ended.push(machine.result());
                    self.unheard.insert(fork);
                    continue;
                }
                let spec = Arc::new(machine.plan().spec.clone());
                self.forks.insert(fork, LiveFork { machine, seq, spec, slot: None });
                self.inherited.insert(fork, self.progress(fork).await?);
            }
        }
        let (ids, commands) = commands.into_iter().unzip();
        self.run_input(RunInput::Takeover { commands }, ids).await?;
        for result in ended {
            self.unheard.remove(&result.fork);
            self.run_input(RunInput::ForkEnded(result), vec![]).await?;
        }
        Ok(())
    }

    async fn inbox(&mut self) -> Result<Vec<(CommandId, Command)>, Stop> {
        let mut commands = vec![];
        for stored in self.patiently(|| self.inner.store.pending_commands(&self.id)).await? {
            match serde_json::from_value::<Command>(stored.data.clone()) {
                Ok(command) => commands.push((stored.id, command)),
                Err(e) => {
                    // Written by something newer: drop it, or it would be read again for ever.
                    tracing::warn!(run = %self.id, "a command can't be read: {e}");
                    self.append_run(self.inner.clock.now(), RunStep::default(), vec![stored.id]).await?;
                }
            }
        }
        Ok(commands)
    }

    async fn read_inbox(&mut self) -> Result<(), Stop> {
        for (id, command) in self.inbox().await? {
            self.run_input(RunInput::Command(command), vec![id]).await?;
            if self.run.is_ended() || self.run.is_detached() {
                return Ok(());
            }
        }
        let lingering: Vec<ForkNum> =
            self.forks.iter().filter(|(_, f)| f.machine.is_lingering()).map(|(n, _)| *n).collect();
        for fork in lingering {
            self.look_for_messages(fork).await?;
        }
        Ok(())
    }

    /// Tells the run what was spent, as long as there is a limit that it has not warned of.
    async fn mind_money(&mut self) -> Result<(), Stop> {
        self.money_due = None;
        if self.run.minds_spending() {
            let balance = self.patiently(|| self.inner.store.balance(&self.id)).await?;
            self.run_input(RunInput::Spent(balance), vec![]).await?;
        }
        Ok(())
    }

    async fn look_for_messages(&mut self, fork: ForkNum) -> Result<(), Stop> {
        let lingers = self.forks.get(&fork).is_some_and(|f| f.machine.is_lingering());
        if lingers {
            let read = || self.inner.store.pending_messages(&self.id, fork);
            if !self.patiently(read).await?.is_empty() {
                self.fork_input(fork, ForkInput::Message).await?;
            }
        }
        Ok(())
    }

    async fn fire_timers(&mut self) -> Result<(), Stop> {
        while let Some((machine, timer)) = self.timers.pop_due(self.inner.clock.now()) {
            match machine {
                Machine::Run => self.run_input(RunInput::Timer(timer), vec![]).await?,
                Machine::Fork(fork) => self.fork_input(fork, ForkInput::Timer(timer)).await?,
            }
        }
        Ok(())
    }

    async fn task_ended(&mut self, machine: Machine, serial: u64, ended: Ended) -> Result<(), Stop> {
        match (machine, ended) {
            (Machine::Run, Ended::Outcome(result)) => {
                self.run_input(RunInput::Outcome { serial, result }, vec![]).await
            }
            (Machine::Fork(fork), Ended::Outcome(result)) => {
                // Before the run can end by it: the last request may be what passes the mark.
                self.mind_money().await?;
                self.fork_input(fork, ForkInput::Outcome { serial, result }).await?;
                self.look_for_messages(fork).await
            }
            (Machine::Fork(fork), Ended::Silent) => {
                tracing::warn!(run = %self.id, fork, "the agent shows no sign of life: starting its next attempt");
                let journal_len = self.progress(fork).await?;
                let last_driven = Some(self.inner.clock.now());
                let taken = ForkInput::Takeover { wish: None, journal_len, last_driven, let_go: false };
                self.fork_input(fork, taken).await
            }
            // Only agents are listened to.
            (Machine::Run, Ended::Silent) => Ok(()),
        }
    }

    // ---- machines

    async fn run_input(&mut self, input: RunInput, consume: Vec<CommandId>) -> Result<(), Stop> {
        let now = self.inner.clock.now();
        let step = self.run.handle(now, input);
        self.append_run(now, step, consume).await
    }

    /// `now` is the time that the machine was given: replay has to see the same.
    async fn append_run(
        &mut self,
        now: Timestamp,
        step: RunStep,
        consume: Vec<CommandId>,
    ) -> Result<(), Stop> {
        if !step.events.is_empty() || !consume.is_empty() {
            let events: Vec<_> = step.events.iter().map(|e| log::stored(now, e, None)).collect();
            self.run_seq = self
                .append(StreamId::Run(self.id.clone()), self.run_seq, events, self.run.views(), consume)
                .await?;
        }
        for effect in step.effects {
            match effect {
                Effect::Fork { fork, wish } => Box::pin(self.want_fork(fork, wish)).await?,
                effect @ (Effect::Perform(_)
                | Effect::Cancel { .. }
                | Effect::SetTimer { .. }
                | Effect::ClearTimer { .. }) => self.perform(Machine::Run, effect),
            }
        }
        Ok(())
    }

    async fn fork_input(&mut self, fork: ForkNum, input: ForkInput) -> Result<(), Stop> {
        let Some(f) = self.forks.get_mut(&fork) else { return Ok(()) };
        let now = self.inner.clock.now();
        let step = f.machine.handle(now, input);
        self.append_fork(now, fork, step).await
    }

    async fn append_fork(&mut self, now: Timestamp, fork: ForkNum, step: ForkStep) -> Result<(), Stop> {
        let Some(f) = self.forks.get(&fork) else { return Ok(()) };
        if !step.events.is_empty() {
            let view = f.machine.view();
            let events: Vec<_> =
                step.events.iter().map(|e| log::stored(now, e, view.sandbox.as_ref())).collect();
            let (seq, views) = (f.seq, f.machine.views());
            let seq = self.append(StreamId::Fork(self.id.clone(), fork), seq, events, views, vec![]).await?;
            if let Some(f) = self.forks.get_mut(&fork) {
                f.seq = seq;
            }
        }
        for effect in step.effects {
            self.perform(Machine::Fork(fork), effect);
        }
        let ended = self.forks.get(&fork).filter(|f| f.machine.is_ended()).map(|f| f.machine.result());
        if let Some(result) = ended {
            self.forks.remove(&fork);
            self.wishes.remove(&fork);
            Box::pin(self.run_input(RunInput::ForkEnded(result), vec![])).await?;
        }
        Ok(())
    }

    /// Recorded before anything is done about it. A store that is full or away is waited for: the lease decides how long.
    async fn append(
        &self,
        stream: StreamId,
        expected: u64,
        events: Vec<forkyard_store::NewEvent>,
        views: Vec<forkyard_core::view::View>,
        consume: Vec<CommandId>,
    ) -> Result<u64, Stop> {
        let count = events.len() as u64;
        let append = Append { stream, lease: self.lease.token, expected, events, views, consume };
        let mut in_doubt = false;
        loop {
            match self.inner.store.append(append.clone()).await {
                Ok(done) => return Ok(done.seq),
                // Nobody else can have written: the try before this one got through.
                Err(StoreError::Conflict { actual, .. }) if in_doubt && actual == expected + count => {
                    return Ok(actual);
                }
                Err(e) if e.is_retryable() => {
                    tracing::warn!(run = %self.id, "could not append, trying again: {e}");
                    in_doubt = true;
                    tokio::time::sleep(self.inner.config.store_retry).await;
                }
                Err(e) => return Err(e.into()),
            }
        }
    }

    // ---- effects

    fn perform(&mut self, machine: Machine, effect: Effect) {
        match effect {
            Effect::Perform(dispatch) => {
                let fork = match machine {
                    Machine::Run => None,
                    Machine::Fork(n) => self.forks.get(&n).map(|f| (n, f.spec.clone())),
                };
                let (run, spec) = (self.id.clone(), self.spec.clone());
                let (attempt, task) = (dispatch.attempt, dispatch.task.clone());
                self.tasks.start(machine, &dispatch, |cancel, heartbeat| Job {
                    run,
                    spec,
                    fork,
                    attempt,
                    task,
                    cancel,
                    heartbeat,
                });
            }
            Effect::Cancel { serial } => self.tasks.cancel(machine, serial),
            Effect::SetTimer { timer, at } => self.timers.set(machine, timer, at),
            Effect::ClearTimer { timer } => self.timers.clear(machine, timer),
            // A run's effect; see append_run.
            Effect::Fork { .. } => {}
        }
    }

    /// The fork is there and knows what its run wants of it, or it waits for room.
    async fn want_fork(&mut self, fork: ForkNum, wish: Wish) -> Result<(), Stop> {
        if self.unheard.contains(&fork) {
            return Ok(());
        }
        let known = self.wishes.insert(fork, wish).is_some();
        if let Some(journal_len) = self.inherited.remove(&fork) {
            let slot = self.inner.slots.try_take(&self.id, fork);
            if slot.is_none() {
                self.queue(fork);
            }
            if let Some(f) = self.forks.get_mut(&fork) {
                f.slot = slot;
            }
            let (wish, last_driven, let_go) = (self.held(fork, wish), self.lease.last_driven, self.let_go);
            let taken = ForkInput::Takeover { wish: Some(wish), journal_len, last_driven, let_go };
            return self.fork_input(fork, taken).await;
        }
        if self.forks.contains_key(&fork) {
            self.fork_input(fork, ForkInput::Wish(self.held(fork, wish))).await?;
            // It may have been kept from them by a pause.
            return self.look_for_messages(fork).await;
        }
        if wish.cancelled {
            // It needs no room to end.
            return self.start_fork(fork, self.inner.slots.take(&self.id, fork)).await;
        }
        if !known {
            self.queue(fork);
        }
        Ok(())
    }

    fn queue(&mut self, fork: ForkNum) {
        let (slots, run) = (self.inner.slots.clone(), self.id.clone());
        self.queued.spawn(async move { (fork, slots.acquire(&run, fork).await) });
    }

    /// What is wanted of a fork as long as there may be no room for it.
    fn held(&self, fork: ForkNum, wish: Wish) -> Wish {
        let has_room = self.forks.get(&fork).is_none_or(|f| f.slot.is_some());
        Wish { paused: wish.paused || !has_room, ..wish }
    }

    /// There is room for it.
    async fn start_fork(&mut self, fork: ForkNum, slot: Slot) -> Result<(), Stop> {
        let Some(wish) = self.wishes.get(&fork).copied() else { return Ok(()) };
        if let Some(f) = self.forks.get_mut(&fork) {
            if f.slot.is_none() {
                f.slot = Some(slot);
                self.fork_input(fork, ForkInput::Wish(wish)).await?;
                return self.look_for_messages(fork).await;
            }
            return Ok(());
        }
        let Some(plan) = self.run.fork_plan(fork) else { return Ok(()) };
        let spec = Arc::new(plan.spec.clone());
        let now = self.inner.clock.now();
        let (machine, step) = Fork::start(now, plan, wish);
        self.forks.insert(fork, LiveFork { machine, seq: 0, spec, slot: Some(slot) });
        self.append_fork(now, fork, step).await
    }
}
