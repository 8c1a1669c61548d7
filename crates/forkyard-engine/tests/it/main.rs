//! Tests of the engine crate from outside.

mod child;
mod git;
mod log;
mod processes;
mod sim;
