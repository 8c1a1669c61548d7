//! Carries news from the store to workflows: runs that wait for their workflow, commands, messages for agents that linger,
//! money that was spent. Every worker has one. What it says is a nudge and may be said twice; the truth is in the store.
//!
//! The other way round it notices runs whose workflows were terminated, and has them ended.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use forkyard_core::RunId;
use forkyard_core::view::{EngineKind, RunStatus, RunView};
use forkyard_engine::embedded::Embedded;
use forkyard_store::{CommandId, MessageId, Process, RunQuery, Store};
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::service::{Service, ServiceError};
use crate::wire::{fork_workflow_id, run_workflow_id};

/// A busy store changes all the time: it is looked through this often at most.
const EVERY: Duration = Duration::from_millis(100);
/// And this often at least.
const AT_LEAST: Duration = Duration::from_secs(1);
/// How often this process says that it is there.
const ANNOUNCE: Duration = Duration::from_secs(1);
/// A nudge that had no effect is given again after this: its workflow may have been busy failing.
const AGAIN: Duration = Duration::from_secs(10);
/// Live runs that are looked through.
const MAX_RUNS: usize = 10_000;
/// How often a live run's workflow is looked at, besides when it does not take a nudge.
const LOOK_EVERY: Duration = Duration::from_secs(60);
/// And once it has ended, until those of its forks have.
const LOOK_AGAIN: Duration = Duration::from_secs(1);
/// Spending is told of this often at most: a warning is for people.
const MONEY_EVERY: Duration = Duration::from_secs(1);

#[derive(Default)]
struct Told {
    started: bool,
    commands: Option<(CommandId, Instant)>,
    messages: BTreeMap<u32, (MessageId, Instant)>,
    money: Option<Instant>,
    /// When its workflow is looked at next.
    look_at: Option<Instant>,
    /// Something was refused about it: it is let be until then.
    rests_until: Option<Instant>,
    warned: BTreeSet<Option<u32>>,
}

/// Who drives a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Driven {
    Workflow,
    /// Its forks are ending.
    Forks,
    Nobody,
}

pub struct Courier {
    pub store: Arc<dyn Store>,
    pub service: Service,
    pub process: Process,
    /// Ends what Temporal has let go of.
    pub heir: Embedded,
}

impl Courier {
    /// Until `stop`.
    pub async fn carry(&self, stop: CancellationToken) {
        tokio::select! {
            () = self.announce() => {}
            () = self.rounds(stop) => {}
        }
    }

    /// On its own: a service that does not answer holds up the rounds, and this process is there all the same.
    async fn announce(&self) {
        loop {
            if let Err(e) = self.store.announce(&self.process, ANNOUNCE * 5).await {
                tracing::warn!("could not announce this process: {e}");
            }
            tokio::time::sleep(ANNOUNCE).await;
        }
    }

    async fn rounds(&self, stop: CancellationToken) {
        let mut told: BTreeMap<RunId, Told> = BTreeMap::new();
        let mut watch = self.store.watch(None);
        let mut ending = JoinSet::new();
        loop {
            while ending.try_join_next().is_some() {}
            if let Err(e) = self.round(&mut told, &mut ending, &stop).await {
                tracing::warn!("news could not be carried to Temporal, trying again: {e}");
            }
            let wait = async {
                tokio::select! {
                    () = watch.changed() => {}
                    () = tokio::time::sleep(AT_LEAST) => {}
                }
                tokio::time::sleep(EVERY).await;
            };
            tokio::select! {
                biased;
                () = stop.cancelled() => return,
                () = wait => {}
            }
        }
    }

    /// What is refused about one run keeps nothing from the others; a service or a store that is away is away for all.
    async fn round(
        &self,
        told: &mut BTreeMap<RunId, Told>,
        ending: &mut JoinSet<()>,
        stop: &CancellationToken,
    ) -> Result<(), ServiceError> {
        let query = RunQuery { live: true, limit: MAX_RUNS, ..RunQuery::default() };
        let live: Vec<RunView> =
            self.store.runs(&query).await?.into_iter().filter(|r| r.engine == EngineKind::Temporal).collect();
        told.retain(|id, _| live.iter().any(|r| r.id == *id));
        for run in &live {
            let told = told.entry(run.id.clone()).or_default();
            if told.rests_until.is_some_and(|at| Instant::now() < at) {
                continue;
            }
            match self.about(run, told).await {
                Ok(false) => continue,
                Ok(true) => {
                    ending.spawn(end(self.heir.clone(), run.id.clone(), stop.clone()));
                    continue;
                }
                Err(ServiceError::Unstartable(why)) => {
                    ending.spawn(fail(self.heir.clone(), run.id.clone(), why, stop.clone()));
                }
                Err(e) if is_about_all(&e) => return Err(e),
                Err(e) => tracing::warn!(run = %run.id, "its news could not be carried to Temporal: {e}"),
            }
            told.rests_until = Some(Instant::now() + AGAIN);
        }
        Ok(())
    }

    /// Whether nobody drives it any more.
    async fn about(&self, run: &RunView, told: &mut Told) -> Result<bool, ServiceError> {
        if !told.started {
            if self.has_no_workflow(run).await? {
                self.service.start(&*self.store, &run.id).await?;
            }
            told.started = true;
        }
        let newest = self.store.pending_commands(&run.id).await?.last().map(|c| c.id);
        let heard = !is_news(&mut told.commands, newest) || self.service.nudge_run(&run.id).await?;
        self.about_messages(run, told).await?;
        self.about_money(run, told).await?;
        let look_at = *told.look_at.get_or_insert_with(|| Instant::now() + LOOK_EVERY);
        if heard && Instant::now() < look_at {
            return Ok(false);
        }
        let driven = self.driven(&run.id).await?;
        let wait = if driven == Driven::Forks { LOOK_AGAIN } else { LOOK_EVERY };
        told.look_at = Some(Instant::now() + wait);
        Ok(driven == Driven::Nobody)
    }

    /// Whoever stored it may have ended before it could start the workflow; and whoever was to fail it, before it had failed.
    async fn has_no_workflow(&self, run: &RunView) -> Result<bool, ServiceError> {
        Ok(match run.status {
            RunStatus::Pending => true,
            // A workflow that has begun has the lease for as long as it lives.
            RunStatus::Preparing | RunStatus::Finishing => {
                let holder = self.store.holder(&run.id).await?;
                holder.is_none_or(|h| h.owner != run_workflow_id(&run.id))
            }
            RunStatus::Running | RunStatus::Ended => false,
        })
    }

    /// Which of its workflows has not been ended, by itself or by others. A fork whose run's workflow is gone is asked to cancel, and
    /// collects and cleans up itself before.
    async fn driven(&self, run: &RunId) -> Result<Driven, ServiceError> {
        // One that is not known here may be another service's.
        if self.service.has_ended(run_workflow_id(run)).await? != Some(true) {
            return Ok(Driven::Workflow);
        }
        for fork in self.store.forks(run).await?.into_iter().filter(|f| f.outcome.is_none()) {
            // One that is not known never began.
            if self.service.has_ended(fork_workflow_id(run, fork.fork)).await? == Some(false) {
                return Ok(Driven::Forks);
            }
        }
        // It may have ended in the meantime, as it should.
        let live = self.store.run(run).await?.is_some_and(|v| v.status != RunStatus::Ended);
        Ok(if live { Driven::Nobody } else { Driven::Workflow })
    }

    async fn about_messages(&self, run: &RunView, told: &mut Told) -> Result<(), ServiceError> {
        // An agent at work watches its inbox itself.
        let lingering = self.store.forks(&run.id).await?.into_iter().filter(|f| f.phase == "lingering");
        for fork in lingering {
            let newest = self.store.pending_messages(&run.id, fork.fork).await?.last().map(|m| m.id);
            let mut before = told.messages.remove(&fork.fork);
            let news = is_news(&mut before, newest);
            if let Some(before) = before {
                told.messages.insert(fork.fork, before);
            }
            if news {
                self.service.nudge_fork(&run.id, fork.fork).await?;
            }
        }
        Ok(())
    }

    async fn about_money(&self, run: &RunView, told: &mut Told) -> Result<(), ServiceError> {
        let limited = run.limits.run.is_some() || run.limits.fork.is_some();
        if !limited || told.money.is_some_and(|at| at.elapsed() < MONEY_EVERY) {
            return Ok(());
        }
        told.money = Some(Instant::now());
        let balance = self.store.balance(&run.id).await?;
        let near: BTreeSet<Option<u32>> = balance.near_limits().map(|n| n.fork).collect();
        if !near.is_subset(&told.warned) {
            self.service.tell_spent(&run.id, balance).await?;
            told.warned.extend(near);
        }
        Ok(())
    }
}

async fn end(heir: Embedded, run: RunId, stop: CancellationToken) {
    tracing::warn!(%run, "its workflow was ended by somebody else; it is cancelled and cleaned up");
    match heir.wind_up(&run, &run_workflow_id(&run), stop).await {
        Ok(_) => {}
        Err(e) => tracing::error!(%run, "it can't be ended: {e}"),
    }
}

async fn fail(heir: Embedded, run: RunId, why: String, stop: CancellationToken) {
    tracing::warn!(%run, "it fails: {why}");
    if let Err(e) = heir.fail(&run, &why, stop).await {
        tracing::error!(%run, "it can't be ended: {e}");
    }
}

/// Whether whoever asks about the next run hears the same.
fn is_about_all(e: &ServiceError) -> bool {
    match e {
        ServiceError::Unreachable { .. } => true,
        ServiceError::Engine(e) => e.is_retryable(),
        ServiceError::Invalid(_) | ServiceError::Refused(_) | ServiceError::Unstartable(_) => false,
    }
}

/// Whether the newest of what waits was told of, lately.
fn is_news(told: &mut Option<(u64, Instant)>, newest: Option<u64>) -> bool {
    match (&told, newest) {
        (_, None) => {
            *told = None;
            false
        }
        (Some((id, at)), Some(newest)) if *id == newest && at.elapsed() < AGAIN => false,
        (_, Some(newest)) => {
            *told = Some((newest, Instant::now()));
            true
        }
    }
}
