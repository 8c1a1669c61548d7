//! Sandboxes, and what is done in them.

use std::collections::BTreeMap;

use forkyard_engine::sandboxes::types;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use super::mirror;
use super::run::{NetworkMode, Provider};

mirror!(SandboxStatus of types::SandboxStatus, "snake_case" { Running, Paused, Stopped, Dead });
mirror!(LimitMeans of types::LimitMeans, "snake_case" { Kernel, Watchdog, None });
mirror!(FileKind of types::FileKind, "snake_case" { File, Dir, Symlink, Other });
mirror!(SnapshotMode of types::SnapshotMode, "snake_case" { Sealed, Copied });

/// One isolated environment.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct Sandbox {
    pub id: String,
    pub provider: Provider,
    pub status: SandboxStatus,
    pub attempt: u32,
    /// Of a run: `run`, `fork`, `attempt`, `role`.
    pub labels: BTreeMap<String, String>,
    pub limits: Limits,
    pub achieved: Achieved,
    /// Milliseconds since 1970.
    pub created_at: u64,
    /// It ends by itself then.
    pub deadline: u64,
}

#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct Limits {
    pub memory_bytes: u64,
    pub cpus: f64,
    pub disk_bytes: u64,
    pub processes: u32,
    pub network_bytes_per_s: Option<u64>,
}

impl From<types::Limits> for Limits {
    fn from(l: types::Limits) -> Limits {
        Limits {
            memory_bytes: l.memory_bytes,
            cpus: l.cpus,
            disk_bytes: l.disk_bytes,
            processes: l.processes,
            network_bytes_per_s: l.network_bytes_per_s,
        }
    }
}

/// By what means each limit holds.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct Achieved {
    pub memory: LimitMeans,
    pub cpu: LimitMeans,
    pub disk: LimitMeans,
    pub processes: LimitMeans,
    pub network: LimitMeans,
    /// Isolation layers in force.
    pub layers: Vec<String>,
}

impl From<types::SandboxInfo> for Sandbox {
    fn from(i: types::SandboxInfo) -> Sandbox {
        Sandbox {
            id: i.id.to_string(),
            provider: i.provider.into(),
            status: i.status.into(),
            attempt: i.attempt.0,
            labels: i.labels,
            limits: i.limits.into(),
            achieved: Achieved {
                memory: i.achieved.memory.into(),
                cpu: i.achieved.cpu.into(),
                disk: i.achieved.disk.into(),
                processes: i.achieved.processes.into(),
                network: i.achieved.network.into(),
                layers: i.achieved.layers,
            },
            created_at: i.created_at.0,
            deadline: i.deadline.0,
        }
    }
}

#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct SandboxPage {
    pub sandboxes: Vec<Sandbox>,
    /// For the next page; null at the end.
    pub next_cursor: Option<String>,
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct ListSandboxes {
    /// Only those of this run.
    pub run: Option<String>,
    #[param(minimum = 1, maximum = 500)]
    pub limit: Option<u32>,
    /// `next_cursor` of the page before.
    pub cursor: Option<String>,
}

/// How a sandbox is made. What is left out is as the server's settings say.
#[derive(Debug, Default, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct CreateSandbox {
    /// Its name; making it twice is making it once.
    #[schema(pattern = "^[a-z0-9]{1,63}$")]
    pub id: Option<String>,
    pub provider: Option<Provider>,
    pub image: Option<String>,
    pub snapshot: Option<String>,
    pub memory_bytes: Option<u64>,
    pub cpus: Option<f64>,
    pub disk_bytes: Option<u64>,
    pub processes: Option<u32>,
    pub env: Option<BTreeMap<String, String>>,
    pub strict: Option<bool>,
    /// A disk of its own for the sandbox, whose limit the kernel keeps.
    pub disk_image: Option<bool>,
    pub network: Option<NetworkMode>,
    pub allow: Option<Vec<String>>,
    pub no_default_allow: Option<bool>,
    /// Names of secrets of the server's configuration.
    pub secrets: Option<Vec<String>>,
    /// Bytes a second and direction.
    pub network_bytes_per_s: Option<u64>,
    /// It ends by itself after this time; two hours if it is not said.
    #[schema(minimum = 1000, maximum = 604800000)]
    pub lifetime_ms: Option<u64>,
}

/// A command to run. Nothing is joined into a shell's string.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ExecRequest {
    /// The program and its arguments.
    #[schema(min_items = 1)]
    pub command: Vec<String>,
    /// Inside; /workspace if it is not said.
    #[serde(default)]
    pub cwd: Option<String>,
    #[serde(default)]
    pub env: BTreeMap<String, String>,
    /// Exit code 124 when it passes; five minutes if it is not said, a day at most.
    #[serde(default)]
    #[schema(minimum = 1, maximum = 86400000)]
    pub timeout_ms: Option<u64>,
    /// What it reads.
    #[serde(default)]
    pub stdin: Option<String>,
}

#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct ExecResult {
    /// 128 + n for a signal, 124 for the timeout.
    pub exit_code: i32,
    pub timed_out: bool,
    /// Killed for memory.
    pub oom_killed: bool,
    pub duration_ms: u64,
    /// Output beyond the bound was dropped.
    pub truncated: bool,
    /// With what is not UTF-8 replaced; `exec/stream` has the bytes. Absent in a stream.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub stdout: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub stderr: Option<String>,
}

impl From<types::ExecResult> for ExecResult {
    fn from(r: types::ExecResult) -> ExecResult {
        ExecResult {
            exit_code: r.exit_code,
            timed_out: r.timed_out,
            oom_killed: r.oom_killed,
            duration_ms: r.duration.as_millis() as u64,
            truncated: r.truncated,
            stdout: None,
            stderr: None,
        }
    }
}

#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct Stats {
    pub memory_bytes: u64,
    /// Percent of one CPU since the last question.
    pub cpu_percent: f64,
    pub disk_bytes: u64,
    pub network_rx_bytes: u64,
    pub network_tx_bytes: u64,
    pub processes: u32,
}

impl From<types::Stats> for Stats {
    fn from(s: types::Stats) -> Stats {
        Stats {
            memory_bytes: s.memory_bytes,
            cpu_percent: s.cpu_percent,
            disk_bytes: s.disk_bytes,
            network_rx_bytes: s.network_rx_bytes,
            network_tx_bytes: s.network_tx_bytes,
            processes: s.processes,
        }
    }
}

/// What a sandbox used at one time.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct Sample {
    /// Milliseconds since 1970.
    pub at: u64,
    #[serde(flatten)]
    pub stats: Stats,
}

/// What a sandbox used, as far as this server remembers: every few seconds while it ran, about an hour back.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct StatsHistory {
    /// It runs now.
    pub running: bool,
    /// Null if this server has never seen it.
    pub limits: Option<Limits>,
    /// Oldest first.
    pub samples: Vec<Sample>,
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct ReadHistory {
    /// Only samples after this time, in milliseconds since 1970.
    pub after: Option<u64>,
}

#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct SandboxHealth {
    pub healthy: bool,
    pub detail: String,
}

/// Of one among all: what it uses and how it is, or why that is not known.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct SandboxStats {
    pub sandbox_id: String,
    pub healthy: bool,
    pub detail: String,
    pub stats: Option<Stats>,
}

#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct AllStats {
    pub sandboxes: Vec<SandboxStats>,
}

#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct FileEntry {
    /// Bytes that are not UTF-8 are escaped as `\xNN`.
    pub name: String,
    pub kind: FileKind,
    pub size: u64,
    /// In octal.
    pub mode: String,
    pub modified_at: u64,
    pub symlink_target: Option<String>,
}

impl From<types::FileInfo> for FileEntry {
    fn from(f: types::FileInfo) -> FileEntry {
        FileEntry {
            name: f.name,
            kind: f.kind.into(),
            size: f.size,
            mode: format!("{:04o}", f.mode & 0o7777),
            modified_at: f.modified.0,
            symlink_target: f.symlink_target,
        }
    }
}

#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct Folder {
    pub path: String,
    pub files: Vec<FileEntry>,
    /// For the next page; null at the end.
    pub next_cursor: Option<String>,
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct ListFiles {
    /// /workspace if it is not said.
    pub path: Option<String>,
    #[param(minimum = 1, maximum = 500)]
    pub limit: Option<u32>,
    /// `next_cursor` of the page before.
    pub cursor: Option<String>,
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct ReadFile {
    pub path: String,
    pub offset: Option<u64>,
    /// At most 32 MiB, which is also what it is if it is not said.
    #[param(minimum = 1, maximum = 33554432)]
    pub length: Option<u64>,
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct WriteFile {
    pub path: String,
    /// In octal, such as 755.
    #[param(pattern = "^[0-7]{3,4}$")]
    pub mode: Option<String>,
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct RemoveFile {
    pub path: String,
    /// With all that is in it.
    pub recursive: Option<bool>,
}

#[derive(Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct SnapshotRequest {
    /// Its name; one that nobody has if it is not said.
    #[schema(pattern = "^[a-z0-9]{1,63}$")]
    pub id: Option<String>,
}

#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct Snapshot {
    pub id: String,
    pub provider: Provider,
    /// `copied`: commands ran.
    pub mode: SnapshotMode,
    /// Of a run: `run` and what else it knows.
    pub labels: BTreeMap<String, String>,
    pub created_at: u64,
    /// What it takes on the disk, where that is known: what it shares with an older one counts there.
    pub bytes: Option<u64>,
}

impl From<types::SnapshotInfo> for Snapshot {
    fn from(i: types::SnapshotInfo) -> Snapshot {
        Snapshot {
            id: i.id.to_string(),
            provider: i.provider.into(),
            mode: i.mode.into(),
            labels: i.labels,
            created_at: i.created_at.0,
            bytes: i.bytes,
        }
    }
}

#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct Snapshots {
    /// Oldest first.
    pub snapshots: Vec<Snapshot>,
}

#[derive(Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct ForkSandbox {
    /// How many children; one if it is not said.
    #[schema(minimum = 1, maximum = 100)]
    pub count: Option<u32>,
    /// Of each child; as its parent's if it is not said, like the other limits.
    pub memory_bytes: Option<u64>,
    pub cpus: Option<f64>,
    pub disk_bytes: Option<u64>,
    pub processes: Option<u32>,
    /// Bytes a second and direction.
    pub network_bytes_per_s: Option<u64>,
    #[schema(minimum = 1000, maximum = 604800000)]
    pub lifetime_ms: Option<u64>,
}

#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct Children {
    pub parent: String,
    pub sandboxes: Vec<String>,
}
