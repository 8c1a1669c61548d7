//! Who watches what in this process. Changes are numbered; a watcher is woken once for each number at most, however many
//! ways the news takes.

use std::collections::HashMap;
use std::sync::{Condvar, Mutex, MutexGuard};

use forkyard_core::RunId;
use tokio::sync::watch;

use crate::Watch;

#[derive(Default)]
pub(crate) struct Hub {
    watchers: Mutex<Watchers>,
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

    /// Change number `change` touched `run`.
    pub(crate) fn changed(&self, run: &RunId, change: u64) {
        let watchers = self.lock();
        let raise = |sender: &watch::Sender<u64>| {
            sender.send_if_modified(|seen| {
                let news = change > *seen;
                *seen = change.max(*seen);
                news
            });
        };
        if let Some(sender) = watchers.runs.get(run) {
            raise(sender);
        }
        raise(&watchers.any);
    }

    /// Something may have changed, and nobody knows what.
    pub(crate) fn wake_all(&self) {
        let watchers = self.lock();
        for sender in watchers.runs.values().chain([&watchers.any]) {
            sender.send_modify(|_| ());
        }
    }

    /// Blocks while nobody watches. False at the end.
    pub(crate) fn wait_for_watchers(&self) -> bool {
        let mut watchers = self.lock();
        while !watchers.closed && !watchers.watched() {
            watchers = self.begun.wait(watchers).unwrap_or_else(std::sync::PoisonError::into_inner);
        }
        !watchers.closed
    }

    pub(crate) fn close(&self) {
        self.lock().closed = true;
        self.begun.notify_all();
    }
}
