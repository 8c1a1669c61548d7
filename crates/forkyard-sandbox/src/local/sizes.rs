//! What snapshots take on the disk: looked at only for who lists them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use forkyard_guest::zygote::Work;

use super::Inner;
use super::snapshot::worked;
use super::state::{self, Kept};
use crate::{Result, SnapshotInfo};

/// Who lists waits no longer; what is not known by then is known to a later list of this process.
const WITHIN: Duration = Duration::from_secs(5);

/// Layers never change.
#[derive(Default)]
pub struct Sizes {
    known: Mutex<BTreeMap<String, u64>>,
    /// One look at the files at a time.
    turn: tokio::sync::Mutex<()>,
}

impl Sizes {
    fn of(&self, layer: &str) -> Option<u64> {
        // A panic while it was held leaves a whole map.
        self.known.lock().unwrap_or_else(PoisonError::into_inner).get(layer).copied()
    }
}

impl Inner {
    /// A layer counts once: with its image, else with the oldest snapshot that lies on it.
    pub(super) async fn measured_snapshots(self: &Arc<Self>) -> Result<Vec<SnapshotInfo>> {
        let mut all = Vec::new();
        for id in self.state.snapshots()? {
            if let Ok(Kept::Whole(meta)) = self.state.find_snapshot(&id) {
                all.push((meta.info, meta.layers));
            }
        }
        all.sort_by(|(a, _), (b, _)| (a.created_at, &a.id).cmp(&(b.created_at, &b.id)));
        let mut counted = BTreeSet::new();
        for (_, layers) in &mut all {
            layers.retain(|layer| counted.insert(layer.clone()) && !self.is_of_image(layer));
        }
        let own: Vec<String> = all.iter().flat_map(|(_, layers)| layers).cloned().collect();
        let inner = Arc::clone(self);
        let measuring = tokio::spawn(async move { inner.measure(&own).await });
        if let Ok(Ok(Err(e))) = tokio::time::timeout(WITHIN, measuring).await {
            tracing::debug!(error = %e, "sizes of snapshots are not known");
        }
        let sized = all.into_iter().map(|(info, layers)| {
            let bytes = layers.iter().map(|layer| self.sizes.of(layer)).sum();
            SnapshotInfo { bytes, ..info }
        });
        let mut sized: Vec<SnapshotInfo> = sized.collect();
        sized.sort_by(|a, b| a.id.cmp(&b.id));
        Ok(sized)
    }

    fn is_of_image(&self, layer: &str) -> bool {
        let users = state::names(&self.state.layer(layer).join("refs")).unwrap_or_default();
        users.iter().any(|user| user.starts_with("image."))
    }

    async fn measure(self: &Arc<Self>, layers: &[String]) -> Result<()> {
        let _turn = self.sizes.turn.lock().await;
        for layer in layers {
            if self.sizes.of(layer).is_some() {
                continue;
            }
            let work = Work::Measure { path: format!("layers/{layer}/fs") };
            // Removed since it was listed, as a rule.
            let Ok((bytes, _)) = self.zygote().await?.work(work, Vec::new()).await.and_then(worked) else {
                continue;
            };
            let mut known = self.sizes.known.lock().unwrap_or_else(PoisonError::into_inner);
            known.insert(layer.clone(), bytes);
        }
        let mut known = self.sizes.known.lock().unwrap_or_else(PoisonError::into_inner);
        known.retain(|layer, _| layers.contains(layer));
        Ok(())
    }
}
