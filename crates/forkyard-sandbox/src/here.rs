//! The sandbox that this very process runs in. A guest of its own works beside it, so that tools act on the files and start
//! commands exactly as they do from outside, without the host's help.
//!
//! The guest outlives the process that started it: whoever comes next in the same sandbox takes its calls over.

use std::collections::BTreeMap;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use forkyard_core::{Attempt, CallId, SandboxId, SnapshotId};
use serde::{Deserialize, Serialize};
use tokio::io::AsyncRead;

use crate::guest_client::{GuestClient, health};
use crate::local::GUEST;
use crate::local::link::connect_now;
use crate::{
    ErrorKind, Exec, ExecRequest, FileInfo, GitExport, GlobRequest, GrepRequest, GrepResult, Health, Labels,
    Result, Sandbox, SandboxError, SandboxInfo, SnapshotInfo, Stats, WorkDiff,
};

/// Until a guest that was just started listens.
const START_WITHIN: Duration = Duration::from_secs(10);
const START_POLL: Duration = Duration::from_millis(10);
/// Until a guest that was told to end has closed its line.
const END_WITHIN: Duration = Duration::from_secs(5);
/// The sandbox around it ends long before.
const LIFETIME_MS: u64 = 30 * 24 * 3600 * 1000;

/// How a guest is found again.
#[derive(Serialize, Deserialize)]
struct Card {
    token: String,
}

/// What `FORKYARD_GUEST` tells the guest.
#[derive(Serialize)]
struct GuestConfig<'a> {
    token: &'a str,
    lifetime_ms: u64,
    attempt: u32,
    env: &'a BTreeMap<String, String>,
}

pub struct Here {
    id: SandboxId,
    attempt: Attempt,
    client: GuestClient,
}

fn failed(what: impl std::fmt::Display) -> SandboxError {
    SandboxError::new(ErrorKind::Unavailable, format!("the tools' guest: {what}"))
}

impl Here {
    /// Works in `dir`, a folder of the user. `env` is what commands get; `token` a secret that nobody else knows, for a guest
    /// that has to be started.
    pub async fn open(
        id: SandboxId,
        attempt: Attempt,
        dir: &Path,
        env: &BTreeMap<String, String>,
        token: String,
    ) -> Result<Arc<Here>> {
        let socket = dir.join("guest.sock");
        let card_path = dir.join("guest.json");
        let card = std::fs::read(&card_path).ok().and_then(|text| serde_json::from_slice::<Card>(&text).ok());
        if let Some(card) = card
            && let Ok(stream) = connect_now(&socket)
        {
            match GuestClient::connect(stream, attempt, Some(card.token)).await {
                Ok(client) => return Ok(Arc::new(Here { id, attempt, client })),
                Err(e) if e.kind == ErrorKind::Stale => return Err(e),
                // Somebody else's, or at its end: another is started.
                Err(_) => {}
            }
        }
        std::fs::create_dir_all(dir).map_err(failed)?;
        write_private(&card_path, &serde_json::to_vec(&Card { token: token.clone() }).map_err(failed)?)
            .map_err(failed)?;
        let program = dir.join("guest");
        place(&program).map_err(failed)?;
        // What an older one left; the new one makes its own.
        let _ = std::fs::remove_file(&socket);
        let config = GuestConfig { token: &token, lifetime_ms: LIFETIME_MS, attempt: attempt.0, env };
        let config = serde_json::to_string(&config).map_err(failed)?;
        let mut child = Command::new(&program)
            .arg("serve")
            .arg(&socket)
            .env_clear()
            .env("FORKYARD_GUEST", config)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            // It may outlive its starter, and would keep open what others read from that one.
            .stderr(Stdio::null())
            .spawn()
            .map_err(failed)?;
        let begin = tokio::time::Instant::now();
        loop {
            if let Ok(stream) = connect_now(&socket) {
                let client = GuestClient::connect(stream, attempt, Some(token)).await?;
                return Ok(Arc::new(Here { id, attempt, client }));
            }
            if let Some(status) = child.try_wait().map_err(failed)? {
                return Err(failed(format!("it ended with {status}")));
            }
            if begin.elapsed() > START_WITHIN {
                // It is of no use to anybody.
                let _ = child.kill();
                return Err(failed("it does not listen"));
            }
            tokio::time::sleep(START_POLL).await;
        }
    }

    /// Ends the calls that are still kept, those under way with all that they started, and then the guest. It is not pid 1 here:
    /// what commands left in the background ends with the sandbox.
    pub async fn close(&self) {
        let forgotten = async {
            for call in self.client.calls().await? {
                self.client.forget(&call).await?;
            }
            Ok::<_, SandboxError>(())
        };
        match tokio::time::timeout(END_WITHIN, forgotten).await {
            Ok(Ok(())) => {}
            Ok(Err(e)) => tracing::debug!("the tools' guest does not end its calls: {e}"),
            Err(_) => tracing::debug!("the tools' guest does not answer"),
        }
        self.client.shutdown();
        // Told only when it is gone: a process that ends at once takes what it has not written yet with it.
        let begin = tokio::time::Instant::now();
        while self.client.ended().is_none() && begin.elapsed() < END_WITHIN {
            tokio::time::sleep(START_POLL).await;
        }
    }
}

fn write_private(path: &Path, data: &[u8]) -> std::io::Result<()> {
    use std::io::Write;
    // Under another name first: a crash leaves no half of it.
    let temporary: PathBuf = path.with_extension("new");
    let _ = std::fs::remove_file(&temporary);
    let mut file = std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&temporary)?;
    file.write_all(data)?;
    std::fs::rename(&temporary, path)
}

/// The guest's program as a file.
fn place(path: &Path) -> std::io::Result<()> {
    write_private(path, GUEST)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o700))
}

fn from_outside() -> SandboxError {
    SandboxError::new(ErrorKind::Unsupported, "only whoever made the sandbox can do that, from outside of it")
}

#[async_trait]
impl Sandbox for Here {
    fn id(&self) -> &SandboxId {
        &self.id
    }
    fn attempt(&self) -> Attempt {
        self.attempt
    }
    async fn info(&self) -> Result<SandboxInfo> {
        Err(from_outside())
    }
    async fn exec(&self, request: ExecRequest) -> Result<Exec> {
        self.client.exec(request).await
    }
    async fn forget(&self, call: &CallId) -> Result<()> {
        self.client.forget(call).await
    }
    async fn calls(&self) -> Result<Vec<CallId>> {
        self.client.calls().await
    }
    async fn read_file(&self, path: &str, offset: u64, max: u64) -> Result<Bytes> {
        self.client.read_file(path, offset, max).await
    }
    async fn write_file(&self, path: &str, data: Bytes, mode: Option<u32>) -> Result<()> {
        self.client.write_file(path, data, mode).await
    }
    async fn write_file_from(
        &self,
        path: &str,
        data: &mut (dyn AsyncRead + Send + Unpin),
        mode: Option<u32>,
    ) -> Result<u64> {
        self.client.write_file_from(path, data, mode).await
    }
    async fn unpack(&self, dir: &str, archive: &mut (dyn AsyncRead + Send + Unpin)) -> Result<u64> {
        self.client.unpack(dir, archive).await
    }
    async fn stat(&self, path: &str) -> Result<FileInfo> {
        self.client.stat(path).await
    }
    async fn list_files(&self, path: &str) -> Result<Vec<FileInfo>> {
        self.client.list_files(path).await
    }
    async fn remove(&self, path: &str, recursive: bool) -> Result<()> {
        self.client.remove(path, recursive).await
    }
    async fn make_dir(&self, path: &str) -> Result<()> {
        self.client.make_dir(path).await
    }
    async fn glob(&self, request: GlobRequest) -> Result<Vec<String>> {
        self.client.glob(request).await
    }
    async fn grep(&self, request: GrepRequest) -> Result<GrepResult> {
        self.client.grep(request).await
    }
    async fn git_export(&self, export: GitExport) -> Result<WorkDiff> {
        self.client.git_export(export).await
    }
    async fn stats(&self) -> Result<Stats> {
        Err(from_outside())
    }
    async fn health(&self) -> Result<Health> {
        health(self.client.calls()).await
    }
    async fn snapshot(&self, _: &SnapshotId, _: &Labels) -> Result<SnapshotInfo> {
        Err(from_outside())
    }
    async fn pause(&self) -> Result<()> {
        Err(from_outside())
    }
    async fn resume(&self) -> Result<()> {
        Err(from_outside())
    }
}
