//! Where journals end, remembered from one transaction to the next, so that an agent's entry costs its insertion and
//! little else. Any other kind of write, and any commit of another process, makes them forgotten.

use std::collections::HashMap;
use std::time::Instant;

use forkyard_core::{Attempt, ForkNum, RunId};
use rusqlite::Connection;

use super::log;
use crate::codec::{int, no_fork};
use crate::{Result, StreamId};

/// Journals that are remembered; beyond it all are forgotten and read anew.
const MAX_HEADS: usize = 16_384;

#[derive(Default)]
pub(super) struct Heads {
    /// SQLite's number for what this connection has seen of the others' commits.
    seen: i64,
    /// When it was found that another process had written.
    pub others_wrote: Option<Instant>,
    /// The number of the last change.
    change: Option<i64>,
    runs: HashMap<RunId, RunHead>,
    journals: HashMap<(i64, ForkNum), JournalHead>,
}

struct RunHead {
    n: i64,
    position: u64,
    /// `position` is not in the table yet.
    moved: bool,
}

/// The journal of a fork's current attempt.
#[derive(Clone, Copy)]
pub(super) struct JournalHead {
    pub n: i64,
    /// Of the run.
    pub position: u64,
    pub attempt: Attempt,
    pub length: u64,
}

impl Heads {
    /// At the start of a transaction: what is remembered counts only if no other process has written since.
    pub(super) fn recall(&mut self, conn: &Connection) -> Result<()> {
        let seen = conn.prepare_cached("PRAGMA data_version")?.query_row([], |r| r.get(0))?;
        if seen != self.seen {
            self.others_wrote = Some(Instant::now());
            self.distrust();
            self.seen = seen;
        }
        if self.journals.len() > MAX_HEADS {
            self.forget();
        }
        Ok(())
    }

    /// Nothing that was remembered counts: another process has written, or what this one wrote was undone.
    pub(super) fn distrust(&mut self) {
        self.forget();
        self.change = None;
    }

    pub(super) fn next_change(&mut self, conn: &Connection) -> Result<i64> {
        let last = match self.change {
            Some(change) => change,
            None => conn
                .prepare_cached("SELECT coalesce(max(change), 0) FROM changes")?
                .query_row([], |r| r.get(0))?,
        };
        self.change = Some(last + 1);
        Ok(last + 1)
    }

    pub(super) fn forget(&mut self) {
        self.runs.clear();
        self.journals.clear();
    }

    pub(super) fn journal(&mut self, conn: &Connection, run: &RunId, fork: ForkNum) -> Result<JournalHead> {
        if !self.runs.contains_key(run) {
            let row = log::run_row(conn, run)?;
            self.runs.insert(run.clone(), RunHead { n: row.n, position: row.position, moved: false });
        }
        let RunHead { n, position, .. } = self.runs[run];
        if let Some(head) = self.journals.get(&(n, fork)) {
            return Ok(JournalHead { position, ..*head });
        }
        let attempt = log::attempt(conn, n, fork)?.ok_or_else(|| no_fork(run, fork))?;
        let length = log::length(conn, n, &StreamId::Journal(run.clone(), fork, attempt))?;
        let head = JournalHead { n, position, attempt, length };
        self.journals.insert((n, fork), head);
        Ok(head)
    }

    /// After the events of an append were inserted.
    pub(super) fn moved(&mut self, run: &RunId, fork: ForkNum, position: u64, length: u64) {
        let Some(head) = self.runs.get_mut(run) else { return };
        (head.position, head.moved) = (position, true);
        if let Some(journal) = self.journals.get_mut(&(head.n, fork)) {
            journal.length = length;
        }
    }

    /// Puts the runs' positions into the table, for whoever reads it next.
    pub(super) fn write(&mut self, conn: &Connection) -> Result<()> {
        for head in self.runs.values_mut().filter(|head| head.moved) {
            conn.prepare_cached("UPDATE runs SET position = ?2 WHERE n = ?1")?
                .execute((head.n, int(head.position)))?;
            head.moved = false;
        }
        Ok(())
    }
}
