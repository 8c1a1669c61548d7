//! The budget ledger as a pure value: money is set aside before it is spent, so N forks spending at once can't overshoot.
//!
//! ```text
//! reserve -> Reserved --sent--> Sent --settle(actual)--> spent
//!               |                 \--attempt lost------> spent at its worst case
//!               \--release / attempt lost (never sent)-> free again
//! ```
//! Invariant: `spent + reserved <= budget`, for the run and for each fork that has a limit of its own. An answer that
//! costs more than its reservation would break it: the surplus is recorded as spent (it was billed), and nothing more
//! is granted.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{Attempt, ForkNum, Usd};

/// What a run may spend.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BudgetLimits {
    /// None: no limit, but still metered.
    pub run: Option<Usd>,
    pub fork: Option<Usd>,
}

/// A wish for money.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ask {
    pub fork: ForkNum,
    pub attempt: Attempt,
    /// Unique in the run; asking twice with the same one is asking once.
    pub request: String,
    pub worst: Usd,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    Granted,
    /// Not enough now. `outstanding`: others hold reservations that may free some.
    Short {
        available: Usd,
        outstanding: bool,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ReservationState {
    Reserved,
    Sent,
    Settled,
    Released,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reservation {
    pub fork: ForkNum,
    pub attempt: Attempt,
    /// While open: set aside. When settled: what it cost.
    pub amount: Usd,
    pub state: ReservationState,
}

/// Sums, for people and for the check before a fork starts.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Balance {
    pub limits: BudgetLimits,
    pub spent: Usd,
    pub reserved: Usd,
    pub forks: BTreeMap<ForkNum, ForkBalance>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ForkBalance {
    pub spent: Usd,
    pub reserved: Usd,
}

impl Balance {
    /// What `fork` could reserve at this moment; None if nothing limits it.
    pub fn available(&self, fork: ForkNum) -> Option<Usd> {
        let of_run = self.limits.run.map(|b| b.saturating_sub(self.spent + self.reserved));
        let f = self.forks.get(&fork).copied().unwrap_or_default();
        let of_fork = self.limits.fork.map(|b| b.saturating_sub(f.spent + f.reserved));
        match (of_run, of_fork) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        }
    }

    fn without_reservations(&self) -> Balance {
        let unreserved =
            |(n, f): (&ForkNum, &ForkBalance)| (*n, ForkBalance { spent: f.spent, reserved: Usd::ZERO });
        Balance { reserved: Usd::ZERO, forks: self.forks.iter().map(unreserved).collect(), ..*self }
    }

    /// The decision for one ask. Stores apply it under their own lock; this is the one place where it is made.
    pub fn judge(&self, fork: ForkNum, worst: Usd) -> Verdict {
        match self.available(fork) {
            Some(available) if worst > available => {
                // Others' reservations are no hope for a fork whose own limit is what binds.
                let if_all_came_back = self.without_reservations().available(fork);
                Verdict::Short { available, outstanding: if_all_came_back > Some(available) }
            }
            _ => Verdict::Granted,
        }
    }

    /// Nothing is left for anybody, and nothing is outstanding that could come back.
    pub fn is_exhausted(&self, fork: ForkNum) -> bool {
        self.reserved == Usd::ZERO && self.available(fork) == Some(Usd::ZERO)
    }
}

/// Spent this far, a limit is warned of once.
const WARN_PERCENT: u64 = 80;

/// A limit that is nearly used up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct NearLimit {
    /// Whose limit it is; None is the run's.
    pub fork: Option<ForkNum>,
    pub spent: Usd,
    pub limit: Usd,
}

impl Balance {
    /// The limits that are used up to 80 % or more. What is only reserved may come back and does not count.
    pub fn near_limits(&self) -> impl Iterator<Item = NearLimit> + '_ {
        let near = |fork, spent: Usd, limit: Option<Usd>| {
            let limit = limit?;
            let reached = u128::from(spent.0) * 100 >= u128::from(limit.0) * u128::from(WARN_PERCENT);
            (reached && spent > Usd::ZERO).then_some(NearLimit { fork, spent, limit })
        };
        let of_forks = self.forks.iter().filter_map(move |(n, f)| near(Some(*n), f.spent, self.limits.fork));
        near(None, self.spent, self.limits.run).into_iter().chain(of_forks)
    }
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LedgerError {
    #[error("no reservation {0:?}")]
    Unknown(String),
    #[error("reservation {0:?} is closed already")]
    Closed(String),
}

/// All reservations of one run.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ledger {
    pub limits: BudgetLimits,
    pub reservations: BTreeMap<String, Reservation>,
}

impl Ledger {
    pub fn new(limits: BudgetLimits) -> Ledger {
        Ledger { limits, reservations: BTreeMap::new() }
    }

    pub fn balance(&self) -> Balance {
        let mut b = Balance { limits: self.limits, ..Default::default() };
        for r in self.reservations.values() {
            let fork = b.forks.entry(r.fork).or_default();
            match r.state {
                ReservationState::Reserved | ReservationState::Sent => {
                    b.reserved += r.amount;
                    fork.reserved += r.amount;
                }
                ReservationState::Settled => {
                    b.spent += r.amount;
                    fork.spent += r.amount;
                }
                ReservationState::Released => {}
            }
        }
        b
    }

    pub fn reserve(&mut self, ask: Ask) -> Verdict {
        if self.reservations.contains_key(&ask.request) {
            return Verdict::Granted;
        }
        let verdict = self.balance().judge(ask.fork, ask.worst);
        if verdict == Verdict::Granted {
            let r = Reservation {
                fork: ask.fork,
                attempt: ask.attempt,
                amount: ask.worst,
                state: ReservationState::Reserved,
            };
            self.reservations.insert(ask.request, r);
        }
        verdict
    }

    fn open(&mut self, request: &str) -> Result<&mut Reservation, LedgerError> {
        let r = self.reservations.get_mut(request).ok_or_else(|| LedgerError::Unknown(request.into()))?;
        match r.state {
            ReservationState::Reserved | ReservationState::Sent => Ok(r),
            ReservationState::Settled | ReservationState::Released => {
                Err(LedgerError::Closed(request.into()))
            }
        }
    }

    /// The request is about to leave: from here on its money is spent unless an answer says otherwise.
    pub fn sent(&mut self, request: &str) -> Result<(), LedgerError> {
        self.open(request)?.state = ReservationState::Sent;
        Ok(())
    }

    /// A better upper bound is known. Never grows a reservation.
    pub fn shrink(&mut self, request: &str, worst: Usd) -> Result<(), LedgerError> {
        let r = self.open(request)?;
        r.amount = r.amount.min(worst);
        Ok(())
    }

    pub fn settle(&mut self, request: &str, cost: Usd) -> Result<(), LedgerError> {
        let r = self.open(request)?;
        r.amount = cost;
        r.state = ReservationState::Settled;
        Ok(())
    }

    /// Only what was never sent can be given back; what was is settled at its worst case.
    pub fn release(&mut self, request: &str) -> Result<(), LedgerError> {
        let r = self.open(request)?;
        r.state = match r.state {
            ReservationState::Sent => ReservationState::Settled,
            ReservationState::Reserved | ReservationState::Settled | ReservationState::Released => {
                ReservationState::Released
            }
        };
        Ok(())
    }

    /// A newer attempt owns the fork: whatever older ones left open is closed.
    pub fn close_attempts_before(&mut self, fork: ForkNum, attempt: Attempt) {
        let lost: Vec<String> = self
            .reservations
            .iter()
            .filter(|(_, r)| r.fork == fork && r.attempt < attempt)
            .map(|(k, _)| k.clone())
            .collect();
        for request in lost {
            // Closed ones stay as they are.
            let _ = self.release(&request);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn ask(fork: ForkNum, attempt: u32, request: &str, worst: u64) -> Ask {
        Ask { fork, attempt: Attempt(attempt), request: request.into(), worst: Usd(worst) }
    }

    #[test]
    fn a_lost_answer_costs_its_worst_case_and_an_unsent_one_nothing() {
        let mut l = Ledger::new(BudgetLimits { run: Some(Usd(100)), fork: None });
        assert_eq!(l.reserve(ask(0, 1, "a", 40)), Verdict::Granted);
        assert_eq!(l.reserve(ask(0, 1, "b", 30)), Verdict::Granted);
        l.sent("a").unwrap();
        assert_eq!(l.reserve(ask(1, 1, "c", 31)), Verdict::Short { available: Usd(30), outstanding: true });
        l.close_attempts_before(0, Attempt(2));
        let b = l.balance();
        assert_eq!((b.spent, b.reserved), (Usd(40), Usd(0)));
        assert_eq!(l.settle("a", Usd(1)), Err(LedgerError::Closed("a".into())));
    }

    #[test]
    fn the_same_request_is_reserved_once() {
        let mut l = Ledger::new(BudgetLimits { run: Some(Usd(50)), fork: None });
        assert_eq!(l.reserve(ask(0, 1, "a", 40)), Verdict::Granted);
        assert_eq!(l.reserve(ask(0, 1, "a", 40)), Verdict::Granted);
        assert_eq!(l.balance().reserved, Usd(40));
    }

    #[test]
    fn only_money_that_can_come_back_to_the_fork_is_outstanding() {
        let mut l = Ledger::new(BudgetLimits { run: Some(Usd(100)), fork: Some(Usd(30)) });
        assert_eq!(l.reserve(ask(0, 1, "a", 20)), Verdict::Granted);
        assert_eq!(l.reserve(ask(1, 1, "b", 31)), Verdict::Short { available: Usd(30), outstanding: false });
        assert_eq!(l.reserve(ask(0, 1, "c", 11)), Verdict::Short { available: Usd(10), outstanding: true });
        l.settle("a", Usd(20)).unwrap();
        assert_eq!(l.reserve(ask(0, 1, "d", 11)), Verdict::Short { available: Usd(10), outstanding: false });
    }

    #[test]
    fn a_zero_budget_grants_only_what_is_free() {
        let mut l = Ledger::new(BudgetLimits { run: Some(Usd(0)), fork: None });
        assert_eq!(l.reserve(ask(0, 1, "a", 1)), Verdict::Short { available: Usd(0), outstanding: false });
        assert_eq!(l.reserve(ask(0, 1, "b", 0)), Verdict::Granted);
    }

    #[test]
    fn limits_are_near_from_eighty_percent_of_what_was_spent() {
        let limits = BudgetLimits { run: Some(Usd(1000)), fork: Some(Usd(100)) };
        let mut l = Ledger::new(limits);
        let near = |l: &Ledger| l.balance().near_limits().map(|n| (n.fork, n.spent.0)).collect::<Vec<_>>();
        l.reserve(ask(0, 1, "a", 100));
        assert_eq!(near(&l), [], "reserved is not spent");
        l.settle("a", Usd(79)).unwrap();
        assert_eq!(near(&l), []);
        l.reserve(ask(0, 1, "b", 1));
        l.settle("b", Usd(1)).unwrap();
        assert_eq!(near(&l), [(Some(0), 80)]);
        for fork in 1..9 {
            l.reserve(ask(fork, 1, &format!("f{fork}"), 90));
            l.settle(&format!("f{fork}"), Usd(90)).unwrap();
        }
        assert_eq!(near(&l).len(), 10, "eight more forks, and the run with 800");
        assert_eq!(near(&l)[0], (None, 800));
        let free = Ledger::new(BudgetLimits { run: Some(Usd(0)), fork: None });
        assert_eq!(near(&free), [], "nothing was spent of nothing");
    }

    proptest! {
        #[test]
        fn spent_and_reserved_never_pass_the_budget(ops in prop::collection::vec((0u8..6, 0u32..3, 0u8..8, 0u64..60), 0..60)) {
            let limits = BudgetLimits { run: Some(Usd(100)), fork: Some(Usd(70)) };
            let mut l = Ledger::new(limits);
            for (op, fork, name, amount) in ops {
                let name = format!("r{name}");
                let bound = l.reservations.get(&name).map_or(Usd(0), |r| r.amount);
                let _ = match op {
                    0 | 1 => { l.reserve(ask(fork, 1, &name, amount)); Ok(()) }
                    2 => l.sent(&name),
                    3 => l.settle(&name, Usd(amount).min(bound)),
                    4 => l.release(&name),
                    _ => { l.close_attempts_before(fork, Attempt(2)); Ok(()) }
                };
                let b = l.balance();
                prop_assert!(b.spent + b.reserved <= Usd(100));
                for f in b.forks.values() {
                    prop_assert!(f.spent + f.reserved <= Usd(70));
                }
            }
        }
    }
}
