//! A result into the user's repository: as a branch, or onto the working tree. All of it or nothing.

use super::command::{Around, Git, git};
use super::error::{GitError, GitErrorKind, Result};
use super::names::{CommitId, check_branch};
use super::quarantine::CommitLimits;
use super::repo::Repo;

/// What was done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Applied {
    Branch { name: String, commit: CommitId },
    WorkTree { files: usize },
}

/// The id that stands for "there is none" when a ref is made.
const NO_COMMIT: &str = "0000000000000000000000000000000000000000";

impl Git {
    /// Makes a new branch of `target` at `commit`, bringing its objects over from `source` if they are not there.
    pub async fn apply_branch(
        &self,
        source: &Repo,
        base: &CommitId,
        commit: &CommitId,
        target: &Repo,
        branch: &str,
    ) -> Result<Applied> {
        check_branch(branch)?;
        if branch == "HEAD" {
            return Err(GitError::invalid("a branch can't be called HEAD"));
        }
        if !self.has(target, commit).await? {
            self.check_base(target, base).await?;
            let pack = self.pack(source, base, commit).await?;
            self.take_pack(target, pack).await?;
        }
        let name = format!("refs/heads/{branch}");
        let call = git(["update-ref", "--no-deref", &name, commit.as_str(), NO_COMMIT]);
        let answer = self.try_run(self.on_refs(target, call)).await?;
        if answer.ok {
            return Ok(Applied::Branch { name: branch.to_string(), commit: commit.clone() });
        }
        if answer.stderr.contains("already exists") || answer.stderr.contains("exists; cannot create") {
            return Err(GitError::new(GitErrorKind::Conflict, format!("branch {branch:?} is there already"))
                .hint("name another one with --branch"));
        }
        Err(GitError::from_stderr("git update-ref", &answer.stderr))
    }

    /// The commits from `base` to `commit` with all that is new in them, for another machine's repository.
    pub async fn pack(&self, repo: &Repo, base: &CommitId, commit: &CommitId) -> Result<Vec<u8>> {
        let wanted = format!("{commit}\n^{base}\n");
        let call = git(["pack-objects", "--revs", "--stdout", "--quiet"]).stdin(wanted);
        Ok(self.run(self.on_objects(repo, call)).await?.stdout)
    }

    /// As [`Git::apply_branch`], where the objects come from another machine: checked like those of a sandbox.
    pub async fn apply_pack(
        &self,
        pack: Vec<u8>,
        base: &CommitId,
        commit: &CommitId,
        target: &Repo,
        branch: &str,
    ) -> Result<Applied> {
        if !self.has(target, commit).await? {
            self.check_base(target, base).await?;
            let mut quarantine = self.quarantine(target, base).await?;
            quarantine.take_commits(commit, pack, CommitLimits::default()).await?;
            quarantine.release().await?;
        }
        self.apply_branch(target, base, commit, target, branch).await
    }

    async fn check_base(&self, target: &Repo, base: &CommitId) -> Result<()> {
        if self.has(target, base).await? {
            return Ok(());
        }
        Err(GitError::new(
            GitErrorKind::NotFound,
            format!("the repository does not have commit {base}, which the result is based on"),
        )
        .hint("run `git fetch` there, or apply the result as a patch"))
    }

    /// Applies a patch to the files of the user's working tree, uncommitted changes included. If one hunk does not fit,
    /// nothing is changed and the error names every file that does not.
    pub async fn apply_work_tree(&self, target: &Repo, patch: Vec<u8>) -> Result<Applied> {
        let Some(work_tree) = &target.work_tree else {
            return Err(GitError::invalid("a bare repository has no working tree")
                .hint("apply the result as a branch"));
        };
        let files = patch.split(|b| *b == b'\n').filter(|l| l.starts_with(b"diff --git ")).count();
        if files == 0 {
            return Ok(Applied::WorkTree { files });
        }
        let call = git(["apply", "--binary", "--whitespace=nowarn", "-"])
            .env("GIT_DIR", &target.git_dir)
            .env("GIT_WORK_TREE", work_tree)
            .cwd(work_tree)
            .around(Around::User)
            .stdin(patch);
        let answer = self.try_run(call).await?;
        if answer.ok {
            return Ok(Applied::WorkTree { files });
        }
        let mut conflicts: Vec<&str> = answer.stderr.lines().filter_map(conflict).collect();
        conflicts.dedup();
        if conflicts.is_empty() {
            return Err(GitError::from_stderr("git apply", &answer.stderr));
        }
        Err(GitError::new(
            GitErrorKind::Conflict,
            format!(
                "the result does not fit the working tree, and nothing was changed:\n{}",
                conflicts.join("\n")
            ),
        )
        .hint("commit or stash these files first, or apply the result as a branch and merge it"))
    }
}

/// The part of a line of `git apply` that names a file.
fn conflict(line: &str) -> Option<&str> {
    let said = line.strip_prefix("error: ")?;
    // The same file is named again without a line: "X: patch does not apply".
    (!said.ends_with("patch does not apply")).then(|| said.strip_prefix("patch failed: ").unwrap_or(said))
}
