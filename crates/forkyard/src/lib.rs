//! The `forkyard` program as a library: settings, commands and rendering. Everything that writes to a terminal is here.

pub mod render;
pub mod settings;
