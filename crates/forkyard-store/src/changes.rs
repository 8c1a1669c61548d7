//! Which runs changed, for whoever follows all of them.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use forkyard_core::RunId;
use tokio::sync::Notify;

/// Runs that are named to a follower who is away; when more have changed, only that is said.
const MAX_NAMED: usize = 1000;

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Changed {
    /// These, and no others. They may be gone, or as they were.
    Runs(BTreeSet<RunId>),
    /// Nobody knows which.
    Any,
}

#[derive(Debug, Default)]
struct Heard {
    changed: Mutex<Option<Changed>>,
    some: Notify,
}

impl Heard {
    fn lock(&self) -> MutexGuard<'_, Option<Changed>> {
        self.changed.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// See [`crate::Views::changes`].
#[derive(Debug)]
pub struct Changes(Arc<Heard>);

impl Changes {
    /// All that changed since it was asked last; waits for something. May be dropped while it waits.
    pub async fn next(&mut self) -> Changed {
        loop {
            if let Some(changed) = self.0.lock().take() {
                return changed;
            }
            // Keeps one permit, so what is told between the two is not missed.
            self.0.some.notified().await;
        }
    }
}

/// Those who follow all runs of a store.
#[derive(Debug, Default)]
pub struct Followers(Mutex<Vec<Weak<Heard>>>);

impl Followers {
    fn lock(&self) -> MutexGuard<'_, Vec<Weak<Heard>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
    pub fn follow(&self) -> Changes {
        let heard = Arc::new(Heard::default());
        self.lock().push(Arc::downgrade(&heard));
        Changes(heard)
    }
    pub fn is_empty(&self) -> bool {
        let mut followers = self.lock();
        followers.retain(|f| f.strong_count() > 0);
        followers.is_empty()
    }
    pub fn tell(&self, run: &RunId) {
        self.each(|changed| match changed {
            Some(Changed::Any) => {}
            Some(Changed::Runs(runs)) if runs.contains(run) => {}
            Some(Changed::Runs(runs)) if runs.len() >= MAX_NAMED => *changed = Some(Changed::Any),
            Some(Changed::Runs(runs)) => {
                runs.insert(run.clone());
            }
            None => *changed = Some(Changed::Runs(BTreeSet::from([run.clone()]))),
        });
    }
    /// Something may have changed, and nobody knows what.
    pub fn tell_any(&self) {
        self.each(|changed| *changed = Some(Changed::Any));
    }
    fn each(&self, mut change: impl FnMut(&mut Option<Changed>)) {
        for follower in self.lock().iter().filter_map(Weak::upgrade) {
            change(&mut follower.lock());
            follower.some.notify_one();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn more_than_can_be_named_is_anything() {
        let followers = Followers::default();
        let mut changes = followers.follow();
        let run = |i: usize| RunId::new(format!("r{i}")).unwrap();
        for i in [1, 2, 1] {
            followers.tell(&run(i));
        }
        assert_eq!(changes.next().await, Changed::Runs([run(1), run(2)].into()));
        for i in 0..=MAX_NAMED {
            followers.tell(&run(i));
        }
        assert_eq!(changes.next().await, Changed::Any);
        followers.tell(&run(7));
        assert_eq!(changes.next().await, Changed::Runs([run(7)].into()));
        assert!(!followers.is_empty());
        drop(changes);
        assert!(followers.is_empty());
    }
}
