//! All model traffic passes this layer: one limiter for all forks, retries, metering, budget reservations.
//!
//! The turn loop sees only [`Model`] and the types of `message`: it asks for one turn and gets one answer or an error that
//! says what to do. Money is reserved before a request is sent and settled after it, through the [`Ledger`] port; no request is
//! sent while the run is paused or once a newer attempt owns the fork.
//!
//! [`Ledger`]: crate::ports::Ledger

mod anthropic;
mod backend;
mod error;
mod estimate;
mod http;
mod layer;
mod limiter;
mod message;
mod model;
mod open;
mod openai;
mod purse;
mod record;
mod relay;
mod reserve;
mod retry;
mod script;
mod sse;
mod transport;
mod warm;

pub use anthropic::{Anthropic, DEFAULT_BASE_URL as ANTHROPIC_BASE_URL};
pub use backend::{Answer, Backend, Billing, Call, Failure, FailureKind, Passed, RateLimits, Relay, Watch};
pub use error::InferenceError;
pub use http::{HttpBackend, MAX_STREAM_BYTES, Timeouts, Wire};
pub use layer::{Inference, InferenceSettings, MIN_USEFUL_OUTPUT_TOKENS, Session, SessionSpec};
pub use limiter::Pressure;
pub use message::{Block, Image, Message, RawJson, ResultPart, Role, StopReason, ToolDef};
pub(crate) use model::Heard;
pub use model::{Collect, Delta, DeltaSink, Model, Notice, Silent, TurnRequest, TurnResponse};
pub use open::{BadProvider, Provider, Traffic};
pub use openai::{DEFAULT_BASE_URL as OPENAI_BASE_URL, OpenAi};
pub use record::{BadRecording, Recorder, Replay};
pub use relay::{MAX_RELAY_BYTES, Relayed};
pub use retry::{Jitter, RetrySettings};
pub use script::{BadScript, Script, ScriptBackend};
pub use transport::{BadEndpoint, Headers, Live, Post, Reply, Transport, TransportError};
