//! Quotas of projects: a sandbox's layers carry a project id of their own, and the kernel refuses what would bring them past the
//! disk limit. Only root can have them, on a file system that keeps them (ext4 or xfs, mounted with `prjquota`).
//!
//! Only the folders that the sandbox writes to carry the id: what Forkyard keeps beside them never fails for want of the
//! sandbox's room, and a layer that is sealed can be moved, since the kernel refuses a move only into a folder that hands an id
//! of its own down. What was sealed keeps its id, and so goes on to count. Copies are made outside, and do not.
//!
//! A folder is marked before its quota is set, and the quota is lifted before the folder goes: whoever finds the folder after a
//! crash finds the quota by it.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;

use rustix::fs::{Mode, OFlags};

use super::Inner;
use super::state::{self, Meta};
use crate::Result;

/// Ids that nobody gives out by hand; the highest bit stays clear for tools that count with a sign.
const IDS: std::ops::Range<u32> = 0x4000_0000..0x8000_0000;
/// Of so many ids hardly one is ever taken.
const TRIES: usize = 16;
/// What an entry counts at least, as the guest counts it where it is the one that measures: empty files fill a disk too.
const ENTRY_BYTES: u64 = 4096;
/// What it takes to mount a root over layers that are full already: overlayfs makes a few folders and files of its own.
const ROOM_BYTES: u64 = 1 << 20;

// libc has neither of these: <linux/quota.h>, <linux/dqblk_xfs.h>, <linux/fs.h>.
const PRJQUOTA: u32 = 2;
const Q_XGETQSTATV: u32 = ('X' as u32) << 8 | 8;
const FS_QSTATV_VERSION1: i8 = 1;
/// Limits of projects are kept, not only counted.
const FS_QUOTA_PDQ_ENFD: u16 = 1 << 5;
const FS_IOC_FSGETXATTR: libc::Ioctl = 0x801C_581F_u32 as libc::Ioctl;
const FS_IOC_FSSETXATTR: libc::Ioctl = 0x401C_5820_u32 as libc::Ioctl;
const FS_XFLAG_PROJINHERIT: u32 = 0x200;
/// The kernel counts limits in these, whatever the blocks of the file system.
const QUOTA_BLOCK: u64 = 1024;

/// `struct fsxattr` of the kernel.
#[repr(C)]
#[derive(Default)]
struct FsXattr {
    xflags: u32,
    extsize: u32,
    nextents: u32,
    projid: u32,
    cowextsize: u32,
    pad: [u8; 8],
}

/// `struct fs_quota_statv` of the kernel, of which only the flags matter here.
#[repr(C)]
#[derive(Default)]
struct QuotaState {
    version: i8,
    pad1: u8,
    flags: u16,
    incoredqs: u32,
    /// Three files of 24 bytes, times and warnings, and what is kept for later.
    rest: [u64; 19],
}

/// Why there are none, and how to get them.
pub struct Missing {
    pub why: String,
    pub fix: &'static str,
}

/// Of the file system that the state folder lies on.
pub struct Quotas {
    dir: OwnedFd,
}

/// The limit is somewhat wider until this is dropped: for as long as a root is mounted, and nothing runs on it.
pub struct Room {
    quotas: Quotas,
    project: u32,
    limit: u64,
}

impl Drop for Room {
    fn drop(&mut self) {
        if let Err(e) = self.quotas.limit(self.project, self.limit) {
            tracing::warn!(project = self.project, error = %e, "a disk limit is wider than it should be");
        }
    }
}

impl Quotas {
    /// Asks the kernel, each time: an administrator can turn them on and off.
    pub fn open(state: &Path) -> std::result::Result<Quotas, Missing> {
        const MOUNT: &str =
            "mount the file system of the state folder with prjquota (ext4: tune2fs -O project,quota first)";
        let missing = |why: String, fix| Missing { why, fix };
        if !rustix::process::geteuid().is_root() {
            return Err(missing("only root can set quotas".into(), "run as root"));
        }
        let open = || {
            let dir = open_dir(&state.join("sandboxes"))?;
            Ok::<_, io::Error>((attributes(&dir)?, dir))
        };
        let (attributes, dir) = open().map_err(|e| missing(format!("no project quotas: {e}"), MOUNT))?;
        if attributes.projid != 0 || attributes.xflags & FS_XFLAG_PROJINHERIT != 0 {
            // Whoever set that limits all of it, and files with an id of ours would be beyond that limit.
            let why = format!("the state folder belongs to project {} of somebody else", attributes.projid);
            return Err(missing(why, "use another state folder"));
        }
        let quotas = Quotas { dir };
        if !quotas.are_enforced() {
            return Err(missing("the file system keeps no project quotas".into(), MOUNT));
        }
        match quotas.get(0) {
            Ok(_) => Ok(quotas),
            Err(e) => {
                Err(missing(format!("project quotas can't be set: {e}"), "run as root, with CAP_SYS_ADMIN"))
            }
        }
    }

    fn are_enforced(&self) -> bool {
        let mut state = QuotaState { version: FS_QSTATV_VERSION1, ..QuotaState::default() };
        self.call(Q_XGETQSTATV, 0, (&raw mut state).cast()).is_ok() && state.flags & FS_QUOTA_PDQ_ENFD != 0
    }

    /// `data` is of the kind that the command wants.
    fn call(&self, command: u32, project: u32, data: *mut libc::c_void) -> io::Result<()> {
        let command = command << 8 | PRJQUOTA;
        // SAFETY: the kernel reads or writes one struct of the command's kind at `data`, which callers keep across the call.
        let done =
            unsafe { libc::syscall(libc::SYS_quotactl_fd, self.dir.as_raw_fd(), command, project, data) };
        if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    fn get(&self, project: u32) -> io::Result<libc::dqblk> {
        let mut found = empty();
        match self.call(libc::Q_GETQUOTA as u32, project, (&raw mut found).cast()) {
            // Of xfs, for one that nobody ever used.
            Err(e) if e.raw_os_error() == Some(libc::ENOENT) => Ok(empty()),
            other => other.map(|()| found),
        }
    }

    /// Both by bytes and by entries; zero lifts them.
    fn limit(&self, project: u32, bytes: u64) -> io::Result<()> {
        let mut limits = empty();
        limits.dqb_bhardlimit = bytes.div_ceil(QUOTA_BLOCK);
        limits.dqb_ihardlimit = bytes.div_ceil(ENTRY_BYTES);
        limits.dqb_valid = libc::QIF_LIMITS;
        self.call(libc::Q_SETQUOTA as u32, project, (&raw mut limits).cast())
    }

    /// An id that no file and no limit has, on these empty folders from now on.
    pub fn claim(&self, folders: &[&Path]) -> io::Result<u32> {
        for _ in 0..TRIES {
            let project = IDS.start | state::unique() as u32 & (IDS.end - IDS.start - 1);
            let found = self.get(project)?;
            let held = [found.dqb_curspace, found.dqb_curinodes, found.dqb_bhardlimit, found.dqb_ihardlimit];
            if held == [0; 4] {
                for folder in folders {
                    mark(folder, project)?;
                }
                return Ok(project);
            }
        }
        Err(io::Error::other("every project id that was tried is taken"))
    }

    /// What the files of a project take of the disk.
    pub fn used(&self, project: u32) -> io::Result<u64> {
        Ok(self.get(project)?.dqb_curspace)
    }

    /// Keeps the project to `limit` once the answer is dropped.
    fn room(self, project: u32, limit: u64) -> io::Result<Room> {
        let used = self.get(project)?;
        let holds = used.dqb_curspace.max(used.dqb_curinodes.saturating_mul(ENTRY_BYTES));
        self.limit(project, limit.max(holds).saturating_add(ROOM_BYTES))?;
        Ok(Room { quotas: self, project, limit })
    }
}

fn empty() -> libc::dqblk {
    // SAFETY: all zeros is a valid value of this struct of numbers.
    unsafe { std::mem::zeroed() }
}

fn open_dir(path: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(rustix::fs::open(path, flags, Mode::empty())?)
}

fn attributes(dir: &OwnedFd) -> io::Result<FsXattr> {
    let mut found = FsXattr::default();
    // SAFETY: the kernel writes one fsxattr, which lives across the call and has its layout.
    match unsafe { libc::ioctl(dir.as_raw_fd(), FS_IOC_FSGETXATTR, &raw mut found) } {
        0 => Ok(found),
        _ => Err(io::Error::last_os_error()),
    }
}

/// All that is made in the folder from now on has its id.
fn mark(folder: &Path, project: u32) -> io::Result<()> {
    let dir = open_dir(folder)?;
    let mut wanted = attributes(&dir)?;
    if (wanted.projid, wanted.xflags & FS_XFLAG_PROJINHERIT) == (project, FS_XFLAG_PROJINHERIT) {
        return Ok(());
    }
    wanted.projid = project;
    wanted.xflags |= FS_XFLAG_PROJINHERIT;
    // SAFETY: the kernel reads one fsxattr, which lives across the call and has its layout.
    match unsafe { libc::ioctl(dir.as_raw_fd(), FS_IOC_FSSETXATTR, &raw const wanted) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Of a folder that one of us marked.
pub fn project_of(folder: &Path) -> Option<u32> {
    let project = open_dir(folder).and_then(|dir| attributes(&dir)).ok()?.projid;
    IDS.contains(&project).then_some(project)
}

impl Inner {
    pub(super) fn quotas(&self) -> std::result::Result<Quotas, Missing> {
        Quotas::open(&self.state.root)
    }

    /// A folder that the sandbox writes to, or overlayfs for it: the two are of one project, or nothing could be moved between.
    pub(super) fn make_part(&self, path: &Path, project: Option<u32>) -> Result<()> {
        self.state.make_dir(path)?;
        match project {
            Some(project) => mark(path, project).map_err(|e| state::io_error(path, &e)),
            None => Ok(()),
        }
    }

    /// None if the kernel does not keep this sandbox to its disk limit by a quota.
    pub(super) fn room(&self, meta: &Meta) -> Option<Room> {
        let project = meta.project?;
        match self.quotas().map(|quotas| quotas.room(project, meta.limits.disk_bytes)) {
            Ok(Ok(room)) => return Some(room),
            Ok(Err(e)) => tracing::warn!(sandbox = %meta.id, error = %e, "no disk quota can be set"),
            Err(missing) => {
                tracing::warn!(sandbox = %meta.id, why = missing.why, "there is no disk quota any more")
            }
        }
        None
    }

    /// Nothing of it is left, and files that snapshots keep are limited by nobody.
    pub(super) fn lift_quota(&self, project: u32) {
        if let Ok(quotas) = self.quotas()
            && let Err(e) = quotas.limit(project, 0)
        {
            tracing::warn!(project, error = %e, "a disk quota stays behind");
        }
    }

    /// What the kernel counts of a sandbox with a quota.
    pub(super) fn used_by(&self, meta: &Meta) -> Option<u64> {
        let project = meta.project?;
        self.quotas().ok()?.used(project).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_structs_are_those_of_the_kernel() {
        assert_eq!(size_of::<FsXattr>(), 28);
        assert_eq!(size_of::<QuotaState>(), 160);
        assert_eq!(size_of::<libc::dqblk>(), 72);
    }

    #[test]
    fn a_folder_without_an_id_of_ours_has_no_project() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(project_of(dir.path()), None);
        assert_eq!(project_of(&dir.path().join("missing")), None);
    }
}
