//! Judging a result, in a sandbox that the agent never saw: the base, plus the collected commit, with protected paths as they
//! were.

use std::collections::BTreeSet;
use std::time::Duration;

use forkyard_core::sandbox::Root;
use forkyard_core::task::{Base, ErrorClass, Output, TaskError, TaskResult, Verdict};
use forkyard_core::{Role, SandboxId};
use forkyard_sandbox::{GlobRequest, Sandbox};
use globset::{Glob, GlobSet, GlobSetBuilder};

use super::{Hands, Job, git_error, run_command, sandbox_error, tail};
use crate::git::{ChangeKind, CommitId};

/// Of verify and of score, each; the task's own limit is above their sum.
const JUDGE_LIMIT: Duration = Duration::from_secs(14 * 60);
/// Largest file of a result.
const MAX_FILE_BYTES: u64 = 256 << 20;
/// Files that may match a protected path.
const MAX_PROTECTED: usize = 100_000;

impl Hands {
    pub(super) async fn verify_base(&self, job: &Job, id: &SandboxId, base: &Base) -> TaskResult {
        let sandbox = self.fresh(job, id, base).await?;
        let verdict = self.judge(job, &*sandbox).await?;
        Ok(Output::BaseVerified(verdict))
    }

    pub(super) async fn verify(&self, job: &Job, id: &SandboxId, base: &Base, commit: &str) -> TaskResult {
        let sandbox = self.fresh(job, id, base).await?;
        let (base_commit, commit) =
            (CommitId::new(&base.commit).map_err(git_error)?, CommitId::new(commit).map_err(git_error)?);
        self.put(job, &*sandbox, &base_commit, &commit).await?;
        if let Some(setup) = &job.spec.setup {
            // The result may have broken it: that is a verdict, not an error of ours.
            if let Err(e) = self.set_up(&*sandbox, setup).await {
                let verdict = Verdict { passed: Some(false), output: tail(&e.message), ..Default::default() };
                return Ok(Output::Verified(verdict));
            }
        }
        self.protect(job, &*sandbox, &base_commit).await?;
        let verdict = self.judge(job, &*sandbox).await?;
        Ok(Output::Verified(verdict))
    }

    /// From the base's snapshot, never from the fork's; nothing of an earlier try.
    async fn fresh(
        &self,
        job: &Job,
        id: &SandboxId,
        base: &Base,
    ) -> Result<std::sync::Arc<dyn Sandbox>, TaskError> {
        let provider = self.provider(job)?;
        provider.destroy(id).await.map_err(sandbox_error)?;
        let spec = self.sandbox_spec(job, Root::Snapshot(base.snapshot.clone()), Role::Verify);
        provider.create(id, job.attempt, &spec).await.map_err(sandbox_error)
    }

    /// The files of the result over those of the base.
    async fn put(
        &self,
        job: &Job,
        sandbox: &dyn Sandbox,
        base: &CommitId,
        commit: &CommitId,
    ) -> Result<(), TaskError> {
        let repo = self.repo(job).await?;
        let diff = self.git.diff(&repo, base, commit).await.map_err(git_error)?;
        for file in diff.files {
            let path = format!("/workspace/{}", file.path);
            match file.kind {
                ChangeKind::Deleted => sandbox.remove(&path, true).await.map_err(sandbox_error)?,
                ChangeKind::Added | ChangeKind::Modified | ChangeKind::TypeChanged => {
                    self.write(&repo, commit, &file.path, file.new_mode, sandbox).await?;
                }
            }
        }
        Ok(())
    }

    async fn write(
        &self,
        repo: &crate::git::Repo,
        commit: &CommitId,
        path: &str,
        mode: u32,
        sandbox: &dyn Sandbox,
    ) -> Result<(), TaskError> {
        // A link is not followed, neither here nor there: judges see a result without it.
        let Some(data) = self.git.file(repo, commit, path, MAX_FILE_BYTES).await.map_err(git_error)? else {
            return Ok(());
        };
        let at = format!("/workspace/{path}");
        let mode = if mode == 0o100_755 { 0o755 } else { 0o644 };
        sandbox.write_file(&at, data.into(), Some(mode)).await.map_err(sandbox_error)
    }

    /// Protected paths are made equal to the base: changed and deleted ones restored, added ones removed.
    async fn protect(&self, job: &Job, sandbox: &dyn Sandbox, base: &CommitId) -> Result<(), TaskError> {
        if job.spec.protect.is_empty() {
            return Ok(());
        }
        let globs = globs(&job.spec.protect)?;
        let repo = self.repo(job).await?;
        let tree = self.git.tree(&repo, base).await.map_err(git_error)?;
        let wanted: BTreeSet<&str> =
            tree.entries.iter().map(|e| e.path.as_str()).filter(|p| globs.is_match(p)).collect();
        for pattern in &job.spec.protect {
            let request = GlobRequest { pattern: pattern.clone(), path: None, max: MAX_PROTECTED };
            for found in sandbox.glob(request).await.map_err(sandbox_error)? {
                if !wanted.contains(found.as_str()) {
                    sandbox.remove(&format!("/workspace/{found}"), true).await.map_err(sandbox_error)?;
                }
            }
        }
        for e in tree.entries.iter().filter(|e| wanted.contains(e.path.as_str())) {
            self.write(&repo, base, &e.path, e.mode, sandbox).await?;
        }
        Ok(())
    }

    async fn judge(&self, job: &Job, sandbox: &dyn Sandbox) -> Result<Verdict, TaskError> {
        let mut verdict = Verdict::default();
        if let Some(verify) = &job.spec.verify {
            let (code, _, output) = run_command(sandbox, verify, JUDGE_LIMIT).await?;
            verdict.passed = Some(code == 0);
            verdict.exit_code = Some(code);
            verdict.output = output;
        }
        if let Some(score) = &job.spec.score {
            let (code, stdout, output) = run_command(sandbox, score, JUDGE_LIMIT).await?;
            let last = stdout.lines().rev().find(|l| !l.trim().is_empty()).unwrap_or_default();
            verdict.score = last.trim().parse::<f64>().ok().filter(|s| code == 0 && s.is_finite());
            if verdict.score.is_none() {
                verdict.output.push_str(&format!("\nscore gave no number (exit {code}): {output}"));
            }
        }
        Ok(verdict)
    }
}

fn globs(patterns: &[String]) -> Result<GlobSet, TaskError> {
    let mut set = GlobSetBuilder::new();
    let bad = |e: globset::Error| TaskError::new(ErrorClass::Permanent, format!("protect: {e}"));
    for p in patterns {
        set.add(Glob::new(p).map_err(bad)?);
    }
    set.build().map_err(bad)
}
