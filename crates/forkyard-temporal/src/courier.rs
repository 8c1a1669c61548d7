//! Carries news from the store to workflows: runs that wait for their workflow, commands, messages for agents that linger,
//! money that was spent. Every worker has one. What it says is a nudge and may be said twice; the truth is in the store.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use forkyard_core::RunId;
use forkyard_core::view::{EngineKind, RunStatus, RunView};
use forkyard_store::{CommandId, MessageId, Process, RunQuery, Store};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::service::{Service, ServiceError};

/// A busy store changes all the time: it is looked through this often at most.
const EVERY: Duration = Duration::from_millis(100);
/// And this often at least.
const AT_LEAST: Duration = Duration::from_secs(2);
/// How often this process says that it is there.
const ANNOUNCE: Duration = Duration::from_secs(1);
/// A nudge that had no effect is given again after this: its workflow may have been busy failing.
const AGAIN: Duration = Duration::from_secs(10);
/// Live runs that are looked through.
const MAX_RUNS: usize = 10_000;
/// Spending is told of this often at most: a warning is for people.
const MONEY_EVERY: Duration = Duration::from_secs(1);

#[derive(Default)]
struct Told {
    started: bool,
    commands: Option<(CommandId, Instant)>,
    messages: BTreeMap<u32, (MessageId, Instant)>,
    money: Option<Instant>,
    warned: BTreeSet<Option<u32>>,
}

pub struct Courier {
    pub store: Arc<dyn Store>,
    pub service: Service,
    pub process: Process,
}

impl Courier {
    /// Until `stop`.
    pub async fn carry(&self, stop: CancellationToken) {
        let mut told: BTreeMap<RunId, Told> = BTreeMap::new();
        let mut watch = self.store.watch(None);
        let mut announced: Option<Instant> = None;
        loop {
            if announced.is_none_or(|at| at.elapsed() >= ANNOUNCE) {
                match self.store.announce(&self.process, ANNOUNCE * 5).await {
                    Ok(()) => announced = Some(Instant::now()),
                    Err(e) => tracing::warn!("could not announce this process: {e}"),
                }
            }
            if let Err(e) = self.round(&mut told).await {
                tracing::warn!("news could not be carried to Temporal, trying again: {e}");
            }
            let wait = async {
                tokio::select! {
                    () = watch.changed() => {}
                    () = tokio::time::sleep(ANNOUNCE.min(AT_LEAST)) => {}
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

    async fn round(&self, told: &mut BTreeMap<RunId, Told>) -> Result<(), ServiceError> {
        let query = RunQuery { live: true, limit: MAX_RUNS, ..RunQuery::default() };
        let live: Vec<RunView> =
            self.store.runs(&query).await?.into_iter().filter(|r| r.engine == EngineKind::Temporal).collect();
        told.retain(|id, _| live.iter().any(|r| r.id == *id));
        for run in &live {
            self.about(run, told.entry(run.id.clone()).or_default()).await?;
        }
        Ok(())
    }

    async fn about(&self, run: &RunView, told: &mut Told) -> Result<(), ServiceError> {
        if !told.started {
            // Whoever stored it may have ended before it could start the workflow.
            if run.status == RunStatus::Pending {
                self.service.start(&*self.store, &run.id).await?;
            }
            told.started = true;
        }
        let newest = self.store.pending_commands(&run.id).await?.last().map(|c| c.id);
        if is_news(&mut told.commands, newest) {
            self.service.nudge_run(&run.id).await?;
        }
        self.about_messages(run, told).await?;
        self.about_money(run, told).await
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
