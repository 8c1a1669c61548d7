//! What runs in a clone: set up the namespaces, give everything up, then serve as pid 1.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use forkyard_guest::zygote::{Ready, RootAsk, SandboxAsk, WorkResult};
use libc::sock_filter;
use rustix::fs::{Mode, OFlags, ResolveFlags};
use rustix::mount::MountAttrFlags;
use rustix::thread::LinkNameSpaceType;

use super::{BoundTree, keep_only, reply};
use crate::serve;
use crate::sys::mount::{LOCKED_DOWN, attach, attach_below, clone_tree, new_fs, overlay, pivot_here};
use crate::sys::process::{drop_capabilities, exit_now, map_id, set_dumpable, unshare};
use crate::sys::{Failure, Result, Step, landlock, seccomp, socket};

/// The user inside, also when Forkyard runs as root.
const INSIDE_ID: u32 = 1000;
const SHM_INODES: &str = "65536";
/// The kernel's choice when memory is short: a sandbox before anything of the host.
const OOM_SCORE: &str = "500";
/// Descriptors of the setup: the pieces of the message, in order.
pub const FIXED_FDS: usize = 3;
const FREEZER_FDS: usize = 3;

/// Folders that every root has.
const OWN_DIRS: [&str; 5] = ["proc", "dev", "tmp", "workspace", "home/user"];

/// Does not return: the clone is the sandbox's pid 1. `in_group`: it has no cgroup to join.
pub fn sandbox(
    ask: SandboxAsk,
    mut fds: Vec<OwnedFd>,
    in_group: bool,
    binds: &[BoundTree],
    filter: &[sock_filter],
) {
    let (root, oom) = (&ask.root, usize::from(ask.oom_events));
    let (group, freezer) = (usize::from(ask.group), FREEZER_FDS * usize::from(ask.freezer));
    if fds.len()
        != FIXED_FDS + ask.cgroups + group + oom + freezer + usize::from(root.directory) + root.volumes.len()
    {
        return;
    }
    let mut rest = fds.split_off(FIXED_FDS);
    let (Some(listener), Some(control), Some(ready)) = (fds.pop(), fds.pop(), fds.pop()) else { return };
    let mut more = rest.split_off(ask.cgroups).split_off(group);
    if in_group {
        rest.clear();
    }
    let mut freezer_files = more.split_off(oom);
    let mut trees = freezer_files.split_off(freezer);
    let freezer = serve::Freezer::new(freezer_files);
    let (cgroups, oom_events) = (rest, more.pop());
    let volumes = trees.split_off(usize::from(root.directory));
    match setup(&ask, &cgroups, trees.pop(), volumes, binds, filter) {
        Ok(Inside { proxy, spool, upper }) => {
            let layers = [
                "userns", "mntns", "pidns", "ipcns", "utsns", "netns", "cgroupns", "overlay", "nocaps",
                "seccomp",
            ];
            let mut layers: Vec<String> = layers.map(String::from).into();
            if landlock::version().is_some() {
                layers.push("landlock".into());
            }
            let pass: Vec<BorrowedFd<'_>> = proxy.iter().map(|p| p.as_fd()).collect();
            reply(ready.as_fd(), &Ready::Up { layers }, &pass);
            drop((ready, cgroups));
            let kept: Vec<&OwnedFd> = [&control, &listener, &spool, &upper]
                .into_iter()
                .chain(proxy.as_ref())
                .chain(oom_events.as_ref())
                .chain(freezer.iter().flat_map(|freezer| freezer.files()))
                .collect();
            keep_only(&kept);
            serve::run(serve::Config {
                env: ask.env,
                lifetime_ms: ask.deadline_ms,
                attempt: ask.attempt,
                token: None,
                processes: ask.processes,
                layer: Some(ask.root.layer),
                watch: ask.watch,
                control: Some(control),
                listener: Some(listener),
                proxy,
                spool: Some(spool),
                upper: Some(upper),
                oom_events,
                freezer,
                landlock: true,
            })
        }
        Err(Failure { step, errno }) => {
            reply(ready.as_fd(), &Ready::Failed { step, errno }, &[]);
            exit_now(1)
        }
    }
}

struct Inside {
    proxy: Option<OwnedFd>,
    spool: OwnedFd,
    /// The upper layer's directory, for the disk watch.
    upper: OwnedFd,
}

fn open_dir(path: &str) -> rustix::io::Result<OwnedFd> {
    rustix::fs::open(path, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
}

fn setup(
    ask: &SandboxAsk,
    cgroups: &[OwnedFd],
    directory: Option<OwnedFd>,
    volumes: Vec<OwnedFd>,
    binds: &[BoundTree],
    filter: &[sock_filter],
) -> Result<Inside> {
    map_id(INSIDE_ID, 0, 0).step("id map")?;
    unshare(libc::CLONE_NEWNET).step("network namespace")?;
    socket::loopback_up().step("loopback")?;
    for cgroup in cgroups {
        // "0" is the caller. In v1 this is the `tasks` file, which for one thread needs no global lock.
        rustix::io::write(cgroup, b"0").step("join cgroup")?;
    }
    unshare(libc::CLONE_NEWCGROUP).step("cgroup namespace")?;
    let spool = open_dir(&format!("/state/{}", ask.root.spool)).step("spool")?;
    let upper = open_dir(&format!("/state/{}", ask.root.upper)).step("upper layer")?;
    let _ = std::fs::write("/proc/self/oom_score_adj", OOM_SCORE);

    if !ask.root.host_trees {
        // In the layer itself, where these folders are ours whoever owns those of an image or directory below. What can't be
        // made here is made through the overlay, or fails there.
        for dir in OWN_DIRS {
            let _ = make_below(upper.as_fd(), dir);
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        if let Ok(tmp) = rustix::fs::openat(&upper, "tmp", flags, Mode::empty()) {
            let _ = rustix::fs::fchmod(&tmp, Mode::from_raw_mode(0o1777));
        }
    }
    attach(root_overlay(&ask.root, directory)?, "/new").step("root")?;
    let root = rustix::fs::open("/new", OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
        .step("root")?;
    if ask.root.host_trees {
        for bind in binds {
            let tree = clone_tree(&bind.at, true).step("bind")?;
            attach_below(tree.as_fd(), root.as_fd(), &bind.path).step("bind")?;
        }
    } else {
        for dir in OWN_DIRS {
            make_below(root.as_fd(), dir)?;
        }
    }
    for (path, volume) in ask.root.volumes.iter().zip(volumes) {
        make_below(root.as_fd(), path)?;
        attach_below(volume.as_fd(), root.as_fd(), path).step("volume")?;
    }
    let place = |mount: OwnedFd, path: &str| attach_below(mount.as_fd(), root.as_fd(), path).step(path);
    place(new_fs("proc", &[], LOCKED_DOWN).step("proc")?, "proc")?;
    place(clone_tree("/dev", true).step("dev")?, "dev")?;
    let no_exec = MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NOEXEC;
    let pts = new_fs("devpts", &[("ptmxmode", Some("0666")), ("mode", Some("620"))], no_exec);
    place(pts.step("devpts")?, "dev/pts")?;
    let shm_size = ask.shm_bytes.to_string();
    let shm = [("size", Some(shm_size.as_str())), ("nr_inodes", Some(SHM_INODES)), ("mode", Some("1777"))];
    place(new_fs("tmpfs", &shm, LOCKED_DOWN).step("shm")?, "dev/shm")?;
    place(clone_tree("/dev/null", false).step("mask")?, "proc/keys").or_else(|e| match e.errno {
        libc::ENOENT => Ok(()), // a kernel without keys has nothing to hide
        _ => Err(e),
    })?;

    rustix::process::fchdir(root.as_fd()).step("chdir")?;
    drop(root);
    pivot_here().step("pivot_root")?;
    rustix::system::sethostname(ask.hostname.as_bytes()).step("hostname")?;
    let _ = rustix::process::setsid();
    let proxy = ask.proxy_port.map(socket::listen_loopback).transpose().step("proxy socket")?;
    set_dumpable(false).step("dumpable")?;
    drop_capabilities().step("capabilities")?;
    seccomp::install(filter).step("seccomp")?;
    Ok(Inside { proxy, spool, upper })
}

/// The sandbox's root as a detached mount: upper over its layers over the skeleton.
///
/// A directory of the host is attached at `/lower` to have a path: only for a process with a mount namespace of its own.
fn root_overlay(root: &RootAsk, directory: Option<OwnedFd>) -> Result<OwnedFd> {
    let mut lower: Vec<String> = root.lower.iter().map(|layer| format!("/state/{layer}")).collect();
    if let Some(directory) = directory {
        attach(directory, "/lower").step("directory")?;
        lower.push("/lower".into());
    }
    // The provider's files are below an image's own: it is the variables that lead to them.
    lower.push(if root.host_trees { "/skel" } else { "/extra" }.into());
    overlay(&format!("/state/{}", root.upper), &format!("/state/{}", root.work), &lower).step("overlay")
}

/// A directory in an image's root, for something to be mounted on. Links on the way are refused.
fn make_below(root: BorrowedFd<'_>, path: &str) -> Result<()> {
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

/// Runs in a plain fork of the zygote: makes the new root there, enters the sandbox's namespaces and swaps it in. pivot_root
/// moves every process whose root is the old one, which is the guest alone: the sandbox is quiet. The namespaces come from
/// the guest as descriptors, since it can't be looked into from outside.
pub fn restack(root: &RootAsk, fds: Vec<OwnedFd>, binds: &[BoundTree]) {
    let mut fds = fds.into_iter();
    let (Some(result), Some(user), Some(mount)) = (fds.next(), fds.next(), fds.next()) else { return };
    let mut swap = || -> Result<()> {
        let directory = fds.next();
        if directory.is_some() {
            unshare(libc::CLONE_NEWNS).step("mount namespace")?; // the zygote's own is shared
        }
        let new = root_overlay(root, directory)?;
        rustix::thread::move_into_link_name_space(user.as_fd(), Some(LinkNameSpaceType::User))
            .step("enter user namespace")?;
        rustix::thread::move_into_link_name_space(mount.as_fd(), Some(LinkNameSpaceType::Mount))
            .step("enter mount namespace")?;
        let mut trees = vec![
            ("proc", clone_tree("/proc", true).step("proc")?),
            ("dev", clone_tree("/dev", true).step("dev")?),
        ];
        if root.host_trees {
            for bind in binds {
                trees.push((bind.path.as_str(), clone_tree(&bind.path, true).step("bind")?));
            }
        }
        for path in &root.volumes {
            trees.push((path.as_str(), clone_tree(path, true).step("volume")?));
        }
        // On /dev, because the sandbox can neither remove nor rename it.
        let below = rustix::io::dup(new.as_fd()).step("root")?;
        attach(new, "/dev").step("new root")?;
        let fill = || -> Result<()> {
            for (path, tree) in trees {
                if root.volumes.iter().any(|volume| volume == path) {
                    make_below(below.as_fd(), path)?;
                }
                attach_below(tree.as_fd(), below.as_fd(), path).step(path)?;
            }
            rustix::process::fchdir(below.as_fd()).step("chdir")?;
            pivot_here().step("pivot_root")
        };
        fill().inspect_err(|_| {
            // The old root goes on: what lies on its /dev must go.
            let _ = rustix::mount::unmount("/dev", rustix::mount::UnmountFlags::DETACH);
        })
    };
    let outcome = match swap() {
        Ok(()) => WorkResult::Done { bytes: 0, entries: 0 },
        Err(Failure { step, errno }) => WorkResult::Failed { step, errno },
    };
    reply(result.as_fd(), &outcome, &[]);
}
