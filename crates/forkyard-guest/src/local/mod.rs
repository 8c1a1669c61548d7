//! The zygote: one process with one thread, started once with an empty environment, so that no secret of its parent is in the
//! memory that sandboxes inherit. It lives in a user and mount namespace of its own with a small root (`/bind`, `/dev`, `/proc`,
//! `/state`, `/new`, `/lower`, `/disk`), which makes a clone cheap however many mounts the host has.

mod blank;
mod restack;
mod root;
mod setup;
mod skeleton;
mod trees;
mod work;

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::process::ExitCode;

use forkyard_guest::zygote::{Answer, Ask, MAX_MESSAGE, Start};
use rustix::fs::{Mode, OFlags};
use rustix::mount::MountAttrFlags;

use crate::sys::mount::{attach, clone_tree, make_all_private, new_fs, pivot_here, set_attributes};
use crate::sys::process::{
    Cloned, become_id, clone_with, exit_now, ignore_children, map_id, set_dumpable, unshare,
};
use crate::sys::{Failure, Result, Step, seccomp, socket};
use blank::Blanks;
use setup::Born;

pub use restack::run as restack;
pub use trees::run as trees;

/// The net and cgroup namespaces are made by the child: in parallel with others, and after it joined its cgroups.
const SANDBOX_NAMESPACES: libc::c_int =
    libc::CLONE_NEWUSER | libc::CLONE_NEWNS | libc::CLONE_NEWPID | libc::CLONE_NEWIPC | libc::CLONE_NEWUTS;
/// The new root is built on this directory, because every machine has it; what it hides was cloned before.
const BUILD_AT: &str = "/usr";

/// The socket that came as stdin. What else the parent left open is closed: every sandbox would have it open.
fn take_socket() -> rustix::io::Result<OwnedFd> {
    let socket = rustix::io::fcntl_dupfd_cloexec(std::io::stdin(), 3)?;
    keep_only(&[socket.as_fd()]);
    let null = rustix::fs::open("/dev/null", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    rustix::stdio::dup2_stdin(null)?;
    Ok(socket)
}

pub fn run() -> ExitCode {
    let Ok(commands) = take_socket() else { return ExitCode::FAILURE };
    ignore_children();
    let _ = rustix::process::setsid();
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o022));
    let mut buffer = vec![0; MAX_MESSAGE];
    let Some((start, _)) = receive::<Start>(commands.as_fd(), &mut buffer) else { return ExitCode::FAILURE };
    let Entered { binds, _skeleton } = match enter(&start) {
        Ok(entered) => entered,
        Err(Failure { step, errno }) => {
            reply(commands.as_fd(), &Answer::Failed { step, errno }, &[]);
            return ExitCode::FAILURE;
        }
    };
    let paths = binds.iter().map(|bind| bind.path.clone()).collect();
    reply(commands.as_fd(), &Answer::Up { binds: paths, layers: setup::isolation() }, &[]);
    let common = Common { skeleton: start.skeleton, binds, filter: seccomp::program() };
    let mut blanks = Blanks::default();
    while let Some((n, fds)) = socket::receive(commands.as_fd(), &mut buffer).ok().filter(|(n, _)| *n > 0) {
        let Ok(ask) = serde_json::from_slice::<Ask>(&buffer[..n]) else { break };
        let given = match &ask {
            Ask::Sandbox(asked) => blanks.give(asked, &buffer[..n], &fds),
            Ask::Restack { .. } | Ask::Work(_) => None,
        };
        match given {
            Some((pid, pidfd)) => {
                drop(fds); // the next clone must not have them
                reply_cloned(commands.as_fd(), pid, &pidfd);
            }
            None => clone_for(&commands, ask, fds, &common),
        }
        blanks.make_up(commands.as_fd(), &common);
    }
    ExitCode::SUCCESS
}

/// What every sandbox of this zygote has in common.
struct Common {
    skeleton: String,
    binds: Vec<BoundTree>,
    filter: Vec<libc::sock_filter>,
}

/// A clone does what was asked; its parent says which it is.
fn clone_for(commands: &OwnedFd, ask: Ask, fds: Vec<OwnedFd>, common: &Common) {
    let namespaces = match &ask {
        Ask::Sandbox(_) => SANDBOX_NAMESPACES,
        Ask::Restack { .. } | Ask::Work(_) => 0,
    };
    // Born in its group, a sandbox need not move there, for which the kernel would hold up every fork of the machine.
    let group = match &ask {
        Ask::Sandbox(ask) if ask.group => fds.get(setup::FIXED_FDS).map(|fd| fd.as_fd()),
        _ => None,
    };
    // SAFETY: the zygote never starts a thread.
    let clone = |group| unsafe { clone_with(namespaces, group) };
    let (cloned, in_group) = match group.map(|group| clone(Some(group))) {
        Some(Ok(cloned)) => (Ok(cloned), true),
        Some(Err(_)) | None => (clone(None), false),
    };
    match cloned {
        Ok(Cloned::Child) => {
            close(commands.as_fd());
            match ask {
                Ask::Sandbox(ask) => setup::sandbox(*ask, fds, Born { in_group, ready: false }, common),
                Ask::Restack { root, ask } => root::make(&root, &ask, &common.skeleton, fds),
                Ask::Work(work) => work::run(work, fds),
            }
            exit_now(0)
        }
        Ok(Cloned::Parent { pid, pidfd }) => reply_cloned(commands.as_fd(), pid, &pidfd),
        Err(e) => {
            let failed = Answer::Failed { step: "clone".into(), errno: e.raw_os_error() };
            reply(commands.as_fd(), &failed, &[]);
        }
    }
}

fn receive<T: serde::de::DeserializeOwned>(
    from: BorrowedFd<'_>,
    buffer: &mut [u8],
) -> Option<(T, Vec<OwnedFd>)> {
    let (n, fds) = socket::receive(from, buffer).ok().filter(|(n, _)| *n > 0)?;
    Some((serde_json::from_slice(&buffer[..n]).ok()?, fds))
}

/// A peer that is gone needs no answer.
fn reply<T: serde::Serialize>(to: BorrowedFd<'_>, message: &T, fds: &[BorrowedFd<'_>]) {
    let _ = try_reply(to, message, fds);
}

fn try_reply<T: serde::Serialize>(
    to: BorrowedFd<'_>,
    message: &T,
    fds: &[BorrowedFd<'_>],
) -> rustix::io::Result<usize> {
    let text = serde_json::to_vec(message).expect("messages have string keys and no failing parts");
    socket::send(to, &text, fds)
}

/// Says who was made. If the handle can't be passed on (too many descriptors of this user are under way), nobody could use it.
fn reply_cloned(to: BorrowedFd<'_>, pid: i32, pidfd: &OwnedFd) {
    if let Err(e) = try_reply(to, &Answer::Cloned { pid }, &[pidfd.as_fd()]) {
        let _ = rustix::process::pidfd_send_signal(pidfd, rustix::process::Signal::KILL);
        reply(to, &Answer::Failed { step: "passing a descriptor".into(), errno: e.raw_os_error() }, &[]);
    }
}

/// A host tree at `/bind/<index>` of the zygote, for `path` of a sandbox.
struct BoundTree {
    path: String,
    at: String,
}

/// What the zygote stands on.
struct Entered {
    binds: Vec<BoundTree>,
    /// Held, and locked, so that nobody removes it as old.
    _skeleton: OwnedFd,
}

/// Goes into the namespaces and the small root.
fn enter(start: &Start) -> Result<Entered> {
    // As root, trees are cloned while their paths can still be walked: a toolchain may lie in a private home.
    let root = rustix::process::geteuid().is_root();
    let early = |path: &str, recursive| if root { clone_tree(path, recursive).ok() } else { None };
    let mut trees: Vec<(String, Option<OwnedFd>)> =
        start.binds.iter().map(|b| (b.path.clone(), early(&b.path, true))).collect();
    let state = early(&start.state, false);
    if root {
        become_id(start.become_id.ok_or(Failure { step: "id".into(), errno: libc::EINVAL })?)
            .step("setuid")?;
        set_dumpable(true).step("dumpable")?; // setuid cleared it; /proc/self/uid_map must be ours
    }
    let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    unshare(libc::CLONE_NEWUSER | libc::CLONE_NEWNS).step("user namespace")?;
    map_id(0, uid, gid).step("id map")?;
    setup::bound_together();
    make_all_private().step("private mounts")?;
    let late = |tree: Option<OwnedFd>, path: &str, recursive| match tree {
        Some(tree) => Ok(tree),
        None => clone_tree(path, recursive),
    };
    let state = late(state, &start.state, false).step("state folder")?;
    let proc = clone_tree("/proc", true).step("proc")?;
    for (path, tree) in &mut trees {
        *tree = late(tree.take(), path, true).ok(); // gone since it was detected: not there for anybody
    }
    let tmpfs = |size| {
        new_fs("tmpfs", &[("mode", Some("755")), ("size", Some(size))], MountAttrFlags::MOUNT_ATTR_NOSUID)
    };
    let dev = tmpfs("64k").step("dev")?;
    let base = tmpfs("64m").step("tmpfs")?;
    attach(base, BUILD_AT).step("tmpfs")?;
    let at = |name: &str| format!("{BUILD_AT}/{name}");
    for dir in ["bind", "proc", "dev", "state", "new", "lower", "disk"] {
        std::fs::create_dir(at(dir)).step(dir)?;
    }
    attach(proc, &at("proc")).step("proc")?; // a fully visible /proc must stay, or no new one may be mounted
    attach(state, &at("state")).step("state folder")?;
    attach(dev, &at("dev")).step("dev")?;
    skeleton::build_dev(&at("dev"))?;
    let trees: Vec<(String, OwnedFd)> =
        trees.into_iter().filter_map(|(path, tree)| Some((path, tree?))).collect();
    let paths: Vec<&str> = trees.iter().map(|(path, _)| path.as_str()).collect();
    let skeleton = skeleton::open(&at("state/skeleton"), start, &paths)?;
    let mut bound = Vec::new();
    let read_only = MountAttrFlags::MOUNT_ATTR_RDONLY
        | MountAttrFlags::MOUNT_ATTR_NOSUID
        | MountAttrFlags::MOUNT_ATTR_NODEV;
    for (index, (path, tree)) in trees.into_iter().enumerate() {
        let here = at(&format!("bind/{index}"));
        std::fs::create_dir(&here).step("bind")?;
        set_attributes(tree.as_fd(), read_only, true).step("read-only bind")?;
        attach(tree, &here).step("bind")?;
        bound.push(BoundTree { path, at: format!("/bind/{index}") });
    }
    rustix::process::chdir(BUILD_AT).step("chdir")?;
    pivot_here().step("pivot_root")?;
    Ok(Entered { binds: bound, _skeleton: skeleton })
}

/// In a child: what is its parent's alone.
fn close(fd: BorrowedFd<'_>) {
    // SAFETY: the child never uses it again, and ends without running destructors.
    unsafe { libc::close(fd.as_raw_fd()) };
}

/// Keeps only the descriptors that are named, besides stdio.
fn keep_only(fds: &[BorrowedFd<'_>]) {
    let keep: Vec<RawFd> = fds.iter().map(|fd| fd.as_raw_fd()).collect();
    crate::sys::process::close_all_but(3, &keep);
}
