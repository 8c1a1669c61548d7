use super::target::Target;
use clap::Args;

/// Show a run and its forks, or one fork.
#[derive(Debug, Clone, Args)]
pub struct StatusArgs {
    /// RUN or RUN/N.
    #[arg(value_name = "RUN")]
    pub target: Target,
}
