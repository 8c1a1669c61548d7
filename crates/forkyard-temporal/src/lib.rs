//! The Temporal engine: the pure machines driven by workflows, the engine's own activities performed by workers. No business
//! logic is here: what to do is decided in `forkyard-core`, how it is done in `forkyard-engine`.
//!
//! - [`run`] and [`fork`] are the workflows; [`wheel`] turns a machine inside one.
//! - [`cleanup`] is the workflow that looks for orphans on every host.
//! - [`hand`] performs activities on a host, and records what led to them first.
//! - [`courier`] carries the store's news to the workflows; [`worker`] is a process that does all of it.
//! - [`codec`] encrypts what Temporal keeps.
//! - [`service`] is the connection; [`engine`] is what the CLI and the API submit to.

pub mod cleanup;
pub mod codec;
pub mod courier;
pub mod engine;
pub mod fork;
pub mod hand;
pub mod run;
pub mod search;
pub mod service;
pub mod wheel;
pub mod wire;
pub mod worker;

pub use engine::TemporalEngine;
pub use hand::Counted;
pub use service::{Service, ServiceConfig, ServiceError};
pub use wire::Pace;
pub use worker::{WorkerConfig, work};

/// What the SDK measures of itself goes into a meter of the caller's.
pub use temporalio_common::telemetry::metrics as sdk_metrics;
