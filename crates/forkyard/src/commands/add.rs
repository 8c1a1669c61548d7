use clap::Args;
use forkyard_core::RunId;

/// Add forks to a run that is under way.
#[derive(Debug, Clone, Args)]
pub struct AddArgs {
    /// The run.
    #[arg(value_name = "RUN")]
    pub run: RunId,
    /// How many.
    #[arg(short, long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub forks: u32,
    /// Another prompt than the run's.
    #[arg(short, long, value_name = "TEXT")]
    pub prompt: Option<String>,
    /// Another model than the run's.
    #[arg(short, long, value_name = "MODEL")]
    pub model: Option<String>,
}
