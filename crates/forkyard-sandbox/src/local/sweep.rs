//! What crashes left behind: found by what nobody can say any more to need it, and removed.
//!
//! Every folder, layer, group and file is made by somebody who holds the lock of its user: the sandbox, snapshot or image that
//! it is for. So whoever gets that lock and finds a user that does not know of it has found a leftover. A lock that is held is
//! work under way, and is left alone. Any number of processes may sweep the same state folder.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use forkyard_core::{Millis, SandboxId, SnapshotId};

use super::image::ImageMeta;
use super::state::{self, Meta};
use super::{Inner, cgroup, link};
use crate::{Result, now};

/// Providers that start within this of the last sweep do not sweep again.
const EVERY: Duration = Duration::from_secs(60);
/// A guest ends itself at its deadline; one that is still there this much later is ended.
const GRACE: Millis = Millis(5_000);
/// When the last sweep began.
const MARK: &str = "swept";

/// Whom a layer is kept for.
enum User {
    Sandbox(SandboxId),
    Snapshot(SnapshotId),
    Image(String),
}

impl User {
    fn parse(text: &str) -> Option<User> {
        match text.split_once('.')? {
            ("sandbox", id) => SandboxId::new(id).ok().map(User::Sandbox),
            ("snapshot", id) => SnapshotId::new(id).ok().map(User::Snapshot),
            ("image", key) => Some(User::Image(key.into())),
            _ => None,
        }
    }

    fn lock_name(&self) -> String {
        match self {
            User::Sandbox(id) => id.to_string(),
            User::Snapshot(id) => format!("snapshot.{id}"),
            User::Image(key) => format!("image.{key}"),
        }
    }
}

/// It can't be attached to or started any more.
fn is_over(meta: &Meta) -> bool {
    let now = now();
    if crate::owner::is_orphan(&meta.labels) {
        return true;
    }
    meta.deadline <= now && (!link::is_alive(meta) || now.since(meta.deadline) > GRACE)
}

/// Of a layer. None: it has lost its last one.
fn users(layer: &Path) -> Result<Option<Vec<String>>> {
    let refs = layer.join("refs");
    match std::fs::symlink_metadata(&refs) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(state::io_error(&refs, &e)),
        Ok(_) => state::names(&refs).map(Some),
    }
}

impl Inner {
    /// In the background, when this provider makes or finds its first sandbox, unless somebody did so just now.
    pub(super) fn sweep_if_due(self: &Arc<Self>) {
        if self.swept.swap(true, Ordering::Relaxed) {
            return;
        }
        let mark = self.state.root.join(MARK);
        let age = mark.metadata().and_then(|m| m.modified()).ok().and_then(|at| at.elapsed().ok());
        if age.is_some_and(|age| age < EVERY) || std::fs::write(&mark, "").is_err() {
            return;
        }
        let inner = Arc::clone(self);
        self.removals.spawn(self.handovers.track_future(async move {
            if let Err(e) = inner.sweep().await {
                tracing::warn!(error = %e, "leftovers of earlier processes were not all removed");
            }
        }));
    }

    /// What can't be removed keeps nothing else; the first that went wrong is told at the end.
    pub(super) async fn sweep(self: &Arc<Self>) -> Result<()> {
        let mut groups = self.cgroups.left(self.state.tag());
        let mut skeletons = BTreeSet::new();
        let mut all_known = true;
        let mut swept = Ok(());
        for id in self.state.sandboxes()? {
            let groups = groups.remove(id.as_str()).unwrap_or_default();
            let known = self.state.load(&id);
            all_known &= known.is_ok();
            if let Ok(Some(Meta { skeleton, sealing, .. })) = known {
                skeletons.extend([skeleton].into_iter().chain(sealing.and_then(|sealing| sealing.skeleton)));
            }
            let done = self.sweep_sandbox(&id, groups).await;
            if let Err(e) = &done {
                tracing::warn!(sandbox = %id, error = %e, "a leftover stays");
            }
            swept = swept.and(done);
        }
        for (id, groups) in groups {
            let Some(_lock) = self.state.try_lock(&id)? else { continue };
            cgroup::remove(&groups).await;
        }
        self.cgroups.remove_abandoned(self.state.tag());
        // Each is done, whatever became of the one before.
        swept = swept.and(self.sweep_parts("snapshots", "snapshot."));
        swept = swept.and(self.sweep_snapshots().await);
        swept = swept.and(self.sweep_parts("images", "image."));
        swept = swept.and(self.sweep_layers());
        // One that can't be read stands on one of them.
        if all_known {
            swept = swept.and(self.sweep_skeletons(&skeletons));
        }
        for path in self.state.trashed()? {
            self.remove_later(path);
        }
        swept
    }

    async fn sweep_sandbox(self: &Arc<Self>, id: &SandboxId, groups: Vec<PathBuf>) -> Result<()> {
        let Some(_lock) = self.state.try_lock(id.as_str())? else { return Ok(()) };
        match self.state.load(id) {
            Ok(Some(meta)) if is_over(&meta) => {
                self.end(id, Some(meta)).await?;
                self.remove_groups(groups);
            }
            Ok(Some(meta)) => {
                self.remove_groups(groups.into_iter().filter(|dir| !meta.cgroups.contains(dir)).collect());
                self.tidy(&meta)?;
            }
            // Its maker did not live to finish it.
            Ok(None) => {
                self.end(id, None).await?;
                self.remove_groups(groups);
            }
            Err(e) => tracing::warn!(sandbox = %id, error = %e, "state of a sandbox can't be read"),
        }
        Ok(())
    }

    /// What an interrupted save or snapshot left in the folder of a sandbox that is otherwise well.
    fn tidy(self: &Arc<Self>, meta: &Meta) -> Result<()> {
        let dir = self.state.sandbox(&meta.id);
        let old = |name: &str| {
            let number = name.strip_prefix("up").or_else(|| name.strip_prefix("work"));
            number.and_then(|n| n.parse::<u32>().ok()).is_some_and(|n| n != meta.upper)
        };
        for name in state::names(&dir)? {
            if name.contains(state::PART) || (meta.sealing.is_none() && old(&name)) {
                self.discard(&dir.join(name))?;
            }
        }
        Ok(())
    }

    /// Files that were being written, and downloads.
    fn sweep_parts(&self, folder: &str, lock_prefix: &str) -> Result<()> {
        let dir = self.state.root.join(folder);
        for name in state::names(&dir)? {
            let Some((user, _)) = name.split_once(state::PART) else { continue };
            if let Some(_lock) = self.state.try_lock(&format!("{lock_prefix}{user}"))? {
                let path = dir.join(&name);
                // Made by us, not by a sandbox.
                let _ = std::fs::remove_file(&path).or_else(|_| std::fs::remove_dir_all(&path));
            }
        }
        Ok(())
    }

    fn sweep_layers(self: &Arc<Self>) -> Result<()> {
        let mut by_user: BTreeMap<String, Vec<String>> = BTreeMap::new();
        let mut swept = Ok(());
        for layer in state::names(&self.state.root.join("layers"))? {
            let path = self.state.layer(&layer);
            if let Some((user, _)) = layer.split_once(state::PART) {
                by_user.entry(user.into()).or_default().push(layer);
                continue;
            }
            match users(&path) {
                // Whoever dropped the last one did not live to remove it.
                Ok(Some(users)) if users.is_empty() => {
                    self.state.trash_unused(&layer)?.into_iter().for_each(|path| self.remove_later(path));
                }
                Ok(Some(users)) => {
                    for user in users {
                        by_user.entry(user).or_default().push(layer.clone());
                    }
                }
                // Nobody can become a user of it again.
                Ok(None) => self.discard(&path)?,
                // Whose it is can't be told now: too many open files is no reason to remove it.
                Err(e) => swept = swept.and(Err(e)),
            }
        }
        for (text, layers) in by_user {
            let Some(user) = User::parse(&text) else { continue };
            let Some(_lock) = self.state.try_lock(&user.lock_name())? else { continue };
            let used = match self.layers_of(&user) {
                Ok(used) => used,
                Err(e) => {
                    tracing::warn!(user = text, error = %e, "layers of what can't be read stay");
                    continue;
                }
            };
            for layer in layers.iter().filter(|layer| !used.contains(layer)) {
                if layer.contains(state::PART) {
                    self.discard(&self.state.layer(layer))?;
                } else {
                    self.drop_layer(layer, &text)?;
                }
            }
        }
        swept
    }

    fn layers_of(&self, user: &User) -> Result<Vec<String>> {
        Ok(match user {
            User::Sandbox(id) => self.state.load(id)?.map_or_else(Vec::new, |meta| {
                let sealing = meta.sealing.into_iter().flat_map(|s| s.lower.into_iter().chain([s.layer]));
                meta.lower.into_iter().chain(sealing).collect()
            }),
            User::Snapshot(id) => self.state.load_snapshot(id)?.map_or_else(Vec::new, |meta| meta.layers),
            User::Image(key) => {
                let path: PathBuf = self.state.root.join("images").join(format!("{key}.json"));
                state::load::<ImageMeta>(Path::new(&path))?.map_or_else(Vec::new, |meta| meta.layers)
            }
        })
    }
}
