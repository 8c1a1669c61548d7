use super::target::Target;
use clap::Args;

/// Show what a fork changed.
#[derive(Debug, Clone, Args)]
pub struct DiffArgs {
    /// RUN/N, or RUN for its best fork.
    #[arg(value_name = "RUN/N")]
    pub target: Target,
    /// Only these files.
    #[arg(value_name = "PATH", last = true)]
    pub paths: Vec<String>,
    /// Only names and numbers of lines.
    #[arg(long, conflicts_with = "patch")]
    pub stat: bool,
    /// A patch that git apply takes, binary files included.
    #[arg(long)]
    pub patch: bool,
}
