//! One session's way to money: a request is admitted once its worst case is reserved, the limiter lets it pass and the ledger has it
//! marked as sent.

use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use async_trait::async_trait;
use forkyard_core::Usd;
use forkyard_core::pricing::{InputKind, ModelFacts, Usage};

use super::estimate::bound_of_count;
use super::limiter::{Limiter, Permit};
use super::reserve::{Reservation, Spent, ask};
use super::{Delta, DeltaSink, InferenceError, Notice};
use crate::ports::{Ask, Grant, Ledger, Sent};

/// What a request may cost, bounded before it is sent.
pub struct Wish<'a> {
    pub facts: Option<&'a ModelFacts>,
    pub kind: InputKind,
    /// The bound on the input, and how it came to be.
    pub input: u64,
    pub bound: Bound,
    /// The most output that is asked for, and the least that is useful.
    pub most: u32,
    pub least: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bound {
    Bytes,
    /// Of the conversation's last answer, plus bytes.
    Reported,
    Counted,
}

impl Wish<'_> {
    pub fn worst(&self, output: u32) -> Usd {
        self.facts.map_or(Usd::ZERO, |f| f.worst_case(self.kind, self.input, u64::from(output)))
    }

    pub fn cost(&self, usage: &Usage) -> Usd {
        self.facts.map_or(Usd::ZERO, |f| f.cost(usage))
    }

    /// The worst case once the input is known by kind.
    pub fn worst_after(&self, reported: &Usage, output: u32) -> Usd {
        self.cost(&Usage { output: u64::from(output).max(reported.output), ..*reported })
    }

    /// At most `most`.
    fn affordable(&self, money: Usd) -> u32 {
        let output = self.facts.map_or(0, |f| f.affordable_output(self.kind, self.input, money));
        u32::try_from(output).unwrap_or(u32::MAX).min(self.most)
    }

    async fn count(&mut self, counter: &dyn Counter) {
        if let Some(counted) = counter.count().await {
            // What the layer knows bounds the input too: the smaller one holds.
            self.input = self.input.min(bound_of_count(counted));
        }
        self.bound = Bound::Counted;
    }
}

/// Asks the provider how many tokens the request has; None where it can't say, or did not.
#[async_trait]
pub trait Counter: Sync {
    async fn count(&self) -> Option<u64>;
}

/// A request that may be sent now.
pub struct Admitted {
    pub reservation: Reservation,
    pub max_tokens: u32,
    pub permit: Permit,
}

pub struct Purse {
    ledger: Arc<dyn Ledger>,
    spent: Spent,
    key: String,
    /// Numbers reservations: one that was released is never asked for again.
    requests: AtomicU64,
}

impl Purse {
    /// `key` begins the name of every reservation; a nonce keeps those of two purses apart that were given the same one.
    pub fn new(ledger: Arc<dyn Ledger>, key: &str) -> Purse {
        let nonce = RandomState::new().hash_one(key);
        Purse {
            ledger,
            spent: Spent::default(),
            key: format!("{key}/{nonce:016x}"),
            requests: AtomicU64::new(0),
        }
    }

    pub fn limited(&self) -> bool {
        self.ledger.limited()
    }

    pub fn spent(&self) -> (Usd, Usage) {
        self.spent.get()
    }

    pub async fn admit(
        &self,
        wish: &mut Wish<'_>,
        counter: &dyn Counter,
        limiter: &Arc<Limiter>,
        deltas: &mut dyn DeltaSink,
    ) -> Result<Admitted, InferenceError> {
        loop {
            let changed = self.ledger.changed();
            let (mut reservation, max_tokens) = self.reserve(wish, counter, deltas).await?;
            if let Some(closed) = limiter.closed_for() {
                let delay_ms = u64::try_from(closed.as_millis()).unwrap_or(u64::MAX);
                deltas.delta(Delta::Notice(&Notice::RateLimited { delay_ms }));
            }
            let permit = limiter.acquire().await;
            match reservation.mark_sent().await? {
                Sent::Go => return Ok(Admitted { reservation, max_tokens, permit }),
                Sent::Stale => return Err(InferenceError::Stale),
                Sent::Cancelled => return Err(InferenceError::Cancelled),
                Sent::Paused => {
                    drop(permit);
                    reservation.release().await;
                    deltas.delta(Delta::Notice(&Notice::WaitingWhilePaused));
                    changed.await;
                }
            }
        }
    }

    /// Sets the worst case aside; waits while others hold the money, then asks for less output, and gives up only when the
    /// smallest useful request does not fit with nothing outstanding.
    async fn reserve(
        &self,
        wish: &mut Wish<'_>,
        counter: &dyn Counter,
        deltas: &mut dyn DeltaSink,
    ) -> Result<(Reservation, u32), InferenceError> {
        let request = format!("{}/{}", self.key, self.requests.fetch_add(1, Ordering::Relaxed));
        let mut max_tokens = wish.most;
        let mut told = None;
        loop {
            let changed = self.ledger.changed();
            let (worst, smallest) = (wish.worst(max_tokens), wish.worst(wish.least));
            match ask(&self.ledger, &Ask { request: request.clone(), worst, smallest }).await? {
                Grant::Granted { id } => {
                    let mut reservation =
                        Reservation::new(Arc::clone(&self.ledger), id, worst, self.spent.clone());
                    // Counted only once money is granted: while a run is paused nothing is sent at all.
                    if wish.bound == Bound::Bytes && self.limited() {
                        wish.count(counter).await;
                        reservation.shrink(wish.worst(max_tokens));
                    }
                    return Ok((reservation, max_tokens));
                }
                Grant::Stale => return Err(InferenceError::Stale),
                Grant::Cancelled => return Err(InferenceError::Cancelled),
                Grant::Paused => {
                    tell(deltas, &mut told, Notice::WaitingWhilePaused);
                    changed.await;
                }
                // A closer bound may be all that is missing.
                Grant::Short { .. } if wish.bound != Bound::Counted => wish.count(counter).await,
                Grant::Short { available, outstanding: true } => {
                    max_tokens = wish.most;
                    let needed = wish.worst(max_tokens);
                    tell(deltas, &mut told, Notice::WaitingForBudget { needed, available });
                    changed.await;
                }
                Grant::Short { available, outstanding: false } => {
                    let affordable = wish.affordable(available);
                    if affordable < wish.least {
                        return Err(InferenceError::BudgetExceeded { needed: smallest, available });
                    }
                    tell(deltas, &mut told, Notice::LoweredMaxTokens { from: wish.most, to: affordable });
                    max_tokens = affordable;
                }
            }
        }
    }
}

/// Once per kind of wait.
fn tell(deltas: &mut dyn DeltaSink, told: &mut Option<Notice>, notice: Notice) {
    if told.as_ref().map(std::mem::discriminant) != Some(std::mem::discriminant(&notice)) {
        deltas.delta(Delta::Notice(&notice));
        *told = Some(notice);
    }
}
