//! A new root under a quiet sandbox, made by a fork of the zygote. Its own sandboxes it can enter itself; for those of another
//! process's zygote there is a process in the host's namespaces: from there the owner of a sandbox's namespaces may enter them,
//! whoever cloned it. The namespaces come from the guest as descriptors, since it can't be looked into from outside.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::process::ExitCode;

use forkyard_guest::zygote::{MAX_MESSAGE, RestackAsk, WorkResult};
use rustix::fs::{AtFlags, CWD, Mode, OFlags, ResolveFlags, StatxAttributes, StatxFlags, openat2, statx};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use super::root::make_below;
use super::{receive, reply, take_socket};
use crate::sys::mount::{attach, attach_below, clone_tree_at, pivot_here};
use crate::sys::process::become_id;
use crate::sys::{Failure, Result, Step};

/// Mounts of every sandbox.
const OWN_MOUNTS: [&str; 2] = ["/proc", "/dev"];

pub fn run() -> ExitCode {
    let Ok(socket) = take_socket() else { return ExitCode::FAILURE };
    let mut buffer = vec![0; MAX_MESSAGE];
    let Some((ask, fds)) = receive::<RestackAsk>(socket.as_fd(), &mut buffer) else {
        return ExitCode::FAILURE;
    };
    // The last two are only held: whoever asked may be killed, and the sandbox must stay quiet and locked until this is done.
    let Ok([user, mount, root, _quiet, _lock]) = <[OwnedFd; 5]>::try_from(fds) else {
        return ExitCode::FAILURE;
    };
    let restacked = || -> Result<()> {
        if let Some(id) = ask.become_id {
            become_id(id).step("setuid")?;
        }
        enter(user.as_fd(), mount.as_fd())?;
        swap(&ask, root)
    };
    let outcome = match restacked() {
        Ok(()) => WorkResult::Done { bytes: 0, entries: 0 },
        Err(Failure { step, errno }) => WorkResult::Failed { step, errno },
    };
    reply(socket.as_fd(), &outcome, &[]);
    ExitCode::SUCCESS
}

pub fn enter(user: BorrowedFd<'_>, mount: BorrowedFd<'_>) -> Result<()> {
    move_into_link_name_space(user, Some(LinkNameSpaceType::User)).step("enter user namespace")?;
    move_into_link_name_space(mount, Some(LinkNameSpaceType::Mount)).step("enter mount namespace")
}

/// From within the sandbox's namespaces. pivot_root moves every process whose root is the old one, which is the guest alone: the
/// sandbox is quiet.
pub fn swap(ask: &RestackAsk, root: OwnedFd) -> Result<()> {
    let old = mount_id(CWD, "/")?.0;
    let paths = OWN_MOUNTS.into_iter().chain(ask.mounts.iter().map(String::as_str));
    let trees: Vec<(&str, OwnedFd)> =
        paths.map(|path| Ok((path, carry_over(path, old)?))).collect::<Result<_>>()?;
    // On /dev, because the sandbox can neither remove nor rename it.
    let below = rustix::io::dup(root.as_fd()).step("root")?;
    attach(root, "/dev").step("new root")?;
    let fill = || -> Result<()> {
        for (path, tree) in &trees {
            make_below(below.as_fd(), path)?;
            attach_below(tree.as_fd(), below.as_fd(), path).step(path)?;
        }
        rustix::process::fchdir(below.as_fd()).step("chdir")?;
        pivot_here().step("pivot_root")
    };
    fill().inspect_err(|_| {
        // The old root goes on: what lies on its /dev must go.
        let _ = rustix::mount::unmount("/dev", rustix::mount::UnmountFlags::DETACH);
    })
}

/// A copy of what is mounted at `path`. The sandbox may have moved the folders above it and put its own in their place: a tree
/// of the old root, carried over, would be a way to write into the layer that is being sealed.
fn carry_over(path: &str, old_root: u64) -> Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let at = openat2(CWD, path, flags, Mode::empty(), ResolveFlags::NO_SYMLINKS).step(path)?;
    match mount_id(at.as_fd(), "")? {
        (id, true) if id != old_root => clone_tree_at(at.as_fd(), true).step(path),
        _ => Err(Failure { step: path.into(), errno: libc::EXDEV }),
    }
}

/// The mount that a path is on, and whether the path is its root.
fn mount_id(at: impl std::os::fd::AsFd, path: &str) -> Result<(u64, bool)> {
    let stat = statx(at, path, AtFlags::EMPTY_PATH, StatxFlags::MNT_ID).step("mounts")?;
    Ok((stat.stx_mnt_id, stat.stx_attributes.contains(StatxAttributes::MOUNT_ROOT)))
}
