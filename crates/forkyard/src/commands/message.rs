use super::target::Target;
use clap::Args;

/// Say something to a running agent; it reads it before its next tool call.
#[derive(Debug, Clone, Args)]
pub struct MessageArgs {
    /// RUN/N, or RUN for all of its forks.
    #[arg(value_name = "RUN/N")]
    pub target: Target,
    /// What to say; `-` reads standard input.
    #[arg(value_name = "TEXT")]
    pub text: String,
    /// Stop what it is doing first.
    #[arg(long)]
    pub interrupt: bool,
}
