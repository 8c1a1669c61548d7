use clap::Args;

/// Look for orphaned sandboxes and remove them, until stopped.
#[derive(Debug, Clone, Args)]
pub struct CleanupArgs {
    /// How often [default: 15m].
    #[arg(long, value_name = "DURATION")]
    pub interval: Option<String>,
    /// Older than this, with no live run, is an orphan [default: 3h].
    #[arg(long, value_name = "DURATION")]
    pub max_age: Option<String>,
    /// Look once and end.
    #[arg(long)]
    pub once: bool,
    /// Say what would be removed.
    #[arg(long)]
    pub dry_run: bool,
}
