//! The embedded engine: any number of processes share a store, exactly one drives a run.
//!
//! A driver holds the run's lease, owns its machines and their timers, appends before it acts, and stops at the first sign that
//! the lease is another's. Everything it has in flight lives in tasks that end with it.

mod driver;
mod slots;
mod tasks;
mod timers;

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use forkyard_core::run::{Command, Run};
use forkyard_core::spec::{ModelKnown, RunSpec};
use forkyard_core::{ForkNum, HostId, RunId};
use forkyard_store::{
    CreateRun, Created, MessageId, NewCommand, NewMessage, Process, ProcessKind, Store, StoreError,
};
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::activity::Activities;
use crate::clock::Clock;
use crate::{Engine, EngineError, log};

pub use driver::DriveEnd;
use slots::HostSlots;

/// How often a worker looks for runs that nobody drives, besides when the store says that something changed.
const SCAN_EVERY: Duration = Duration::from_secs(1);
/// Runs that a worker takes in one look.
const CLAIM_BATCH: usize = 100;

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
}

impl Embedded {
    pub fn new(
        store: Arc<dyn Store>,
        activities: Arc<dyn Activities>,
        models: ModelCheck,
        clock: Clock,
        config: EmbeddedConfig,
    ) -> Embedded {
        let slots = HostSlots::new(config.host_limit);
        Embedded(Arc::new(Inner {
            store,
            activities,
            models,
            clock,
            config,
            slots,
            driving: Mutex::default(),
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
        let config = &self.0.config;
        let Some(lease) = self.0.store.acquire(run, &config.owner, config.lease_ttl).await? else {
            return Ok(None);
        };
        driver::drive(&self.0, run, lease, stop).await.map(Some)
    }

    /// Takes on whatever nobody else drives, until `stop`.
    pub async fn work(&self, kind: ProcessKind, stop: CancellationToken) {
        let mut driving: JoinSet<()> = JoinSet::new();
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
            match self.0.store.claimable(CLAIM_BATCH).await {
                Ok(runs) => {
                    for run in runs {
                        let (engine, stop) = (self.clone(), stop.clone());
                        driving.spawn(async move {
                            if let Err(e) = engine.drive(&run, stop).await {
                                tracing::error!(%run, "driving failed: {e}");
                            }
                        });
                    }
                }
                Err(e) => tracing::warn!("could not look for runs: {e}"),
            }
            tokio::select! {
                biased;
                () = stop.cancelled() => break,
                Some(_) = driving.join_next() => {}
                () = tokio::time::sleep(SCAN_EVERY) => {}
                () = watch.changed() => {}
            }
        }
        while driving.join_next().await.is_some() {}
    }
}

struct Driving<'a> {
    inner: &'a Inner,
    run: &'a RunId,
}

impl Drop for Driving<'_> {
    fn drop(&mut self) {
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
        let new = NewMessage { key, data: message, at: self.0.clock.now() };
        match self.0.store.put_message(run, fork, new).await {
            Ok(id) => Ok(id),
            Err(StoreError::NotFound { .. }) => Err(EngineError::NoSuchRun(run.clone())),
            Err(e) => Err(e.into()),
        }
    }
}
