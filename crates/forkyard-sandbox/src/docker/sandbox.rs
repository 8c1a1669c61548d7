//! A connection to one live container.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use bollard::query_parameters::StatsOptionsBuilder;
use bytes::Bytes;
use forkyard_core::{Attempt, CallId, SandboxId, SnapshotId};
use futures::StreamExt;
use tokio::io::AsyncRead;
use tokio::sync::RwLock;

use super::engine::translate;
use super::record::{Record, SnapshotRecord};
use super::{Inner, connect, lifecycle, oom, snapshot};
use crate::guest_client::GuestClient;
use crate::{
    EgressHandle, ErrorKind, Exec, ExecRequest, FileInfo, GitExport, GlobRequest, GrepRequest, GrepResult,
    Health, Labels, ProviderKind, Result, Sandbox, SandboxError, SandboxInfo, SnapshotInfo, SnapshotMode,
    Stats, WorkDiff,
};

/// A guest that takes longer to answer is not healthy.
const HEALTH_WITHIN: Duration = Duration::from_secs(5);

pub struct DockerSandbox {
    inner: Arc<Inner>,
    id: SandboxId,
    attempt: Attempt,
    token: String,
    client: RwLock<Option<GuestClient>>,
    egress: Option<Box<dyn EgressHandle>>,
    /// CPU time in microseconds and when it was asked for, for the next question.
    last_cpu: Mutex<Option<(Instant, u64)>>,
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
            last_cpu: Mutex::default(),
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
        let run = self.inner.home.run(&self.id);
        let client = match connect::guest(&run, self.attempt, &self.token).await {
            Err(e) if e.kind == ErrorKind::NotFound => return Err(SandboxError::gone(&self.id, "has ended")),
            greeted => greeted?,
        };
        *slot = Some(client.clone());
        Ok(client)
    }

    /// Memory in use (without what the kernel would give back at once) and CPU time in microseconds, as the cgroup counts.
    async fn kernel_usage(&self) -> Result<(Option<u64>, Option<u64>)> {
        let name = self.inner.container(&self.id);
        let options = StatsOptionsBuilder::default().stream(false).one_shot(true).build();
        let mut stream = Box::pin(self.inner.docker.stats(&name, Some(options)));
        let Some(stats) = stream.next().await else { return Ok((None, None)) };
        let stats = stats.map_err(|e| translate(&name, &e))?;
        let memory = stats.memory_stats.and_then(|memory| {
            let parts = memory.stats.unwrap_or_default();
            // cgroup v1 and v2 name it differently.
            let cache = parts.get("total_inactive_file").or_else(|| parts.get("inactive_file"));
            Some(memory.usage?.saturating_sub(cache.copied().unwrap_or(0)))
        });
        let cpu_ns = stats.cpu_stats.and_then(|c| c.cpu_usage).and_then(|u| u.total_usage);
        Ok((memory, cpu_ns.map(|ns| ns / 1000)))
    }

    fn mark_paused(&self, paused: bool) -> Result<()> {
        let mut record = self.inner.record(&self.id)?;
        record.paused = paused;
        self.inner.home.write(&record)
    }

    /// Nothing runs and nothing is written while the volumes are read: the guest holds new work back and stops what is running.
    async fn take(&self, id: &SnapshotId, labels: &Labels, guest: &GuestClient) -> Result<SnapshotInfo> {
        let busy = guest.quiesce().await?.busy;
        let inner = &self.inner;
        let of = inner.record(&self.id)?;
        let record = SnapshotRecord {
            info: SnapshotInfo {
                id: id.clone(),
                provider: ProviderKind::Docker,
                mode: if busy { SnapshotMode::Copied } else { SnapshotMode::Sealed },
                labels: labels.clone(),
                created_at: lifecycle::now(),
                bytes: None,
            },
            image: of.image,
        };
        let freezes = busy && !of.paused;
        if freezes {
            guest.pause().await?;
        }
        // Goes on whatever comes of it, also when nobody waits for the answer any more.
        let thaw = Thaw(freezes.then(|| guest.clone()));
        let taken = snapshot::take(&inner.home, guest, record).await;
        thaw.now().await?;
        taken
    }
}

/// Lets a sandbox go on, once, at the latest when it is dropped.
struct Thaw(Option<GuestClient>);

impl Thaw {
    async fn now(mut self) -> Result<()> {
        match self.0.take() {
            Some(guest) => guest.resume().await,
            None => Ok(()),
        }
    }
}

impl Drop for Thaw {
    fn drop(&mut self) {
        if let Some(guest) = self.0.take() {
            tokio::spawn(async move {
                if let Err(e) = guest.resume().await {
                    tracing::warn!(error = %e, "going on after a snapshot");
                }
            });
        }
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
        let since = lifecycle::now();
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
        let (memory, cpu_us, processes, disk) = self.guest().await?.stats().await?;
        let (kernel_memory, kernel_cpu_us) = self.kernel_usage().await?;
        let cpu_us = kernel_cpu_us.unwrap_or(cpu_us);
        let now = Instant::now();
        // A panic while it was held leaves a whole pair.
        let before = self.last_cpu.lock().unwrap_or_else(|e| e.into_inner()).replace((now, cpu_us));
        let cpu_percent = before.map_or(0.0, |(then, us)| {
            let elapsed_us = (now - then).as_micros().max(1) as f64;
            cpu_us.saturating_sub(us) as f64 / elapsed_us * 100.0
        });
        let network = match (&self.egress, &self.inner.egress) {
            (Some(own), _) => own.counters(),
            // Whoever only looks is told what the owner's proxy counts, if that is of this process.
            (None, Some(factory)) => factory.counters(&self.id).unwrap_or_default(),
            (None, None) => Default::default(),
        };
        Ok(Stats {
            memory_bytes: kernel_memory.unwrap_or(memory),
            cpu_percent,
            disk_bytes: disk.unwrap_or(0),
            network_rx_bytes: network.rx_bytes,
            network_tx_bytes: network.tx_bytes,
            processes,
        })
    }

    async fn health(&self) -> Result<Health> {
        let sick = |detail: String| Health { healthy: false, detail };
        let asked = async { self.guest().await?.calls().await };
        Ok(match tokio::time::timeout(HEALTH_WITHIN, asked).await {
            Ok(Ok(_)) => Health { healthy: true, detail: "the guest answers".into() },
            Ok(Err(e)) if e.kind == ErrorKind::Stale => return Err(e),
            Ok(Err(e)) => sick(e.to_string()),
            Err(_) => sick("the guest does not answer".into()),
        })
    }

    async fn snapshot(&self, id: &SnapshotId, labels: &Labels) -> Result<SnapshotInfo> {
        if let Some(record) = self.inner.home.read_snapshot(id)? {
            return Ok(record.info);
        }
        let guest = self.guest().await?;
        let taken = self.take(id, labels, &guest).await;
        // If the connection is gone, the guest has thawed by itself.
        let thawed = guest.thaw().await;
        let info = taken?;
        thawed?;
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
