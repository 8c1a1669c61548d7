//! Tasks in flight: the one place where tries, losses and backoff are counted, for both machines.
//!
//! ```text
//! (none) --started--> Running --succeeded------------> (none)
//!                      |  ^  \--failed, last error---> (none)
//!                      |  |
//!                      |  +--started--- Waiting (for its retry timer)
//!                      +--failed, retry----^
//! Running --taken over--> Lost --started--> Running      (uncounted, at most MAX_LOSSES times without progress)
//! ```

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::task::{Dispatch, ErrorClass, MAX_LOSSES, Output, Task, TaskError, TaskKind, Timer};
use crate::{Attempt, SandboxId, Timestamp};

/// What a task is for; at most one is in flight for each.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Slot {
    /// What the machine's phase is about.
    Main,
    /// Verify on the base, beside the forks.
    BaseCheck,
    Destroy(SandboxId),
}

/// What happened to a task. Both machines record these under their own category.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TaskEvent {
    Started {
        slot: Slot,
        serial: u64,
        attempt: Attempt,
        task: Task,
    },
    Succeeded {
        serial: u64,
        output: Output,
    },
    /// `retry_at` is None when it was the last try.
    Failed {
        serial: u64,
        error: TaskError,
        retry_at: Option<Timestamp>,
    },
    /// It was asked to stop.
    Stopping {
        serial: u64,
    },
}

#[derive(Debug, Clone, PartialEq)]
pub enum State {
    Running {
        serial: u64,
        attempt: Attempt,
        stopping: bool,
    },
    Waiting {
        serial: u64,
        until: Timestamp,
    },
    /// Its driver is gone: to be started again.
    Lost,
}

/// What a change of drivers says of the tasks that were in flight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Loss {
    /// The driver let go on purpose.
    Uncounted,
    /// Something happened since the last loss.
    AfterProgress,
    Counted,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Entry {
    pub task: Task,
    pub errors: u32,
    pub losses: u32,
    pub state: State,
}

#[derive(Debug, Clone, Default, PartialEq)]
pub struct Pending {
    last_serial: u64,
    slots: BTreeMap<Slot, Entry>,
}

impl Pending {
    pub fn get(&self, slot: &Slot) -> Option<&Entry> {
        self.slots.get(slot)
    }
    pub fn iter(&self) -> impl Iterator<Item = (&Slot, &Entry)> {
        self.slots.iter()
    }
    pub fn next_serial(&self) -> u64 {
        self.last_serial + 1
    }
    pub fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }

    /// Where a running task with this serial is. An outcome for any other is stale.
    pub fn running(&self, serial: u64) -> Option<(&Slot, &Entry)> {
        self.slots.iter().find(|(_, e)| matches!(e.state, State::Running { serial: s, .. } if s == serial))
    }

    /// The event for an error of a running task: another try, or the end of it.
    pub fn failure(&self, now: Timestamp, serial: u64, error: TaskError) -> Option<TaskEvent> {
        let (_, entry) = self.running(serial)?;
        let retry_at = match error.class {
            ErrorClass::Transient => entry.task.kind().retry().delay(entry.errors + 1).map(|d| now + d),
            ErrorClass::Permanent
            | ErrorClass::SandboxLost
            | ErrorClass::BudgetExceeded
            | ErrorClass::Cancelled => None,
        };
        let stopping = matches!(entry.state, State::Running { stopping: true, .. });
        Some(TaskEvent::Failed { serial, error, retry_at: if stopping { None } else { retry_at } })
    }

    pub fn apply(&mut self, event: &TaskEvent) {
        match event {
            TaskEvent::Started { slot, serial, attempt, task } => {
                self.last_serial = *serial;
                let state = State::Running { serial: *serial, attempt: *attempt, stopping: false };
                let entry = self.slots.entry(slot.clone()).or_insert_with(|| Entry {
                    task: task.clone(),
                    errors: 0,
                    losses: 0,
                    state: State::Lost,
                });
                if entry.task.kind() != task.kind() {
                    (entry.errors, entry.losses) = (0, 0);
                }
                entry.task = task.clone();
                entry.state = state;
            }
            TaskEvent::Succeeded { serial, .. } => self.remove(*serial),
            TaskEvent::Failed { serial, retry_at: None, .. } => self.remove(*serial),
            TaskEvent::Failed { serial, retry_at: Some(until), .. } => {
                if let Some(e) = self.running_mut(*serial) {
                    e.errors += 1;
                    e.state = State::Waiting { serial: *serial, until: *until };
                }
            }
            TaskEvent::Stopping { serial } => {
                if let Some(Entry { state: State::Running { stopping, .. }, .. }) = self.running_mut(*serial)
                {
                    *stopping = true;
                }
            }
        }
    }

    fn running_mut(&mut self, serial: u64) -> Option<&mut Entry> {
        self.slots.values_mut().find(|e| matches!(e.state, State::Running { serial: s, .. } if s == serial))
    }
    fn remove(&mut self, serial: u64) {
        self.slots.retain(|_, e| !matches!(e.state, State::Running { serial: s, .. } if s == serial));
    }
    /// Gives up a task that is not running (waiting for its next try, or lost).
    pub fn abandon(&mut self, slot: &Slot) {
        self.slots.retain(|s, e| s != slot || matches!(e.state, State::Running { .. }));
    }

    /// The driver is gone: what ran is lost. What waits for its next try waits no longer than it would from now on: the new
    /// driver's clock may be behind the one that said until when.
    pub fn lose_all(&mut self, now: Timestamp, loss: Loss) {
        for e in self.slots.values_mut() {
            match &mut e.state {
                State::Running { .. } => {
                    e.losses = match loss {
                        Loss::Uncounted => e.losses,
                        Loss::AfterProgress => 1,
                        Loss::Counted => e.losses + 1,
                    };
                    e.state = State::Lost;
                }
                State::Waiting { until, .. } => {
                    let delay = e.task.kind().retry().delay(e.errors).unwrap_or_default();
                    *until = (*until).min(now + delay);
                }
                State::Lost => {}
            }
        }
    }

    /// A task that was lost too often, and what to say of it.
    pub fn hopeless(&self) -> Option<(Slot, TaskError)> {
        let (slot, e) = self.slots.iter().find(|(_, e)| e.state == State::Lost && e.losses >= MAX_LOSSES)?;
        let what = e.task.kind().as_str();
        let message = format!("{what} was lost with its worker {} times without any progress", e.losses);
        Some((slot.clone(), TaskError::new(ErrorClass::Permanent, message)))
    }

    pub fn timers(&self) -> BTreeMap<Timer, Timestamp> {
        self.slots
            .values()
            .filter_map(|e| match e.state {
                State::Waiting { serial, until } => Some((Timer::Retry(serial), until)),
                State::Running { .. } | State::Lost => None,
            })
            .collect()
    }

    /// The slot that waits for this retry timer, if its time has come.
    pub fn due(&self, serial: u64, now: Timestamp) -> Option<&Slot> {
        self.slots.iter().find_map(|(slot, e)| match e.state {
            State::Waiting { serial: s, until } if s == serial && until <= now => Some(slot),
            State::Waiting { .. } | State::Running { .. } | State::Lost => None,
        })
    }
}

/// The effect of a task event, if it has one.
pub fn dispatch(event: &TaskEvent) -> Option<crate::task::Effect> {
    match event {
        TaskEvent::Started { serial, attempt, task, .. } => Some(crate::task::Effect::Perform(Dispatch {
            serial: *serial,
            attempt: *attempt,
            limit: limit(task.kind()),
            task: task.clone(),
        })),
        TaskEvent::Stopping { serial } => Some(crate::task::Effect::Cancel { serial: *serial }),
        TaskEvent::Succeeded { .. } | TaskEvent::Failed { .. } => None,
    }
}

fn limit(kind: TaskKind) -> crate::Millis {
    kind.retry().limit
}

/// Timers that appeared, moved or went away.
pub fn timer_effects(
    before: &BTreeMap<Timer, Timestamp>,
    after: &BTreeMap<Timer, Timestamp>,
    effects: &mut Vec<crate::task::Effect>,
) {
    for timer in before.keys().filter(|t| !after.contains_key(t)) {
        effects.push(crate::task::Effect::ClearTimer { timer: *timer });
    }
    for (timer, at) in after.iter().filter(|(t, at)| before.get(t) != Some(at)) {
        effects.push(crate::task::Effect::SetTimer { timer: *timer, at: *at });
    }
}
