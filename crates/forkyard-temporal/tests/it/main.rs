//! Tests of the Temporal engine against a real service.

mod child;
mod conformance;
mod hosts;
mod kills;
mod refused;
mod replay;
