//! Git on the host, without trusting what it reads.
//!
//! - git never runs in a tree, config or attributes that a sandbox could write. Work comes out of a sandbox as changed files,
//!   and commits made inside as one pack; both are put together in a quarantine repository, checked by git's own fsck, and
//!   only then become part of the user's repository or of the cache, under `refs/forkyard/RUN/`.
//! - Diffs and archives are made from objects alone, in an empty repository of ours that borrows them: no config, attributes,
//!   filters, hooks, replacement refs or lazy fetches of anybody.
//! - Names are checked before git sees them, and always stand where no option can.
//! - Credentials are in no argument, no file and no sandbox.

mod apply;
mod cache;
mod command;
mod diff;
mod dirty;
mod error;
mod history;
mod names;
mod quarantine;
mod repo;
pub mod tar;
mod tree;

pub use apply::Applied;
pub use cache::Cache;
pub use command::{Git, GitConfig, MAX_OUTPUT_BYTES};
pub use diff::{ChangeKind, CommitInfo, DiffSummary, FileChange, Lines};
pub use error::{GitError, GitErrorKind};
pub use history::{History, HistoryLimits};
pub use names::{CommitId, Transport, check_branch, check_path, check_url, shown_url};
pub use quarantine::{CommitLimits, Quarantine, WorkCommit, WorkLimits};
pub use repo::{Repo, Resolved};
pub use tree::{MAX_TREE_FILES, Tree};
