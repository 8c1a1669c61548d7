use clap::Args;

/// Remove old runs, snapshots and caches, and say what that frees.
#[derive(Debug, Clone, Args)]
pub struct GcArgs {
    /// Only what is older than this.
    #[arg(long, value_name = "DURATION", default_value = "30d")]
    pub older_than: String,
    /// Say what would be removed.
    #[arg(long)]
    pub dry_run: bool,
}
