//! The life of one reservation as every store writes it: which step is allowed, and what it does to the sums.
//! Steps can be repeated, because a caller whose answer was lost asks again.

use forkyard_core::budget::{Ask, ReservationState};
use forkyard_core::{Attempt, ForkNum, RunId, Usd};

use crate::codec::int;
use crate::{Result, Sending, StoreError};

pub(crate) const RESERVED: i64 = 0;
pub(crate) const SENT: i64 = 1;
pub(crate) const SETTLED: i64 = 2;
pub(crate) const RELEASED: i64 = 3;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Held {
    pub fork: ForkNum,
    pub attempt: Attempt,
    pub amount: Usd,
    pub state: ReservationState,
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum Step {
    Sent,
    Shrink(Usd),
    Settle(Usd),
    Release,
}

/// What a step adds to the sums.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Change {
    pub reserved: i64,
    pub spent: i64,
}

pub(crate) fn state(column: i64) -> Result<ReservationState> {
    match column {
        RESERVED => Ok(ReservationState::Reserved),
        SENT => Ok(ReservationState::Sent),
        SETTLED => Ok(ReservationState::Settled),
        RELEASED => Ok(ReservationState::Released),
        other => Err(crate::codec::corrupt("a reservation's state", &other.to_string())),
    }
}

pub(crate) fn column(state: ReservationState) -> i64 {
    match state {
        ReservationState::Reserved => RESERVED,
        ReservationState::Sent => SENT,
        ReservationState::Settled => SETTLED,
        ReservationState::Released => RELEASED,
    }
}

pub(crate) fn unknown(run: &RunId, request: &str) -> StoreError {
    StoreError::NotFound { what: format!("reservation {request:?} of run {run}") }
}

fn closed(request: &str) -> StoreError {
    StoreError::Invalid(format!("reservation {request:?} is closed already"))
}

/// The request was asked for before. True: it still has its money. False: it was given back, so this is a new ask. One
/// that was paid for can't be asked for again.
pub(crate) fn again(held: &Held, ask: &Ask) -> Result<bool> {
    match held.state {
        ReservationState::Reserved | ReservationState::Sent if held.fork == ask.fork => Ok(true),
        ReservationState::Released => Ok(false),
        ReservationState::Reserved | ReservationState::Sent => {
            Err(StoreError::Invalid(format!("request {:?} belongs to fork {}", ask.request, held.fork)))
        }
        ReservationState::Settled => Err(closed(&ask.request)),
    }
}

/// What the ledger has to know of a fork.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Owner {
    pub attempt: Attempt,
    pub ended: bool,
}

impl Owner {
    /// The attempt that owns the fork, if it is not this one.
    pub(crate) fn fences(&self, mine: Attempt) -> Result<Option<Attempt>> {
        if self.ended {
            return Ok(Some(self.attempt));
        }
        match crate::codec::fence(mine, self.attempt) {
            Ok(()) => Ok(None),
            Err(StoreError::StaleAttempt { current, .. }) => Ok(Some(current)),
            Err(other) => Err(other),
        }
    }
}

impl Held {
    /// Whether the request may leave now. Go: [`Step::Sent`] follows.
    pub(crate) fn may_send(&self, owner: Owner, paused: bool) -> Result<Sending> {
        Ok(match owner.fences(self.attempt)? {
            Some(current) => Sending::Stale { current },
            None if paused => Sending::Paused,
            None => Sending::Go,
        })
    }

    /// None if nothing changes.
    pub(crate) fn step(&self, step: Step, request: &str) -> Result<Option<(Held, Change)>> {
        use ReservationState::{Released, Reserved, Sent, Settled};
        let amount = int(self.amount.0);
        let to = |state, new: Usd, reserved, spent| {
            let after = Held { state, amount: new, ..self.clone() };
            Ok((after != *self).then_some((after, Change { reserved, spent })))
        };
        match (step, self.state) {
            (Step::Sent, Reserved | Sent) => to(Sent, self.amount, 0, 0),
            (Step::Shrink(worst), Reserved | Sent) => {
                let new = self.amount.min(worst);
                to(self.state, new, int(new.0) - amount, 0)
            }
            (Step::Settle(cost), Reserved | Sent) => to(Settled, cost, -amount, int(cost.0)),
            (Step::Settle(cost), Settled) if cost == self.amount => Ok(None),
            (Step::Release, Reserved) => to(Released, self.amount, -amount, 0),
            // It may have been sent: it costs its worst case.
            (Step::Release, Sent) => to(Settled, self.amount, -amount, amount),
            (Step::Release, Settled | Released) => Ok(None),
            (Step::Sent | Step::Shrink(_) | Step::Settle(_), Settled | Released) => Err(closed(request)),
        }
    }
}

#[cfg(test)]
mod tests {
    use forkyard_core::budget::{BudgetLimits, Ledger};

    use super::*;

    /// The running sums of any history are those of the pure ledger.
    #[test]
    fn steps_agree_with_the_pure_ledger() {
        let steps = [Step::Sent, Step::Shrink(Usd(30)), Step::Settle(Usd(20)), Step::Release];
        for history in 0..4_usize.pow(4) {
            let ask = Ask { fork: 0, attempt: Attempt(1), request: "r".into(), worst: Usd(50) };
            let mut ledger = Ledger::new(BudgetLimits::default());
            ledger.reserve(ask);
            let mut held =
                Held { fork: 0, attempt: Attempt(1), amount: Usd(50), state: ReservationState::Reserved };
            let mut sums = (50, 0);
            for digit in 0..4 {
                let step = steps[history / 4_usize.pow(digit) % 4];
                let pure = match step {
                    Step::Sent => ledger.sent("r"),
                    Step::Shrink(worst) => ledger.shrink("r", worst),
                    Step::Settle(cost) => ledger.settle("r", cost),
                    Step::Release => ledger.release("r"),
                };
                match held.step(step, "r") {
                    Ok(Some((after, change))) => {
                        pure.unwrap();
                        held = after;
                        sums = (sums.0 + change.reserved, sums.1 + change.spent);
                    }
                    // A repetition: the pure ledger may call it closed, but nothing changes.
                    Ok(None) => {}
                    Err(_) => assert!(pure.is_err(), "{history}: {step:?} of {held:?}"),
                }
                let balance = ledger.balance();
                assert_eq!(
                    (usd(sums.0), usd(sums.1)),
                    (balance.reserved, balance.spent),
                    "{history}: {step:?}"
                );
            }
        }
    }

    fn usd(n: i64) -> Usd {
        Usd(u64::try_from(n).unwrap())
    }
}
