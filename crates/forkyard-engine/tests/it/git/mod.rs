//! Git on the host, with the real git and repositories that mean harm.

mod apply;
mod commits;
mod fetch;
mod history;
mod hostile;
mod read;
mod work;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use bytes::Bytes;
use forkyard_core::{RunId, Timestamp};
use forkyard_engine::git::{CommitId, Git, GitConfig, Repo, WorkCommit};
use forkyard_sandbox::{ChangedFile, WorkDiff};

/// A user's repository with one commit, and a home of Forkyard's beside it.
struct World {
    dir: tempfile::TempDir,
    git: Git,
}

impl World {
    fn new() -> World {
        let dir = tempfile::tempdir().unwrap();
        let git = Git::new(config(dir.path()));
        let world = World { dir, git };
        fs::create_dir(world.user()).unwrap();
        fs::create_dir(world.dir.path().join("user-home")).unwrap();
        world.raw(&["init", "-q", "-b", "main"]);
        world.write("README.md", "hello\n");
        world.write("src/lib.rs", "one\ntwo\nthree\n");
        world.write("run.sh", "#!/bin/sh\n");
        world.raw(&["add", "."]);
        world.raw(&["update-index", "--chmod=+x", "run.sh"]);
        world.raw(&["commit", "-q", "-m", "first"]);
        world.raw(&["checkout", "-q", "-f", "main"]);
        world
    }

    /// The user's folder.
    fn user(&self) -> PathBuf {
        self.dir.path().join("repo")
    }

    fn write(&self, path: &str, text: impl AsRef<[u8]>) {
        let path = self.user().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    fn read(&self, path: &str) -> String {
        fs::read_to_string(self.user().join(path)).unwrap()
    }

    /// Git as the user runs it.
    fn raw(&self, args: &[&str]) -> String {
        raw_in(&self.user(), args)
    }

    async fn repo(&self) -> Repo {
        self.git.open(&self.user()).await.unwrap()
    }

    async fn head(&self) -> CommitId {
        self.git.resolve(&self.repo().await, None).await.unwrap().commit
    }
}

fn raw_in(dir: &Path, args: &[&str]) -> String {
    let out = Command::new("git")
        .args(args)
        .current_dir(dir)
        .env_clear()
        .env("PATH", "/usr/local/bin:/usr/bin:/bin")
        .env("HOME", "/nonexistent")
        .env("GIT_CONFIG_NOSYSTEM", "1")
        .envs([("GIT_AUTHOR_NAME", "U"), ("GIT_AUTHOR_EMAIL", "u@example.com")])
        .envs([("GIT_COMMITTER_NAME", "U"), ("GIT_COMMITTER_EMAIL", "u@example.com")])
        .envs([("GIT_AUTHOR_DATE", "1700000000 +0000"), ("GIT_COMMITTER_DATE", "1700000000 +0000")])
        .output()
        .unwrap();
    assert!(out.status.success(), "git {args:?}: {}", String::from_utf8_lossy(&out.stderr));
    String::from_utf8_lossy(&out.stdout).trim_end().to_string()
}

fn config(dir: &Path) -> GitConfig {
    let path = "/usr/local/bin:/usr/bin:/bin".to_string();
    let home = dir.join("user-home").display().to_string();
    GitConfig {
        dir: dir.join("home/git"),
        env: BTreeMap::from([("PATH".into(), path), ("HOME".into(), home)]),
        github_token: None,
        timeout: Duration::from_secs(60),
    }
}

fn changed(path: &str, data: impl Into<Bytes>) -> ChangedFile {
    ChangedFile { path: path.into(), mode: 0o100_644, data: data.into() }
}

fn work(changed: Vec<ChangedFile>, deleted: &[&str]) -> WorkDiff {
    WorkDiff { changed, deleted: deleted.iter().map(|d| d.to_string()).collect(), skipped: vec![] }
}

fn about() -> WorkCommit {
    WorkCommit {
        message: "Fork 0".into(),
        author: "Forkyard".into(),
        email: "forkyard@localhost".into(),
        at: Timestamp(1_700_000_000_000),
    }
}

fn run_id() -> RunId {
    RunId::new("r1").unwrap()
}
