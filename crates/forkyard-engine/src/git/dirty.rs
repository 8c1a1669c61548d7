//! Uncommitted changes of the user's own tree, as a commit that no branch has. Tree and index stay as they are.

use std::fs;

use forkyard_core::Timestamp;

use super::command::{Around, Call, Git, git, io_error};
use super::error::{GitError, Result};
use super::names::CommitId;
use super::repo::Repo;

impl Git {
    /// Whether files differ from HEAD, untracked ones that are not ignored included.
    pub async fn is_dirty(&self, repo: &Repo) -> Result<bool> {
        let Some(call) =
            self.in_work_tree(repo, git(["status", "--porcelain", "--untracked-files=normal", "-z"]))
        else {
            return Ok(false);
        };
        Ok(!self.run(call).await?.stdout.is_empty())
    }

    /// A commit of the files as they are now, on top of HEAD; HEAD itself if nothing differs.
    pub async fn commit_dirty(&self, repo: &Repo, at: Timestamp) -> Result<CommitId> {
        let head = self.resolve(repo, None).await?.commit;
        let index =
            tempfile::Builder::new().prefix("index").tempdir_in(&self.config.dir).map_err(io_error)?;
        let index_file = index.path().join("index");
        // A copy of the user's index spares hashing every file anew.
        match fs::copy(repo.git_dir.join("index"), &index_file) {
            Ok(_) => {}
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => {}
            Err(e) => return Err(io_error(e)),
        }
        let call = |call: Call| {
            self.in_work_tree(repo, call)
                .map(|c| c.env("GIT_INDEX_FILE", &index_file))
                .ok_or_else(|| GitError::invalid("a bare repository has no uncommitted changes"))
        };
        self.run(call(git(["add", "--all", "--", "."]))?).await?;
        let tree = self.run(call(git(["write-tree"]))?).await?.text();
        let head_tree =
            self.run(call(git(["rev-parse", "--verify"]).arg(format!("{head}^{{tree}}")))?).await?.text();
        if tree == head_tree {
            return Ok(head);
        }
        let date = format!("@{} +0000", at.0 / 1000);
        let commit = git(["commit-tree", "-p", head.as_str(), "-m", "Uncommitted changes"])
            .arg(&tree)
            .env("GIT_AUTHOR_NAME", "Forkyard")
            .env("GIT_AUTHOR_EMAIL", "forkyard@localhost")
            .env("GIT_AUTHOR_DATE", &date)
            .env("GIT_COMMITTER_NAME", "Forkyard")
            .env("GIT_COMMITTER_EMAIL", "forkyard@localhost")
            .env("GIT_COMMITTER_DATE", &date);
        CommitId::new(&self.run(call(commit)?).await?.text())
    }

    fn in_work_tree(&self, repo: &Repo, call: Call) -> Option<Call> {
        let work_tree = repo.work_tree.as_ref()?;
        let call = call.env("GIT_DIR", &repo.git_dir).env("GIT_WORK_TREE", work_tree).cwd(work_tree);
        Some(call.around(Around::User))
    }
}
