//! A wall clock that somebody sets forth and back by hours while a run is under way: each driver begins with another one.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use forkyard_core::spec::{ModelKnown, RunSpec};
use forkyard_core::task::*;
use forkyard_core::view::ForkOutcome;
use forkyard_core::{HostId, Millis, RunId, SnapshotId, Timestamp};
use forkyard_engine::Engine;
use forkyard_engine::activity::{Activities, Job};
use forkyard_engine::clock::Clock;
use forkyard_engine::embedded::{Embedded, EmbeddedConfig};
use forkyard_store::Store;
use test_support::memstore::MemStore;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// Agents that never end by themselves. The first sandbox can't be made at the first try.
#[derive(Default)]
struct Endless {
    refused: AtomicBool,
    begun: AtomicBool,
}

#[async_trait]
impl Activities for Endless {
    async fn perform(&self, job: Job) -> TaskResult {
        let host = HostId::new("h").unwrap();
        Ok(match job.task.kind() {
            TaskKind::PrepareBase => Output::Base(Base {
                commit: "c0".into(),
                branch: "main".into(),
                snapshot: SnapshotId::new("base").unwrap(),
                host,
            }),
            TaskKind::CheckBudget => Output::BudgetOk,
            TaskKind::CreateSandbox => {
                if !self.refused.swap(true, Ordering::Relaxed) {
                    return Err(TaskError::new(ErrorClass::Transient, "not yet"));
                }
                Output::Created { host }
            }
            TaskKind::HealthCheck => Output::Healthy,
            TaskKind::RunAgent => loop {
                self.begun.store(true, Ordering::Relaxed);
                job.heartbeat.beat();
                tokio::select! {
                    () = job.cancel.cancelled() => {
                        return Err(TaskError::new(ErrorClass::Cancelled, "stopped"));
                    }
                    () = tokio::time::sleep(Duration::from_secs(1)) => {}
                }
            },
            TaskKind::Collect => Output::Collected(Collected::default()),
            TaskKind::Publish => Output::Published { reference: "refs/x".into() },
            TaskKind::Destroy => Output::Destroyed,
            TaskKind::VerifyBase | TaskKind::Verify => unreachable!("nothing judges"),
        })
    }
}

const HOUR: u64 = 3_600_000;

/// How long drivers had the run, all in all, until its only fork ended; each but the last is killed after `lasts`. Virtual time:
/// what is measured is exact.
async fn driven(
    walls: &[u64],
    lasts: Duration,
    timeout: Duration,
) -> (Option<ForkOutcome>, Millis, Duration) {
    let store: Arc<dyn Store> = Arc::new(MemStore::default());
    let activities = Arc::new(Endless::default());
    let run = RunId::new("r").unwrap();
    let mut spent = Duration::ZERO;
    for (i, wall) in walls.iter().enumerate() {
        let config = EmbeddedConfig::new(HostId::new("h").unwrap(), format!("driver{i}"));
        let (ttl, models) = (config.lease_ttl, Arc::new(|_: &str| ModelKnown::Priced));
        let clock = Clock::at(Timestamp(*wall));
        let engine = Embedded::new(store.clone(), activities.clone(), models, clock, config);
        if i == 0 {
            let mut spec = RunSpec::new("/repo", "p", "m", 1);
            spec.fork_timeout = Millis(timeout.as_millis() as u64);
            engine.submit(run.clone(), spec, None).await.unwrap();
        }
        let begun = Instant::now();
        let drive = engine.drive(&run, CancellationToken::new());
        if i + 1 < walls.len() {
            let ended = tokio::time::timeout(lasts, drive).await;
            assert!(ended.is_err(), "driver {i} was still at it: {ended:?}");
            // Nobody knows that it is gone.
            spent += begun.elapsed();
            tokio::time::sleep(ttl * 2).await;
        } else {
            drive.await.unwrap();
            spent += begun.elapsed();
        }
    }
    assert!(activities.begun.load(Ordering::Relaxed), "an agent began");
    let fork = store.fork(&run, 0).await.unwrap().unwrap();
    (fork.outcome, fork.driven, spent)
}

#[tokio::test(start_paused = true)]
async fn a_clock_that_jumps_changes_no_timeout() {
    let (noon, timeout) = (1_700_000_000_000, Duration::from_secs(300));
    let jumps = [
        vec![noon],
        vec![noon, noon + 1, noon + 2],
        vec![noon, noon + 5 * HOUR, noon + 10 * HOUR],
        vec![noon, noon - 5 * HOUR, noon - 10 * HOUR],
        vec![noon, noon + 5 * HOUR, noon - 5 * HOUR, noon + 5 * HOUR],
    ];
    // A driver that is killed has said until when it drove a while ago.
    let unsaid = EmbeddedConfig::new(HostId::new("h").unwrap(), "x").renew_every;
    for walls in jumps {
        // The first is killed while the fork waits for its sandbox's next try, and at the agent's work.
        for lasts in [Duration::from_secs(3), Duration::from_secs(60)] {
            let (outcome, counted, spent) = driven(&walls, lasts, timeout).await;
            let what = format!("{walls:?}, {lasts:?}: {counted} counted, {spent:?} spent");
            assert_eq!(outcome, Some(ForkOutcome::Timeout), "{what}");
            let most = timeout + (unsaid + Duration::from_secs(1)) * walls.len() as u32;
            assert!(spent >= timeout && spent < most, "{what}");
            assert!(counted.as_duration() >= timeout && counted.as_duration() < most, "{what}");
        }
    }
}
