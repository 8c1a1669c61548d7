//! Points that a fork can be resumed from or forked at.

use std::sync::Arc;

use async_trait::async_trait;
use forkyard_core::{SnapshotId, Timestamp};
use forkyard_sandbox::{ErrorKind, Labels, Sandbox};
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
}

/// Full checkpoints by the sandbox's own snapshots, named `{prefix}p{position}`.
pub struct SnapshotCheckpoints {
    pub sandbox: Arc<dyn Sandbox>,
    pub prefix: String,
    pub labels: Labels,
}

#[async_trait]
impl Checkpoints for SnapshotCheckpoints {
    async fn make(&self, turn: u32, position: u64) -> Result<CheckpointInfo, CheckpointError> {
        let id = SnapshotId::new(format!("{}p{position}", self.prefix))
            .map_err(|e| CheckpointError::Failed(e.to_string()))?;
        let mut labels = self.labels.clone();
        labels.insert("turn".to_string(), turn.to_string());
        let snapshot = self.sandbox.snapshot(&id, &labels).await.map_err(|e| match e.kind {
            ErrorKind::Stale => CheckpointError::Stale,
            ErrorKind::Invalid
            | ErrorKind::NotFound
            | ErrorKind::Denied
            | ErrorKind::Auth
            | ErrorKind::Unsupported
            | ErrorKind::TooLarge
            | ErrorKind::Unavailable
            | ErrorKind::Timeout => CheckpointError::Failed(e.to_string()),
        })?;
        Ok(CheckpointInfo {
            id: id.to_string(),
            kind: CheckpointKind::Full,
            at: snapshot.created_at,
            snapshot: Some(id),
        })
    }
}
