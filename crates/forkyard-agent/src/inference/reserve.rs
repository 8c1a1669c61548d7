//! Money for one try: reserved, marked as sent, settled. Whatever happens to the task that asked, nothing stays open.

use std::sync::Arc;
use std::time::Duration;

use forkyard_core::Usd;
use forkyard_core::pricing::Usage;
use tokio::time::sleep;

use super::InferenceError;
use crate::ports::{Ask, Grant, Ledger, LedgerError, ReservationId, Sent};

/// A ledger that can't be reached is asked again, for about three seconds in all.
const LEDGER_TRIES: u32 = 6;
const LEDGER_FIRST_DELAY: Duration = Duration::from_millis(100);

/// Repeats what was not reached: every method of a ledger is idempotent.
async fn persist<T, F>(mut operation: impl FnMut() -> F) -> Result<T, InferenceError>
where
    F: Future<Output = Result<T, LedgerError>>,
{
    let mut tries = 1;
    loop {
        match operation().await {
            Ok(value) => return Ok(value),
            Err(LedgerError::Unavailable(_)) if tries < LEDGER_TRIES => {
                sleep(LEDGER_FIRST_DELAY * 2_u32.pow(tries - 1)).await;
                tries += 1;
            }
            Err(e @ (LedgerError::Unavailable(_) | LedgerError::Broken(_))) => {
                return Err(InferenceError::Ledger { message: e.to_string() });
            }
        }
    }
}

pub async fn ask(ledger: &Arc<dyn Ledger>, ask: &Ask) -> Result<Grant, InferenceError> {
    persist(|| ledger.reserve(ask.clone())).await
}

/// An open reservation. Dropped without a word, it is closed in the background: released if it was not sent, else settled at
/// its worst case.
pub struct Reservation {
    ledger: Arc<dyn Ledger>,
    id: ReservationId,
    worst: Usd,
    state: State,
    spent: Spent,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Unsent,
    Sent,
    Closed,
}

/// What a session has spent, lost answers included.
#[derive(Debug, Clone, Default)]
pub struct Spent(Arc<std::sync::Mutex<(Usd, Usage)>>);

impl Spent {
    pub fn get(&self) -> (Usd, Usage) {
        *self.0.lock().unwrap_or_else(|e| e.into_inner())
    }
    fn add(&self, cost: Usd, usage: &Usage) {
        let mut sum = self.0.lock().unwrap_or_else(|e| e.into_inner());
        sum.0 += cost;
        sum.1 += *usage;
    }
}

impl Reservation {
    pub fn new(ledger: Arc<dyn Ledger>, id: ReservationId, worst: Usd, spent: Spent) -> Reservation {
        Reservation { ledger, id, worst, state: State::Unsent, spent }
    }

    /// Before the first byte goes out.
    pub async fn mark_sent(&mut self) -> Result<Sent, InferenceError> {
        // If the ledger's answer is lost the mark may stand; then it is settled as sent by whoever closes the attempt.
        let sent = persist(|| self.ledger.sent(&self.id)).await?;
        if sent == Sent::Go {
            self.state = State::Sent;
        }
        Ok(sent)
    }

    /// The bound is smaller than was thought. Told to the ledger in the background: it only gives room to others.
    pub fn shrink(&mut self, worst: Usd) {
        if worst >= self.worst {
            return;
        }
        self.worst = worst;
        let (ledger, id) = (Arc::clone(&self.ledger), self.id.clone());
        tokio::spawn(async move {
            // Closed already, or not reached: what is reserved is too much, never too little.
            let _ = ledger.shrink(&id, worst).await;
        });
    }

    /// An unsent one.
    pub async fn release(mut self) {
        debug_assert_eq!(self.state, State::Unsent);
        self.state = State::Closed;
        close(Arc::clone(&self.ledger), self.id.clone(), None).await;
    }

    /// What the provider said it cost.
    pub async fn settle(mut self, cost: Usd, usage: &Usage) -> Usd {
        self.state = State::Closed;
        if cost > self.worst {
            tracing::warn!(%cost, worst = %self.worst, "a request cost more than its worst case");
        }
        self.spent.add(cost, usage);
        close(Arc::clone(&self.ledger), self.id.clone(), Some((cost, *usage))).await;
        cost
    }

    /// The answer was lost.
    pub async fn settle_at_worst(self) -> Usd {
        let worst = self.worst;
        self.settle(worst, &Usage::default()).await
    }
}

/// Runs to its end even if the one who waits for it goes away. If the ledger stays out of reach the reservation stays open there at
/// its worst case, until the attempt is closed.
async fn close(ledger: Arc<dyn Ledger>, id: ReservationId, settled: Option<(Usd, Usage)>) {
    let task = tokio::spawn(async move {
        let closed = match &settled {
            Some((cost, usage)) => persist(|| ledger.settle(&id, *cost, usage)).await,
            None => persist(|| ledger.release(&id)).await,
        };
        if let Err(error) = closed {
            tracing::warn!(%error, request = %id.0, "a reservation could not be closed");
        }
    });
    // Fails only when the runtime shuts down.
    let _ = task.await;
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let settled = match self.state {
            State::Closed => return,
            State::Unsent => None,
            State::Sent => {
                self.spent.add(self.worst, &Usage::default());
                Some((self.worst, Usage::default()))
            }
        };
        // Without a runtime the process ends, and the attempt's successor closes what it left open.
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(close(Arc::clone(&self.ledger), self.id.clone(), settled));
        }
    }
}
