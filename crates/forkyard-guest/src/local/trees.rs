//! Folders of the host that one sandbox gets: volumes, or the directory that its root starts from. A process of its own for
//! each question, since the zygote has left the host's mounts behind: it answers with detached mounts and ends.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::process::ExitCode;

use forkyard_guest::zygote::{MAX_MESSAGE, Tree, TreesAnswer, TreesAsk};
use rustix::fs::{CWD, Mode, OFlags, ResolveFlags, openat2};
use rustix::mount::MountAttrFlags;

use super::{receive, reply, take_socket};
use crate::sys::mount::{clone_tree_at, make_all_private, map_owner, set_attributes};
use crate::sys::process::{Cloned, clone_with, exit_now, map_id, unshare};
use crate::sys::{Failure, Result, Step, check};

pub fn run() -> ExitCode {
    let Ok(socket) = take_socket() else { return ExitCode::FAILURE };
    let mut buffer = vec![0; MAX_MESSAGE];
    let Some((ask, _)) = receive::<TreesAsk>(socket.as_fd(), &mut buffer) else { return ExitCode::FAILURE };
    match clone_all(&ask) {
        Ok(trees) => {
            let fds: Vec<_> = trees.iter().map(|tree| tree.as_fd()).collect();
            reply(socket.as_fd(), &TreesAnswer::Done, &fds);
        }
        Err(Failure { step, errno }) => {
            reply(socket.as_fd(), &TreesAnswer::Failed { path: step, errno }, &[])
        }
    }
    ExitCode::SUCCESS
}

fn clone_all(ask: &TreesAsk) -> Result<Vec<OwnedFd>> {
    let root = rustix::process::geteuid().is_root();
    if !root {
        // Only in namespaces of its own may an ordinary user copy mounts; it sees no more than it did.
        let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        unshare(libc::CLONE_NEWUSER | libc::CLONE_NEWNS).step("user namespace")?;
        map_id(uid, uid, gid).step("id map")?;
        make_all_private().step("private mounts")?;
    }
    ask.trees.iter().map(|tree| clone_one(tree, ask.shown_as.filter(|_| root))).collect()
}

fn clone_one(tree: &Tree, shown_as: Option<u32>) -> Result<OwnedFd> {
    // The path is canonical: a link that took some part's place since then is refused.
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let dir =
        openat2(CWD, tree.path.as_str(), flags, Mode::empty(), ResolveFlags::NO_SYMLINKS).step(&tree.path)?;
    let mount = clone_tree_at(dir.as_fd(), tree.below).step(&tree.path)?;
    let mut attrs = MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV;
    if !tree.writable {
        attrs |= MountAttrFlags::MOUNT_ATTR_RDONLY;
    }
    set_attributes(mount.as_fd(), attrs, tree.below).step(&tree.path)?;
    let stat = rustix::fs::fstat(&dir).step(&tree.path)?;
    if let Some(id) = shown_as.filter(|id| tree.writable && stat.st_uid != 0 && stat.st_uid != *id) {
        // The folder's owner is the user inside. Never root: what is made inside could be setuid outside. A file system
        // that can't do this shows the ids as they are.
        let _ = id_map(stat.st_uid, stat.st_gid, id).and_then(|ns| map_owner(mount.as_fd(), ns.as_fd()));
    }
    Ok(mount)
}

/// Until the parent kills this process, or is gone, which it may be already.
fn wait_for_the_end_of(parent: u32) -> ! {
    // SAFETY: plain system calls on numbers.
    unsafe {
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL, 0, 0, 0);
        while u32::try_from(libc::getppid()) == Ok(parent) {
            libc::pause();
        }
    }
    exit_now(0)
}

/// A user namespace whose only purpose is its id map.
fn id_map(uid: u32, gid: u32, shown_as: u32) -> rustix::io::Result<OwnedFd> {
    let parent = std::process::id();
    // SAFETY: this program has one thread here.
    match unsafe { clone_with(libc::CLONE_NEWUSER, None) }? {
        Cloned::Child => wait_for_the_end_of(parent),
        Cloned::Parent { pid, pidfd } => {
            let write = |name: &str, id: u32| {
                std::fs::write(format!("/proc/{pid}/{name}"), format!("{id} {shown_as} 1"))
            };
            let flags = OFlags::RDONLY | OFlags::CLOEXEC;
            let namespace = write("uid_map", uid)
                .and_then(|()| write("gid_map", gid))
                .map_err(|e| rustix::io::Errno::from_io_error(&e).unwrap_or(rustix::io::Errno::INVAL))
                .and_then(|()| rustix::fs::open(format!("/proc/{pid}/ns/user"), flags, Mode::empty()));
            // SAFETY: no pointer but a null one is passed; the child is ours and not reaped before this.
            let killed = check(unsafe {
                libc::syscall(
                    libc::SYS_pidfd_send_signal,
                    pidfd.as_raw_fd(),
                    libc::SIGKILL,
                    std::ptr::null::<u8>(),
                    0,
                )
            });
            killed.and(namespace)
        }
    }
}
