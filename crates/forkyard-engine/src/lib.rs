//! Where all meet: the engine that drives the machines, the activities that perform their tasks, and the ports of the agent
//! over the store.

pub mod activities;
pub mod activity;
mod check;
pub mod clock;
pub mod embedded;
mod error;
pub mod git;
pub mod inside;
pub mod log;
pub mod models;
pub mod ports;
pub mod results;
pub mod sandboxes;
pub mod steer;
pub mod sweep;

use async_trait::async_trait;
use forkyard_core::run::Command;
use forkyard_core::spec::RunSpec;
use forkyard_core::{ForkNum, RunId};
use forkyard_store::MessageId;

pub use error::EngineError;

/// Who drives the machines and keeps their timers. Reading is the store's business, whatever the engine is.
#[async_trait]
pub trait Engine: Send + Sync {
    /// Stores a run that can be driven; refuses what can't be right before anything is stored. With a key that was used before:
    /// the run that it made.
    async fn submit(&self, id: RunId, spec: RunSpec, key: Option<String>) -> Result<RunId, EngineError>;
    /// Reaches the driver, whichever process it is.
    async fn command(&self, run: &RunId, command: Command, key: Option<String>) -> Result<(), EngineError>;
    /// Reaches the fork's agent before its next tool call.
    async fn message(
        &self,
        run: &RunId,
        fork: ForkNum,
        message: serde_json::Value,
        key: Option<String>,
    ) -> Result<MessageId, EngineError>;
}
