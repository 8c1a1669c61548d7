use forkyard_engine::git::{Applied, GitErrorKind, WorkLimits};

use super::*;

async fn result(w: &World, diff: WorkDiff) -> (CommitId, CommitId) {
    let base = w.head().await;
    let commit =
        w.git.commit_work(&w.repo().await, &base, &diff, &about(), WorkLimits::default()).await.unwrap();
    (base, commit)
}

async fn patch(w: &World, base: &CommitId, commit: &CommitId) -> Vec<u8> {
    w.git.patch(&w.repo().await, base, commit, 1 << 20).await.unwrap()
}

#[tokio::test]
async fn as_a_branch_of_the_same_repository() {
    let w = World::new();
    let (base, commit) = result(&w, work(vec![changed("a", "b\n")], &[])).await;
    let repo = w.repo().await;
    let done = w.git.apply_branch(&repo, &base, &commit, &repo, "fix/a").await.unwrap();
    assert_eq!(done, Applied::Branch { name: "fix/a".into(), commit: commit.clone() });
    assert_eq!(w.raw(&["rev-parse", "fix/a"]), commit.as_str());
    assert_eq!(w.raw(&["status", "--porcelain"]), "");
    let e = w.git.apply_branch(&repo, &base, &base, &repo, "fix/a").await.unwrap_err();
    assert_eq!(e.kind, GitErrorKind::Conflict, "{e}");
    assert_eq!(w.raw(&["rev-parse", "fix/a"]), commit.as_str());
    for bad in ["--force", "a..b", "HEAD", "-d"] {
        let e = w.git.apply_branch(&repo, &base, &commit, &repo, bad).await.unwrap_err();
        assert_eq!(e.kind, GitErrorKind::Invalid, "{bad}");
    }
}

#[tokio::test]
async fn as_a_branch_of_another_clone_that_has_the_base() {
    let w = World::new();
    let (base, commit) = result(&w, work(vec![changed("a", "b\n")], &["README.md"])).await;
    raw_in(w.dir.path(), &["clone", "-q", "repo", "other"]);
    let other = w.git.open(&w.dir.path().join("other")).await.unwrap();
    let repo = w.repo().await;
    w.git.apply_branch(&repo, &base, &commit, &other, "got").await.unwrap();
    assert_eq!(raw_in(&w.dir.path().join("other"), &["show", "got:a"]), "b");
    raw_in(&w.dir.path().join("other"), &["fsck", "--strict"]);

    raw_in(w.dir.path(), &["init", "-q", "stranger"]);
    let stranger = w.git.open(&w.dir.path().join("stranger")).await.unwrap();
    let e = w.git.apply_branch(&repo, &base, &commit, &stranger, "got").await.unwrap_err();
    assert_eq!(e.kind, GitErrorKind::NotFound);
    assert!(e.to_string().contains("git fetch"), "{e}");
}

#[tokio::test]
async fn onto_the_working_tree_with_other_changes_kept() {
    let w = World::new();
    let mut link = changed("link", "README.md");
    link.mode = 0o120_000;
    let (base, commit) = result(
        &w,
        work(
            vec![changed("src/lib.rs", "one\ntwo\n3\n"), changed("bin", vec![0_u8, 1, 255]), link],
            &["run.sh"],
        ),
    )
    .await;
    w.write("README.md", "mine\n");
    let done = w.git.apply_work_tree(&w.repo().await, patch(&w, &base, &commit).await).await.unwrap();
    assert_eq!(done, Applied::WorkTree { files: 4 });
    assert_eq!((w.read("src/lib.rs"), w.read("README.md")), ("one\ntwo\n3\n".into(), "mine\n".into()));
    assert_eq!(fs::read(w.user().join("bin")).unwrap(), [0, 1, 255]);
    assert!(!w.user().join("run.sh").exists());
    assert_eq!(fs::read_link(w.user().join("link")).unwrap(), Path::new("README.md"));
}

#[tokio::test]
async fn conflicts_are_named_and_nothing_is_changed() {
    let w = World::new();
    let (base, commit) = result(
        &w,
        work(
            vec![changed("a-new", "b\n"), changed("src/lib.rs", "one\ntwo\n3\n"), changed("z", "z\n")],
            &["README.md"],
        ),
    )
    .await;
    w.write("src/lib.rs", "something\nelse\nentirely\n");
    w.write("z", "untracked, and in the way\n");
    let before = w.raw(&["status", "--porcelain"]);
    let e = w.git.apply_work_tree(&w.repo().await, patch(&w, &base, &commit).await).await.unwrap_err();
    assert_eq!(e.kind, GitErrorKind::Conflict);
    assert!(e.message.contains("src/lib.rs:1") && e.message.contains("z: already exists"), "{e}");
    assert_eq!(w.raw(&["status", "--porcelain"]), before);
    assert!(w.user().join("README.md").exists() && !w.user().join("a-new").exists());
}

#[tokio::test]
async fn a_patch_can_not_write_through_a_link() {
    let w = World::new();
    let outside = w.dir.path().join("outside");
    fs::create_dir(&outside).unwrap();
    let (base, commit) = result(&w, work(vec![changed("dir/file", "x\n")], &[])).await;
    std::os::unix::fs::symlink(&outside, w.user().join("dir")).unwrap();
    let e = w.git.apply_work_tree(&w.repo().await, patch(&w, &base, &commit).await).await.unwrap_err();
    assert_eq!(e.kind, GitErrorKind::Conflict, "{e}");
    assert!(!outside.join("file").exists());
}

#[tokio::test]
async fn an_empty_patch_and_a_bare_repository() {
    let w = World::new();
    let repo = w.repo().await;
    assert_eq!(w.git.apply_work_tree(&repo, vec![]).await.unwrap(), Applied::WorkTree { files: 0 });
    let mut bare = repo;
    bare.work_tree = None;
    assert_eq!(w.git.apply_work_tree(&bare, vec![]).await.unwrap_err().kind, GitErrorKind::Invalid);
}

#[tokio::test]
async fn uncommitted_changes_are_carried_and_stay_where_they_are() {
    let w = World::new();
    w.write(".gitignore", "ignored\n");
    w.raw(&["add", ".gitignore"]);
    w.raw(&["commit", "-q", "-m", "ignore"]);
    let (repo, head) = (w.repo().await, w.head().await);
    assert!(!w.git.is_dirty(&repo).await.unwrap());
    assert_eq!(w.git.commit_dirty(&repo, Timestamp(0)).await.unwrap(), head);
    w.write("staged", "s\n");
    w.raw(&["add", "staged"]);
    w.write("src/lib.rs", "edited\n");
    w.write("sub/untracked", "u\n");
    w.write("ignored", "i\n");
    fs::remove_file(w.user().join("README.md")).unwrap();
    let before = (
        w.raw(&["status", "--porcelain"]),
        fs::read(w.user().join(".git/index")).unwrap(),
        w.raw(&["show-ref"]),
    );
    assert!(w.git.is_dirty(&repo).await.unwrap());
    let commit = w.git.commit_dirty(&repo, Timestamp(0)).await.unwrap();
    assert_eq!(w.git.commit_dirty(&repo, Timestamp(0)).await.unwrap(), commit);
    let after = (
        w.raw(&["status", "--porcelain"]),
        fs::read(w.user().join(".git/index")).unwrap(),
        w.raw(&["show-ref"]),
    );
    assert_eq!(before, after);
    let d = w.git.diff(&repo, &head, &commit).await.unwrap();
    let files: Vec<&str> = d.files.iter().map(|f| f.path.as_str()).collect();
    assert_eq!(files, ["README.md", "src/lib.rs", "staged", "sub/untracked"]);
}
