use super::target::Target;
use clap::Args;

/// Cancel a run, or one fork of it. Work that is done stays for diff and apply.
#[derive(Debug, Clone, Args)]
pub struct CancelArgs {
    /// RUN or RUN/N.
    #[arg(value_name = "RUN")]
    pub target: Target,
    /// Do not wait until it has ended.
    #[arg(long)]
    pub no_wait: bool,
}
