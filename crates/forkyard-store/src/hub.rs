//! Who watches what in this process. Changes are numbered (by SQLite for the whole store, by PostgreSQL for each run); a
//! watcher of a run is woken once for each number at most, however many ways the news takes.

use std::collections::HashMap;
use std::sync::{Condvar, Mutex, MutexGuard};

use forkyard_core::RunId;
use tokio::sync::watch;

use crate::{Changes, Followers, Watch};

#[derive(Default)]
pub(crate) struct Hub {
    watchers: Mutex<Watchers>,
    followers: Followers,
    /// Signalled when somebody begins to watch, and at the end.
    begun: Condvar,
}

struct Watchers {
    runs: HashMap<RunId, watch::Sender<u64>>,
    any: watch::Sender<u64>,
    closed: bool,
}

impl Default for Watchers {
    fn default() -> Watchers {
        Watchers { runs: HashMap::new(), any: watch::Sender::new(0), closed: false }
    }
}

impl Watchers {
    fn watched(&mut self) -> bool {
        self.runs.retain(|_, sender| sender.receiver_count() > 0);
        !self.runs.is_empty() || self.any.receiver_count() > 0
    }
}

fn raise(sender: &watch::Sender<u64>, change: u64) {
    sender.send_if_modified(|seen| {
        let news = change > *seen;
        *seen = change.max(*seen);
        news
    });
}

/// A run that was deleted and made anew counts from the start again, so smaller is news too; so is what was overtaken on
/// its way, which costs a look.
fn differ(sender: &watch::Sender<u64>, change: u64) {
    sender.send_if_modified(|seen| std::mem::replace(seen, change) != change);
}

impl Hub {
    fn lock(&self) -> MutexGuard<'_, Watchers> {
        // Nothing in here panics half way through a change.
        self.watchers.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    pub(crate) fn subscribe(&self, run: Option<&RunId>) -> Watch {
        let mut watchers = self.lock();
        let receiver = match run {
            None => watchers.any.subscribe(),
            Some(run) => {
                watchers.runs.entry(run.clone()).or_insert_with(|| watch::Sender::new(0)).subscribe()
            }
        };
        self.begun.notify_all();
        Watch::new(receiver)
    }

    pub(crate) fn follow(&self) -> Changes {
        let changes = self.followers.follow();
        // Under the lock, or whoever is about to wait misses it.
        let _watchers = self.lock();
        self.begun.notify_all();
        changes
    }

    pub(crate) fn is_followed(&self) -> bool {
        !self.followers.is_empty()
    }

    /// Something of `run` changed, or may have: for those who follow all of them.
    pub(crate) fn tell_followers(&self, run: &RunId) {
        self.followers.tell(run);
    }

    /// Runs are gone, and nobody knows which.
    pub(crate) fn tell_any(&self) {
        self.followers.tell_any();
    }

    /// Change number `change` of the store touched `run`.
    pub(crate) fn changed(&self, run: &RunId, change: u64) {
        self.followers.tell(run);
        let watchers = self.lock();
        if let Some(sender) = watchers.runs.get(run) {
            raise(sender, change);
        }
        raise(&watchers.any, change);
    }

    /// `run` is at its change number `change`; 0: it has none.
    pub(crate) fn heard(&self, run: &RunId, change: u64) {
        self.followers.tell(run);
        let watchers = self.lock();
        match watchers.runs.get(run) {
            Some(sender) if change == 0 => sender.send_modify(|seen| *seen = 0),
            Some(sender) => differ(sender, change),
            None => {}
        }
        watchers.any.send_modify(|_| ());
    }

    /// As [`Hub::heard`], by somebody who looked only at this run.
    pub(crate) fn found(&self, run: &RunId, change: u64) {
        if let Some(sender) = self.lock().runs.get(run) {
            differ(sender, change);
        }
    }

    pub(crate) fn wake_any(&self) {
        self.lock().any.send_modify(|_| ());
    }

    /// Does somebody watch all runs, and which ones are watched?
    pub(crate) fn watched(&self) -> (bool, Vec<RunId>) {
        let mut watchers = self.lock();
        watchers.watched();
        (watchers.any.receiver_count() > 0, watchers.runs.keys().cloned().collect())
    }

    /// Something may have changed, and nobody knows what.
    pub(crate) fn wake_all(&self) {
        self.followers.tell_any();
        let watchers = self.lock();
        for sender in watchers.runs.values().chain([&watchers.any]) {
            sender.send_modify(|_| ());
        }
    }

    /// Blocks while nobody watches. False at the end.
    pub(crate) fn wait_for_watchers(&self) -> bool {
        let mut watchers = self.lock();
        while !watchers.closed && !watchers.watched() && self.followers.is_empty() {
            watchers = self.begun.wait(watchers).unwrap_or_else(std::sync::PoisonError::into_inner);
        }
        !watchers.closed
    }

    pub(crate) fn close(&self) {
        self.lock().closed = true;
        self.begun.notify_all();
    }
}
