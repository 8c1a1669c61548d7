//! The activities: the engine's own, performed for a workflow. Before anything is done, what led to it is in the store; while it
//! is done, the store is watched for the wish that it stops.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use forkyard_core::event;
use forkyard_core::run::{Command, RunEvent};
use forkyard_core::spec::{ForkSpec, RunSpec};
use forkyard_core::task::{ErrorClass, Task, TaskKind};
use forkyard_core::{ForkNum, HostId, Millis, RunId};
use forkyard_engine::activity::{Activities, Heartbeat, Job};
use forkyard_engine::embedded::{Ended, HostSlots, Slot, perform_watched};
use forkyard_engine::log;
use forkyard_engine::ports::StoredText;
use forkyard_engine::sweep::{self, Yard};
use forkyard_store::{Append, NewMessage, ProcessKind, Store, StoreError, StreamId};
use temporalio_macros::activities;
use temporalio_sdk::ApplicationFailure;
use temporalio_sdk::activities::{ActivityContext, ActivityError};
use tokio_util::sync::CancellationToken;

use crate::cleanup::Swept;
use crate::wire::{
    Ask, Beat, Look, MAX_SPEC_BYTES, Open, Opened, Perform, Performed, Record, Tell, Waiting, in_brief,
};

/// This worker can't or may not do it; another one can, or this one later.
pub const REFUSED: &str = "Refused";
/// The worker was stopped on purpose.
pub const LET_GO: &str = "LetGo";
/// The agent shows no sign of life, though its worker does.
pub const SILENT: &str = "Silent";

/// The lease of a run is its workflow's for as long as that lives; a new workflow for the same run has a larger token.
const LEASE: Duration = Duration::from_secs(10 * 365 * 24 * 3600);
/// A store that is away is waited for at least this long before the task is handed back.
const STORE_PATIENCE: Duration = Duration::from_secs(20);
const STORE_RETRY: Duration = Duration::from_millis(500);
/// A busy run changes at every step of every fork: it is looked at this often at most.
const STOP_EVERY: Duration = Duration::from_millis(50);
/// How often the room of ended forks is looked for while others wait for it.
const FREE_EVERY: Duration = Duration::from_secs(1);
/// Forks whose specs are kept at hand.
const MAX_SPECS: usize = 1024;

pub struct HandConfig {
    pub host: HostId,
    /// How often a task's worker says that it is there.
    pub beat: Duration,
    /// Room for forks on this host, over all runs.
    pub slots: HostSlots,
    /// None: nobody counts.
    pub counted: Option<Counted>,
    /// What is on this host, whatever any log says.
    pub yard: Arc<dyn Yard>,
}

/// Runs whose workflow was opened by this process, each with the position after which its events are counted here. One of all
/// workers opens a run, so that what they count adds up.
#[derive(Clone, Default)]
pub struct Counted(Arc<Mutex<BTreeMap<RunId, u64>>>);

impl Counted {
    pub fn all(&self) -> BTreeMap<RunId, u64> {
        lock(&self.0).clone()
    }
    /// It has ended, and everything is counted.
    pub fn forget(&self, run: &RunId) {
        lock(&self.0).remove(run);
    }
}

type Specs = (Arc<RunSpec>, Option<Arc<ForkSpec>>);

/// Performs tasks on this host.
#[derive(Clone)]
pub struct Hand(Arc<Shared>);

impl std::ops::Deref for Hand {
    type Target = Shared;
    fn deref(&self) -> &Shared {
        &self.0
    }
}

pub struct Shared {
    store: Arc<dyn Store>,
    /// The store's name.
    identity: String,
    activities: Arc<dyn Activities>,
    config: HandConfig,
    /// Forks that have room here.
    taken: Mutex<BTreeMap<(RunId, ForkNum), Slot>>,
    specs: Mutex<BTreeMap<(RunId, Option<ForkNum>), Specs>>,
    /// This worker is being stopped.
    stop: CancellationToken,
}

fn failed(kind: &str, why: impl std::fmt::Display) -> ActivityError {
    ActivityError::application(
        ApplicationFailure::builder(why.to_string()).type_name(kind.to_owned()).build(),
    )
}

fn lock<T>(m: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    m.lock().unwrap_or_else(PoisonError::into_inner)
}

#[activities]
impl Hand {
    #[activity(name = "open")]
    pub async fn open(self: Arc<Self>, _ctx: ActivityContext, open: Open) -> Result<Opened, ActivityError> {
        self.admit(&open.store, &open.run)?;
        let refused = |e: StoreError| failed(REFUSED, e);
        let held = self.store.acquire(&open.run, &open.owner, LEASE).await.map_err(refused)?;
        let lease = match held {
            Some(lease) => lease.token,
            None => return Err(failed(REFUSED, format!("another process drives run {}", open.run))),
        };
        if let Some(counted) = &self.config.counted {
            let position = self.store.last_position(&open.run).await.map_err(refused)?;
            lock(&counted.0).insert(open.run.clone(), position);
        }
        let stream = StreamId::Run(open.run.clone());
        let mut seq = 0;
        loop {
            let page = self.store.read_stream(&stream, seq, 0).await.map_err(refused)?;
            if page.is_empty() {
                return Ok(Opened { lease, seq });
            }
            seq += page.len() as u64;
        }
    }

    #[activity(name = "record")]
    pub async fn record(self: Arc<Self>, _ctx: ActivityContext, record: Record) -> Result<(), ActivityError> {
        self.admit(&record.store, &record.run)?;
        write(&*self.store, &record).await.map_err(|e| failed(REFUSED, e))
    }

    #[activity(name = "inbox")]
    pub async fn inbox(self: Arc<Self>, _ctx: ActivityContext, ask: Ask) -> Result<Waiting, ActivityError> {
        self.admit(&ask.store, &ask.run)?;
        let stored = self.store.pending_commands(&ask.run).await.map_err(|e| failed(REFUSED, e))?;
        let mut waiting = Waiting { commands: vec![], unreadable: vec![] };
        let mut room = MAX_SPEC_BYTES;
        for command in stored {
            let bytes = command.data.to_string().len();
            if bytes > MAX_SPEC_BYTES {
                tracing::warn!(run = %ask.run, "a command of {bytes} bytes is more than Temporal takes");
                waiting.unreadable.push(command.id);
                continue;
            }
            // The rest is read when these are heard.
            let Some(left) = room.checked_sub(bytes) else { break };
            room = left;
            match serde_json::from_value::<Command>(command.data) {
                Ok(c) => waiting.commands.push((command.id, c)),
                Err(e) => {
                    tracing::warn!(run = %ask.run, "a command can't be read: {e}");
                    waiting.unreadable.push(command.id);
                }
            }
        }
        Ok(waiting)
    }

    #[activity(name = "look")]
    pub async fn look(self: Arc<Self>, _ctx: ActivityContext, ask: Ask) -> Result<Look, ActivityError> {
        self.admit(&ask.store, &ask.run)?;
        let refused = |e: StoreError| failed(REFUSED, e);
        let progress = log::progress(&*self.store, &ask.run, ask.fork).await.map_err(refused)?;
        let messages = self.store.pending_messages(&ask.run, ask.fork).await.map_err(refused)?;
        Ok(Look { progress, messages: !messages.is_empty() })
    }

    #[activity(name = "tell")]
    pub async fn tell(self: Arc<Self>, _ctx: ActivityContext, tell: Tell) -> Result<(), ActivityError> {
        let Tell { ask, said, key, at } = tell;
        self.admit(&ask.store, &ask.run)?;
        let data = serde_json::to_value(StoredText::user(said.content)).map_err(|e| failed(REFUSED, e))?;
        let message = NewMessage { key: Some(key), data, at };
        match self.store.put_message(&ask.run, ask.fork, message).await {
            Ok(_) => Ok(()),
            Err(e) if e.is_retryable() => Err(failed(REFUSED, e)),
            Err(e) => {
                tracing::warn!(run = %ask.run, fork = ask.fork, "a message could not be delivered: {e}");
                Ok(())
            }
        }
    }

    /// Hosts that have a worker now.
    #[activity(name = "hosts")]
    pub async fn hosts(self: Arc<Self>, _ctx: ActivityContext) -> Result<Vec<HostId>, ActivityError> {
        let processes = self.store.processes().await.map_err(|e| failed(REFUSED, e))?;
        let hosts: std::collections::BTreeSet<HostId> =
            processes.into_iter().filter(|p| p.kind == ProcessKind::Temporal).map(|p| p.host).collect();
        Ok(hosts.into_iter().collect())
    }

    #[activity(name = "sweep")]
    pub async fn sweep(
        self: Arc<Self>,
        _ctx: ActivityContext,
        max_age: Millis,
    ) -> Result<Swept, ActivityError> {
        self.look_for_orphans(max_age).await.map_err(|e| failed(REFUSED, e))
    }

    #[activity(name = "prepare_base")]
    pub async fn prepare_base(
        self: Arc<Self>,
        ctx: ActivityContext,
        p: Perform,
    ) -> Result<Performed, ActivityError> {
        self.perform(ctx, p).await
    }
    #[activity(name = "verify_base")]
    pub async fn verify_base(
        self: Arc<Self>,
        ctx: ActivityContext,
        p: Perform,
    ) -> Result<Performed, ActivityError> {
        self.perform(ctx, p).await
    }
    #[activity(name = "check_budget")]
    pub async fn check_budget(
        self: Arc<Self>,
        ctx: ActivityContext,
        p: Perform,
    ) -> Result<Performed, ActivityError> {
        self.perform(ctx, p).await
    }
    #[activity(name = "create_sandbox")]
    pub async fn create_sandbox(
        self: Arc<Self>,
        ctx: ActivityContext,
        p: Perform,
    ) -> Result<Performed, ActivityError> {
        self.perform(ctx, p).await
    }
    #[activity(name = "health_check")]
    pub async fn health_check(
        self: Arc<Self>,
        ctx: ActivityContext,
        p: Perform,
    ) -> Result<Performed, ActivityError> {
        self.perform(ctx, p).await
    }
    #[activity(name = "run_agent")]
    pub async fn run_agent(
        self: Arc<Self>,
        ctx: ActivityContext,
        p: Perform,
    ) -> Result<Performed, ActivityError> {
        self.perform(ctx, p).await
    }
    #[activity(name = "collect")]
    pub async fn collect(
        self: Arc<Self>,
        ctx: ActivityContext,
        p: Perform,
    ) -> Result<Performed, ActivityError> {
        self.perform(ctx, p).await
    }
    #[activity(name = "verify")]
    pub async fn verify(
        self: Arc<Self>,
        ctx: ActivityContext,
        p: Perform,
    ) -> Result<Performed, ActivityError> {
        self.perform(ctx, p).await
    }
    #[activity(name = "publish")]
    pub async fn publish(
        self: Arc<Self>,
        ctx: ActivityContext,
        p: Perform,
    ) -> Result<Performed, ActivityError> {
        self.perform(ctx, p).await
    }
    #[activity(name = "cleanup_sandbox")]
    pub async fn cleanup_sandbox(
        self: Arc<Self>,
        ctx: ActivityContext,
        p: Perform,
    ) -> Result<Performed, ActivityError> {
        self.perform(ctx, p).await
    }
}

impl Hand {
    pub async fn new(
        store: Arc<dyn Store>,
        activities: Arc<dyn Activities>,
        config: HandConfig,
        stop: CancellationToken,
    ) -> Result<Hand, StoreError> {
        let identity = store.identity().await?;
        Ok(Hand(Arc::new(Shared {
            store,
            identity,
            activities,
            config,
            taken: Mutex::default(),
            specs: Mutex::default(),
            stop,
        })))
    }

    /// Room of forks that have ended elsewhere, and could not be told to leave here.
    async fn free_room(&self) -> Result<(), StoreError> {
        let taken: Vec<(RunId, ForkNum)> = lock(&self.taken).keys().cloned().collect();
        for (run, fork) in taken {
            if self.store.fork(&run, fork).await?.is_none_or(|f| f.outcome.is_some()) {
                lock(&self.taken).remove(&(run, fork));
            }
        }
        Ok(())
    }

    /// Removes what this host owes, and what nobody knows any more.
    pub async fn look_for_orphans(&self, max_age: Millis) -> Result<Swept, StoreError> {
        self.free_room().await?;
        let now = forkyard_engine::clock::Clock::system().now();
        let config = &self.config;
        let (cleaned, error) = sweep::sweep(&*self.store, &*config.yard, &config.host, now, max_age).await?;
        Ok(Swept { cleaned, error })
    }

    /// A run is known to one store alone.
    fn admit(&self, store: &str, run: &RunId) -> Result<(), ActivityError> {
        if store == self.identity {
            return Ok(());
        }
        let why = format!(
            "run {run} is recorded in another store than that of host {}: give all workers of a task queue the same \
             PostgreSQL (store.url)",
            self.config.host
        );
        tracing::error!("{why}");
        Err(failed(REFUSED, why))
    }

    async fn perform(self: Arc<Self>, ctx: ActivityContext, p: Perform) -> Result<Performed, ActivityError> {
        self.admit(&p.record.store, &p.record.run)?;
        let (cancel, let_go) = (CancellationToken::new(), CancellationToken::new());
        let work = self.clone().work(p.clone(), cancel.clone(), let_go.clone());
        let mut work = std::pin::pin!(work);
        let stopped = stopped(&*self.store, &p);
        let mut stopped = std::pin::pin!(stopped);
        let beating = self.beat(&ctx, &p);
        let mut beating = std::pin::pin!(beating);
        loop {
            tokio::select! {
                biased;
                done = &mut work => return done,
                () = ctx.cancelled(), if !cancel.is_cancelled() => cancel.cancel(),
                why = &mut stopped, if !cancel.is_cancelled() => {
                    if why == Why::LetGo {
                        let_go.cancel();
                    }
                    cancel.cancel();
                }
                () = self.stop.cancelled(), if !cancel.is_cancelled() => {
                    let_go.cancel();
                    cancel.cancel();
                }
                broken = &mut beating => return Err(broken),
            }
        }
    }

    /// Says at once and then again and again that somebody is at it. A store that is away, or hangs, does not stop the heart.
    async fn beat(&self, ctx: &ActivityContext, p: &Perform) -> ActivityError {
        let mut beats = tokio::time::interval(self.config.beat);
        let mut progress = 0;
        loop {
            beats.tick().await;
            let beat = Beat { host: self.config.host.clone(), attempt: p.attempt, progress };
            if let Err(e) = ctx.record_heartbeat(beat).await {
                return e.into();
            }
            // Only an agent makes progress that counts.
            if let (Some(fork), TaskKind::RunAgent) = (p.record.fork, p.task.kind()) {
                let look = log::progress(&*self.store, &p.record.run, fork);
                if let Ok(Ok(position)) = tokio::time::timeout(self.config.beat / 2, look).await {
                    progress = position;
                }
            }
        }
    }

    /// `let_go`: it is stopped, but not for good; whoever drives it goes on later.
    async fn work(
        self: Arc<Self>,
        p: Perform,
        cancel: CancellationToken,
        let_go: CancellationToken,
    ) -> Result<Performed, ActivityError> {
        let (run, fork, kind) = (p.record.run.clone(), p.record.fork, p.task.kind());
        self.write_patiently(&p.record).await?;
        self.not_succeeded(&p).await?;
        let (spec, fork_spec) = self.specs(&run, fork).await?;
        let room = async {
            if let (Some(fork), true) = (fork, needs_room(kind)) {
                self.make_room(&run, fork, kind).await;
            }
        };
        tokio::select! {
            biased;
            () = cancel.cancelled() => {}
            () = room => {}
        }
        let heartbeat = Heartbeat::new();
        let job = Job {
            run: run.clone(),
            spec,
            fork: fork.zip(fork_spec),
            attempt: p.attempt,
            task: p.task.clone(),
            cancel: cancel.clone(),
            heartbeat,
        };
        let pace = p.pace;
        // Where another host prepared the base, this one has to do so first.
        let limit = match &p.task {
            Task::CreateSandbox { base, .. } if base.host != self.config.host => {
                p.limit.max(TaskKind::PrepareBase.retry().limit)
            }
            _ => p.limit,
        };
        let (limit, lost_after, grace) =
            (limit.as_duration(), pace.lost_after.as_duration(), pace.grace.as_duration());
        let ended = perform_watched(self.activities.clone(), job, limit, lost_after, grace).await;
        let result = match ended {
            Ended::Silent => return Err(failed(SILENT, "the agent shows no sign of life")),
            Ended::Outcome(result) => result,
        };
        if let_go.is_cancelled() && result.as_ref().is_err_and(|e| e.class == ErrorClass::Cancelled) {
            return Err(failed(LET_GO, format!("host {} let go of it", self.config.host)));
        }
        if let (Some(fork), TaskKind::Destroy, Ok(_)) = (fork, kind, &result) {
            lock(&self.taken).remove(&(run.clone(), fork));
        }
        let balance = match (p.counted, kind) {
            (true, TaskKind::RunAgent) => self.store.balance(&run).await.ok(),
            _ => None,
        };
        Ok(Performed { host: self.config.host.clone(), result: in_brief(result), balance })
    }

    /// Room for the fork on this host. One that lives already does not wait.
    async fn make_room(&self, run: &RunId, fork: ForkNum, kind: TaskKind) {
        let key = (run.clone(), fork);
        if lock(&self.taken).contains_key(&key) {
            return;
        }
        let slot = match kind {
            TaskKind::CreateSandbox => self.wait_for_room(run, fork).await,
            _ => self.config.slots.take(run, fork),
        };
        lock(&self.taken).insert(key, slot);
    }

    /// While somebody waits, the room of forks that have ended elsewhere is looked for.
    async fn wait_for_room(&self, run: &RunId, fork: ForkNum) -> Slot {
        let mut room = std::pin::pin!(self.config.slots.acquire(run, fork));
        loop {
            tokio::select! {
                biased;
                slot = &mut room => return slot,
                () = tokio::time::sleep(FREE_EVERY) => {}
            }
            if let Err(e) = self.free_room().await {
                tracing::warn!("room of forks that have ended could not be looked for: {e}");
            }
        }
    }

    async fn write_patiently(&self, record: &Record) -> Result<(), ActivityError> {
        let begun = tokio::time::Instant::now();
        loop {
            match write(&*self.store, record).await {
                Ok(()) => return Ok(()),
                Err(e) if e.is_retryable() && begun.elapsed() < STORE_PATIENCE => {
                    tracing::warn!(run = %record.run, "could not record, trying again: {e}");
                    tokio::time::sleep(STORE_RETRY).await;
                }
                Err(e) => return Err(failed(REFUSED, e)),
            }
        }
    }

    /// What was on its way to a host that was cut off may arrive long after its fork went on elsewhere: it is not begun.
    async fn not_succeeded(&self, p: &Perform) -> Result<(), ActivityError> {
        let Some(fork) = p.record.fork else { return Ok(()) };
        match self.store.attempt(&p.record.run, fork).await.map_err(|e| failed(REFUSED, e))? {
            Some(current) if current > p.attempt => {
                let (run, mine) = (&p.record.run, p.attempt);
                tracing::info!(%run, fork, "a task of attempt {mine} came late, {current} has the fork");
                Err(failed(LET_GO, StoreError::StaleAttempt { mine, current }))
            }
            Some(_) | None => Ok(()),
        }
    }

    /// Specs never change once they are recorded.
    async fn specs(&self, run: &RunId, fork: Option<ForkNum>) -> Result<Specs, ActivityError> {
        let key = (run.clone(), fork);
        if let Some(known) = lock(&self.specs).get(&key) {
            return Ok(known.clone());
        }
        let refused = |e: String| failed(REFUSED, e);
        let first = self
            .store
            .read_stream(&StreamId::Run(run.clone()), 0, 1)
            .await
            .map_err(|e| refused(e.to_string()))?
            .into_iter()
            .next()
            .ok_or_else(|| refused(format!("the store knows no run {run}")))?;
        let decoded = event::decode_run(&first.event.kind, first.event.version, first.event.data);
        let spec = match decoded.map_err(|e| refused(e.to_string()))? {
            RunEvent::Submitted { spec, .. } => Arc::new(spec),
            _ => return Err(refused(format!("the log of run {run} does not begin with a submission"))),
        };
        let fork_spec = match fork {
            None => None,
            Some(n) => {
                let loaded =
                    log::load_fork(&*self.store, run, n).await.map_err(|e| refused(e.to_string()))?;
                let (fork, _) =
                    loaded.ok_or_else(|| refused(format!("the store knows no fork {run}/{n}")))?;
                Some(Arc::new(fork.plan().spec.clone()))
            }
        };
        let mut known = lock(&self.specs);
        if known.len() >= MAX_SPECS {
            known.clear();
        }
        known.insert(key, (spec.clone(), fork_spec.clone()));
        Ok((spec, fork_spec))
    }
}

fn needs_room(kind: TaskKind) -> bool {
    matches!(kind, TaskKind::CreateSandbox | TaskKind::RunAgent)
}

/// Appends what is not there yet. The stream has one author, the workflow, so what is there is the same.
async fn write(store: &dyn Store, record: &Record) -> Result<(), StoreError> {
    if record.events.is_empty() && record.consume.is_empty() {
        return Ok(());
    }
    let stream = match record.fork {
        None => StreamId::Run(record.run.clone()),
        Some(fork) => StreamId::Fork(record.run.clone(), fork),
    };
    let end = record.from + record.events.len() as u64;
    let mut expected = record.from;
    loop {
        let rest = &record.events[(expected.min(end) - record.from) as usize..];
        if rest.is_empty() && record.consume.is_empty() {
            return Ok(());
        }
        let append = Append {
            stream: stream.clone(),
            lease: record.lease,
            expected,
            events: rest.to_vec(),
            // Rows are as new as the last event; without one, somebody else has written newer ones.
            views: if rest.is_empty() { vec![] } else { record.views.clone() },
            consume: record.consume.clone(),
        };
        match store.append(append).await {
            Ok(_) => return Ok(()),
            Err(StoreError::Conflict { actual, .. }) if actual > expected => expected = actual,
            Err(e) => return Err(e),
        }
    }
}

/// Why a task is to stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Why {
    Stop,
    LetGo,
}

/// Returns when the store says that this task is to stop, or that its run was let go of.
async fn stopped(store: &dyn Store, p: &Perform) -> Why {
    let run = &p.record.run;
    let (stream, kind) = match p.record.fork {
        None => (StreamId::Run(run.clone()), "run.task_stopping"),
        Some(fork) => (StreamId::Fork(run.clone(), fork), "fork.task_stopping"),
    };
    let mut watch = store.watch(Some(run));
    let mut seen = p.record.from;
    loop {
        if let Ok(page) = store.read_stream(&stream, seen, 0).await {
            seen += page.len() as u64;
            let stops = |e: &forkyard_store::Recorded| {
                e.event.kind == kind && e.event.data["serial"].as_u64() == Some(p.serial)
            };
            if page.iter().any(stops) {
                return Why::Stop;
            }
        }
        if let Ok(Some(view)) = store.run(run).await
            && view.detached
        {
            return Why::LetGo;
        }
        watch.changed().await;
        tokio::time::sleep(STOP_EVERY).await;
    }
}
