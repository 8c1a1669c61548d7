use clap::Args;
use forkyard_core::RunId;

/// Resume a run that is paused, detached or crashed, and drive it if nobody else does.
#[derive(Debug, Clone, Args)]
pub struct ResumeArgs {
    /// The run.
    #[arg(value_name = "RUN")]
    pub run: RunId,
    /// Do not wait for its end.
    #[arg(long)]
    pub no_wait: bool,
}
