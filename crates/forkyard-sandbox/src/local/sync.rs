//! Snapshots reach the disk in the background. One that is just written down counts until the machine starts again; once the
//! whole file system was synced, for good. Nobody waits for that: it comes when no snapshot was taken for a moment, for all of
//! them at once, and what a process did not live to do, a later one does when it sweeps.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use forkyard_core::{Millis, SnapshotId};
use tokio::sync::oneshot;

use super::Inner;
use super::state::{self, Kept, State};
use super::zygote::unavailable;
use crate::{Result, now};

/// Without a snapshot, before it begins: a sync takes the disk from whoever takes the next.
const QUIET: Duration = Duration::from_secs(2);
/// It comes at the latest after so many of these, however often snapshots are taken.
const MAX_QUIETS: u32 = 10;
/// Whose maker has not had this done by now is not there any more, or has no time.
const OWED_AFTER: Millis = Millis(60_000);
/// Held by who syncs.
const LOCK: &str = "sync.state";

/// What this process owes.
#[derive(Debug, Default)]
pub struct Owed {
    /// Snapshots that it took.
    taken: AtomicU64,
    at_work: AtomicBool,
}

/// Snapshots that were whole before a sync began.
struct Batch(Vec<(SnapshotId, Vec<String>)>);

impl Batch {
    fn of(state: &State) -> Result<Batch> {
        let mut found = Vec::new();
        for id in state.unsynced()? {
            // Another version's are left to it.
            if let Ok(Kept::Whole(meta)) = state.find_snapshot(&id) {
                found.push((id, meta.layers));
            }
        }
        Ok(Batch(found))
    }

    /// All of them are on the disk.
    fn mark(self, state: &State) -> Result<()> {
        for (id, layers) in self.0 {
            // Whoever is at it now removes it or makes another of its name.
            let Some(_lock) = state.try_lock(&format!("snapshot.{id}"))? else { continue };
            if !matches!(state.find_snapshot(&id)?, Kept::Whole(meta) if meta.layers == layers) {
                continue;
            }
            let [unsynced, synced] = state.snapshot(&id);
            match std::fs::rename(&unsynced, &synced) {
                Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
                    return Err(state::io_error(&unsynced, &e));
                }
                Ok(()) | Err(_) => {} // marked, or gone
            }
        }
        let dir = state.root.join("snapshots");
        let synced = File::open(&dir).and_then(|dir| dir.sync_all());
        synced.map_err(|e| state::io_error(&dir, &e))
    }
}

/// False if somebody else is at it.
fn sync(state: &State) -> Result<bool> {
    let Some(_lock) = state.try_lock(LOCK)? else { return Ok(false) };
    let batch = Batch::of(state)?;
    if batch.0.is_empty() {
        return Ok(true);
    }
    sync_file_system(&state.root.join("layers"))?;
    batch.mark(state)?;
    Ok(true)
}

pub fn sync_file_system(dir: &Path) -> Result<()> {
    let synced = File::open(dir).and_then(|dir| Ok(rustix::fs::syncfs(dir)?));
    synced.map_err(|e| state::io_error(dir, &e))
}

/// In a thread of its own: the runtime would not end before one of its own does.
async fn sync_beside(state: State) -> Result<bool> {
    let (sender, receiver) = oneshot::channel();
    let work = move || {
        let _ = sender.send(sync(&state));
    };
    std::thread::Builder::new().name("sync".into()).spawn(work).map_err(unavailable)?;
    receiver.await.map_err(unavailable)?
}

/// Until all that this process took is synced.
async fn settle(state: State, owed: Arc<Owed>) {
    loop {
        let mut taken = owed.taken.load(Ordering::SeqCst);
        for _ in 0..MAX_QUIETS {
            tokio::time::sleep(QUIET).await;
            let before = std::mem::replace(&mut taken, owed.taken.load(Ordering::SeqCst));
            if before == taken {
                break;
            }
        }
        match sync_beside(state.clone()).await {
            // What that one does may have begun before the last of ours.
            Ok(false) => continue,
            Ok(true) => {}
            // A folder that is gone owes nothing.
            Err(_) if !state.root.exists() => {}
            Err(e) => {
                tracing::warn!(error = %e, "snapshots could not be synced: after a reboot they don't count")
            }
        }
        owed.at_work.store(false, Ordering::SeqCst);
        let is_done = owed.taken.load(Ordering::SeqCst) == taken;
        if is_done || owed.at_work.swap(true, Ordering::SeqCst) {
            return;
        }
    }
}

impl Inner {
    /// After a snapshot was written down. Holds nothing of this provider but the names of its folders.
    pub(super) fn sync_later(&self) {
        self.owed.taken.fetch_add(1, Ordering::SeqCst);
        if !self.owed.at_work.swap(true, Ordering::SeqCst) {
            tokio::spawn(settle(self.state.clone(), Arc::clone(&self.owed)));
        }
    }

    /// What earlier processes did not live to do.
    pub(super) async fn sweep_snapshots(&self) -> Result<()> {
        let mut is_owed = false;
        for id in self.state.unsynced()? {
            match self.state.find_snapshot(&id) {
                Ok(Kept::Whole(meta)) => is_owed |= now().since(meta.info.created_at) > OWED_AFTER,
                Ok(Kept::Torn) => self.drop_torn(&id)?,
                Ok(Kept::Nothing) => {}
                Err(e) => tracing::warn!(snapshot = %id, error = %e, "a snapshot can't be read"),
            }
        }
        if is_owed {
            sync_beside(self.state.clone()).await?;
        }
        Ok(())
    }

    /// Its layers go with the next look for those that nobody needs.
    fn drop_torn(&self, id: &SnapshotId) -> Result<()> {
        let Some(_lock) = self.state.try_lock(&format!("snapshot.{id}"))? else { return Ok(()) };
        match self.state.find_snapshot(id)? {
            Kept::Torn => self.state.forget_snapshot(id),
            Kept::Nothing | Kept::Whole(_) => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use forkyard_core::Timestamp;

    use super::state::{Boot, SnapshotMeta};
    use super::*;
    use crate::{Labels, ProviderKind, SnapshotInfo, SnapshotMode};

    fn take(state: &State, id: &str, layer: &str) -> SnapshotId {
        let id = SnapshotId::new(id).unwrap();
        let info = SnapshotInfo {
            id: id.clone(),
            provider: ProviderKind::Local,
            mode: SnapshotMode::Sealed,
            labels: Labels::new(),
            created_at: Timestamp(0),
            bytes: None,
        };
        let meta = SnapshotMeta {
            format: state::format(),
            info,
            layers: vec![layer.into()],
            host_trees: true,
            directory: None,
            image: Default::default(),
            boot: Boot::now(),
        };
        state.save_snapshot(&meta).unwrap();
        id
    }

    #[test]
    fn only_what_was_whole_before_a_sync_counts_as_synced() {
        let dir = tempfile::tempdir().unwrap();
        let state = State::open(dir.path(), None).unwrap();
        let [kept, gone, again, held] = ["kept", "gone", "again", "held"].map(|id| take(&state, id, id));
        let batch = Batch::of(&state).unwrap();
        let later = take(&state, "later", "later");
        for id in [&gone, &again] {
            state.forget_snapshot(id).unwrap();
        }
        take(&state, "again", "another");
        let lock = state.try_lock("snapshot.held").unwrap();
        batch.mark(&state).unwrap();
        assert_eq!(state.unsynced().unwrap().len(), 3);
        for unsynced in [&again, &held, &later] {
            assert!(state.unsynced().unwrap().contains(unsynced), "{unsynced}");
        }
        drop(lock);
        assert!(sync(&state).unwrap());
        assert_eq!(state.unsynced().unwrap(), []);
        let mut all = [kept, again, held, later];
        all.sort();
        assert_eq!(state.snapshots().unwrap(), all);
    }

    #[test]
    fn one_process_syncs_at_a_time() {
        let dir = tempfile::tempdir().unwrap();
        let state = State::open(dir.path(), None).unwrap();
        let id = take(&state, "one", "one");
        let lock = state.try_lock(LOCK).unwrap();
        assert!(!sync(&state).unwrap());
        assert_eq!(state.unsynced().unwrap(), [id]);
        drop(lock);
        assert!(sync(&state).unwrap() && state.unsynced().unwrap().is_empty());
    }
}
