//! Forks that start together share a prefix, but a provider's cache has it only once the first request is being answered.
//! The first one of a prefix goes ahead; the others wait for the beginning of its answer, for a bounded time, and then read what
//! it wrote instead of writing it N times.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, timeout};

/// How long a cache entry is taken to live: the provider's shortest, less some.
const WARM_FOR: Duration = Duration::from_secs(240);
/// Waiting longer than this for somebody else's first byte costs more than a cache miss.
const MAX_WAIT: Duration = Duration::from_secs(30);
/// Prefixes that are remembered; a process drives a handful of runs.
const MAX_PREFIXES: usize = 1024;

#[derive(Debug)]
pub struct WarmPrefixes {
    prefixes: Mutex<HashMap<u64, Prefix>>,
    warm_for: Duration,
    max_wait: Duration,
}

impl Default for WarmPrefixes {
    fn default() -> WarmPrefixes {
        WarmPrefixes { prefixes: Mutex::default(), warm_for: WARM_FOR, max_wait: MAX_WAIT }
    }
}

#[derive(Debug)]
enum Prefix {
    Warming(watch::Receiver<()>),
    WarmUntil(Instant),
}

enum Next {
    Go,
    Lead(watch::Sender<()>),
    Wait(watch::Receiver<()>),
}

impl WarmPrefixes {
    fn lock(&self) -> MutexGuard<'_, HashMap<u64, Prefix>> {
        self.prefixes.lock().unwrap_or_else(|e| e.into_inner())
    }

    fn next(&self, key: u64) -> Next {
        let mut prefixes = self.lock();
        if prefixes.len() >= MAX_PREFIXES {
            let now = Instant::now();
            prefixes.retain(|_, p| match p {
                Prefix::Warming(_) => true,
                Prefix::WarmUntil(t) => *t > now,
            });
        }
        match prefixes.get(&key) {
            Some(Prefix::WarmUntil(t)) if *t > Instant::now() => return Next::Go,
            Some(Prefix::Warming(leader)) if leader.has_changed().is_ok() => {
                return Next::Wait(leader.clone());
            }
            Some(_) | None => {}
        }
        let (leader, follower) = watch::channel(());
        prefixes.insert(key, Prefix::Warming(follower));
        Next::Lead(leader)
    }

    /// Returns when a request with this prefix should be sent. If it leads, the others wait until the guard is dropped: when the
    /// answer has begun ([`WarmPrefixes::warmed`]) or will not.
    pub async fn enter(&self, key: u64) -> Option<Leader> {
        let deadline = Instant::now() + self.max_wait;
        loop {
            match self.next(key) {
                Next::Go => return None,
                Next::Lead(sender) => return Some(Leader { _sender: sender }),
                Next::Wait(mut leader) => {
                    let left = deadline.saturating_duration_since(Instant::now());
                    // An error means that the leader is gone: somebody leads anew, or it is warm.
                    if timeout(left, leader.changed()).await.is_err() {
                        return None;
                    }
                }
            }
        }
    }

    /// Any answer that began has refreshed the entry.
    pub fn warmed(&self, key: u64) {
        self.lock().insert(key, Prefix::WarmUntil(Instant::now() + self.warm_for));
    }
}

/// The one that goes ahead. Dropping it lets the others go: one of them leads if the prefix is not warm by then.
#[derive(Debug)]
pub struct Leader {
    _sender: watch::Sender<()>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::FutureExt;

    #[tokio::test]
    async fn one_leads_and_the_others_follow_once_it_is_warm() {
        let warm = WarmPrefixes::default();
        let leader = warm.enter(1).await.expect("the first one leads");
        assert!(warm.enter(2).await.is_some(), "another prefix does not wait");
        let mut follower = Box::pin(warm.enter(1));
        assert!(follower.as_mut().now_or_never().is_none());
        warm.warmed(1);
        drop(leader);
        assert!(follower.await.is_none());
        assert!(warm.enter(1).await.is_none(), "still warm");
    }

    #[tokio::test]
    async fn what_is_cold_is_led_again() {
        let warm = WarmPrefixes { warm_for: Duration::ZERO, ..WarmPrefixes::default() };
        warm.warmed(1);
        assert!(warm.enter(1).await.is_some());
    }

    #[tokio::test]
    async fn a_leader_that_fails_is_followed_by_another_leader_and_nobody_waits_for_ever() {
        let warm = WarmPrefixes { max_wait: Duration::from_millis(20), ..WarmPrefixes::default() };
        let leader = warm.enter(1).await.unwrap();
        let mut follower = Box::pin(warm.enter(1));
        assert!(follower.as_mut().now_or_never().is_none());
        drop(leader);
        let second = follower.await.expect("now it leads");
        assert!(warm.enter(1).await.is_none(), "goes on without it");
        drop(second);
    }
}
