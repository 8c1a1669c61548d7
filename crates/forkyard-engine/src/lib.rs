//! Drives runs: engines, activities, and git on the host.

pub mod git;
