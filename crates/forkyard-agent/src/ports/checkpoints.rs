//! Points that a fork can be resumed from or forked at.

use async_trait::async_trait;
use forkyard_core::{SnapshotId, Timestamp};
use serde::{Deserialize, Serialize};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CheckpointKind {
    /// The whole file system.
    Full,
    /// Only the not-ignored files of the work tree.
    Work,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CheckpointInfo {
    /// Names it for whoever restores it.
    pub id: String,
    pub kind: CheckpointKind,
    pub snapshot: Option<SnapshotId>,
    pub at: Timestamp,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CheckpointError {
    /// This one could not be made; the work goes on and the next one is tried.
    #[error("{0}")]
    Failed(String),
    #[error("a newer attempt owns this fork")]
    Stale,
}

#[async_trait]
pub trait Checkpoints: Send + Sync {
    /// Freezes the files as they are now. `position` is the journal's: the conversation up to it belongs to these files.
    /// Idempotent by position.
    async fn make(&self, turn: u32, position: u64) -> Result<CheckpointInfo, CheckpointError>;

    /// Lets go of the files of one that the journal has dropped. Ok if they are gone.
    async fn remove(&self, checkpoint: &CheckpointInfo) -> Result<(), CheckpointError>;
}
