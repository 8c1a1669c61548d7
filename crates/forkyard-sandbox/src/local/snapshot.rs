//! Snapshots: a sealed layer where nothing runs, a copy where something does; archives of both.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;

use forkyard_core::SnapshotId;
use forkyard_guest::protocol::Descriptors;
use forkyard_guest::zygote::{Ask, UnpackLimits, Work, WorkResult};
use serde::{Deserialize, Serialize};

use super::sandbox::LocalSandbox;
use super::state::{self, Meta, SnapshotMeta};
use super::zygote::unavailable;
use super::{Inner, link};
use crate::guest_client::GuestClient;
use crate::{ErrorKind, Labels, ProviderKind, Result, Sandbox, SandboxError, SnapshotInfo, SnapshotMode};

/// Lookups of missing names cost by depth; at this many layers the stack is merged into one.
const MAX_DEPTH: usize = 16;
/// The longest that commands are frozen for a copy.
const FREEZE_MS: u64 = 1000;
/// Of an archive that is taken in.
const IMPORT_LIMITS: UnpackLimits = UnpackLimits { bytes: 64 << 30, entries: 10_000_000 };
/// The first line of an archive.
const MAX_HEADER: u64 = 64 << 10;

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ArchiveHeader {
    forkyard_snapshot: u32,
    layers: usize,
    host_trees: bool,
    mode: SnapshotMode,
    #[serde(default)]
    image_env: BTreeMap<String, String>,
}

/// What lies below a sandbox's layers.
struct Base {
    host_trees: bool,
    directory: Option<String>,
    image_env: BTreeMap<String, String>,
}

impl Base {
    fn of(meta: &Meta) -> Base {
        Base {
            host_trees: meta.host_trees,
            directory: meta.directory.clone(),
            image_env: meta.image_env.clone(),
        }
    }
}

pub(super) fn worked(result: WorkResult) -> Result<(u64, u64)> {
    match result {
        WorkResult::Done { bytes, entries } => Ok((bytes, entries)),
        WorkResult::TimedOut => Err(SandboxError::new(
            ErrorKind::Timeout,
            format!("what changed can't be copied within a freeze of {FREEZE_MS} ms"),
        )
        .hint("take the snapshot while no command runs")),
        WorkResult::Refused { reason } => {
            Err(SandboxError::new(ErrorKind::Invalid, format!("the archive is refused: {reason}")))
        }
        WorkResult::Failed { step, errno } => {
            let reason = std::io::Error::from_raw_os_error(errno);
            Err(unavailable(format!("{step}: {reason}")))
        }
    }
}

impl LocalSandbox {
    pub(super) async fn take_snapshot(&self, id: &SnapshotId, labels: &Labels) -> Result<SnapshotInfo> {
        let inner = &self.inner;
        let _lock = inner.state.lock(self.id().as_str()).await?;
        let _snapshot = inner.state.lock(&format!("snapshot.{id}")).await?;
        if let Some(known) = inner.state.load_snapshot(id)? {
            return Ok(known.info);
        }
        let meta = self.meta()?;
        let guest = self.guest().await?;
        let busy = guest.quiesce().await?;
        // From here on every way out thaws.
        let sealed = if busy { None } else { inner.seal(meta.clone(), id).await.ok() };
        let taken = match sealed {
            Some(next) => {
                guest.thaw(Some(next.upper.to_string())).await.map(|()| (next.lower, SnapshotMode::Sealed))
            }
            // Commands run, or the layer can't be exchanged from here: only the helper of the process that made the sandbox
            // can enter its namespaces.
            None => {
                let copied = inner.copy_live(&meta, id, &guest).await;
                let thawed = guest.thaw(None).await;
                copied.and_then(|layers| thawed.map(|()| (layers, SnapshotMode::Copied)))
            }
        };
        let (layers, mode) = taken?;
        let info = SnapshotInfo {
            id: id.clone(),
            provider: ProviderKind::Local,
            mode,
            labels: labels.clone(),
            created_at: state::now(),
            bytes: None,
        };
        inner.keep_snapshot(info, layers, Base::of(&meta))
    }
}

impl Inner {
    /// Writes a snapshot down, as a user of each of its layers.
    fn keep_snapshot(&self, info: SnapshotInfo, layers: Vec<String>, base: Base) -> Result<SnapshotInfo> {
        for layer in &layers {
            if !self.state.add_ref(layer, &format!("snapshot.{}", info.id))? {
                return Err(unavailable(format!("layer {layer} is gone")));
            }
        }
        let Base { host_trees, directory, image_env } = base;
        let meta = SnapshotMeta { format: state::format(), info, layers, host_trees, directory, image_env };
        self.state.save_snapshot(&meta)?;
        Ok(meta.info)
    }

    /// A new layer folder with its first user.
    pub(super) fn new_layer(&self, user: &str) -> Result<String> {
        let name = format!("{:016x}", state::unique());
        let dir = self.state.layer(&name);
        self.state.make_dir(&dir)?;
        self.state.make_dir(&dir.join("refs"))?;
        self.state.add_ref(&name, user)?;
        Ok(name)
    }

    /// The live layer of a quiet sandbox becomes a sealed one below a new live one. Returns the sandbox as it is then.
    async fn seal(self: &Arc<Self>, meta: Meta, snapshot: &SnapshotId) -> Result<Meta> {
        let dir = self.state.sandbox(&meta.id);
        let user = format!("sandbox.{}", meta.id);
        let mut next = meta.clone();
        next.upper += 1;
        for part in ["up", "work"] {
            self.state.make_dir(&dir.join(format!("{part}{}", next.upper)))?;
        }
        let layer = self.new_layer(&user)?;
        let (live, sealed) = (dir.join(format!("up{}", meta.upper)), self.state.layer(&layer).join("fs"));
        next.lower.insert(0, layer.clone());
        let swap = async {
            // A mounted directory may be renamed: the mount follows it.
            std::fs::rename(&live, &sealed).map_err(|e| state::io_error(&live, &e))?;
            if next.lower.len() > MAX_DEPTH {
                next.lower = vec![self.merge(&next, &user).await?];
            }
            let mut descriptors =
                link::descriptors(&meta.id, &dir, meta.attempt, Descriptors::Namespaces).await?;
            self.state.save(&next)?;
            let ask = Ask::Restack { root: self.root_ask(&next) };
            descriptors.extend(self.directory(&next).await?);
            self.zygote().await?.restack(ask, descriptors).await
        };
        if let Err(e) = swap.await {
            let _ = std::fs::rename(&sealed, &live);
            let _ = self.state.save(&meta);
            self.drop_layer(&layer, &user)?;
            tracing::warn!(sandbox = %meta.id, %snapshot, error = %e, "the layer was not sealed");
            return Err(e);
        }
        if let Some(path) = self.state.trash(&dir.join(format!("work{}", meta.upper)))? {
            self.remove_later(path);
        }
        // A merge took the place of all that was below.
        for old in meta.lower.iter().chain([&layer]).filter(|old| !next.lower.contains(old)) {
            self.drop_layer(old, &user)?;
        }
        Ok(next)
    }

    async fn merge(&self, meta: &Meta, user: &str) -> Result<String> {
        let merged = self.new_layer(user)?;
        let layers = meta.lower.iter().map(|layer| format!("layers/{layer}/fs")).collect();
        let work = Work::Merge { layers, to: format!("layers/{merged}/fs") };
        worked(self.zygote().await?.work(work, Vec::new()).await?)?;
        Ok(merged)
    }

    pub(super) fn drop_layer(self: &Arc<Self>, layer: &str, user: &str) -> Result<()> {
        if let Some(path) = self.state.drop_ref(layer, user)? {
            self.remove_later(path);
        }
        Ok(())
    }

    /// Freezes what runs and copies the live layer. Returns the layers of the snapshot.
    async fn copy_live(
        self: &Arc<Self>,
        meta: &Meta,
        snapshot: &SnapshotId,
        guest: &GuestClient,
    ) -> Result<Vec<String>> {
        let user = format!("snapshot.{snapshot}");
        let layer = self.new_layer(&user)?;
        let zygote = self.zygote().await?;
        if !meta.paused {
            guest.pause().await?;
        }
        let from = format!("sandboxes/{}/up{}", meta.id, meta.upper);
        let work = Work::Copy { from, to: format!("layers/{layer}/fs"), limit_ms: FREEZE_MS };
        let copied = zygote.work(work, Vec::new()).await;
        if !meta.paused {
            guest.resume().await?;
        }
        if let Err(e) = copied.and_then(worked) {
            self.drop_layer(&layer, &user)?;
            return Err(e);
        }
        let mut layers = vec![layer];
        layers.extend(meta.lower.iter().cloned());
        Ok(layers)
    }

    pub(super) fn snapshots(&self) -> Result<Vec<SnapshotInfo>> {
        let mut found = Vec::new();
        for id in self.state.snapshots()? {
            found.extend(self.state.load_snapshot(&id)?.map(|meta| meta.info));
        }
        found.sort_by(|a, b| a.id.cmp(&b.id));
        Ok(found)
    }

    pub(super) async fn remove_snapshot(self: &Arc<Self>, id: &SnapshotId) -> Result<()> {
        let _lock = self.state.lock(&format!("snapshot.{id}")).await?;
        let Some(meta) = self.state.load_snapshot(id)? else { return Ok(()) };
        let path = self.state.snapshot(id);
        std::fs::remove_file(&path).map_err(|e| state::io_error(&path, &e))?;
        for layer in &meta.layers {
            self.drop_layer(layer, &format!("snapshot.{id}"))?;
        }
        Ok(())
    }

    pub(super) async fn export_snapshot(&self, id: &SnapshotId, to: &Path) -> Result<()> {
        let gone = || SandboxError::new(ErrorKind::NotFound, format!("there is no snapshot {id}"));
        let _lock = self.state.lock(&format!("snapshot.{id}")).await?;
        let meta = self.state.load_snapshot(id)?.ok_or_else(gone)?;
        if let Some(directory) = &meta.directory {
            let message = format!("snapshot {id} lies on {directory}, which no archive holds");
            return Err(SandboxError::new(ErrorKind::Unsupported, message)
                .hint("start from the default root or an image"));
        }
        let failed = |e: std::io::Error| state::io_error(to, &e);
        let temporary = to.with_extension(format!("part{:x}", state::unique()));
        let mut file = std::fs::File::create_new(&temporary).map_err(failed)?;
        let packed = async {
            let header = ArchiveHeader {
                forkyard_snapshot: state::format(),
                layers: meta.layers.len(),
                host_trees: meta.host_trees,
                mode: meta.info.mode,
                image_env: meta.image_env.clone(),
            };
            let mut line = serde_json::to_vec(&header).expect("numbers and words");
            line.push(b'\n');
            file.write_all(&line).map_err(failed)?;
            for layer in &meta.layers {
                // The worker writes on where the last one ended: a descriptor's position is shared.
                let archive: OwnedFd = file.try_clone().map_err(failed)?.into();
                let work = Work::Pack { layer: format!("layers/{layer}/fs") };
                worked(self.zygote().await?.work(work, vec![archive]).await?)?;
            }
            file.sync_all().map_err(failed)?;
            std::fs::rename(&temporary, to).map_err(failed)
        };
        let packed = packed.await;
        if packed.is_err() {
            let _ = std::fs::remove_file(&temporary);
        }
        packed
    }

    pub(super) async fn import_snapshot(
        self: &Arc<Self>,
        id: &SnapshotId,
        from: &Path,
    ) -> Result<SnapshotInfo> {
        let _lock = self.state.lock(&format!("snapshot.{id}")).await?;
        if let Some(known) = self.state.load_snapshot(id)? {
            return Ok(known.info);
        }
        let mut file = std::fs::File::open(from).map_err(|e| match e.kind() {
            std::io::ErrorKind::NotFound => {
                SandboxError::new(ErrorKind::NotFound, format!("{}: {e}", from.display()))
            }
            _ => state::io_error(from, &e),
        })?;
        let header = read_header(&mut file)?;
        let user = format!("snapshot.{id}");
        let mut layers = Vec::new();
        let unpacked = async {
            for _ in 0..header.layers {
                let layer = self.new_layer(&user)?;
                layers.push(layer.clone());
                let archive: OwnedFd = file.try_clone().map_err(|e| state::io_error(from, &e))?.into();
                let work = Work::Unpack { layer: format!("layers/{layer}/fs"), limits: IMPORT_LIMITS };
                worked(self.zygote().await?.work(work, vec![archive]).await?)?;
            }
            Ok(())
        };
        if let Err(e) = unpacked.await {
            for layer in &layers {
                self.drop_layer(layer, &user)?;
            }
            return Err(e);
        }
        let info = SnapshotInfo {
            id: id.clone(),
            provider: ProviderKind::Local,
            mode: header.mode,
            labels: Labels::new(),
            created_at: state::now(),
            bytes: None,
        };
        let base = Base { host_trees: header.host_trees, directory: None, image_env: header.image_env };
        self.keep_snapshot(info, layers, base)
    }

    /// The sandbox's own folders, ready to be mounted again: as they were meant to be after a crash in the middle of a seal,
    /// and without overlayfs' mark that the last mount was volatile.
    pub(super) fn repair(self: &Arc<Self>, meta: &Meta) -> Result<()> {
        let dir = self.state.sandbox(&meta.id);
        let (upper, work) = (dir.join(format!("up{}", meta.upper)), dir.join(format!("work{}", meta.upper)));
        if let Some(path) = self.state.trash(&work)? {
            self.remove_later(path);
        }
        self.state.make_dir(&upper)?;
        self.state.make_dir(&work)
    }
}

fn read_header(file: &mut std::fs::File) -> Result<ArchiveHeader> {
    let refused =
        |why: &str| SandboxError::new(ErrorKind::Invalid, format!("not an archive of a snapshot: {why}"));
    // Byte by byte: what follows the line belongs to the worker.
    let (mut line, mut byte) = (Vec::new(), [0]);
    while line.len() < MAX_HEADER as usize {
        match file.read(&mut byte) {
            Ok(1) if byte[0] == b'\n' => break,
            Ok(1) => line.push(byte[0]),
            _ => return Err(refused("it has no header")),
        }
    }
    let header: ArchiveHeader = serde_json::from_slice(&line).map_err(|e| refused(&e.to_string()))?;
    if header.forkyard_snapshot != state::format() {
        return Err(refused("made by another version of Forkyard"));
    }
    if !(1..=MAX_DEPTH + 1).contains(&header.layers) {
        return Err(refused("its number of layers is not possible"));
    }
    Ok(header)
}
