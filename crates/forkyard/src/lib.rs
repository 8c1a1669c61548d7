//! The `forkyard` program as a library: settings, commands and rendering. Everything that writes to a terminal is here.

pub mod cli;
pub mod commands;
pub mod error;
pub mod exit;
pub mod output;
pub mod reference;
pub mod render;
pub mod settings;
