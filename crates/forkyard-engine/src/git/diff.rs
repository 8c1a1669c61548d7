//! What a commit changed, from objects alone.

use forkyard_core::Timestamp;
use serde::{Deserialize, Serialize};

use super::command::{Call, Git, git};
use super::error::{GitError, GitErrorKind, Result};
use super::names::CommitId;
use super::repo::Repo;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ChangeKind {
    Added,
    Modified,
    Deleted,
    /// File to link, or the like.
    TypeChanged,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileChange {
    pub path: String,
    pub kind: ChangeKind,
    /// None: binary.
    pub lines: Option<Lines>,
    /// In octal: 100644, 100755, 120000; 0 where there is none.
    pub old_mode: u32,
    pub new_mode: u32,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lines {
    pub added: u64,
    pub removed: u64,
}

/// Renames count as one file deleted and one added.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiffSummary {
    pub files: Vec<FileChange>,
    pub lines_added: u64,
    pub lines_removed: u64,
}

impl DiffSummary {
    pub fn is_empty(&self) -> bool {
        self.files.is_empty()
    }
    /// What ranking compares.
    pub fn changed_lines(&self) -> u64 {
        self.lines_added + self.lines_removed
    }
}

/// Nothing that runs a program or that reads more than the two trees.
fn diff_tree(args: &[&str], base: &CommitId, commit: &CommitId) -> Call {
    git([
        "diff-tree",
        "-r",
        "--no-renames",
        "--no-ext-diff",
        "--no-textconv",
        "--no-color",
        "--ignore-submodules=none",
    ])
    .args(args)
    .args([base.as_str(), commit.as_str()])
}

/// What a commit says of itself: hostile text, not made for a terminal.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CommitInfo {
    pub id: String,
    pub author: String,
    pub at: Timestamp,
    pub subject: String,
}

impl Git {
    /// The commits between two, newest first.
    pub async fn log(
        &self,
        repo: &Repo,
        base: &CommitId,
        commit: &CommitId,
        max: usize,
    ) -> Result<Vec<CommitInfo>> {
        let call = git(["rev-list", "--format=%at%x00%an%x00%s", "--encoding=UTF-8"])
            .arg(format!("--max-count={max}"))
            .args([commit.as_str(), &format!("^{base}")]);
        let listed = self.run(self.on_objects(repo, call)).await?.stdout;
        let text = String::from_utf8_lossy(&listed);
        let mut commits = vec![];
        let mut lines = text.split('\n');
        while let (Some(head), Some(line)) = (lines.next(), lines.next()) {
            let mut parts = line.splitn(3, '\0');
            let (Some(id), Some(Ok(at)), Some(author), Some(subject)) = (
                head.strip_prefix("commit "),
                parts.next().map(str::parse::<i64>),
                parts.next(),
                parts.next(),
            ) else {
                return Err(GitError::new(
                    GitErrorKind::Corrupt,
                    "git rev-list answered with something else",
                ));
            };
            commits.push(CommitInfo {
                id: id.into(),
                author: author.into(),
                at: Timestamp(u64::try_from(at).unwrap_or(0).saturating_mul(1000)),
                subject: subject.into(),
            });
        }
        Ok(commits)
    }

    pub async fn diff(&self, repo: &Repo, base: &CommitId, commit: &CommitId) -> Result<DiffSummary> {
        let call = diff_tree(&["-z", "--raw", "--numstat"], base, commit);
        let listed = self.run(self.on_objects(repo, call)).await?.stdout;
        parse(&listed)
            .ok_or_else(|| GitError::new(GitErrorKind::Corrupt, "git diff-tree answered with something else"))
    }

    /// A patch that `git apply` takes, binary files included.
    pub async fn patch(
        &self,
        repo: &Repo,
        base: &CommitId,
        commit: &CommitId,
        max_bytes: u64,
    ) -> Result<Vec<u8>> {
        let call = diff_tree(
            &["--patch", "--binary", "--full-index", "--src-prefix=a/", "--dst-prefix=b/"],
            base,
            commit,
        );
        Ok(self.run(self.on_objects(repo, call).max_output(max_bytes)).await?.stdout)
    }

    /// A patch of some files alone, for showing.
    pub async fn patch_of(
        &self,
        repo: &Repo,
        base: &CommitId,
        commit: &CommitId,
        paths: &[String],
        max_bytes: u64,
    ) -> Result<Vec<u8>> {
        let call =
            diff_tree(&["--patch", "--src-prefix=a/", "--dst-prefix=b/"], base, commit).arg("--").args(paths);
        Ok(self.run(self.on_objects(repo, call).max_output(max_bytes)).await?.stdout)
    }
}

/// Records `:OLD NEW OID OID STATUS NUL PATH NUL`, then `ADDED TAB REMOVED TAB PATH NUL`, in the same order.
fn parse(listed: &[u8]) -> Option<DiffSummary> {
    let mut summary = DiffSummary::default();
    let mut records = listed.split(|b| *b == 0).filter(|r| !r.is_empty());
    let mut counted = 0;
    while let Some(record) = records.next() {
        if let Some(raw) = record.strip_prefix(b":") {
            let raw = std::str::from_utf8(raw).ok()?;
            let mut parts = raw.split(' ');
            let old_mode = u32::from_str_radix(parts.next()?, 8).ok()?;
            let new_mode = u32::from_str_radix(parts.next()?, 8).ok()?;
            let kind = match parts.nth(2)? {
                "A" => ChangeKind::Added,
                "M" => ChangeKind::Modified,
                "D" => ChangeKind::Deleted,
                "T" => ChangeKind::TypeChanged,
                _ => return None,
            };
            let path = String::from_utf8_lossy(records.next()?).into_owned();
            summary.files.push(FileChange { path, kind, lines: None, old_mode, new_mode });
        } else {
            let text = String::from_utf8_lossy(record);
            let mut parts = text.splitn(3, '\t');
            let (added, removed) = (parts.next()?, parts.next()?);
            let file = summary.files.get_mut(counted)?;
            counted += 1;
            if (added, removed) != ("-", "-") {
                let lines = Lines { added: added.parse().ok()?, removed: removed.parse().ok()? };
                summary.lines_added += lines.added;
                summary.lines_removed += lines.removed;
                file.lines = Some(lines);
            }
        }
    }
    (counted == summary.files.len()).then_some(summary)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn odd_names_and_binary_files_are_read() {
        let listed =
            b":000000 100644 0 1 A\0a\tb\nc\0:100644 100755 1 2 M\0bin\x00\x31\t0\ta\tb\nc\0-\t-\tbin\0";
        let d = parse(listed).unwrap();
        assert_eq!(d.files[0].path, "a\tb\nc");
        assert_eq!((d.files[0].lines, d.files[1].lines), (Some(Lines { added: 1, removed: 0 }), None));
        assert_eq!((d.files[1].old_mode, d.files[1].new_mode), (0o100_644, 0o100_755));
        assert_eq!(d.changed_lines(), 1);
        for bad in [&b":1"[..], b"x", b":100644 100644 a b X\0p\0", b":000000 100644 0 1 A\0a\0"] {
            assert_eq!(parse(bad), None);
        }
    }
}
