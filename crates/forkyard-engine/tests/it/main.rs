//! Tests of the engine crate from outside.

mod child;
mod git;
mod processes;
mod sim;
