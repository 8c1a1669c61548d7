//! Learns of other processes' changes. `PRAGMA data_version` is a read of shared memory, so asking often is cheap; nobody
//! asks while nobody watches.

use std::sync::Arc;
use std::time::Duration;

use forkyard_core::RunId;
use rusqlite::Connection;

use super::writer::changes_after;
use crate::hub::Hub;
use crate::{Result, StoreError};

/// A command has 250 ms to reach its driver; this is the larger part of what it takes.
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// After an error, which is unlikely to be gone at once.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// What changes from now on is noticed, whenever somebody begins to watch.
pub(super) fn start(conn: Connection, hub: Arc<Hub>) -> Result<()> {
    let mut last = changes_after(&conn, 0)?.last().map_or(0, |(_, change)| *change);
    let mut version = None;
    std::thread::Builder::new()
        .name("store-watcher".into())
        .spawn(move || {
            while hub.wait_for_watchers() {
                if let Err(error) = poll(&conn, &mut version, &mut last, &hub) {
                    tracing::warn!(%error, "changes of other processes can't be read");
                    // Readers will see for themselves.
                    hub.wake_all();
                    version = None;
                    std::thread::sleep(RETRY_INTERVAL);
                }
                std::thread::sleep(POLL_INTERVAL);
            }
        })
        .map_err(|e| StoreError::Unavailable(format!("no thread for the store: {e}")))?;
    Ok(())
}

fn poll(conn: &Connection, version: &mut Option<i64>, last: &mut u64, hub: &Hub) -> Result<()> {
    let now: i64 = conn.prepare_cached("PRAGMA data_version")?.query_row([], |r| r.get(0))?;
    if *version == Some(now) {
        return Ok(());
    }
    for (run, change) in changes_after(conn, *last)? {
        if let Ok(run) = RunId::new(run) {
            hub.changed(&run, change);
        }
        *last = change;
    }
    // Only now: a change that came while reading is looked at again.
    *version = Some(now);
    Ok(())
}
