//! Fakes, stand-in servers and fixtures for tests. Never linked into the binary.

pub mod model_server;
