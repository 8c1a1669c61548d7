//! What a prepared start has beside its commit: files that setup made, or that a snapshot or an image brought. They are nobody's
//! work, so results leave them out as long as they are as they were.

use std::collections::BTreeMap;

use forkyard_core::task::{Base, ErrorClass, TaskError};
use forkyard_core::{RunId, SnapshotId};
use forkyard_sandbox::{ErrorKind, GitExport, Sandbox, TreeEntry, WorkDiff};
use serde::{Deserialize, Serialize};

use super::{Hands, Job, sandbox_error, store_error};
use crate::git::WorkLimits;

/// Kept with the run, by the snapshot that it is about.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Extras {
    changed: Vec<TreeEntry>,
    deleted: Vec<String>,
}

impl Hands {
    /// Written down before the snapshot is there, so that whoever finds that has this too.
    pub(super) async fn note_extras(
        &self,
        job: &Job,
        sandbox: &dyn Sandbox,
        tree: &[TreeEntry],
        snapshot: &SnapshotId,
    ) -> Result<(), TaskError> {
        let WorkLimits { max_files, max_bytes } = WorkLimits::default();
        let export = GitExport { repo: None, base: tree.to_vec(), max_bytes, max_files: max_files as u64 };
        let extras = match sandbox.git_export(export).await {
            Ok(work) => Extras::of(&work),
            Err(e) if e.kind == ErrorKind::TooLarge => {
                tracing::warn!(run = %job.run, "what setup made will be part of the results: {e}");
                return Ok(());
            }
            Err(e) => return Err(sandbox_error(e)),
        };
        if extras == Extras::default() {
            return Ok(());
        }
        let text = serde_json::to_vec(&extras).expect("it has string keys and no failing parts");
        self.store.put_blob(&key(&job.run, snapshot), &text).await.map_err(store_error)
    }

    /// Those of the start that the job's fork had.
    pub(super) async fn extras(&self, job: &Job, base: &Base) -> Result<Extras, TaskError> {
        let key = key(&job.run, &Self::base_snapshot(job, base)?);
        let Some(text) = self.store.blob(&key).await.map_err(store_error)? else {
            return Ok(Extras::default());
        };
        serde_json::from_slice(&text)
            .map_err(|e| TaskError::new(ErrorClass::Permanent, format!("{key} can't be read: {e}")))
    }
}

impl Extras {
    fn of(work: &WorkDiff) -> Extras {
        let entry = |file: &forkyard_sandbox::ChangedFile| TreeEntry {
            path: file.path.clone(),
            mode: file.mode,
            oid: blob_id(&file.data),
        };
        Extras { changed: work.changed.iter().map(entry).collect(), deleted: work.deleted.clone() }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.changed.is_empty() && self.deleted.is_empty()
    }

    /// The tree that files are compared with: they count as there already, unless a commit made inside says something about
    /// them. `start` is the tree of the commit that the run starts from, `head` that of the last one made inside.
    pub(super) fn over(&self, head: Vec<TreeEntry>, start: &[TreeEntry]) -> Vec<TreeEntry> {
        let start: BTreeMap<&str, &TreeEntry> = start.iter().map(|e| (e.path.as_str(), e)).collect();
        let mut tree: BTreeMap<String, TreeEntry> = head.into_iter().map(|e| (e.path.clone(), e)).collect();
        let untouched =
            |tree: &BTreeMap<String, TreeEntry>, path: &str| tree.get(path) == start.get(path).copied();
        for entry in &self.changed {
            if untouched(&tree, &entry.path) {
                tree.insert(entry.path.clone(), entry.clone());
            }
        }
        for path in &self.deleted {
            if untouched(&tree, path) {
                tree.remove(path);
            }
        }
        tree.into_values().collect()
    }
}

fn key(run: &RunId, snapshot: &SnapshotId) -> String {
    format!("{run}/extras/{snapshot}")
}

/// As git names a file's contents.
fn blob_id(data: &[u8]) -> String {
    let mut hash = ring::digest::Context::new(&ring::digest::SHA1_FOR_LEGACY_USE_ONLY);
    hash.update(format!("blob {}\0", data.len()).as_bytes());
    hash.update(data);
    hash.finish().as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(path: &str, data: &str) -> TreeEntry {
        TreeEntry { path: path.into(), mode: 0o100_644, oid: blob_id(data.as_bytes()) }
    }

    #[test]
    fn contents_are_named_as_git_does() {
        assert_eq!(blob_id(b""), "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391");
        assert_eq!(blob_id(b"hello\n"), "ce013625030ba8dba906f756967f9e9ca394464a");
    }

    #[test]
    fn what_was_there_before_the_work_is_compared_with() {
        let start = [entry("kept", "a"), entry("lock", "old"), entry("gone", "x")];
        let extras =
            Extras { changed: vec![entry("built", "b"), entry("lock", "new")], deleted: vec!["gone".into()] };
        let tree = extras.over(start.to_vec(), &start);
        assert_eq!(tree, [entry("built", "b"), entry("kept", "a"), entry("lock", "new")]);
    }

    #[test]
    fn what_was_committed_inside_counts() {
        let start = [entry("lock", "old"), entry("gone", "x")];
        let extras =
            Extras { changed: vec![entry("built", "b"), entry("lock", "new")], deleted: vec!["gone".into()] };
        let head = vec![entry("built", "mine"), entry("gone", "mine"), entry("lock", "mine")];
        assert_eq!(extras.over(head.clone(), &start), head);
    }
}
