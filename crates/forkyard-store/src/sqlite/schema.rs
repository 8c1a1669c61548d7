//! Opening a database file, and bringing its schema up to date.

use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use forkyard_core::view::RunView;
use rusqlite::{Connection, OpenFlags, OptionalExtension, TransactionBehavior};

use super::error::is_busy;
use super::log::write_words;
use crate::codec::json;
use crate::search::ended_as;
use crate::{Result, StoreError};

/// In order; never changed once released, only added to.
const MIGRATIONS: &[&str] = &[
    include_str!("../../migrations/sqlite/0001_start.sql"),
    include_str!("../../migrations/sqlite/0002_ended_forks.sql"),
    include_str!("../../migrations/sqlite/0003_access.sql"),
    include_str!("../../migrations/sqlite/0004_streams.sql"),
    include_str!("../../migrations/sqlite/0005_search.sql"),
];

/// From this version on runs are found by words.
const SEARCHED: usize = 5;

/// How long a statement waits for another process's lock before it fails as unavailable.
pub(super) const BUSY_TIMEOUT: Duration = Duration::from_secs(5);
/// Between two tries where SQLite does not wait by itself.
const BUSY_POLL: Duration = Duration::from_millis(5);
/// The write-ahead log is cut back to this after a burst.
const WAL_LIMIT_BYTES: u32 = 64 << 20;
/// Statements that a connection keeps prepared: more than this store has.
const STATEMENTS: usize = 128;

pub(super) fn connect(path: &Path) -> Result<Connection> {
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE
        | OpenFlags::SQLITE_OPEN_CREATE
        | OpenFlags::SQLITE_OPEN_NO_MUTEX
        | OpenFlags::SQLITE_OPEN_EXRESCODE;
    let conn = Connection::open_with_flags(path, flags)
        .map_err(|e| StoreError::Unavailable(format!("{} can't be opened: {e}", path.display())))?;
    conn.busy_timeout(BUSY_TIMEOUT)?;
    conn.set_prepared_statement_cache_capacity(STATEMENTS);
    // FULL syncs the log at every commit. Temporary data in memory: a full disk must not fail a statement half way.
    let settings = format!(
        "PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL; PRAGMA temp_store = MEMORY;
         PRAGMA journal_size_limit = {WAL_LIMIT_BYTES}; PRAGMA cache_size = -16384;"
    );
    patiently(|| conn.execute_batch(&settings)).map_err(|e| match StoreError::from(e) {
        StoreError::Corrupt(text) => {
            StoreError::Corrupt(format!("{} is not a usable SQLite database: {text}", path.display()))
        }
        other => other,
    })?;
    let mode: String = conn.query_row("PRAGMA journal_mode", [], |r| r.get(0))?;
    if mode != "wal" {
        return Err(StoreError::Invalid(format!(
            "{} can't use a write-ahead log ({mode}): put it on a local file system",
            path.display()
        )));
    }
    Ok(conn)
}

/// The first change to a write-ahead log does not wait for others who open the file: SQLite refuses at once where waiting could
/// be for each other.
fn patiently(mut work: impl FnMut() -> rusqlite::Result<()>) -> rusqlite::Result<()> {
    let since = Instant::now();
    loop {
        match work() {
            Err(e) if is_busy(&e) && since.elapsed() < BUSY_TIMEOUT => std::thread::sleep(BUSY_POLL),
            result => return result,
        }
    }
}

/// Makes the file, if it is missing, for its owner alone: prompts and transcripts are nobody else's. SQLite gives its
/// other files the same mode.
///
/// By a link, not by opening it: closing a file that another thread has open with SQLite would drop the locks of this
/// process on it.
pub(super) fn make_private(path: &Path) -> std::io::Result<()> {
    use std::os::unix::fs::OpenOptionsExt;
    static COUNT: AtomicU32 = AtomicU32::new(0);
    if path.exists() {
        return Ok(());
    }
    let mut name = path.as_os_str().to_owned();
    name.push(format!(".new-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed)));
    let new = Path::new(&name);
    std::fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(new)?;
    let linked = std::fs::hard_link(new, path);
    std::fs::remove_file(new)?;
    match linked {
        // Another process was faster.
        Err(e) if e.kind() != std::io::ErrorKind::AlreadyExists => Err(e),
        _ => Ok(()),
    }
}

pub(super) fn migrate(conn: &mut Connection) -> Result<()> {
    let tx = conn.transaction_with_behavior(TransactionBehavior::Immediate)?;
    tx.execute_batch("CREATE TABLE IF NOT EXISTS schema_version (version INTEGER NOT NULL) STRICT")?;
    let found: Option<u32> =
        tx.query_row("SELECT version FROM schema_version", [], |r| r.get(0)).optional()?;
    let version = found.unwrap_or(0) as usize;
    if version > MIGRATIONS.len() {
        return Err(StoreError::Invalid(format!(
            "the database has schema version {version}, and this program knows {} at most: use a newer forkyard",
            MIGRATIONS.len()
        )));
    }
    if version == MIGRATIONS.len() {
        return Ok(());
    }
    for migration in &MIGRATIONS[version..] {
        tx.execute_batch(migration)?;
    }
    if version < SEARCHED {
        fill_search(&tx)?;
    }
    tx.execute("DELETE FROM schema_version", [])?;
    tx.execute("INSERT INTO schema_version (version) VALUES (?1)", [MIGRATIONS.len() as u32])?;
    tx.commit()?;
    Ok(())
}

/// What is folded here, and not by the database, is filled in here for the runs that are there.
fn fill_search(conn: &Connection) -> Result<()> {
    let mut select = conn.prepare("SELECT run, view FROM run_views")?;
    let mut found = select.query([])?;
    while let Some(row) = found.next()? {
        let (n, text): (i64, String) = (row.get(0)?, row.get(1)?);
        let view: RunView = match json("the view of a run", &text) {
            Ok(view) => view,
            // Whoever asks for that run is told; the others can be used.
            Err(error) => {
                tracing::warn!(%error, "a run can't be found by words");
                continue;
            }
        };
        conn.prepare_cached("UPDATE run_views SET ended_as = ?2 WHERE run = ?1")?
            .execute(rusqlite::params![n, ended_as(&view)])?;
        write_words(conn, n, &view)?;
    }
    Ok(())
}
