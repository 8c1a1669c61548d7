//! Work brought home: out of the sandbox as files, into git as a checked commit.

use forkyard_core::SandboxId;
use forkyard_core::task::{Base, Collected, Output, TaskError, TaskResult};
use forkyard_core::view::DiffStat;
use forkyard_sandbox::{ErrorKind, GitExport, GlobRequest, Sandbox};
use std::sync::Arc;

use super::{Hands, Job, git_error, now, sandbox_error, store_error};
use crate::git::{CommitId, WorkCommit, WorkLimits};

/// Captured files, each and in number.
const MAX_CAPTURED_BYTES: u64 = 16 << 20;
const MAX_CAPTURED: usize = 200;

impl Hands {
    pub(super) async fn collect(&self, job: &Job, id: &SandboxId, base: &Base) -> TaskResult {
        let (sandbox, from_checkpoint) = self.collectable(job, id, base).await?;
        let repo = self.repo(job).await?;
        let start = CommitId::new(&base.commit).map_err(git_error)?;
        let tree = self.git.tree(&repo, &start).await.map_err(git_error)?;
        let limits = WorkLimits::default();
        let export = GitExport {
            repo: None,
            base: tree.entries,
            max_bytes: limits.max_bytes,
            max_files: limits.max_files as u64,
        };
        let work = sandbox.git_export(export).await.map_err(sandbox_error)?;
        let about = WorkCommit {
            message: format!("Forkyard {}/{}", job.run, Self::fork(job)),
            author: "forkyard".into(),
            email: "forkyard@localhost".into(),
            at: now(),
        };
        let commit = self.git.commit_work(&repo, &start, &work, &about, limits).await.map_err(git_error)?;
        let name = Self::fork(job).to_string();
        self.git.keep(&repo, &job.run, &name, &commit).await.map_err(git_error)?;
        let diff = self.git.diff(&repo, &start, &commit).await.map_err(git_error)?;
        let captured = self.capture(job, &*sandbox).await?;
        let edited_tests = diff
            .files
            .iter()
            .map(|f| f.path.clone())
            .filter(|p| looks_like_a_test(p))
            .take(MAX_CAPTURED)
            .collect();
        Ok(Output::Collected(Collected {
            commit: commit.to_string(),
            diff: DiffStat {
                files: diff.files.len() as u64,
                added: diff.lines_added,
                removed: diff.lines_removed,
            },
            from_checkpoint,
            captured,
            edited_tests,
        }))
    }

    /// The fork's sandbox; if it is gone, its last checkpoint in a sandbox of the same name.
    async fn collectable(
        &self,
        job: &Job,
        id: &SandboxId,
        base: &Base,
    ) -> Result<(Arc<dyn Sandbox>, bool), TaskError> {
        let provider = self.provider(job)?;
        match provider.attach(id, job.attempt).await {
            Ok(sandbox) => return Ok((sandbox, false)),
            Err(e) if matches!(e.kind, ErrorKind::NotFound | ErrorKind::Unavailable | ErrorKind::Timeout) => {
            }
            Err(e) => return Err(sandbox_error(e)),
        }
        provider.destroy(id).await.map_err(sandbox_error)?;
        Ok((self.create_work(job, id, base).await?, true))
    }

    /// Files that the user wants beside the diff, kept as blobs of the run.
    async fn capture(&self, job: &Job, sandbox: &dyn Sandbox) -> Result<Vec<String>, TaskError> {
        let Some((fork, spec)) = &job.fork else { return Ok(vec![]) };
        let mut captured = vec![];
        for pattern in &spec.capture {
            let found = sandbox
                .glob(GlobRequest { pattern: pattern.clone(), path: None, max: MAX_CAPTURED })
                .await
                .map_err(sandbox_error)?;
            for path in found {
                if captured.len() >= MAX_CAPTURED || captured.contains(&path) {
                    continue;
                }
                // A file that can't be read is no reason to lose the work.
                let Ok(data) = sandbox.read_file(&format!("/workspace/{path}"), 0, MAX_CAPTURED_BYTES).await
                else {
                    continue;
                };
                let key = captured_key(job.run.as_str(), *fork, &path);
                self.store.put_blob(&key, &data).await.map_err(store_error)?;
                captured.push(path);
            }
        }
        Ok(captured)
    }
}

/// The blob of a captured file.
pub fn captured_key(run: &str, fork: u32, path: &str) -> String {
    format!("captured/{run}/{fork}/{path}")
}

/// Editing what judges the work is pointed out to whoever chooses.
fn looks_like_a_test(path: &str) -> bool {
    let path = path.to_ascii_lowercase();
    let dir = ["tests/", "test/", "spec/", "__tests__/"]
        .iter()
        .any(|d| path.starts_with(d) || path.contains(&format!("/{d}")));
    let name = path.rsplit('/').next().unwrap_or(&path);
    let stem = name.rsplit_once('.').map_or(name, |(s, _)| s);
    dir || stem.starts_with("test_")
        || stem.ends_with("_test")
        || stem.ends_with(".test")
        || stem.ends_with(".spec")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tests_are_known_by_their_names() {
        for yes in
            ["tests/a.rs", "src/test_x.py", "a/b_test.go", "x.test.ts", "pkg/__tests__/y.js", "spec/z.rb"]
        {
            assert!(looks_like_a_test(yes), "{yes}");
        }
        for no in ["src/latest.rs", "contest/a.c", "src/attestation.go"] {
            assert!(!looks_like_a_test(no), "{no}");
        }
    }
}
