use forkyard_engine::git::{History, HistoryLimits};

use super::*;

/// Ten commits on main, and one that is nobody's business on another branch.
fn world() -> World {
    let w = World::new();
    w.raw(&["checkout", "-q", "-b", "secret"]);
    w.write("secret.txt", "hunter2\n");
    w.raw(&["add", "."]);
    w.raw(&["commit", "-q", "-m", "secret"]);
    w.raw(&["checkout", "-q", "main"]);
    for i in 2..=10 {
        w.write("src/lib.rs", format!("{i}\n"));
        w.raw(&["commit", "-q", "-a", "-m", &format!("commit {i}")]);
    }
    w
}

/// A repository as a sandbox gets it.
fn inside(w: &World, history: &History, head: &CommitId) -> PathBuf {
    let dir = w.dir.path().join("inside");
    let _ = fs::remove_dir_all(&dir);
    raw_in(w.dir.path(), &["init", "-q", "-b", "main", "inside"]);
    let pack = dir.join(".git/objects/pack");
    fs::create_dir_all(&pack).unwrap();
    fs::copy(&history.pack, pack.join(format!("pack-{head}.pack"))).unwrap();
    fs::copy(&history.index, pack.join(format!("pack-{head}.idx"))).unwrap();
    if !history.shallow.is_empty() {
        let text: String = history.shallow.iter().map(|c| format!("{c}\n")).collect();
        fs::write(dir.join(".git/shallow"), text).unwrap();
    }
    fs::write(dir.join(".git/refs/heads/main"), format!("{head}\n")).unwrap();
    raw_in(&dir, &["fsck", "--strict"]);
    dir
}

fn commits(dir: &Path) -> usize {
    raw_in(dir, &["rev-list", "HEAD"]).lines().count()
}

#[tokio::test]
async fn a_sandbox_gets_the_past_of_its_commit_and_nothing_else() {
    let w = world();
    let (repo, head) = (w.repo().await, w.head().await);
    let history = w.git.history(&repo, &head, HistoryLimits::default()).await.unwrap();
    assert_eq!(history.shallow, []);
    let dir = inside(&w, &history, &head);
    assert_eq!(commits(&dir), 10);
    assert_eq!(raw_in(&dir, &["show", "HEAD~8:src/lib.rs"]), "2");
    let theirs = raw_in(&dir, &["cat-file", "--batch-all-objects", "--batch-check=%(objectname)"]);
    let secret = w.raw(&["rev-parse", "secret"]);
    assert!(!theirs.contains(&secret));
    assert!(!theirs.contains(&w.raw(&["rev-parse", "secret:secret.txt"])));
    drop(history);
    assert_eq!(fs::read_dir(w.dir.path().join("home/git/quarantine")).unwrap().count(), 0);
}

#[tokio::test]
async fn a_long_past_is_cut_off_where_it_is_too_much() {
    let w = world();
    let (repo, head) = (w.repo().await, w.head().await);
    for (limits, expected) in [
        (HistoryLimits { max_commits: 4, max_bytes: 1 << 30 }, 4),
        (HistoryLimits { max_commits: 1000, max_bytes: 1 }, 1),
        (HistoryLimits { max_commits: 1, max_bytes: 1 }, 1),
    ] {
        let history = w.git.history(&repo, &head, limits).await.unwrap();
        assert_eq!(history.shallow.len(), 1, "{limits:?}");
        let dir = inside(&w, &history, &head);
        assert_eq!(commits(&dir), expected, "{limits:?}");
        assert_eq!(raw_in(&dir, &["show", "HEAD:README.md"]), "hello");
    }
}

#[tokio::test]
async fn a_past_with_merges_is_whole_or_cut_and_always_sound() {
    let w = world();
    w.raw(&["checkout", "-q", "-b", "side", "HEAD~5"]);
    for i in 0..3 {
        w.write(&format!("side{i}"), "x\n");
        w.raw(&["add", "."]);
        w.raw(&["commit", "-q", "-m", "side"]);
    }
    w.raw(&["checkout", "-q", "main"]);
    w.raw(&["merge", "-q", "--no-ff", "-m", "merged", "side"]);
    let (repo, head) = (w.repo().await, w.head().await);
    for max_commits in 1..=15 {
        let limits = HistoryLimits { max_commits, max_bytes: 1 << 30 };
        let history = w.git.history(&repo, &head, limits).await.unwrap();
        let dir = inside(&w, &history, &head);
        assert!(commits(&dir) <= max_commits.min(14), "{max_commits}");
        assert_eq!(history.shallow.is_empty(), max_commits >= 14, "{max_commits}");
    }
}

#[tokio::test]
async fn the_past_of_a_remote_repository_and_of_a_shallow_one() {
    let w = world();
    let url = format!("file://{}", w.user().display());
    let (cache, resolved) = w.git.fetch(&url, None).await.unwrap();
    let history = w.git.history(&cache, &resolved.commit, HistoryLimits::default()).await.unwrap();
    assert_eq!(commits(&inside(&w, &history, &resolved.commit)), 10);

    raw_in(w.dir.path(), &["clone", "-q", "--depth=3", &url, "shallow"]);
    let shallow = w.git.open(&w.dir.path().join("shallow")).await.unwrap();
    let history = w.git.history(&shallow, &resolved.commit, HistoryLimits::default()).await.unwrap();
    assert_eq!(commits(&inside(&w, &history, &resolved.commit)), 3);
}
