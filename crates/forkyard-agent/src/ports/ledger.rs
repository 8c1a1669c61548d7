//! Where money is set aside before it is spent.
//!
//! A reservation's life: `reserve` (open, unsent) → `sent` (may have cost its worst case) → `settle` (its real cost, or the worst
//! case if the answer was lost). Only an unsent one may be `release`d. At every moment
//! settled costs + open reservations ≤ budget, across all forks, subagents, retries and processes of a run; so the sum of what
//! the provider bills can't exceed the budget either.

use async_trait::async_trait;
use forkyard_core::Usd;
use forkyard_core::pricing::Usage;
use futures::future::BoxFuture;

/// The ledger of one attempt of one fork, over the budget of its run.
#[async_trait]
pub trait Ledger: Send + Sync {
    /// Whether any limit applies. Without one a model needs no price.
    fn limited(&self) -> bool;

    /// Sets `ask.worst` aside, whole or not at all. Idempotent by `ask.request`: the same ask twice is one reservation.
    async fn reserve(&self, ask: Ask) -> Result<Grant, LedgerError>;

    /// The request's bytes may go out from now on. After anything but [`Sent::Go`] they must not, and the reservation is
    /// released by the caller.
    async fn sent(&self, id: &ReservationId) -> Result<Sent, LedgerError>;

    /// The worst case turned out smaller (the provider reported the input). Never grows a reservation.
    async fn shrink(&self, id: &ReservationId, worst: Usd) -> Result<(), LedgerError>;

    /// Closes it at its real cost. A lost answer is settled at the worst case. Idempotent: the first settlement counts.
    async fn settle(&self, id: &ReservationId, cost: Usd, usage: &Usage) -> Result<(), LedgerError>;

    /// Frees an unsent reservation.
    async fn release(&self, id: &ReservationId) -> Result<(), LedgerError>;

    /// Resolves once anything may have changed since this call (not since it is polled): a settlement, a release, a new limit,
    /// pause, resume, cancel. Call it before `reserve`, await it if that grants nothing. May resolve early; never misses.
    fn changed(&self) -> BoxFuture<'static, ()>;
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ask {
    /// Unique for each request that is sent: also a retry asks under a key of its own.
    pub request: String,
    pub worst: Usd,
    /// Worst case of the smallest request that would still be useful.
    pub smallest: Usd,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ReservationId(pub String);

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Grant {
    Granted {
        id: ReservationId,
    },
    /// Not enough is left. `outstanding`: others' reservations are open, so that more may come back.
    Short {
        available: Usd,
        outstanding: bool,
    },
    /// The run is paused: nothing may be sent.
    Paused,
    /// A newer attempt owns the fork.
    Stale,
    Cancelled,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sent {
    Go,
    Paused,
    Stale,
    Cancelled,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LedgerError {
    /// Try again: the store was not reached, and whether it acted is unknown. Every method is idempotent.
    #[error("not reached: {0}")]
    Unavailable(String),
    #[error("{0}")]
    Broken(String),
}
