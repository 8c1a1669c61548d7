//! Sandboxes by hand: found whoever has them, made, forked and ended. What the CLI and the API do with them.

use std::collections::BTreeMap;
use std::sync::Arc;

use forkyard_core::{Attempt, SandboxId, SnapshotId};
use forkyard_sandbox::{
    ErrorKind, Labels, Provider, Result, Root, Sandbox, SandboxError, SandboxInfo, SandboxSpec, SnapshotInfo,
};

/// What its users handle, so that they need to know of this crate alone.
pub mod types {
    pub use forkyard_sandbox::{
        Achieved, ErrorKind, Exec, ExecControl, ExecEvent, ExecRequest, ExecResult, FileInfo, FileKind,
        Health, Labels, Lifetime, LimitMeans, Limits, NetworkMode, NetworkSpec, Provider, ProviderKind,
        PtySize, Root, Sandbox, SandboxError, SandboxInfo, SandboxSpec, SandboxStatus, SnapshotInfo,
        SnapshotMode, Stats,
    };
}

use types::ProviderKind;

#[derive(Clone)]
pub struct Sandboxes {
    providers: BTreeMap<ProviderKind, Arc<dyn Provider>>,
    silent: Option<String>,
}

impl Sandboxes {
    pub fn new(providers: BTreeMap<ProviderKind, Arc<dyn Provider>>) -> Sandboxes {
        Sandboxes { providers, silent: None }
    }

    /// A provider that belongs here does not answer, and what it has is not seen: why.
    pub fn without(self, why: Option<String>) -> Sandboxes {
        Sandboxes { silent: why, ..self }
    }

    /// Why there may be more sandboxes than are seen here.
    pub fn silent(&self) -> Option<&str> {
        self.silent.as_deref()
    }

    pub fn provider(&self, kind: ProviderKind) -> Result<&Arc<dyn Provider>> {
        self.providers.get(&kind).ok_or_else(|| {
            SandboxError::new(ErrorKind::Unsupported, format!("there is no {kind:?} provider here"))
                .hint("see `forkyard doctor`")
        })
    }

    /// Waits until what was ended here has left nothing behind.
    pub async fn settle(&self) {
        futures::future::join_all(self.providers.values().map(|provider| provider.settle())).await;
    }

    /// Waits until what was ended here will be gone, whether this process lives on or not.
    pub async fn leave(&self) {
        futures::future::join_all(self.providers.values().map(|provider| provider.leave())).await;
    }

    /// All of this machine, those of runs included, oldest first.
    pub async fn list(&self) -> Result<Vec<SandboxInfo>> {
        let mut all = Vec::new();
        for provider in self.providers.values() {
            all.extend(provider.list(&Labels::new()).await?);
        }
        all.sort_by(|a, b| (a.created_at, &a.id).cmp(&(b.created_at, &b.id)));
        Ok(all)
    }

    /// Snapshots of this machine, oldest first.
    pub async fn snapshots(&self) -> Result<Vec<SnapshotInfo>> {
        let mut all = Vec::new();
        for provider in self.providers.values() {
            all.extend(provider.snapshots().await?);
        }
        all.sort_by(|a, b| (a.created_at, &a.id).cmp(&(b.created_at, &b.id)));
        Ok(all)
    }

    /// Whoever has it.
    pub async fn find(&self, id: &SandboxId) -> Result<(Arc<dyn Provider>, SandboxInfo)> {
        for provider in self.providers.values() {
            if let Some(info) = provider.list(&Labels::new()).await?.into_iter().find(|s| s.id == *id) {
                return Ok((provider.clone(), info));
            }
        }
        let hint = match &self.silent {
            Some(why) => why,
            None => "`forkyard sandbox list` shows those that there are",
        };
        Err(SandboxError::new(ErrorKind::NotFound, format!("there is no sandbox {id}")).hint(hint))
    }

    /// A connection under the attempt that it has, so that nobody is fenced off by it.
    pub async fn attach(&self, id: &SandboxId) -> Result<Arc<dyn Sandbox>> {
        let (provider, info) = self.find(id).await?;
        provider.attach_beside(id, info.attempt).await
    }

    pub async fn create(
        &self,
        kind: ProviderKind,
        id: &SandboxId,
        spec: &SandboxSpec,
    ) -> Result<Arc<dyn Sandbox>> {
        self.provider(kind)?.create(id, Attempt(1), spec).await
    }

    /// Copy-on-write children with the limits of their parent, which goes on as it is. `spec` says the rest; `snapshot` is
    /// a name that nobody has.
    pub async fn fork(
        &self,
        parent: &SandboxId,
        snapshot: &SnapshotId,
        children: &[SandboxId],
        mut spec: SandboxSpec,
    ) -> Result<()> {
        let (provider, info) = self.find(parent).await?;
        provider.attach_beside(parent, info.attempt).await?.snapshot(snapshot, &Labels::new()).await?;
        spec.limits = info.limits;
        spec.root = Root::Snapshot(snapshot.clone());
        let mut made = Ok(());
        for child in children {
            made = provider.create(child, Attempt(1), &spec).await.map(drop);
            if made.is_err() {
                break;
            }
        }
        // Children keep what they use of it.
        let removed = provider.remove_snapshot(snapshot).await;
        made.and(removed)
    }
}
