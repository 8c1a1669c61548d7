//! The two traits. Everything a provider shares with others (guest protocol, retries, spools) lives outside of them.

use async_trait::async_trait;
use bytes::Bytes;
use forkyard_core::sandbox::LimitsOverride;
use forkyard_core::{Attempt, CallId, SandboxId, SnapshotId, Timestamp};
use serde::{Deserialize, Serialize};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::AsyncRead;
use tokio_util::sync::CancellationToken;

use crate::{
    Achieved, Capabilities, ErrorKind, Exec, ExecRequest, Labels, Lifetime, Limits, NetworkSpec,
    ProviderKind, Result, SandboxError, SandboxSpec,
};

/// The longest that commands are frozen for a snapshot; a checkpoint that would take longer is made without one.
pub(crate) const FREEZE: Duration = Duration::from_secs(1);

/// What is said then.
pub(crate) fn stands_too_long() -> SandboxError {
    let message = "what changed can't be copied in the time that the sandbox may stand still";
    SandboxError::new(ErrorKind::Timeout, message).hint("take the snapshot while no command runs")
}

/// In whose place somebody connects to a sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Tie {
    Owner,
    Beside,
    Onlooker,
}

impl Tie {
    /// Does this connection offer the sandbox its way out?
    pub(crate) fn serves(self, network: &NetworkSpec) -> bool {
        match self {
            Tie::Owner => true,
            Tie::Beside => !network.internal,
            Tie::Onlooker => false,
        }
    }
}

/// Makes, finds and ends sandboxes.
#[async_trait]
pub trait Provider: Send + Sync {
    fn capabilities(&self) -> Capabilities;

    /// Idempotent by `id`: a second call attaches to what the first one made, under the newer attempt.
    async fn create(&self, id: &SandboxId, attempt: Attempt, spec: &SandboxSpec) -> Result<Arc<dyn Sandbox>>;

    /// Connects to a live sandbox. From then on an older attempt is refused there with [`crate::ErrorKind::Stale`].
    async fn attach(&self, id: &SandboxId, attempt: Attempt) -> Result<Arc<dyn Sandbox>>;

    /// Connects beside the owner. Where an agent inside depends on the owner's proxy, this connection offers none: a request
    /// that came by it would end with it.
    async fn attach_beside(&self, id: &SandboxId, attempt: Attempt) -> Result<Arc<dyn Sandbox>> {
        self.attach(id, attempt).await
    }

    /// Connects to look: for figures and files. It never offers a proxy, so nothing inside comes to depend on it, however
    /// long it is held.
    async fn observe(&self, id: &SandboxId, attempt: Attempt) -> Result<Arc<dyn Sandbox>> {
        self.attach_beside(id, attempt).await
    }

    /// Those that carry all the given labels.
    async fn list(&self, labels: &Labels) -> Result<Vec<SandboxInfo>>;

    /// What it was asked to be. None where only the provider itself makes children of it, see
    /// [`Provider::make_children`].
    async fn spec(&self, _id: &SandboxId) -> Result<Option<SandboxSpec>> {
        Ok(None)
    }

    /// For a provider that makes children by itself, under names of its own: as many, like their parent but
    /// for the limits that are given.
    async fn make_children(
        &self,
        _parent: &SandboxId,
        _count: usize,
        _lifetime: Lifetime,
        _limits: LimitsOverride,
    ) -> Result<Vec<SandboxId>> {
        Err(SandboxError::new(ErrorKind::Unsupported, "this provider does not make children by itself"))
    }

    /// Ends it and removes everything of it. Ok if it is gone already.
    async fn destroy(&self, id: &SandboxId) -> Result<()>;

    /// Ends its processes and keeps its files.
    async fn stop(&self, id: &SandboxId) -> Result<()>;
    /// Starts it again on the files that it had.
    async fn start(&self, id: &SandboxId, attempt: Attempt) -> Result<Arc<dyn Sandbox>>;

    /// Those that can be used.
    async fn snapshots(&self) -> Result<Vec<SnapshotInfo>>;
    /// The same with their sizes, as far as they can be told in a moment: to show them.
    async fn measured_snapshots(&self) -> Result<Vec<SnapshotInfo>> {
        self.snapshots().await
    }
    /// Those whose record can't be read, and why: there to be removed.
    async fn damaged_snapshots(&self) -> Result<Vec<(SnapshotId, SandboxError)>> {
        Ok(Vec::new())
    }
    /// Ok if it is gone already; children that use it keep working.
    async fn remove_snapshot(&self, id: &SnapshotId) -> Result<()>;
    async fn export_snapshot(&self, id: &SnapshotId, to: &Path) -> Result<()>;
    /// The archive is hostile input. `image`: the one that it may start from, where archives only name theirs; None: the
    /// provider's default.
    async fn import_snapshot(
        &self,
        id: &SnapshotId,
        from: &Path,
        image: Option<&str>,
    ) -> Result<SnapshotInfo>;

    /// Images that were prepared for sandboxes, that nobody has used for `age` (or for as long as the provider keeps them at
    /// least), and that neither a sandbox stands on nor a snapshot, if `without` were gone. With `remove` they go; the answer
    /// names those that went.
    async fn unused_images(
        &self,
        _age: Duration,
        _without: &[SnapshotId],
        _remove: bool,
    ) -> Result<Vec<UnusedImage>> {
        Ok(Vec::new())
    }
    /// Removes what crashes left behind, and sandboxes past their deadline. Safe beside other processes.
    async fn sweep(&self) -> Result<()>;
    /// For processes that stay: keeps sandboxes ready for `create` until `stop`, where the provider does such a thing and was
    /// told to. Nothing of it is left when it ends.
    async fn keep_ready(&self, _stop: CancellationToken) {}
    /// Waits until what was destroyed is gone from the disk too.
    async fn settle(&self) {}
    /// Waits until what was destroyed will go without this process too: for one that ends.
    async fn leave(&self) {
        self.settle().await;
    }
}

/// A connection to one live sandbox under one attempt.
#[async_trait]
pub trait Sandbox: Send + Sync {
    fn id(&self) -> &SandboxId;
    fn attempt(&self) -> Attempt;
    async fn info(&self) -> Result<SandboxInfo>;

    async fn exec(&self, request: ExecRequest) -> Result<Exec>;
    /// The journal has the call's result: the guest may drop its spool.
    async fn forget(&self, call: &CallId) -> Result<()>;
    /// Calls that the guest knows, running or finished and not forgotten.
    async fn calls(&self) -> Result<Vec<CallId>>;

    /// At most `max` bytes from `offset`; only regular files (a FIFO or a device is `Invalid`).
    async fn read_file(&self, path: &str, offset: u64, max: u64) -> Result<Bytes>;
    /// Creates parents; replaces the file as a whole (a temporary file, then rename).
    async fn write_file(&self, path: &str, data: Bytes, mode: Option<u32>) -> Result<()>;
    /// For what does not fit into memory.
    async fn write_file_from(
        &self,
        path: &str,
        data: &mut (dyn AsyncRead + Send + Unpin),
        mode: Option<u32>,
    ) -> Result<u64>;
    /// Files and symbolic links of a tar archive, into a folder that is made if it is missing. What is in the place of an entry
    /// is replaced; an entry that would lead outside of the folder is `Invalid`.
    async fn unpack(&self, dir: &str, archive: &mut (dyn AsyncRead + Send + Unpin)) -> Result<u64>;
    /// Does not follow a symlink in the last part.
    async fn stat(&self, path: &str) -> Result<FileInfo>;
    async fn list_files(&self, path: &str) -> Result<Vec<FileInfo>>;
    async fn remove(&self, path: &str, recursive: bool) -> Result<()>;
    async fn make_dir(&self, path: &str) -> Result<()>;

    async fn glob(&self, request: GlobRequest) -> Result<Vec<String>>;
    async fn grep(&self, request: GrepRequest) -> Result<GrepResult>;
    /// What the files of a git work tree inside differ in from a commit; see [`GitExport`].
    async fn git_export(&self, export: GitExport) -> Result<WorkDiff>;

    async fn stats(&self) -> Result<Stats>;
    async fn health(&self) -> Result<Health>;

    /// Freezes the file system under `id`; Ok with the first result if that id exists.
    async fn snapshot(&self, id: &SnapshotId, labels: &Labels) -> Result<SnapshotInfo>;
    async fn pause(&self) -> Result<()>;
    async fn resume(&self) -> Result<()>;
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct SandboxInfo {
    pub id: SandboxId,
    pub provider: ProviderKind,
    pub status: SandboxStatus,
    pub attempt: Attempt,
    pub labels: Labels,
    pub limits: Limits,
    pub achieved: Achieved,
    pub created_at: Timestamp,
    pub deadline: Timestamp,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SandboxStatus {
    Running,
    Paused,
    Stopped,
    /// Its processes are gone (deadline, crash) and its files wait for cleanup.
    Dead,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SnapshotInfo {
    pub id: SnapshotId,
    pub provider: ProviderKind,
    pub mode: SnapshotMode,
    pub labels: Labels,
    pub created_at: Timestamp,
    /// What it takes on the disk. What it shares with an older one counts there, and what is its image's not at all.
    pub bytes: Option<u64>,
}

/// An image that can be prepared again when it is wanted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnusedImage {
    pub name: String,
    /// What goes with it.
    pub bytes: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SnapshotMode {
    /// The layer was sealed: no command ran.
    Sealed,
    /// Commands ran: they were frozen and what changed was copied.
    Copied,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileInfo {
    /// Raw bytes would not survive JSON: names that are not UTF-8 have their bytes escaped as `\xNN`.
    pub name: String,
    pub kind: FileKind,
    pub size: u64,
    pub mode: u32,
    pub modified: Timestamp,
    pub symlink_target: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FileKind {
    File,
    Dir,
    Symlink,
    Other,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct GlobRequest {
    pub pattern: String,
    /// `/workspace` if None. Answers are sorted and relative to it.
    pub path: Option<String>,
    pub max: usize,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct GrepRequest {
    pub pattern: String,
    pub path: Option<String>,
    /// Only files that match.
    pub glob: Option<String>,
    pub ignore_case: bool,
    pub max: usize,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct GrepResult {
    pub matches: Vec<GrepMatch>,
    pub truncated: bool,
    /// Files with a line that is too long to be searched: what follows it was not searched either.
    #[serde(default)]
    pub unsearched: Vec<String>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct GrepMatch {
    pub path: String,
    pub line: u64,
    pub text: String,
}

/// Compares the not-ignored files of `repo` with `base` (what the host knows of the base commit's tree) and answers with the
/// blobs that differ. The guest does it with its own code: no git of the image, no hook, filter or config of the tree is run,
/// and the host builds trees and commits itself, in a quarantine repository.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct GitExport {
    /// `/workspace` if None.
    pub repo: Option<String>,
    pub base: Vec<TreeEntry>,
    /// More than this is [`crate::ErrorKind::TooLarge`].
    pub max_bytes: u64,
    pub max_files: u64,
}

/// A blob of a git tree: mode 100644, 100755 or 120000, and its SHA-1 in hex.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TreeEntry {
    pub path: String,
    pub mode: u32,
    pub oid: String,
}

/// What differs from the base. Paths are relative, in order, and come from inside: the host checks them before use.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct WorkDiff {
    pub changed: Vec<ChangedFile>,
    pub deleted: Vec<String>,
    /// Paths that git can't hold (odd bytes, sockets, too deep), left out and named.
    pub skipped: Vec<String>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChangedFile {
    pub path: String,
    pub mode: u32,
    pub data: Bytes,
}

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Stats {
    pub memory_bytes: u64,
    /// Percent of one CPU since the last question.
    pub cpu_percent: f64,
    pub disk_bytes: u64,
    pub network_rx_bytes: u64,
    pub network_tx_bytes: u64,
    pub processes: u32,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Health {
    pub healthy: bool,
    pub detail: String,
}
