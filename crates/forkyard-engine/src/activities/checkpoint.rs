//! A fork's sandbox, made anew from the last of its checkpoints that can be had on this host.

use std::sync::Arc;
use std::time::Duration;

use forkyard_agent::ports::CheckpointInfo;
use forkyard_agent::{AgentEvent, Continuity, JournalEntry};
use forkyard_core::sandbox::Root;
use forkyard_core::task::{Base, ErrorClass, TaskError};
use forkyard_core::{ForkNum, Role, RunId, SandboxId, SnapshotId};
use forkyard_sandbox::{ErrorKind, Sandbox, WorkDiff};
use forkyard_store::Store;

use super::base::own_branch;
use super::{Hands, Job, Ran, run_command, sandbox_error, store_error};
use crate::git::tar;
use crate::ports::{checkpoint_key, decode_work};

/// Labels of a fork's sandbox: the journal position that its files belong to (0: the base), and what of them was kept.
const POSITION: &str = "checkpoint";
const KEPT: &str = "checkpoint_kind";
/// Where files wait inside before they are unpacked.
const ARCHIVE: &str = "/tmp/forkyard-checkpoint.tar";
const UNPACK_LIMIT: Duration = Duration::from_secs(600);

/// What a fork's sandbox begins with.
struct Start {
    root: SnapshotId,
    position: u64,
    /// To be put over the base.
    work: Option<WorkDiff>,
}

impl Hands {
    /// The sandbox `id` of a fork. Can be done again: what is restored is restored as a whole.
    pub(super) async fn create_work(
        &self,
        job: &Job,
        id: &SandboxId,
        base: &Base,
    ) -> Result<Arc<dyn Sandbox>, TaskError> {
        let start = self.start(job, base).await?;
        let mut spec = self.sandbox_spec(job, Root::Snapshot(start.root), Role::Work);
        spec.labels.insert(POSITION.into(), start.position.to_string());
        let kept = if start.work.is_some() { "work" } else { "full" };
        spec.labels.insert(KEPT.into(), kept.into());
        let sandbox = self.provider(job)?.create(id, job.attempt, &spec).await.map_err(sandbox_error)?;
        if start.position == 0 || start.work.is_some() {
            own_branch(&*sandbox, job, base).await?;
        }
        if let Some(work) = &start.work {
            restore(&*sandbox, work).await?;
        }
        Ok(sandbox)
    }

    async fn start(&self, job: &Job, base: &Base) -> Result<Start, TaskError> {
        let from_base = Start { root: self.base_here(job, base).await?, position: 0, work: None };
        let Some((fork, _)) = &job.fork else { return Ok(from_base) };
        let entries = read(&*self.store, &job.run, *fork).await?;
        let held = forkyard_agent::checkpoints(&entries);
        if held.is_empty() {
            return Ok(from_base);
        }
        let here = self.provider(job)?.snapshots().await.map_err(sandbox_error)?;
        for (position, checkpoint) in held.into_iter().rev() {
            let snapshot = checkpoint.snapshot.as_ref().filter(|s| here.iter().any(|h| h.id == **s));
            if let Some(snapshot) = snapshot {
                return Ok(Start { root: snapshot.clone(), position, work: None });
            }
            if let Some(work) = self.stored_work(&job.run, *fork, checkpoint).await? {
                return Ok(Start { position, work: Some(work), ..from_base });
            }
        }
        Ok(from_base)
    }

    async fn stored_work(
        &self,
        run: &RunId,
        fork: ForkNum,
        checkpoint: &CheckpointInfo,
    ) -> Result<Option<WorkDiff>, TaskError> {
        let key = checkpoint_key(run, fork, &checkpoint.id);
        Ok(self.store.blob(&key).await.map_err(store_error)?.and_then(decode_work))
    }

    /// How a sandbox relates to the journal: the one it was written in, or another, made from a checkpoint.
    pub(super) async fn continuity(
        &self,
        entries: &[JournalEntry],
        sandbox: &dyn Sandbox,
    ) -> Result<Continuity, TaskError> {
        let last = entries.iter().rev().find_map(|e| match &e.event {
            AgentEvent::Started(s) => Some(&s.sandbox_id),
            AgentEvent::Resumed(r) => Some(&r.sandbox_id),
            _ => None,
        });
        let Some(before) = last.filter(|before| *before != sandbox.id()) else {
            return Ok(Continuity::Same);
        };
        let labels = sandbox.info().await.map_err(super::sandbox_gone)?.labels;
        let position = labels.get(POSITION).and_then(|p| p.parse().ok()).unwrap_or(0);
        let mut reason = format!("sandbox {before} was lost");
        if labels.get(KEPT).is_some_and(|k| k == "work") {
            reason.push_str("; of its files only those that git does not ignore were kept");
        }
        Ok(Continuity::Replaced { position, reason })
    }
}

/// Puts files over those of the base, in the sandbox's own /workspace.
async fn restore(sandbox: &dyn Sandbox, work: &WorkDiff) -> Result<(), TaskError> {
    // A file where the base has a folder: what is left of the folder has to go.
    let became_files = work
        .changed
        .iter()
        .filter(|c| work.deleted.iter().any(|d| d.strip_prefix(&c.path).is_some_and(|r| r.starts_with('/'))));
    let gone = work.deleted.iter().map(|d| (d, false)).chain(became_files.map(|c| (&c.path, true)));
    for (path, recursive) in gone {
        match sandbox.remove(&format!("/workspace/{path}"), recursive).await {
            Ok(()) => {}
            Err(e) if e.kind == ErrorKind::NotFound => {}
            Err(e) => return Err(sandbox_error(e)),
        }
    }
    if work.changed.is_empty() {
        return Ok(());
    }
    let mut archive = Vec::new();
    for file in &work.changed {
        if file.mode == 0o120_000 {
            archive.extend(tar::link(&file.path, &file.data, 0));
        } else {
            archive.extend(tar::file(&file.path, file.mode, file.data.len() as u64, 0));
            archive.extend_from_slice(&file.data);
            archive.extend_from_slice(tar::padding(file.data.len() as u64));
        }
    }
    archive.extend(tar::END);
    sandbox.write_file(ARCHIVE, archive.into(), Some(0o600)).await.map_err(sandbox_error)?;
    let unpack = format!("tar -xmf {ARCHIVE} -C /workspace && rm -f {ARCHIVE}");
    let Ran { code, output, .. } = run_command(sandbox, &unpack, UNPACK_LIMIT).await?;
    if code != 0 {
        let why = format!("the checkpoint's files could not be unpacked: {output}");
        return Err(TaskError::new(ErrorClass::Permanent, why));
    }
    Ok(())
}

/// All journals of a fork.
pub(super) async fn read(
    store: &dyn Store,
    run: &RunId,
    fork: ForkNum,
) -> Result<Vec<JournalEntry>, TaskError> {
    let stored = store.read_journals(run, fork).await.map_err(store_error)?;
    stored
        .into_iter()
        .filter(crate::ports::is_journal)
        .map(|r| {
            JournalEntry::from_stored(&r.event.kind, r.event.version, r.event.at, r.event.data)
                .map_err(|e| TaskError::new(ErrorClass::Permanent, e.to_string()))
        })
        .collect()
}
