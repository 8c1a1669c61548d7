//! The history that a sandbox gets: a pack of the base commit and what led to it, cut off where it would be too much. It is
//! made from objects alone, so nothing of the repository's remotes, config, other branches or paths goes along.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use super::command::{Call, Git, git, io_error};
use super::error::{GitError, GitErrorKind, Result};
use super::names::CommitId;
use super::quarantine::Scratch;
use super::repo::Repo;

/// Commits of the past that a sandbox sees, and that are fetched of a remote repository.
pub(super) const MAX_COMMITS: usize = 1_000;

/// How much of the past is taken along.
#[derive(Debug, Clone, Copy)]
pub struct HistoryLimits {
    pub max_commits: usize,
    /// Of the objects, as git has them on disk.
    pub max_bytes: u64,
}

impl Default for HistoryLimits {
    /// Enough for what people look at with `git log` and `git blame`; all of it for most projects.
    fn default() -> Self {
        HistoryLimits { max_commits: MAX_COMMITS, max_bytes: 512 << 20 }
    }
}

/// Shorter and shorter: the last one is the commit itself, which is as large as the files are.
const SHORTER: [usize; 2] = [50, 1];

/// A pack in a folder of ours, which is removed with it.
pub struct History {
    pub pack: PathBuf,
    pub index: PathBuf,
    /// Commits whose parents were left out.
    pub shallow: Vec<CommitId>,
    _scratch: Scratch,
}

impl Git {
    pub async fn history(&self, repo: &Repo, commit: &CommitId, limits: HistoryLimits) -> Result<History> {
        let scratch = self.scratch().await?;
        let depths = std::iter::once(limits.max_commits)
            .chain(SHORTER.into_iter().filter(|d| *d < limits.max_commits));
        let mut shallow = vec![];
        for depth in depths {
            shallow = self.boundary(repo, commit, depth).await?;
            write_shallow(&scratch.0, &shallow)?;
            if depth == 1 || self.disk_usage(repo, commit, &scratch.0).await? <= limits.max_bytes {
                break;
            }
        }
        let call = git(["pack-objects", "--revs", "--quiet", "--delta-base-offset", "--window=0"])
            .config("pack.compression", "1")
            .arg(scratch.0.join("history"))
            .stdin(format!("{commit}\n"));
        let name = self.run(self.cut(repo, &scratch.0, call)).await?.text();
        let part = |end: &str| scratch.0.join(format!("history-{name}.{end}"));
        let (pack, index) = (part("pack"), part("idx"));
        if !pack.is_file() || !index.is_file() {
            return Err(GitError::new(
                GitErrorKind::Corrupt,
                "git pack-objects answered with something else",
            ));
        }
        Ok(History { pack, index, shallow, _scratch: scratch })
    }

    /// The commits at which the past is cut off so that at most `depth` are left; none if all of it is.
    async fn boundary(&self, repo: &Repo, commit: &CommitId, depth: usize) -> Result<Vec<CommitId>> {
        let call = git(["rev-list", "--topo-order", "--parents"])
            .arg(format!("--max-count={depth}"))
            .arg(commit.as_str());
        let listed = self.run(self.on_objects(repo, call)).await?.text();
        let kept: BTreeSet<&str> = listed.lines().filter_map(|l| l.split(' ').next()).collect();
        let known = fs::read_to_string(repo.common_dir.join("shallow")).unwrap_or_default();
        let mut cut: BTreeSet<&str> = known.lines().filter(|c| kept.contains(c)).collect();
        for line in listed.lines() {
            let mut ids = line.split(' ');
            let Some(id) = ids.next() else { continue };
            if ids.any(|parent| !kept.contains(parent)) {
                cut.insert(id);
            }
        }
        cut.into_iter().map(CommitId::new).collect()
    }

    async fn disk_usage(&self, repo: &Repo, commit: &CommitId, scratch: &Path) -> Result<u64> {
        let call = git(["rev-list", "--objects", "--disk-usage"]).arg(commit.as_str());
        let text = self.run(self.cut(repo, scratch, call)).await?.text();
        text.parse()
            .map_err(|_| GitError::new(GitErrorKind::Corrupt, "git rev-list answered with something else"))
    }

    /// A call that sees the repository's objects, with the past cut off as the scratch folder says.
    fn cut(&self, repo: &Repo, scratch: &Path, call: Call) -> Call {
        self.on_objects(repo, call).env("GIT_SHALLOW_FILE", scratch.join("shallow"))
    }
}

fn write_shallow(dir: &Path, commits: &[CommitId]) -> Result<()> {
    let text: String = commits.iter().map(|c| format!("{c}\n")).collect();
    fs::write(dir.join("shallow"), text).map_err(io_error)
}
