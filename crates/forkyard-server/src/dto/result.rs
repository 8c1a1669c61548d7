//! What runs and forks came to.

use std::collections::BTreeMap;

use forkyard_core::ForkNum;
use forkyard_core::rank::Ranking;
use forkyard_core::view::{ForkView, RunView};
use forkyard_engine::git::{self, DiffSummary, FileChange, Tree};
use forkyard_engine::results::{self, Outcome};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use super::fork::Fork;
use super::mirror;
use super::run::{RunOutcome, RunStatus};
use crate::error::{ApiError, Result};

mirror!(ChangeKind of git::ChangeKind, "snake_case" { Added, Modified, Deleted, TypeChanged });

#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct Results {
    pub run: String,
    pub status: RunStatus,
    pub outcome: Option<RunOutcome>,
    pub total_forks: u32,
    pub successful: u32,
    pub failed: u32,
    pub total_cost_usd: f64,
    /// From the first start to the last end.
    pub total_duration_ms: u64,
    pub winner: Option<u32>,
    /// The base passes verify as it is: passing says little then.
    pub base_passes: Option<bool>,
    /// Best first, with what decided.
    pub ranking: Vec<Ranked>,
    pub results: Vec<Fork>,
}

#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct Ranked {
    pub fork: u32,
    pub reason: String,
}

impl Results {
    pub fn new(view: &RunView, forks: &[ForkView], ranking: Ranking) -> Results {
        let successful =
            forks.iter().filter(|f| f.outcome == Some(forkyard_core::view::ForkOutcome::Success)).count();
        let ended = forks.iter().filter(|f| f.outcome.is_some()).count();
        let from = forks.iter().filter_map(|f| f.started_at).min();
        let to = forks.iter().filter_map(|f| f.ended_at).max();
        Results {
            run: view.id.to_string(),
            status: view.status.into(),
            outcome: view.outcome.map(Into::into),
            total_forks: forks.len() as u32,
            successful: successful as u32,
            failed: (ended - successful) as u32,
            total_cost_usd: forks.iter().map(|f| f.cost).sum::<forkyard_core::Usd>().as_dollars(),
            total_duration_ms: from.zip(to).map_or(0, |(from, to)| to.since(from).0),
            winner: ranking.winner,
            base_passes: ranking.base_passes,
            ranking: ranking.order.into_iter().map(|r| Ranked { fork: r.fork, reason: r.reason }).collect(),
            results: forks.iter().map(Into::into).collect(),
        }
    }
}

#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct ChangedFile {
    pub path: String,
    pub kind: ChangeKind,
    /// Null: a binary file.
    pub added: Option<u64>,
    pub removed: Option<u64>,
    /// In octal.
    pub old_mode: String,
    pub new_mode: String,
}

impl From<&FileChange> for ChangedFile {
    fn from(f: &FileChange) -> ChangedFile {
        ChangedFile {
            path: f.path.clone(),
            kind: f.kind.into(),
            added: f.lines.map(|l| l.added),
            removed: f.lines.map(|l| l.removed),
            old_mode: format!("{:06o}", f.old_mode),
            new_mode: format!("{:06o}", f.new_mode),
        }
    }
}

#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct Diff {
    pub run: String,
    pub fork: u32,
    /// Commits of the repository that keeps the result.
    pub base: String,
    pub commit: String,
    pub lines_added: u64,
    pub lines_removed: u64,
    pub files: Vec<ChangedFile>,
    /// For showing: without binary data, and with what is not UTF-8 replaced.
    pub patch: String,
    /// There is more; `/patch` has the whole.
    pub truncated: bool,
}

impl Diff {
    pub fn new(
        run: &RunView,
        fork: &ForkView,
        o: &Outcome,
        summary: DiffSummary,
        patch: &[u8],
        max: usize,
    ) -> Diff {
        let truncated = patch.len() > max;
        // Whole lines.
        let end = if truncated {
            patch[..max].iter().rposition(|b| *b == b'\n').map_or(0, |n| n + 1)
        } else {
            patch.len()
        };
        let lines = |pick: fn(&git::FileChange) -> u64| summary.files.iter().map(pick).sum();
        Diff {
            run: run.id.to_string(),
            fork: fork.fork,
            base: o.base.as_str().to_string(),
            commit: o.commit.as_str().to_string(),
            lines_added: lines(|f| f.lines.map_or(0, |l| l.added)),
            lines_removed: lines(|f| f.lines.map_or(0, |l| l.removed)),
            files: summary.files.iter().map(Into::into).collect(),
            patch: String::from_utf8_lossy(&patch[..end]).into_owned(),
            truncated,
        }
    }
}

#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct Comparison {
    pub run: String,
    pub winner: Option<u32>,
    /// Those that have a result.
    pub forks: Vec<u32>,
    /// How many files all forks changed in the same way, were changed in different ways, one fork alone changed.
    pub same: usize,
    pub differing: usize,
    pub alone: usize,
    pub files: Vec<ComparedFile>,
}

#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct ComparedFile {
    pub path: String,
    pub changes: Vec<ComparedChange>,
}

#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct ComparedChange {
    pub fork: u32,
    /// The same letter is the same change.
    pub variant: String,
    #[serde(flatten)]
    pub change: ChangedFile,
}

impl Comparison {
    pub fn new(view: &RunView, c: results::Comparison) -> Comparison {
        let change = |path: &String, fork: &ForkNum, letter: &char| {
            let change = c.changes.get(fork)?.get(path)?;
            Some(ComparedChange { fork: *fork, variant: letter.to_string(), change: change.into() })
        };
        let changes = |path: &String, variants: &BTreeMap<ForkNum, char>| {
            variants.iter().filter_map(|(fork, letter)| change(path, fork, letter)).collect()
        };
        Comparison {
            run: view.id.to_string(),
            winner: view.winner,
            forks: c.changes.keys().copied().collect(),
            same: c.same(),
            differing: c.differing(),
            alone: c.alone(),
            files: c
                .files
                .iter()
                .map(|(path, variants)| ComparedFile { path: path.clone(), changes: changes(path, variants) })
                .collect(),
        }
    }
}

#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct ResultFiles {
    pub files: Vec<ResultFile>,
    /// For the next page; null at the end.
    pub next_cursor: Option<String>,
}

#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct ResultFile {
    pub path: String,
    /// Null: as in the base.
    pub change: Option<ChangedFile>,
}

impl ResultFiles {
    /// In order of their paths, deleted ones included; the cursor is the last path.
    pub fn new(changed: DiffSummary, tree: Option<Tree>, after: Option<&str>, limit: usize) -> ResultFiles {
        let mut all: BTreeMap<String, Option<ChangedFile>> =
            tree.into_iter().flat_map(|t| t.entries).map(|e| (e.path, None)).collect();
        all.extend(changed.files.iter().map(|f| (f.path.clone(), Some(f.into()))));
        let mut rest = all.into_iter().filter(|(path, _)| after.is_none_or(|a| path.as_str() > a)).peekable();
        let files: Vec<ResultFile> =
            rest.by_ref().take(limit).map(|(path, change)| ResultFile { path, change }).collect();
        let next_cursor = rest.peek().and(files.last()).map(|f| f.path.clone());
        ResultFiles { files, next_cursor }
    }
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct WhichForks {
    /// Only these, with commas between them.
    #[param(pattern = "^[0-9]{1,3}(,[0-9]{1,3})*$")]
    pub forks: Option<String>,
}

impl WhichForks {
    pub fn read(&self) -> Result<Vec<ForkNum>> {
        let Some(text) = &self.forks else { return Ok(vec![]) };
        let wrong = |_| ApiError::field("forks", text, "is not a list of forks", "write 0,2,3 and the like");
        text.split(',').map(|n| n.trim().parse::<ForkNum>().map_err(wrong)).collect()
    }
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct OneFile {
    /// A file or a folder.
    pub path: Option<String>,
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct PatchOf {
    /// Only of this file or folder.
    pub path: Option<String>,
    /// For people: that a binary file differs is said, not how.
    pub text: Option<bool>,
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct FileContent {
    pub path: String,
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct Files {
    /// Only those that differ from the base.
    pub changed: Option<bool>,
    #[param(minimum = 1, maximum = 500)]
    pub limit: Option<u32>,
    /// `next_cursor` of the page before.
    pub cursor: Option<String>,
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct PageOf {
    /// Only what is after this position.
    pub after: Option<u64>,
    #[param(minimum = 1, maximum = 500)]
    pub limit: Option<u32>,
}
