//! The agent of a fork: asks a model, judges and runs its tool calls, records every step. Knows the store only through the
//! ports that it defines.

pub mod config;
pub mod event;
pub mod inference;
pub mod outcome;
pub mod ports;

pub use config::{AgentConfig, Continuity, HookConfig, HookEvent};
pub use event::{AgentEvent, JournalEntry};
pub use outcome::{AgentError, AgentOutcome, Stop};
