//! From a path to a descriptor.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::OnceLock;

use forkyard_guest::protocol::Fault;
use rustix::fs::{AtFlags, CWD, Mode, OFlags, ResolveFlags, StatxFlags, openat2, statx};
use rustix::io::Errno;
use rustix::path::Arg;

use super::{FileError, Result, WORKSPACE};

/// The kernel's own bound.
const MAX_PATH: usize = 4096;
/// openat2 says EAGAIN when a rename races with it.
const RACES: usize = 32;

/// The mount that a container shares with the host.
static CLOSED: OnceLock<u64> = OnceLock::new();

/// From now on nobody asks for a file on that mount, by whatever path.
pub fn close(dir: &OwnedFd) {
    if let Some(mount) = mount_of(dir) {
        let _ = CLOSED.set(mount);
    }
}

/// None before kernel 5.8.
fn mount_of(file: &OwnedFd) -> Option<u64> {
    let seen = statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::MNT_ID).ok()?;
    StatxFlags::from_bits_retain(seen.stx_mask).contains(StatxFlags::MNT_ID).then_some(seen.stx_mnt_id)
}

fn is_closed(file: &OwnedFd) -> bool {
    CLOSED.get().is_some_and(|closed| mount_of(file) == Some(*closed))
}

/// The path from the root, for a path that may be relative to the workspace.
pub fn absolute(path: &str) -> Result<String> {
    if path.is_empty() || path.len() >= MAX_PATH || path.contains('\0') {
        let shown: String = path.chars().take(80).collect();
        return Err(FileError::new(
            Fault::Invalid,
            format!("{shown:?} is not a path: use 1 to {} bytes", MAX_PATH - 1),
        ));
    }
    Ok(if path.starts_with('/') { path.to_string() } else { format!("{WORKSPACE}/{path}") })
}

/// Opens inside the root; no magic link of /proc is followed.
pub fn open(path: &str, flags: OFlags) -> Result<OwnedFd> {
    let full = absolute(path)?;
    open_raw(&full, flags).map_err(|e| FileError::errno(path, e))
}

pub fn open_raw(full: impl Arg + Copy, flags: OFlags) -> rustix::io::Result<OwnedFd> {
    for _ in 0..RACES {
        match openat2(CWD, full, flags | OFlags::CLOEXEC, Mode::empty(), ResolveFlags::NO_MAGICLINKS) {
            Err(Errno::AGAIN | Errno::INTR) => {}
            Ok(file) if is_own(&file) || is_closed(&file) => return Err(Errno::ACCESS),
            other => return other,
        }
    }
    Err(Errno::AGAIN)
}

/// What the kernel tells of the guest itself, by the number of any of its threads, is nobody's business: commands are refused it
/// too. Except for what is the same for all: /proc/mounts and /proc/net are links to what is the reader's own.
fn is_own(file: &OwnedFd) -> bool {
    const PROC: u64 = 0x9fa0;
    if rustix::fs::fstatfs(file).is_ok_and(|fs| fs.f_type as u64 != PROC) {
        return false;
    }
    let link = rustix::fs::readlink(format!("/proc/self/fd/{}", file.as_raw_fd()), Vec::new());
    let Some(path) = link.ok().and_then(|link| link.into_string().ok()) else { return true };
    let Some(path) = path.strip_prefix("/proc/") else { return false };
    let (thread, rest) = path.split_once('/').unwrap_or((path, ""));
    let is_thread = thread.bytes().all(|b| b.is_ascii_digit())
        && rustix::fs::access(format!("/proc/self/task/{thread}"), rustix::fs::Access::EXISTS).is_ok();
    is_thread && !(rest == "mounts" || rest == "net" || rest.starts_with("net/"))
}

/// The folder that `path` lies in, and its last name. Folders that are missing are made if `make` says so.
pub fn parent(path: &str, make: bool) -> Result<(OwnedFd, String)> {
    let full = absolute(path)?;
    let trimmed = full.trim_end_matches('/');
    let (dir, name) = trimmed.rsplit_once('/').unwrap_or(("", trimmed));
    if name.is_empty() || name == "." || name == ".." {
        return Err(FileError::new(Fault::Invalid, format!("{path}: has no file name at its end")));
    }
    let dir = if dir.is_empty() { "/" } else { dir };
    let flags = OFlags::PATH | OFlags::DIRECTORY;
    match open_raw(dir, flags) {
        Ok(fd) => Ok((fd, name.to_string())),
        Err(Errno::NOENT) if make => Ok((make_dirs(path, dir)?, name.to_string())),
        Err(e) => Err(FileError::errno(path, e)),
    }
}

/// Makes the folders of `dir` that are missing, one by one, each from the descriptor of the one before.
pub fn make_dirs(shown: &str, dir: &str) -> Result<OwnedFd> {
    let failed = |e| FileError::errno(shown, e);
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let mut at = open_raw("/", flags).map_err(failed)?;
    for part in dir.split('/').filter(|part| !part.is_empty()) {
        match rustix::fs::mkdirat(at.as_fd(), part, Mode::from_raw_mode(0o755)) {
            // A read-only tree on the way says so before it says that the folder exists.
            Ok(()) | Err(Errno::EXIST | Errno::ROFS | Errno::ACCESS) => {}
            Err(e) => return Err(failed(e)),
        }
        at = openat2(at.as_fd(), part, flags, Mode::empty(), ResolveFlags::NO_MAGICLINKS).map_err(failed)?;
        if is_closed(&at) {
            return Err(failed(Errno::ACCESS));
        }
    }
    Ok(at)
}
