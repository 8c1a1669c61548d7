//! What performs tasks. Machines decide, engines dispatch, activities act.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use async_trait::async_trait;
use forkyard_core::spec::{ForkSpec, RunSpec};
use forkyard_core::task::{Task, TaskResult};
use forkyard_core::{Attempt, ForkNum, RunId};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// A task with all that is needed to do it.
#[derive(Clone)]
pub struct Job {
    pub run: RunId,
    pub spec: Arc<RunSpec>,
    /// None for the tasks of the run itself.
    pub fork: Option<(ForkNum, Arc<ForkSpec>)>,
    /// Fences off everything that an older one may still do.
    pub attempt: Attempt,
    pub task: Task,
    /// Somebody wants it to stop: come to a safe point and answer `Cancelled`.
    pub cancel: CancellationToken,
    pub heartbeat: Heartbeat,
}

/// Says that a long task is alive. One that stays silent for too long counts as lost.
#[derive(Clone)]
pub struct Heartbeat {
    start: Instant,
    last_ms: Arc<AtomicU64>,
}

impl Default for Heartbeat {
    fn default() -> Heartbeat {
        Heartbeat::new()
    }
}

impl Heartbeat {
    pub fn new() -> Heartbeat {
        Heartbeat { start: Instant::now(), last_ms: Arc::default() }
    }
    pub fn beat(&self) {
        self.last_ms.store(self.start.elapsed().as_millis() as u64, Ordering::Relaxed);
    }
    pub(crate) fn silence(&self) -> std::time::Duration {
        let last = std::time::Duration::from_millis(self.last_ms.load(Ordering::Relaxed));
        self.start.elapsed().saturating_sub(last)
    }
}

/// Performs tasks. Every task can be performed again: after a crash nobody knows how far it came.
#[async_trait]
pub trait Activities: Send + Sync + 'static {
    async fn perform(&self, job: Job) -> TaskResult;
}
