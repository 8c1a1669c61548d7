//! What chores of the machine came to.

use forkyard_core::Timestamp;
use forkyard_engine::sweep::SweepStats;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::run::EngineKind;

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

/// Whose cleanup is to end.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct StopCleanup {
    pub engine: EngineKind,
}

/// A cleanup that was told to end.
#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
pub struct CleanupStopped {
    /// What it has done so far.
    pub stats: Option<CleanupStats>,
    /// In their place: what it waits for, to hear of it.
    pub notice: Option<String>,
}

#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct CleanupStats {
    pub total_cleaned: u64,
    /// Milliseconds since 1970.
    pub last_cleanup: Option<u64>,
    pub running: bool,
    pub last_error: Option<String>,
}

impl From<SweepStats> for CleanupStats {
    fn from(s: SweepStats) -> CleanupStats {
        let last_cleanup = s.last_cleanup.map(|at| at.0);
        CleanupStats {
            total_cleaned: s.total_cleaned,
            last_cleanup,
            running: s.running,
            last_error: s.last_error,
        }
    }
}

impl From<CleanupStats> for SweepStats {
    fn from(s: CleanupStats) -> SweepStats {
        let last_cleanup = s.last_cleanup.map(Timestamp);
        SweepStats {
            total_cleaned: s.total_cleaned,
            last_cleanup,
            running: s.running,
            last_error: s.last_error,
        }
    }
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
    /// Of folders, captured files, images, and snapshots that know their size.
    pub bytes: u64,
    /// What could not be removed, and why.
    pub left: Vec<String>,
}
