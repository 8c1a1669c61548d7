//! Sandboxes behind the API. It knows a sandbox by its id alone: attempts are the server's business.

use std::path::Path;
use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use forkyard_core::sandbox::LimitsOverride;
use forkyard_core::{Attempt, CallId, SandboxId, SnapshotId, Timestamp};
use forkyard_engine::sandboxes::is_own;
use forkyard_sandbox::{
    Achieved, Capabilities, ErrorKind, Exec, ExecRequest, FileInfo, FileKind, ForkCost, GitExport,
    GlobRequest, GrepRequest, GrepResult, Health, Labels, Lifetime, Limits, NetworkMode, Provider,
    ProviderKind, Result, Sandbox, SandboxError, SandboxInfo, SandboxSpec, SnapshotInfo, Stats, WorkDiff,
};
use forkyard_server::dto::sandbox as dto;
use forkyard_server::error::Code;
use reqwest::Method;
use serde_json::{Value, json};
use tokio::io::{AsyncRead, AsyncReadExt};

use super::client::{Client, Refused, coded};
use super::{request, shell};
use crate::error::CliError;
use crate::exit::Exit;

/// The API's largest page.
const PAGE: usize = 500;
/// An upload that does not fit into memory is not sent this way.
const MAX_UPLOAD: u64 = 1 << 30;

pub struct RemoteProvider {
    client: Client,
    kind: ProviderKind,
}

impl RemoteProvider {
    pub fn new(client: Client, kind: ProviderKind) -> RemoteProvider {
        RemoteProvider { client, kind }
    }

    fn open(&self, id: &SandboxId, attempt: Attempt) -> Arc<dyn Sandbox> {
        Arc::new(RemoteSandbox { client: self.client.clone(), id: id.clone(), attempt })
    }

    async fn steer(&self, id: &SandboxId, word: &str) -> Result<()> {
        let path = format!("/sandboxes/{id}/{word}");
        self.client.post::<Value>(&path, &Value::Null).await.map(drop).map_err(error)
    }
}

/// As the same mistake looks on this machine.
pub fn error(e: CliError) -> SandboxError {
    let kind = match e.exit {
        Exit::Usage => ErrorKind::Invalid,
        Exit::Success | Exit::Failure | Exit::Interrupted | Exit::Command(_) => ErrorKind::Unavailable,
    };
    let error = SandboxError::new(kind, e.message);
    match e.hint {
        Some(hint) => error.hint(hint),
        None => error,
    }
}

fn unsupported<T>(what: &str) -> Result<T> {
    Err(SandboxError::new(ErrorKind::Unsupported, format!("{what} can't be asked of a server")))
}

fn info(s: dto::Sandbox) -> Result<SandboxInfo> {
    let invalid = |e: forkyard_core::InvalidId| SandboxError::new(ErrorKind::Unavailable, e.to_string());
    Ok(SandboxInfo {
        id: SandboxId::new(s.id).map_err(invalid)?,
        provider: s.provider.into(),
        status: s.status.into(),
        attempt: Attempt(s.attempt),
        labels: s.labels,
        limits: Limits {
            memory_bytes: s.limits.memory_bytes,
            cpus: s.limits.cpus,
            disk_bytes: s.limits.disk_bytes,
            processes: s.limits.processes,
            network_bytes_per_s: s.limits.network_bytes_per_s,
        },
        achieved: Achieved {
            memory: s.achieved.memory.into(),
            cpu: s.achieved.cpu.into(),
            disk: s.achieved.disk.into(),
            processes: s.achieved.processes.into(),
            network: s.achieved.network.into(),
            layers: s.achieved.layers,
        },
        created_at: Timestamp(s.created_at),
        deadline: Timestamp(s.deadline),
    })
}

fn snapshot(s: dto::Snapshot) -> Result<SnapshotInfo> {
    let invalid = |e: forkyard_core::InvalidId| SandboxError::new(ErrorKind::Unavailable, e.to_string());
    Ok(SnapshotInfo {
        id: SnapshotId::new(s.id).map_err(invalid)?,
        provider: s.provider.into(),
        mode: s.mode.into(),
        labels: s.labels,
        created_at: Timestamp(s.created_at),
        bytes: s.bytes,
    })
}

#[async_trait]
impl Provider for RemoteProvider {
    /// What the machine behind it can do, it says itself when it is asked for more.
    fn capabilities(&self) -> Capabilities {
        Capabilities {
            provider: self.kind,
            attach: true,
            fencing: false,
            snapshot: true,
            fork: ForkCost::BySize,
            pause: true,
            start_stop: true,
            pty: true,
            volumes: false,
            network_modes: vec![NetworkMode::None, NetworkMode::Isolated, NetworkMode::Bridge],
            snapshots_travel: false,
        }
    }

    async fn create(&self, id: &SandboxId, attempt: Attempt, spec: &SandboxSpec) -> Result<Arc<dyn Sandbox>> {
        if !spec.volumes.is_empty() {
            return Err(SandboxError::new(
                ErrorKind::Invalid,
                "--volume: folders of a server are its own configuration's to give",
            ));
        }
        if spec.labels.keys().any(|key| !is_own(key)) {
            return Err(SandboxError::new(
                ErrorKind::Invalid,
                "--label: a server's sandboxes take no labels",
            )
            .hint("leave it out; --name tells them apart"));
        }
        let (image, snapshot) = request::root(Some(&spec.root)).map_err(error)?;
        let body = dto::CreateSandbox {
            id: Some(id.to_string()),
            provider: Some(self.kind.into()),
            image,
            snapshot,
            memory_bytes: Some(spec.limits.memory_bytes),
            cpus: Some(spec.limits.cpus),
            disk_bytes: Some(spec.limits.disk_bytes),
            processes: Some(spec.limits.processes),
            env: Some(spec.env.clone()),
            strict: Some(spec.strict),
            disk_image: Some(spec.disk_image),
            network: Some(spec.network.mode.into()),
            allow: Some(spec.network.allow.clone()),
            no_default_allow: Some(spec.network.no_default_allow),
            secrets: Some(spec.network.secrets.clone()),
            network_bytes_per_s: spec.limits.network_bytes_per_s,
            lifetime_ms: Some(spec.lifetime.0.0),
        };
        self.client.post::<dto::Sandbox>("/sandboxes", &body).await.map_err(error)?;
        Ok(self.open(id, attempt))
    }

    async fn attach(&self, id: &SandboxId, attempt: Attempt) -> Result<Arc<dyn Sandbox>> {
        Ok(self.open(id, attempt))
    }

    async fn list(&self, labels: &Labels) -> Result<Vec<SandboxInfo>> {
        let mut all = vec![];
        let mut after = String::new();
        loop {
            let path = format!("/sandboxes?limit={PAGE}{after}");
            let page: dto::SandboxPage = self.client.get(&path).await.map_err(error)?;
            for s in page.sandboxes {
                all.push(info(s)?);
            }
            match page.next_cursor {
                Some(cursor) => after = format!("&cursor={}", coded(&cursor)),
                None => break,
            }
        }
        all.retain(|s| s.provider == self.kind && labels.iter().all(|(k, v)| s.labels.get(k) == Some(v)));
        Ok(all)
    }

    async fn make_children(
        &self,
        parent: &SandboxId,
        count: usize,
        lifetime: Lifetime,
        limits: LimitsOverride,
    ) -> Result<Vec<SandboxId>> {
        let LimitsOverride { memory_bytes, cpus, disk_bytes, processes, network_bytes_per_s } = limits;
        let body = dto::ForkSandbox {
            count: u32::try_from(count).ok(),
            memory_bytes,
            cpus,
            disk_bytes,
            processes,
            network_bytes_per_s,
            lifetime_ms: Some(lifetime.0.0),
        };
        let path = format!("/sandboxes/{parent}/fork");
        let made: dto::Children = self.client.post(&path, &body).await.map_err(error)?;
        let id =
            |id| SandboxId::new(id).map_err(|e| SandboxError::new(ErrorKind::Unavailable, e.to_string()));
        made.sandboxes.into_iter().map(id).collect()
    }

    async fn destroy(&self, id: &SandboxId) -> Result<()> {
        let request = self.client.request(Method::DELETE, &format!("/sandboxes/{id}"));
        match self.client.send(request).await {
            Ok(_) => Ok(()),
            Err(Refused::Said(e)) if e.code == Code::SandboxNotFound => Ok(()),
            Err(e) => Err(error(self.client.error(e))),
        }
    }

    async fn stop(&self, id: &SandboxId) -> Result<()> {
        self.steer(id, "stop").await
    }
    async fn start(&self, id: &SandboxId, attempt: Attempt) -> Result<Arc<dyn Sandbox>> {
        self.steer(id, "start").await?;
        Ok(self.open(id, attempt))
    }

    async fn snapshots(&self) -> Result<Vec<SnapshotInfo>> {
        let all: dto::Snapshots = self.client.get("/snapshots").await.map_err(error)?;
        let all = all.snapshots.into_iter().map(snapshot).collect::<Result<Vec<_>>>()?;
        Ok(all.into_iter().filter(|s| s.provider == self.kind).collect())
    }
    async fn remove_snapshot(&self, id: &SnapshotId) -> Result<()> {
        let request = self.client.request(Method::DELETE, &format!("/snapshots/{id}"));
        match self.client.send(request).await {
            Ok(_) => Ok(()),
            Err(Refused::Said(e)) if e.code == Code::FileNotFound => Ok(()),
            Err(e) => Err(error(self.client.error(e))),
        }
    }
    async fn export_snapshot(&self, _: &SnapshotId, _: &Path) -> Result<()> {
        unsupported("the export of a snapshot")
    }
    async fn import_snapshot(&self, _: &SnapshotId, _: &Path, _: Option<&str>) -> Result<SnapshotInfo> {
        unsupported("the import of a snapshot")
    }

    /// The server sweeps its own machine.
    async fn sweep(&self) -> Result<()> {
        Ok(())
    }
}

pub struct RemoteSandbox {
    pub client: Client,
    pub id: SandboxId,
    attempt: Attempt,
}

impl RemoteSandbox {
    fn at(&self, rest: &str) -> String {
        format!("/sandboxes/{}{rest}", self.id)
    }

    async fn do_it(&self, word: &str) -> Result<()> {
        self.client.post::<Value>(&self.at(word), &Value::Null).await.map(drop).map_err(error)
    }
}

#[async_trait]
impl Sandbox for RemoteSandbox {
    fn id(&self) -> &SandboxId {
        &self.id
    }
    fn attempt(&self) -> Attempt {
        self.attempt
    }
    async fn info(&self) -> Result<SandboxInfo> {
        info(self.client.get(&self.at("")).await.map_err(error)?)
    }

    async fn exec(&self, request: ExecRequest) -> Result<Exec> {
        match request.pty {
            Some(size) => shell::open(self, request, size).await,
            None => shell::exec(self, request).await,
        }
    }
    async fn forget(&self, _: &CallId) -> Result<()> {
        Ok(())
    }
    async fn calls(&self) -> Result<Vec<CallId>> {
        Ok(vec![])
    }

    async fn read_file(&self, path: &str, offset: u64, max: u64) -> Result<Bytes> {
        let query = format!("?path={}&offset={offset}&length={max}", coded(path));
        let found = self.client.bytes(&self.at(&format!("/files/content{query}")), &[]).await;
        Ok(found.map_err(error)?.unwrap_or_default())
    }
    async fn write_file(&self, path: &str, data: Bytes, mode: Option<u32>) -> Result<()> {
        let mode = mode.map(|m| format!("&mode={:03o}", m & 0o7777)).unwrap_or_default();
        let query = format!("/files/content?path={}{mode}", coded(path));
        let request = self.client.request(Method::PUT, &self.at(&query)).body(data);
        let sent = self.client.send(request).await;
        sent.map(drop).map_err(|e| error(self.client.error(e)))
    }
    async fn write_file_from(
        &self,
        path: &str,
        data: &mut (dyn AsyncRead + Send + Unpin),
        mode: Option<u32>,
    ) -> Result<u64> {
        let mut all = Vec::new();
        let read = data.take(MAX_UPLOAD + 1).read_to_end(&mut all).await;
        read.map_err(|e| SandboxError::new(ErrorKind::Unavailable, e.to_string()))?;
        let bytes = all.len() as u64;
        if bytes > MAX_UPLOAD {
            return Err(SandboxError::new(ErrorKind::TooLarge, "a server takes files of at most 1 GiB"));
        }
        self.write_file(path, all.into(), mode).await?;
        Ok(bytes)
    }
    async fn unpack(&self, _: &str, _: &mut (dyn AsyncRead + Send + Unpin)) -> Result<u64> {
        unsupported("unpacking")
    }

    /// The API lists folders: a file is found in its own.
    async fn stat(&self, path: &str) -> Result<FileInfo> {
        let (folder, name) = match path.trim_end_matches('/').rsplit_once('/') {
            Some(("", name)) => ("/", name),
            Some((folder, name)) => (folder, name),
            None => (".", path),
        };
        if name.is_empty() {
            let root = FileInfo {
                name: "/".into(),
                kind: FileKind::Dir,
                size: 0,
                mode: 0o755,
                modified: Timestamp(0),
                symlink_target: None,
            };
            return Ok(root);
        }
        let found = self.list_files(folder).await?.into_iter().find(|f| f.name == name);
        found.ok_or_else(|| SandboxError::new(ErrorKind::NotFound, format!("there is no {path}")))
    }
    async fn list_files(&self, path: &str) -> Result<Vec<FileInfo>> {
        let mut all = vec![];
        let mut after = String::new();
        loop {
            let query = format!("/files?path={}&limit={PAGE}{after}", coded(path));
            let page: dto::Folder = self.client.get(&self.at(&query)).await.map_err(error)?;
            for f in page.files {
                let mode = u32::from_str_radix(&f.mode, 8).unwrap_or(0);
                all.push(FileInfo {
                    name: f.name,
                    kind: f.kind.into(),
                    size: f.size,
                    mode,
                    modified: Timestamp(f.modified_at),
                    symlink_target: f.symlink_target,
                });
            }
            match page.next_cursor {
                Some(cursor) => after = format!("&cursor={}", coded(&cursor)),
                None => return Ok(all),
            }
        }
    }
    async fn remove(&self, path: &str, recursive: bool) -> Result<()> {
        let query = format!("/files?path={}&recursive={recursive}", coded(path));
        let request = self.client.request(Method::DELETE, &self.at(&query));
        self.client.send(request).await.map(drop).map_err(|e| error(self.client.error(e)))
    }
    async fn make_dir(&self, _: &str) -> Result<()> {
        unsupported("making a folder")
    }

    async fn glob(&self, _: GlobRequest) -> Result<Vec<String>> {
        unsupported("glob")
    }
    async fn grep(&self, _: GrepRequest) -> Result<GrepResult> {
        unsupported("grep")
    }
    async fn git_export(&self, _: GitExport) -> Result<WorkDiff> {
        unsupported("an export")
    }

    async fn stats(&self) -> Result<Stats> {
        let s: dto::Stats = self.client.get(&self.at("/stats")).await.map_err(error)?;
        Ok(Stats {
            memory_bytes: s.memory_bytes,
            cpu_percent: s.cpu_percent,
            disk_bytes: s.disk_bytes,
            network_rx_bytes: s.network_rx_bytes,
            network_tx_bytes: s.network_tx_bytes,
            processes: s.processes,
        })
    }
    async fn health(&self) -> Result<Health> {
        let h: dto::SandboxHealth = self.client.get(&self.at("/health")).await.map_err(error)?;
        Ok(Health { healthy: h.healthy, detail: h.detail })
    }

    async fn snapshot(&self, id: &SnapshotId, _: &Labels) -> Result<SnapshotInfo> {
        let made = self.client.post(&self.at("/snapshot"), &json!({ "id": id })).await.map_err(error)?;
        snapshot(made)
    }
    async fn pause(&self) -> Result<()> {
        self.do_it("/pause").await
    }
    async fn resume(&self) -> Result<()> {
        self.do_it("/resume").await
    }
}
