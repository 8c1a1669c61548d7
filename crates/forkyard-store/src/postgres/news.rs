//! Who changed what, told to all processes by NOTIFY after the commit. NOTIFY inside a transaction would make all commits
//! of the database wait for each other, so news can be lost with the process that would have sent it: a slow look at the
//! counters of the watched runs finds what was missed, as after a lost connection.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use forkyard_core::RunId;
use sqlx::postgres::{PgListener, PgNotification};
use sqlx::{Connection, PgPool};
use tokio::sync::mpsc;

use super::patience::Patience;
use crate::Result;
use crate::codec::uint;
use crate::hub::Hub;

const CHANNEL: &str = "forkyard";
/// How long a change can go unnoticed whose writer died before it told.
const SWEEP_INTERVAL: Duration = Duration::from_secs(1);
/// Between attempts to reach a server that is away.
const RETRY: Duration = Duration::from_millis(200);
/// After so much silence the listening connection is asked whether it is still there.
const QUIET: Duration = Duration::from_secs(30);
/// News in one statement; more wait for the next.
const MAX_NEWS: usize = 1000;

#[derive(Clone)]
pub(super) struct News {
    hub: Arc<Hub>,
    queue: mpsc::UnboundedSender<(RunId, u64)>,
}

impl News {
    /// Starts to listen, to tell and to sweep. The tasks end with the store: see [`Tasks`].
    pub(super) async fn start(
        pool: &PgPool,
        patience: &Patience,
        hub: Arc<Hub>,
        instance: String,
    ) -> Result<(News, Tasks)> {
        // Bounded by what is written: one for each transaction, merged as they are sent.
        let (queue, told) = mpsc::unbounded_channel();
        let listener = listen(pool).await?;
        let line = || (pool.clone(), patience.clone());
        let tasks = vec![
            tokio::spawn(hear(line(), listener, hub.clone(), instance.clone())).abort_handle(),
            tokio::spawn(tell(line(), told, instance)).abort_handle(),
            tokio::spawn(sweep(line(), hub.clone())).abort_handle(),
        ];
        Ok((News { hub, queue }, Tasks(tasks)))
    }

    /// This process at once, the others soon. `change` 0: unnumbered.
    pub(super) fn tell(&self, run: RunId, change: u64) {
        self.hub.heard(&run, change);
        // Fails only when the store is going away.
        let _ = self.queue.send((run, change));
    }
}

/// Ends what runs in the background.
pub(super) struct Tasks(Vec<tokio::task::AbortHandle>);

impl Drop for Tasks {
    fn drop(&mut self) {
        for task in &self.0 {
            task.abort();
        }
    }
}

async fn listen(pool: &PgPool) -> Result<PgListener> {
    let mut listener = PgListener::connect_with(pool).await?;
    // A lost connection is said and not replaced: news may have been lost with it.
    listener.eager_reconnect(false);
    listener.listen(CHANNEL).await?;
    Ok(listener)
}

/// A pool and how long is waited for it.
type Line = (PgPool, Patience);

async fn hear((pool, patience): Line, mut listener: PgListener, hub: Arc<Hub>, instance: String) {
    loop {
        while let Some(news) = next(&mut listener, &patience).await {
            let mut words = news.payload().split(' ');
            let (Some(from), Some(run), Some(change)) = (words.next(), words.next(), words.next()) else {
                continue;
            };
            if from != instance
                && let (Ok(run), Ok(change)) = (RunId::new(run), change.parse())
            {
                hub.heard(&run, change);
            }
        }
        tracing::warn!("the connection that listens to PostgreSQL is lost");
        listener = loop {
            match patience.call(listen(&pool)).await {
                Ok(listener) => break listener,
                Err(_) => tokio::time::sleep(RETRY).await,
            }
        };
        // Nobody told us while we were away.
        hub.wake_all();
    }
}

/// None if the connection is lost. One that is silent is asked: it may have been lost without a word.
async fn next(listener: &mut PgListener, patience: &Patience) -> Option<PgNotification> {
    loop {
        if let Ok(heard) = tokio::time::timeout(QUIET, listener.try_recv()).await {
            return heard.ok().flatten();
        }
        let ask = async { Ok(sqlx::query("SELECT 1").execute(&mut *listener).await?) };
        patience.call(ask).await.ok()?;
    }
}

async fn tell((pool, patience): Line, mut told: mpsc::UnboundedReceiver<(RunId, u64)>, instance: String) {
    let mut news = Vec::new();
    while told.recv_many(&mut news, MAX_NEWS).await > 0 {
        let latest: BTreeMap<RunId, u64> = news.drain(..).collect();
        let payloads: Vec<String> =
            latest.iter().map(|(run, change)| format!("{instance} {run} {change}")).collect();
        if let Err(error) = patience.call(notify(&pool, &payloads)).await {
            tracing::warn!(%error, "other processes will notice changes late");
        }
    }
}

async fn notify(pool: &PgPool, payloads: &[String]) -> Result<()> {
    let mut conn = pool.acquire().await?;
    let mut tx = conn.begin().await?;
    // News need not survive a crash of the server: no sync.
    sqlx::query("SET LOCAL synchronous_commit = off").execute(&mut *tx).await?;
    sqlx::query("SELECT pg_notify($1, payload) FROM unnest($2::text[]) AS payload")
        .bind(CHANNEL)
        .bind(payloads)
        .execute(&mut *tx)
        .await?;
    Ok(tx.commit().await?)
}

async fn sweep((pool, patience): Line, hub: Arc<Hub>) {
    let mut last = None;
    let mut swept = Swept::default();
    loop {
        tokio::time::sleep(SWEEP_INTERVAL).await;
        let (any, runs) = hub.watched();
        // While the server is away there is nothing to find; `hear` wakes all when it is back.
        let look = async {
            if any {
                let now: (i64, i64) =
                    sqlx::query_as("SELECT coalesce(sum(changes), 0)::bigint, count(*) FROM runs")
                        .fetch_one(&pool)
                        .await?;
                if last.replace(now) != Some(now) {
                    hub.wake_any();
                }
            }
            if hub.is_followed() {
                swept.look(&pool, &hub).await?;
            } else {
                swept = Swept::default();
            }
            if !runs.is_empty() {
                let ids: Vec<&str> = runs.iter().map(RunId::as_str).collect();
                let found: Vec<(String, i64)> =
                    sqlx::query_as("SELECT id, changes FROM runs WHERE id = ANY($1)")
                        .bind(&ids)
                        .fetch_all(&pool)
                        .await?;
                for (run, change) in found {
                    if let Ok(run) = RunId::new(run) {
                        hub.found(&run, uint(change));
                    }
                }
            }
            Ok(())
        };
        let _: Result<()> = patience.call(look).await;
    }
}

/// What the last look for those who follow all runs has seen. They are told of live runs whose counter moved, of those that
/// ended or are new, and, if runs are gone, that anything may have changed.
#[derive(Default)]
struct Swept {
    counters: BTreeMap<String, i64>,
    newest: i64,
    runs: i64,
}

impl Swept {
    async fn look(&mut self, pool: &PgPool, hub: &Hub) -> Result<()> {
        let (newest, runs): (i64, i64) =
            sqlx::query_as("SELECT coalesce(max(n), 0), count(*) FROM runs").fetch_one(pool).await?;
        let found: Vec<(String, i64)> =
            sqlx::query_as("SELECT id, changes FROM runs WHERE live OR (n > $1 AND n <= $2)")
                .bind(self.newest)
                .bind(newest)
                .fetch_all(pool)
                .await?;
        let counters: BTreeMap<String, i64> = found.into_iter().collect();
        let moved = counters.iter().filter(|(run, change)| self.counters.get(*run) != Some(*change));
        let over = self.counters.keys().filter(|run| !counters.contains_key(*run));
        for run in moved.map(|(run, _)| run).chain(over) {
            if let Ok(run) = RunId::new(run.as_str()) {
                hub.tell_followers(&run);
            }
        }
        if runs < self.runs {
            hub.tell_any();
        }
        *self = Swept { counters, newest, runs };
        Ok(())
    }
}
