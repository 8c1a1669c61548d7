//! Room for forks on this host, shared fairly: runs take turns, whatever the number of forks that each wants to start. So do the
//! processes of the host, if they share a folder; see [`super::places`].

use std::collections::{BTreeMap, VecDeque};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use forkyard_core::{ForkNum, RunId};
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::places::{Place, Places, Waits};

/// How often a process without forks looks for a place that another one gave back. One with forks looks the more seldom the
/// more it has, so that whoever has fewest comes first …
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// … but this many times as seldom at most.
const MOST_SELDOM: u32 = 10;

#[derive(Clone)]
pub struct HostSlots(Arc<Inner>);

struct Inner {
    limit: usize,
    /// None: no other process is on this host.
    places: Option<Places>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    live: BTreeMap<u64, Live>,
    last_slot: u64,
    waiting: BTreeMap<RunId, VecDeque<Waiter>>,
    /// The run that got the last slot: the next one after it is served first.
    last: Option<RunId>,
    /// Other processes wait and come first until then.
    holds_back: Option<Instant>,
    /// Somebody looks for places that other processes give back.
    looks: bool,
    waits: Option<Waits>,
}

struct Live {
    run: RunId,
    fork: ForkNum,
    /// None where places are not shared, and for a fork that was let in without one.
    place: Option<Place>,
}

struct Waiter {
    fork: ForkNum,
    tx: oneshot::Sender<Slot>,
}

/// Room for one fork; given back when dropped.
pub struct Slot(Option<(HostSlots, u64)>);

impl Drop for Slot {
    fn drop(&mut self) {
        if let Some((slots, slot)) = self.0.take() {
            slots.give_back(slot);
        }
    }
}

/// How much room a host has for forks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Room {
    pub limit: usize,
    /// By this process.
    pub used: usize,
    /// Forks in the queue.
    pub waiting: usize,
}

impl HostSlots {
    /// Of a process that shares its host with none.
    pub fn new(limit: usize) -> HostSlots {
        HostSlots(Arc::new(Inner { limit, places: None, state: Mutex::default() }))
    }

    /// Of a process, called `owner`, that shares its host with all that use the same folder.
    pub fn shared(limit: usize, folder: &Path, owner: &str) -> HostSlots {
        let places = Places::open(folder, owner, limit);
        if let Err(e) = &places {
            tracing::warn!("{}: {e}: the limit of forks holds for this process alone", folder.display());
        }
        HostSlots(Arc::new(Inner { limit, places: places.ok(), state: Mutex::default() }))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn room(&self) -> Room {
        let s = self.lock();
        let waiting = s.waiting.values().flatten().filter(|w| !w.tx.is_closed()).count();
        Room { limit: self.0.limit, used: s.live.len(), waiting }
    }

    /// Pends until it is this run's turn. Dropping the future gives up the place in the queue.
    pub async fn acquire(&self, run: &RunId, fork: ForkNum) -> Slot {
        let (tx, rx) = oneshot::channel();
        self.lock().waiting.entry(run.clone()).or_default().push_back(Waiter { fork, tx });
        self.serve();
        self.look_out();
        // The sender is only dropped after a send.
        rx.await.unwrap_or(Slot(None))
    }

    /// For a fork that has to go on whether there is room or not: later ones wait for it.
    pub fn take(&self, run: &RunId, fork: ForkNum) -> Slot {
        let mut s = self.lock();
        let slot = self.let_in(&mut s, run, fork, None);
        if let Some(places) = &self.0.places {
            s.settle(places);
        }
        drop(s);
        self.look_out();
        slot
    }

    /// For a fork that lives already, as after a takeover: before all that wait, if there is room. That which another process
    /// still has for it is its own.
    pub fn try_take(&self, run: &RunId, fork: ForkNum) -> Option<Slot> {
        let mut s = self.lock();
        if s.live.len() >= self.0.limit {
            return None;
        }
        let place = match &self.0.places {
            None => None,
            Some(places) => match places.found(places.take(run, fork)) {
                Some(place) => Some(place),
                None if places.is_elsewhere(run, fork) => None,
                None => return None,
            },
        };
        let slot = self.let_in(&mut s, run, fork, place);
        drop(s);
        self.look_out();
        Some(slot)
    }

    fn let_in(&self, s: &mut State, run: &RunId, fork: ForkNum, place: Option<Place>) -> Slot {
        s.last_slot += 1;
        s.live.insert(s.last_slot, Live { run: run.clone(), fork, place });
        Slot(Some((self.clone(), s.last_slot)))
    }

    fn give_back(&self, slot: u64) {
        let mut s = self.lock();
        let live = s.live.remove(&slot);
        if let Some(places) = &self.0.places {
            if let Some(place) = live.and_then(|live| live.place) {
                places.leave(place);
            }
            if !s.waiting.is_empty() && places.others_wait(s.waits.as_ref()) {
                s.holds_back = Some(Instant::now() + seldom(s.live.len()));
            }
        }
        drop(s);
        self.serve();
    }

    fn serve(&self) {
        loop {
            let (tx, slot) = {
                let mut s = self.lock();
                let Some((run, fork)) = s.first() else { return };
                if s.live.len() >= self.0.limit {
                    return;
                }
                let mut place = None;
                if let Some(places) = &self.0.places {
                    if s.holds_back.is_some_and(|until| until > Instant::now()) || !s.settle(places) {
                        return;
                    }
                    place = places.found(places.take(&run, fork));
                    if place.is_none() {
                        return;
                    }
                }
                let Some(tx) = s.next(run.clone()) else { return };
                (tx, self.let_in(&mut s, &run, fork, place))
            };
            // Outside of the lock: whoever has given up hands the slot straight back.
            let _ = tx.send(slot);
        }
    }

    /// Looks for places that other processes give back, for as long as somebody here needs one.
    fn look_out(&self) {
        let mut s = self.lock();
        let Some(places) = self.0.places.as_ref().filter(|_| s.needs()) else { return };
        s.show(places);
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        if std::mem::replace(&mut s.looks, true) {
            return;
        }
        let slots = self.clone();
        runtime.spawn(async move { slots.look().await });
    }

    async fn look(&self) {
        let Some(places) = &self.0.places else { return };
        loop {
            let pause = {
                let s = self.lock();
                if s.waiting.is_empty() { LOOK_EVERY * MOST_SELDOM } else { seldom(s.live.len()) }
            };
            tokio::time::sleep(pause).await;
            self.serve();
            let mut s = self.lock();
            s.settle(places);
            s.prune();
            s.show(places);
            if !s.needs() {
                s.looks = false;
                return;
            }
        }
    }
}

fn seldom(live: usize) -> Duration {
    LOOK_EVERY * u32::try_from(live + 1).unwrap_or(u32::MAX).min(MOST_SELDOM)
}

impl State {
    fn prune(&mut self) {
        self.waiting.retain(|_, q| {
            q.retain(|w| !w.tx.is_closed());
            !q.is_empty()
        });
    }

    /// Whose turn it is.
    fn first(&mut self) -> Option<(RunId, ForkNum)> {
        self.prune();
        let after = |last: &RunId| self.waiting.keys().find(|r| *r > last);
        let run = self.last.as_ref().and_then(after).or_else(|| self.waiting.keys().next())?.clone();
        let fork = self.waiting.get(&run)?.front()?.fork;
        Some((run, fork))
    }

    fn next(&mut self, run: RunId) -> Option<oneshot::Sender<Slot>> {
        let waiter = self.waiting.get_mut(&run)?.pop_front()?;
        self.last = Some(run);
        Some(waiter.tx)
    }

    /// Forks that were let in without a place come before those that wait. False if one of them still has none.
    fn settle(&mut self, places: &Places) -> bool {
        self.live.values_mut().filter(|live| live.place.is_none()).all(|live| {
            if !places.is_elsewhere(&live.run, live.fork) {
                live.place = places.found(places.take(&live.run, live.fork));
                return live.place.is_some();
            }
            true
        })
    }

    /// Lets other processes see whether somebody waits here.
    fn show(&mut self, places: &Places) {
        if self.waiting.is_empty() {
            self.waits = None;
        } else if self.waits.is_none() {
            self.waits = places.found(places.wait().map(Some));
        }
    }

    /// Somebody here needs a place.
    fn needs(&self) -> bool {
        !self.waiting.is_empty() || self.live.values().any(|live| live.place.is_none())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::FutureExt;

    fn run(name: &str) -> RunId {
        RunId::new(name).unwrap()
    }

    /// Long enough for the slowest machine; what hangs says so.
    async fn soon<T>(what: impl Future<Output = T>) -> T {
        tokio::time::timeout(Duration::from_secs(60), what).await.expect("within a minute")
    }

    #[tokio::test]
    async fn runs_take_turns_and_no_slot_is_lost() {
        let slots = HostSlots::new(1);
        let (a, b) = (run("a"), run("b"));
        let first = slots.acquire(&a, 0).await;
        assert_eq!(slots.room(), Room { limit: 1, used: 1, waiting: 0 });
        let mut a2 = Box::pin(slots.acquire(&a, 1));
        let mut a3 = Box::pin(slots.acquire(&a, 2));
        let mut b1 = Box::pin(slots.acquire(&b, 0));
        assert!((&mut a2).now_or_never().is_none());
        assert!((&mut a3).now_or_never().is_none());
        assert!((&mut b1).now_or_never().is_none());
        assert_eq!(slots.room(), Room { limit: 1, used: 1, waiting: 3 });
        drop(first);
        let held = (&mut b1).now_or_never().expect("b had none yet");
        drop(a2);
        drop(held);
        let held = (&mut a3).now_or_never().expect("the one before it gave up");
        drop(held);
        assert!(slots.acquire(&b, 1).now_or_never().is_some());
    }

    #[tokio::test]
    async fn forks_that_go_on_anyway_use_up_room() {
        let slots = HostSlots::new(1);
        let a = run("a");
        let taken = [slots.take(&a, 0), slots.take(&a, 1)];
        assert!(slots.try_take(&a, 2).is_none());
        let mut waits = Box::pin(slots.acquire(&a, 3));
        assert!((&mut waits).now_or_never().is_none());
        let [first, second] = taken;
        drop(first);
        assert!((&mut waits).now_or_never().is_none(), "there was one too many");
        drop(second);
        assert!((&mut waits).now_or_never().is_some());
    }

    /// Two processes as far as the kernel is concerned: locks belong to open files.
    #[tokio::test]
    async fn processes_share_a_limit() {
        let folder = tempfile::tempdir().unwrap();
        let [one, two] = ["one", "two"].map(|owner| HostSlots::shared(2, folder.path(), owner));
        let (a, b) = (run("a"), run("b"));
        let held = [one.acquire(&a, 0).await, one.acquire(&a, 1).await];
        assert!(two.try_take(&b, 0).is_none());
        let mut of_one = Box::pin(one.acquire(&a, 2));
        let mut of_two = Box::pin(two.acquire(&b, 1));
        assert!((&mut of_one).now_or_never().is_none());
        assert!((&mut of_two).now_or_never().is_none());
        let [first, second] = held;
        drop(first);
        assert!((&mut of_one).now_or_never().is_none(), "the other process waits, and has none yet");
        let of_two = soon(of_two).await;
        assert!((&mut of_one).now_or_never().is_none());
        drop(of_two);
        let of_one = soon(of_one).await;
        drop((second, of_one));
        let again = [two.acquire(&b, 2).now_or_never(), two.acquire(&b, 3).now_or_never()];
        assert!(again.iter().all(Option::is_some), "nothing is left taken");
    }

    /// A fork that is taken over from a process that may be alive does not wait for the room that is its own, and gets it when
    /// that process lets go.
    #[tokio::test]
    async fn a_fork_brings_its_room_along() {
        let folder = tempfile::tempdir().unwrap();
        let [one, two] = ["one", "two"].map(|owner| HostSlots::shared(1, folder.path(), owner));
        let (a, b) = (run("a"), run("b"));
        let held = one.acquire(&a, 0).await;
        assert!(two.try_take(&a, 1).is_none(), "another fork");
        let taken_over = two.try_take(&a, 0).expect("its room is counted");
        drop(held);
        let place = folder.path().join("0");
        soon(async {
            while !std::fs::read_to_string(&place).is_ok_and(|text| text.starts_with("two\n")) {
                tokio::task::yield_now().await;
            }
        })
        .await;
        assert!(one.try_take(&b, 0).is_none(), "it has it now");
        drop(taken_over);
        assert!(one.try_take(&b, 0).is_some());
    }

    #[tokio::test]
    async fn what_a_dead_process_left_is_free() {
        let folder = tempfile::tempdir().unwrap();
        // Its files, without their locks.
        std::fs::write(folder.path().join("0"), "process.1.1.1.elsewhere.x\na/0\n").unwrap();
        let waits = folder.path().join("waits-0123456789abcdef");
        std::fs::write(&waits, "").unwrap();
        let slots = HostSlots::shared(1, folder.path(), "me");
        let a = run("a");
        let held = slots.acquire(&a, 0).now_or_never().expect("nobody has it");
        let mut next = Box::pin(slots.acquire(&a, 1));
        assert!((&mut next).now_or_never().is_none());
        drop(held);
        assert!((&mut next).now_or_never().is_some(), "nobody else waits");
        assert!(!waits.exists());
    }
}
