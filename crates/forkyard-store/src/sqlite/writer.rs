//! The one connection of a process that writes. Requests that wait while a commit is synced make up the next
//! transaction: one sync for all of them. A refused one leaves no trace: it has a savepoint of its own, or, as an entry
//! of a journal has, refuses before it writes anything.

use std::cell::{Cell, RefCell, RefMut};
use std::collections::BTreeSet;
use std::ops::Deref;
use std::sync::Arc;
use std::time::{Duration, Instant};

use forkyard_core::RunId;
use rusqlite::Connection;
use tokio::sync::{mpsc, oneshot};

use super::error::is_busy;
use super::heads::Heads;
use super::schema::BUSY_TIMEOUT;
use crate::codec::{int, uint};
use crate::hub::Hub;
use crate::{Result, StoreError};

/// Requests that may wait; more wait in their callers.
const QUEUE: usize = 4096;
/// Requests in one transaction. Bounds the time that other processes wait for the lock.
const MAX_BATCH: usize = 512;
/// How often a waiting process tries to get the write lock. SQLite's own waits grow to 100 ms: too long for a command.
const RETRY: Duration = Duration::from_micros(700);
/// A process that writes without pause leaves a gap this long (more than [`RETRY`], so that whoever waits finds it) …
const GAP: Duration = Duration::from_millis(1);
/// … after this time. Costs 4 % of one busy process while others write, and nobody starves.
const BUSY_STRETCH: Duration = Duration::from_millis(25);
/// The same while no other process has written for [`ALONE`].
const LONE_STRETCH: Duration = Duration::from_millis(250);
const ALONE: Duration = Duration::from_secs(1);
/// Changed runs that are remembered although they were deleted, so that slow watchers hear of it.
const KEPT_CHANGES: i64 = 1000;

/// An open transaction, and the runs that its requests have touched.
pub(super) struct Tx<'a> {
    conn: &'a Connection,
    touched: &'a RefCell<BTreeSet<RunId>>,
    heads: &'a RefCell<Heads>,
    past_refusal: Cell<bool>,
}

impl Tx<'_> {
    /// Watchers of the run will be woken.
    pub(super) fn touch(&self, run: &RunId) {
        let mut touched = self.touched.borrow_mut();
        if !touched.contains(run) {
            touched.insert(run.clone());
        }
    }

    /// Where journals end. Only for requests of [`Manner::Checked`].
    pub(super) fn heads(&self) -> RefMut<'_, Heads> {
        self.heads.borrow_mut()
    }

    /// A request of [`Manner::Checked`] says that it will refuse no more, before it writes.
    pub(super) fn past_refusal(&self) {
        self.past_refusal.set(true);
    }
}

/// How a request leaves no trace when it is refused.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Manner {
    /// Whatever it wrote is rolled back.
    Savepoint,
    /// It writes nothing before it knows that it will not refuse: a savepoint, which makes SQLite copy each page that is
    /// changed, is saved.
    Checked,
}

impl Deref for Tx<'_> {
    type Target = Connection;
    fn deref(&self) -> &Connection {
        self.conn
    }
}

/// One request. Runs again if its transaction was lost.
trait Job: Send {
    fn manner(&self) -> Manner;
    fn run(&mut self, tx: &Tx<'_>) -> Result<()>;
    fn answer(self: Box<Self>, outcome: Result<()>);
}

struct Request<F, T> {
    manner: Manner,
    work: F,
    value: Option<T>,
    reply: oneshot::Sender<Result<T>>,
}

impl<T: Send, F: FnMut(&Tx<'_>) -> Result<T> + Send> Job for Request<F, T> {
    fn manner(&self) -> Manner {
        self.manner
    }
    fn run(&mut self, tx: &Tx<'_>) -> Result<()> {
        self.value = Some((self.work)(tx)?);
        Ok(())
    }
    fn answer(self: Box<Self>, outcome: Result<()>) {
        let Request { value, reply, .. } = *self;
        let stopped = || StoreError::Unavailable("the request was not carried out".into());
        // Whoever asked may be gone; what was written stays.
        let _ = reply.send(outcome.and_then(|()| value.ok_or_else(stopped)));
    }
}

#[derive(Clone)]
pub(super) struct Writer {
    queue: mpsc::Sender<Box<dyn Job>>,
}

impl Writer {
    pub(super) fn start(conn: Connection, hub: Arc<Hub>) -> Result<Writer> {
        // Only the start of a transaction can be busy, and the loop below handles that.
        conn.busy_timeout(Duration::ZERO)?;
        let (queue, mut requests) = mpsc::channel::<Box<dyn Job>>(QUEUE);
        std::thread::Builder::new()
            .name("store-writer".into())
            .spawn(move || {
                let heads = RefCell::<Heads>::default();
                let mut stretch = Instant::now();
                let mut batch = Vec::new();
                while let Some(first) = requests.blocking_recv() {
                    batch.push(first);
                    while batch.len() < MAX_BATCH {
                        match requests.try_recv() {
                            Ok(job) => batch.push(job),
                            Err(_) => break,
                        }
                    }
                    write(&conn, &heads, std::mem::take(&mut batch), &hub);
                    if requests.is_empty() {
                        stretch = Instant::now();
                    } else if stretch.elapsed() > longest(heads.borrow().others_wrote) {
                        std::thread::sleep(GAP);
                        stretch = Instant::now();
                    }
                }
                hub.close();
            })
            .map_err(|e| StoreError::Unavailable(format!("no thread for the store: {e}")))?;
        Ok(Writer { queue })
    }

    pub(super) async fn write<T: Send + 'static>(
        &self,
        work: impl FnMut(&Tx<'_>) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        self.put(Manner::Savepoint, work).await
    }

    /// For work that calls [`Tx::past_refusal`] before its first change.
    pub(super) async fn write_checked<T: Send + 'static>(
        &self,
        work: impl FnMut(&Tx<'_>) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        self.put(Manner::Checked, work).await
    }

    async fn put<T: Send + 'static>(
        &self,
        manner: Manner,
        work: impl FnMut(&Tx<'_>) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let stopped = || StoreError::Unavailable("the store's writer has stopped".into());
        let (reply, answer) = oneshot::channel();
        let request = Request { manner, work, value: None, reply };
        self.queue.send(Box::new(request)).await.map_err(|_| stopped())?;
        answer.await.map_err(|_| stopped())?
    }
}

/// How long this process may write without leaving a gap for others.
fn longest(others_wrote: Option<Instant>) -> Duration {
    if others_wrote.is_some_and(|at| at.elapsed() < ALONE) { BUSY_STRETCH } else { LONE_STRETCH }
}

/// Why nothing of a transaction was kept.
enum Undone {
    /// What it tells is true of every request.
    All(StoreError),
    /// One request can't be written, and took the others with it.
    One(StoreError),
}

impl<E: Into<StoreError>> From<E> for Undone {
    fn from(error: E) -> Undone {
        match error.into() {
            // The disk, not the request; a smaller one may fit.
            full @ StoreError::Full(_) => Undone::One(full),
            error => Undone::All(error),
        }
    }
}

/// Writes the batch in one transaction. If one request undoes it, each gets a transaction of its own: a request that does
/// not fit on the disk must not fail those that do.
fn write(conn: &Connection, heads: &RefCell<Heads>, mut batch: Vec<Box<dyn Job>>, hub: &Hub) {
    match transaction(conn, heads, &mut batch, hub) {
        Ok(outcomes) => answer(batch, outcomes),
        Err(Undone::One(_)) if batch.len() > 1 => {
            for job in batch {
                write(conn, heads, vec![job], hub);
            }
        }
        Err(Undone::One(error) | Undone::All(error)) => {
            let outcomes = batch.iter().map(|_| Err(error.clone())).collect();
            answer(batch, outcomes);
        }
    }
}

fn answer(batch: Vec<Box<dyn Job>>, outcomes: Vec<Result<()>>) {
    for (job, outcome) in batch.into_iter().zip(outcomes) {
        job.answer(outcome);
    }
}

fn transaction(
    conn: &Connection,
    heads: &RefCell<Heads>,
    batch: &mut [Box<dyn Job>],
    hub: &Hub,
) -> Result<Vec<Result<()>>, Undone> {
    begin(conn)?;
    let done = fill(conn, heads, batch).and_then(|filled| {
        conn.prepare_cached("COMMIT")?.execute([])?;
        Ok(filled)
    });
    match done {
        Ok((outcomes, touched, change)) => {
            for run in touched {
                hub.changed(&run, change);
            }
            Ok(outcomes)
        }
        Err(error) => {
            // A failed COMMIT may leave the transaction open; SQLite may also have ended it itself.
            if !conn.is_autocommit() {
                let _ = conn.execute_batch("ROLLBACK");
            }
            heads.borrow_mut().distrust();
            Err(error)
        }
    }
}

fn begin(conn: &Connection) -> Result<()> {
    let started = Instant::now();
    loop {
        match conn.prepare_cached("BEGIN IMMEDIATE")?.execute([]) {
            Ok(_) => return Ok(()),
            Err(error) if is_busy(&error) && started.elapsed() < BUSY_TIMEOUT => std::thread::sleep(RETRY),
            Err(error) if is_busy(&error) => {
                return Err(StoreError::Unavailable(format!(
                    "another process has held the database's write lock for {} s",
                    BUSY_TIMEOUT.as_secs()
                )));
            }
            Err(error) => return Err(error.into()),
        }
    }
}

type Filled = (Vec<Result<()>>, BTreeSet<RunId>, u64);

fn fill(conn: &Connection, heads: &RefCell<Heads>, batch: &mut [Box<dyn Job>]) -> Result<Filled, Undone> {
    heads.borrow_mut().recall(conn)?;
    // Of those that are refused too: a watcher that looks for nothing does no harm.
    let touched = RefCell::default();
    let mut outcomes = Vec::with_capacity(batch.len());
    for job in batch {
        let savepoint = job.manner() == Manner::Savepoint;
        if savepoint {
            heads.borrow_mut().write(conn)?;
            heads.borrow_mut().forget();
            conn.prepare_cached("SAVEPOINT request")?.execute([])?;
        }
        let tx = Tx { conn, touched: &touched, heads, past_refusal: Cell::new(false) };
        let outcome = job.run(&tx);
        let past_refusal = tx.past_refusal.get();
        if conn.is_autocommit() {
            // SQLite gave up the whole transaction.
            return Err(outcome
                .err()
                .unwrap_or(StoreError::Unavailable("the transaction was lost".into()))
                .into());
        }
        match &outcome {
            Ok(()) => {}
            Err(full @ StoreError::Full(_)) => return Err(Undone::One(full.clone())),
            Err(error) if past_refusal => return Err(Undone::One(error.clone())),
            Err(_) if savepoint => {
                conn.prepare_cached("ROLLBACK TO request")?.execute([])?;
            }
            Err(_) => {}
        }
        if savepoint {
            conn.prepare_cached("RELEASE request")?.execute([])?;
        }
        outcomes.push(outcome);
    }
    heads.borrow_mut().write(conn)?;
    let touched = touched.into_inner();
    let change = number(conn, heads, &touched)?;
    Ok((outcomes, touched, change))
}

/// Numbers this transaction's changes, for the watchers of other processes.
fn number(conn: &Connection, heads: &RefCell<Heads>, touched: &BTreeSet<RunId>) -> Result<u64> {
    if touched.is_empty() {
        return Ok(0);
    }
    let change = heads.borrow_mut().next_change(conn)?;
    let mut put = conn.prepare_cached(
        "INSERT INTO changes (run, change) VALUES (?1, ?2) ON CONFLICT DO UPDATE SET change = excluded.change",
    )?;
    for run in touched {
        put.execute((run.as_str(), change))?;
    }
    Ok(uint(change))
}

/// Forgets deleted runs whose last change is long ago.
pub(super) fn prune_changes(conn: &Connection) -> Result<()> {
    conn.prepare_cached(
        "DELETE FROM changes WHERE change < (SELECT max(change) FROM changes) - ?1
           AND run NOT IN (SELECT id FROM runs)",
    )?
    .execute([KEPT_CHANGES])?;
    Ok(())
}

/// Changes after `last`, oldest first.
pub(super) fn changes_after(conn: &Connection, last: u64) -> Result<Vec<(String, u64)>> {
    let mut select =
        conn.prepare_cached("SELECT run, change FROM changes WHERE change > ?1 ORDER BY change")?;
    let rows = select.query_map([int(last)], |r| Ok((r.get(0)?, uint(r.get(1)?))))?;
    Ok(rows.collect::<rusqlite::Result<_>>()?)
}
