use clap::Args;
use forkyard_core::{ForkNum, RunId};

/// Compare the results of a run: files by forks, what they agree and differ on.
#[derive(Debug, Clone, Args)]
pub struct CompareArgs {
    /// The run.
    #[arg(value_name = "RUN")]
    pub run: RunId,
    /// Only these forks.
    #[arg(value_name = "N")]
    pub forks: Vec<ForkNum>,
}
