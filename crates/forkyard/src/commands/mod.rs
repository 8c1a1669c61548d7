//! One file a command: its arguments, and what it does with them. A test of the same name lies in tests/it/.

pub mod completions;
pub mod config;
pub mod doctor;
pub mod trust;
