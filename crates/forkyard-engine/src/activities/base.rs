//! The prepared start of a run, and the sandboxes that begin from it.

use std::time::Duration;

use forkyard_core::task::{Base, ErrorClass, Output, TaskError, TaskResult};
use forkyard_core::{Role, SandboxId, SnapshotId};
use forkyard_sandbox::{ExecRequest, Sandbox};

use super::{Hands, Job, git_error, is_url, now, run_command, sandbox_error};
use crate::git::{CommitId, Repo};

/// What setup may take; the task's own limit is above it.
const SETUP_LIMIT: Duration = Duration::from_secs(45 * 60);
const UNPACK_LIMIT: Duration = Duration::from_secs(600);
/// Where the files of the repository wait inside, before they are unpacked.
const ARCHIVE: &str = "/tmp/forkyard-base.tar";

impl Hands {
    pub(super) async fn prepare_base(&self, job: &Job, id: &SandboxId) -> TaskResult {
        let (repo, commit, branch) = self.resolve(job).await?;
        let snapshot = SnapshotId::new(format!("{}base", job.run))
            .map_err(|e| TaskError::new(ErrorClass::Permanent, e.to_string()))?;
        let base =
            Base { commit: commit.to_string(), branch, snapshot: snapshot.clone(), host: self.host.clone() };
        let provider = self.provider(job)?;
        let done = provider.snapshots().await.map_err(sandbox_error)?.iter().any(|s| s.id == snapshot);
        if done {
            return Ok(Output::Base(base));
        }
        // What an interrupted try left is of unknown completeness.
        provider.destroy(id).await.map_err(sandbox_error)?;
        let spec = self.sandbox_spec(job, job.spec.sandbox.root.clone(), Role::Base);
        let labels = spec.labels.clone();
        let sandbox = provider.create(id, job.attempt, &spec).await.map_err(sandbox_error)?;
        self.check_out(&*sandbox, &repo, &commit, &base.branch).await?;
        if let Some(setup) = &job.spec.setup {
            self.set_up(&*sandbox, setup).await?;
        }
        sandbox.snapshot(&snapshot, &labels).await.map_err(sandbox_error)?;
        Ok(Output::Base(base))
    }

    pub(super) async fn set_up(&self, sandbox: &dyn Sandbox, setup: &str) -> Result<(), TaskError> {
        let (code, _, output) = run_command(sandbox, setup, SETUP_LIMIT).await?;
        if code != 0 {
            let why = format!("setup ended with {code}:\n{output}");
            return Err(TaskError::new(ErrorClass::Permanent, why));
        }
        Ok(())
    }

    /// The commit that a run starts from; decided once and kept by a ref, so that a retry can't see another one.
    async fn resolve(&self, job: &Job) -> Result<(Repo, CommitId, String), TaskError> {
        let spec = &job.spec.repo;
        self.git.prepare().await.map_err(git_error)?;
        let rev = spec.branch.as_deref();
        let (repo, resolved) = if is_url(&spec.source) {
            self.git.fetch(&spec.source, rev).await.map_err(git_error)?
        } else {
            let repo = self.git.open(std::path::Path::new(&spec.source)).await.map_err(git_error)?;
            let resolved = self.git.resolve(&repo, rev).await.map_err(git_error)?;
            (repo, resolved)
        };
        let branch = resolved.branch.clone().or_else(|| spec.branch.clone()).unwrap_or_else(|| "main".into());
        if let Some(kept) = self.git.kept(&repo, &job.run, "base").await.map_err(git_error)? {
            return Ok((repo, kept, branch));
        }
        let commit = if spec.dirty && !is_url(&spec.source) {
            self.git.commit_dirty(&repo, now()).await.map_err(git_error)?
        } else {
            resolved.commit
        };
        self.git.keep(&repo, &job.run, "base", &commit).await.map_err(git_error)?;
        Ok((repo, commit, branch))
    }

    /// The commit's files in /workspace, and, where the image has a git, a repository around them.
    async fn check_out(
        &self,
        sandbox: &dyn Sandbox,
        repo: &Repo,
        commit: &CommitId,
        branch: &str,
    ) -> Result<(), TaskError> {
        let tree = self.git.tree(repo, commit).await.map_err(git_error)?;
        let (mut write, mut read) = tokio::io::duplex(1 << 18);
        let archive = async {
            let done = self.git.archive(repo, &tree.entries, now().0 / 1000, &mut write).await;
            drop(write);
            done
        };
        let (archived, written) =
            tokio::join!(archive, sandbox.write_file_from(ARCHIVE, &mut read, Some(0o600)));
        archived.map_err(git_error)?;
        written.map_err(sandbox_error)?;
        let unpack = format!("set -e; mkdir -p /workspace; tar -xf {ARCHIVE} -C /workspace; rm -f {ARCHIVE}");
        let (code, _, output) = run_command(sandbox, &unpack, UNPACK_LIMIT).await?;
        if code != 0 {
            return Err(TaskError::new(
                ErrorClass::Permanent,
                format!("the files could not be unpacked: {output}"),
            ));
        }
        self.init_git(sandbox, branch).await
    }

    /// An image without git is no error: the agent then works without one, and Forkyard needs none.
    async fn init_git(&self, sandbox: &dyn Sandbox, branch: &str) -> Result<(), TaskError> {
        let script = r#"command -v git >/dev/null 2>&1 || exit 0
set -e
cd /workspace
git init -q
git symbolic-ref HEAD "refs/heads/$FORKYARD_BRANCH"
git add -A -f
git -c user.name=forkyard -c user.email=forkyard@localhost -c commit.gpgsign=false commit -q --allow-empty --no-verify -m "Base of this run"
git config user.name forkyard
git config user.email forkyard@localhost
"#;
        let request = ExecRequest::shell(script).env("FORKYARD_BRANCH", branch).timeout(UNPACK_LIMIT);
        let (result, _, err) =
            sandbox.exec(request).await.map_err(sandbox_error)?.output().await.map_err(sandbox_error)?;
        if result.exit_code != 0 {
            let why = String::from_utf8_lossy(&err).into_owned();
            return Err(TaskError::new(
                ErrorClass::Permanent,
                format!("git could not be set up inside: {why}"),
            ));
        }
        Ok(())
    }

    /// A fork's sandbox: a child of the base, or of its last checkpoint if it had a sandbox before.
    pub(super) async fn create(&self, job: &Job, id: &SandboxId, base: &Base) -> TaskResult {
        self.create_work(job, id, base).await?;
        Ok(Output::Created { host: self.host.clone() })
    }
}
