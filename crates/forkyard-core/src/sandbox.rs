//! What a sandbox is asked to be, and what it turned out to be: plain data, shared by run specifications and providers.

use std::collections::BTreeMap;

use crate::{Millis, SnapshotId};
use serde::{Deserialize, Serialize};

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ProviderKind {
    #[default]
    Local,
    Docker,
    E2b,
    Daytona,
}

/// What a provider can do, as data: callers ask before they rely on it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Capabilities {
    pub provider: ProviderKind,
    /// The sandbox outlives the process that made it and can be attached to by another.
    pub attach: bool,
    /// An older attempt is refused by the sandbox itself.
    pub fencing: bool,
    pub snapshot: bool,
    pub fork: ForkCost,
    pub pause: bool,
    pub start_stop: bool,
    pub pty: bool,
    pub volumes: bool,
    pub network_modes: Vec<NetworkMode>,
    /// Snapshots can be used on other hosts.
    pub snapshots_travel: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ForkCost {
    No,
    /// Copy-on-write: the same for an empty and a huge sandbox.
    Constant,
    /// Grows with what the sandbox holds.
    BySize,
}

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SandboxSpec {
    pub root: Root,
    pub limits: Limits,
    pub network: NetworkSpec,
    pub env: BTreeMap<String, String>,
    pub volumes: Vec<Volume>,
    pub labels: Labels,
    /// The sandbox ends by itself this long after its creation, whatever happens to its owner. Mandatory.
    pub lifetime: Lifetime,
    /// Refuse anything weaker than the kernel's own enforcement of a limit.
    pub strict: bool,
    /// A file system in a file of its own, so that the kernel keeps the disk limit where it could not else. Costs some speed, and
    /// snapshots are copies.
    // What does not ask for it reads as before, to older versions too.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub disk_image: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Lifetime(pub Millis);

impl Default for Lifetime {
    /// The default fork timeout and some room for collection.
    fn default() -> Self {
        Lifetime(Millis::minutes(180))
    }
}

/// Labels by which orphans are found; `run`, `fork`, `attempt` and `role` are Forkyard's own.
pub type Labels = BTreeMap<String, String>;

/// What the file system starts from.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Root {
    /// Generated skeleton plus the host's system directories, read-only (local); the configured image (docker).
    #[default]
    Default,
    /// A directory of the host, used as a read-only lower layer.
    Directory(String),
    /// An image: a registry reference, `oci:PATH` (layout) or `archive:PATH` (docker save).
    Image(String),
    /// A copy-on-write child of a snapshot.
    Snapshot(SnapshotId),
}

#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Limits {
    pub memory_bytes: u64,
    /// May be fractional.
    pub cpus: f64,
    pub disk_bytes: u64,
    pub processes: u32,
    /// Both directions, each; None is unlimited.
    pub network_bytes_per_s: Option<u64>,
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            memory_bytes: 4 << 30,
            cpus: 2.0,
            disk_bytes: 8 << 30,
            processes: 512,
            network_bytes_per_s: None,
        }
    }
}

/// Per-sandbox overrides; what is None keeps the default.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LimitsOverride {
    pub memory_bytes: Option<u64>,
    pub cpus: Option<f64>,
    pub disk_bytes: Option<u64>,
    pub processes: Option<u32>,
    pub network_bytes_per_s: Option<u64>,
}

impl Limits {
    pub fn with(self, o: LimitsOverride) -> Limits {
        Limits {
            memory_bytes: o.memory_bytes.unwrap_or(self.memory_bytes),
            cpus: o.cpus.unwrap_or(self.cpus),
            disk_bytes: o.disk_bytes.unwrap_or(self.disk_bytes),
            processes: o.processes.unwrap_or(self.processes),
            network_bytes_per_s: o.network_bytes_per_s.or(self.network_bytes_per_s),
        }
    }
}

/// By what means a limit holds, from the strongest to the weakest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LimitMeans {
    /// Cgroup, project quota, loop image, rlimit of the user namespace.
    Kernel,
    /// Forkyard looks and stops an offender within a second.
    Watchdog,
    /// Not limited; only where no limit was asked for.
    None,
}

/// What was achieved, recorded on the sandbox and shown to users.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Achieved {
    pub memory: LimitMeans,
    pub cpu: LimitMeans,
    pub disk: LimitMeans,
    pub processes: LimitMeans,
    pub network: LimitMeans,
    /// Isolation layers in force: `userns`, `seccomp`, `landlock` …
    pub layers: Vec<String>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum NetworkMode {
    /// Loopback only.
    None,
    /// Egress only through Forkyard's proxy, by the allow-list.
    #[default]
    Isolated,
    /// Any public address, through the same proxy.
    Bridge,
}

impl NetworkSpec {
    /// Whether the sandbox has a way to the proxy.
    pub fn has_proxy(&self) -> bool {
        self.mode != NetworkMode::None || self.internal
    }
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct NetworkSpec {
    pub mode: NetworkMode,
    /// `host`, `*.host`, `host:port`, `host:ro`; on top of the default list.
    pub allow: Vec<String>,
    /// Leave the default list out.
    pub no_default_allow: bool,
    /// Names of secrets that its requests may carry. Whoever serves its proxy knows what they are: a specification is written
    /// down, and their values are not.
    pub secrets: Vec<String>,
    /// Forkyard's own name is reached, also where nothing else is: for an agent that works inside.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub internal: bool,
}

/// Put into requests on the host, for the hosts it is bound to; it never enters the sandbox, and is never written down.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret {
    pub header: String,
    pub value: String,
    pub hosts: Vec<String>,
    pub methods: Vec<String>,
    pub path_prefixes: Vec<String>,
}

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Secret")
            .field("header", &self.header)
            .field("hosts", &self.hosts)
            .finish_non_exhaustive()
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Volume {
    pub host_path: String,
    pub path: String,
    #[serde(default)]
    pub writable: bool,
}
