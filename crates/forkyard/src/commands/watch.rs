use super::target::Target;
use clap::Args;

/// Watch a run on the full screen: forks, live feed, diff, messages.
#[derive(Debug, Clone, Args)]
pub struct WatchArgs {
    /// RUN or RUN/N; the newest live run if none is given.
    #[arg(value_name = "RUN")]
    pub target: Option<Target>,
}
