use clap::Args;
use forkyard_core::RunId;

/// Pause a run: no fork starts and no model is asked until it is resumed.
#[derive(Debug, Clone, Args)]
pub struct PauseArgs {
    /// The run.
    #[arg(value_name = "RUN")]
    pub run: RunId,
}
