//! Checkpoints of a fork. `full`: the sandbox's file system, frozen, on its host. `work`: what git does not ignore and the
//! base does not have, in the store; it can be had on every host, and where the file system could not be frozen.

use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use forkyard_agent::ports::{CheckpointError, CheckpointInfo, CheckpointKind, Checkpoints};
use forkyard_core::sandbox::Labels;
use forkyard_core::{ForkNum, RunId, SnapshotId};
use forkyard_sandbox::{
    ChangedFile, ErrorKind, GitExport, Provider, Sandbox, SandboxError, TreeEntry, WorkDiff,
};
use forkyard_store::{MAX_BLOB_BYTES, Store, StoreError};
use serde::{Deserialize, Serialize};
use tokio::sync::OnceCell;

use crate::activities::open_repo;
use crate::clock::Clock;
use crate::git::{CommitId, Git};

/// Files of a `work` checkpoint: more than any change that a person would review.
const MAX_WORK_FILES: u64 = 20_000;

/// What the base commit holds, read once and only if it is asked for: most forks never do.
pub struct BaseTree {
    git: Arc<Git>,
    source: String,
    commit: CommitId,
    entries: OnceCell<Vec<TreeEntry>>,
}

impl BaseTree {
    /// `source`: of the run's repository.
    pub fn new(git: Arc<Git>, source: &str, commit: CommitId) -> BaseTree {
        BaseTree { git, source: source.into(), commit, entries: OnceCell::new() }
    }
    async fn entries(&self) -> Result<Vec<TreeEntry>, String> {
        let read = async || {
            let repo = open_repo(&self.git, &self.source).await?;
            self.git.tree(&repo, &self.commit).await.map(|t| t.entries)
        };
        self.entries.get_or_try_init(read).await.cloned().map_err(|e| e.to_string())
    }
}

/// Of one attempt of a fork.
pub struct HostCheckpoints {
    pub sandbox: Arc<dyn Sandbox>,
    pub provider: Arc<dyn Provider>,
    pub store: Arc<dyn Store>,
    pub run: RunId,
    pub fork: ForkNum,
    pub labels: Labels,
    pub base: BaseTree,
    /// Other hosts drive runs of this store: each checkpoint is kept where they can get it, too.
    pub travels: bool,
}

/// Where the store has the files of a checkpoint. Removed with its run.
pub fn checkpoint_key(run: &RunId, fork: ForkNum, id: &str) -> String {
    format!("{run}/checkpoint/{fork}/{id}")
}

impl HostCheckpoints {
    async fn freeze(&self, id: &SnapshotId, turn: u32) -> Result<(), SandboxError> {
        let mut labels = self.labels.clone();
        labels.insert("turn".to_string(), turn.to_string());
        self.sandbox.snapshot(id, &labels).await.map(|_| ())
    }

    async fn export(&self, id: &SnapshotId) -> Result<(), CheckpointError> {
        let failed = CheckpointError::Failed;
        let export = GitExport {
            repo: None,
            base: self.base.entries().await.map_err(failed)?,
            max_bytes: MAX_BLOB_BYTES as u64,
            max_files: MAX_WORK_FILES,
        };
        let work = self.sandbox.git_export(export).await.map_err(of_sandbox)?;
        let blob = encode_work(&work);
        let stored = self.store.put_blob(&checkpoint_key(&self.run, self.fork, id.as_str()), &blob).await;
        stored.map_err(|e: StoreError| failed(e.to_string()))
    }
}

fn of_sandbox(e: SandboxError) -> CheckpointError {
    match e.kind {
        ErrorKind::Stale => CheckpointError::Stale,
        ErrorKind::Invalid
        | ErrorKind::NotFound
        | ErrorKind::Denied
        | ErrorKind::Auth
        | ErrorKind::Unsupported
        | ErrorKind::TooLarge
        | ErrorKind::Unavailable
        | ErrorKind::Timeout => CheckpointError::Failed(e.to_string()),
    }
}

#[async_trait]
impl Checkpoints for HostCheckpoints {
    async fn make(&self, turn: u32, position: u64) -> Result<CheckpointInfo, CheckpointError> {
        let id = SnapshotId::new(format!("{}f{}p{position}", self.run, self.fork))
            .map_err(|e| CheckpointError::Failed(e.to_string()))?;
        let frozen = self.freeze(&id, turn).await.map_err(of_sandbox);
        let kind = match frozen {
            Err(CheckpointError::Stale) => return Err(CheckpointError::Stale),
            Ok(()) => {
                // Without its copy it is still a checkpoint of this host.
                if self.travels
                    && let Err(e) = self.export(&id).await
                {
                    tracing::warn!(checkpoint = %id, "it can't be had on other hosts: {e}");
                }
                CheckpointKind::Full
            }
            Err(CheckpointError::Failed(why)) => {
                self.export(&id).await.map_err(|e| match e {
                    CheckpointError::Stale => CheckpointError::Stale,
                    CheckpointError::Failed(also) => CheckpointError::Failed(format!("{why}; {also}")),
                })?;
                tracing::debug!(checkpoint = %id, "only the work was kept: {why}");
                CheckpointKind::Work
            }
        };
        Ok(CheckpointInfo {
            id: id.to_string(),
            kind,
            at: Clock::system().now(),
            snapshot: (kind == CheckpointKind::Full).then_some(id),
        })
    }

    async fn remove(&self, checkpoint: &CheckpointInfo) -> Result<(), CheckpointError> {
        if let Some(snapshot) = &checkpoint.snapshot {
            self.provider.remove_snapshot(snapshot).await.map_err(of_sandbox)?;
        }
        if self.travels || checkpoint.kind == CheckpointKind::Work {
            let key = checkpoint_key(&self.run, self.fork, &checkpoint.id);
            self.store.delete_blob(&key).await.map_err(|e| CheckpointError::Failed(e.to_string()))?;
        }
        Ok(())
    }
}

/// The first line of a stored one; the files' bytes follow, one after the other.
#[derive(Serialize, Deserialize)]
struct Head {
    changed: Vec<(String, u32, u64)>,
    deleted: Vec<String>,
}

fn encode_work(work: &WorkDiff) -> Vec<u8> {
    let changed = work.changed.iter().map(|f| (f.path.clone(), f.mode, f.data.len() as u64)).collect();
    let head = Head { changed, deleted: work.deleted.clone() };
    let mut out = serde_json::to_vec(&head).unwrap_or_default();
    out.push(b'\n');
    work.changed.iter().for_each(|f| out.extend_from_slice(&f.data));
    out
}

/// None if it is not one.
pub fn decode_work(blob: Vec<u8>) -> Option<WorkDiff> {
    let blob = Bytes::from(blob);
    let line = blob.iter().position(|b| *b == b'\n')?;
    let head: Head = serde_json::from_slice(&blob[..line]).ok()?;
    let mut rest = blob.slice(line + 1..);
    let mut changed = Vec::with_capacity(head.changed.len());
    for (path, mode, len) in head.changed {
        let len = usize::try_from(len).ok().filter(|len| *len <= rest.len())?;
        changed.push(ChangedFile { path, mode, data: rest.split_to(len) });
    }
    rest.is_empty().then_some(WorkDiff { changed, deleted: head.deleted, skipped: Vec::new() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_survives_being_stored_and_a_cut_one_is_none() {
        let file = |path: &str, mode, data: &[u8]| ChangedFile {
            path: path.into(),
            mode,
            data: Bytes::copy_from_slice(data),
        };
        let work = WorkDiff {
            changed: vec![
                file("a", 0o100_644, b"one\ntwo\n"),
                file("b c", 0o100_755, b""),
                file("l", 0o120_000, b"a"),
            ],
            deleted: vec!["old\nname".into()],
            skipped: vec![],
        };
        let blob = encode_work(&work);
        assert_eq!(decode_work(blob.clone()).as_ref(), Some(&work));
        for end in 0..blob.len() {
            assert_eq!(decode_work(blob[..end].to_vec()), None, "{end}");
        }
        assert_eq!(decode_work([blob, vec![1]].concat()), None);
    }
}
