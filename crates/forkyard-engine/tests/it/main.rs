//! Tests of the engine crate from outside.

mod agents;
mod child;
mod clock;
mod conformance;
mod git;
mod log;
mod owner;
mod processes;
mod sim;
