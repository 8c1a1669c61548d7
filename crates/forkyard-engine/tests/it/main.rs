//! Tests of the engine crate from outside.

mod git;
mod sim;
