use forkyard_core::event::DecodeError;
use forkyard_core::spec::InvalidSpec;
use forkyard_core::{HostId, RunId};
use forkyard_store::StoreError;

/// By what the caller does.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// Nothing was stored. Tell the user what to change.
    #[error(transparent)]
    Invalid(#[from] InvalidSpec),
    #[error("there is no run {0}: `forkyard list` shows those that are")]
    NoSuchRun(RunId),
    #[error("{0}")]
    Refused(String),
    #[error(transparent)]
    Store(#[from] StoreError),
    /// Its base, its sandboxes and their snapshots are there, and nowhere else.
    #[error("run {run} belongs to host {host}: resume it there, or cancel it there and start it again here")]
    OtherHost { run: RunId, host: HostId },
    /// The log was written by something that this release can't read.
    #[error("run {run} can't be read: {reason}")]
    Unreadable { run: RunId, reason: String },
}

impl EngineError {
    pub fn is_retryable(&self) -> bool {
        match self {
            EngineError::Store(e) => e.is_retryable(),
            EngineError::Invalid(_)
            | EngineError::NoSuchRun(_)
            | EngineError::Refused(_)
            | EngineError::OtherHost { .. }
            | EngineError::Unreadable { .. } => false,
        }
    }
    pub(crate) fn unreadable(run: &RunId, e: DecodeError) -> EngineError {
        EngineError::Unreadable { run: run.clone(), reason: e.to_string() }
    }
}
