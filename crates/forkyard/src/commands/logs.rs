use super::target::Target;
use clap::Args;

/// Show what the agents of a run said and did.
#[derive(Debug, Clone, Args)]
pub struct LogsArgs {
    /// RUN or RUN/N.
    #[arg(value_name = "RUN")]
    pub target: Target,
    /// Go on until the run ends.
    #[arg(short, long)]
    pub follow: bool,
    /// Only the last lines.
    #[arg(short = 'n', long, value_name = "N", value_parser = clap::value_parser!(u32).range(0..=1_000_000))]
    pub tail: Option<u32>,
}
