//! Isolated environments: one pair of traits, several providers.
//!
//! A [`Provider`] makes, finds and destroys sandboxes; a [`Sandbox`] is a live connection to one. Paths are always
//! resolved inside the sandbox, by the guest, never by string checks on the host.

pub mod bench;
pub mod conformance;
pub mod docker;
pub mod egress;
mod egress_seam;
mod error;
mod exec;
pub mod guest_client;
pub mod here;
pub mod local;
mod traits;

pub use egress_seam::{EgressCounters, EgressFactory, EgressHandle, InsideFile, PROXY_ADDRESS};
pub use error::{ErrorKind, SandboxError};
pub use exec::{Exec, ExecControl, ExecEvent, ExecRequest, ExecResult, PtySize, Signal};
pub use forkyard_core::sandbox::{
    Achieved, Capabilities, ForkCost, Labels, Lifetime, LimitMeans, Limits, LimitsOverride, NetworkMode,
    NetworkSpec, ProviderKind, Root, SandboxSpec, Secret, Volume,
};
pub use traits::{
    ChangedFile, FileInfo, FileKind, GitExport, GlobRequest, GrepMatch, GrepRequest, GrepResult, Health,
    Provider, Sandbox, SandboxInfo, SandboxStatus, SnapshotInfo, SnapshotMode, Stats, TreeEntry, UnusedImage,
    WorkDiff,
};

/// Of the files in a folder of this machine, as far as they can be seen; a link counts as itself.
pub fn bytes_in(dir: &std::path::Path) -> u64 {
    let mut bytes = 0;
    let mut dirs = vec![dir.to_path_buf()];
    while let Some(dir) = dirs.pop() {
        for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
            match entry.metadata() {
                Ok(m) if m.is_dir() => dirs.push(entry.path()),
                Ok(m) => bytes += m.len(),
                Err(_) => {}
            }
        }
    }
    bytes
}

pub type Result<T, E = SandboxError> = std::result::Result<T, E>;
