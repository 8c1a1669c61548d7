use clap::Args;
use forkyard_core::RunId;

/// Drive runs of the store until stopped.
#[derive(Debug, Clone, Args)]
pub struct WorkerArgs {
    /// Only this run, then end.
    #[arg(long, value_name = "RUN")]
    pub run: Option<RunId>,
    /// Forks that work at the same time on this host.
    #[arg(long, value_name = "N")]
    pub concurrency: Option<String>,
}
