//! What is in a commit, read from objects alone: no checkout, no attributes, no filters.

use forkyard_sandbox::TreeEntry;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWrite, AsyncWriteExt, BufReader};

use super::command::{Call, Git, git, io_error};
use super::error::{GitError, GitErrorKind, Result};
use super::names::{CommitId, check_path};
use super::repo::Repo;
use super::tar;

/// Most files that a tree may have.
pub const MAX_TREE_FILES: usize = 1_000_000;

/// The files of a commit.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Tree {
    /// In git's order.
    pub entries: Vec<TreeEntry>,
    /// Left out: submodules, and names that are not UTF-8 or that no checkout should make.
    pub skipped: Vec<String>,
    /// Those of them that are submodules: a checkout has an empty folder in their place.
    pub submodules: Vec<String>,
}

pub(super) fn list_tree(commit: &CommitId) -> Call {
    git(["ls-tree", "-r", "-z", "--full-tree"]).arg(commit.as_str())
}

impl Tree {
    pub(super) fn parse(listed: &[u8]) -> Result<Tree> {
        let mut tree = Tree::default();
        for record in listed.split(|b| *b == 0).filter(|r| !r.is_empty()) {
            let (entry, path) = parse(record).ok_or_else(|| {
                GitError::new(GitErrorKind::Corrupt, "git ls-tree answered with something else")
            })?;
            match entry {
                Some(entry) if check_path(&entry.path).is_ok() => tree.entries.push(entry),
                Some(_) | None => {
                    if record.starts_with(b"160000 ") && check_path(&path).is_ok() {
                        tree.submodules.push(path.clone());
                    }
                    tree.skipped.push(path);
                }
            }
            if tree.entries.len() > MAX_TREE_FILES {
                return Err(GitError::new(
                    GitErrorKind::TooLarge,
                    format!("the commit has more than {MAX_TREE_FILES} files"),
                ));
            }
        }
        Ok(tree)
    }
}

impl Git {
    pub async fn tree(&self, repo: &Repo, commit: &CommitId) -> Result<Tree> {
        Tree::parse(&self.run(self.on_objects(repo, list_tree(commit))).await?.stdout)
    }

    /// One file of a commit; None if there is none of that name, or if it is not a plain file.
    pub async fn file(
        &self,
        repo: &Repo,
        commit: &CommitId,
        path: &str,
        max_bytes: u64,
    ) -> Result<Option<Vec<u8>>> {
        check_path(path)?;
        let call = git(["ls-tree", "-z", "--full-tree"]).arg(commit.as_str()).arg("--").arg(path);
        let listed = self.run(self.on_objects(repo, call)).await?.stdout;
        let record = listed.strip_suffix(b"\0").unwrap_or(&listed);
        let Some((Some(entry), _)) = parse(record) else { return Ok(None) };
        if entry.path != path || entry.mode == 0o120_000 {
            return Ok(None);
        }
        let call = git(["cat-file", "blob"]).arg(&entry.oid).max_output(max_bytes);
        self.run(self.on_objects(repo, call)).await.map(|a| Some(a.stdout))
    }

    /// Writes the given files as a tar archive, each with `mtime_s`. One git process, whatever their number.
    pub async fn archive(
        &self,
        repo: &Repo,
        entries: &[TreeEntry],
        mtime_s: u64,
        out: &mut (dyn AsyncWrite + Send + Unpin),
    ) -> Result<()> {
        let call = self.on_objects(repo, git(["cat-file", "--batch", "--buffer"]));
        let (mut child, _group) = self.spawn_held(&call)?;
        let mut stdin = child.stdin.take().expect("stdin is piped");
        let mut stdout = BufReader::with_capacity(1 << 18, child.stdout.take().expect("stdout is piped"));
        let mut wanted = String::with_capacity(entries.len() * 41);
        for e in entries {
            wanted.push_str(&e.oid);
            wanted.push('\n');
        }
        // Both ends at once: git stops reading when nobody takes what it answers.
        let feed = async move {
            let written = stdin.write_all(wanted.as_bytes()).await;
            drop(stdin);
            written
        };
        let take = async {
            let mut header = Vec::new();
            for entry in entries {
                header.clear();
                stdout.read_until(b'\n', &mut header).await.map_err(io_error)?;
                let size = blob_size(&header, &entry.oid)?;
                if entry.mode == 0o120_000 {
                    let mut target = vec![0; usize::try_from(size.min(tar::MAX_LINK_BYTES + 1)).unwrap_or(0)];
                    if size > tar::MAX_LINK_BYTES {
                        return Err(GitError::new(
                            GitErrorKind::TooLarge,
                            format!("link {:?} is too long", entry.path),
                        ));
                    }
                    stdout.read_exact(&mut target).await.map_err(io_error)?;
                    out.write_all(&tar::link(&entry.path, &target, mtime_s)).await.map_err(io_error)?;
                } else {
                    out.write_all(&tar::file(&entry.path, entry.mode, size, mtime_s))
                        .await
                        .map_err(io_error)?;
                    let copied =
                        tokio::io::copy(&mut (&mut stdout).take(size), out).await.map_err(io_error)?;
                    if copied != size {
                        return Err(GitError::new(GitErrorKind::Corrupt, "git cat-file ended early"));
                    }
                    out.write_all(tar::padding(size)).await.map_err(io_error)?;
                }
                stdout.read_u8().await.map_err(io_error)?;
            }
            out.write_all(&tar::END).await.map_err(io_error)?;
            out.flush().await.map_err(io_error)
        };
        let (fed, taken) = tokio::join!(feed, take);
        taken?;
        fed.map_err(io_error)?;
        child.wait().await.map_err(io_error)?;
        Ok(())
    }
}

/// `MODE SP TYPE SP OID TAB PATH`: the entry, unless it is no blob or its name is not UTF-8; and the name to show.
fn parse(record: &[u8]) -> Option<(Option<TreeEntry>, String)> {
    let tab = record.iter().position(|b| *b == b'\t')?;
    let meta = std::str::from_utf8(&record[..tab]).ok()?;
    let path = &record[tab + 1..];
    let mut parts = meta.split(' ');
    let mode = u32::from_str_radix(parts.next()?, 8).ok()?;
    let kind = parts.next()?;
    let oid = parts.next()?.to_string();
    let shown = String::from_utf8_lossy(path).into_owned();
    let entry = match std::str::from_utf8(path) {
        Ok(path) if kind == "blob" => Some(TreeEntry { path: path.to_string(), mode: canonical(mode), oid }),
        Ok(_) | Err(_) => None,
    };
    Some((entry, shown))
}

/// Old repositories have modes like 100664.
fn canonical(mode: u32) -> u32 {
    match mode {
        0o120_000 => 0o120_000,
        m if m & 0o100 != 0 => 0o100_755,
        _ => 0o100_644,
    }
}

fn blob_size(header: &[u8], oid: &str) -> Result<u64> {
    let text = String::from_utf8_lossy(header);
    let mut parts = text.trim_end().split(' ');
    match (parts.next(), parts.next(), parts.next().map(str::parse)) {
        (Some(id), Some("blob"), Some(Ok(size))) if id == oid => Ok(size),
        _ => Err(GitError::new(
            GitErrorKind::Corrupt,
            format!("object {oid} can't be read: {}", text.trim_end()),
        )),
    }
}
