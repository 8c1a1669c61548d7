//! The file system that a sandbox starts from: its own layer over sealed ones over the skeleton, an image or a directory.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use forkyard_guest::zygote::{RESTACK_FDS, RestackAsk, RootAsk, WorkResult};
use rustix::fs::{Mode, OFlags, ResolveFlags};

use super::reply;
use crate::sys::mount::{attach, overlay};
use crate::sys::process::unshare;
use crate::sys::{Failure, Result, Step};

/// The sandbox's root as a detached mount.
///
/// A directory of the host is attached at `/lower` to have a path: only for a process with a mount namespace of its own.
pub fn overlay_of(root: &RootAsk, skeleton: &str, directory: Option<OwnedFd>) -> Result<OwnedFd> {
    let mut lower: Vec<String> = root.lower.iter().map(|layer| format!("/state/{layer}")).collect();
    if let Some(directory) = directory {
        attach(directory, "/lower").step("directory")?;
        lower.push("/lower".into());
    }
    // The provider's files are below an image's own: it is the variables that lead to them.
    let part = if root.host_trees { "root" } else { "extra" };
    lower.push(format!("/state/skeleton/{skeleton}/{part}"));
    overlay(&own(root, &root.upper), &own(root, &root.work), &lower).step("overlay")
}

/// Where a part of the sandbox's own layer is.
pub fn own(root: &RootAsk, part: &str) -> String {
    if root.disk { format!("/disk/{part}") } else { format!("/state/{part}") }
}

/// Runs in a plain fork of the zygote: a root for a sandbox that lives already, and under it, if it is a sandbox of this zygote.
/// Of any other, the mount goes out with the result.
pub fn make(root: &RootAsk, ask: &RestackAsk, skeleton: &str, mut fds: Vec<OwnedFd>) {
    if fds.is_empty() {
        return;
    }
    let result = fds.remove(0);
    let mut made = || {
        // The last two are only held: whoever asked may be killed, and the sandbox must stay quiet and locked until this is
        // done.
        let held = fds.split_off(fds.len().saturating_sub(RESTACK_FDS));
        let directory = fds.pop();
        if directory.is_some() {
            unshare(libc::CLONE_NEWNS).step("mount namespace")?; // the zygote's own is shared
        }
        let made = overlay_of(root, skeleton, directory)?;
        let [user, mount, ..] = &held[..] else {
            return Err(Failure { step: "descriptors".into(), errno: libc::EINVAL });
        };
        match super::restack::enter(user.as_fd(), mount.as_fd()) {
            Ok(()) => super::restack::swap(ask, made).map(|()| None),
            Err(_) => Ok(Some(made)),
        }
    };
    match made() {
        Ok(mount) => {
            let mount: Vec<BorrowedFd<'_>> = mount.iter().map(|mount| mount.as_fd()).collect();
            reply(result.as_fd(), &WorkResult::Done { bytes: 0, entries: 0 }, &mount);
        }
        Err(Failure { step, errno }) => reply(result.as_fd(), &WorkResult::Failed { step, errno }, &[]),
    }
}

/// A directory in a root that is not ours, for something to be mounted on. Links on the way are refused.
pub fn make_below(root: BorrowedFd<'_>, path: &str) -> Result<()> {
    let mut dir = rustix::io::dup(root).step("mount point")?;
    for part in path.split('/').filter(|part| !part.is_empty()) {
        match rustix::fs::mkdirat(&dir, part, Mode::from_raw_mode(0o755)) {
            Ok(()) | Err(rustix::io::Errno::EXIST) => {}
            Err(e) => return Err(e).step("mount point"),
        }
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        dir = rustix::fs::openat2(&dir, part, flags, Mode::empty(), ResolveFlags::NO_SYMLINKS)
            .step("mount point")?;
    }
    Ok(())
}
