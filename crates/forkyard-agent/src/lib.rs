//! The agent of a fork: asks a model, judges and runs its tool calls, records every step. Knows the store only through the
//! ports that it defines.

mod agent;
mod clock;
pub mod config;
mod conversation;
mod diff;
pub mod event;
pub mod inference;
pub mod intercept;
mod log;
pub mod outcome;
pub mod ports;
mod session;
mod text;
mod tools;

pub use agent::Agent;
pub use config::{AgentConfig, Continuity, HookConfig, HookEvent};
pub use conversation::checkpoints;
pub use event::{AgentEvent, JournalEntry};
pub use intercept::{Interceptor, ToolRequest, ToolResponse, Verdict};
pub use outcome::{AgentError, AgentOutcome, Stop};
pub use session::check_template;
pub use tools::names as tool_names;
