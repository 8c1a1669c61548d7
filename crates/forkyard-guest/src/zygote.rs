//! What the local provider and its zygote say to each other: JSON, one SEQPACKET message each, descriptors beside it.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Largest message either way; a sandbox's environment and layers fit many times.
pub const MAX_MESSAGE: usize = 192 << 10;

/// What of the host's /etc a sandbox sees: how programs are found, linked and localised, and whom TLS trusts. Never accounts,
/// keys, tokens or the settings of services.
pub const ETC: &[&str] = &[
    "alternatives",
    "bash.bashrc",
    "ca-certificates",
    "ca-certificates.conf",
    "crypto-policies",
    "debian_version",
    "fonts",
    "gai.conf",
    "host.conf",
    "inputrc",
    "issue",
    "java",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "localtime",
    "locale.conf",
    "lsb-release",
    "magic",
    "maven",
    "mime.types",
    "netconfig",
    "os-release",
    "perl",
    "pki",
    "protocols",
    "python3",
    "rpc",
    "services",
    "shells",
    "ssl",
    "terminfo",
    "timezone",
    "vim",
    "xattr.conf",
    "xdg",
];

/// The first message, once. Comes before any sandbox.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Start {
    /// Absolute path of the provider's state folder on the host.
    pub state: String,
    /// As root: the unprivileged id that everything of the sandboxes belongs to.
    pub become_id: Option<u32>,
    /// Host trees that every sandbox of the default root sees, read-only.
    pub binds: Vec<Bind>,
    /// A name for all that the skeleton is made of: one that is there is used as it is.
    pub skeleton: String,
    /// Extra files of the skeleton, by absolute path inside. Content is read from `state/skeleton/<name>.files/<index>`.
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
    /// Descriptors: setup channel (SEQPACKET, brings one [`Groups`] and gets one [`Ready`]), control connection, listening
    /// control socket, then (if `group`) the directory of its group, then the disk's mount (if the root has one), then the
    /// directory's (likewise), then one mount per volume.
    Sandbox(Box<SandboxAsk>),
    /// Descriptors: result channel, the directory's mount (if the root has one), those of [`RestackAsk`]. Makes a root and puts
    /// it under the sandbox; if that is not one of this zygote, the root's mount comes with the result instead.
    Restack { root: RootAsk, ask: RestackAsk },
    /// Descriptors: result channel. Work on files of sandboxes, with rights over whatever modes they gave themselves.
    Work(Work),
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct SandboxAsk {
    pub root: RootAsk,
    pub hostname: String,
    /// Of the user inside.
    pub id: u32,
    pub env: BTreeMap<String, String>,
    pub deadline_ms: u64,
    pub attempt: u32,
    pub processes: u32,
    /// There is one group to be born in; where the kernel refuses that, it is joined.
    pub group: bool,
    /// Size of /dev/shm.
    pub shm_bytes: u64,
    /// Loopback port of the proxy's listening socket.
    pub proxy_port: Option<u16>,
}

/// To a clone on its setup channel: groups that it is not born in are made while it sets itself up, and joined last.
/// Descriptors: the `tasks` or `cgroup.procs` files to join, then (if `oom_events`) the file with the kernel's count of memory
/// kills, then (if `freezer`) the `cgroup.threads`, `cgroup.freeze` and `cgroup.events` of the commands' own group.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Groups {
    pub oom_events: bool,
    pub freezer: bool,
    /// Enforced by the guest because the machine can't.
    pub watch: Watch,
}

/// Paths are relative to the state folder.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct RootAsk {
    /// `upper` and `work` lie on a disk of the sandbox's own, whose mount comes as a descriptor, and are relative to it.
    pub disk: bool,
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

/// Descriptors of a [`RestackAsk`] to a zygote.
pub const RESTACK_FDS: usize = 4;

/// A new root under a quiet sandbox. Descriptors: the sandbox's user and mount namespace, to a process of its own the root's
/// mount, then what is only held: the line that keeps it quiet and its lock. Answered by [`WorkResult`].
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct RestackAsk {
    /// As root: the id that the sandboxes have outside.
    pub become_id: Option<u32>,
    /// Where the sandbox's mounts are inside, host trees and volumes: they are carried over.
    pub mounts: Vec<String>,
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
    /// A layer as it is now; gives up after `limit_ms`. Without a path it is the directory that comes as a descriptor.
    Copy {
        from: Option<String>,
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
    /// After [`Start`]. `binds`: what sandboxes of the default root see of the host. `layers`: what isolates every sandbox.
    Up {
        binds: Vec<String>,
        layers: Vec<String>,
    },
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
    Up,
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
