//! What the local provider and its zygote say to each other: JSON, one SEQPACKET message each, descriptors beside it.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Largest message either way; a sandbox's environment and layers fit many times.
pub const MAX_MESSAGE: usize = 192 << 10;

/// The first message, once. Comes before any sandbox.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Start {
    /// Absolute path of the provider's state folder on the host.
    pub state: String,
    /// As root: the unprivileged id that everything of the sandboxes belongs to.
    pub become_id: Option<u32>,
    /// Host trees that every sandbox of the default root sees, read-only.
    pub binds: Vec<Bind>,
    /// Extra files of the skeleton, by absolute path inside: content is read from `state/skeleton/<index>`.
    pub files: Vec<SkeletonFile>,
}

/// `path` is the same outside and inside.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bind {
    pub path: String,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct SkeletonFile {
    pub path: String,
    pub index: usize,
    pub mode: u32,
}

/// Answered by [`Answer`]; what a request carries as descriptors is said at each.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case")]
pub enum Ask {
    /// Descriptors: setup channel (SEQPACKET, gets one [`Ready`]), control connection, listening control socket, then the
    /// `tasks` or `cgroup.procs` files to join, then (if `group`) the directory of the group that they are of, then (if `oom_events`) the file with the kernel's count of memory kills,
    /// then (if `freezer`) the `cgroup.threads`, `cgroup.freeze` and `cgroup.events` of the commands' own group, then the directory's mount (if the root has one), then one mount per volume.
    Sandbox(Box<SandboxAsk>),
    /// Descriptors: result channel, user and mount namespace, the directory's mount (if the root has one). Puts a new root under a quiet sandbox.
    Restack { root: RootAsk },
    /// Descriptors: result channel. Work on files of sandboxes, with rights over whatever modes they gave themselves.
    Work(Work),
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct SandboxAsk {
    pub root: RootAsk,
    pub hostname: String,
    pub env: BTreeMap<String, String>,
    pub deadline_ms: u64,
    pub attempt: u32,
    pub processes: u32,
    pub cgroups: usize,
    /// There is one group to be born in; where the kernel refuses that, it is joined.
    pub group: bool,
    /// Size of /dev/shm.
    pub shm_bytes: u64,
    pub oom_events: bool,
    pub freezer: bool,
    /// Loopback port of the proxy's listening socket.
    pub proxy_port: Option<u16>,
    /// Enforced by the guest because the machine can't.
    pub watch: Watch,
}

/// Paths are relative to the state folder.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct RootAsk {
    /// Name by which the guest knows its upper layer.
    pub layer: String,
    pub upper: String,
    pub work: String,
    /// Below the upper one, topmost first.
    pub lower: Vec<String>,
    /// The generated skeleton and the host's trees; else the layers are all there is.
    pub host_trees: bool,
    /// Below all layers lies a directory of the host, whose mount comes as the first descriptor of its own.
    pub directory: bool,
    /// Where volumes are inside; their mounts come as descriptors.
    pub volumes: Vec<String>,
    /// Where the guest may put what commands wrote, outside of the layers.
    pub spool: String,
}

/// To a process of its own: which folders of the host a sandbox gets.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct TreesAsk {
    pub trees: Vec<Tree>,
    /// As root: the id that the sandboxes have outside.
    pub shown_as: Option<u32>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Tree {
    /// Canonical: no part is a link.
    pub path: String,
    pub writable: bool,
    /// With what is mounted below it.
    pub below: bool,
}

/// Descriptors: a detached mount for each, in order.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "trees", rename_all = "snake_case")]
pub enum TreesAnswer {
    Done,
    /// The path, or the step that is needed for all of them.
    Failed {
        path: String,
        errno: i32,
    },
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Watch {
    pub memory_bytes: Option<u64>,
    pub cpus: Option<f64>,
    pub disk_bytes: Option<u64>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "work", rename_all = "snake_case")]
pub enum Work {
    Remove {
        path: String,
    },
    /// A layer as it is now; gives up after `limit_ms`.
    Copy {
        from: String,
        to: String,
        limit_ms: u64,
    },
    /// One layer that looks like `layers` stacked, topmost first.
    Merge {
        layers: Vec<String>,
        to: String,
    },
    Measure {
        path: String,
    },
    /// Descriptors: result channel, archive. See the archive module of the provider for the format.
    Pack {
        layer: String,
    },
    Unpack {
        layer: String,
        limits: UnpackLimits,
    },
    /// Descriptors: result channel, tar stream of one layer of an image.
    UnpackImage {
        layer: String,
        limits: UnpackLimits,
    },
}

#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct UnpackLimits {
    pub bytes: u64,
    pub entries: u64,
}

/// From the zygote itself.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "answer", rename_all = "snake_case")]
pub enum Answer {
    /// After [`Start`].
    Up,
    /// Descriptor: pidfd.
    Cloned {
        pid: i32,
    },
    Failed {
        step: String,
        errno: i32,
    },
}

/// From a sandbox on its setup channel. Descriptor: the proxy's listening socket, if asked for.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "ready", rename_all = "snake_case")]
pub enum Ready {
    Up { layers: Vec<String> },
    Failed { step: String, errno: i32 },
}

/// From a worker on its result channel.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "result", rename_all = "snake_case")]
pub enum WorkResult {
    Done {
        bytes: u64,
        entries: u64,
    },
    TimedOut,
    /// The archive breaks a rule; nothing of it is kept.
    Refused {
        reason: String,
    },
    Failed {
        step: String,
        errno: i32,
    },
}
