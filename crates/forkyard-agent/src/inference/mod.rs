//! All model traffic passes this layer: one limiter for all forks, retries, metering, budget reservations.
//!
//! The turn loop sees only [`Model`] and the types of [`message`]: it asks for one turn and gets one answer or an error that
//! says what to do. Money is reserved before a request is sent and settled after it, through the [`Ledger`] port; no request is
//! sent while the run is paused or once a newer attempt owns the fork.
//!
//! [`Ledger`]: crate::ports::Ledger

mod error;
mod message;
mod model;

pub use error::InferenceError;
pub use message::{Block, Image, Message, RawJson, ResultPart, Role, StopReason, ToolDef};
pub use model::{Collect, Delta, DeltaSink, Effort, Model, Notice, Silent, TurnRequest, TurnResponse};
