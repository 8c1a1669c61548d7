//! One limiter for all forks: a provider's limits hold for the account, so one fork's 429 slows everybody.
//!
//! A gate that is closed until a moment (retry-after, or a limit that headers say is used up), and a number of requests that may
//! run at once: halved by each pushback, grown by one with each answer.

use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};

/// As many as a run may have forks.
const MAX_IN_FLIGHT: usize = 100;
/// Pushbacks of requests that were under way together count once.
const ONE_PUSHBACK: Duration = Duration::from_millis(500);
/// A gate never closes longer than this: the next request would learn the truth.
pub const MAX_CLOSED: Duration = Duration::from_secs(600);

#[derive(Debug)]
pub struct Limiter {
    state: Mutex<State>,
    freed: Notify,
}

#[derive(Debug)]
struct State {
    closed_until: Option<Instant>,
    last_pushback: Option<Instant>,
    in_flight: usize,
    window: usize,
}

impl Default for Limiter {
    fn default() -> Limiter {
        let state = State { closed_until: None, last_pushback: None, in_flight: 0, window: MAX_IN_FLIGHT };
        Limiter { state: Mutex::new(state), freed: Notify::new() }
    }
}

impl Limiter {
    fn state(&self) -> MutexGuard<'_, State> {
        // Nothing that holds the lock can panic half-way.
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// How long the gate stays closed, for a notice.
    pub fn closed_for(&self) -> Option<Duration> {
        let left = self.state().closed_until?.checked_duration_since(Instant::now())?;
        (left > Duration::ZERO).then_some(left)
    }

    pub fn pressure(&self) -> Pressure {
        let state = self.state();
        let now = Instant::now();
        let closed_for = state.closed_until.map_or(Duration::ZERO, |t| t.saturating_duration_since(now));
        Pressure { in_flight: state.in_flight, window: state.window, closed_for }
    }

    /// Waits for the right to send one request.
    pub async fn acquire(self: &Arc<Self>) -> Permit {
        loop {
            let wait_until = {
                let mut state = self.state();
                match state.closed_until.filter(|t| *t > Instant::now()) {
                    Some(t) => Some(t),
                    None if state.in_flight < state.window => {
                        state.in_flight += 1;
                        return Permit { limiter: Arc::clone(self) };
                    }
                    None => None,
                }
            };
            match wait_until {
                Some(t) => sleep_until(t).await,
                // A permit that is freed before this waits is kept by the Notify.
                None => self.freed.notified().await,
            }
        }
    }

    /// The provider said: slower.
    pub fn pushback(&self, delay: Duration) {
        let now = Instant::now();
        let mut state = self.state();
        if state.last_pushback.is_none_or(|t| now.duration_since(t) > ONE_PUSHBACK) {
            state.window = (state.window.min(state.in_flight.max(1)) / 2).max(1);
            state.last_pushback = Some(now);
        }
        state.close(now + delay.min(MAX_CLOSED));
    }

    /// The provider's headers say that a limit is used up.
    pub fn close_for(&self, delay: Duration) {
        self.state().close(Instant::now() + delay.min(MAX_CLOSED));
    }

    /// The provider answered.
    pub fn answered(&self) {
        let mut state = self.state();
        if state.window < MAX_IN_FLIGHT {
            state.window += 1;
            self.freed.notify_one();
        }
    }

    #[cfg(test)]
    fn in_flight(&self) -> usize {
        self.state().in_flight
    }
}

/// How a provider takes what is asked of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pressure {
    pub in_flight: usize,
    /// Requests that may be under way at once.
    pub window: usize,
    /// No request is sent for so long.
    pub closed_for: Duration,
}

impl State {
    fn close(&mut self, until: Instant) {
        self.closed_until = Some(self.closed_until.map_or(until, |t| t.max(until)));
    }
}

/// The right to have one request under way.
#[derive(Debug)]
pub struct Permit {
    limiter: Arc<Limiter>,
}

impl Drop for Permit {
    fn drop(&mut self) {
        let mut state = self.limiter.state();
        state.in_flight -= 1;
        let room = state.in_flight < state.window;
        drop(state);
        if room {
            self.limiter.freed.notify_one();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::FutureExt;

    #[tokio::test]
    async fn a_pushback_closes_the_gate_for_everybody_and_halves_the_window() {
        let limiter = Arc::new(Limiter::default());
        let permits: Vec<Permit> = futures::future::join_all((0..8).map(|_| limiter.acquire())).await;
        let start = Instant::now();
        limiter.pushback(Duration::from_millis(30));
        limiter.pushback(Duration::from_millis(20));
        let pressure = limiter.pressure();
        assert_eq!((pressure.in_flight, pressure.window), (8, 4));
        drop(permits);
        let mut held = vec![limiter.acquire().await];
        assert!(start.elapsed() >= Duration::from_millis(30), "never earlier than asked");
        for _ in 0..3 {
            held.push(limiter.acquire().now_or_never().expect("8 were under way, so 4 may be"));
        }
        assert!(limiter.acquire().now_or_never().is_none());
        held.pop();
        assert!(limiter.acquire().now_or_never().is_some());
    }

    #[tokio::test]
    async fn answers_open_the_window_again() {
        let limiter = Arc::new(Limiter::default());
        limiter.pushback(Duration::ZERO);
        let first = limiter.acquire().await;
        assert!(limiter.acquire().now_or_never().is_none());
        limiter.answered();
        let second = limiter.acquire().await;
        drop((first, second));
        assert_eq!(limiter.in_flight(), 0);
    }

    #[tokio::test]
    async fn waiters_get_freed_permits_one_by_one() {
        let limiter = Arc::new(Limiter::default());
        limiter.pushback(Duration::ZERO);
        let first = limiter.acquire().await;
        let waiters: Vec<_> = (0..20)
            .map(|_| {
                let limiter = Arc::clone(&limiter);
                tokio::spawn(async move { drop(limiter.acquire().await) })
            })
            .collect();
        tokio::task::yield_now().await;
        drop(first);
        for waiter in waiters {
            waiter.await.unwrap();
        }
        assert_eq!(limiter.in_flight(), 0);
    }
}
