use std::fs;
use std::process::{Command, Stdio};

use forkyard_engine::git::{Git, GitErrorKind};
use tokio::io::AsyncWriteExt;

use super::*;

#[tokio::test]
async fn repositories_are_found_from_below_from_worktrees_and_bare() {
    let w = World::new();
    let repo = w.repo().await;
    assert_eq!(repo.work_tree.as_deref(), Some(w.user().canonicalize().unwrap().as_path()));
    let below = w.git.open(&w.user().join("src")).await.unwrap();
    assert_eq!(below, repo);

    let tree = w.dir.path().join("tree");
    w.raw(&["worktree", "add", "-q", "-b", "side", tree.to_str().unwrap()]);
    let side = w.git.open(&tree).await.unwrap();
    assert_eq!(w.git.resolve(&side, None).await.unwrap().branch.as_deref(), Some("side"));
    assert!(w.git.has(&side, &w.head().await).await.unwrap());

    let bare = w.dir.path().join("bare.git");
    raw_in(w.dir.path(), &["clone", "-q", "--bare", "repo", "bare.git"]);
    assert_eq!(w.git.open(&bare).await.unwrap().work_tree, None);

    let e = w.git.open(w.dir.path()).await.unwrap_err();
    assert_eq!(e.kind, GitErrorKind::NotFound);
    assert!(e.to_string().contains("git init"), "{e}");
    assert_eq!(w.git.open(&w.dir.path().join("none")).await.unwrap_err().kind, GitErrorKind::NotFound);
}

#[tokio::test]
async fn an_empty_or_a_sha256_repository_says_so() {
    let w = World::new();
    let empty = w.dir.path().join("empty");
    raw_in(w.dir.path(), &["init", "-q", "empty"]);
    let repo = w.git.open(&empty).await.unwrap();
    let e = w.git.resolve(&repo, None).await.unwrap_err();
    assert_eq!((e.kind, e.message.as_str()), (GitErrorKind::NotFound, "the repository has no commit yet"));
    raw_in(w.dir.path(), &["init", "-q", "--object-format=sha256", "new"]);
    let e = w.git.open(&w.dir.path().join("new")).await.unwrap_err();
    assert!(e.to_string().contains("sha256"), "{e}");
}

#[tokio::test]
async fn branches_tags_and_commits_resolve_and_nothing_else() {
    let w = World::new();
    let (repo, head) = (w.repo().await, w.head().await);
    w.raw(&["tag", "v1"]);
    w.raw(&["tag", "-a", "v2", "-m", "x"]);
    let resolve = async |rev: &str| w.git.resolve(&repo, Some(rev)).await;
    assert_eq!(resolve("main").await.unwrap().branch.as_deref(), Some("main"));
    for rev in ["v1", "v2", head.as_str()] {
        let r = resolve(rev).await.unwrap();
        assert_eq!((r.commit, r.branch), (head.clone(), None), "{rev}");
    }
    assert_eq!(resolve("nope").await.unwrap_err().kind, GitErrorKind::NotFound);
    assert_eq!(resolve(&"0".repeat(40)).await.unwrap_err().kind, GitErrorKind::NotFound);
    for bad in ["--upload-pack=x", "main..main", "HEAD~1", "main:README.md", "@{-1}", "-h"] {
        assert_eq!(resolve(bad).await.unwrap_err().kind, GitErrorKind::Invalid, "{bad}");
    }
}

#[tokio::test]
async fn a_tree_lists_files_and_leaves_out_what_no_checkout_should_make() {
    let w = World::new();
    w.write("odd\nname", "x");
    w.write("-dash", "x");
    std::os::unix::fs::symlink("README.md", w.user().join("link")).unwrap();
    w.raw(&["add", "."]);
    w.raw(&["update-index", "--add", "--cacheinfo", &format!("160000,{},sub", "1".repeat(40))]);
    let blob = w.raw(&["hash-object", "README.md"]);
    // A name that is not UTF-8 can't be given as an argument here.
    let record = [format!("100644 {blob} 0\t").as_bytes(), b"latin\xe4", b"\0"].concat();
    let mut child = Command::new("git")
        .args(["update-index", "-z", "--index-info"])
        .current_dir(w.user())
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    std::io::Write::write_all(child.stdin.as_mut().unwrap(), &record).unwrap();
    assert!(child.wait().unwrap().success());
    w.raw(&["commit", "-q", "-m", "odd"]);
    let tree = w.git.tree(&w.repo().await, &w.head().await).await.unwrap();
    let listed: Vec<(String, u32)> = tree.entries.into_iter().map(|e| (e.path, e.mode)).collect();
    let expected = [
        ("-dash", 0o100_644),
        ("README.md", 0o100_644),
        ("link", 0o120_000),
        ("odd\nname", 0o100_644),
        ("run.sh", 0o100_755),
        ("src/lib.rs", 0o100_644),
    ];
    assert_eq!(listed, expected.map(|(p, m)| (p.to_string(), m)));
    assert_eq!(tree.skipped, ["latin\u{fffd}", "sub"]);
}

#[tokio::test]
async fn a_single_file_is_read_within_its_bound() {
    let w = World::new();
    std::os::unix::fs::symlink("/etc/passwd", w.user().join("forkyard.toml")).unwrap();
    w.raw(&["add", "."]);
    w.raw(&["commit", "-q", "-m", "link"]);
    let (repo, head) = (w.repo().await, w.head().await);
    assert_eq!(w.git.file(&repo, &head, "src/lib.rs", 100).await.unwrap().unwrap(), b"one\ntwo\nthree\n");
    assert_eq!(w.git.file(&repo, &head, "none", 100).await.unwrap(), None);
    assert_eq!(w.git.file(&repo, &head, "src", 100).await.unwrap(), None);
    assert_eq!(w.git.file(&repo, &head, "forkyard.toml", 100).await.unwrap(), None);
    assert_eq!(w.git.file(&repo, &head, "src/lib.rs", 3).await.unwrap_err().kind, GitErrorKind::TooLarge);
    assert!(w.git.file(&repo, &head, "../x", 3).await.is_err());
}

async fn archive(git: &Git, repo: &Repo, commit: &CommitId) -> Vec<u8> {
    let tree = git.tree(repo, commit).await.unwrap();
    let mut out = Vec::new();
    git.archive(repo, &tree.entries, 1_700_000_000, &mut out).await.unwrap();
    out
}

#[tokio::test]
async fn an_archive_unpacks_to_the_same_files() {
    let w = World::new();
    let long = format!("{}/{}", "d".repeat(120), "f".repeat(200));
    w.write(&long, "long");
    w.write("sp ace\nline", "odd");
    w.write("big.bin", vec![7_u8; 100_000]);
    w.write("empty", "");
    // Attributes must not change a byte.
    w.write(".gitattributes", "* text eol=crlf ident export-ignore\n");
    w.write("ident.txt", "$Id$\n");
    std::os::unix::fs::symlink("x".repeat(150), w.user().join("longlink")).unwrap();
    w.raw(&["add", "."]);
    w.raw(&["commit", "-q", "-m", "odd"]);
    let bytes = archive(&w.git, &w.repo().await, &w.head().await).await;
    let out = w.dir.path().join("out");
    fs::create_dir(&out).unwrap();
    let mut tar = tokio::process::Command::new("tar")
        .arg("xf")
        .arg("-")
        .current_dir(&out)
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    tar.stdin.take().unwrap().write_all(&bytes).await.unwrap();
    assert!(tar.wait().await.unwrap().success());
    for (path, text) in
        [(long.as_str(), "long"), ("sp ace\nline", "odd"), ("empty", ""), ("ident.txt", "$Id$\n")]
    {
        assert_eq!(fs::read_to_string(out.join(path)).unwrap(), text, "{path}");
    }
    assert_eq!(fs::read(out.join("big.bin")).unwrap(), vec![7_u8; 100_000]);
    assert_eq!(fs::read_link(out.join("longlink")).unwrap().to_str().unwrap().len(), 150);
    use std::os::unix::fs::PermissionsExt;
    assert_eq!(fs::metadata(out.join("run.sh")).unwrap().permissions().mode() & 0o777, 0o755);
}

#[tokio::test]
async fn many_files_go_through_one_git_without_a_stall() {
    let w = World::new();
    for i in 0..3000 {
        w.write(&format!("many/{i}"), format!("{i}").repeat(200));
    }
    w.raw(&["add", "."]);
    w.raw(&["commit", "-q", "-m", "many"]);
    let bytes = archive(&w.git, &w.repo().await, &w.head().await).await;
    assert!(bytes.len() > 3000 * 512);
}
