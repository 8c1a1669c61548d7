//! Forkyard's pure core: what a run is, and what happens next. No async, no IO, no clock, no randomness.

pub mod budget;
pub mod event;
pub mod fork;
mod ids;
mod money;
pub mod pending;
pub mod policy;
pub mod pricing;
pub mod rank;
pub mod run;
pub mod sandbox;
pub mod spec;
pub mod task;
mod time;
pub mod view;

pub use ids::{Attempt, CallId, ForkNum, ForkRef, HostId, InvalidId, Role, RunId, SandboxId, SnapshotId};
pub use money::Usd;
pub use time::{Millis, Timestamp};
