//! The new mount API: file systems and trees as detached mounts, attached by descriptor.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::fs::{CWD, Mode, OFlags, ResolveFlags, StatVfsMountFlags, openat2};
use rustix::io::Result;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MountPropagationFlags, MoveMountFlags, OpenTreeFlags,
    UnmountFlags, fsconfig_create, fsconfig_set_flag, fsconfig_set_string, fsmount, fsopen, move_mount,
    open_tree, unmount,
};

use super::check;

pub const LOCKED_DOWN: MountAttrFlags = MountAttrFlags::MOUNT_ATTR_NOSUID
    .union(MountAttrFlags::MOUNT_ATTR_NODEV)
    .union(MountAttrFlags::MOUNT_ATTR_NOEXEC);

/// A new file system as a detached mount. An option without a value is a flag.
pub fn new_fs(kind: &str, options: &[(&str, Option<&str>)], attrs: MountAttrFlags) -> Result<OwnedFd> {
    finish_fs(fsopen(kind, FsOpenFlags::FSOPEN_CLOEXEC)?, options, attrs)
}

fn finish_fs(fs: OwnedFd, options: &[(&str, Option<&str>)], attrs: MountAttrFlags) -> Result<OwnedFd> {
    for (key, value) in options {
        match value {
            Some(value) => fsconfig_set_string(fs.as_fd(), *key, *value)?,
            None => fsconfig_set_flag(fs.as_fd(), *key)?,
        }
    }
    fsconfig_create(fs.as_fd())?;
    fsmount(fs.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, attrs)
}

/// A detached copy of the mount at `path`; `recursive` takes what is mounted below it too.
pub fn clone_tree(path: &str, recursive: bool) -> Result<OwnedFd> {
    let mut flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    if recursive {
        flags |= OpenTreeFlags::AT_RECURSIVE;
    }
    open_tree(CWD, path, flags)
}

/// The same of the directory that is open.
pub fn clone_tree_at(dir: BorrowedFd<'_>, recursive: bool) -> Result<OwnedFd> {
    let mut flags =
        OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC | OpenTreeFlags::AT_EMPTY_PATH;
    if recursive {
        flags |= OpenTreeFlags::AT_RECURSIVE;
    }
    open_tree(dir, "", flags)
}

/// Attaches a detached mount at a path that only this process could have made.
pub fn attach(mount: OwnedFd, path: &str) -> Result<()> {
    move_mount(mount.as_fd(), "", CWD, path, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)
}

/// Attaches a detached mount below `root`, whose content may be hostile: no symlink is followed on the way.
pub fn attach_below(mount: BorrowedFd<'_>, root: BorrowedFd<'_>, path: &str) -> Result<()> {
    let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_SYMLINKS;
    let target = openat2(root, path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty(), resolve)?;
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
    move_mount(mount, "", target, "", flags)
}

/// Shows the files of a detached mount with the ids that `namespace` gives them.
pub fn map_owner(mount: BorrowedFd<'_>, namespace: BorrowedFd<'_>) -> Result<()> {
    let attr = MountAttr {
        attr_set: libc::MOUNT_ATTR_IDMAP,
        attr_clr: 0,
        propagation: 0,
        userns_fd: namespace.as_raw_fd() as u64,
    };
    mount_setattr(mount, &attr, false)
}

#[repr(C)]
struct MountAttr {
    attr_set: u64,
    attr_clr: u64,
    propagation: u64,
    userns_fd: u64,
}

/// Sets attributes of a detached or attached mount and cuts it off from the propagation of others.
pub fn set_attributes(mount: BorrowedFd<'_>, set: MountAttrFlags, recursive: bool) -> Result<()> {
    let attr =
        MountAttr { attr_set: set.bits().into(), attr_clr: 0, propagation: libc::MS_PRIVATE, userns_fd: 0 };
    mount_setattr(mount, &attr, recursive)
}

fn mount_setattr(mount: BorrowedFd<'_>, attr: &MountAttr, recursive: bool) -> Result<()> {
    let flags = libc::AT_EMPTY_PATH | if recursive { libc::AT_RECURSIVE } else { 0 };
    // SAFETY: the path is a static C string, `attr` lives across the call and its size is the one passed.
    let result = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            mount.as_raw_fd(),
            c"".as_ptr(),
            flags,
            std::ptr::from_ref(attr),
            size_of::<MountAttr>(),
        )
    };
    check(result).map(drop)
}

/// Nothing that is mounted here from now on shows elsewhere, nor the other way round.
pub fn make_all_private() -> Result<()> {
    rustix::mount::mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)
}

/// The current directory, which is a mount, becomes `/`; the old root goes away.
pub fn pivot_here() -> Result<()> {
    rustix::process::pivot_root(".", ".")?;
    unmount(".", UnmountFlags::DETACH)?;
    rustix::process::chdir("/")
}

/// `upper` over `lower` (topmost first), as a detached mount.
pub fn overlay(upper: &str, work: &str, lower: &[String]) -> Result<OwnedFd> {
    let fs = fsopen("overlay", FsOpenFlags::FSOPEN_CLOEXEC)?;
    // Before 6.5 overlayfs takes any word and judges them all at the end, with a line in the kernel's log. It knows only the
    // joined form, and so do some versions after it.
    if fsconfig_set_flag(fs.as_fd(), "forkyard").is_ok() {
        return joined_overlay(upper, work, lower);
    }
    let layers: Vec<(&str, &str)> = lower.iter().map(|layer| ("lowerdir+", layer.as_str())).collect();
    match finish_overlay(fs, &layers, upper, work) {
        Err(rustix::io::Errno::INVAL) => joined_overlay(upper, work, lower),
        other => other,
    }
}

fn finish_overlay(fs: OwnedFd, layers: &[(&str, &str)], upper: &str, work: &str) -> Result<OwnedFd> {
    let mut options: Vec<(&str, Option<&str>)> = layers.iter().map(|(key, at)| (*key, Some(*at))).collect();
    options.extend([("upperdir", Some(upper)), ("workdir", Some(work))]);
    // userxattr: an ordinary user may not use trusted attributes. volatile: without it each unmount syncs the host's whole
    // file system; a durable checkpoint syncs by itself.
    options.extend([("userxattr", None), ("volatile", None)]);
    let made = finish_fs(fs, &options, MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV)?;
    // Where overlayfs can't use the folder for its work, it lets nobody write, and says so in the kernel's log alone.
    match rustix::fs::fstatvfs(&made)?.f_flag.contains(StatVfsMountFlags::RDONLY) {
        true => Err(rustix::io::Errno::ROFS),
        false => Ok(made),
    }
}

/// All layers in one value, which the kernel bounds to 256 bytes: each is named by the number of a descriptor, as
/// /proc/self/fd has it.
fn joined_overlay(upper: &str, work: &str, lower: &[String]) -> Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let open = |layer: &String| rustix::fs::open(layer.as_str(), flags, Mode::empty());
    let layers: Vec<OwnedFd> = lower.iter().map(open).collect::<Result<_>>()?;
    let names: Vec<String> = layers.iter().map(|layer| layer.as_raw_fd().to_string()).collect();
    let before = rustix::fs::open(".", flags, Mode::empty())?;
    let fs = fsopen("overlay", FsOpenFlags::FSOPEN_CLOEXEC)?;
    rustix::process::chdir("/proc/self/fd")?;
    let made = finish_overlay(fs, &[("lowerdir", &names.join(":"))], upper, work);
    rustix::process::fchdir(before)?;
    made
}
