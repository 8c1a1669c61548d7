//! What chores of the machine came to.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// What to look for.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Chore {
    /// Only what is older than this.
    pub older_than_ms: u64,
    /// Say what would be removed.
    #[serde(default)]
    pub dry_run: bool,
}

/// Orphaned sandboxes.
#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
pub struct Cleaned {
    pub cleaned: u64,
    /// What it met on the way.
    pub error: Option<String>,
    /// In place of both, where nothing was to be done.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub would_remove: Option<Vec<String>>,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
pub struct Freed {
    pub runs: Vec<String>,
    pub snapshots: Vec<String>,
    /// Files that runs brought back beside their diffs.
    pub captured: usize,
    /// Images that were prepared for sandboxes and that nobody has used for a day.
    #[serde(default)]
    pub images: Vec<String>,
    /// Logs, demos, caches of repositories, and what killed processes left.
    pub folders: Vec<String>,
    /// Of folders, captured files, and snapshots that know their size.
    pub bytes: u64,
    /// What could not be removed, and why.
    pub left: Vec<String>,
}
