//! Sandboxes by hand: found whoever has them, made, forked and ended. What the CLI and the API do with them.

use std::collections::BTreeMap;
use std::sync::Arc;

use forkyard_core::sandbox::LimitsOverride;
use forkyard_core::{Attempt, SandboxId, SnapshotId};
use forkyard_sandbox::owner::{self, is_orphan};
use forkyard_sandbox::{
    ErrorKind, Labels, Lifetime, NetworkSpec, Provider, Result, Root, Sandbox, SandboxError, SandboxInfo,
    SandboxSpec, SnapshotInfo,
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

const ELSEWHERE: &str = "use the provider local or docker";

#[derive(Clone)]
pub struct Sandboxes {
    providers: BTreeMap<ProviderKind, Arc<dyn Provider>>,
    silent: Option<String>,
}

fn by_age(mut all: Vec<SnapshotInfo>) -> Vec<SnapshotInfo> {
    all.sort_by(|a, b| (a.created_at, &a.id).cmp(&(b.created_at, &b.id)));
    all
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
            let (message, hint) = match kind {
                ProviderKind::Local => ("there are no local sandboxes here", "see `forkyard doctor`"),
                ProviderKind::Docker => ("there is no Docker here", "see `forkyard doctor`"),
                ProviderKind::E2b => ("sandboxes of E2B are not part of this version", ELSEWHERE),
                ProviderKind::Daytona => ("sandboxes of Daytona are not part of this version", ELSEWHERE),
            };
            SandboxError::new(ErrorKind::Unsupported, message).hint(hint)
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
            all.extend(live(provider).await?);
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
        Ok(by_age(all))
    }

    /// The same with their sizes, as far as they can be told in a moment.
    pub async fn measured_snapshots(&self) -> Result<Vec<SnapshotInfo>> {
        let mut all = Vec::new();
        for provider in self.providers.values() {
            all.extend(provider.measured_snapshots().await?);
        }
        Ok(by_age(all))
    }

    /// Snapshots of this machine whose record can't be read, whose they are, and why.
    pub async fn damaged_snapshots(&self) -> Result<Vec<(ProviderKind, SnapshotId, SandboxError)>> {
        let mut all = Vec::new();
        for (kind, provider) in &self.providers {
            all.extend(provider.damaged_snapshots().await?.into_iter().map(|(id, e)| (*kind, id, e)));
        }
        Ok(all)
    }

    /// Whoever has it.
    pub async fn find(&self, id: &SandboxId) -> Result<(Arc<dyn Provider>, SandboxInfo)> {
        for provider in self.providers.values() {
            if let Some(info) = live(provider).await?.into_iter().find(|s| s.id == *id) {
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

    /// A connection for figures and files, on which nothing inside comes to depend.
    pub async fn observe(&self, id: &SandboxId) -> Result<Arc<dyn Sandbox>> {
        let (provider, info) = self.find(id).await?;
        provider.observe(id, info.attempt).await
    }

    pub async fn create(
        &self,
        kind: ProviderKind,
        id: &SandboxId,
        spec: &SandboxSpec,
    ) -> Result<Arc<dyn Sandbox>> {
        self.provider(kind)?.create(id, Attempt(1), spec).await
    }

    /// Copy-on-write children of a sandbox, which goes on as it is: like it in all but their lifetime and the limits that are given. `snapshot` and
    /// `children` are names that nobody has; the answer has the children's own.
    pub async fn fork(
        &self,
        parent: &SandboxId,
        snapshot: &SnapshotId,
        children: &[SandboxId],
        lifetime: Lifetime,
        limits: LimitsOverride,
    ) -> Result<Vec<SandboxId>> {
        let (provider, info) = self.find(parent).await?;
        let Some(spec) = provider.spec(parent).await? else {
            return provider.make_children(parent, children.len(), lifetime, limits).await;
        };
        let spec = SandboxSpec {
            root: Root::Snapshot(snapshot.clone()),
            limits: info.limits.with(limits),
            // Forkyard's own name is for the agent of a run, which a child has none of.
            network: NetworkSpec { internal: false, ..spec.network },
            labels: spec.labels.into_iter().filter(|(key, _)| !is_own(key)).collect(),
            lifetime,
            ..spec
        };
        provider.observe(parent, info.attempt).await?.snapshot(snapshot, &Labels::new()).await?;
        let mut made = Ok(());
        for (n, child) in children.iter().enumerate() {
            made = provider.create(child, Attempt(1), &spec).await.map(drop);
            if made.is_err() {
                // All of them or none: nobody would be told the names of those that are there.
                for sibling in &children[..n] {
                    if let Err(e) = provider.destroy(sibling).await {
                        tracing::warn!(sandbox = %sibling, error = %e, "a child that nobody gets can't be removed");
                    }
                }
                break;
            }
        }
        // Children keep what they use of it.
        let removed = provider.remove_snapshot(snapshot).await;
        made.and(removed).map(|()| children.to_vec())
    }
}

/// Labels by which Forkyard itself knows whose a sandbox is: nobody inherits them, and nobody else gives them.
pub fn is_own(label: &str) -> bool {
    ["run", "fork", "attempt", "role", owner::OWNER].contains(&label)
}

/// What a provider has. What a process left that was to take it along, goes.
async fn live(provider: &Arc<dyn Provider>) -> Result<Vec<SandboxInfo>> {
    let (orphans, live) =
        provider.list(&Labels::new()).await?.into_iter().partition::<Vec<_>, _>(|s| is_orphan(&s.labels));
    for orphan in orphans {
        if let Err(e) = provider.destroy(&orphan.id).await {
            tracing::warn!(sandbox = %orphan.id, error = %e, "what a process left can't be removed");
        }
    }
    Ok(live)
}
