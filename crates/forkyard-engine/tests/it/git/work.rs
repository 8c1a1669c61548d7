use std::os::unix::fs::PermissionsExt;

use forkyard_engine::git::{ChangeKind, GitErrorKind, WorkLimits};

use super::*;

async fn commit(w: &World, diff: &WorkDiff) -> forkyard_engine::git::CommitId {
    let base = w.head().await;
    w.git.commit_work(&w.repo().await, &base, diff, &about(), WorkLimits::default()).await.unwrap()
}

#[tokio::test]
async fn changed_files_become_a_commit_that_repeats_and_disturbs_nothing() {
    let w = World::new();
    w.write("README.md", "the user is editing\n");
    w.write("untracked", "x");
    let before = (
        w.raw(&["status", "--porcelain"]),
        fs::read(w.user().join(".git/index")).unwrap(),
        w.raw(&["show-ref"]),
    );
    let mut script = changed("new.sh", "#!/bin/sh\n");
    script.mode = 0o100_755;
    let mut link = changed("link", "README.md");
    link.mode = 0o120_000;
    let diff = work(
        vec![
            changed("src/lib.rs", "one\n2\nthree\nfour\n"),
            script,
            link,
            changed("odd \"\\\n\x1bname", "x\n"),
            changed("run.sh/inside", "dir now\n"),
        ],
        &["README.md", "run.sh"],
    );
    let commit = commit(&w, &diff).await;
    assert_eq!(super::work::commit(&w, &diff).await, commit);
    let after = (
        w.raw(&["status", "--porcelain"]),
        fs::read(w.user().join(".git/index")).unwrap(),
        w.raw(&["show-ref"]),
    );
    assert_eq!(before, after);

    let (repo, base) = (w.repo().await, w.head().await);
    let d = w.git.diff(&repo, &base, &commit).await.unwrap();
    let files: Vec<(&str, ChangeKind)> = d.files.iter().map(|f| (f.path.as_str(), f.kind)).collect();
    assert_eq!(
        files,
        [
            ("README.md", ChangeKind::Deleted),
            ("link", ChangeKind::Added),
            ("new.sh", ChangeKind::Added),
            ("odd \"\\\n\x1bname", ChangeKind::Added),
            ("run.sh", ChangeKind::Deleted),
            ("run.sh/inside", ChangeKind::Added),
            ("src/lib.rs", ChangeKind::Modified),
        ]
    );
    assert_eq!((d.lines_added, d.lines_removed), (6, 3));
    assert_eq!(
        w.raw(&["log", "-1", "--format=%P %an %ae %at %s", commit.as_str()]),
        format!("{base} Forkyard forkyard@localhost 1700000000 Fork 0")
    );
    w.raw(&["fsck", "--strict", "--no-dangling"]);
    let left: Vec<_> = fs::read_dir(w.dir.path().join("home/git/quarantine")).unwrap().collect();
    assert!(left.is_empty(), "{left:?}");
}

#[tokio::test]
async fn no_change_is_the_base_itself() {
    let w = World::new();
    let base = w.head().await;
    assert_eq!(commit(&w, &work(vec![], &[])).await, base);
    assert_eq!(commit(&w, &work(vec![changed("README.md", "hello\n")], &["not-there"])).await, base);
}

#[tokio::test]
async fn runs_keep_their_commits_until_they_are_dropped() {
    let w = World::new();
    let repo = w.repo().await;
    let commit = commit(&w, &work(vec![changed("a", "b")], &[])).await;
    for name in ["base", "0", "1"] {
        w.git.keep(&repo, &run_id(), name, &commit).await.unwrap();
    }
    assert_eq!(w.git.kept(&repo, &run_id(), "0").await.unwrap(), Some(commit.clone()));
    assert_eq!(w.git.kept(&repo, &run_id(), "7").await.unwrap(), None);
    assert!(w.git.keep(&repo, &run_id(), "../../heads/main", &commit).await.is_err());
    w.git.drop_run(&repo, &run_id()).await.unwrap();
    w.git.drop_run(&repo, &run_id()).await.unwrap();
    assert_eq!(w.git.kept(&repo, &run_id(), "0").await.unwrap(), None);
    assert_eq!(w.raw(&["show-ref"]).lines().count(), 1);
}

#[tokio::test]
async fn work_that_reaches_outside_or_is_too_much_is_refused() {
    let w = World::new();
    let (repo, base) = (w.repo().await, w.head().await);
    let objects = || w.raw(&["count-objects", "-v"]);
    let before = objects();
    let refused = async |diff: WorkDiff, limits: WorkLimits| {
        w.git.commit_work(&repo, &base, &diff, &about(), limits).await.unwrap_err().kind
    };
    for path in
        ["../x", "/etc/passwd", ".git/config", "a/.GIT/hooks/post-checkout", "git~1/x", "a//b", ".", ""]
    {
        let kind = refused(work(vec![changed(path, "x")], &[]), WorkLimits::default()).await;
        assert_eq!(kind, GitErrorKind::Invalid, "{path:?}");
        let kind = refused(work(vec![], &[path]), WorkLimits::default()).await;
        assert_eq!(kind, GitErrorKind::Invalid, "{path:?}");
    }
    for mode in [0o040_000, 0o160_000, 0o100_600, 0o020_000] {
        let file = ChangedFile { mode, ..changed("a", "1111111111111111111111111111111111111111") };
        assert_eq!(
            refused(work(vec![file], &[]), WorkLimits::default()).await,
            GitErrorKind::Invalid,
            "{mode:o}"
        );
    }
    let small = WorkLimits { max_files: 1, max_bytes: 10 };
    assert_eq!(refused(work(vec![changed("a", "x")], &["b"]), small).await, GitErrorKind::TooLarge);
    assert_eq!(refused(work(vec![changed("a", "x".repeat(11))], &[]), small).await, GitErrorKind::TooLarge);
    assert_eq!(objects(), before);
}

#[tokio::test]
async fn objects_that_git_itself_finds_harmful_stay_in_quarantine() {
    let w = World::new();
    let (repo, base) = (w.repo().await, w.head().await);
    let before = w.raw(&["count-objects", "-v"]);
    let mut link = changed(".gitmodules", "x");
    link.mode = 0o120_000;
    for bad in [
        changed(".gitmodules", "[submodule \"x\"]\n\tpath = x\n\turl = -u./payload\n"),
        changed(".gitmodules", "[submodule \"../../x\"]\n\tpath = x\n\turl = https://example.com/x\n"),
        link,
    ] {
        let e = w
            .git
            .commit_work(&repo, &base, &work(vec![bad], &[]), &about(), WorkLimits::default())
            .await
            .unwrap_err();
        assert_eq!(e.kind, GitErrorKind::Corrupt, "{e}");
        assert!(!e.is_retryable());
    }
    assert_eq!(w.raw(&["count-objects", "-v"]), before);
    let fine = changed(".gitmodules", "[submodule \"x\"]\n\tpath = x\n\turl = https://example.com/x\n");
    commit(&w, &work(vec![fine], &[])).await;
}

#[tokio::test]
async fn a_repository_that_can_not_be_written_says_so() {
    if rustix::process::geteuid().is_root() {
        // Root writes everywhere: a full disk is tested elsewhere.
        return;
    }
    let w = World::new();
    let pack = w.user().join(".git/objects/pack");
    fs::set_permissions(&pack, fs::Permissions::from_mode(0o500)).unwrap();
    let base = w.head().await;
    let diff = work(vec![changed("a", "b")], &[]);
    let e =
        w.git.commit_work(&w.repo().await, &base, &diff, &about(), WorkLimits::default()).await.unwrap_err();
    assert!(!e.message.is_empty());
}
