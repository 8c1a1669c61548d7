//! A budget within one process: what runs without a store, and tests, spend by. The decisions are the core's own.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};

use async_trait::async_trait;
use forkyard_core::budget::{self, Balance, BudgetLimits, Verdict};
use forkyard_core::pricing::Usage;
use forkyard_core::{Attempt, ForkNum, Usd};
use futures::future::BoxFuture;
use tokio::sync::watch;

use super::{Ask, Grant, Ledger, LedgerError, ReservationId, Sent};

/// The budget of one run. Clones share it.
#[derive(Debug, Clone)]
pub struct MemoryBudget {
    state: Arc<Mutex<State>>,
    changes: watch::Sender<u64>,
}

#[derive(Debug)]
struct State {
    ledger: budget::Ledger,
    usage: Usage,
    paused: bool,
    cancelled: bool,
    /// The newest attempt that took a fork over.
    attempts: BTreeMap<ForkNum, Attempt>,
}

impl MemoryBudget {
    pub fn new(limits: BudgetLimits) -> MemoryBudget {
        let state = State {
            ledger: budget::Ledger::new(limits),
            usage: Usage::default(),
            paused: false,
            cancelled: false,
            attempts: BTreeMap::new(),
        };
        MemoryBudget { state: Arc::new(Mutex::new(state)), changes: watch::Sender::new(0) }
    }
    pub fn of_run(limit: Usd) -> MemoryBudget {
        MemoryBudget::new(BudgetLimits { run: Some(limit), fork: None })
    }
    pub fn unlimited() -> MemoryBudget {
        MemoryBudget::new(BudgetLimits::default())
    }

    /// The ledger of one attempt of a fork.
    pub fn ledger(&self, fork: ForkNum, attempt: Attempt) -> MemoryLedger {
        MemoryLedger { budget: self.clone(), fork, attempt }
    }

    pub fn balance(&self) -> Balance {
        self.lock().ledger.balance()
    }
    /// Of all answers that were settled with one.
    pub fn usage(&self) -> Usage {
        self.lock().usage
    }
    pub fn set_paused(&self, paused: bool) {
        self.change(|state| state.paused = paused);
    }
    pub fn cancel(&self) {
        self.change(|state| state.cancelled = true);
    }
    /// A newer attempt takes the fork over.
    pub fn take_over(&self, fork: ForkNum, attempt: Attempt) {
        self.change(|state| {
            let newest = state.attempts.entry(fork).or_default();
            *newest = attempt.max(*newest);
            state.ledger.close_attempts_before(fork, attempt);
        });
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }
    fn change<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        let result = change(&mut self.lock());
        self.changes.send_modify(|n| *n += 1);
        result
    }
}

/// One attempt's view of a [`MemoryBudget`].
#[derive(Debug, Clone)]
pub struct MemoryLedger {
    budget: MemoryBudget,
    fork: ForkNum,
    attempt: Attempt,
}

impl State {
    fn is_stale(&self, ledger: &MemoryLedger) -> bool {
        self.attempts.get(&ledger.fork).is_some_and(|newest| *newest > ledger.attempt)
    }
}

fn broken(error: budget::LedgerError) -> LedgerError {
    LedgerError::Broken(error.to_string())
}

#[async_trait]
impl Ledger for MemoryLedger {
    fn limited(&self) -> bool {
        let limits = self.budget.lock().ledger.limits;
        limits.run.is_some() || limits.fork.is_some()
    }

    async fn reserve(&self, ask: Ask) -> Result<Grant, LedgerError> {
        let mut state = self.budget.lock();
        if state.is_stale(self) {
            return Ok(Grant::Stale);
        }
        if state.cancelled {
            return Ok(Grant::Cancelled);
        }
        if state.paused {
            return Ok(Grant::Paused);
        }
        let core_ask = budget::Ask {
            fork: self.fork,
            attempt: self.attempt,
            request: ask.request.clone(),
            worst: ask.worst,
        };
        Ok(match state.ledger.reserve(core_ask) {
            Verdict::Granted => Grant::Granted { id: ReservationId(ask.request) },
            Verdict::Short { available, outstanding } => Grant::Short { available, outstanding },
        })
    }

    async fn sent(&self, id: &ReservationId) -> Result<Sent, LedgerError> {
        let mut state = self.budget.lock();
        if state.is_stale(self) {
            return Ok(Sent::Stale);
        }
        if state.cancelled {
            return Ok(Sent::Cancelled);
        }
        if state.paused {
            return Ok(Sent::Paused);
        }
        state.ledger.sent(&id.0).map(|()| Sent::Go).map_err(broken)
    }

    async fn shrink(&self, id: &ReservationId, worst: Usd) -> Result<(), LedgerError> {
        self.budget.change(|state| state.ledger.shrink(&id.0, worst)).map_err(broken)
    }

    async fn settle(&self, id: &ReservationId, cost: Usd, usage: &Usage) -> Result<(), LedgerError> {
        self.budget.change(|state| match state.ledger.settle(&id.0, cost) {
            Ok(()) => {
                state.usage += *usage;
                Ok(())
            }
            // The first settlement counts.
            Err(budget::LedgerError::Closed(_)) => Ok(()),
            Err(e @ budget::LedgerError::Unknown(_)) => Err(broken(e)),
        })
    }

    async fn release(&self, id: &ReservationId) -> Result<(), LedgerError> {
        self.budget.change(|state| match state.ledger.release(&id.0) {
            Ok(()) | Err(budget::LedgerError::Closed(_)) => Ok(()),
            Err(e @ budget::LedgerError::Unknown(_)) => Err(broken(e)),
        })
    }

    fn changed(&self) -> BoxFuture<'static, ()> {
        let mut changes = self.budget.changes.subscribe();
        let budget = self.budget.clone();
        Box::pin(async move {
            // The sender lives as long as the budget that is held here.
            let _ = changes.changed().await;
            drop(budget);
        })
    }
}
