//! Tasks of one driver in flight: started, cancelled, timed, listened to, and ended with it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use forkyard_core::task::{Dispatch, ErrorClass, TaskError, TaskKind, TaskResult};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tracing::Instrument;

use super::timers::Machine;
use crate::activity::{Activities, Heartbeat, Job};

/// How a task ended.
pub enum Ended {
    Outcome(TaskResult),
    /// It stopped to show signs of life: what it was about has to be started anew under the next attempt.
    Silent,
}

pub struct Tasks {
    activities: Arc<dyn Activities>,
    lost_after: Duration,
    grace: Duration,
    set: JoinSet<(Machine, u64, Ended)>,
    cancels: BTreeMap<(Machine, u64), CancellationToken>,
}

impl Tasks {
    pub fn new(activities: Arc<dyn Activities>, lost_after: Duration, grace: Duration) -> Tasks {
        Tasks { activities, lost_after, grace, set: JoinSet::new(), cancels: BTreeMap::new() }
    }

    pub fn start(
        &mut self,
        machine: Machine,
        dispatch: &Dispatch,
        job: impl FnOnce(CancellationToken, Heartbeat) -> Job,
    ) {
        let (cancel, heartbeat) = (CancellationToken::new(), Heartbeat::new());
        let serial = dispatch.serial;
        let limit = dispatch.limit.as_duration();
        let job = job(cancel.clone(), heartbeat);
        let (activities, lost_after, grace) = (self.activities.clone(), self.lost_after, self.grace);
        self.cancels.insert((machine, serial), cancel);
        let watched = async move {
            (machine, serial, perform_watched(activities, job, limit, lost_after, grace).await)
        };
        self.set.spawn(watched.in_current_span());
    }

    pub fn cancel(&self, machine: Machine, serial: u64) {
        if let Some(c) = self.cancels.get(&(machine, serial)) {
            c.cancel();
        }
    }

    /// Pends while nothing is in flight.
    pub async fn next(&mut self) -> (Machine, u64, Ended) {
        loop {
            match self.set.join_next().await {
                Some(Ok((machine, serial, ended))) => {
                    self.cancels.remove(&(machine, serial));
                    return (machine, serial, ended);
                }
                // Only an abort, which comes with our own end.
                Some(Err(_)) => {}
                None => std::future::pending().await,
            }
        }
    }

    /// Asks all to come to a safe point, and waits for as long as that may take.
    pub async fn stop_all(&mut self) {
        for c in self.cancels.values() {
            c.cancel();
        }
        while self.set.join_next().await.is_some() {}
        self.cancels.clear();
    }
}

/// Performs a task within its limit, listens for its heart, and gives up on it if it does not come to a safe point within `grace`
/// of being cancelled.
pub async fn perform_watched(
    activities: Arc<dyn Activities>,
    job: Job,
    limit: Duration,
    lost_after: Duration,
    grace: Duration,
) -> Ended {
    let (kind, cancel, heartbeat) = (job.task.kind(), job.cancel.clone(), job.heartbeat.clone());
    // Of the highest level, as the run's.
    let fork = job.fork.as_ref().map(|(fork, _)| *fork);
    let span = tracing::error_span!("task", otel.name = kind.as_str(), run = %job.run, fork, attempt = job.attempt.0);
    // A task of its own, so that a panic in an activity is an error of that activity.
    let mut work = JoinSet::new();
    work.spawn(async move { activities.perform(job).await }.instrument(span));
    tokio::select! {
        biased;
        result = work.join_next() => Ended::Outcome(joined(kind, result)),
        () = silence(kind, &heartbeat, lost_after) => Ended::Silent,
        () = tokio::time::sleep(limit) => Ended::Outcome(Err(TaskError::new(
            ErrorClass::Transient,
            format!("took longer than its limit of {} s", limit.as_secs()),
        ))),
        () = async { cancel.cancelled().await; tokio::time::sleep(grace).await } => {
            Ended::Outcome(Err(TaskError::new(ErrorClass::Cancelled, "was stopped")))
        }
    }
}

fn joined(kind: TaskKind, result: Option<Result<TaskResult, tokio::task::JoinError>>) -> TaskResult {
    match result {
        Some(Ok(result)) => result,
        Some(Err(e)) => {
            Err(TaskError::new(ErrorClass::Transient, format!("{} broke down: {e}", kind.as_str())))
        }
        None => Err(TaskError::new(ErrorClass::Transient, "did not start")),
    }
}

/// Only agents are listened to: everything else has a short limit.
async fn silence(kind: TaskKind, heartbeat: &Heartbeat, lost_after: Duration) {
    if kind != TaskKind::RunAgent {
        std::future::pending::<()>().await;
    }
    loop {
        let silent = heartbeat.silence();
        if silent >= lost_after {
            return;
        }
        tokio::time::sleep(lost_after - silent).await;
    }
}
