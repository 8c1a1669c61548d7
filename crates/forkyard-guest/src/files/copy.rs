//! A layer, copied as it is: holes stay holes, links stay links, overlayfs' own marks stay.

use std::collections::HashMap;
use std::ffi::{CStr, CString};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::fs::{AtFlags, FileType, Mode, OFlags, SeekFrom, Timestamps, XattrFlags};
use rustix::io::{Errno, Result as IoResult};

use super::folders::{Folders, Place, ROOT};
use super::tree::{OPEN_DIR, Size, Visitor, walk};
use crate::sys::{Result, Step};

/// Copied between two looks at the clock.
const STRIDE: u64 = 8 << 20;
/// Copied at once by hand.
const BUFFER: usize = 1 << 20;
/// The kernel's bound on an extended attribute.
const MAX_XATTR: usize = 64 << 10;

/// None: it took longer than the limit; what was copied is to be removed.
pub fn copy(source: BorrowedFd<'_>, to: &str, limit_ms: Option<u64>) -> Result<Option<Size>> {
    match rustix::fs::mkdir(to, Mode::from_raw_mode(0o700)) {
        Ok(()) | Err(Errno::EXIST) => {}
        Err(e) => return Err(e).step("copy to"),
    }
    let root = rustix::fs::open(to, OPEN_DIR, Mode::empty()).step("copy to")?;
    let mut copier = Copier {
        at: rustix::io::dup(&root).step("copy to")?,
        root,
        path: Vec::new(),
        folders: Folders::default(),
        links: HashMap::new(),
        until: limit_ms.map(|ms| Instant::now() + Duration::from_millis(ms)),
        size: Size::default(),
    };
    match walk(source, &mut copier) {
        Ok(()) => {}
        Err(Errno::TIMEDOUT) => return Ok(None),
        Err(e) => return Err(e).step("copy"),
    }
    attributes(source, copier.root.as_fd()).step("copy")?;
    Ok(Some(copier.size))
}

struct Copier {
    root: OwnedFd,
    at: OwnedFd,
    /// Names from the root to `at`, each with its number in `folders` once that is needed.
    path: Vec<(CString, Option<usize>)>,
    /// Those that hold the first of several names of a file.
    folders: Folders,
    /// Where these names went.
    links: HashMap<(u64, u64), Place>,
    until: Option<Instant>,
    size: Size,
}

impl Copier {
    fn in_time(&self) -> IoResult<()> {
        match self.until {
            Some(until) if Instant::now() > until => Err(Errno::TIMEDOUT),
            _ => Ok(()),
        }
    }

    /// The number of the folder that is copied to.
    fn folder(&mut self) -> usize {
        let (folders, mut parent) = (&mut self.folders, ROOT);
        for (name, number) in &mut self.path {
            parent = *number.get_or_insert_with(|| folders.add(parent, name.clone()));
        }
        parent
    }

    fn content(&mut self, from: BorrowedFd<'_>, to: BorrowedFd<'_>, size: u64) -> IoResult<()> {
        if rustix::fs::ioctl_ficlone(to, from).is_ok() {
            return Ok(());
        }
        rustix::fs::ftruncate(to, size)?;
        let mut at = 0;
        while at < size {
            let data = match rustix::fs::seek(from, SeekFrom::Data(at)) {
                Ok(data) => data,
                Err(Errno::NXIO) => break, // a hole to the end
                Err(e) => return Err(e),
            };
            let hole = rustix::fs::seek(from, SeekFrom::Hole(data))?.min(size);
            let (mut read_at, mut write_at) = (data, data);
            while read_at < hole {
                self.in_time()?;
                let part = usize::try_from((hole - read_at).min(STRIDE)).expect("a stride fits");
                match rustix::fs::copy_file_range(from, Some(&mut read_at), to, Some(&mut write_at), part) {
                    Ok(0) => break,
                    Ok(n) => self.size.bytes += n as u64,
                    // Between file systems the bytes pass through here.
                    Err(Errno::XDEV) => {
                        let n = by_hand(from, to, read_at, part)?;
                        if n == 0 {
                            break;
                        }
                        (read_at, write_at) = (read_at + n, write_at + n);
                        self.size.bytes += n;
                    }
                    Err(e) => return Err(e),
                }
            }
            at = hole;
        }
        Ok(())
    }
}

impl Visitor for Copier {
    fn file(&mut self, dir: BorrowedFd<'_>, name: &CStr) -> IoResult<()> {
        self.in_time()?;
        let stat = rustix::fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW)?;
        let kind = FileType::from_raw_mode(stat.st_mode);
        self.size.entries += 1;
        if stat.st_nlink > 1 {
            if let Some(first) = self.links.get(&(stat.st_dev, stat.st_ino)) {
                return self.folders.link(self.root.as_fd(), first, self.at.as_fd(), name);
            }
            let folder = self.folder();
            self.links.insert((stat.st_dev, stat.st_ino), (folder, name.to_owned()));
        }
        let to = self.at.as_fd();
        match kind {
            FileType::Symlink => {
                let target = rustix::fs::readlinkat(dir, name, Vec::new())?;
                rustix::fs::symlinkat(&target, self.at.as_fd(), name)?;
            }
            FileType::RegularFile => {
                let flags = OFlags::NOFOLLOW | OFlags::CLOEXEC;
                let source =
                    rustix::fs::openat(dir, name, OFlags::RDONLY | OFlags::NONBLOCK | flags, Mode::empty())?;
                let new = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | flags;
                let target = rustix::fs::openat(to, name, new, Mode::from_raw_mode(0o600))?;
                self.content(source.as_fd(), target.as_fd(), u64::try_from(stat.st_size).unwrap_or(0))?;
                return attributes(source.as_fd(), target.as_fd());
            }
            // FIFOs, sockets, and overlayfs' whiteouts, which are devices 0:0.
            FileType::CharacterDevice if stat.st_rdev == 0 => {
                rustix::fs::mknodat(to, name, kind, Mode::empty(), 0)?;
            }
            FileType::Fifo | FileType::Socket => {
                rustix::fs::mknodat(to, name, kind, Mode::from_raw_mode(stat.st_mode & 0o777), 0)?;
            }
            _ => return Ok(()), // no other can be in a layer
        }
        rustix::fs::utimensat(self.at.as_fd(), name, &times(&stat), AtFlags::SYMLINK_NOFOLLOW)
    }

    fn enter(&mut self, _: BorrowedFd<'_>, name: &CStr) -> IoResult<()> {
        self.in_time()?;
        match rustix::fs::mkdirat(self.at.as_fd(), name, Mode::from_raw_mode(0o700)) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(e) => return Err(e),
        }
        self.at = rustix::fs::openat(self.at.as_fd(), name, OPEN_DIR, Mode::empty())?;
        self.path.push((name.to_owned(), None));
        self.size.entries += 1;
        Ok(())
    }

    fn leave(&mut self, _: BorrowedFd<'_>, dir: BorrowedFd<'_>, _: &CStr) -> IoResult<()> {
        let up = rustix::fs::openat(self.at.as_fd(), "..", OPEN_DIR, Mode::empty())?;
        attributes(dir, self.at.as_fd())?;
        self.at = up;
        self.path.pop();
        Ok(())
    }
}

/// Copies up to `part` bytes at a position; returns how many.
fn by_hand(from: BorrowedFd<'_>, to: BorrowedFd<'_>, at: u64, part: usize) -> IoResult<u64> {
    let mut buffer = vec![0; part.min(BUFFER)];
    let n = rustix::io::pread(from, &mut buffer[..], at)?;
    let mut written = 0;
    while written < n {
        written += rustix::io::pwrite(to, &buffer[written..n], at + written as u64)?;
    }
    Ok(n as u64)
}

fn times(stat: &rustix::fs::Stat) -> Timestamps {
    Timestamps {
        last_access: rustix::fs::Timespec { tv_sec: stat.st_atime, tv_nsec: stat.st_atime_nsec as _ },
        last_modification: rustix::fs::Timespec { tv_sec: stat.st_mtime, tv_nsec: stat.st_mtime_nsec as _ },
    }
}

/// Extended attributes, mode and times.
pub fn attributes(from: BorrowedFd<'_>, to: BorrowedFd<'_>) -> IoResult<()> {
    let mut names = vec![0; MAX_XATTR];
    let length = rustix::fs::flistxattr(from, &mut names[..]).unwrap_or(0);
    let mut value = Vec::new();
    for name in names[..length].split_inclusive(|b| *b == 0) {
        let Ok(name) = CStr::from_bytes_with_nul(name) else { continue };
        if name.to_bytes().starts_with(b"user.") {
            value.resize(MAX_XATTR, 0);
            let n = rustix::fs::fgetxattr(from, name, &mut value[..])?;
            rustix::fs::fsetxattr(to, name, &value[..n], XattrFlags::empty())?;
        }
    }
    let stat = rustix::fs::fstat(from)?;
    rustix::fs::fchmod(to, Mode::from_raw_mode(stat.st_mode & 0o7777))?;
    rustix::fs::futimens(to, &times(&stat))
}

#[cfg(test)]
mod tests {
    use super::super::tree::{self, open};
    use super::*;

    /// So deep that no path leads down: each name has 250 bytes.
    const DEPTH: usize = 40;
    const FILES: usize = 3;

    fn down(root: &str, make: bool) -> OwnedFd {
        let name = "a".repeat(250);
        let mut at = open(root).unwrap();
        for _ in 0..DEPTH {
            if make {
                rustix::fs::mkdirat(&at, &name, Mode::from_raw_mode(0o700)).unwrap();
            }
            at = rustix::fs::openat(&at, &name, OPEN_DIR, Mode::empty()).unwrap();
        }
        at
    }

    #[test]
    fn second_names_in_a_deep_tree_need_no_path() {
        let root = std::env::temp_dir().join(format!("forkyard-copy-{}", std::process::id()));
        std::fs::create_dir(&root).unwrap();
        let [root, from, to] = ["", "from", "to"].map(|part| root.join(part).to_str().unwrap().to_string());
        std::fs::create_dir(&from).unwrap();
        let deepest = down(&from, true);
        // Met last.
        rustix::fs::mkdirat(&deepest, "s", Mode::from_raw_mode(0o700)).unwrap();
        let names = |i| ["f", "s/g"].map(|name| format!("{name}{i}"));
        for i in 0..FILES {
            let [first, second] = names(i);
            rustix::fs::openat(&deepest, &first, OFlags::CREATE, Mode::from_raw_mode(0o600)).unwrap();
            rustix::fs::linkat(&deepest, &first, &deepest, second, AtFlags::empty()).unwrap();
        }
        let size = copy(open(&from).unwrap().as_fd(), &to, None).unwrap().unwrap();
        assert_eq!(size.entries, (DEPTH + 1 + 2 * FILES) as u64);
        let deepest = down(&to, false);
        for i in 0..FILES {
            let [first, second] = names(i)
                .map(|name| rustix::fs::statat(&deepest, name, AtFlags::SYMLINK_NOFOLLOW).unwrap().st_ino);
            assert_eq!(first, second, "{i}");
        }
        tree::remove(&root).unwrap();
    }
}
