//! Points that the fork can go back to: made after turns that changed files, a bounded number of them kept.

use std::collections::BTreeMap;

use super::{Halt, Session};
use crate::conversation::checkpoints;
use crate::event::{AgentEvent, JournalEntry};
use crate::outcome::AgentError;
use crate::ports::{CheckpointError, CheckpointInfo};

/// What there is, oldest first, and what has to go.
#[derive(Debug, Default)]
pub(crate) struct Held {
    kept: Vec<CheckpointInfo>,
    /// Dropped by an entry that may not be durable yet: removed once it is.
    dropped: Vec<CheckpointInfo>,
}

impl Held {
    /// Of a fork's journal: what no longer holds, after a loss or a crash before it was removed, goes with the next one.
    pub fn of(entries: &[JournalEntry]) -> Held {
        let kept: Vec<CheckpointInfo> = checkpoints(entries).into_iter().map(|(_, c)| c.clone()).collect();
        let made: BTreeMap<&str, &CheckpointInfo> = entries
            .iter()
            .filter_map(|e| match &e.event {
                AgentEvent::CheckpointCreated { checkpoint, .. } => {
                    Some((checkpoint.id.as_str(), checkpoint))
                }
                _ => None,
            })
            .collect();
        let gone = |id: &str| !kept.iter().any(|c| c.id == id);
        let dropped = made.into_iter().filter(|(id, _)| gone(id)).map(|(_, c)| c.clone()).collect();
        Held { kept, dropped }
    }

    /// Takes a new one in and says which older ones it displaces.
    fn add(&mut self, checkpoint: CheckpointInfo, keep: usize) -> Vec<String> {
        self.kept.retain(|older| older.id != checkpoint.id);
        self.kept.push(checkpoint);
        let surplus = self.kept.len().saturating_sub(keep);
        let displaced: Vec<CheckpointInfo> = self.kept.drain(..surplus).collect();
        let ids = displaced.iter().map(|c| c.id.clone()).collect();
        self.dropped.extend(displaced);
        ids
    }
}

impl Session {
    /// One that can't be made is told, and the work goes on: the next one may work.
    pub(super) async fn checkpoint(&self, turn: u32) -> Result<(), Halt> {
        let keep = self.config.keep_checkpoints as usize;
        let Some(port) = self.checkpoints.as_ref().filter(|_| keep > 0) else { return Ok(()) };
        let position = self.recorder.flush().await?;
        let mut held = self.held.lock().await;
        for old in std::mem::take(&mut held.dropped) {
            if let Err(e) = self.bounded(port.remove(&old)).await? {
                tracing::debug!(id = old.id, "an old checkpoint was not removed: {e}");
            }
        }
        let event = match self.bounded(port.make(turn, position)).await? {
            Ok(checkpoint) => {
                let dropped = held.add(checkpoint.clone(), keep);
                AgentEvent::CheckpointCreated { turn, position, checkpoint, dropped }
            }
            Err(CheckpointError::Failed(e)) => {
                AgentEvent::Error { turn, error: format!("no checkpoint: {e}") }
            }
            Err(CheckpointError::Stale) => return Err(AgentError::Stale.into()),
        };
        self.recorder.push(None, event, &[]).await;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_are_kept() {
        let made = |n: u32| CheckpointInfo {
            id: format!("c{n}"),
            kind: crate::ports::CheckpointKind::Work,
            snapshot: None,
            at: forkyard_core::Timestamp(0),
        };
        let mut held = Held::default();
        let displaced: Vec<Vec<String>> = (1..=4).map(|n| held.add(made(n), 2)).collect();
        assert_eq!(displaced, [vec![], vec![], vec!["c1".to_string()], vec!["c2".to_string()]]);
        assert!(held.add(made(4), 2).is_empty(), "made again by another attempt");
        assert_eq!(held.add(made(5), 1), ["c3", "c4"], "fewer are kept from now on");
        assert_eq!(held.kept, [made(5)]);
        assert_eq!(held.dropped, [1, 2, 3, 4].map(made));
    }
}
