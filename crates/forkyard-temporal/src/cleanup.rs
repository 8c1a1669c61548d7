//! The workflow that looks for orphans: every host sweeps its own, again and again, until it is stopped.

use std::time::Duration;

use forkyard_core::{HostId, Millis, Timestamp};
use forkyard_engine::sweep::SweepStats;
use serde::{Deserialize, Serialize};
use temporalio_common::RetryPolicy;
use temporalio_macros::{workflow, workflow_methods};
use temporalio_sdk::{
    ActivityOptions, ContinueAsNewOptions, SyncWorkflowContext, TimerOptions, WorkflowCancellationToken,
    WorkflowContext, WorkflowContextView, WorkflowResult,
};

use crate::hand::Hand;
use crate::wheel::now;
use crate::wire::host_queue;

/// There is one for a service's namespace and task queue.
pub fn cleanup_workflow_id(queue: &str) -> String {
    format!("forkyard/cleanup/{queue}")
}

/// Looks until the history is begun anew.
const LOOKS: u32 = 100;
/// What one host may take for a look.
const LOOK_LIMIT: Duration = Duration::from_secs(300);
/// A host that does not begin within this is not there; its own worker sweeps when it comes back.
const HOST_WAIT: Duration = Duration::from_secs(60);

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CleanupStart {
    /// 0: of a release before cleanups had one.
    #[serde(default)]
    pub logic: u32,
    pub interval: Millis,
    pub max_age: Millis,
    /// What was done before the history was begun anew.
    #[serde(default)]
    pub stats: SweepStats,
}

/// What a host did.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Swept {
    pub cleaned: u64,
    pub error: Option<String>,
}

#[workflow]
pub struct CleanupFlow {
    start: CleanupStart,
    stats: SweepStats,
    stopped: bool,
}

#[workflow_methods]
impl CleanupFlow {
    #[init]
    pub fn new(_ctx: &WorkflowContextView, start: CleanupStart) -> Self {
        let stats = SweepStats { running: true, ..start.stats.clone() };
        CleanupFlow { start, stats, stopped: false }
    }

    #[run(name = "ForkyardCleanup")]
    pub async fn run(ctx: &mut WorkflowContext<Self>) -> WorkflowResult<SweepStats> {
        let start = ctx.state(|s| s.start.clone());
        crate::run::check_logic(start.logic)?;
        for _ in 0..LOOKS {
            Self::look(ctx, start.max_age).await;
            let interval = start.interval.as_duration().max(Duration::from_secs(1));
            let token = WorkflowCancellationToken::new();
            let mut waited = Box::pin(
                ctx.timer(TimerOptions::builder(interval).cancellation_token(token.clone()).build()),
            );
            let mut stopped = Box::pin(ctx.wait_condition(|s| s.stopped));
            // Whichever comes first; both are polled in this order, always.
            std::future::poll_fn(|cx| {
                let stop = stopped.as_mut().poll(cx).is_ready();
                let time = waited.as_mut().poll(cx).is_ready();
                if stop || time { std::task::Poll::Ready(()) } else { std::task::Poll::Pending }
            })
            .await;
            token.cancel();
            drop((waited, stopped));
            if ctx.state(|s| s.stopped) || ctx.cancellation_token().is_cancelled() {
                ctx.state_mut(|s| s.stats.running = false);
                return Ok(ctx.state(|s| s.stats.clone()));
            }
        }
        let stats = ctx.state(|s| s.stats.clone());
        ctx.continue_as_new(CleanupStart { stats, ..start }, ContinueAsNewOptions::default())?;
        unreachable!("the line above always returns")
    }

    #[signal]
    pub fn stop(&mut self, _ctx: &mut SyncWorkflowContext<Self>) {
        self.stopped = true;
    }
    #[query]
    pub fn stats(&self, _ctx: &WorkflowContextView) -> SweepStats {
        self.stats.clone()
    }
    #[query]
    pub fn interval(&self, _ctx: &WorkflowContextView) -> Millis {
        self.start.interval
    }
}

impl CleanupFlow {
    /// All hosts that have a worker, one after the other.
    async fn look(ctx: &WorkflowContext<Self>, max_age: Millis) {
        let once = || RetryPolicy::builder().maximum_attempts(1).build();
        let options = ActivityOptions::with_start_to_close_timeout(HOST_WAIT)
            .cancellation_token(WorkflowCancellationToken::new())
            .retry_policy(once())
            .build();
        let hosts: Vec<HostId> = match ctx.execute_activity(Hand::hosts, (), options).await {
            Ok(hosts) => hosts,
            Err(e) => return Self::note(ctx, now(ctx), 0, Some(crate::wheel::said(&e))),
        };
        let (mut cleaned, mut error) = (0, None);
        for host in hosts {
            let options = ActivityOptions::with_start_to_close_timeout(LOOK_LIMIT)
                .schedule_to_start_timeout(HOST_WAIT)
                .cancellation_token(WorkflowCancellationToken::new())
                .retry_policy(once())
                .task_queue(host_queue(ctx.task_queue(), &host))
                .summary(format!("host {host}"))
                .build();
            match ctx.execute_activity(Hand::sweep, max_age, options).await {
                Ok(swept) => {
                    cleaned += swept.cleaned;
                    error = error.or(swept.error);
                }
                Err(e) => error = error.or(Some(format!("host {host}: {}", crate::wheel::said(&e)))),
            }
        }
        Self::note(ctx, now(ctx), cleaned, error);
    }

    fn note(ctx: &WorkflowContext<Self>, at: Timestamp, cleaned: u64, error: Option<String>) {
        ctx.state_mut(|s| {
            s.stats.total_cleaned += cleaned;
            s.stats.last_cleanup = Some(at);
            s.stats.last_error = error;
        });
    }
}
