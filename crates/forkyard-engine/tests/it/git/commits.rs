//! Commits that were made inside, good ones and others.

use std::process::Stdio;

use forkyard_engine::git::{CommitLimits, GitError, GitErrorKind, WorkLimits};

use super::*;

/// The user's repository, and a clone in which an agent works.
struct Inside {
    w: World,
    dir: PathBuf,
    repo: Repo,
    base: CommitId,
}

impl Inside {
    async fn new() -> Inside {
        let w = World::new();
        raw_in(w.dir.path(), &["clone", "-q", "repo", "inside"]);
        let (dir, repo, base) = (w.dir.path().join("inside"), w.repo().await, w.head().await);
        Inside { w, dir, repo, base }
    }
    fn git(&self, args: &[&str]) -> String {
        raw_in(&self.dir, args)
    }
    fn commit(&self, path: &str, text: impl AsRef<[u8]>) -> CommitId {
        let file = self.dir.join(path);
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(file, text).unwrap();
        self.git(&["add", "-f", "."]);
        self.git(&["commit", "-q", "-m", &format!("about {path}")]);
        self.head()
    }
    fn head(&self) -> CommitId {
        CommitId::new(&self.git(&["rev-parse", "HEAD"])).unwrap()
    }
    fn pack_of(&self, wanted: &str) -> Vec<u8> {
        let mut child = Command::new("git")
            .args(["pack-objects", "--revs", "--stdout", "--quiet"])
            .current_dir(&self.dir)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        std::io::Write::write_all(&mut child.stdin.take().unwrap(), wanted.as_bytes()).unwrap();
        child.wait_with_output().unwrap().stdout
    }
    fn pack(&self) -> Vec<u8> {
        self.pack_of(&format!("HEAD\n^{}\n", self.base))
    }
    /// An object of any content, as a hostile agent writes it.
    fn object(&self, kind: &str, data: &[u8]) -> String {
        let mut child = Command::new("git")
            .args(["hash-object", "-w", "--literally", "--stdin", "-t", kind])
            .current_dir(&self.dir)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        std::io::Write::write_all(&mut child.stdin.take().unwrap(), data).unwrap();
        String::from_utf8(child.wait_with_output().unwrap().stdout).unwrap().trim().to_string()
    }
    /// A commit of a tree with one entry, on the base.
    fn commit_of_entry(&self, mode: &str, name: &str, id: &str) -> CommitId {
        let bytes: Vec<u8> =
            (0..20).map(|i| u8::from_str_radix(&id[2 * i..2 * i + 2], 16).unwrap()).collect();
        let tree = self.object("tree", &[format!("{mode} {name}\0").as_bytes(), &bytes].concat());
        let who = "x <x@x> 1700000000 +0000";
        let text = format!("tree {tree}\nparent {}\nauthor {who}\ncommitter {who}\n\nx\n", self.base);
        let id = self.object("commit", text.as_bytes());
        self.git(&["update-ref", "refs/heads/main", &id]);
        CommitId::new(&id).unwrap()
    }
    async fn take(&self, head: &CommitId, pack: Vec<u8>, limits: CommitLimits) -> Result<usize, GitError> {
        let mut q = self.w.git.quarantine(&self.repo, &self.base).await?;
        q.take_commits(head, pack, limits).await?;
        Ok(q.commits())
    }
    async fn refused(&self, head: &CommitId, pack: Vec<u8>, why: &str) {
        let before = self.w.raw(&["count-objects", "-v"]);
        let e = self.take(head, pack, CommitLimits::default()).await.unwrap_err();
        assert!(e.message.contains(why), "{why}: {e}");
        assert_eq!(self.w.raw(&["count-objects", "-v"]), before);
        let left = fs::read_dir(self.w.dir.path().join("home/git/quarantine")).unwrap().count();
        assert_eq!(left, 0);
    }
}

#[tokio::test]
async fn commits_come_home_as_they_are_with_the_rest_on_top() {
    let i = Inside::new().await;
    i.commit("one.txt", "1\n");
    let head = i.commit("ignored/but-added", "2\n");
    let mut q = i.w.git.quarantine(&i.repo, &i.base).await.unwrap();
    q.take_commits(&head, i.pack(), CommitLimits::default()).await.unwrap();
    assert_eq!(q.commits(), 2);
    let paths: Vec<String> = q.tree().await.unwrap().entries.into_iter().map(|e| e.path).collect();
    assert_eq!(paths, ["README.md", "ignored/but-added", "one.txt", "run.sh", "src/lib.rs"]);
    let rest = work(vec![changed("README.md", "not committed\n")], &["run.sh"]);
    let commit = q.commit(&rest, &about(), WorkLimits::default()).await.unwrap();
    i.w.git.keep(&i.repo, &run_id(), "0", &commit).await.unwrap();
    let log = i.w.raw(&["log", "--format=%an %at %s", commit.as_str()]);
    assert_eq!(
        log,
        "Forkyard 1700000000 Fork 0\nU 1700000000 about ignored/but-added\nU 1700000000 about one.txt\nU 1700000000 first"
    );
    assert_eq!(i.w.raw(&["rev-parse", &format!("{commit}~1")]), head.as_str());
    i.w.raw(&["fsck", "--strict", "--no-dangling"]);

    // With nothing left to commit, the last commit is the result.
    let mut q = i.w.git.quarantine(&i.repo, &i.base).await.unwrap();
    q.take_commits(&head, i.pack(), CommitLimits::default()).await.unwrap();
    assert_eq!(q.commit(&work(vec![], &[]), &about(), WorkLimits::default()).await.unwrap(), head);
    let listed = i.w.git.log(&i.repo, &i.base, &commit, 10).await.unwrap();
    let subjects: Vec<&str> = listed.iter().map(|c| c.subject.as_str()).collect();
    assert_eq!(subjects, ["Fork 0", "about ignored/but-added", "about one.txt"]);
    assert_eq!((listed[1].author.as_str(), listed[1].at.0), ("U", 1_700_000_000_000));
}

#[tokio::test]
async fn a_merge_made_inside_comes_home_too() {
    let i = Inside::new().await;
    i.git(&["checkout", "-q", "-b", "side"]);
    i.commit("side.txt", "s\n");
    i.git(&["checkout", "-q", "main"]);
    i.commit("main.txt", "m\n");
    i.git(&["merge", "-q", "--no-ff", "-m", "merged", "side"]);
    assert_eq!(i.take(&i.head(), i.pack(), CommitLimits::default()).await.unwrap(), 3);
}

#[tokio::test]
async fn a_past_that_is_not_the_bases_is_refused() {
    let i = Inside::new().await;
    // Another root.
    i.git(&["checkout", "-q", "--orphan", "new"]);
    let orphan = i.commit("a", "b");
    i.refused(&orphan, i.pack_of("HEAD\n"), "does not come from the base").await;
    // A commit that the user has, but that the sandbox never got: nobody may make it part of a result.
    i.w.raw(&["checkout", "-q", "-b", "private"]);
    i.w.write("private", "x");
    i.w.raw(&["add", "."]);
    i.w.raw(&["commit", "-q", "-m", "private"]);
    let private = i.w.raw(&["rev-parse", "HEAD"]);
    i.w.raw(&["checkout", "-q", "main"]);
    let who = "x <x@x> 1700000000 +0000";
    let tree = i.git(&["rev-parse", &format!("{}^{{tree}}", i.base)]);
    let text =
        format!("tree {tree}\nparent {}\nparent {private}\nauthor {who}\ncommitter {who}\n\nx\n", i.base);
    let id = i.object("commit", text.as_bytes());
    let mut child = Command::new("git")
        .args(["pack-objects", "--stdout", "--quiet"])
        .current_dir(&i.dir)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    std::io::Write::write_all(&mut child.stdin.take().unwrap(), format!("{id}\n").as_bytes()).unwrap();
    let pack = child.wait_with_output().unwrap().stdout;
    i.refused(&CommitId::new(&id).unwrap(), pack, "not made inside").await;
}

#[tokio::test]
async fn replaced_commits_and_grafts_inside_change_nothing() {
    let i = Inside::new().await;
    let first = i.commit("one.txt", "1\n");
    let head = i.commit("two.txt", "2\n");
    i.git(&["replace", first.as_str(), i.base.as_str()]);
    fs::create_dir_all(i.dir.join(".git/info")).unwrap();
    fs::write(i.dir.join(".git/info/grafts"), format!("{head} {}\n", i.base)).unwrap();
    // Whatever git inside makes of that: what is missing is noticed, and what is there is what it was.
    match i.take(&head, i.pack(), CommitLimits::default()).await {
        Ok(n) => assert_eq!(n, 2),
        Err(e) => assert_eq!(e.kind, GitErrorKind::Corrupt, "{e}"),
    }
}

#[tokio::test]
async fn broken_packs_are_refused() {
    let i = Inside::new().await;
    let head = i.commit("one.txt", "1\n");
    let pack = i.pack();
    i.refused(&head, vec![], "index-pack").await;
    i.refused(&head, b"PACK nonsense".to_vec(), "index-pack").await;
    i.refused(&head, pack[..pack.len() / 2].to_vec(), "index-pack").await;
    let mut flipped = pack.clone();
    let middle = flipped.len() / 2;
    flipped[middle] ^= 0xff;
    i.refused(&head, flipped, "index-pack").await;
    // The commit alone, without its files.
    let id = i.head();
    let mut child = Command::new("git")
        .args(["pack-objects", "--stdout", "--quiet"])
        .current_dir(&i.dir)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    std::io::Write::write_all(&mut child.stdin.take().unwrap(), format!("{id}\n").as_bytes()).unwrap();
    i.refused(&head, child.wait_with_output().unwrap().stdout, "index-pack").await;
    // A pack that does not have what it is said to have.
    let nobody = CommitId::new(&"1".repeat(40)).unwrap();
    i.refused(&nobody, pack, "").await;
}

#[tokio::test]
async fn objects_that_would_harm_a_checkout_are_refused() {
    let i = Inside::new().await;
    let blob = i.object("blob", b"#!/bin/sh\n");
    for name in [".git", ".GIT", "..", "git~1", ".git "] {
        i.git(&["update-ref", "refs/heads/main", i.base.as_str()]);
        let tree = i.git(&["rev-parse", &format!("{}:src", i.base)]);
        let commit = i.commit_of_entry("40000", name, &tree);
        i.refused(&commit, i.pack(), "").await;
    }
    let evil = i.object("blob", b"[submodule \"x\"]\n\tpath = x\n\turl = -u./payload\n");
    let commit = i.commit_of_entry("100644", ".gitmodules", &evil);
    i.refused(&commit, i.pack(), "").await;
    let commit = i.commit_of_entry("120000", ".gitmodules", &blob);
    i.refused(&commit, i.pack(), "").await;
    let commit = i.commit_of_entry("160000", "sub", &"1".repeat(40));
    i.refused(&commit, i.pack(), "submodules").await;
    // The same by a name that is not UTF-8, which a file export would leave out.
    let commit = i.commit_of_entry("100644", "fine", &blob);
    assert_eq!(i.take(&commit, i.pack(), CommitLimits::default()).await.unwrap(), 1);
}

#[tokio::test]
async fn too_much_of_anything_is_refused() {
    let i = Inside::new().await;
    for n in 0..4 {
        i.commit("zeros", vec![n; 300_000]);
    }
    let (head, pack) = (i.head(), i.pack());
    assert!(pack.len() < 10_000, "it unfolds to much more: {}", pack.len());
    let fits = CommitLimits::default();
    assert_eq!(i.take(&head, pack.clone(), fits).await.unwrap(), 4);
    for small in [
        CommitLimits { max_pack_bytes: 100, ..fits },
        CommitLimits { max_commits: 3, ..fits },
        CommitLimits { max_objects: 5, ..fits },
        CommitLimits { max_bytes: 500_000, ..fits },
    ] {
        let e = i.take(&head, pack.clone(), small).await.unwrap_err();
        assert_eq!(e.kind, GitErrorKind::TooLarge, "{small:?}: {e}");
    }
}

/// A delta that says it unfolds to far more than the machine has.
#[tokio::test]
async fn a_bomb_meets_the_limits_of_its_process() {
    use sha1::{Digest, Sha1};
    let i = Inside::new().await;
    let deflate = |data: &[u8]| {
        let mut z = flate2::write::ZlibEncoder::new(Vec::new(), flate2::Compression::fast());
        std::io::Write::write_all(&mut z, data).unwrap();
        z.finish().unwrap()
    };
    let varint = |mut n: u64| {
        let mut out = vec![];
        loop {
            let byte = (n & 0x7f) as u8;
            n >>= 7;
            out.push(byte | if n > 0 { 0x80 } else { 0 });
            if n == 0 {
                return out;
            }
        }
    };
    let header = |kind: u8, mut size: u64| {
        let mut out = vec![(kind << 4) | (size & 0xf) as u8];
        size >>= 4;
        while size > 0 {
            *out.last_mut().unwrap() |= 0x80;
            out.push((size & 0x7f) as u8);
            size >>= 7;
        }
        out
    };
    let base = vec![b'x'; 0xff_ffff];
    // Each copy of the whole base takes four bytes.
    let copies = 4096_u64;
    let mut delta = varint(base.len() as u64);
    delta.extend(varint(copies * base.len() as u64));
    for _ in 0..copies {
        delta.extend([0x80 | 0x70, 0xff, 0xff, 0xff]);
    }
    let mut pack = b"PACK\0\0\0\x02\0\0\0\x02".to_vec();
    let first = pack.len();
    pack.extend(header(3, base.len() as u64));
    pack.extend(deflate(&base));
    let second = pack.len();
    pack.extend(header(6, delta.len() as u64));
    let mut back = (second - first) as u64;
    let mut offset = vec![(back & 0x7f) as u8];
    back >>= 7;
    while back > 0 {
        back -= 1;
        offset.insert(0, 0x80 | (back & 0x7f) as u8);
        back >>= 7;
    }
    pack.extend(offset);
    pack.extend(deflate(&delta));
    let sum = Sha1::digest(&pack);
    pack.extend(sum);
    assert!(pack.len() < 1 << 20);
    let head = i.commit("one.txt", "1\n");
    i.refused(&head, pack, "").await;
}
