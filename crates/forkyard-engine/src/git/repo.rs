//! Repositories on the host: the user's own, and caches of remote ones. Both are used through their objects; a repository's
//! config is read only to find it and to move its refs, with everything that runs code pinned off.

use std::fs::{self, File, TryLockError};
use std::path::{Path, PathBuf};
use std::time::Duration;

use forkyard_core::RunId;
use tokio::time::Instant;

use super::cache::mark_used;
use super::command::{Around, Call, Git, git, io_error};
use super::error::{GitError, GitErrorKind, Result};
use super::history::MAX_COMMITS;
use super::names::{CommitId, check_branch, check_url, shown_url};

/// How often a lock that another process holds is tried again.
const LOCK_POLL: Duration = Duration::from_millis(50);

/// Old mistakes that well-known repositories carry in their history; none of them runs anything.
const HARMLESS_MISTAKES: &[&str] = &[
    "badTimezone",
    "missingSpaceBeforeDate",
    "zeroPaddedFilemode",
    "zeroPaddedDate",
    "missingEmail",
    "badEmail",
];

/// A repository whose objects can be read and to which objects and refs can be added.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Repo {
    pub(super) git_dir: PathBuf,
    pub(super) common_dir: PathBuf,
    /// None: bare.
    pub work_tree: Option<PathBuf>,
}

impl Repo {
    pub(super) fn objects(&self) -> PathBuf {
        self.common_dir.join("objects")
    }
}

/// A branch, or whatever else was asked for, at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Resolved {
    pub commit: CommitId,
    /// None: a commit or a tag was named, or HEAD is detached.
    pub branch: Option<String>,
}

impl Git {
    /// A call that sees a repository's objects and nothing else of it: no config, no refs, no attributes, no work tree.
    pub(super) fn on_objects(&self, repo: &Repo, call: Call) -> Call {
        let void = self.void_dir();
        let call = call.env("GIT_DIR", &void).env("GIT_OBJECT_DIRECTORY", repo.objects()).cwd(&void);
        self.with_shallow(repo, call)
    }

    /// Where the repository's own past is cut off.
    pub(super) fn with_shallow(&self, repo: &Repo, call: Call) -> Call {
        let shallow = repo.common_dir.join("shallow");
        if shallow.exists() { call.env("GIT_SHALLOW_FILE", shallow) } else { call }
    }

    /// A call that reads or moves a repository's refs.
    pub(super) fn on_refs(&self, repo: &Repo, call: Call) -> Call {
        call.env("GIT_DIR", &repo.git_dir).cwd(&repo.git_dir)
    }

    fn void_dir(&self) -> PathBuf {
        self.config.dir.join("void.git")
    }

    /// Makes what every other call relies on. Doing it twice, also at once, is doing it once.
    pub async fn prepare(&self) -> Result<()> {
        fs::create_dir_all(&self.config.dir).map_err(io_error)?;
        let void = self.void_dir();
        if void.join("HEAD").exists() {
            return Ok(());
        }
        // Made elsewhere and put in its place as a whole: processes that start at once would stumble over each other's locks.
        let made = tempfile::Builder::new().prefix("void").tempdir_in(&self.config.dir).map_err(io_error)?;
        self.init_bare(made.path()).await?;
        match fs::rename(made.path(), &void) {
            Ok(()) => {
                // It is not ours to remove any more.
                let _ = made.keep();
                Ok(())
            }
            Err(_) if void.join("HEAD").exists() => Ok(()),
            Err(e) => Err(io_error(e)),
        }
    }

    pub(super) async fn init_bare(&self, dir: &Path) -> Result<()> {
        let call = git([
            "init",
            "--quiet",
            "--bare",
            "--template=",
            "--object-format=sha1",
            "--initial-branch=main",
            "--",
        ])
        .arg(dir);
        self.run(call).await.map(drop)
    }

    /// The repository that a folder of the user lies in.
    pub async fn open(&self, path: &Path) -> Result<Repo> {
        self.prepare().await?;
        let shown = path.display();
        if !path.is_dir() {
            return Err(GitError::new(GitErrorKind::NotFound, format!("{shown} is not a folder")));
        }
        let rev_parse = |args: &[&str]| {
            git(["rev-parse", "--path-format=absolute"]).cwd(path).around(Around::User).args(args)
        };
        let answer = self
            .run(rev_parse(&[
                "--git-dir",
                "--git-common-dir",
                "--show-object-format",
                "--is-bare-repository",
            ]))
            .await
            .map_err(|e| match e.kind {
                GitErrorKind::NotFound => {
                    e.hint("run `git init` and commit there first, or name a repository")
                }
                GitErrorKind::Invalid
                | GitErrorKind::Auth
                | GitErrorKind::Conflict
                | GitErrorKind::TooLarge
                | GitErrorKind::Corrupt
                | GitErrorKind::Unavailable
                | GitErrorKind::Timeout => e,
            })?
            .text();
        let lines: Vec<&str> = answer.lines().collect();
        let [git_dir, common_dir, format, bare] = lines[..] else {
            return Err(GitError::invalid(format!("{shown}: its path has a line break in it")));
        };
        if format != "sha1" {
            return Err(GitError::invalid(format!("{shown} uses {format} object names"))
                .hint("only sha1 is supported"));
        }
        let work_tree = if bare == "true" {
            None
        } else {
            let top = self.try_run(rev_parse(&["--show-toplevel"])).await?;
            top.ok.then(|| PathBuf::from(top.text()))
        };
        Ok(Repo { git_dir: git_dir.into(), common_dir: common_dir.into(), work_tree })
    }

    /// A branch, tag or full commit id of a repository; HEAD if None.
    pub async fn resolve(&self, repo: &Repo, rev: Option<&str>) -> Result<Resolved> {
        let Some(rev) = rev else {
            let commit = self.commit_of(repo, "HEAD").await?.ok_or_else(|| {
                GitError::new(GitErrorKind::NotFound, "the repository has no commit yet")
                    .hint("commit something first")
            })?;
            let head =
                self.try_run(self.on_refs(repo, git(["symbolic-ref", "--quiet", "--short", "HEAD"]))).await?;
            return Ok(Resolved { commit, branch: head.ok.then(|| head.text()) });
        };
        if let Ok(id) = CommitId::new(rev) {
            let commit = self.commit_of(repo, id.as_str()).await?;
            return commit.map(|commit| Resolved { commit, branch: None }).ok_or_else(|| not_found(rev));
        }
        check_branch(rev)?;
        for (prefix, is_branch) in
            [("refs/heads/", true), ("refs/remotes/origin/", true), ("refs/tags/", false)]
        {
            if let Some(commit) = self.commit_of(repo, &format!("{prefix}{rev}")).await? {
                return Ok(Resolved { commit, branch: is_branch.then(|| rev.to_string()) });
            }
        }
        Err(not_found(rev))
    }

    async fn commit_of(&self, repo: &Repo, name: &str) -> Result<Option<CommitId>> {
        let call =
            git(["rev-parse", "--verify", "--quiet", "--end-of-options"]).arg(format!("{name}^{{commit}}"));
        let answer = self.try_run(self.on_refs(repo, call)).await?;
        if answer.ok { CommitId::new(&answer.text()).map(Some) } else { Ok(None) }
    }

    /// Whether a commit and all of its files are there.
    pub async fn has(&self, repo: &Repo, commit: &CommitId) -> Result<bool> {
        let call = git(["cat-file", "-e"]).arg(format!("{commit}^{{tree}}"));
        Ok(self.try_run(self.on_objects(repo, call)).await?.ok)
    }

    /// The cache of a URL that was fetched before; asks nobody.
    pub async fn cached(&self, url: &str) -> Result<Repo> {
        check_url(url)?;
        let git_dir = self.config.dir.join(format!("{}.git", cache_name(url)));
        if !git_dir.join("HEAD").exists() {
            let why = format!("{} is not in the cache", shown_url(url));
            return Err(GitError::new(GitErrorKind::NotFound, why));
        }
        Ok(Repo { git_dir: git_dir.clone(), common_dir: git_dir, work_tree: None })
    }

    /// Brings a branch, tag or commit of a remote repository (its default branch if None) into the cache of that URL.
    /// Any number of processes may do so at once.
    pub async fn fetch(&self, url: &str, rev: Option<&str>) -> Result<(Repo, Resolved)> {
        let transport = check_url(url)?;
        if let Some(rev) = rev
            && CommitId::new(rev).is_err()
        {
            check_branch(rev)?;
        }
        self.prepare().await?;
        let name = cache_name(url);
        let git_dir = self.config.dir.join(format!("{name}.git"));
        let _lock = self.lock(&self.config.dir.join(format!("{name}.lock"))).await?;
        if !git_dir.join("HEAD").exists() {
            self.init_bare(&git_dir).await?;
        }
        mark_used(&git_dir)?;
        let repo = Repo { git_dir: git_dir.clone(), common_dir: git_dir, work_tree: None };
        let credentials = self.user_credentials().await;
        let network = |call: Call| {
            let call = call.around(Around::Network { protocol: transport.protocol() });
            let call = credentials.iter().fold(call, |c, (k, v)| c.config(k, v));
            let call =
                HARMLESS_MISTAKES.iter().fold(call, |c, m| c.config(format!("fetch.fsck.{m}"), "ignore"));
            self.on_refs(&repo, call)
        };
        let named = |e: GitError| GitError { message: e.message.replace(url, &shown_url(url)), ..e };
        let (source, resolved) = match rev.map(|r| (r, CommitId::new(r))) {
            Some((rev, Ok(commit))) => (rev.to_string(), Resolved { commit, branch: None }),
            Some((rev, Err(_))) => {
                let refs = [
                    format!("refs/heads/{rev}"),
                    format!("refs/tags/{rev}"),
                    format!("refs/tags/{rev}^{{}}"),
                ];
                let call = network(git(["ls-remote", "--quiet", "--"]).arg(url).args(&refs));
                let listed = self.run(call).await.map_err(named)?.text();
                let find =
                    |name: &String| listed.lines().find_map(|l| l.strip_suffix(name)?.strip_suffix('\t'));
                let (at, source, branch) = match (find(&refs[0]), find(&refs[2]), find(&refs[1])) {
                    (Some(at), _, _) => (at, &refs[0], Some(rev.to_string())),
                    (None, Some(at), _) => (at, &refs[1], None),
                    (None, None, Some(at)) => (at, &refs[1], None),
                    (None, None, None) => return Err(not_found(rev)),
                };
                (source.clone(), Resolved { commit: CommitId::new(at)?, branch })
            }
            None => {
                let call = network(git(["ls-remote", "--quiet", "--symref", "--"]).arg(url).arg("HEAD"));
                let listed = self.run(call).await.map_err(named)?.text();
                let branch =
                    listed.lines().find_map(|l| l.strip_prefix("ref: refs/heads/")?.strip_suffix("\tHEAD"));
                let at = listed
                    .lines()
                    .find_map(|l| l.strip_suffix("\tHEAD").filter(|at| !at.starts_with("ref:")));
                let at = at
                    .ok_or_else(|| GitError::new(GitErrorKind::NotFound, "the remote repository is empty"))?;
                // A name that we would refuse from a user is refused from a remote.
                branch.map_or(Ok(()), check_branch)?;
                (
                    "HEAD".to_string(),
                    Resolved { commit: CommitId::new(at)?, branch: branch.map(str::to_string) },
                )
            }
        };
        if !self.has(&repo, &resolved.commit).await? {
            // The ref keeps the commit; a branch that moved between the two commands is fetched by its commit.
            let keep = format!("refs/forkyard/cache/{}", resolved.commit);
            let by = |what: &str| {
                network(
                    git([
                        "fetch",
                        "--quiet",
                        &format!("--depth={MAX_COMMITS}"),
                        "--no-tags",
                        "--no-recurse-submodules",
                        "--no-write-fetch-head",
                        "--",
                    ])
                    .arg(url),
                )
                .arg(format!("+{what}:{keep}"))
            };
            self.run(by(&source)).await.map_err(named)?;
            if self.commit_of(&repo, &keep).await? != Some(resolved.commit.clone()) {
                self.run(by(resolved.commit.as_str())).await.map_err(named)?;
            }
        }
        Ok((repo, resolved))
    }

    /// Waits for an exclusive lock that ends with its holder, however that ends.
    pub(super) async fn lock(&self, path: &Path) -> Result<File> {
        let file = File::options().create(true).truncate(false).write(true).open(path).map_err(io_error)?;
        let deadline = Instant::now() + self.config.timeout;
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(file),
                Err(TryLockError::Error(e)) => return Err(io_error(e)),
                Err(TryLockError::WouldBlock) if Instant::now() < deadline => {
                    tokio::time::sleep(LOCK_POLL).await
                }
                Err(TryLockError::WouldBlock) => {
                    return Err(GitError::new(
                        GitErrorKind::Timeout,
                        "another process holds the cache of this repository",
                    ));
                }
            }
        }
    }

    /// Names a commit of a run (`base`, or a fork's number), so that it stays.
    pub async fn keep(&self, repo: &Repo, run: &RunId, name: &str, commit: &CommitId) -> Result<()> {
        check_branch(name)?;
        let call = git(["update-ref", "--no-deref"]).arg(run_ref(run, name)).arg(commit.as_str());
        self.run(self.on_refs(repo, call)).await.map(drop)
    }

    /// What was kept of a run, by name.
    pub async fn kept(&self, repo: &Repo, run: &RunId, name: &str) -> Result<Option<CommitId>> {
        check_branch(name)?;
        self.commit_of(repo, &run_ref(run, name)).await
    }

    /// Lets go of everything of a run. Ok if there is nothing.
    pub async fn drop_run(&self, repo: &Repo, run: &RunId) -> Result<()> {
        let call = git(["for-each-ref", "--format=delete %(refname)"]).arg(format!("refs/forkyard/{run}/"));
        let commands = self.run(self.on_refs(repo, call)).await?.stdout;
        let call = git(["update-ref", "--no-deref", "--stdin"]).stdin(commands);
        self.run(self.on_refs(repo, call)).await.map(drop)
    }
}

fn run_ref(run: &RunId, name: &str) -> String {
    format!("refs/forkyard/{run}/{name}")
}

fn not_found(rev: &str) -> GitError {
    GitError::new(GitErrorKind::NotFound, format!("there is no branch, tag or commit {rev:?}"))
}

/// A name for a URL's cache that keeps different URLs apart, credentials included: what one token may see, another may not.
fn cache_name(url: &str) -> String {
    use sha2::{Digest, Sha256};
    let tail: String = url
        .trim_end_matches('/')
        .rsplit(['/', ':'])
        .next()
        .unwrap_or_default()
        .trim_end_matches(".git")
        .chars()
        .filter(|c| c.is_ascii_alphanumeric() || *c == '-')
        .take(40)
        .collect();
    let sum: String = Sha256::digest(url.as_bytes()).iter().take(12).map(|b| format!("{b:02x}")).collect();
    format!("{tail}-{sum}")
}
