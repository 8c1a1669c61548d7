//! From changed files and commits of a sandbox to commits of a repository: hostile until git has checked every object.

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;

use forkyard_core::Timestamp;
use forkyard_sandbox::WorkDiff;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::command::{Call, Git, Resources, git, io_error};
use super::error::{GitError, GitErrorKind, Result};
use super::names::{CommitId, check_path};
use super::repo::Repo;
use super::tree::{Tree, list_tree};

/// Bounds of one fork's work.
#[derive(Debug, Clone, Copy)]
pub struct WorkLimits {
    pub max_files: usize,
    pub max_bytes: u64,
}

impl Default for WorkLimits {
    /// More than any change that a person would review; far less than what would hurt the host.
    fn default() -> Self {
        WorkLimits { max_files: 20_000, max_bytes: 256 << 20 }
    }
}

/// What a commit says beside its files. The same values give the same commit id.
#[derive(Debug, Clone)]
pub struct WorkCommit {
    pub message: String,
    pub author: String,
    pub email: String,
    pub at: Timestamp,
}

/// Bounds of commits that were made inside. More than this, and the work comes home as files alone.
#[derive(Debug, Clone, Copy)]
pub struct CommitLimits {
    pub max_pack_bytes: u64,
    pub max_commits: usize,
    pub max_objects: usize,
    /// Of all objects, unpacked.
    pub max_bytes: u64,
}

impl Default for CommitLimits {
    /// What a day of small commits makes, many times over.
    fn default() -> Self {
        CommitLimits {
            max_pack_bytes: 64 << 20,
            max_commits: 1_000,
            max_objects: 100_000,
            max_bytes: 512 << 20,
        }
    }
}

/// Git holds commits and trees in memory as a whole; no real one is nearly as large.
const MAX_COMMIT_BYTES: u64 = 1 << 20;
const MAX_TREE_BYTES: u64 = 16 << 20;

/// A repository that is removed with all that is in it.
pub(super) struct Scratch(pub(super) PathBuf);

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A scratch repository that borrows the objects of a real one. What comes from a sandbox is put together here and leaves only
/// as a pack in which git has checked every object.
pub struct Quarantine<'a> {
    git: &'a Git,
    repo: &'a Repo,
    base: &'a CommitId,
    /// What the work is put on: the base, or the last commit that was made inside.
    tip: CommitId,
    commits: usize,
    scratch: Scratch,
}

impl Git {
    pub async fn quarantine<'a>(&'a self, repo: &'a Repo, base: &'a CommitId) -> Result<Quarantine<'a>> {
        let scratch = self.scratch().await?;
        Ok(Quarantine { git: self, repo, base, tip: base.clone(), commits: 0, scratch })
    }

    /// Makes a commit of `work` on top of `base` and brings its objects into `repo`. It has no ref yet: see [`Git::keep`].
    /// The base itself is the answer where nothing differs.
    pub async fn commit_work(
        &self,
        repo: &Repo,
        base: &CommitId,
        work: &WorkDiff,
        about: &WorkCommit,
        limits: WorkLimits,
    ) -> Result<CommitId> {
        check(work, limits)?;
        if work.changed.is_empty() && work.deleted.is_empty() {
            return Ok(base.clone());
        }
        self.quarantine(repo, base).await?.commit(work, about, limits).await
    }
}

impl Quarantine<'_> {
    /// Commits that were taken from inside.
    pub fn commits(&self) -> usize {
        self.commits
    }

    fn inside(&self, call: Call) -> Call {
        let call = call
            .env("GIT_DIR", &self.scratch.0)
            .env("GIT_ALTERNATE_OBJECT_DIRECTORIES", quoted(&self.repo.objects()))
            .cwd(&self.scratch.0);
        self.git.with_shallow(self.repo, call)
    }

    /// Takes commits that lead from the base to `head` out of a pack that a sandbox made. Nothing about them is believed: the
    /// pack is bounded, checked object by object, and holds every commit that the base does not have. After an error the
    /// quarantine is of no use any more.
    pub async fn take_commits(&mut self, head: &CommitId, pack: Vec<u8>, limits: CommitLimits) -> Result<()> {
        if pack.len() as u64 > limits.max_pack_bytes {
            return Err(too_large(format!("the pack has {} bytes", pack.len())));
        }
        // Large blobs are hashed in passing, and whatever else a pack can be made to unfold to meets a limit of the process.
        let call = git(["index-pack", "--stdin", "--strict", "--threads=1"])
            .arg(format!("--max-input-size={}", limits.max_pack_bytes))
            .config("core.bigFileThreshold", "1m")
            .config("core.deltaBaseCacheLimit", "64m")
            .resources(Resources::QUARANTINE)
            .stdin(pack);
        let taken = self.git.run(self.inside(call)).await;
        taken.map_err(|e| GitError { kind: GitErrorKind::Corrupt, hint: None, ..e })?;
        let packed = self.packed_commits(limits).await?;
        let call = git(["rev-list", "--parents"])
            .arg(format!("--max-count={}", limits.max_commits + 1))
            .args([head.as_str(), &format!("^{}", self.base)]);
        let listed = self.git.run(self.inside(call)).await?.text();
        let mut on_base = false;
        let mut commits = 0;
        for line in listed.lines() {
            let mut ids = line.split(' ');
            let id = ids.next().unwrap_or_default();
            if !packed.contains(id) {
                return Err(corrupt("it leads to commits that were not made inside"));
            }
            on_base |= ids.any(|parent| parent == self.base.as_str());
            commits += 1;
        }
        if commits > limits.max_commits {
            return Err(too_large(format!("there are more than {} commits", limits.max_commits)));
        }
        if !on_base {
            return Err(corrupt("it does not come from the base"));
        }
        let before = self.git.tree(self.repo, self.base).await?.skipped;
        self.tip = head.clone();
        if self.tree().await?.skipped != before {
            return Err(corrupt("it has submodules or names that no checkout should make"));
        }
        self.commits = commits;
        Ok(())
    }

    /// The commits among the objects of the scratch repository itself; an error if there is too much of anything.
    async fn packed_commits(&self, limits: CommitLimits) -> Result<BTreeSet<String>> {
        let call = git(["cat-file", "--batch-all-objects", "--unordered"])
            .arg("--batch-check=%(objectname) %(objecttype) %(objectsize)")
            .env("GIT_DIR", &self.scratch.0)
            .resources(Resources::QUARANTINE)
            .cwd(&self.scratch.0);
        let listed = self.git.run(call).await?.text();
        let (mut objects, mut bytes) = (0, 0_u64);
        let mut commits = BTreeSet::new();
        for line in listed.lines() {
            let mut parts = line.split(' ');
            let (Some(id), Some(kind), Some(Ok(size))) =
                (parts.next(), parts.next(), parts.next().map(str::parse::<u64>))
            else {
                return Err(corrupt("git cat-file answered with something else"));
            };
            objects += 1;
            bytes = bytes.saturating_add(size);
            let most = match kind {
                "commit" => MAX_COMMIT_BYTES,
                "tree" => MAX_TREE_BYTES,
                _ => limits.max_bytes,
            };
            if size > most {
                return Err(too_large(format!("{kind} {id} has {size} bytes")));
            }
            if kind == "commit" {
                commits.insert(id.to_string());
            }
        }
        if objects > limits.max_objects || bytes > limits.max_bytes {
            return Err(too_large(format!("there are {objects} objects of {bytes} bytes")));
        }
        Ok(commits)
    }

    /// The files of what the work is put on.
    pub async fn tree(&self) -> Result<Tree> {
        if self.tip == *self.base {
            return self.git.tree(self.repo, self.base).await;
        }
        let call = list_tree(&self.tip);
        Tree::parse(&self.git.run(self.inside(call)).await?.stdout)
    }

    /// Brings everything into the repository, with `work` as a last commit if it changes something.
    pub async fn commit(&self, work: &WorkDiff, about: &WorkCommit, limits: WorkLimits) -> Result<CommitId> {
        check(work, limits)?;
        let mut commit = self.tip.clone();
        if !work.changed.is_empty() || !work.deleted.is_empty() {
            let import = git(["fast-import", "--quiet", "--done", "--date-format=raw"]);
            self.git.import(self.inside(import), &self.tip, work, about).await?;
            let parse = git(["rev-parse", "refs/heads/work^{commit}", "refs/heads/work^{tree}"])
                .arg(format!("{}^{{tree}}", self.tip));
            let answer = self.git.run(self.inside(parse)).await?.text();
            let [made, tree, tip_tree] = answer.lines().collect::<Vec<_>>()[..] else {
                return Err(corrupt("git rev-parse answered with something else"));
            };
            if tree != tip_tree {
                commit = CommitId::new(made)?;
            }
        }
        self.bring(&commit).await?;
        Ok(commit)
    }

    /// Brings the commits that were taken into the repository, as they are.
    pub async fn release(&self) -> Result<()> {
        self.bring(&self.tip).await
    }

    async fn bring(&self, commit: &CommitId) -> Result<()> {
        if commit == self.base {
            return Ok(());
        }
        let wanted = format!("{commit}\n^{}\n", self.base);
        let call = git(["pack-objects", "--revs", "--stdout", "--quiet"]).stdin(wanted);
        let pack = self.git.run(self.inside(call)).await?.stdout;
        // Checked where it is: a pack that is refused leaves its remains behind.
        self.git.index_pack(|call| self.inside(call), pack.clone()).await?;
        self.git.take_pack(self.repo, pack).await
    }
}

fn corrupt(why: &str) -> GitError {
    GitError::new(GitErrorKind::Corrupt, why)
}

fn too_large(why: String) -> GitError {
    GitError::new(GitErrorKind::TooLarge, why)
}

impl Git {
    /// Takes a pack into a repository, if git's own checks find nothing wrong with any object in it.
    pub(super) async fn take_pack(&self, repo: &Repo, pack: Vec<u8>) -> Result<()> {
        self.index_pack(|call| self.on_objects(repo, call), pack).await
    }

    async fn index_pack(&self, whereto: impl Fn(Call) -> Call, pack: Vec<u8>) -> Result<()> {
        let call = whereto(git(["index-pack", "--stdin", "--strict"])).stdin(pack);
        self.run(call).await.map(drop).map_err(|e| match e.kind {
            GitErrorKind::Timeout | GitErrorKind::TooLarge => e,
            GitErrorKind::Unavailable if !e.message.contains("fsck") => e,
            GitErrorKind::Invalid
            | GitErrorKind::NotFound
            | GitErrorKind::Auth
            | GitErrorKind::Conflict
            | GitErrorKind::Corrupt
            | GitErrorKind::Unavailable => GitError { kind: GitErrorKind::Corrupt, hint: None, ..e },
        })
    }

    pub(super) async fn scratch(&self) -> Result<Scratch> {
        self.prepare().await?;
        let parent = self.config.dir.join("quarantine");
        fs::create_dir_all(&parent).map_err(io_error)?;
        // Unique among processes and within this one.
        static NEXT: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
        let n = NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let scratch = Scratch(parent.join(format!("{}-{n}.git", std::process::id())));
        // A process of the same number may have died here.
        let _ = fs::remove_dir_all(&scratch.0);
        self.init_bare(&scratch.0).await?;
        Ok(scratch)
    }

    async fn import(&self, call: Call, base: &CommitId, work: &WorkDiff, about: &WorkCommit) -> Result<()> {
        let call = call.config("fastimport.unpackLimit", "0");
        let (mut child, _group) = self.spawn_held(&call)?;
        let mut stdin = child.stdin.take().expect("stdin is piped");
        let mut stderr = child.stderr.take().expect("stderr is piped");
        let head = commit_head(base, about);
        let write = async {
            stdin.write_all(head.as_bytes()).await?;
            for path in &work.deleted {
                stdin.write_all(format!("D {}\n", c_quoted(path)).as_bytes()).await?;
            }
            for file in &work.changed {
                let line =
                    format!("M {:o} inline {}\ndata {}\n", file.mode, c_quoted(&file.path), file.data.len());
                stdin.write_all(line.as_bytes()).await?;
                stdin.write_all(&file.data).await?;
                stdin.write_all(b"\n").await?;
            }
            stdin.write_all(b"\ndone\n").await?;
            stdin.shutdown().await?;
            drop(stdin);
            Ok::<(), std::io::Error>(())
        };
        let mut said = String::new();
        let work = async {
            let (written, _) = tokio::join!(write, stderr.read_to_string(&mut said));
            (written, child.wait().await)
        };
        let (written, status) = tokio::time::timeout(self.config.timeout, work)
            .await
            .map_err(|_| GitError::new(GitErrorKind::Timeout, "git fast-import took too long"))?;
        if !status.map_err(io_error)?.success() {
            // It refuses names and modes that we did not foresee.
            let kind = if said.contains("No space left") {
                GitErrorKind::Unavailable
            } else {
                GitErrorKind::Corrupt
            };
            return Err(GitError::new(kind, format!("git fast-import: {said}")));
        }
        written.map_err(io_error)
    }
}

fn check(work: &WorkDiff, limits: WorkLimits) -> Result<()> {
    let files = work.changed.len() + work.deleted.len();
    let bytes: u64 = work.changed.iter().map(|f| f.data.len() as u64).sum();
    if files > limits.max_files || bytes > limits.max_bytes {
        return Err(GitError::new(
            GitErrorKind::TooLarge,
            format!(
                "the work has {files} files and {bytes} bytes; at most {} and {} are taken",
                limits.max_files, limits.max_bytes
            ),
        )
        .hint("ignore generated files in .gitignore"));
    }
    for path in work.changed.iter().map(|f| &f.path).chain(&work.deleted) {
        check_path(path)?;
    }
    for file in &work.changed {
        if !matches!(file.mode, 0o100_644 | 0o100_755 | 0o120_000) {
            return Err(GitError::invalid(format!("{:?} has mode {:o}", file.path, file.mode)));
        }
    }
    Ok(())
}

fn commit_head(base: &CommitId, about: &WorkCommit) -> String {
    // What ends a name in git's format must not stand in one.
    let clean = |s: &str| -> String {
        s.chars().filter(|c| !c.is_control() && !"<>".contains(*c)).take(200).collect()
    };
    let who = format!("{} <{}> {} +0000", clean(&about.author), clean(&about.email), about.at.0 / 1000);
    let message: String = about.message.chars().filter(|c| *c != '\0').collect();
    format!(
        "commit refs/heads/work\nauthor {who}\ncommitter {who}\ndata {}\n{message}\nfrom {base}\n",
        message.len()
    )
}

/// A path as fast-import reads it, whatever is in it.
fn c_quoted(path: &str) -> String {
    let mut out = String::with_capacity(path.len() + 2);
    out.push('"');
    for b in path.bytes() {
        match b {
            b'"' | b'\\' => {
                out.push('\\');
                out.push(char::from(b));
            }
            0x20..=0x7e => out.push(char::from(b)),
            _ => out.push_str(&format!("\\{b:03o}")),
        }
    }
    out.push('"');
    out
}

/// A path for a list that is separated by colons.
fn quoted(path: &std::path::Path) -> String {
    c_quoted(&path.to_string_lossy())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_quoted_so_that_nothing_ends_them_early() {
        assert_eq!(c_quoted("a b"), "\"a b\"");
        assert_eq!(c_quoted("a\"\\\n\x1bä"), "\"a\\\"\\\\\\012\\033\\303\\244\"");
    }

    #[test]
    fn names_in_commits_can_not_add_headers() {
        let about = WorkCommit {
            message: "m".into(),
            author: "x\ncommitter evil <e>".into(),
            email: "a> 0 +0000\nfrom x".into(),
            at: Timestamp(5000),
        };
        let head = commit_head(&CommitId::new(&"a".repeat(40)).unwrap(), &about);
        assert_eq!(head.lines().count(), 6, "{head}");
        assert!(head.contains("author xcommitter evil e <a 0 +0000from x> 5 +0000\n"), "{head}");
    }
}
