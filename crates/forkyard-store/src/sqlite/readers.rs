//! Connections that only read, each used by one blocking thread at a time.

use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use rusqlite::Connection;
use tokio::sync::Semaphore;

use super::schema;
use crate::{Result, StoreError};

/// Reads at once. They share the machine with the forks; WAL readers never wait for the writer.
const READERS: usize = 4;

pub(super) struct Readers {
    path: PathBuf,
    permits: Arc<Semaphore>,
    idle: Arc<Mutex<Vec<Connection>>>,
}

impl Readers {
    pub(super) fn new(path: PathBuf) -> Readers {
        Readers { path, permits: Arc::new(Semaphore::new(READERS)), idle: Arc::default() }
    }

    /// All statements of `work` see the same state.
    pub(super) async fn read<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Connection) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let gone = |_| StoreError::Unavailable("the store is closed".into());
        let permit = self.permits.clone().acquire_owned().await.map_err(gone)?;
        let (path, idle) = (self.path.clone(), self.idle.clone());
        tokio::task::spawn_blocking(move || {
            let pooled = lock(&idle).pop();
            let mut conn = match pooled {
                Some(conn) => conn,
                None => open(&path)?,
            };
            let tx = conn.transaction()?;
            let result = work(&tx);
            drop(tx);
            // After an error the connection is not trusted again.
            if result.is_ok() {
                lock(&idle).push(conn);
            }
            drop(permit);
            result
        })
        .await
        .map_err(|e| StoreError::Unavailable(format!("a read was stopped: {e}")))?
    }
}

fn lock(idle: &Mutex<Vec<Connection>>) -> std::sync::MutexGuard<'_, Vec<Connection>> {
    idle.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

fn open(path: &std::path::Path) -> Result<Connection> {
    let conn = schema::connect(path)?;
    conn.execute_batch("PRAGMA query_only = ON")?;
    Ok(conn)
}
