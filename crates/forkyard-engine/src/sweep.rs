//! Orphans: sandboxes whose run is over, destroyed by whoever sweeps on their host.
//!
//! A live run's sandboxes are never touched, whether it is driven, paused, detached or waiting for a new driver; nor are those
//! handed over to the user, which end at their own deadline, nor those that no run has made.

use std::time::Duration;

use async_trait::async_trait;
use forkyard_core::view::{RunStatus, SandboxState};
use forkyard_core::{HostId, Millis, RunId, SandboxId, Timestamp};
use forkyard_store::{SandboxQuery, Store, StoreError};
use serde::{Deserialize, Serialize};
use tokio_util::sync::CancellationToken;

use crate::clock::Clock;

/// The sandboxes that exist on this host, whatever any log says.
#[async_trait]
pub trait Yard: Send + Sync {
    async fn list(&self) -> Result<Vec<Found>, String>;
    /// Ok if it is gone already.
    async fn destroy(&self, id: &SandboxId) -> Result<(), String>;
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    pub id: SandboxId,
    /// None: made by a user, not by a run.
    pub run: Option<RunId>,
    pub created_at: Timestamp,
}

/// What sweeping has done so far, as `cleanup` shows it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SweepStats {
    pub total_cleaned: u64,
    pub last_cleanup: Option<Timestamp>,
    pub running: bool,
    pub last_error: Option<String>,
}

/// How often and how old; as `cleanup --interval --max-age`.
#[derive(Debug, Clone, Copy)]
pub struct SweepConfig {
    pub interval: Duration,
    pub max_age: Millis,
}

impl Default for SweepConfig {
    fn default() -> Self {
        SweepConfig { interval: Duration::from_secs(15 * 60), max_age: Millis::minutes(180) }
    }
}

const STATS: &str = "cleanup/stats";
const STOP: &str = "cleanup/stop";
/// How soon a stop from another process is noticed.
const STOP_POLL: Duration = Duration::from_secs(1);

/// One look. The number of sandboxes that were destroyed, and the first error.
pub async fn sweep(
    store: &dyn Store,
    yard: &dyn Yard,
    here: &HostId,
    now: Timestamp,
    max_age: Millis,
) -> Result<(u64, Option<String>), StoreError> {
    let found = match yard.list().await {
        Ok(found) => found,
        Err(e) => return Ok((0, Some(e))),
    };
    let (mut cleaned, mut error) = (0, None);
    for f in &found {
        let Some(run) = &f.run else { continue };
        let live = store.run(run).await?.is_some_and(|v| v.status != RunStatus::Ended);
        if live {
            continue;
        }
        let known = store.sandboxes(&SandboxQuery { run: Some(run.clone()), ..Default::default() }).await?;
        let state = known.iter().find(|s| s.id == f.id).map(|s| s.state);
        let due = match state {
            Some(SandboxState::HandedOver) => false,
            // Its run knows that it should be gone.
            Some(SandboxState::Owed | SandboxState::Destroyed) => true,
            Some(SandboxState::Requested | SandboxState::Live) | None => now.since(f.created_at) >= max_age,
        };
        if !due {
            continue;
        }
        match yard.destroy(&f.id).await {
            Ok(()) => {
                cleaned += 1;
                match store.sandbox_destroyed(&f.id).await {
                    // Nobody has recorded it: made by a process that had lost its run.
                    Ok(()) | Err(StoreError::NotFound { .. }) => {}
                    Err(e) => return Err(e),
                }
            }
            Err(e) => error = error.or(Some(format!("{}: {e}", f.id))),
        }
    }
    // Owed, but gone by itself. What is owed to another host is not seen from here.
    let owed = SandboxQuery { states: vec![SandboxState::Owed], ..Default::default() };
    for s in store.sandboxes(&owed).await? {
        let ours = match &s.host {
            Some(host) => host == here,
            // Whether it was ever made, and where, nobody recorded.
            None => now.since(s.created_at) >= max_age,
        };
        if ours && !found.iter().any(|f| f.id == s.id) {
            store.sandbox_destroyed(&s.id).await?;
        }
    }
    Ok((cleaned, error))
}

/// Sweeps until it is stopped, by `stop` or from any process by [`stop_sweeping`].
pub async fn sweep_until_stopped(
    store: &dyn Store,
    yard: &dyn Yard,
    here: &HostId,
    clock: Clock,
    config: SweepConfig,
    stop: CancellationToken,
) -> Result<SweepStats, StoreError> {
    store.delete_blob(STOP).await?;
    let mut stats = SweepStats { running: true, ..stats(store).await? };
    'sweeping: loop {
        // A store that is away for a while does not end it.
        match sweep(store, yard, here, clock.now(), config.max_age).await {
            Ok((cleaned, error)) => {
                stats.total_cleaned += cleaned;
                stats.last_cleanup = Some(clock.now());
                stats.last_error = error;
            }
            Err(e) => stats.last_error = Some(e.to_string()),
        }
        if let Err(e) = write(store, &stats).await {
            tracing::warn!("could not record what was cleaned up: {e}");
        }
        let next = tokio::time::Instant::now() + config.interval;
        while tokio::time::Instant::now() < next {
            if matches!(store.blob(STOP).await, Ok(Some(_))) {
                break 'sweeping;
            }
            let left = next.saturating_duration_since(tokio::time::Instant::now());
            tokio::select! {
                biased;
                () = stop.cancelled() => break 'sweeping,
                () = tokio::time::sleep(left.min(STOP_POLL)) => {}
            }
        }
    }
    stats.running = false;
    write(store, &stats).await?;
    Ok(stats)
}

pub async fn stop_sweeping(store: &dyn Store) -> Result<(), StoreError> {
    store.put_blob(STOP, b"stop").await
}

pub async fn stats(store: &dyn Store) -> Result<SweepStats, StoreError> {
    let blob = store.blob(STATS).await?;
    Ok(blob.and_then(|b| serde_json::from_slice(&b).ok()).unwrap_or_default())
}

async fn write(store: &dyn Store, stats: &SweepStats) -> Result<(), StoreError> {
    let json = serde_json::to_vec(stats).map_err(|e| StoreError::Invalid(e.to_string()))?;
    store.put_blob(STATS, &json).await
}
