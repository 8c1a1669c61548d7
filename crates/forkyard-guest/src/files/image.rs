//! A layer of an image: a tar stream, unpacked by itself. The stream is hostile input. Every entry is made from the descriptor
//! of its folder, which is reached without following any link, so that nothing leads outside. There is one owner, no setuid
//! bit and no device; owners may always read and write, as an image's root would.

use std::ffi::{CStr, CString};
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};

use forkyard_guest::zygote::UnpackLimits;
use rustix::fs::{AtFlags, FileType, Mode, OFlags, Timespec, Timestamps, XattrFlags};
use rustix::io::Errno;
use tar::EntryType;

use super::archive::Refusal;
use super::merge::{OPAQUE, is_whiteout};
use super::tree::{OPEN_DIR, Size};
use crate::sys::Step;

type Result<T> = std::result::Result<T, Refusal>;

const MAX_DEPTH: usize = 256;
const MAX_NAME: usize = 255;
/// What an entry costs besides its bytes.
const ENTRY_COST: u64 = 512;
const WHITEOUT: &[u8] = b".wh.";
const OPAQUE_MARK: &[u8] = b".wh..wh..opq";

fn broken<T>(why: impl Into<String>) -> Result<T> {
    Err(Refusal::Broken(why.into()))
}

fn bad_stream(e: std::io::Error) -> Refusal {
    Refusal::Broken(format!("it is not a layer: {e}"))
}

/// Makes `to` from the stream.
pub fn unpack(from: OwnedFd, to: &str, limits: UnpackLimits) -> Result<Size> {
    rustix::fs::mkdir(to, Mode::from_raw_mode(0o755)).step("unpack")?;
    let root = rustix::fs::open(to, OPEN_DIR, Mode::empty()).step("unpack")?;
    let mut layer = Layer { root, left: limits, size: Size::default() };
    let mut archive = tar::Archive::new(File::from(from));
    for entry in archive.entries().map_err(bad_stream)? {
        layer.take(entry.map_err(bad_stream)?)?;
    }
    // Whoever feeds the stream waits until all of it is read.
    std::io::copy(&mut archive.into_inner(), &mut std::io::sink()).map_err(bad_stream)?;
    Ok(layer.size)
}

/// The parts of a path below the root; empty for the root itself.
fn parts(path: &[u8]) -> Result<Vec<CString>> {
    let mut found = Vec::new();
    for part in path.split(|b| *b == b'/') {
        match part {
            b"" | b"." => {}
            b".." => return broken(format!("{} leads outside", String::from_utf8_lossy(path))),
            name if name.len() > MAX_NAME => return broken("a name is too long"),
            name => {
                found.push(CString::new(name).map_err(|_| Refusal::Broken("a name has a zero byte".into()))?)
            }
        }
    }
    if found.len() > MAX_DEPTH {
        return broken("it is too deep");
    }
    Ok(found)
}

struct Layer {
    root: OwnedFd,
    left: UnpackLimits,
    size: Size,
}

impl Layer {
    fn spend(&mut self, bytes: u64) -> Result<()> {
        match self.left.bytes.checked_sub(bytes) {
            Some(left) => self.left.bytes = left,
            None => return broken("it holds more than the bound on bytes"),
        }
        Ok(())
    }

    /// The folder, without following a link; made if `make` says so.
    fn dir(&self, path: &[CString], make: bool) -> Result<OwnedFd> {
        let mut at = rustix::io::fcntl_dupfd_cloexec(&self.root, 3).step("unpack")?;
        for name in path {
            if make {
                make_dir(&at, name)?;
            }
            at = match rustix::fs::openat(&at, name, OPEN_DIR, Mode::empty()) {
                Ok(below) => below,
                Err(Errno::LOOP | Errno::NOTDIR) => {
                    return broken(format!(
                        "{} passes through something that is no folder",
                        name.to_string_lossy()
                    ));
                }
                Err(Errno::NOENT) => return broken("a link to nothing"),
                Err(e) => return Err(e).step("unpack").map_err(Into::into),
            };
        }
        Ok(at)
    }

    fn take<R: Read>(&mut self, mut entry: tar::Entry<'_, R>) -> Result<()> {
        self.size.entries += 1;
        self.spend(ENTRY_COST)?;
        match self.left.entries.checked_sub(1) {
            Some(left) => self.left.entries = left,
            None => return broken("it holds more than the bound on entries"),
        }
        let mut path = parts(&entry.path_bytes())?;
        let Some(name) = path.pop() else { return Ok(()) };
        let mode = entry.header().mode().map_err(bad_stream)?;
        let mtime = entry.header().mtime().map_err(bad_stream)?;
        let dir = self.dir(&path, true)?;
        let bytes = name.to_bytes();
        if bytes == OPAQUE_MARK {
            rustix::fs::fsetxattr(&dir, OPAQUE, b"y", XattrFlags::empty()).step("unpack")?;
            return Ok(());
        }
        if let Some(hidden) = bytes.strip_prefix(WHITEOUT) {
            let hidden =
                parts(hidden)?.pop().ok_or_else(|| Refusal::Broken("a whiteout of nothing".into()))?;
            return match rustix::fs::mknodat(&dir, &hidden, FileType::CharacterDevice, Mode::empty(), 0) {
                Ok(()) | Err(Errno::EXIST) => Ok(()), // what this layer adds, it does not hide
                Err(e) => Err(e).step("unpack").map_err(Into::into),
            };
        }
        match entry.header().entry_type() {
            EntryType::Directory => {
                make_dir(&dir, &name)?;
                let made = rustix::fs::openat(&dir, &name, OPEN_DIR, Mode::empty()).step("unpack")?;
                rustix::fs::fchmod(&made, Mode::from_raw_mode(mode & 0o1777 | 0o700)).step("unpack")?;
                let _ = rustix::fs::futimens(&made, &times(mtime));
            }
            EntryType::Regular | EntryType::Continuous | EntryType::GNUSparse => {
                clear(&dir, &name)?;
                let flags =
                    OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
                let file =
                    rustix::fs::openat(&dir, &name, flags, Mode::from_raw_mode(0o600)).step("unpack")?;
                let mut file = File::from(file);
                let mut buffer = [0; 64 << 10];
                loop {
                    let n = entry.read(&mut buffer).map_err(bad_stream)?;
                    if n == 0 {
                        break;
                    }
                    self.spend(n as u64)?;
                    self.size.bytes += n as u64;
                    file.write_all(&buffer[..n]).step("unpack")?;
                }
                rustix::fs::fchmod(&file, Mode::from_raw_mode(mode & 0o777 | 0o600)).step("unpack")?;
                rustix::fs::futimens(&file, &times(mtime)).step("unpack")?;
            }
            EntryType::Symlink => {
                let target = link_name(&entry)?;
                clear(&dir, &name)?;
                rustix::fs::symlinkat(&target, &dir, &name).step("unpack")?;
            }
            EntryType::Link => {
                let mut target = parts(link_name(&entry)?.to_bytes())?;
                let Some(first) = target.pop() else { return broken("a link to nothing") };
                let from = self.dir(&target, false)?;
                let same = target == path && first == name;
                if !same {
                    clear(&dir, &name)?;
                    match rustix::fs::linkat(&from, &first, &dir, &name, AtFlags::empty()) {
                        Ok(()) => {}
                        Err(Errno::NOENT | Errno::PERM) => return broken("a link to nothing"),
                        Err(e) => return Err(e).step("unpack").map_err(Into::into),
                    }
                }
            }
            EntryType::Fifo => {
                clear(&dir, &name)?;
                let mode = Mode::from_raw_mode(mode & 0o777);
                rustix::fs::mknodat(&dir, &name, FileType::Fifo, mode, 0).step("unpack")?;
            }
            // Devices are the sandbox's own; whatever else there is, is no file.
            _ => {}
        }
        Ok(())
    }
}

fn link_name<R: Read>(entry: &tar::Entry<'_, R>) -> Result<CString> {
    let target = entry.link_name_bytes().map(std::borrow::Cow::into_owned).unwrap_or_default();
    match CString::new(target) {
        Ok(target) if !target.is_empty() => Ok(target),
        _ => broken("a link to nothing"),
    }
}

/// A folder under this name, whatever file was there before.
fn make_dir(dir: &OwnedFd, name: &CStr) -> Result<()> {
    match rustix::fs::mkdirat(dir, name, Mode::from_raw_mode(0o755)) {
        Ok(()) => return Ok(()),
        Err(Errno::EXIST) => {}
        Err(e) => return Err(e).step("unpack").map_err(Into::into),
    }
    let stat = rustix::fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW).step("unpack")?;
    if is_whiteout(&stat) {
        // The layer hides what was there and puts something new in its place.
        clear(dir, name)?;
        rustix::fs::mkdirat(dir, name, Mode::from_raw_mode(0o755)).step("unpack")?;
        let made = rustix::fs::openat(dir, name, OPEN_DIR, Mode::empty()).step("unpack")?;
        rustix::fs::fsetxattr(&made, OPAQUE, b"y", XattrFlags::empty()).step("unpack")?;
    }
    Ok(())
}

/// A later entry takes the place of an earlier file.
fn clear(dir: &OwnedFd, name: &CStr) -> Result<()> {
    match rustix::fs::unlinkat(dir.as_fd(), name, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        Err(Errno::ISDIR | Errno::PERM) => broken("a file takes the place of a folder"),
        Err(e) => Err(e).step("unpack").map_err(Into::into),
    }
}

fn times(mtime: u64) -> Timestamps {
    let at = Timespec { tv_sec: i64::try_from(mtime).unwrap_or(0), tv_nsec: 0 };
    Timestamps { last_access: at, last_modification: at }
}
