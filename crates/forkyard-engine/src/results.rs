//! What forks came to, out of the repository that keeps it. On another host than the one that collected it, the store has what
//! that repository lacks.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use forkyard_core::view::RunView;
use forkyard_core::{ForkNum, RunId};
use forkyard_store::{Store, StoreError};

use crate::activities::{is_url, open_repo};
use crate::git::{
    ChangeKind, CommitId, CommitLimits, FileChange, Git, GitError, GitErrorKind, MAX_OUTPUT_BYTES, Repo,
};

/// A fork's commit and what it started from, in the repository that keeps them.
pub struct Outcome {
    pub repo: Repo,
    pub base: CommitId,
    pub commit: CommitId,
}

/// None: the fork has left no result, or not yet.
pub async fn outcome(
    git: &Git,
    store: &dyn Store,
    view: &RunView,
    fork: ForkNum,
) -> Result<Option<Outcome>, GitError> {
    let here = match open_repo(git, &view.repo).await {
        Ok(repo) => kept(git, repo, view, fork).await?,
        Err(e) if e.kind == GitErrorKind::NotFound && is_url(&view.repo) => None,
        Err(e) => return Err(e),
    };
    match here {
        Some(outcome) => Ok(Some(outcome)),
        None => brought(git, store, view, fork).await,
    }
}

async fn kept(git: &Git, repo: Repo, view: &RunView, fork: ForkNum) -> Result<Option<Outcome>, GitError> {
    let base = git.kept(&repo, &view.id, "base").await?;
    let commit = git.kept(&repo, &view.id, &fork.to_string()).await?;
    Ok(base.zip(commit).map(|(base, commit)| Outcome { repo, base, commit }))
}

fn key(run: &RunId, fork: ForkNum) -> String {
    format!("{run}/result/{fork}")
}

/// For other hosts: the commits that a fork's result adds to its base, in the store. They go with their run.
pub(crate) async fn hand_out(
    git: &Git,
    store: &dyn Store,
    run: &RunId,
    fork: ForkNum,
    outcome: &Outcome,
) -> Result<(), GitError> {
    let Outcome { repo, base, commit } = outcome;
    let mut data = format!("{base} {commit}\n").into_bytes();
    if base != commit {
        data.extend(git.pack(repo, base, commit).await?);
    }
    if data.len() as u64 > CommitLimits::default().max_pack_bytes {
        tracing::warn!(%run, fork, "the result is too large for the store: other hosts will not see it");
        return Ok(());
    }
    store.put_blob(&key(run, fork), &data).await.map_err(|e| away(&e))
}

/// What another host handed out, brought into this one's cache: checked like the work of a sandbox.
async fn brought(
    git: &Git,
    store: &dyn Store,
    view: &RunView,
    fork: ForkNum,
) -> Result<Option<Outcome>, GitError> {
    let Some(data) = store.blob(&key(&view.id, fork)).await.map_err(|e| away(&e))? else { return Ok(None) };
    let corrupt = || GitError::new(GitErrorKind::Corrupt, "what the store has of the result can't be read");
    let end = data.iter().position(|b| *b == b'\n').ok_or_else(corrupt)?;
    let head = std::str::from_utf8(&data[..end]).map_err(|_| corrupt())?;
    let (base, commit) = head.split_once(' ').ok_or_else(corrupt)?;
    let (base, commit) = (CommitId::new(base)?, CommitId::new(commit)?);
    let repo = if is_url(&view.repo) {
        git.fetch(&view.repo, Some(base.as_str())).await?.0
    } else {
        open_repo(git, &view.repo).await?
    };
    if !git.has(&repo, &commit).await? {
        let mut quarantine = git.quarantine(&repo, &base).await?;
        quarantine.take_commits(&commit, data[end + 1..].to_vec(), CommitLimits::default()).await?;
        quarantine.release().await?;
    }
    git.keep(&repo, &view.id, "base", &base).await?;
    git.keep(&repo, &view.id, &fork.to_string(), &commit).await?;
    Ok(Some(Outcome { repo, base, commit }))
}

fn away(e: &StoreError) -> GitError {
    GitError::new(GitErrorKind::Unavailable, format!("the store: {e}"))
}

/// Files by forks: what they agree and differ on.
#[derive(Debug, Default)]
pub struct Comparison {
    /// Of the forks that have a result, what each did to which file.
    pub changes: BTreeMap<ForkNum, BTreeMap<String, FileChange>>,
    /// For each file, which forks did the same to it: the same letter is the same change.
    pub files: BTreeMap<String, BTreeMap<ForkNum, char>>,
}

impl Comparison {
    /// Files that all forks changed in the same way.
    pub fn same(&self) -> usize {
        self.files.values().filter(|v| v.len() == self.changes.len() && distinct(v) == 1).count()
    }
    /// Files that were changed in different ways.
    pub fn differing(&self) -> usize {
        self.files.values().filter(|v| distinct(v) > 1).count()
    }
    /// Files that one fork alone changed.
    pub fn alone(&self) -> usize {
        self.files.values().filter(|v| v.len() == 1).count()
    }
}

struct Change {
    file: FileChange,
    patch: Vec<u8>,
}

type Changes = BTreeMap<String, Change>;

/// Compares those of `forks` that have left a result.
pub async fn compare(
    git: &Git,
    store: &dyn Store,
    view: &RunView,
    forks: &[ForkNum],
) -> Result<Comparison, GitError> {
    // Many forks may have come to the same: what is the same is read once.
    let mut known: BTreeMap<String, Arc<Changes>> = BTreeMap::new();
    let mut changes: BTreeMap<ForkNum, Arc<Changes>> = BTreeMap::new();
    for fork in forks {
        let Some(outcome) = outcome(git, store, view, *fork).await? else { continue };
        let of_commit = match known.get(outcome.commit.as_str()) {
            Some(of_commit) => of_commit.clone(),
            None => {
                let of_commit = Arc::new(changes_of(git, &outcome).await?);
                known.insert(outcome.commit.as_str().to_string(), of_commit.clone());
                of_commit
            }
        };
        changes.insert(*fork, of_commit);
    }
    let files = agreement(&changes);
    let only_files = |c: &Changes| c.iter().map(|(path, c)| (path.clone(), c.file.clone())).collect();
    Ok(Comparison { changes: changes.iter().map(|(n, c)| (*n, only_files(c))).collect(), files })
}

async fn changes_of(git: &Git, o: &Outcome) -> Result<Changes, GitError> {
    let summary = git.diff(&o.repo, &o.base, &o.commit).await?;
    let patch = git.patch(&o.repo, &o.base, &o.commit, MAX_OUTPUT_BYTES).await?;
    let mut pieces = pieces(&patch).into_iter();
    let mut changes = Changes::new();
    for file in summary.files {
        // A file that became a link, or the like, is taken away and made anew.
        let parts = if file.kind == ChangeKind::TypeChanged { 2 } else { 1 };
        let patch = pieces.by_ref().take(parts).flatten().copied().collect();
        changes.insert(file.path.clone(), Change { file, patch });
    }
    Ok(changes)
}

/// A patch file by file, in its order. A changed line never begins with `d`, so the mark is unmistakable.
fn pieces(patch: &[u8]) -> Vec<&[u8]> {
    const MARK: &[u8] = b"diff --git ";
    let mut starts: Vec<usize> = Vec::new();
    let mut at = 0;
    for line in patch.split_inclusive(|b| *b == b'\n') {
        if line.starts_with(MARK) {
            starts.push(at);
        }
        at += line.len();
    }
    starts
        .iter()
        .enumerate()
        .map(|(i, from)| &patch[*from..starts.get(i + 1).copied().unwrap_or(patch.len())])
        .collect()
}

fn agreement(changes: &BTreeMap<ForkNum, Arc<Changes>>) -> BTreeMap<String, BTreeMap<ForkNum, char>> {
    let paths: BTreeSet<&String> = changes.values().flat_map(|c| c.keys()).collect();
    paths
        .into_iter()
        .map(|path| {
            let mut seen: Vec<&[u8]> = Vec::new();
            let mut variants = BTreeMap::new();
            for (fork, files) in changes {
                let Some(change) = files.get(path) else { continue };
                let at = seen.iter().position(|p| *p == change.patch).unwrap_or_else(|| {
                    seen.push(&change.patch);
                    seen.len() - 1
                });
                variants.insert(*fork, letter(at));
            }
            (path.clone(), variants)
        })
        .collect()
}

/// More variants than letters look alike, which a reader of that many columns will not mind.
fn letter(n: usize) -> char {
    char::from(b'a' + u8::try_from(n.min(25)).unwrap_or(25))
}

fn distinct(variants: &BTreeMap<ForkNum, char>) -> usize {
    variants.values().collect::<BTreeSet<_>>().len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_patch_is_cut_at_its_files_alone() {
        let patch = b"diff --git a/x b/x\n+diff --git a/fake b/fake\ndiff --git a/y b/y\n-z\n";
        let found = pieces(patch);
        assert_eq!(found.len(), 2);
        assert!(found[1].starts_with(b"diff --git a/y"));
        assert!(pieces(b"").is_empty());
    }
}
