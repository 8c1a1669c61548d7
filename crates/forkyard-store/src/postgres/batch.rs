//! Writes to one run wait for each other anyway, for the run's row. So those that wait in this process make up one
//! transaction: one lock, one sync. Runs do not wait for each other.

use std::collections::{HashMap, VecDeque};
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard};

use forkyard_core::RunId;
use sqlx::{Connection, PgConnection, PgPool};
use tokio::sync::oneshot;

use super::news::News;
use super::patience::Patience;
use crate::codec::uint;
use crate::{Result, StoreError};

/// Requests in one transaction. Bounds the time that other processes wait for the run's row.
const MAX_BATCH: usize = 128;
/// Requests of one run that may wait: more than all forks of a run can have under way.
const MAX_WAITING: usize = 10_000;

/// An open transaction on one run.
pub(super) struct Tx<'a> {
    pub conn: &'a mut PgConnection,
    touched: bool,
}

impl Tx<'_> {
    /// Watchers of the run will be woken.
    pub(super) fn touch(&mut self) {
        self.touched = true;
    }
}

pub(super) type Work<'a, T> = Pin<Box<dyn Future<Output = Result<T>> + Send + 'a>>;

trait Job: Send {
    fn run<'a>(&'a mut self, tx: &'a mut Tx<'_>) -> Work<'a, ()>;
    fn answer(self: Box<Self>, outcome: Result<()>);
    /// Nobody waits for it any more.
    fn is_given_up(&self) -> bool;
}

struct Request<F, T> {
    work: Option<F>,
    value: Option<T>,
    reply: oneshot::Sender<Result<T>>,
}

impl<T, F> Job for Request<F, T>
where
    T: Send,
    F: for<'t> FnOnce(&'t mut Tx<'_>) -> Work<'t, T> + Send,
{
    fn run<'a>(&'a mut self, tx: &'a mut Tx<'_>) -> Work<'a, ()> {
        Box::pin(async move {
            if let Some(work) = self.work.take() {
                self.value = Some(work(tx).await?);
            }
            Ok(())
        })
    }
    fn answer(self: Box<Self>, outcome: Result<()>) {
        let Request { value, reply, .. } = *self;
        let stopped = || StoreError::Unavailable("the request was not carried out".into());
        // Whoever asked may be gone; what was written stays.
        let _ = reply.send(outcome.and_then(|()| value.ok_or_else(stopped)));
    }
    fn is_given_up(&self) -> bool {
        self.reply.is_closed()
    }
}

/// A run is in here while a task writes for it.
type Queues = HashMap<RunId, VecDeque<Box<dyn Job>>>;

#[derive(Clone)]
pub(super) struct Batches {
    pool: PgPool,
    patience: Patience,
    news: News,
    queues: Arc<Mutex<Queues>>,
}

impl Batches {
    pub(super) fn new(pool: PgPool, patience: Patience, news: News) -> Batches {
        Batches { pool, patience, news, queues: Arc::default() }
    }

    fn lock(&self) -> MutexGuard<'_, Queues> {
        self.queues.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    pub(super) async fn write<T: Send + 'static>(
        &self,
        run: &RunId,
        work: impl for<'t> FnOnce(&'t mut Tx<'_>) -> Work<'t, T> + Send + 'static,
    ) -> Result<T> {
        let (reply, answer) = oneshot::channel();
        let job: Box<dyn Job> = Box::new(Request { work: Some(work), value: None, reply });
        let begin = {
            let mut queues = self.lock();
            match queues.get_mut(run) {
                Some(queue) if queue.len() >= MAX_WAITING => {
                    return Err(StoreError::Unavailable(format!("{MAX_WAITING} writes wait for run {run}")));
                }
                Some(queue) => {
                    queue.push_back(job);
                    false
                }
                None => {
                    queues.insert(run.clone(), VecDeque::from([job]));
                    true
                }
            }
        };
        if begin {
            tokio::spawn(self.clone().drain(run.clone()));
        }
        let answer = async {
            answer.await.map_err(|_| StoreError::Unavailable("the store's writer has stopped".into()))?
        };
        self.patience.long(answer).await
    }

    async fn drain(self, run: RunId) {
        loop {
            let mut batch: Vec<Box<dyn Job>> = {
                let mut queues = self.lock();
                let Some(queue) = queues.get_mut(&run) else { return };
                if queue.is_empty() {
                    queues.remove(&run);
                    return;
                }
                queue.retain(|job| !job.is_given_up());
                let take = queue.len().min(MAX_BATCH);
                queue.drain(..take).collect()
            };
            let outcomes = match self.transaction(&run, &mut batch).await {
                Ok(outcomes) => outcomes,
                Err(error) => batch.iter().map(|_| Err(error.clone())).collect(),
            };
            for (job, outcome) in batch.into_iter().zip(outcomes) {
                job.answer(outcome);
            }
        }
    }

    /// Each step of it has a deadline of its own: a batch may be large.
    async fn transaction(&self, run: &RunId, batch: &mut [Box<dyn Job>]) -> Result<Vec<Result<()>>> {
        let patience = &self.patience;
        let mut conn = self.pool.acquire().await?;
        let begin = async { Ok(conn.begin().await?) };
        let mut tx = patience.call(begin).await?;
        let alone = batch.len() == 1;
        let mut touched = false;
        let mut outcomes = Vec::with_capacity(batch.len());
        for job in batch {
            if !alone {
                patience.call(execute(&mut tx, "SAVEPOINT request")).await?;
            }
            let mut of_job = Tx { conn: &mut tx, touched: false };
            let outcome = patience.call(job.run(&mut of_job)).await;
            let touches = of_job.touched;
            match &outcome {
                Ok(()) => touched |= touches,
                // The server or the way to it: nothing of this transaction will be written.
                Err(error @ (StoreError::Unavailable(_) | StoreError::Full(_))) => return Err(error.clone()),
                Err(_) if alone => {
                    patience.call(async { Ok(tx.rollback().await?) }).await?;
                    return Ok(vec![outcome]);
                }
                Err(_) => patience.call(execute(&mut tx, "ROLLBACK TO SAVEPOINT request")).await?,
            }
            outcomes.push(outcome);
        }
        let finish = async {
            let mut change = 0;
            if touched {
                let found: Option<i64> = sqlx::query_scalar(
                    "UPDATE runs SET changes = changes + 1 WHERE id = $1 RETURNING changes",
                )
                .bind(run.as_str())
                .fetch_optional(&mut *tx)
                .await?;
                // A deleted run has no number.
                change = uint(found.unwrap_or(0));
            }
            tx.commit().await?;
            Ok(change)
        };
        let change = patience.call(finish).await?;
        drop(conn);
        if touched {
            self.news.tell(run.clone(), change);
        }
        Ok(outcomes)
    }
}

async fn execute(conn: &mut PgConnection, sql: &'static str) -> Result<()> {
    sqlx::query(sql).execute(conn).await?;
    Ok(())
}
