//! A connection to one live container.

use std::sync::Arc;

use async_trait::async_trait;
use bollard::query_parameters::StatsOptionsBuilder;
use bytes::Bytes;
use forkyard_core::{Attempt, CallId, SandboxId, SnapshotId, Timestamp};
use futures::StreamExt;
use tokio::io::AsyncRead;
use tokio::sync::RwLock;

use super::engine::translate;
use super::record::{Record, SnapshotRecord};
use super::{Inner, connect, oom, snapshot};
use crate::guest_client::{GuestClient, Meter, Quieted, file_pages, health, network};
use crate::{
    EgressHandle, ErrorKind, Exec, ExecRequest, FileInfo, GitExport, GlobRequest, GrepRequest, GrepResult,
    Health, Labels, ProviderKind, Result, Sandbox, SandboxError, SandboxInfo, SnapshotInfo, SnapshotMode,
    Stats, WorkDiff, now,
};

pub struct DockerSandbox {
    inner: Arc<Inner>,
    id: SandboxId,
    attempt: Attempt,
    token: String,
    client: RwLock<Option<GuestClient>>,
    egress: Option<Box<dyn EgressHandle>>,
    meter: Meter,
}

impl DockerSandbox {
    pub(super) fn new(
        inner: Arc<Inner>,
        record: &Record,
        client: Option<GuestClient>,
        egress: Option<Box<dyn EgressHandle>>,
    ) -> Arc<DockerSandbox> {
        Arc::new(DockerSandbox {
            inner,
            id: record.id.clone(),
            attempt: record.attempt,
            token: record.token.clone(),
            client: RwLock::new(client),
            egress,
            meter: Meter::default(),
        })
    }

    /// The guest; connected again if the connection was lost. Says `Stale` to whom a newer attempt has replaced.
    async fn guest(&self) -> Result<GuestClient> {
        let usable = |client: &Option<GuestClient>| match client.as_ref().map(|c| (c, c.ended())) {
            Some((client, None)) => Some(Ok(client.clone())),
            Some((_, Some(e))) if e.kind == ErrorKind::Stale => Some(Err(e)),
            Some((_, Some(_))) | None => None,
        };
        if let Some(client) = usable(&*self.client.read().await) {
            return client;
        }
        let mut slot = self.client.write().await;
        if let Some(client) = usable(&slot) {
            return client;
        }
        let client = self.connect().await?;
        *slot = Some(client.clone());
        Ok(client)
    }

    async fn connect(&self) -> Result<GuestClient> {
        let run = self.inner.home.run(&self.id);
        match connect::guest(&run, self.attempt, &self.token).await {
            Err(e) if e.kind == ErrorKind::NotFound => Err(SandboxError::ended(&self.id)),
            greeted => greeted,
        }
    }

    /// Memory in use (without what the kernel would give back) and CPU time in microseconds, as the cgroup counts. An engine
    /// without one says zero, which nothing that runs has used.
    async fn kernel_usage(&self) -> Result<(Option<u64>, Option<u64>)> {
        let name = self.inner.container(&self.id);
        let options = StatsOptionsBuilder::default().stream(false).one_shot(true).build();
        let mut stream = Box::pin(self.inner.docker.stats(&name, Some(options)));
        let Some(stats) = stream.next().await else { return Ok((None, None)) };
        let stats = stats.map_err(|e| translate(&name, &e))?;
        let memory = stats.memory_stats.and_then(|memory| {
            let parts = memory.stats.unwrap_or_default();
            let used = memory.usage.filter(|bytes| *bytes > 0)?;
            Some(used.saturating_sub(file_pages(|name| parts.get(name).copied())))
        });
        let cpu_ns = stats.cpu_stats.and_then(|c| c.cpu_usage).and_then(|u| u.total_usage);
        let cpu_ns = cpu_ns.filter(|ns| *ns > 0);
        Ok((memory, cpu_ns.map(|ns| ns / 1000)))
    }

    fn mark_paused(&self, paused: bool) -> Result<()> {
        let mut record = self.inner.record(&self.id)?;
        record.paused = paused;
        self.inner.home.write(&record)
    }

    /// Nothing runs and nothing is written while the volumes are read: the guest holds new work back and stops what is running.
    async fn take(&self, id: &SnapshotId, labels: &Labels, quiet: &Quieted) -> Result<SnapshotInfo> {
        let Quieted { guest, busy } = quiet;
        let inner = &self.inner;
        let of = inner.record(&self.id)?;
        let record = SnapshotRecord {
            info: SnapshotInfo {
                id: id.clone(),
                provider: ProviderKind::Docker,
                mode: if *busy { SnapshotMode::Copied } else { SnapshotMode::Sealed },
                labels: labels.clone(),
                created_at: now(),
                bytes: None,
            },
            image: of.image,
        };
        let freeze = *busy && !of.paused;
        if freeze {
            // The quiet's own: it ends with that.
            guest.pause().await?;
        }
        snapshot::take(&inner.home, guest, record, freeze.then_some(inner.freeze)).await
    }
}

#[async_trait]
impl Sandbox for DockerSandbox {
    fn id(&self) -> &SandboxId {
        &self.id
    }
    fn attempt(&self) -> Attempt {
        self.attempt
    }
    async fn info(&self) -> Result<SandboxInfo> {
        self.inner.status(&self.id).await
    }

    async fn exec(&self, request: ExecRequest) -> Result<Exec> {
        let since = now();
        let exec = self.guest().await?.exec(request).await?;
        Ok(oom::attributed(exec, self.inner.docker.clone(), self.inner.container(&self.id), since))
    }
    async fn forget(&self, call: &CallId) -> Result<()> {
        self.guest().await?.forget(call).await
    }
    async fn calls(&self) -> Result<Vec<CallId>> {
        self.guest().await?.calls().await
    }

    async fn read_file(&self, path: &str, offset: u64, max: u64) -> Result<Bytes> {
        self.guest().await?.read_file(path, offset, max).await
    }
    async fn write_file(&self, path: &str, data: Bytes, mode: Option<u32>) -> Result<()> {
        self.guest().await?.write_file(path, data, mode).await
    }
    async fn write_file_from(
        &self,
        path: &str,
        data: &mut (dyn AsyncRead + Send + Unpin),
        mode: Option<u32>,
    ) -> Result<u64> {
        self.guest().await?.write_file_from(path, data, mode).await
    }
    async fn unpack(&self, dir: &str, archive: &mut (dyn AsyncRead + Send + Unpin)) -> Result<u64> {
        self.guest().await?.unpack(dir, archive).await
    }
    async fn stat(&self, path: &str) -> Result<FileInfo> {
        self.guest().await?.stat(path).await
    }
    async fn list_files(&self, path: &str) -> Result<Vec<FileInfo>> {
        self.guest().await?.list_files(path).await
    }
    async fn remove(&self, path: &str, recursive: bool) -> Result<()> {
        self.guest().await?.remove(path, recursive).await
    }
    async fn make_dir(&self, path: &str) -> Result<()> {
        self.guest().await?.make_dir(path).await
    }

    async fn glob(&self, request: GlobRequest) -> Result<Vec<String>> {
        self.guest().await?.glob(request).await
    }
    async fn grep(&self, request: GrepRequest) -> Result<GrepResult> {
        self.guest().await?.grep(request).await
    }
    async fn git_export(&self, export: GitExport) -> Result<WorkDiff> {
        self.guest().await?.git_export(export).await
    }

    async fn stats(&self) -> Result<Stats> {
        let figures = self.guest().await?.figures().await?.or_kernel(self.kernel_usage().await?);
        let made = self.inner.home.read(&self.id)?.map_or(Timestamp(0), |record| record.created_at);
        let network = network(self.egress.as_deref(), self.inner.egress.as_deref(), &self.id, made);
        Ok(self.meter.stats(figures, network))
    }

    async fn health(&self) -> Result<Health> {
        health(self.calls()).await
    }

    async fn snapshot(&self, id: &SnapshotId, labels: &Labels) -> Result<SnapshotInfo> {
        if let Some(record) = self.inner.home.read_snapshot(id)? {
            return Ok(record.info);
        }
        let quiet = Quieted::begin(self.connect().await?).await?;
        let taken = self.take(id, labels, &quiet).await;
        // If the connection is gone, the guest has gone on by itself.
        let ended = quiet.end().await;
        let info = taken?;
        ended?;
        Ok(info)
    }

    async fn pause(&self) -> Result<()> {
        self.guest().await?.pause().await?;
        self.mark_paused(true)
    }
    async fn resume(&self) -> Result<()> {
        self.guest().await?.resume().await?;
        self.mark_paused(false)
    }
}
