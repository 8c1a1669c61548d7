//! The prepared start of a run, and the sandboxes that begin from it.

use std::collections::BTreeSet;
use std::time::Duration;

use forkyard_core::sandbox::{Labels, Root};
use forkyard_core::spec::Start;
use forkyard_core::task::{Base, ErrorClass, Output, TaskError, TaskResult};
use forkyard_core::{ForkNum, Role, RunId, SandboxId, SnapshotId};
use forkyard_sandbox::{ErrorKind, ExecRequest, GitExport, Sandbox, SandboxStatus, TreeEntry};

use super::{Hands, Job, Ran, git_error, is_url, now, run_command, sandbox_error};
use crate::git::{CommitId, GitErrorKind, History, HistoryLimits, Repo, Tree, WorkLimits};

/// What setup may take; the task's own limit is above it.
const SETUP_LIMIT: Duration = Duration::from_secs(45 * 60);
const UNPACK_LIMIT: Duration = Duration::from_secs(600);
/// Between git and the sandbox.
const ARCHIVE_BUFFER: usize = 1 << 18;
const GIT_DIR: &str = "/workspace/.git";
/// A sandbox that forks go on from has at least one of this many files of the commit: fewer are names that any repository has.
const FILES_FOR_ONE: usize = 10;
/// Of files that were found or expected, these many are named.
const MAX_FILES_NAMED: usize = 3;
/// Longer than any branch name that is taken.
const MAX_REF_BYTES: u64 = 4096;
/// Folders that are made in the place of submodules.
const MAX_SUBMODULES: usize = 1_000;
/// Of the repository inside. The name is for commits that the agent makes.
const CONFIG: &str = "[core]
\trepositoryformatversion = 0
\tfilemode = true
\tbare = false
\tlogallrefupdates = true
[gc]
\tauto = 0
[user]
\tname = forkyard
\temail = forkyard@localhost
";

/// The commit that a run starts from, as it comes into sandboxes.
struct Checkout {
    repo: Repo,
    commit: CommitId,
    branch: String,
    tree: Tree,
    /// None: it could not be had (a partial clone, say); sandboxes then know of one commit alone.
    history: Option<History>,
}

impl Hands {
    /// Once for each of the starts that the run's forks ask for, one after the other in the sandbox of the same name: whatever
    /// happens there is one sandbox to clean up, and its run knows of it.
    pub(super) async fn prepare_base(&self, job: &Job, id: &SandboxId) -> TaskResult {
        self.check_inside(job)?;
        let (repo, commit, branch) = self.resolve(job).await?;
        let base = Base {
            commit: commit.to_string(),
            branch: branch.clone(),
            snapshot: base_id(&job.run, 0)?,
            host: self.host.clone(),
        };
        let starts = job.spec.starts();
        let known = self.provider(job)?.snapshots().await.map_err(sandbox_error)?;
        let mut checkout = None;
        for (n, start) in starts.iter().enumerate() {
            let snapshot = base_id(&job.run, n)?;
            if known.iter().any(|s| s.id == snapshot) {
                continue;
            }
            let checkout = match &mut checkout {
                Some(checkout) => checkout,
                none @ None => none.insert(self.checkout(&repo, &commit, &branch).await?),
            };
            self.prepare_start(job, id, start, &snapshot, checkout).await?;
        }
        Ok(Output::Base(base))
    }

    async fn checkout(&self, repo: &Repo, commit: &CommitId, branch: &str) -> Result<Checkout, TaskError> {
        let tree = self.git.tree(repo, commit).await.map_err(git_error)?;
        let history = match self.git.history(repo, commit, HistoryLimits::default()).await {
            Ok(history) => Some(history),
            Err(e) => {
                tracing::warn!(%commit, "sandboxes get no history: {e}");
                None
            }
        };
        Ok(Checkout { repo: repo.clone(), commit: commit.clone(), branch: branch.into(), tree, history })
    }

    async fn prepare_start(
        &self,
        job: &Job,
        id: &SandboxId,
        start: &Start,
        snapshot: &SnapshotId,
        checkout: &Checkout,
    ) -> Result<(), TaskError> {
        self.clear(job, id).await?;
        let provider = self.provider(job)?;
        let (root, frozen) = match start {
            Start::Root(root) => (root.clone(), None),
            Start::Parent(parent) => {
                let frozen = self.freeze(job, parent, snapshot).await?;
                (Root::Snapshot(frozen.clone()), Some(frozen))
            }
        };
        let spec = self.sandbox_spec(job, root, Role::Base);
        let labels = spec.labels.clone();
        let sandbox = provider.create(id, job.attempt, &spec).await.map_err(sandbox_error)?;
        // A sandbox that has files already is what somebody wants to go on from.
        match start {
            Start::Parent(parent) if !is_empty(&*sandbox).await? => {
                check_files(&*sandbox, parent, checkout).await?;
            }
            Start::Root(_) | Start::Parent(_) => self.check_out(&*sandbox, checkout).await?,
        }
        if let Some(setup) = &job.spec.setup {
            self.set_up(&*sandbox, setup).await?;
        }
        // What somebody goes on from is a part of the work; what was only prepared is not.
        let plain = matches!(start, Start::Root(Root::Default)) && job.spec.setup.is_none();
        if frozen.is_none() && !plain {
            self.note_extras(job, &*sandbox, &checkout.tree.entries, snapshot).await?;
        }
        if job.spec.agent.in_sandbox {
            // Once, for all forks.
            self.place_worker(&*sandbox).await?;
        }
        sandbox.snapshot(snapshot, &labels).await.map_err(sandbox_error)?;
        if let Some(frozen) = frozen {
            provider.remove_snapshot(&frozen).await.map_err(sandbox_error)?;
        }
        Ok(())
    }

    /// The files of a sandbox as they are now. It goes on as it was: nothing in it is changed, and it keeps its attempt.
    async fn freeze(
        &self,
        job: &Job,
        parent: &SandboxId,
        base: &SnapshotId,
    ) -> Result<SnapshotId, TaskError> {
        let permanent = |why: String| TaskError::new(ErrorClass::Permanent, why);
        let frozen = SnapshotId::new(format!("{base}from")).map_err(|e| permanent(e.to_string()))?;
        let provider = self.provider(job)?;
        let all = provider.list(&Labels::new()).await.map_err(sandbox_error)?;
        let Some(info) = all.into_iter().find(|s| s.id == *parent) else {
            return Err(permanent(format!(
                "there is no sandbox {parent}: `forkyard sandbox list` shows them"
            )));
        };
        match info.status {
            SandboxStatus::Running => {}
            SandboxStatus::Paused | SandboxStatus::Stopped | SandboxStatus::Dead => {
                let fix = "resume or start it first";
                return Err(permanent(format!("sandbox {parent} is not running ({:?}): {fix}", info.status)));
            }
        }
        let sandbox = provider.attach_beside(parent, info.attempt).await.map_err(sandbox_error)?;
        let labels = Labels::from([("run".to_string(), job.run.to_string())]);
        sandbox.snapshot(&frozen, &labels).await.map_err(sandbox_error)?;
        Ok(frozen)
    }

    /// The prepared start of a fork; of the run itself, that of its first fork.
    pub(super) fn base_snapshot(job: &Job, base: &Base) -> Result<SnapshotId, TaskError> {
        let Some((_, fork)) = &job.fork else { return Ok(base.snapshot.clone()) };
        let start = job.spec.start_of(fork);
        match job.spec.starts().iter().position(|s| *s == start) {
            Some(0) => Ok(base.snapshot.clone()),
            Some(n) => base_id(&job.run, n),
            None => Err(TaskError::new(ErrorClass::Permanent, format!("{start:?} was not prepared"))),
        }
    }

    /// The same on this host. Where another one prepared the base, it is prepared here too, from the same commit and once for
    /// all forks, in a sandbox that ends with it.
    pub(super) async fn base_here(&self, job: &Job, base: &Base) -> Result<SnapshotId, TaskError> {
        let snapshot = Self::base_snapshot(job, base)?;
        if base.host == self.host || self.has_snapshot(job, &snapshot).await? {
            return Ok(snapshot);
        }
        let commit = CommitId::new(&base.commit).map_err(git_error)?;
        let source = &job.spec.repo.source;
        self.git.prepare().await.map_err(git_error)?;
        let repo = if is_url(source) {
            self.git.fetch(source, Some(&base.commit)).await.map_err(git_error)?.0
        } else {
            self.git.open(std::path::Path::new(source)).await.map_err(git_error)?
        };
        self.git.keep(&repo, &job.run, "base", &commit).await.map_err(git_error)?;
        let checkout = self.checkout(&repo, &commit, &base.branch).await?;
        let fork = job.fork.as_ref();
        let start = fork.map(|(_, f)| job.spec.start_of(f)).or_else(|| job.spec.starts().into_iter().next());
        let start = start.ok_or_else(|| TaskError::new(ErrorClass::Permanent, "the run has no forks"))?;
        let id = SandboxId::derive(&job.run, fork.map(|f| f.0), job.attempt, Role::Base);
        let made = self.prepare_start(job, &id, &start, &snapshot, &checkout).await;
        self.provider(job)?.destroy(&id).await.map_err(sandbox_error)?;
        match made {
            // Another fork of the run may have been first.
            Err(e) if !self.has_snapshot(job, &snapshot).await? => Err(e),
            Ok(()) | Err(_) => Ok(snapshot),
        }
    }

    async fn has_snapshot(&self, job: &Job, id: &SnapshotId) -> Result<bool, TaskError> {
        let known = self.provider(job)?.snapshots().await.map_err(sandbox_error)?;
        Ok(known.iter().any(|s| s.id == *id))
    }

    pub(super) async fn set_up(&self, sandbox: &dyn Sandbox, setup: &str) -> Result<(), TaskError> {
        let Ran { code, output, .. } = run_command(sandbox, setup, SETUP_LIMIT).await?;
        if code != 0 {
            let why = format!("setup ended with {code}\n{output}");
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

    /// The commit's files in /workspace, and a repository around them.
    async fn check_out(&self, sandbox: &dyn Sandbox, checkout: &Checkout) -> Result<(), TaskError> {
        let Checkout { repo, tree, .. } = checkout;
        self.unpack(sandbox, repo, &tree.entries).await?;
        for path in tree.submodules.iter().take(MAX_SUBMODULES) {
            sandbox.make_dir(&format!("/workspace/{path}")).await.map_err(sandbox_error)?;
        }
        match &checkout.history {
            Some(history) => self.write_git(sandbox, checkout, history).await,
            None => self.init_git(sandbox, &checkout.branch).await,
        }
    }

    /// Files of a commit into /workspace, in the place of whatever is there under their names.
    pub(super) async fn unpack(
        &self,
        sandbox: &dyn Sandbox,
        repo: &Repo,
        entries: &[TreeEntry],
    ) -> Result<(), TaskError> {
        let (mut write, mut read) = tokio::io::duplex(ARCHIVE_BUFFER);
        let archive = async move {
            let done = self.git.archive(repo, entries, now().0 / 1000, &mut write).await;
            drop(write);
            done
        };
        // Each lets go of its end when it is done, so that neither waits for the other for ever.
        let unpack = async move {
            let done = sandbox.unpack("/workspace", &mut read).await;
            drop(read);
            done
        };
        let (archived, unpacked) = tokio::join!(archive, unpack);
        // Git's failure is the reason of an archive that ends early; of a sandbox's, git sees a closed pipe.
        match (archived, unpacked) {
            (Err(e), Ok(_)) => Err(git_error(e)),
            (Err(e), Err(s)) if s.kind == ErrorKind::Invalid && e.kind != GitErrorKind::Unavailable => {
                Err(git_error(e))
            }
            (_, Err(s)) => Err(sandbox_error(s)),
            (Ok(()), Ok(_)) => Ok(()),
        }
    }

    /// A repository written file by file: no git of the image is needed for it, and nothing in it points outside.
    async fn write_git(
        &self,
        sandbox: &dyn Sandbox,
        checkout: &Checkout,
        history: &History,
    ) -> Result<(), TaskError> {
        let put = async |name: &str, text: String| {
            sandbox.write_file(&format!("{GIT_DIR}/{name}"), text.into(), None).await.map_err(sandbox_error)
        };
        let io = |e: std::io::Error| TaskError::new(ErrorClass::Transient, format!("history: {e}"));
        for (path, end) in [(&history.pack, "pack"), (&history.index, "idx")] {
            let mut file = tokio::fs::File::open(path).await.map_err(io)?;
            let to = format!("{GIT_DIR}/objects/pack/pack-{}.{end}", checkout.commit);
            sandbox.write_file_from(&to, &mut file, Some(0o444)).await.map_err(sandbox_error)?;
        }
        if !history.shallow.is_empty() {
            put("shallow", history.shallow.iter().map(|c| format!("{c}\n")).collect()).await?;
        }
        put("config", CONFIG.into()).await?;
        put(&format!("refs/heads/{}", checkout.branch), format!("{}\n", checkout.commit)).await?;
        put("HEAD", format!("ref: refs/heads/{}\n", checkout.branch)).await?;
        // With what git itself knows of the files, a fork's first `git status` need not read them all. Where there is no git,
        // there is nobody to profit.
        let reset = ExecRequest::new(["git", "reset", "--quiet", "--mixed"]).timeout(UNPACK_LIMIT);
        if let Ok(exec) = sandbox.exec(reset).await {
            let _ = exec.output().await;
        }
        Ok(())
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

/// A fork works on a branch of its own, if its repository is the one that was written for the base.
pub(super) async fn own_branch(sandbox: &dyn Sandbox, job: &Job, base: &Base) -> Result<(), TaskError> {
    let head = format!("ref: refs/heads/{}", base.branch);
    for (name, expected) in [("HEAD", &head), (&format!("refs/heads/{}", base.branch), &base.commit)] {
        match sandbox.read_file(&format!("{GIT_DIR}/{name}"), 0, MAX_REF_BYTES).await {
            Ok(text) if text.trim_ascii_end() == expected.as_bytes() => {}
            Ok(_) | Err(_) => return Ok(()),
        }
    }
    let branch = format!("refs/heads/{}", branch_name(&job.run, Hands::fork(job)));
    let put = async |name: &str, text: String| {
        sandbox.write_file(&format!("{GIT_DIR}/{name}"), text.into(), None).await.map_err(sandbox_error)
    };
    put(&branch, format!("{}\n", base.commit)).await?;
    put("HEAD", format!("ref: {branch}\n")).await
}

/// The branch of a fork, inside its sandbox and where its result is applied.
pub fn branch_name(run: &RunId, fork: ForkNum) -> String {
    format!("forkyard/{run}-{fork}")
}

/// The snapshot of a run's `n`th start.
fn base_id(run: &RunId, n: usize) -> Result<SnapshotId, TaskError> {
    let name = if n == 0 { format!("{run}base") } else { format!("{run}base{n}") };
    SnapshotId::new(name).map_err(|e| TaskError::new(ErrorClass::Permanent, e.to_string()))
}

async fn is_empty(sandbox: &dyn Sandbox) -> Result<bool, TaskError> {
    match sandbox.list_files("/workspace").await {
        Ok(files) => Ok(files.is_empty()),
        Err(e) if e.kind == ErrorKind::NotFound => Ok(true),
        Err(e) => Err(sandbox_error(e)),
    }
}

/// Work on another repository's files could never be told from the whole of them.
async fn check_files(
    sandbox: &dyn Sandbox,
    parent: &SandboxId,
    checkout: &Checkout,
) -> Result<(), TaskError> {
    // Not by a search, which leaves out what is ignored: that may be committed all the same.
    let WorkLimits { max_files, max_bytes } = WorkLimits::default();
    let tree = &checkout.tree.entries;
    let export = GitExport { repo: None, base: tree.clone(), max_bytes, max_files: max_files as u64 };
    let work = match sandbox.git_export(export).await {
        Ok(work) => work,
        Err(e) if e.kind == ErrorKind::TooLarge => return Ok(()),
        Err(e) => return Err(sandbox_error(e)),
    };
    let there = tree.len().saturating_sub(work.deleted.len());
    if there * FILES_FOR_ONE >= tree.len() {
        return Ok(());
    }
    let expected: BTreeSet<&str> = tree.iter().map(|e| e.path.as_str()).collect();
    let named = |paths: &mut dyn Iterator<Item = &str>| {
        let mut some: Vec<&str> = paths.take(MAX_FILES_NAMED + 1).collect();
        if some.len() > MAX_FILES_NAMED {
            some[MAX_FILES_NAMED] = "…";
        }
        if some.is_empty() { "no files".to_string() } else { some.join(", ") }
    };
    Err(TaskError::new(
        ErrorClass::Permanent,
        format!(
            "sandbox {parent} holds other files than {:.10} of this repository: {} of {} are there; \
             found {}; expected {}\n\
             name a sandbox with files of this repository, or one whose /workspace is empty",
            checkout.commit.as_str(),
            there,
            tree.len(),
            named(&mut work.changed.iter().map(|f| f.path.as_str()).filter(|p| !expected.contains(p))),
            named(&mut work.deleted.iter().map(String::as_str)),
        ),
    ))
}
