//! Tests of the engine crate from outside.

mod agents;
mod child;
mod children;
mod clock;
mod conformance;
mod git;
mod log;
mod owner;
mod processes;
mod sim;
