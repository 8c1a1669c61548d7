//! How long is waited for a server that stands still, or a network that swallows everything: such a connection breaks off by
//! itself after a quarter of an hour, if ever.

use std::future::Future;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use sqlx::{Connection, PgConnection};
use tokio::time::Instant;

use super::ACQUIRE_TIMEOUT;
use crate::{Result, StoreError};

/// Large answers and schema changes may take this many times as long as other calls.
const LONG: u32 = 10;

#[derive(Clone)]
pub(super) struct Patience {
    pub deadline: Duration,
    /// When a call was not answered in time: connections that come back for a while after it may hang.
    unanswered: Arc<Mutex<Option<Instant>>>,
}

impl Patience {
    pub(super) fn new(deadline: Duration) -> Patience {
        Patience { deadline, unanswered: Arc::default() }
    }

    pub(super) async fn call<T>(&self, work: impl Future<Output = Result<T>>) -> Result<T> {
        self.within(self.deadline, work).await
    }

    pub(super) async fn long<T>(&self, work: impl Future<Output = Result<T>>) -> Result<T> {
        self.within(self.deadline * LONG, work).await
    }

    async fn within<T>(&self, limit: Duration, work: impl Future<Output = Result<T>>) -> Result<T> {
        // Dropped while it is marked: its connection is tested before anybody else gets it.
        let mut work = Box::pin(work);
        match tokio::time::timeout(limit, &mut work).await {
            Ok(done) => done,
            Err(_) => {
                *self.unanswered.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
                drop(work);
                let seconds = limit.as_secs_f32();
                Err(StoreError::Unavailable(format!(
                    "PostgreSQL has not answered within {seconds} s: it stands still, has too much to do, or can't be reached"
                )))
            }
        }
    }

    /// Of a connection that comes back to the pool; an error closes it. The pool's own test would wait for ever.
    pub(super) async fn test(self, conn: &mut PgConnection) -> Result<bool, sqlx::Error> {
        let at = *self.unanswered.lock().unwrap_or_else(PoisonError::into_inner);
        if at.is_none_or(|at| at.elapsed() > self.deadline * LONG) {
            return Ok(true);
        }
        match tokio::time::timeout(ACQUIRE_TIMEOUT, conn.ping()).await {
            Ok(answer) => answer.map(|()| true),
            Err(_) => Err(sqlx::Error::PoolTimedOut),
        }
    }
}
