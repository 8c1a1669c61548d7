//! Room for forks on this host, shared fairly: runs take turns, whatever the number of forks that each wants to start.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};

use forkyard_core::RunId;
use tokio::sync::oneshot;

#[derive(Clone)]
pub struct HostSlots(Arc<Mutex<State>>);

struct State {
    /// Below zero after a takeover: forks that live already do not wait.
    free: isize,
    waiting: BTreeMap<RunId, VecDeque<oneshot::Sender<Slot>>>,
    /// The run that got the last slot: the next one after it is served first.
    last: Option<RunId>,
}

/// Room for one fork; given back when dropped.
pub struct Slot(Option<HostSlots>);

impl Drop for Slot {
    fn drop(&mut self) {
        if let Some(slots) = self.0.take() {
            slots.give_back();
        }
    }
}

/// How much room a host has for forks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Room {
    pub limit: usize,
    pub used: usize,
    /// Forks in the queue.
    pub waiting: usize,
}

impl HostSlots {
    pub fn room(&self, limit: usize) -> Room {
        let s = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let waiting = s.waiting.values().flatten().filter(|tx| !tx.is_closed()).count();
        let used = isize::try_from(limit).unwrap_or(isize::MAX) - s.free;
        Room { limit, used: usize::try_from(used).unwrap_or(0), waiting }
    }

    pub fn new(limit: usize) -> HostSlots {
        HostSlots(Arc::new(Mutex::new(State {
            free: isize::try_from(limit).unwrap_or(isize::MAX),
            waiting: BTreeMap::new(),
            last: None,
        })))
    }

    /// Pends until it is this run's turn. Dropping the future gives up the place in the queue.
    pub async fn acquire(&self, run: &RunId) -> Slot {
        let (tx, rx) = oneshot::channel();
        {
            let mut s = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            s.waiting.entry(run.clone()).or_default().push_back(tx);
        }
        self.serve();
        // The sender is only dropped after a send.
        rx.await.unwrap_or(Slot(None))
    }

    /// For forks that live already, as after a takeover: they do not wait, and later ones wait for them.
    pub fn take(&self) -> Slot {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).free -= 1;
        Slot(Some(self.clone()))
    }

    fn give_back(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).free += 1;
        self.serve();
    }

    fn serve(&self) {
        loop {
            let next = {
                let mut s = self.0.lock().unwrap_or_else(PoisonError::into_inner);
                if s.free <= 0 {
                    return;
                }
                let Some(tx) = s.next() else { return };
                s.free -= 1;
                tx
            };
            // Outside of the lock: whoever has given up hands the slot straight back.
            let _ = next.send(Slot(Some(self.clone())));
        }
    }
}

impl State {
    fn next(&mut self) -> Option<oneshot::Sender<Slot>> {
        self.waiting.retain(|_, q| {
            q.retain(|tx| !tx.is_closed());
            !q.is_empty()
        });
        let after = |last: &RunId| self.waiting.keys().find(|r| *r > last).cloned();
        let run = self.last.as_ref().and_then(after).or_else(|| self.waiting.keys().next().cloned())?;
        let tx = self.waiting.get_mut(&run)?.pop_front()?;
        self.last = Some(run);
        Some(tx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::FutureExt;

    #[tokio::test]
    async fn runs_take_turns_and_no_slot_is_lost() {
        let slots = HostSlots::new(1);
        let (a, b) = (RunId::new("a").unwrap(), RunId::new("b").unwrap());
        let first = slots.acquire(&a).await;
        assert_eq!(slots.room(1), Room { limit: 1, used: 1, waiting: 0 });
        let mut a2 = Box::pin(slots.acquire(&a));
        let mut a3 = Box::pin(slots.acquire(&a));
        let mut b1 = Box::pin(slots.acquire(&b));
        assert!((&mut a2).now_or_never().is_none());
        assert!((&mut a3).now_or_never().is_none());
        assert!((&mut b1).now_or_never().is_none());
        assert_eq!(slots.room(1), Room { limit: 1, used: 1, waiting: 3 });
        drop(first);
        let held = (&mut b1).now_or_never().expect("b had none yet");
        drop(a2);
        drop(held);
        let held = (&mut a3).now_or_never().expect("the one before it gave up");
        drop(held);
        assert!(slots.acquire(&b).now_or_never().is_some());
    }

    #[tokio::test]
    async fn forks_that_are_taken_over_use_up_room() {
        let slots = HostSlots::new(1);
        let a = RunId::new("a").unwrap();
        let taken = [slots.take(), slots.take()];
        let mut waits = Box::pin(slots.acquire(&a));
        assert!((&mut waits).now_or_never().is_none());
        let [first, second] = taken;
        drop(first);
        assert!((&mut waits).now_or_never().is_none(), "there was one too many");
        drop(second);
        assert!((&mut waits).now_or_never().is_some());
    }
}
