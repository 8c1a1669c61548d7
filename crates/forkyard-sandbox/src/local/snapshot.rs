//! Snapshots: a sealed layer where nothing runs, a copy where something does; archives of both.

use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;

use forkyard_core::{Attempt, SandboxId, SnapshotId};
use forkyard_guest::protocol::{Descriptors, Op};
use forkyard_guest::zygote::{RestackAsk, UnpackLimits, Work, WorkResult};
use serde::{Deserialize, Serialize};

use super::Inner;
use super::image::ImageConfig;
use super::link::Line;
use super::sandbox::LocalSandbox;
use super::state::{self, Boot, Kept, Meta, Sealing, SnapshotMeta};
use super::zygote::{failed, unavailable};
use crate::guest_client::Quiet;
use crate::lock::Lock;
use crate::traits::stands_too_long;
use crate::{
    ErrorKind, Labels, ProviderKind, Result, Sandbox, SandboxError, SnapshotInfo, SnapshotMode, now,
};

/// Lookups of missing names cost by depth; beyond this many layers the topmost are merged into one.
const MAX_DEPTH: usize = 16;
/// Never all: the lowest is what the sandbox started from, and a merge costs by the number of names.
const MERGED: usize = 8;
/// The longest that a copy may take while nothing runs: requests wait for its end.
const QUIET_MS: u64 = 60_000;
/// Of an archive that is taken in, all its layers together.
const IMPORT_LIMITS: UnpackLimits =
    UnpackLimits { bytes: 64 << 30, entries: if cfg!(test) { 1000 } else { 10_000_000 } };
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
    image: ImageConfig,
}

/// A sandbox whose files are to be copied as they are.
struct Live<'a> {
    meta: &'a Meta,
    line: &'a Line,
    busy: bool,
}

/// What lies below a sandbox's layers.
struct Base {
    host_trees: bool,
    directory: Option<String>,
    image: ImageConfig,
}

impl Base {
    fn of(meta: &Meta) -> Base {
        Base { host_trees: meta.host_trees, directory: meta.directory.clone(), image: meta.image.clone() }
    }
}

/// Of the layer that the sandbox writes to. None: it is on a disk of its own.
fn layer_number(quiet: &Quiet) -> Option<u32> {
    quiet.layer.as_deref()?.parse().ok()
}

pub(super) fn worked(result: WorkResult) -> Result<(u64, u64)> {
    match result {
        WorkResult::Done { bytes, entries } => Ok((bytes, entries)),
        WorkResult::TimedOut => Err(stands_too_long()),
        WorkResult::Refused { reason } => {
            Err(SandboxError::new(ErrorKind::Invalid, format!("the archive is refused: {reason}")))
        }
        WorkResult::Failed { step, errno } => Err(failed(&step, errno)),
    }
}

impl LocalSandbox {
    pub(super) async fn take_snapshot(&self, id: &SnapshotId, labels: &Labels) -> Result<SnapshotInfo> {
        let (inner, sandbox, attempt) = (Arc::clone(&self.inner), self.id().clone(), self.attempt());
        let (id, labels) = (id.clone(), labels.clone());
        // To its end, also if nobody waits for it any more: a root is never left half replaced.
        let taken = tokio::spawn(async move { inner.take_snapshot(&sandbox, attempt, &id, labels).await });
        taken.await.map_err(unavailable)?
    }
}

impl Inner {
    async fn take_snapshot(
        self: &Arc<Self>,
        sandbox: &SandboxId,
        attempt: Attempt,
        id: &SnapshotId,
        labels: Labels,
    ) -> Result<SnapshotInfo> {
        let lock = self.state.lock(sandbox.as_str()).await?;
        let _snapshot = self.state.lock(&format!("snapshot.{id}")).await?;
        if let Some(known) = self.known_snapshot(id)? {
            return Ok(known);
        }
        let mut meta = self.meta(sandbox)?;
        // Whoever knows the newest attempt may do this; the guest refuses all others. The quiet lasts as long as this line.
        let line = Line::open(sandbox, &self.state.sandbox(sandbox), attempt).await?;
        let mut quiet = line.quiesce().await?;
        let taken = async {
            if let Some(number) = layer_number(&quiet) {
                self.settle_seal(&mut meta, Some(number))?;
                if number != meta.upper {
                    return Err(unavailable(format!(
                        "sandbox {sandbox} writes to another layer than it should"
                    ))
                    .hint(format!("save what you need of it, then: forkyard sandbox rm {sandbox}")));
                }
            }
            if !quiet.busy
                && !meta.disk
                && let Some(layers) = self.seal(&mut meta, &line, &lock, &mut quiet).await?
            {
                return Ok((layers, SnapshotMode::Sealed));
            }
            // Commands run, or the layer is on a disk of its own, or the sandbox has moved what is mounted in it.
            let live = Live { meta: &meta, line: &line, busy: quiet.busy };
            Ok((self.copy_live(&live, id).await?, SnapshotMode::Copied))
        };
        // After an error the quiet ends with the line, which whatever may still be at work holds too.
        let (mut layers, mode) = taken.await?;
        if mode == SnapshotMode::Copied {
            line.ask(Op::Thaw, Vec::new()).await?;
        }
        if layers.len() > MAX_DEPTH {
            // Of a copy, once everything goes on: those of the sandbox are not for a snapshot to change.
            layers = self.flatten(layers, id).await?;
        }
        let info = SnapshotInfo {
            id: id.clone(),
            provider: ProviderKind::Local,
            mode,
            labels,
            created_at: now(),
            bytes: None,
        };
        self.keep_snapshot(info, layers, Base::of(&meta))
    }

    /// One whose id is taken. What the machine left of one when it stopped takes no id.
    fn known_snapshot(&self, id: &SnapshotId) -> Result<Option<SnapshotInfo>> {
        match self.state.find_snapshot(id)? {
            Kept::Nothing => Ok(None),
            Kept::Whole(meta) => Ok(Some(meta.info)),
            Kept::Torn => self.state.forget_snapshot(id).map(|()| None),
        }
    }

    /// The same files in fewer layers; the topmost is the snapshot's own, and is so again.
    async fn flatten(self: &Arc<Self>, mut layers: Vec<String>, id: &SnapshotId) -> Result<Vec<String>> {
        let user = format!("snapshot.{id}");
        let merged = self.merge(&layers[..MERGED], &user).await;
        self.drop_layer(&layers[0], &user)?;
        layers.splice(..MERGED, [merged?]);
        Ok(layers)
    }

    /// Writes a snapshot down, as a user of each of its layers.
    fn keep_snapshot(&self, info: SnapshotInfo, layers: Vec<String>, base: Base) -> Result<SnapshotInfo> {
        if !self.state.add_refs(&layers, &format!("snapshot.{}", info.id))? {
            return Err(unavailable(format!("a layer of snapshot {} is gone", info.id)));
        }
        let Base { host_trees, directory, image } = base;
        let boot = Boot::now();
        let meta = SnapshotMeta { format: state::format(), info, layers, host_trees, directory, image, boot };
        self.state.save_snapshot(&meta)?;
        self.sync_later();
        Ok(meta.info)
    }

    /// A new layer folder with its first user.
    pub(super) fn new_layer(&self, user: &str) -> Result<String> {
        let name = format!("{:016x}", state::unique());
        // It has its user from the moment it has its name.
        let part = format!("{user}{}{name}", state::PART);
        let (from, to) = (self.state.layer(&part), self.state.layer(&name));
        self.state.make_dir(&from)?;
        self.state.make_dir(&from.join("refs"))?;
        self.state.add_ref(&part, user)?;
        std::fs::rename(&from, &to).map_err(|e| state::io_error(&to, &e))?;
        Ok(name)
    }

    /// A new live layer, and an empty one for what the old becomes: all that is needed before anything moves. What is written down
    /// then tells whoever finds it to ask the guest how far it came.
    fn begin_seal(self: &Arc<Self>, meta: &Meta) -> Result<Meta> {
        let dir = self.state.sandbox(&meta.id);
        let user = format!("sandbox.{}", meta.id);
        let mut next = meta.clone();
        next.tried = meta.tried.max(meta.upper) + 1;
        next.upper = next.tried;
        let parts = ["up", "work"].map(|part| dir.join(format!("{part}{}", next.upper)));
        let mut layer = None;
        let begun = (|| {
            for part in &parts {
                self.make_part(part, meta.project)?;
            }
            let layer = layer.insert(self.new_layer(&user)?).clone();
            next.lower.insert(0, layer.clone());
            let (lower, skeleton) = (meta.lower.clone(), Some(self.skeleton.clone()));
            next.sealing = Some(Sealing { upper: meta.upper, layer, lower, skeleton });
            self.state.save(&next)
        })();
        if let Err(e) = begun {
            // What can't be taken back now, a sweep finds; the first error is the one that counts.
            let _ = layer.map(|layer| self.drop_layer(&layer, &user));
            let _ = parts.map(|part| self.discard(&part));
            return Err(e);
        }
        Ok(next)
    }

    /// The live layer of a quiet sandbox becomes a sealed one below a new live one; the sandbox goes on there. Returns the
    /// layers of the snapshot; None if that can't be done and everything is as it was.
    async fn seal(
        self: &Arc<Self>,
        meta: &mut Meta,
        line: &Line,
        lock: &Lock,
        quiet: &mut Quiet,
    ) -> Result<Option<Vec<String>>> {
        let not_sealed = |meta: &Meta, e: SandboxError| {
            tracing::warn!(sandbox = %meta.id, error = %e, "the layer was not sealed");
        };
        *meta = match self.begin_seal(meta) {
            Ok(next) => next,
            Err(e) => {
                not_sealed(meta, e);
                return Ok(None);
            }
        };
        match self.replace_root(meta, line, lock).await {
            Ok(()) => {}
            // Nobody knows what becomes of it, and it keeps the sandbox quiet until its end: whoever comes next asks the guest.
            Err(e) if e.kind == ErrorKind::Timeout => return Err(e),
            Err(e) => {
                not_sealed(meta, e);
                if !self.is_sealed(meta, line, quiet).await? {
                    return Ok(None);
                }
            }
        }
        line.ask(Op::Thaw, Vec::new()).await?;
        let layers = meta.lower.clone();
        if let Err(e) = self.settle_seal(meta, Some(meta.upper)) {
            // The sandbox goes on in its new layer; whoever comes next settles the rest.
            tracing::warn!(sandbox = %meta.id, error = %e, "what a seal left was not removed");
        }
        Ok(Some(layers))
    }

    /// Whether a seal was done that ended with an error: it may have been the last step that failed, and only the guest knows in
    /// which layer it goes on. It is quiet anew, and if not everything is as it was before.
    async fn is_sealed(self: &Arc<Self>, meta: &mut Meta, line: &Line, quiet: &mut Quiet) -> Result<bool> {
        line.ask(Op::Thaw, Vec::new()).await?;
        *quiet = line.quiesce().await?;
        let on = layer_number(quiet)
            .ok_or_else(|| unavailable(format!("sandbox {} does not say what it writes to", meta.id)))?;
        if on == meta.upper {
            return Ok(true);
        }
        self.settle_seal(meta, Some(on))?;
        Ok(false)
    }

    /// The middle of a seal that was begun: whoever does not live to its end leaves a sandbox that goes on in one of the two
    /// layers, and knows in which.
    async fn replace_root(self: &Arc<Self>, meta: &mut Meta, line: &Line, lock: &Lock) -> Result<()> {
        let Some(Sealing { upper, layer, .. }) = &meta.sealing else {
            return Err(unavailable("a seal that was begun is not written down"));
        };
        let dir = self.state.sandbox(&meta.id);
        let (live, sealed) = (dir.join(format!("up{upper}")), self.state.layer(layer).join("fs"));
        let namespaces = line.ask(Op::Descriptors { what: Descriptors::Namespaces }, Vec::new()).await?;
        let [user, mount] = &namespaces[..] else {
            return Err(unavailable("the guest has no namespaces"));
        };
        let next = std::fs::File::open(dir.join(format!("up{}", meta.upper))).map_err(unavailable)?;
        line.ask(Op::Next, vec![next.into()]).await?;
        // A mounted directory may be renamed: the mount follows it.
        std::fs::rename(&live, &sealed).map_err(|e| state::io_error(&live, &e))?;
        if meta.lower.len() > MAX_DEPTH {
            let merged = self.merge(&meta.lower[..MERGED], &format!("sandbox.{}", meta.id)).await?;
            meta.lower.splice(..MERGED, [merged]);
            self.state.save(meta)?;
        }
        let volumes = meta.spec.volumes.iter().map(|volume| &volume.path);
        let mounts = meta.binds.iter().chain(volumes).cloned().collect();
        let ask = RestackAsk { become_id: self.state.owner, mounts };
        let held = [user.as_fd(), mount.as_fd(), line.as_fd(), lock.as_fd()];
        let directory = self.directory(meta).await?;
        let _room = self.room(meta);
        self.zygote().await?.restack(self.root_ask(meta), ask, directory, held).await
    }

    /// Ends a seal, one way or the other. `on`: the number of the layer that the sandbox writes to; None if it does not run.
    fn settle_seal(self: &Arc<Self>, known: &mut Meta, on: Option<u32>) -> Result<()> {
        let mut meta = known.clone();
        let Some(sealing) = meta.sealing.take() else { return Ok(()) };
        let (dir, user) = (self.state.sandbox(&meta.id), format!("sandbox.{}", meta.id));
        let part = |name: &str, number: u32| dir.join(format!("{name}{number}"));
        // One that ended before it wrote anything in the new layer loses nothing if the old one is its live one again.
        let happened = match on {
            Some(number) => number == meta.upper,
            // If a snapshot has the sealed one, nobody may write there again; nor if it has what it was merged into, which
            // shares its files.
            None => {
                let new = meta.lower.iter().filter(|layer| !sealing.lower.contains(layer));
                let mut users = Vec::new();
                for layer in new.chain([&sealing.layer]) {
                    users.extend(state::names(&self.state.layer(layer).join("refs"))?);
                }
                std::fs::read_dir(part("up", meta.upper)).is_ok_and(|mut entries| entries.next().is_some())
                    || users.iter().any(|r| *r != user)
            }
        };
        let gone = if happened {
            meta.skeleton = sealing.skeleton.unwrap_or(meta.skeleton);
            part("work", sealing.upper)
        } else {
            let (live, sealed) = (part("up", sealing.upper), self.state.layer(&sealing.layer).join("fs"));
            match std::fs::rename(&sealed, &live) {
                Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
                    return Err(state::io_error(&sealed, &e));
                }
                _ => {} // moved back, or never moved
            }
            part("work", meta.upper)
        };
        let unused: Vec<String> = if happened {
            // A merge took the place of all that was below.
            let old = sealing.lower.iter().chain([&sealing.layer]);
            old.filter(|layer| !meta.lower.contains(layer)).cloned().collect()
        } else {
            let new = std::mem::replace(&mut meta.lower, sealing.lower);
            let unused = new.into_iter().chain([sealing.layer]).filter(|layer| !meta.lower.contains(layer));
            let unused = unused.collect();
            self.discard(&part("up", std::mem::replace(&mut meta.upper, sealing.upper)))?;
            unused
        };
        self.state.save(&meta)?;
        *known = meta;
        for layer in &unused {
            self.drop_layer(layer, &user)?;
        }
        self.discard(&gone)
    }

    pub(super) fn discard(self: &Arc<Self>, path: &Path) -> Result<()> {
        if let Some(path) = self.state.trash(path)? {
            self.remove_later(path);
        }
        Ok(())
    }

    async fn merge(&self, layers: &[String], user: &str) -> Result<String> {
        let merged = self.new_layer(user)?;
        let layers = layers.iter().map(|layer| format!("layers/{layer}/fs")).collect();
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
    async fn copy_live(self: &Arc<Self>, live: &Live<'_>, snapshot: &SnapshotId) -> Result<Vec<String>> {
        let Live { meta, line, busy } = *live;
        let user = format!("snapshot.{snapshot}");
        let (mut from, mut fds) = (Some(format!("sandboxes/{}/up{}", meta.id, meta.upper)), Vec::new());
        if meta.disk {
            (from, fds) = (None, line.ask(Op::Descriptors { what: Descriptors::Upper }, Vec::new()).await?);
        }
        let layer = self.new_layer(&user)?;
        let freeze = busy && !meta.paused;
        let zygote = self.zygote().await?;
        if freeze {
            // The quiet's own: it ends with the line, whatever becomes of this process.
            line.ask(Op::Pause, Vec::new()).await?;
        }
        let limit_ms =
            if freeze { u64::try_from(self.freeze.as_millis()).unwrap_or(u64::MAX) } else { QUIET_MS };
        let copied = zygote.work(Work::Copy { from, to: format!("layers/{layer}/fs"), limit_ms }, fds).await;
        if freeze {
            line.ask(Op::Resume, Vec::new()).await?;
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
            // One that is damaged keeps no other from being seen.
            if let Ok(Kept::Whole(meta)) = self.state.find_snapshot(&id) {
                found.push(meta.info);
            }
        }
        found.sort_by(|a, b| a.id.cmp(&b.id));
        Ok(found)
    }

    pub(super) fn damaged_snapshots(&self) -> Result<Vec<(SnapshotId, SandboxError)>> {
        let why = |id: SnapshotId| Some((self.state.find_snapshot(&id).err()?, id));
        Ok(self.state.snapshots()?.into_iter().filter_map(why).map(|(e, id)| (id, e)).collect())
    }

    /// All layers that are kept for a snapshot, whatever its record says.
    fn kept_for(&self, user: &str) -> Result<Vec<String>> {
        let mut layers = state::names(&self.state.root.join("layers"))?;
        layers.retain(|layer| self.state.layer(layer).join("refs").join(user).exists());
        Ok(layers)
    }

    pub(super) async fn remove_snapshot(self: &Arc<Self>, id: &SnapshotId) -> Result<()> {
        let _lock = self.state.lock(&format!("snapshot.{id}")).await?;
        let user = format!("snapshot.{id}");
        let layers = match self.state.find_snapshot(id) {
            Ok(Kept::Nothing) => return Ok(()),
            Ok(Kept::Whole(meta)) => meta.layers,
            // Another version knows better what it left; of what is damaged the rest can go.
            Err(e) if e.kind == ErrorKind::Unsupported => return Err(e),
            Ok(Kept::Torn) | Err(_) => self.kept_for(&user)?,
        };
        self.state.forget_snapshot(id)?;
        for layer in &layers {
            self.drop_layer(layer, &user)?;
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
                image: meta.image.clone(),
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
        if let Some(known) = self.known_snapshot(id)? {
            return Ok(known);
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
            let mut left = IMPORT_LIMITS;
            for _ in 0..header.layers {
                let layer = self.new_layer(&user)?;
                layers.push(layer.clone());
                let archive: OwnedFd = file.try_clone().map_err(|e| state::io_error(from, &e))?.into();
                let work = Work::Unpack { layer: format!("layers/{layer}/fs"), limits: left };
                let (bytes, entries) = worked(self.zygote().await?.work(work, vec![archive]).await?)?;
                left.bytes = left.bytes.saturating_sub(bytes);
                left.entries = left.entries.saturating_sub(entries);
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
            created_at: now(),
            bytes: None,
        };
        let base = Base { host_trees: header.host_trees, directory: None, image: header.image };
        self.keep_snapshot(info, layers, base)
    }

    /// The sandbox's own folders, ready to be mounted again: as they were meant to be after a crash in the middle of a seal,
    /// and without overlayfs' mark that the last mount was volatile.
    pub(super) fn repair(self: &Arc<Self>, meta: &mut Meta) -> Result<()> {
        self.settle_seal(meta, None)?;
        if meta.disk {
            return Ok(()); // done when it is mounted
        }
        let dir = self.state.sandbox(&meta.id);
        let (upper, work) = (dir.join(format!("up{}", meta.upper)), dir.join(format!("work{}", meta.upper)));
        self.discard(&work)?;
        self.make_part(&upper, meta.project)?;
        self.make_part(&work, meta.project)
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
    let mut header: ArchiveHeader = serde_json::from_slice(&line).map_err(|e| refused(&e.to_string()))?;
    if header.forkyard_snapshot != state::format() {
        return Err(refused("made by another version of Forkyard"));
    }
    if !(1..=MAX_DEPTH).contains(&header.layers) {
        return Err(refused("its number of layers is not possible"));
    }
    header.image = header.image.checked().map_err(|why| refused(&why))?;
    Ok(header)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use forkyard_guest::layer::Entry;
    use forkyard_guest::protocol::encode;

    use super::*;
    use crate::local::{LocalOptions, LocalProvider};
    use crate::{ExecRequest, NetworkMode, Provider, Root, SandboxSpec};

    fn offline(root: Root) -> SandboxSpec {
        let mut spec = SandboxSpec { root, ..SandboxSpec::default() };
        spec.network.mode = NetworkMode::None;
        spec
    }

    async fn sh(sandbox: &Arc<dyn Sandbox>, script: &str) -> String {
        let (_, out, _) = sandbox.exec(ExecRequest::shell(script)).await.unwrap().output().await.unwrap();
        String::from_utf8(out).unwrap()
    }

    #[tokio::test]
    async fn a_seal_that_can_not_be_written_down_changes_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let provider = LocalProvider::new(dir.path(), LocalOptions::default()).unwrap();
        let inner = &provider.inner;
        let (id, child) = (SandboxId::new("parent").unwrap(), SandboxId::new("child").unwrap());
        let sandbox = provider.create(&id, Attempt(1), &offline(Root::Default)).await.unwrap();
        sh(&sandbox, "echo kept > file").await;
        for (name, full, mode) in
            [("first", true, SnapshotMode::Copied), ("second", false, SnapshotMode::Sealed)]
        {
            inner.state.full.store(full, Ordering::Relaxed);
            let name = SnapshotId::new(name).unwrap();
            assert_eq!(sandbox.snapshot(&name, &Labels::new()).await.unwrap().mode, mode);
            let of = provider.create(&child, Attempt(1), &offline(Root::Snapshot(name.clone()))).await;
            assert_eq!(sh(&of.unwrap(), "cat file").await, "kept\n", "in a child of {name}");
            provider.destroy(&child).await.unwrap();
            provider.remove_snapshot(&name).await.unwrap();
        }
        assert_eq!(sh(&sandbox, "cat file; echo more > file; cat file").await, "kept\nmore\n");
        provider.destroy(&id).await.unwrap();
        provider.settle().await;
        for folder in ["sandboxes", "layers", "trash"] {
            assert_eq!(state::names(&dir.path().join(folder)).unwrap(), Vec::<String>::new(), "{folder}");
        }
    }

    /// Its owner is killed once the root is replaced, before it could say so.
    #[tokio::test]
    async fn a_new_layer_counts_whoever_ends_the_quiet() {
        let dir = tempfile::tempdir().unwrap();
        let provider = LocalProvider::new(dir.path(), LocalOptions::default()).unwrap();
        let (inner, id) = (&provider.inner, SandboxId::new("orphan").unwrap());
        let sandbox = provider.create(&id, Attempt(1), &offline(Root::Default)).await.unwrap();
        sh(&sandbox, "echo kept > file").await;
        let lock = inner.state.lock(id.as_str()).await.unwrap();
        let line = Line::open(&id, &inner.state.sandbox(&id), Attempt(1)).await.unwrap();
        assert!(!line.quiesce().await.unwrap().busy);
        let mut meta = inner.begin_seal(&inner.meta(&id).unwrap()).unwrap();
        inner.replace_root(&mut meta, &line, &lock).await.unwrap();
        drop((line, lock));
        assert_eq!(sh(&sandbox, "head -c 3000000 /dev/urandom > big; cat file").await, "kept\n");
        let counted = sandbox.stats().await.unwrap().disk_bytes;
        assert!(counted >= 3_000_000, "{counted}");
        provider.destroy(&id).await.unwrap();
        provider.settle().await;
    }

    /// The helper fails once the root is replaced, or before: either way nothing that was written is lost.
    #[tokio::test]
    async fn after_an_error_the_guest_says_whether_it_is_sealed() {
        for done in [true, false] {
            let dir = tempfile::tempdir().unwrap();
            let provider = LocalProvider::new(dir.path(), LocalOptions::default()).unwrap();
            let (inner, id) = (&provider.inner, SandboxId::new("torn").unwrap());
            let sandbox = provider.create(&id, Attempt(1), &offline(Root::Default)).await.unwrap();
            sh(&sandbox, "echo old > file").await;
            let lock = inner.state.lock(id.as_str()).await.unwrap();
            let line = Line::open(&id, &inner.state.sandbox(&id), Attempt(1)).await.unwrap();
            let mut quiet = line.quiesce().await.unwrap();
            let old = Meta { skeleton: "older".into(), ..inner.meta(&id).unwrap() };
            let mut meta = inner.begin_seal(&old).unwrap();
            if done {
                inner.replace_root(&mut meta, &line, &lock).await.unwrap();
            }
            assert_eq!(inner.is_sealed(&mut meta, &line, &mut quiet).await.unwrap(), done);
            assert_eq!(layer_number(&quiet), Some(meta.upper));
            inner.settle_seal(&mut meta, layer_number(&quiet)).unwrap();
            let stands_on = if done { inner.skeleton.as_str() } else { "older" };
            assert_eq!(inner.meta(&id).unwrap().skeleton, stands_on);
            drop((line, lock));
            sh(&sandbox, "echo new > file").await;
            let name = SnapshotId::new("after").unwrap();
            let mode = sandbox.snapshot(&name, &Labels::new()).await.unwrap().mode;
            assert_eq!(mode, SnapshotMode::Sealed);
            let child = SandboxId::new("child").unwrap();
            let child = provider.create(&child, Attempt(1), &offline(Root::Snapshot(name))).await.unwrap();
            assert_eq!(sh(&child, "cat file").await, "new\n", "done: {done}");
            for id in [&id, child.id()] {
                provider.destroy(id).await.unwrap();
            }
            provider.settle().await;
        }
    }

    /// Its owner is killed when a snapshot has what the sealed layer was merged into, and it ends before anybody knows.
    #[tokio::test]
    async fn nobody_writes_to_what_a_snapshot_has_merged() {
        let dir = tempfile::tempdir().unwrap();
        let provider = LocalProvider::new(dir.path(), LocalOptions::default()).unwrap();
        let (inner, id) = (&provider.inner, SandboxId::new("deep").unwrap());
        let sandbox = provider.create(&id, Attempt(1), &offline(Root::Default)).await.unwrap();
        let (below, merged) = (SnapshotId::new("below").unwrap(), SnapshotId::new("merged").unwrap());
        while inner.meta(&id).unwrap().lower.len() < MAX_DEPTH {
            sandbox.snapshot(&below, &Labels::new()).await.unwrap();
            provider.remove_snapshot(&below).await.unwrap();
        }
        sh(&sandbox, "echo kept > file").await;
        let lock = inner.state.lock(id.as_str()).await.unwrap();
        let line = Line::open(&id, &inner.state.sandbox(&id), Attempt(1)).await.unwrap();
        assert!(!line.quiesce().await.unwrap().busy);
        let mut meta = inner.begin_seal(&inner.meta(&id).unwrap()).unwrap();
        inner.replace_root(&mut meta, &line, &lock).await.unwrap();
        assert!(meta.lower.len() < MAX_DEPTH, "nothing was merged");
        let info = SnapshotInfo {
            id: merged.clone(),
            provider: ProviderKind::Local,
            mode: SnapshotMode::Sealed,
            labels: Labels::new(),
            created_at: now(),
            bytes: None,
        };
        inner.keep_snapshot(info, meta.lower.clone(), Base::of(&meta)).unwrap();
        crate::local::link::kill(&meta).await.unwrap();
        drop((line, lock));
        let sandbox = provider.start(&id, Attempt(1)).await.unwrap();
        assert_eq!(sh(&sandbox, "echo more >> file; cat file").await, "kept\nmore\n");
        let child = SandboxId::new("child").unwrap();
        let child = provider.create(&child, Attempt(1), &offline(Root::Snapshot(merged))).await.unwrap();
        assert_eq!(sh(&child, "cat file").await, "kept\n");
        for id in [&id, child.id()] {
            provider.destroy(id).await.unwrap();
        }
        provider.settle().await;
    }

    #[tokio::test]
    async fn the_bounds_of_an_archive_are_those_of_all_its_layers() {
        let dir = tempfile::tempdir().unwrap();
        let provider = LocalProvider::new(&dir.path().join("state"), LocalOptions::default()).unwrap();
        let archive = dir.path().join("archive");
        let entries = IMPORT_LIMITS.entries * 2 / 3;
        let mut layer = Vec::new();
        for i in 0..entries {
            layer.extend(encode(&Entry::Fifo { mode: 0o600 }, i.to_string().as_bytes()));
        }
        layer.extend(encode(&Entry::End, b""));
        for (layers, fits) in [(1, true), (2, false)] {
            let header = ArchiveHeader {
                forkyard_snapshot: state::format(),
                layers,
                host_trees: false,
                mode: SnapshotMode::Sealed,
                image: ImageConfig::default(),
            };
            let head = serde_json::to_vec(&header).unwrap();
            std::fs::write(&archive, [&head, &b"\n"[..], &layer.repeat(layers)].concat()).unwrap();
            let taken = provider.import_snapshot(&SnapshotId::new("taken").unwrap(), &archive, None).await;
            assert_eq!(
                taken.map(drop).map_err(|e| e.kind),
                if fits { Ok(()) } else { Err(ErrorKind::Invalid) }
            );
            provider.remove_snapshot(&SnapshotId::new("taken").unwrap()).await.unwrap();
        }
        provider.settle().await;
        assert_eq!(state::names(&dir.path().join("state/layers")).unwrap(), Vec::<String>::new());
    }

    #[tokio::test]
    async fn what_a_hostile_archive_says_of_its_commands_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let provider = LocalProvider::new(&dir.path().join("state"), LocalOptions::default()).unwrap();
        let archive = dir.path().join("archive");
        for image in [
            r#"{"env":{"A=B":"c"},"user":null}"#,
            r#"{"env":{"A":"\u0000"},"user":null}"#,
            r#"{"env":{},"user":{"id":0,"name":"root","home":"/root"}}"#,
            r#"{"env":{},"user":{"id":7,"name":"a","home":"../.."}}"#,
        ] {
            let format = state::format();
            let header = format!(
                r#"{{"forkyard_snapshot":{format},"layers":1,"host_trees":false,"mode":"sealed","image":{image}}}"#
            );
            std::fs::write(&archive, header + "\n").unwrap();
            let name = SnapshotId::new("taken").unwrap();
            let refused = provider.import_snapshot(&name, &archive, None).await.unwrap_err();
            assert_eq!(refused.kind, ErrorKind::Invalid, "{refused}");
            let why = ["variable", "its user"].iter().any(|why| refused.message.contains(why));
            assert!(why && refused.hint.is_some(), "{refused}");
            assert!(provider.snapshots().await.unwrap().is_empty());
        }
    }
}
