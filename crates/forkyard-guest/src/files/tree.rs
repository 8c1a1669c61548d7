//! Whole trees: remove, measure, copy. One descriptor is open at a time however deep a tree is, and no symlink is followed:
//! what a sandbox built is walked, not trusted.

use std::ffi::{CStr, CString};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::fs::{AtFlags, CWD, Dir, FileType, FlockOperation, Mode, OFlags};
use rustix::io::{Errno, Result as IoResult};

pub use super::copy::copy;
use crate::sys::{Result, Step};

pub const OPEN_DIR: OFlags = OFlags::RDONLY
    .union(OFlags::DIRECTORY)
    .union(OFlags::NOFOLLOW)
    .union(OFlags::CLOEXEC)
    .union(OFlags::NONBLOCK);

/// What is done at each place of a walk.
pub trait Visitor {
    /// Anything that is not a directory.
    fn file(&mut self, dir: BorrowedFd<'_>, name: &CStr) -> IoResult<()>;
    /// A directory, before its entries.
    fn enter(&mut self, dir: BorrowedFd<'_>, name: &CStr) -> IoResult<()>;
    /// The same, after its entries.
    fn leave(&mut self, parent: BorrowedFd<'_>, dir: BorrowedFd<'_>, name: &CStr) -> IoResult<()>;
}

struct Level {
    name: CString,
    /// Who it was when it was entered: going up must lead back there.
    identity: (u64, u64),
    subdirs: Vec<CString>,
}

fn identity(dir: BorrowedFd<'_>) -> IoResult<(u64, u64)> {
    let stat = rustix::fs::fstat(dir)?;
    Ok((stat.st_dev, stat.st_ino))
}

/// A folder that its owner closed to itself, where no capability helps: opened for a moment, since we are the same user.
fn open_closed(dir: BorrowedFd<'_>, name: &CStr) -> IoResult<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    // By descriptor: the name may mean something else a moment later.
    let closed = rustix::fs::openat(dir, name, flags, Mode::empty())?;
    let mode = Mode::from_raw_mode(rustix::fs::fstat(&closed)?.st_mode);
    let path = format!("/proc/self/fd/{}", closed.as_raw_fd());
    rustix::fs::chmod(&path, mode | Mode::RUSR | Mode::XUSR)?;
    let opened = rustix::fs::openat(&closed, ".", OPEN_DIR, Mode::empty());
    rustix::fs::chmod(&path, mode)?;
    opened
}

/// Visits the files of `dir`; returns its directories.
fn visit_entries(dir: BorrowedFd<'_>, visitor: &mut dyn Visitor) -> IoResult<Vec<CString>> {
    let mut subdirs = Vec::new();
    // Not opened by its path again: its owner may have closed it.
    for entry in Dir::new(rustix::io::fcntl_dupfd_cloexec(dir, 0)?)? {
        let entry = entry?;
        let name = entry.file_name();
        if matches!(name.to_bytes(), b"." | b"..") {
            continue;
        }
        let kind = match entry.file_type() {
            FileType::Unknown => match rustix::fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW) {
                Ok(stat) => FileType::from_raw_mode(stat.st_mode),
                Err(Errno::NOENT) => continue,
                Err(e) => return Err(e),
            },
            known => known,
        };
        if kind == FileType::Directory {
            subdirs.push(name.to_owned());
        } else {
            match visitor.file(dir, name) {
                Ok(()) | Err(Errno::NOENT) => {} // gone since it was listed
                Err(e) => return Err(e),
            }
        }
    }
    Ok(subdirs)
}

/// Walks everything below `root`, not `root` itself.
pub fn walk(root: BorrowedFd<'_>, visitor: &mut dyn Visitor) -> IoResult<()> {
    let mut at: OwnedFd = rustix::fs::openat(root, ".", OPEN_DIR, Mode::empty())?;
    let subdirs = visit_entries(at.as_fd(), visitor)?;
    let mut levels = vec![Level { name: CString::default(), identity: identity(at.as_fd())?, subdirs }];
    while let Some(level) = levels.last_mut() {
        if let Some(name) = level.subdirs.pop() {
            let below = match rustix::fs::openat(at.as_fd(), &name, OPEN_DIR, Mode::empty()) {
                Ok(below) => below,
                Err(Errno::NOENT) => continue,
                Err(Errno::ACCESS) => open_closed(at.as_fd(), &name)?,
                Err(e) => return Err(e),
            };
            visitor.enter(below.as_fd(), &name)?;
            let subdirs = visit_entries(below.as_fd(), visitor)?;
            levels.push(Level { name, identity: identity(below.as_fd())?, subdirs });
            at = below;
        } else if let Some(done) = levels.pop() {
            let Some(parent) = levels.last() else { return Ok(()) };
            let up = rustix::fs::openat(at.as_fd(), "..", OPEN_DIR, Mode::empty())?;
            if identity(up.as_fd())? != parent.identity {
                return Err(Errno::STALE); // moved under our feet
            }
            visitor.leave(up.as_fd(), at.as_fd(), &done.name)?;
            at = up;
        }
    }
    Ok(())
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Size {
    pub bytes: u64,
    pub entries: u64,
}

/// The kernel counts blocks of this size whatever the file system's own.
const BLOCK: u64 = 512;
/// What an entry counts at least: empty files fill a disk too, by its inodes.
pub const ENTRY_BYTES: u64 = 4096;

struct Measure(Size);

impl Measure {
    fn add(&mut self, stat: &rustix::fs::Stat) {
        self.0.bytes += (stat.st_blocks as u64 * BLOCK).max(ENTRY_BYTES);
        self.0.entries += 1;
    }
}

impl Visitor for Measure {
    fn file(&mut self, dir: BorrowedFd<'_>, name: &CStr) -> IoResult<()> {
        self.add(&rustix::fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW)?);
        Ok(())
    }
    fn enter(&mut self, dir: BorrowedFd<'_>, _: &CStr) -> IoResult<()> {
        self.add(&rustix::fs::fstat(dir)?);
        Ok(())
    }
    fn leave(&mut self, _: BorrowedFd<'_>, _: BorrowedFd<'_>, _: &CStr) -> IoResult<()> {
        Ok(())
    }
}

pub fn measure_at(dir: BorrowedFd<'_>) -> Result<Size> {
    let mut measure = Measure(Size::default());
    walk(dir, &mut measure).step("measure")?;
    Ok(measure.0)
}

pub fn open(path: &str) -> Result<OwnedFd> {
    rustix::fs::open(path, OPEN_DIR, Mode::empty()).step("open")
}

pub fn measure(path: &str) -> Result<Size> {
    measure_at(open(path)?.as_fd())
}

struct Remove;

impl Visitor for Remove {
    fn file(&mut self, dir: BorrowedFd<'_>, name: &CStr) -> IoResult<()> {
        match rustix::fs::unlinkat(dir, name, AtFlags::empty()) {
            Err(Errno::NOENT) => Ok(()),
            other => other,
        }
    }
    fn enter(&mut self, _: BorrowedFd<'_>, _: &CStr) -> IoResult<()> {
        Ok(())
    }
    fn leave(&mut self, parent: BorrowedFd<'_>, _: BorrowedFd<'_>, name: &CStr) -> IoResult<()> {
        match rustix::fs::unlinkat(parent, name, AtFlags::REMOVEDIR) {
            Err(Errno::NOENT) => Ok(()),
            other => other,
        }
    }
}

/// Removes a directory with all it holds; Ok if it is gone.
pub fn remove_at(dir: BorrowedFd<'_>, name: &str) -> Result<()> {
    let target = match rustix::fs::openat(dir, name, OPEN_DIR, Mode::empty()) {
        Err(Errno::NOENT) => return Ok(()),
        other => other.step("remove")?,
    };
    walk(target.as_fd(), &mut Remove).step("remove")?;
    match rustix::fs::unlinkat(dir, name, AtFlags::REMOVEDIR) {
        Err(Errno::NOENT) => Ok(()),
        other => other.step("remove"),
    }
}

/// The same for anything, unless somebody is at it already: two walks would pull the ground from under each other.
pub fn remove(path: &str) -> Result<()> {
    let held = match rustix::fs::open(path, OPEN_DIR, Mode::empty()) {
        Err(Errno::NOENT) => return Ok(()),
        Err(Errno::NOTDIR | Errno::LOOP) => {
            return match rustix::fs::unlink(path) {
                Err(Errno::NOENT) => Ok(()),
                other => other.step("remove"),
            };
        }
        // Closed by its owner: the walk opens it.
        other => other.ok(),
    };
    if let Some(dir) = &held
        && let Err(Errno::WOULDBLOCK) = rustix::fs::flock(dir, FlockOperation::NonBlockingLockExclusive)
    {
        return Ok(());
    }
    remove_at(CWD, path)
}
