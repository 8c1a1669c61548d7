//! The model for whoever works inside a sandbox: its requests are passed on under the fork's money, the shared limiter and
//! the provider's key, none of which it ever sees.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
pub use forkyard_agent::inference::Relayed;
use forkyard_agent::inference::{InferenceError, Relay, Session, SessionSpec};
use forkyard_core::SandboxId;
use forkyard_store::{Store, StoreError};
use serde::Deserialize;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::CancellationToken;

use super::Claims;
use crate::models::{Models, OPENAI, SCRIPT};
use crate::ports::{StoreLedger, Tenure};

/// Requests of one sandbox that wait for their answers at once: an agent and its subagents need far fewer.
const MAX_AT_ONCE: usize = 32;
/// Sandboxes that are remembered for it.
const MAX_SANDBOXES: usize = 10_000;

/// A request in the API's own format.
#[derive(Debug, Clone, Default)]
pub struct Asked {
    pub body: Bytes,
    pub version: Option<String>,
    pub beta: Option<String>,
}

/// Why there is no answer, by what whoever asked does about it.
#[derive(Debug, thiserror::Error)]
pub enum Refusal {
    /// The request can't be right.
    #[error("{0}")]
    Invalid(String),
    #[error("{0}")]
    Budget(String),
    #[error("a newer attempt owns this fork")]
    Stale,
    #[error("{MAX_AT_ONCE} requests of this sandbox wait already")]
    TooMany,
    /// Later it may work.
    #[error("{0}")]
    Unavailable(String),
}

impl From<StoreError> for Refusal {
    fn from(e: StoreError) -> Refusal {
        Refusal::Unavailable(e.to_string())
    }
}

impl From<InferenceError> for Refusal {
    fn from(e: InferenceError) -> Refusal {
        match &e {
            InferenceError::BudgetExceeded { .. } => Refusal::Budget(e.to_string()),
            InferenceError::Stale => Refusal::Stale,
            InferenceError::Rejected { message, .. } => Refusal::Invalid(message.clone()),
            InferenceError::NoPrice { .. } => Refusal::Invalid(e.to_string()),
            InferenceError::Cancelled
            | InferenceError::ContextTooLong { .. }
            | InferenceError::Exhausted { .. }
            | InferenceError::Account { .. }
            | InferenceError::Ledger { .. } => Refusal::Unavailable(e.to_string()),
        }
    }
}

pub struct Relays {
    store: Arc<dyn Store>,
    models: Arc<Models>,
    stop: CancellationToken,
    slots: Mutex<HashMap<SandboxId, Arc<Semaphore>>>,
}

impl Relays {
    /// Requests end with `stop`.
    pub fn new(store: Arc<dyn Store>, models: Arc<Models>, stop: CancellationToken) -> Relays {
        Relays { store, models, stop, slots: Mutex::default() }
    }

    /// A request takes its place before anything of it is read, and holds it until its answer has been.
    pub fn place(&self, sandbox: &SandboxId) -> Result<OwnedSemaphorePermit, Refusal> {
        self.slot(sandbox).try_acquire_owned().map_err(|_| Refusal::TooMany)
    }

    pub async fn ask(&self, c: &Claims, asked: Asked) -> Result<Relayed, Refusal> {
        let (session, relay) = self.session(c, asked).await?;
        Ok(session.relay(relay).await?)
    }

    pub async fn count(&self, c: &Claims, asked: Asked) -> Result<u64, Refusal> {
        let (session, relay) = self.session(c, asked).await?;
        let counted = session.count(relay).await?;
        counted.ok_or_else(|| Refusal::Unavailable("the model's provider does not count".into()))
    }

    fn slot(&self, sandbox: &SandboxId) -> Arc<Semaphore> {
        let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        if slots.len() >= MAX_SANDBOXES {
            slots.retain(|_, s| s.available_permits() < MAX_AT_ONCE);
        }
        slots.entry(sandbox.clone()).or_insert_with(|| Arc::new(Semaphore::new(MAX_AT_ONCE))).clone()
    }

    /// A session of its own for each request: reservations never meet.
    async fn session(&self, c: &Claims, asked: Asked) -> Result<(Session, Relay), Refusal> {
        #[derive(Deserialize)]
        struct Named {
            model: String,
        }
        let named: Named = serde_json::from_slice(&asked.body)
            .map_err(|e| Refusal::Invalid(format!("the body is not a request with a model: {e}")))?;
        // Names that lead to files of the host or to another provider are not for somebody inside.
        if named.model.starts_with(SCRIPT) || named.model.starts_with(OPENAI) {
            return Err(Refusal::Invalid(format!("model: {:?} is not served here", named.model)));
        }
        let run = self.store.run(&c.run).await?.ok_or(Refusal::Stale)?;
        let limited = run.limits.run.is_some() || run.limits.fork.is_some();
        // A key that is missing does not come by waiting.
        let (inference, _) = self.models.open(&named.model).map_err(Refusal::Invalid)?;
        let tenure = Tenure {
            store: self.store.clone(),
            run: c.run.clone(),
            fork: c.fork,
            attempt: c.attempt,
            sandbox: c.sandbox.clone(),
        };
        let session = inference.session(SessionSpec {
            key: format!("{}/{}/a{}/inside", c.run, c.fork, c.attempt),
            fork: Some(c.fork),
            ledger: Arc::new(StoreLedger::new(tenure, limited)),
            cancel: self.stop.clone(),
        });
        Ok((session, Relay { body: asked.body, version: asked.version, beta: asked.beta }))
    }
}
