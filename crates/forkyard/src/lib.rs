//! The `forkyard` program as a library: settings, commands and rendering. Everything that writes to a terminal is here.

pub mod cli;
pub mod commands;
pub mod doing;
pub mod error;
pub mod exit;
pub mod follow;
pub mod output;
pub mod reference;
pub mod render;
pub mod runs;
pub mod settings;
pub mod yard;

/// The runtime of commands that wait for something.
pub fn runtime() -> error::Result<tokio::runtime::Runtime> {
    Ok(tokio::runtime::Builder::new_multi_thread().enable_all().build()?)
}
