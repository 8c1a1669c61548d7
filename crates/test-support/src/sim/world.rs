//! What is outside of Forkyard: sandboxes, a model that bills, refs. Remembers what was done to it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use forkyard_core::{Attempt, ForkNum, HostId, RunId, SandboxId, Timestamp, Usd};

use super::Bug;

/// How often things go wrong, in percent.
#[derive(Debug, Clone, Default)]
pub struct Faults {
    pub transient: u32,
    pub permanent: u32,
    pub sandbox_lost: u32,
    pub store_before: u32,
    pub store_after: u32,
    pub crash: u32,
    pub slow: u32,
    /// A task is performed twice in a row: idempotent means that nobody can tell.
    pub repeat: u32,
}

#[derive(Debug, Clone)]
pub struct SimSandbox {
    pub run: RunId,
    pub alive: bool,
    pub attempt: Attempt,
    pub created_at: Timestamp,
    /// Made by a process that did not know that it had been destroyed: the sweep's business.
    pub zombie: bool,
    /// The agent's commands that ran here, in order, with how often each did.
    pub ran: Vec<(String, u32)>,
}

#[derive(Default)]
pub struct State {
    pub sandboxes: BTreeMap<SandboxId, SimSandbox>,
    /// Ids that somebody was told are destroyed.
    pub destroyed: BTreeSet<SandboxId>,
    /// The last checkpoint of each fork: what had run then.
    pub checkpoints: BTreeMap<(RunId, ForkNum), Vec<(String, u32)>>,
    pub billed: BTreeMap<RunId, Usd>,
    pub published: BTreeMap<(RunId, ForkNum), u32>,
    pub violations: Vec<String>,
}

pub struct World {
    state: Mutex<State>,
    rng: Mutex<fastrand::Rng>,
    pub bug: Option<Bug>,
    faults: Mutex<Faults>,
}

impl World {
    pub fn new(seed: u64, bug: Option<Bug>, faults: Faults) -> World {
        let rng = Mutex::new(fastrand::Rng::with_seed(seed ^ 0x5eed));
        World { state: Mutex::default(), rng, bug, faults: Mutex::new(faults) }
    }
    pub fn host(&self) -> HostId {
        HostId::new("simhost").expect("a valid id")
    }
    pub fn with<T>(&self, f: impl FnOnce(&mut State) -> T) -> T {
        f(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner))
    }
    pub fn faults(&self) -> Faults {
        self.faults.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
    /// From now on nothing goes wrong.
    pub fn be_kind(&self) {
        *self.faults.lock().unwrap_or_else(PoisonError::into_inner) = Faults::default();
    }
    pub fn chance(&self, percent: u32) -> bool {
        percent > 0 && self.below(100) < u64::from(percent)
    }
    pub fn below(&self, n: u64) -> u64 {
        self.rng.lock().unwrap_or_else(PoisonError::into_inner).u64(0..n.max(1))
    }
    /// Time that something takes.
    pub async fn take_time(&self, up_to_ms: u64) {
        let slow = if self.chance(self.faults().slow) { 100 } else { 1 };
        tokio::time::sleep(Duration::from_millis(self.below(up_to_ms) * slow + 1)).await;
    }
    pub fn violation(&self, what: String) {
        self.with(|s| s.violations.push(what));
    }
}
