//! The engine of runs that Temporal drives. What is submitted, commanded and said goes into the store first, as with every
//! engine; workers carry it from there to the workflows (see [`crate::courier`]), so nothing is lost if this process ends.

use async_trait::async_trait;
use forkyard_core::run::Command;
use forkyard_core::spec::RunSpec;
use forkyard_core::view::EngineKind;
use forkyard_core::{ForkNum, RunId};
use forkyard_engine::embedded::Embedded;
use forkyard_engine::{Engine, EngineError};
use forkyard_store::MessageId;
use tokio_util::sync::CancellationToken;

use crate::service::{Service, ServiceError};
use crate::wire::check_size;

pub struct TemporalEngine {
    /// Keeps the store's side of it: validation, idempotency keys, inboxes; and ends what Temporal refuses.
    desk: Embedded,
    service: Service,
}

impl TemporalEngine {
    pub fn new(desk: Embedded, service: Service) -> TemporalEngine {
        TemporalEngine { desk, service }
    }
    pub fn service(&self) -> &Service {
        &self.service
    }
}

#[async_trait]
impl Engine for TemporalEngine {
    async fn submit(&self, id: RunId, mut spec: RunSpec, key: Option<String>) -> Result<RunId, EngineError> {
        spec.engine = EngineKind::Temporal;
        check_size(&spec).map_err(EngineError::Refused)?;
        let id = self.desk.submit(id, spec, key).await?;
        match self.service.start(&**self.desk.store(), &id).await {
            Ok(()) => {}
            Err(ServiceError::Unstartable(why)) => {
                self.desk.fail(&id, &why, CancellationToken::new()).await?;
            }
            // It is stored: the next worker starts it.
            Err(e) => tracing::warn!(run = %id, "its workflow could not be started yet: {e}"),
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
