//! The engine of runs that Temporal drives. What is submitted, commanded and said goes into the store first, as with every
//! engine; workers carry it from there to the workflows (see [`crate::courier`]), so nothing is lost if this process ends.

use std::sync::Arc;

use async_trait::async_trait;
use forkyard_core::run::Command;
use forkyard_core::spec::RunSpec;
use forkyard_core::view::EngineKind;
use forkyard_core::{ForkNum, RunId};
use forkyard_engine::{Engine, EngineError};
use forkyard_store::{MessageId, Store};

use crate::service::Service;

pub struct TemporalEngine {
    store: Arc<dyn Store>,
    /// Whoever keeps the store's side of it: validation, idempotency keys, inboxes.
    desk: Arc<dyn Engine>,
    service: Service,
}

impl TemporalEngine {
    pub fn new(store: Arc<dyn Store>, desk: Arc<dyn Engine>, service: Service) -> TemporalEngine {
        TemporalEngine { store, desk, service }
    }
    pub fn service(&self) -> &Service {
        &self.service
    }
}

#[async_trait]
impl Engine for TemporalEngine {
    async fn submit(&self, id: RunId, mut spec: RunSpec, key: Option<String>) -> Result<RunId, EngineError> {
        spec.engine = EngineKind::Temporal;
        let id = self.desk.submit(id, spec, key).await?;
        if let Err(e) = self.service.start(&*self.store, &id).await {
            // It is stored: the next worker starts it.
            tracing::warn!(run = %id, "its workflow could not be started yet: {e}");
        }
        Ok(id)
    }

    async fn command(&self, run: &RunId, command: Command, key: Option<String>) -> Result<(), EngineError> {
        self.desk.command(run, command, key).await?;
        if let Err(e) = self.service.nudge_run(run).await {
            tracing::debug!(%run, "its workflow could not be told: {e}");
        }
        Ok(())
    }

    async fn message(
        &self,
        run: &RunId,
        fork: ForkNum,
        message: serde_json::Value,
        key: Option<String>,
    ) -> Result<MessageId, EngineError> {
        // An agent at work watches the inbox itself; one that lingers is brought back by a worker.
        self.desk.message(run, fork, message, key).await
    }
}
