use super::target::Target;
use clap::Args;

/// Show the events of a run.
#[derive(Debug, Clone, Args)]
pub struct EventsArgs {
    /// RUN or RUN/N.
    #[arg(value_name = "RUN")]
    pub target: Target,
    /// Go on until the run ends.
    #[arg(short, long)]
    pub follow: bool,
    /// Only events of these types; agent.* takes a whole category.
    #[arg(short = 't', long = "type", value_name = "TYPE", value_delimiter = ',')]
    pub types: Vec<String>,
    /// Only events after this position.
    #[arg(long, value_name = "POSITION")]
    pub since: Option<u64>,
    /// Put the forks side by side: what each did, step by step.
    #[arg(long, conflicts_with = "follow")]
    pub compare: bool,
}
