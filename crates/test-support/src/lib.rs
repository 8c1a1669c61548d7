//! Fakes, stand-in servers and fixtures for tests. Never linked into the binary.

pub mod at_exit;
#[cfg(feature = "sim")]
pub mod engines;
pub mod memstore;
pub mod model_server;
pub mod net;
pub mod postgres;
#[cfg(feature = "sim")]
pub mod sim;
pub mod temporal;

pub use at_exit::{at_exit, keep_until_exit};
