//! The embedded engine: any number of processes share a store, exactly one drives a run.
//!
//! A driver holds the run's lease, owns its machines and their timers, appends before it acts, and stops at the first sign that
//! the lease is another's. Everything it has in flight lives in tasks that end with it.

mod driver;
mod owner;
mod places;
mod slots;
mod tasks;
mod timers;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use forkyard_core::run::{Command, Run};
use forkyard_core::spec::{ModelKnown, RunSpec};
use forkyard_core::task::{ErrorClass, Output, Task, TaskError, TaskResult};
use forkyard_core::view::{EngineKind, RunStatus};
use forkyard_core::{ForkNum, HostId, RunId};
use forkyard_store::{
    CreateRun, Created, Lease, MessageId, NewCommand, NewMessage, Process, ProcessKind, Store, StoreError,
};
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::Instrument;

use crate::activity::{Activities, Job};
use crate::clock::Clock;
use crate::{Engine, EngineError, check, log};

pub use driver::DriveEnd;
use driver::Scope;
pub use owner::{Owner, is_gone};
pub use slots::{HostSlots, Room, Slot};
pub use tasks::{Ended, perform_watched};

/// How often a worker looks for runs that nobody drives, besides when the store says that something changed.
const SCAN_EVERY: Duration = Duration::from_secs(1);
/// Runs that a worker takes in one look.
const CLAIM_BATCH: usize = 100;
/// A run that can't be driven is tried again after this, then after twice as long, and so on …
const FIRST_REST: Duration = Duration::from_secs(1);
/// … up to this.
const LONGEST_REST: Duration = Duration::from_secs(60);

#[derive(Debug, Clone)]
pub struct EmbeddedConfig {
    pub host: HostId,
    /// Unique for each process.
    pub owner: String,
    /// A lease that is not renewed for this long is free. Takeover is due well within 10 s.
    pub lease_ttl: Duration,
    pub renew_every: Duration,
    /// Forks on this host, over all runs.
    pub host_limit: usize,
    /// A folder by which the processes of this host share that limit; None: it is this process's alone.
    pub places: Option<PathBuf>,
    /// An agent that is silent for this long is lost.
    pub lost_after: Duration,
    /// How long a cancelled task may take to come to a safe point.
    pub cancel_grace: Duration,
    /// How long to wait before a failed append is tried again.
    pub store_retry: Duration,
}

impl EmbeddedConfig {
    pub fn new(host: HostId, owner: impl Into<String>) -> EmbeddedConfig {
        EmbeddedConfig {
            host,
            owner: owner.into(),
            lease_ttl: Duration::from_secs(5),
            renew_every: Duration::from_millis(1500),
            host_limit: 64,
            places: None,
            lost_after: Duration::from_secs(90),
            cancel_grace: Duration::from_secs(10),
            store_retry: Duration::from_millis(500),
        }
    }
}

/// Whether a model can be used; asked before a run is stored.
pub type ModelCheck = Arc<dyn Fn(&str) -> ModelKnown + Send + Sync>;

#[derive(Clone)]
pub struct Embedded(Arc<Inner>);

struct Inner {
    store: Arc<dyn Store>,
    activities: Arc<dyn Activities>,
    models: ModelCheck,
    clock: Clock,
    config: EmbeddedConfig,
    slots: HostSlots,
    driving: Mutex<BTreeSet<RunId>>,
    /// Those of them whose lease this process has, and the last position that each had when it got it.
    held: Mutex<BTreeMap<RunId, u64>>,
}

impl Embedded {
    pub fn new(
        store: Arc<dyn Store>,
        activities: Arc<dyn Activities>,
        models: ModelCheck,
        clock: Clock,
        config: EmbeddedConfig,
    ) -> Embedded {
        let slots = match &config.places {
            Some(folder) => HostSlots::shared(config.host_limit, folder, &config.owner),
            None => HostSlots::new(config.host_limit),
        };
        Embedded(Arc::new(Inner {
            store,
            activities,
            models,
            clock,
            config,
            slots,
            driving: Mutex::default(),
            held: Mutex::default(),
        }))
    }

    pub fn store(&self) -> &Arc<dyn Store> {
        &self.0.store
    }

    /// Drives one run until it ends, is detached, is lost to another driver, or `stop` says so. None if another has it.
    pub async fn drive(&self, run: &RunId, stop: CancellationToken) -> Result<Option<DriveEnd>, EngineError> {
        if !lock(&self.0.driving).insert(run.clone()) {
            return Ok(None);
        }
        let _guard = Driving { inner: &self.0, run };
        // Another engine's runs are another's to drive.
        let view = self.0.store.run(run).await?;
        if view.is_some_and(|v| v.engine != EngineKind::Embedded) {
            return Ok(None);
        }
        let Some(lease) = self.acquire(run).await? else { return Ok(None) };
        self.drive_with(run, lease, stop, Scope::Host).await.map(Some)
    }

    /// Ends a run whose own engine, `owner` of its lease, is known to have let go of it for good: it is cancelled, what was done
    /// is collected as far as this host has it, and everything is cleaned up. None if another has it.
    pub async fn wind_up(
        &self,
        run: &RunId,
        owner: &str,
        stop: CancellationToken,
    ) -> Result<Option<DriveEnd>, EngineError> {
        if !lock(&self.0.driving).insert(run.clone()) {
            return Ok(None);
        }
        let _guard = Driving { inner: &self.0, run };
        let store = &self.0.store;
        if let Some(holder) = store.holder(run).await?.filter(|h| h.owner == owner) {
            store.release(run, holder.token).await?;
        }
        let Some(lease) = self.acquire(run).await? else { return Ok(None) };
        match self.call_off(run).await {
            Ok(()) => self.drive_with(run, lease, stop, Scope::Anywhere).await.map(Some),
            Err(e) => {
                store.release(run, lease.token).await?;
                Err(e)
            }
        }
    }

    /// Asks for the end of a run whose own engine has let go of it, of whoever winds it up. The same key every time: asking again
    /// asks for no more.
    pub async fn call_off(&self, run: &RunId) -> Result<(), EngineError> {
        self.command(run, Command::Cancel, Some(format!("wind-up/{run}"))).await
    }

    /// Ends a run that its own engine can't begin, for a reason that will not change: it fails by it, and nothing is made. None if
    /// another has it.
    pub async fn fail(
        &self,
        run: &RunId,
        why: &str,
        stop: CancellationToken,
    ) -> Result<Option<DriveEnd>, EngineError> {
        if !lock(&self.0.driving).insert(run.clone()) {
            return Ok(None);
        }
        let _guard = Driving { inner: &self.0, run };
        let Some(lease) = self.acquire(run).await? else { return Ok(None) };
        let Inner { store, models, clock, config, .. } = &*self.0;
        // No fork begins: there is no room to share.
        let config = EmbeddedConfig { places: None, ..config.clone() };
        let activities = Arc::new(Refusing(why.to_string()));
        let refusing = Embedded::new(store.clone(), activities, models.clone(), *clock, config);
        refusing.drive_with(run, lease, stop, Scope::Anywhere).await.map(Some)
    }

    async fn drive_with(
        &self,
        run: &RunId,
        lease: Lease,
        stop: CancellationToken,
        scope: Scope,
    ) -> Result<DriveEnd, EngineError> {
        // A store that is away is waited for by the driver; where nothing is known, nothing counts as its doing.
        let from = self.0.store.last_position(run).await.unwrap_or(u64::MAX);
        lock(&self.0.held).insert(run.clone(), from);
        // Of the highest level: whatever is logged while it is driven says of which run it is.
        let span = tracing::error_span!("run", otel.name = "drive run", %run);
        driver::drive(&self.0, run, lease, stop, scope).instrument(span).await
    }

    /// The lease, if nobody has it, or if whoever has it is known to be gone.
    async fn acquire(&self, run: &RunId) -> Result<Option<Lease>, EngineError> {
        let (store, config) = (&self.0.store, &self.0.config);
        if let Some(lease) = store.acquire(run, &config.owner, config.lease_ttl).await? {
            return Ok(Some(lease));
        }
        match store.holder(run).await? {
            Some(holder) if is_gone(&holder.owner) => store.release(run, holder.token).await?,
            Some(_) | None => return Ok(None),
        }
        Ok(store.acquire(run, &config.owner, config.lease_ttl).await?)
    }

    /// Whether this process drives the run at this moment.
    pub fn is_driving(&self, run: &RunId) -> bool {
        lock(&self.0.held).contains_key(run)
    }

    /// The runs that this process drives at this moment, each with the position after which their events are its doing.
    pub fn driving(&self) -> BTreeMap<RunId, u64> {
        lock(&self.0.held).clone()
    }

    /// What forks on this host wait for. Whoever else works for this process shares it.
    pub fn slots(&self) -> HostSlots {
        self.0.slots.clone()
    }

    /// Room for forks on this host, as this process sees it.
    pub fn room(&self) -> Room {
        self.0.slots.room()
    }

    /// Whether a process that may be alive drives it.
    pub async fn is_driven(&self, run: &RunId) -> Result<bool, EngineError> {
        Ok(self.0.store.holder(run).await?.is_some_and(|h| !is_gone(&h.owner)))
    }

    /// Takes on whatever nobody else drives, until `stop`.
    pub async fn work(&self, kind: ProcessKind, stop: CancellationToken) {
        let mut driving: JoinSet<(RunId, bool)> = JoinSet::new();
        let mut resting = Resting::default();
        let mut watch = self.0.store.watch(None);
        let process = Process { id: self.0.config.owner.clone(), host: self.0.config.host.clone(), kind };
        let mut announced: Option<Instant> = None;
        loop {
            // Both are tried again soon: a store that is away comes back. Not at every change: it is a write of its own.
            if announced.is_none_or(|at| at.elapsed() >= SCAN_EVERY) {
                match self.0.store.announce(&process, SCAN_EVERY * 5).await {
                    Ok(()) => announced = Some(Instant::now()),
                    Err(e) => tracing::warn!("could not announce this process: {e}"),
                }
            }
            let held = lock(&self.0.driving).clone();
            match self.0.store.claimable(CLAIM_BATCH + held.len() + resting.0.len()).await {
                Ok(runs) => {
                    for run in runs.into_iter().filter(|r| !held.contains(r) && !resting.rests(r)) {
                        let (engine, stop) = (self.clone(), stop.clone());
                        driving.spawn(async move {
                            let driven = engine.drive(&run, stop).await;
                            match &driven {
                                Ok(_) => {}
                                Err(e @ EngineError::OtherHost { .. }) => tracing::debug!("{e}"),
                                Err(e) => tracing::error!(%run, "driving failed: {e}"),
                            }
                            (run, driven.is_ok())
                        });
                    }
                }
                Err(e) => tracing::warn!("could not look for runs: {e}"),
            }
            tokio::select! {
                biased;
                () = stop.cancelled() => break,
                Some(done) = driving.join_next() => match done {
                    Ok((run, true)) => resting.forget(&run),
                    Ok((run, false)) => resting.lay(run),
                    // A panic: the run's lease runs out, and it is taken on again.
                    Err(e) => tracing::error!("a driver broke off: {e}"),
                },
                () = tokio::time::sleep(SCAN_EVERY) => {}
                () = watch.changed() => {}
            }
        }
        while driving.join_next().await.is_some() {}
    }
}

/// Runs that could not be driven, and until when they are let be: a log that can't be read must not keep every worker busy.
#[derive(Default)]
struct Resting(BTreeMap<RunId, (Instant, Duration)>);

impl Resting {
    fn lay(&mut self, run: RunId) {
        let rest = self.0.get(&run).map_or(FIRST_REST, |(_, rest)| (*rest * 2).min(LONGEST_REST));
        self.0.insert(run, (Instant::now() + rest, rest));
    }
    fn rests(&self, run: &RunId) -> bool {
        self.0.get(run).is_some_and(|(until, _)| *until > Instant::now())
    }
    fn forget(&mut self, run: &RunId) {
        self.0.remove(run);
    }
}

/// Begins nothing, so there is nothing to remove.
struct Refusing(String);

#[async_trait]
impl Activities for Refusing {
    async fn perform(&self, job: Job) -> TaskResult {
        match job.task {
            Task::Destroy { .. } => Ok(Output::Destroyed),
            Task::PrepareBase { .. }
            | Task::VerifyBase { .. }
            | Task::CheckBudget
            | Task::CreateSandbox { .. }
            | Task::HealthCheck { .. }
            | Task::RunAgent { .. }
            | Task::Collect { .. }
            | Task::Verify { .. }
            | Task::Publish { .. } => Err(TaskError::new(ErrorClass::Permanent, self.0.clone())),
        }
    }
}

struct Driving<'a> {
    inner: &'a Inner,
    run: &'a RunId,
}

impl Drop for Driving<'_> {
    fn drop(&mut self) {
        lock(&self.inner.held).remove(self.run);
        lock(&self.inner.driving).remove(self.run);
    }
}

fn lock<T>(m: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    m.lock().unwrap_or_else(PoisonError::into_inner)
}

#[async_trait]
impl Engine for Embedded {
    async fn submit(&self, id: RunId, spec: RunSpec, key: Option<String>) -> Result<RunId, EngineError> {
        spec.validate(|m| (self.0.models)(m))?;
        check::run(&spec)?;
        let now = self.0.clock.now();
        let (run, step) = Run::submit(now, id.clone(), spec);
        let events = step.events.iter().map(|e| log::stored(now, e, None)).collect();
        let new = CreateRun { run: id.clone(), key, events, views: run.views() };
        Ok(match self.0.store.create_run(new).await? {
            Created::New => id,
            Created::Existing(id) => id,
        })
    }

    async fn command(&self, run: &RunId, command: Command, key: Option<String>) -> Result<(), EngineError> {
        if let Command::AddForks { forks } = &command {
            let (state, _) = log::load_run(&*self.0.store, run)
                .await?
                .ok_or_else(|| EngineError::NoSuchRun(run.clone()))?;
            state.spec().validate_added(state.fork_count(), forks, |m| (self.0.models)(m))?;
            check::forks(forks)?;
        }
        let view = self.0.store.run(run).await?.ok_or_else(|| EngineError::NoSuchRun(run.clone()))?;
        if view.status == RunStatus::Ended {
            return Err(EngineError::Refused(format!("run {run} has ended")));
        }
        let data = serde_json::to_value(&command).map_err(|e| EngineError::Refused(e.to_string()))?;
        let new = NewCommand { key, data, at: self.0.clock.now() };
        match self.0.store.put_command(run, new).await {
            Ok(_) => Ok(()),
            Err(StoreError::NotFound { .. }) => Err(EngineError::NoSuchRun(run.clone())),
            Err(e) => Err(e.into()),
        }
    }

    async fn message(
        &self,
        run: &RunId,
        fork: ForkNum,
        message: serde_json::Value,
        key: Option<String>,
    ) -> Result<MessageId, EngineError> {
        if self.0.store.fork(run, fork).await?.is_some_and(|f| f.lifecycle.is_ended()) {
            return Err(EngineError::Refused(format!("fork {run}/{fork} has ended: nobody would read it")));
        }
        let new = NewMessage { key, data: message, at: self.0.clock.now() };
        match self.0.store.put_message(run, fork, new).await {
            Ok(id) => Ok(id),
            Err(StoreError::NotFound { .. }) => Err(EngineError::NoSuchRun(run.clone())),
            Err(e) => Err(e.into()),
        }
    }
}
