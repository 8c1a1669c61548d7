//! The timers of one run's machines.

use std::collections::BTreeMap;

use forkyard_core::task::Timer;
use forkyard_core::{ForkNum, Timestamp};

/// Whose timer, task or input it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Machine {
    Run,
    Fork(ForkNum),
}

#[derive(Default)]
pub struct Timers {
    by_timer: BTreeMap<(Machine, Timer), Timestamp>,
    by_time: BTreeMap<(Timestamp, Machine, Timer), ()>,
}

impl Timers {
    pub fn set(&mut self, machine: Machine, timer: Timer, at: Timestamp) {
        self.clear(machine, timer);
        self.by_timer.insert((machine, timer), at);
        self.by_time.insert((at, machine, timer), ());
    }
    pub fn clear(&mut self, machine: Machine, timer: Timer) {
        if let Some(at) = self.by_timer.remove(&(machine, timer)) {
            self.by_time.remove(&(at, machine, timer));
        }
    }
    pub fn next(&self) -> Option<Timestamp> {
        self.by_time.keys().next().map(|k| k.0)
    }
    pub fn pop_due(&mut self, now: Timestamp) -> Option<(Machine, Timer)> {
        let (at, machine, timer) = *self.by_time.keys().next().filter(|k| k.0 <= now)?;
        self.by_time.remove(&(at, machine, timer));
        self.by_timer.remove(&(machine, timer));
        Some((machine, timer))
    }
}
