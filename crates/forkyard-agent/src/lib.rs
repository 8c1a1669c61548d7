//! The agent of a fork: asks a model, judges and runs its tool calls, records every step. Knows the store only through the
//! ports that it defines.

pub mod inference;
pub mod ports;
