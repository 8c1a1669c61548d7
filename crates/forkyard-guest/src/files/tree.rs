//! Whole trees: remove, measure, copy. One descriptor is open at a time however deep a tree is, and no symlink is followed:
//! what a sandbox built is walked, not trusted.

use std::collections::HashSet;
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

/// Visits the files of `dir`; its directories are added to `subdirs`.
fn visit_entries(dir: BorrowedFd<'_>, visitor: &mut dyn Visitor, subdirs: &mut Vec<CString>) -> IoResult<()> {
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
    Ok(())
}

/// Walks everything below `root`, not `root` itself. Ends at the first thing that is wrong.
pub fn walk(root: BorrowedFd<'_>, visitor: &mut dyn Visitor) -> IoResult<()> {
    go(root, visitor, &mut |missed| match missed {
        Missed::Gone => Ok(()),
        Missed::Failed(e) => Err(e),
    })
}

/// Why a walk did not see something.
enum Missed {
    /// A folder is not there any more since it was listed.
    Gone,
    Failed(Errno),
}

/// `missed` says whether to go on with the rest.
fn go(
    root: BorrowedFd<'_>,
    visitor: &mut dyn Visitor,
    missed: &mut dyn FnMut(Missed) -> IoResult<()>,
) -> IoResult<()> {
    let mut at: OwnedFd = rustix::fs::openat(root, ".", OPEN_DIR, Mode::empty())?;
    let mut subdirs = Vec::new();
    if let Err(e) = visit_entries(at.as_fd(), visitor, &mut subdirs) {
        missed(Missed::Failed(e))?;
    }
    let mut levels = vec![Level { name: CString::default(), identity: identity(at.as_fd())?, subdirs }];
    while let Some(level) = levels.last_mut() {
        if let Some(name) = level.subdirs.pop() {
            let below = match open_below(at.as_fd(), &name) {
                Ok(below) => below,
                Err(Errno::NOENT) => {
                    missed(Missed::Gone)?;
                    continue;
                }
                Err(e) => {
                    missed(Missed::Failed(e))?;
                    continue;
                }
            };
            if let Err(e) = visitor.enter(below.as_fd(), &name) {
                missed(Missed::Failed(e))?;
                continue;
            }
            let mut subdirs = Vec::new();
            if let Err(e) = visit_entries(below.as_fd(), visitor, &mut subdirs) {
                missed(Missed::Failed(e))?;
            }
            levels.push(Level { name, identity: identity(below.as_fd())?, subdirs });
            at = below;
        } else if let Some(done) = levels.pop() {
            let Some(parent) = levels.last() else { return Ok(()) };
            match up(at.as_fd(), parent.identity) {
                Ok(up) => {
                    visitor.leave(up.as_fd(), at.as_fd(), &done.name)?;
                    at = up;
                }
                Err(e) => {
                    missed(Missed::Failed(e))?;
                    at = find_again(root, &mut levels)?;
                }
            }
        }
    }
    Ok(())
}

fn open_below(at: BorrowedFd<'_>, name: &CStr) -> IoResult<OwnedFd> {
    match rustix::fs::openat(at, name, OPEN_DIR, Mode::empty()) {
        Err(Errno::ACCESS) => open_closed(at, name),
        opened => opened,
    }
}

/// The folder above, if it is the one that this was entered from.
fn up(at: BorrowedFd<'_>, parent: (u64, u64)) -> IoResult<OwnedFd> {
    let up = rustix::fs::openat(at, "..", OPEN_DIR, Mode::empty())?;
    // Moved under our feet?
    if identity(up.as_fd())? == parent { Ok(up) } else { Err(Errno::STALE) }
}

/// After the ground moved: the deepest folder of the way down that is where it was. Those below it are dropped.
fn find_again(root: BorrowedFd<'_>, levels: &mut Vec<Level>) -> IoResult<OwnedFd> {
    let mut at = rustix::fs::openat(root, ".", OPEN_DIR, Mode::empty())?;
    for depth in 1..levels.len() {
        match open_same(at.as_fd(), &levels[depth]) {
            Ok(below) => at = below,
            Err(_) => {
                levels.truncate(depth);
                break;
            }
        }
    }
    Ok(at)
}

fn open_same(at: BorrowedFd<'_>, level: &Level) -> IoResult<OwnedFd> {
    let below = open_below(at, &level.name)?;
    if identity(below.as_fd())? == level.identity { Ok(below) } else { Err(Errno::STALE) }
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Size {
    pub bytes: u64,
    pub entries: u64,
}

/// The kernel counts blocks of this size whatever the file system's own.
pub const BLOCK: u64 = 512;
/// What an entry counts at least: empty files fill a disk too, by its inodes.
pub const ENTRY_BYTES: u64 = 4096;

#[derive(Default)]
struct Measure {
    size: Size,
    /// Folders that were counted: one that is moved ahead of the walk counts once, and can't keep it busy.
    seen: HashSet<(u64, u64)>,
    /// So does a file of several names.
    links_once: bool,
}

impl Measure {
    fn add(&mut self, stat: &rustix::fs::Stat) {
        self.size.bytes += (stat.st_blocks as u64 * BLOCK).max(ENTRY_BYTES);
        self.size.entries += 1;
    }
}

impl Visitor for Measure {
    fn file(&mut self, dir: BorrowedFd<'_>, name: &CStr) -> IoResult<()> {
        let stat = rustix::fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW)?;
        if stat.st_nlink == 1 || !self.links_once || self.seen.insert((stat.st_dev, stat.st_ino)) {
            self.add(&stat);
        }
        Ok(())
    }
    fn enter(&mut self, dir: BorrowedFd<'_>, _: &CStr) -> IoResult<()> {
        let stat = rustix::fs::fstat(dir)?;
        if !self.seen.insert((stat.st_dev, stat.st_ino)) {
            return Err(Errno::STALE);
        }
        self.add(&stat);
        Ok(())
    }
    fn leave(&mut self, _: BorrowedFd<'_>, _: BorrowedFd<'_>, _: &CStr) -> IoResult<()> {
        Ok(())
    }
}

/// What a tree holds while others may change it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Survey {
    pub size: Size,
    /// Every folder that was listed was read: none was moved away, or fails.
    pub whole: bool,
}

/// Does not fail: what can be seen is counted.
pub fn survey(dir: BorrowedFd<'_>) -> Survey {
    let (mut measure, mut whole) = (Measure::default(), true);
    let walked = go(dir, &mut measure, &mut |missed| {
        match missed {
            // A folder that is somebody else's and closed to us: nothing of ours is in it.
            Missed::Failed(Errno::PERM) => {}
            Missed::Gone | Missed::Failed(_) => whole = false,
        }
        Ok(())
    });
    Survey { size: measure.size, whole: whole && walked.is_ok() }
}

pub fn open(path: &str) -> Result<OwnedFd> {
    rustix::fs::open(path, OPEN_DIR, Mode::empty()).step("open")
}

pub fn measure(path: &str) -> Result<Size> {
    let dir = open(path)?;
    let mut measure = Measure { links_once: true, ..Measure::default() };
    walk(dir.as_fd(), &mut measure).step("measure")?;
    Ok(measure.size)
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
pub fn remove_at<N: rustix::path::Arg + Copy>(dir: BorrowedFd<'_>, name: N) -> Result<()> {
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
    remove_by(path, FlockOperation::NonBlockingLockExclusive)
}

/// `turn`: whether to wait until nobody else is at it.
fn remove_by(path: &str, turn: FlockOperation) -> Result<()> {
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
        && let Err(Errno::WOULDBLOCK) = rustix::io::retry_on_intr(|| rustix::fs::flock(dir, turn))
    {
        return Ok(());
    }
    remove_at(CWD, path)
}

/// The same as a program, for a folder of ours that somebody may have closed. It is gone when this ends well: whoever asked goes
/// on with what is around it.
pub fn remove_command(path: &str) -> std::process::ExitCode {
    let _ = rustix::fs::chmod(path, Mode::RWXU);
    match remove_by(path, FlockOperation::LockExclusive) {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("{}: {}", e.step, Errno::from_raw_os_error(e.errno));
            std::process::ExitCode::FAILURE
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    /// A folder of its own for a test.
    pub fn scratch(name: &str) -> PathBuf {
        let dir = std::env::temp_dir().join(format!("forkyard-tree-{}-{name}", std::process::id()));
        let _ = std::fs::remove_dir_all(&dir);
        std::fs::create_dir(&dir).unwrap();
        dir
    }

    #[test]
    fn folders_that_move_hide_nothing_else() {
        const FOLDERS: usize = 40;
        const DEPTH: usize = 30;
        const FILE: u64 = 1 << 20;
        let root = scratch("moves");
        let moves = |i: usize| (root.join(format!("a/{i}")), root.join(format!("b/{i}")));
        std::fs::create_dir_all(root.join("b")).unwrap();
        for i in 0..FOLDERS {
            std::fs::create_dir_all(moves(i).0.join("d/".repeat(DEPTH))).unwrap();
        }
        // Beside the moving folders, on both sides of them in any order.
        for name in ["0", "z"] {
            std::fs::create_dir_all(root.join(name)).unwrap();
            std::fs::write(root.join(name).join("f"), vec![1; FILE as usize]).unwrap();
        }
        let still = survey(open(root.to_str().unwrap()).unwrap().as_fd());
        assert!(still.whole && still.size.entries == 6 + (FOLDERS * (DEPTH + 1)) as u64, "{still:?}");
        let stop = Arc::new(AtomicBool::new(false));
        let (stopped, pairs) = (Arc::clone(&stop), (0..FOLDERS).map(moves).collect::<Vec<_>>());
        let mover = std::thread::spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                for (a, b) in &pairs {
                    std::fs::rename(a, b).unwrap();
                }
                for (a, b) in &pairs {
                    std::fs::rename(b, a).unwrap();
                }
            }
        });
        let dir = open(root.to_str().unwrap()).unwrap();
        let mut disturbed = 0;
        for _ in 0..50 {
            let seen = survey(dir.as_fd());
            assert!(seen.size.bytes >= 2 * FILE, "{seen:?}");
            assert!(seen.size.entries <= still.size.entries, "{seen:?} counts some twice");
            disturbed += u32::from(!seen.whole);
        }
        stop.store(true, Ordering::Relaxed);
        mover.join().unwrap();
        assert!(disturbed > 0, "the walk noticed no move");
        assert_eq!(survey(dir.as_fd()), still);
        remove(root.to_str().unwrap()).unwrap();
    }

    #[test]
    fn who_asks_by_the_program_waits_for_another_who_is_at_it() {
        let root = scratch("turns");
        std::fs::create_dir_all(root.join("a/b")).unwrap();
        let path = root.to_str().unwrap().to_string();
        let other = open(&path).unwrap();
        rustix::fs::flock(&other, FlockOperation::NonBlockingLockExclusive).unwrap();
        remove(&path).unwrap();
        assert!(root.exists(), "one is at it");
        let asked = std::thread::spawn(move || {
            assert_eq!(remove_command(&path), std::process::ExitCode::SUCCESS);
        });
        let me = std::process::id().to_string();
        let waits = |line: &str| {
            let words: Vec<&str> = line.split_whitespace().collect();
            words.contains(&"->") && words.contains(&me.as_str())
        };
        while !std::fs::read_to_string("/proc/locks").unwrap().lines().any(waits) {
            assert!(!asked.is_finished(), "it did not wait");
            std::thread::yield_now();
        }
        assert!(root.exists());
        drop(other);
        asked.join().unwrap();
        assert!(!root.exists());
    }

    #[test]
    fn what_is_not_seen_is_no_zero() {
        let root = scratch("none");
        let dir = open(root.to_str().unwrap()).unwrap();
        assert_eq!(survey(dir.as_fd()), Survey { size: Size::default(), whole: true });
        std::fs::remove_dir(&root).unwrap();
        // A pipe can't be walked.
        let (pipe, _) = rustix::pipe::pipe().unwrap();
        assert!(!survey(pipe.as_fd()).whole);
    }
}
