//! Tests of the Temporal engine against a real service.

mod child;
mod conformance;
mod hosts;
mod kills;
mod replay;
