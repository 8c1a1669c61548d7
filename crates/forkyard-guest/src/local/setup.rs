//! What runs in a clone: set up the namespaces, give everything up, then serve as pid 1.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use forkyard_guest::zygote::{Groups, Ready, SandboxAsk, Watch};
use rustix::fs::{Mode, OFlags};
use rustix::mount::MountAttrFlags;

use super::root::{make_below, overlay_of, own};
use super::{Common, keep_only, receive, reply};
use crate::serve::{self, Freezer, OomScore};
use crate::sys::mount::{LOCKED_DOWN, attach, attach_below, clone_tree, new_fs, pivot_here};
use crate::sys::process::{drop_capabilities, exit_now, map_id, set_dumpable, unshare};
use crate::sys::{Failure, Result, Step, landlock, seccomp, socket};

const SHM_INODES: &str = "65536";
/// Terminals are the machine's, 3072 for all its containers. Tools that make many at once make dozens.
const MAX_TERMINALS: &str = "64";
/// What watches files is counted with the user outside too, who often has 128 instances: of these an editor's server or a build
/// takes one to a few, and one of them a watch for each folder of a large repository.
const MAX_WATCHES: [(&str, u32); 2] = [("inotify_instances", 32), ("inotify_watches", 65_536)];
/// All sandboxes of a zygote together leave the user outside one part in so many.
const LEFT_OUTSIDE: u32 = 4;
/// Descriptors of the setup: the pieces of the message, in order.
pub const FIXED_FDS: usize = 3;
const FREEZER_FDS: usize = 3;

/// Folders that every root has.
const OWN_DIRS: [&str; 5] = ["proc", "dev", "tmp", "workspace", "home/user"];

/// What a clone has from its birth.
#[derive(Clone, Copy)]
pub struct Born {
    /// It has no cgroup to join.
    pub in_group: bool,
    /// [`prepare`] is done.
    pub ready: bool,
}

/// What is the same for every sandbox of this user inside.
pub fn prepare(id: u32) -> Result<()> {
    map_id(id, 0, 0).step("id map")?;
    for (kind, most) in MAX_WATCHES {
        bound_of_namespace(kind, most);
    }
    unshare(libc::CLONE_NEWNET).step("network namespace")?;
    socket::loopback_up().step("loopback")
}

/// The same for all of this zygote, of whose namespace theirs are made.
pub fn bound_together() {
    for (kind, most) in MAX_WATCHES {
        let outside = std::fs::read_to_string(format!("/proc/sys/fs/{}", kind.replace('_', "/max_user_")));
        let outside = outside.ok().and_then(|text| text.trim().parse::<u32>().ok()).unwrap_or(most);
        bound_of_namespace(kind, outside - outside / LEFT_OUTSIDE);
    }
}

/// Of this user namespace, and by whoever runs in it without rights not to be changed. Where /proc/sys is read-only, as in a
/// container, the bound of the user outside is all there is.
fn bound_of_namespace(kind: &str, most: u32) {
    let _ = std::fs::write(format!("/proc/sys/user/max_{kind}"), most.to_string());
}

/// Does not return: the clone is the sandbox's pid 1.
pub fn sandbox(ask: SandboxAsk, mut fds: Vec<OwnedFd>, born: Born, common: &Common) {
    let root = &ask.root;
    let (group, disk, directory) =
        (usize::from(ask.group), usize::from(root.disk), usize::from(root.directory));
    if fds.len() != FIXED_FDS + group + disk + directory + root.volumes.len() {
        return;
    }
    let mut disk_mount = fds.split_off(FIXED_FDS); // after the group's directory
    let (Some(listener), Some(control), Some(ready)) = (fds.pop(), fds.pop(), fds.pop()) else { return };
    let mut disk_mount = disk_mount.split_off(group);
    let mut trees = disk_mount.split_off(disk);
    let volumes = trees.split_off(directory);
    let mounts = Mounts { disk: disk_mount.pop(), directory: trees.pop(), volumes };
    match setup(&ask, ready.as_fd(), born, mounts, common) {
        Ok(Inside { proxy, spool, upper, joined: Joined { oom_events, freezer, watch }, oom_score }) => {
            let pass: Vec<BorrowedFd<'_>> = proxy.iter().map(|p| p.as_fd()).collect();
            reply(ready.as_fd(), &Ready::Up, &pass);
            drop(ready);
            let kept = [control.as_fd(), listener.as_fd(), spool.as_fd(), upper.as_fd()].into_iter();
            let kept = kept.chain(proxy.iter().chain(&oom_events).map(AsFd::as_fd));
            let kept = kept.chain(freezer.iter().flat_map(|freezer| freezer.files().map(AsFd::as_fd)));
            let kept: Vec<BorrowedFd<'_>> = kept.chain(oom_score.as_ref().map(AsFd::as_fd)).collect();
            keep_only(&kept);
            serve::run(serve::Config {
                env: ask.env,
                lifetime_ms: ask.deadline_ms,
                attempt: ask.attempt,
                token: None,
                processes: ask.processes,
                watch,
                control: Some(control),
                listener: Some(listener),
                proxy,
                spool: Some(spool),
                upper: Some(upper),
                oom_events,
                freezer,
                oom_score,
                landlock: true,
            })
        }
        Err(Failure { step, errno }) => {
            reply(ready.as_fd(), &Ready::Failed { step, errno }, &[]);
            // The groups may be on their way: what nobody took would take the answer with it.
            let _ = socket::receive(ready.as_fd(), &mut [0; 1024]);
            exit_now(1)
        }
    }
}

/// Mounts that were made for this sandbox alone.
struct Mounts {
    disk: Option<OwnedFd>,
    directory: Option<OwnedFd>,
    volumes: Vec<OwnedFd>,
}

struct Inside {
    proxy: Option<OwnedFd>,
    spool: OwnedFd,
    /// The upper layer's directory, for the disk watch.
    upper: OwnedFd,
    joined: Joined,
    oom_score: Option<OomScore>,
}

/// What came with the sandbox's groups.
struct Joined {
    oom_events: Option<OwnedFd>,
    freezer: Option<Freezer>,
    watch: Watch,
}

/// What isolates a sandbox, by the names that users see.
pub fn isolation() -> Vec<String> {
    let always =
        ["userns", "mntns", "pidns", "ipcns", "utsns", "netns", "cgroupns", "overlay", "nocaps", "seccomp"];
    always.into_iter().chain(landlock::version().map(|_| "landlock")).map(String::from).collect()
}

/// Joins the groups, which may have been made meanwhile, unless it was born in them.
fn join_groups(channel: BorrowedFd<'_>, in_group: bool) -> Result<Joined> {
    let mut buffer = [0; 1024];
    let gone = Failure { step: "join cgroup".into(), errno: libc::EPIPE };
    let (Groups { oom_events, freezer, watch }, mut fds) = receive(channel, &mut buffer).ok_or(gone)?;
    let freezer = if freezer { fds.split_off(fds.len().saturating_sub(FREEZER_FDS)) } else { Vec::new() };
    let oom_events = if oom_events { fds.pop() } else { None };
    for group in fds.iter().filter(|_| !in_group) {
        // "0" is the caller. In v1 this is the `tasks` file, which for one thread needs no global lock.
        rustix::io::write(group, b"0").step("join cgroup")?;
    }
    Ok(Joined { oom_events, freezer: Freezer::new(freezer), watch })
}

fn open_dir(path: &str) -> rustix::io::Result<OwnedFd> {
    rustix::fs::open(path, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
}

fn setup(
    ask: &SandboxAsk,
    channel: BorrowedFd<'_>,
    born: Born,
    mounts: Mounts,
    common: &Common,
) -> Result<Inside> {
    if !born.ready {
        prepare(ask.id)?;
    }
    let spool = open_dir(&format!("/state/{}", ask.root.spool)).step("spool")?;
    if let Some(disk) = mounts.disk {
        attach(disk, "/disk").step("disk")?;
    }
    let upper = open_dir(&own(&ask.root, &ask.root.upper)).step("upper layer")?;

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
    attach(overlay_of(&ask.root, &common.skeleton, mounts.directory)?, "/new").step("root")?;
    let root = rustix::fs::open("/new", OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
        .step("root")?;
    if ask.root.host_trees {
        for bind in &common.binds {
            let tree = clone_tree(&bind.at, true).step("bind")?;
            attach_below(tree.as_fd(), root.as_fd(), &bind.path).step("bind")?;
        }
    } else {
        for dir in OWN_DIRS {
            make_below(root.as_fd(), dir)?;
        }
    }
    for (path, volume) in ask.root.volumes.iter().zip(mounts.volumes) {
        make_below(root.as_fd(), path)?;
        attach_below(volume.as_fd(), root.as_fd(), path).step("volume")?;
    }
    let place = |mount: OwnedFd, path: &str| attach_below(mount.as_fd(), root.as_fd(), path).step(path);
    place(new_fs("proc", &[], LOCKED_DOWN).step("proc")?, "proc")?;
    place(clone_tree("/dev", true).step("dev")?, "dev")?;
    let no_exec = MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NOEXEC;
    let terminals = [("ptmxmode", Some("0666")), ("mode", Some("620")), ("max", Some(MAX_TERMINALS))];
    let pts = new_fs("devpts", &terminals, no_exec);
    place(pts.step("devpts")?, "dev/pts")?;
    let shm_size = ask.shm_bytes.to_string();
    let shm = [("size", Some(shm_size.as_str())), ("nr_inodes", Some(SHM_INODES)), ("mode", Some("1777"))];
    place(new_fs("tmpfs", &shm, LOCKED_DOWN).step("shm")?, "dev/shm")?;
    place(clone_tree("/dev/null", false).step("mask")?, "proc/keys").or_else(|e| match e.errno {
        libc::ENOENT => Ok(()), // a kernel without keys has nothing to hide
        _ => Err(e),
    })?;

    // As late as can be: the groups are made meanwhile, which takes as long as all of this.
    let joined = join_groups(channel, born.in_group)?;
    unshare(libc::CLONE_NEWCGROUP).step("cgroup namespace")?;
    rustix::process::fchdir(root.as_fd()).step("chdir")?;
    drop(root);
    pivot_here().step("pivot_root")?;
    rustix::system::sethostname(ask.hostname.as_bytes()).step("hostname")?;
    let _ = rustix::process::setsid();
    let proxy = ask.proxy_port.map(socket::listen_loopback).transpose().step("proxy socket")?;
    let oom_score = OomScore::open();
    set_dumpable(false).step("dumpable")?;
    drop_capabilities().step("capabilities")?;
    seccomp::install(&common.filter).step("seccomp")?;
    Ok(Inside { proxy, spool, upper, joined, oom_score })
}
