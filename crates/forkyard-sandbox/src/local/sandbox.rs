//! A connection to one live local sandbox.

use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use forkyard_core::{Attempt, CallId, SandboxId, SnapshotId};
use tokio::io::AsyncRead;

use super::state::Meta;
use super::{Inner, cgroup, create, info, link};
use crate::guest_client::{GuestClient, Meter, health, network};
use crate::{
    EgressHandle, ErrorKind, Exec, ExecRequest, FileInfo, GitExport, GlobRequest, GrepRequest, GrepResult,
    Health, Labels, Result, Sandbox, SandboxError, SandboxInfo, SnapshotInfo, Stats, WorkDiff,
};

pub struct LocalSandbox {
    pub(super) inner: Arc<Inner>,
    id: SandboxId,
    attempt: Attempt,
    client: tokio::sync::RwLock<GuestClient>,
    egress: Option<Box<dyn EgressHandle>>,
    meter: Meter,
}

impl LocalSandbox {
    pub(super) fn new(
        inner: Arc<Inner>,
        meta: &Meta,
        client: GuestClient,
        egress: Option<Box<dyn EgressHandle>>,
    ) -> Arc<LocalSandbox> {
        Arc::new(LocalSandbox {
            inner,
            id: meta.id.clone(),
            attempt: meta.attempt,
            client: tokio::sync::RwLock::new(client),
            egress,
            meter: Meter::default(),
        })
    }

    /// The guest; connected again if the connection was lost. Says `Stale` to whom a newer attempt has replaced.
    pub(super) async fn guest(&self) -> Result<GuestClient> {
        {
            let client = self.client.read().await;
            match client.ended() {
                None => return Ok(client.clone()),
                Some(e) if e.kind == ErrorKind::Stale => return Err(e),
                Some(_) => {}
            }
        }
        let mut client = self.client.write().await;
        if client.ended().is_some() {
            *client = create::connect(&self.id, &self.inner.state.sandbox(&self.id), self.attempt).await?;
        }
        Ok(client.clone())
    }

    /// Whoever was cut off because the sandbox is gone is told that, not that a connection was lost.
    fn explain<T>(&self, result: Result<T>) -> Result<T> {
        match result {
            Err(e)
                if e.kind == ErrorKind::Unavailable
                    && !self.meta().is_ok_and(|meta| link::is_alive(&meta)) =>
            {
                Err(SandboxError::ended(&self.id))
            }
            other => other,
        }
    }

    pub(super) fn meta(&self) -> Result<Meta> {
        self.inner.meta(&self.id)
    }

    async fn mark_paused(&self, paused: bool) -> Result<()> {
        let _lock = self.inner.state.lock(self.id.as_str()).await?;
        let mut meta = self.meta()?;
        meta.paused = paused;
        self.inner.state.save(&meta)
    }
}

#[async_trait]
impl Sandbox for LocalSandbox {
    fn id(&self) -> &SandboxId {
        &self.id
    }
    fn attempt(&self) -> Attempt {
        self.attempt
    }
    async fn info(&self) -> Result<SandboxInfo> {
        Ok(info(&self.meta()?))
    }

    async fn exec(&self, request: ExecRequest) -> Result<Exec> {
        self.explain(self.guest().await?.exec(request).await)
    }
    async fn forget(&self, call: &CallId) -> Result<()> {
        self.explain(self.guest().await?.forget(call).await)
    }
    async fn calls(&self) -> Result<Vec<CallId>> {
        self.explain(self.guest().await?.calls().await)
    }

    async fn read_file(&self, path: &str, offset: u64, max: u64) -> Result<Bytes> {
        self.explain(self.guest().await?.read_file(path, offset, max).await)
    }
    async fn write_file(&self, path: &str, data: Bytes, mode: Option<u32>) -> Result<()> {
        self.explain(self.guest().await?.write_file(path, data, mode).await)
    }
    async fn write_file_from(
        &self,
        path: &str,
        data: &mut (dyn AsyncRead + Send + Unpin),
        mode: Option<u32>,
    ) -> Result<u64> {
        self.explain(self.guest().await?.write_file_from(path, data, mode).await)
    }
    async fn unpack(&self, dir: &str, archive: &mut (dyn AsyncRead + Send + Unpin)) -> Result<u64> {
        self.explain(self.guest().await?.unpack(dir, archive).await)
    }
    async fn stat(&self, path: &str) -> Result<FileInfo> {
        self.explain(self.guest().await?.stat(path).await)
    }
    async fn list_files(&self, path: &str) -> Result<Vec<FileInfo>> {
        self.explain(self.guest().await?.list_files(path).await)
    }
    async fn remove(&self, path: &str, recursive: bool) -> Result<()> {
        self.explain(self.guest().await?.remove(path, recursive).await)
    }
    async fn make_dir(&self, path: &str) -> Result<()> {
        self.explain(self.guest().await?.make_dir(path).await)
    }

    async fn glob(&self, request: GlobRequest) -> Result<Vec<String>> {
        self.explain(self.guest().await?.glob(request).await)
    }
    async fn grep(&self, request: GrepRequest) -> Result<GrepResult> {
        self.explain(self.guest().await?.grep(request).await)
    }
    async fn git_export(&self, export: GitExport) -> Result<WorkDiff> {
        self.explain(self.guest().await?.git_export(export).await)
    }

    async fn stats(&self) -> Result<Stats> {
        let figures = self.explain(self.guest().await?.figures().await)?;
        let meta = self.meta()?;
        let mut figures = figures.or_kernel(cgroup::usage(&meta.cgroups));
        // What the limit is compared with.
        figures.disk_bytes = self.inner.used_by(&meta).or(figures.disk_bytes);
        let network =
            network(self.egress.as_deref(), self.inner.egress.as_deref(), &self.id, meta.created_at);
        Ok(self.meter.stats(figures, network))
    }

    async fn health(&self) -> Result<Health> {
        health(self.calls()).await
    }

    async fn snapshot(&self, id: &SnapshotId, labels: &Labels) -> Result<SnapshotInfo> {
        self.take_snapshot(id, labels).await
    }

    async fn pause(&self) -> Result<()> {
        self.explain(self.guest().await?.pause().await)?;
        self.mark_paused(true).await
    }
    async fn resume(&self) -> Result<()> {
        self.explain(self.guest().await?.resume().await)?;
        self.mark_paused(false).await
    }
}
