//! Why a turn has no answer, by what the caller does about it.

use forkyard_core::Usd;

#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum InferenceError {
    /// The fork ends with `budget_exceeded`; its work is kept. Nothing else is outstanding that could give money back.
    #[error("budget exceeded: the smallest useful request costs up to {needed}, {available} is left")]
    BudgetExceeded { needed: Usd, available: Usd },
    /// Configuration: the model has no price, so a budget could not be kept.
    #[error(
        "no price for model {model:?}: a budget needs one. Add [prices.\"{model}\"] with input and output (USD per million tokens) to the configuration, or run without a budget"
    )]
    NoPrice { model: String },
    #[error("cancelled")]
    Cancelled,
    /// A newer attempt owns the fork: stop without a word.
    #[error("a newer attempt owns this fork")]
    Stale,
    /// Compact the conversation and ask again.
    #[error("the conversation is too long for the model: {message}")]
    ContextTooLong { message: String },
    /// Every retry failed. The same request may work later.
    #[error("the model did not answer after {tries} tries: {message}")]
    Exhausted { tries: u32, message: String },
    /// Key or account: no request of this run will work until the user acts.
    #[error("the model's provider refuses this account: {message}")]
    Account { message: String },
    /// The same request can never work.
    #[error("the model's provider rejected the request{}: {message}", status.map(|s| format!(" ({s})")).unwrap_or_default())]
    Rejected { status: Option<u16>, message: String },
    /// The ledger can't be reached or has lost track: nothing was sent.
    #[error("budget ledger: {message}")]
    Ledger { message: String },
}

impl InferenceError {
    /// A stable name, for telemetry.
    pub fn kind(&self) -> &'static str {
        match self {
            InferenceError::BudgetExceeded { .. } => "budget_exceeded",
            InferenceError::NoPrice { .. } => "no_price",
            InferenceError::Cancelled => "cancelled",
            InferenceError::Stale => "stale",
            InferenceError::ContextTooLong { .. } => "context_too_long",
            InferenceError::Exhausted { .. } => "exhausted",
            InferenceError::Account { .. } => "account",
            InferenceError::Rejected { .. } => "rejected",
            InferenceError::Ledger { .. } => "ledger",
        }
    }

    /// The same turn may succeed if it is asked again later.
    pub fn is_retryable(&self) -> bool {
        match self {
            InferenceError::Exhausted { .. } | InferenceError::Ledger { .. } => true,
            InferenceError::BudgetExceeded { .. }
            | InferenceError::NoPrice { .. }
            | InferenceError::Cancelled
            | InferenceError::Stale
            | InferenceError::ContextTooLong { .. }
            | InferenceError::Account { .. }
            | InferenceError::Rejected { .. } => false,
        }
    }
}
