//! Judging a result, in a sandbox that the agent never saw: the base, plus the collected commit, with protected paths as they
//! were.

use std::collections::BTreeSet;
use std::time::Duration;

use forkyard_core::sandbox::Root;
use forkyard_core::spec::Start;
use forkyard_core::task::{Base, ErrorClass, Output, TaskError, TaskResult, Verdict};
use forkyard_core::{Role, SandboxId};
use forkyard_sandbox::{ErrorKind, GitExport, GlobRequest, Sandbox, TreeEntry};
use globset::{Glob, GlobSet, GlobSetBuilder};

use super::{Hands, Job, MAX_OUTPUT_BYTES, Ran, git_error, run_command, sandbox_error, tail};
use crate::git::{ChangeKind, CommitId, FileChange, Repo, WorkLimits};

/// Of verify and of score, each; the task's own limit is above their sum.
const JUDGE_LIMIT: Duration = Duration::from_secs(14 * 60);
/// Of a line that should have been a score, letters that are shown.
const MAX_SCORE_SHOWN: usize = 40;
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
        match job.fork.as_ref().map(|(_, fork)| job.spec.start_of(fork)) {
            Some(Start::Parent(_)) => self.make_equal(job, &*sandbox, &commit).await?,
            Some(Start::Root(_)) | None => self.put(job, &*sandbox, &base_commit, &commit).await?,
        }
        if let Some(setup) = &job.spec.setup {
            // The result may have broken it: that is a verdict, not an error of ours.
            if let Err(e) = self.set_up(&*sandbox, setup).await {
                let verdict = Verdict { passed: Some(false), output: tail(&e.message), ..Default::default() };
                return Ok(Output::Verified(verdict));
            }
        }
        self.protect(job, &*sandbox, &base_commit, &commit).await?;
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
        self.clear(job, id).await?;
        let spec = self.sandbox_spec(job, Root::Snapshot(self.base_here(job, base).await?), Role::Verify);
        self.provider(job)?.create(id, job.attempt, &spec).await.map_err(sandbox_error)
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
        let (gone, new): (Vec<&FileChange>, Vec<&FileChange>) =
            diff.files.iter().partition(|f| f.kind == ChangeKind::Deleted);
        // What goes makes room for what comes: a file in the place of a folder, say.
        for file in gone {
            remove(sandbox, &file.path).await?;
        }
        let new: BTreeSet<&str> = new.iter().map(|f| f.path.as_str()).collect();
        self.put_files(sandbox, &repo, commit, |path| new.contains(path)).await
    }

    async fn put_files(
        &self,
        sandbox: &dyn Sandbox,
        repo: &Repo,
        commit: &CommitId,
        wanted: impl Fn(&str) -> bool,
    ) -> Result<(), TaskError> {
        let mut entries = self.git.tree(repo, commit).await.map_err(git_error)?.entries;
        entries.retain(|e| wanted(&e.path));
        self.unpack(sandbox, repo, &entries).await
    }

    /// The same where the sandbox did not begin as the base: every file that is not ignored becomes that of the result.
    async fn make_equal(&self, job: &Job, sandbox: &dyn Sandbox, commit: &CommitId) -> Result<(), TaskError> {
        let repo = self.repo(job).await?;
        let tree = self.git.tree(&repo, commit).await.map_err(git_error)?;
        let limits = WorkLimits::default();
        let export = GitExport {
            repo: None,
            base: tree.entries.clone(),
            max_bytes: limits.max_bytes,
            max_files: limits.max_files as u64,
        };
        let other = sandbox.git_export(export).await.map_err(sandbox_error)?;
        let wrong: BTreeSet<&str> = other
            .changed
            .iter()
            .map(|f| f.path.as_str())
            .chain(other.deleted.iter().map(String::as_str))
            .collect();
        for path in &wrong {
            remove(sandbox, path).await?;
        }
        let missing: Vec<TreeEntry> =
            tree.entries.iter().filter(|e| wrong.contains(e.path.as_str())).cloned().collect();
        self.unpack(sandbox, &repo, &missing).await
    }

    /// Protected paths are made equal to the base: changed and deleted ones restored, added ones removed.
    async fn protect(
        &self,
        job: &Job,
        sandbox: &dyn Sandbox,
        base: &CommitId,
        commit: &CommitId,
    ) -> Result<(), TaskError> {
        if job.spec.protect.is_empty() {
            return Ok(());
        }
        let globs = globs(&job.spec.protect)?;
        let repo = self.repo(job).await?;
        let tree = self.git.tree(&repo, base).await.map_err(git_error)?;
        let wanted: BTreeSet<&str> =
            tree.entries.iter().map(|e| e.path.as_str()).filter(|p| globs.is_match(p)).collect();
        // What the result ignores was committed by force, and no search would show it.
        for e in self.git.tree(&repo, commit).await.map_err(git_error)?.entries {
            if globs.is_match(&e.path) && !wanted.contains(e.path.as_str()) {
                remove(sandbox, &e.path).await?;
            }
        }
        for pattern in &job.spec.protect {
            let request = GlobRequest { pattern: pattern.clone(), path: None, max: MAX_PROTECTED };
            for found in sandbox.glob(request).await.map_err(sandbox_error)? {
                if !wanted.contains(found.as_str()) {
                    remove(sandbox, &found).await?;
                }
            }
        }
        self.put_files(sandbox, &repo, base, |path| wanted.contains(path)).await
    }

    async fn judge(&self, job: &Job, sandbox: &dyn Sandbox) -> Result<Verdict, TaskError> {
        let mut verdict = Verdict::default();
        if let Some(verify) = &job.spec.verify {
            let Ran { code, output, .. } = run_command(sandbox, verify, JUDGE_LIMIT).await?;
            verdict.passed = Some(code == 0);
            verdict.exit_code = Some(code);
            verdict.output = output;
        }
        if let Some(score) = &job.spec.score {
            let Ran { code, stdout, cut, output } = run_command(sandbox, score, JUDGE_LIMIT).await?;
            let last = stdout.lines().rev().find(|l| !l.trim().is_empty()).unwrap_or_default();
            verdict.score = last.trim().parse::<f64>().ok().filter(|s| code == 0 && !cut && s.is_finite());
            if verdict.score.is_none() {
                verdict.score_error = Some(match code {
                    0 if cut => format!("it printed more than {} MiB", MAX_OUTPUT_BYTES >> 20),
                    0 if last.is_empty() => "it printed nothing".into(),
                    0 => {
                        let shown: String = last.trim().chars().take(MAX_SCORE_SHOWN).collect();
                        format!("its last line is no number: {shown:?}")
                    }
                    code => format!("exit {code}"),
                });
                verdict.output.push_str(&format!("\nscore gave no number (exit {code}): {output}"));
            }
        }
        Ok(verdict)
    }
}

async fn remove(sandbox: &dyn Sandbox, path: &str) -> Result<(), TaskError> {
    match sandbox.remove(&format!("/workspace/{path}"), true).await {
        Err(e) if e.kind != ErrorKind::NotFound => Err(sandbox_error(e)),
        Ok(()) | Err(_) => Ok(()),
    }
}

pub(super) fn globs(patterns: &[String]) -> Result<GlobSet, TaskError> {
    let mut set = GlobSetBuilder::new();
    let bad = |e: globset::Error| TaskError::new(ErrorClass::Permanent, format!("protect: {e}"));
    for p in patterns {
        set.add(Glob::new(p).map_err(bad)?);
    }
    set.build().map_err(bad)
}
