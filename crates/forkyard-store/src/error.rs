use forkyard_core::Attempt;

/// By what the caller does: reload, stop, report, or try again.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StoreError {
    /// The stream is not where the caller thought. Reload and decide again.
    #[error("the stream is at {actual}, not at {expected}")]
    Conflict { expected: u64, actual: u64 },
    /// Somebody else drives this run. Stop.
    #[error("the run's lease is held by another process")]
    LeaseLost,
    /// A newer attempt owns the fork. Stop.
    #[error("attempt {mine} of the fork was succeeded by {current}")]
    StaleAttempt { mine: Attempt, current: Attempt },
    #[error("{what} does not exist")]
    NotFound { what: String },
    /// The request can't be right.
    #[error("{0}")]
    Invalid(String),
    /// No space left; what was asked for was not written.
    #[error("the store's disk is full: free some space, work goes on then ({0})")]
    Full(String),
    /// The database can't be reached or is busy; what was asked for may or may not have been written.
    #[error("the store is not available: {0}")]
    Unavailable(String),
    /// What is stored can't be read.
    #[error("the store holds something unreadable: {0}")]
    Corrupt(String),
}

impl StoreError {
    pub fn is_retryable(&self) -> bool {
        match self {
            StoreError::Full(_) | StoreError::Unavailable(_) => true,
            StoreError::Conflict { .. }
            | StoreError::LeaseLost
            | StoreError::StaleAttempt { .. }
            | StoreError::NotFound { .. }
            | StoreError::Invalid(_)
            | StoreError::Corrupt(_) => false,
        }
    }
}
