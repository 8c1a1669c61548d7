//! Isolated environments: one pair of traits, several providers.
//!
//! A [`Provider`] makes, finds and destroys sandboxes; a [`Sandbox`] is a live connection to one. Paths are always
//! resolved inside the sandbox, by the guest, never by string checks on the host.

pub mod bench;
mod bounds;
pub mod conformance;
pub mod docker;
pub mod egress;
mod egress_seam;
mod error;
mod exec;
pub mod guest_client;
pub mod here;
pub mod local;
mod lock;
pub mod owner;
mod traits;
mod volumes;

use std::time::SystemTime;

use forkyard_core::Timestamp;

pub use egress_seam::{EgressCounters, EgressFactory, EgressHandle, InsideFile, PROXY_ADDRESS};
pub use error::{ErrorKind, SandboxError};
pub use exec::{Exec, ExecControl, ExecEvent, ExecEvents, ExecRequest, ExecResult, PtySize, Signal};
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

pub(crate) fn now() -> Timestamp {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    Timestamp(u64::try_from(since.as_millis()).unwrap_or(u64::MAX))
}

/// Clock ticks from the machine's start to the birth of a process: with them, its number means no other one. None if it is gone,
/// also if only its parent has not seen that yet.
pub(crate) fn born(pid: u32) -> Option<u64> {
    birth(pid).ok().flatten()
}

/// The same, told apart from that nobody can look just now.
pub(crate) fn birth(pid: u32) -> std::io::Result<Option<u64>> {
    let stat = match std::fs::read_to_string(format!("/proc/{pid}/stat")) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound || e.raw_os_error() == Some(libc::ESRCH) => {
            return Ok(None);
        }
        read => read?,
    };
    let parse = || {
        // The name in parentheses may hold anything.
        let (_, after) = stat.rsplit_once(") ")?;
        let fields: Vec<&str> = after.split_ascii_whitespace().collect();
        (fields.first() != Some(&"Z")).then_some(())?;
        fields.get(19)?.parse().ok()
    };
    Ok(parse())
}

pub type Result<T, E = SandboxError> = std::result::Result<T, E>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whoever_has_ended_has_no_birth() {
        assert!(born(std::process::id()).is_some());
        let mut child = std::process::Command::new("sleep").arg("600").spawn().unwrap();
        assert!(born(child.id()) >= born(std::process::id()));
        child.kill().unwrap();
        let stat = format!("/proc/{}/stat", child.id());
        while !std::fs::read_to_string(&stat).unwrap().contains(") Z ") {
            std::thread::yield_now();
        }
        assert_eq!(born(child.id()), None, "it waits for its parent, and is at nothing");
        child.wait().unwrap();
        assert_eq!(born(child.id()), None);
    }
}
