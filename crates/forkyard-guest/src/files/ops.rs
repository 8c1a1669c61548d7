//! Read, stat, list, remove, make.

use std::os::fd::{AsFd, OwnedFd};

use forkyard_guest::protocol::{Fault, FileMeta, Kind, MAX_CHUNK, escape_name};
use rustix::fs::{AtFlags, Dir, FileType, OFlags};
use rustix::io::Errno;

use super::{FileError, Result, resolve, tree};

/// Entries in one frame of a list.
const LIST_PART: usize = 512;
/// Entries of one folder that are listed; more is an answer that nobody reads.
const MAX_LIST: usize = 1_000_000;
/// And bytes of their names.
const MAX_LIST_BYTES: usize = 32 << 20;

/// A regular file, opened without waiting for whoever is behind a FIFO or a device.
pub fn open_regular(path: &str) -> Result<OwnedFd> {
    let found = resolve::open(path, OFlags::PATH)?;
    let stat = rustix::fs::fstat(&found).map_err(|e| FileError::errno(path, e))?;
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => {}
        FileType::Directory => return Err(FileError::new(Fault::Invalid, format!("{path}: is a directory"))),
        _ => return Err(FileError::new(Fault::Invalid, format!("{path}: is not a regular file"))),
    }
    drop(found);
    // It may have been swapped since: NONBLOCK keeps a FIFO from holding us, and the type is looked at again.
    let file = resolve::open(path, OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY)?;
    let stat = rustix::fs::fstat(&file).map_err(|e| FileError::errno(path, e))?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return Err(FileError::new(Fault::Invalid, format!("{path}: is not a regular file")));
    }
    Ok(file)
}

pub fn read(path: &str, offset: u64, max: u64, mut part: impl FnMut(&[u8]) -> Result<()>) -> Result<()> {
    let file = open_regular(path)?;
    let (mut at, mut left) = (offset, max);
    let size = rustix::fs::fstat(&file).map_or(0, |s| s.st_size as u64);
    let likely = usize::try_from(size.saturating_sub(offset).min(max)).unwrap_or(MAX_CHUNK);
    let mut buffer = vec![0; likely.clamp(4096, MAX_CHUNK)];
    while left > 0 {
        let want = usize::try_from(left).unwrap_or(buffer.len()).min(buffer.len());
        match rustix::io::pread(&file, &mut buffer[..want], at) {
            Ok(0) => break,
            Ok(n) => {
                part(&buffer[..n])?;
                at += n as u64;
                left -= n as u64;
            }
            Err(Errno::INTR) => {}
            Err(e) => return Err(FileError::errno(path, e)),
        }
    }
    Ok(())
}

pub fn stat(path: &str) -> Result<FileMeta> {
    let found = resolve::open(path, OFlags::PATH | OFlags::NOFOLLOW)?;
    let name = path.trim_end_matches('/').rsplit('/').next().filter(|n| !n.is_empty()).unwrap_or("/");
    let stat = rustix::fs::fstat(&found).map_err(|e| FileError::errno(path, e))?;
    let target = rustix::fs::readlinkat(&found, "", Vec::new()).ok().map(|t| escape_name(t.as_bytes()));
    Ok(meta(escape_name(name.as_bytes()), &stat, target))
}

fn meta(name: String, stat: &rustix::fs::Stat, symlink_target: Option<String>) -> FileMeta {
    let kind = match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => Kind::File,
        FileType::Directory => Kind::Dir,
        FileType::Symlink => Kind::Symlink,
        _ => Kind::Other,
    };
    let modified_ms =
        u64::try_from(stat.st_mtime).unwrap_or(0).saturating_mul(1000) + stat.st_mtime_nsec / 1_000_000;
    FileMeta {
        name,
        symlink_target: symlink_target.filter(|_| kind == Kind::Symlink),
        kind,
        size: u64::try_from(stat.st_size).unwrap_or(0),
        mode: stat.st_mode & 0o7777,
        modified_ms,
    }
}

/// Sorted by name, in parts.
pub fn list(path: &str, mut part: impl FnMut(Vec<FileMeta>)) -> Result<()> {
    let failed = |e| FileError::errno(path, e);
    let dir = resolve::open(path, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NONBLOCK)?;
    let (mut names, mut bytes) = (Vec::new(), 0);
    for entry in Dir::read_from(&dir).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        if !matches!(entry.file_name().to_bytes(), b"." | b"..") {
            names.push(entry.file_name().to_owned());
            bytes += entry.file_name().count_bytes();
        }
        if names.len() > MAX_LIST || bytes > MAX_LIST_BYTES {
            let bound = format!("{MAX_LIST} entries or {MAX_LIST_BYTES} bytes of names");
            return Err(FileError::new(Fault::TooLarge, format!("{path}: has more than {bound}")));
        }
    }
    names.sort_unstable();
    for some in names.chunks(LIST_PART) {
        let entries = some
            .iter()
            .filter_map(|name| {
                let stat = rustix::fs::statat(&dir, name, AtFlags::SYMLINK_NOFOLLOW).ok()?; // gone meanwhile
                let link = rustix::fs::readlinkat(&dir, name, Vec::new()).ok();
                Some(meta(escape_name(name.to_bytes()), &stat, link.map(|t| escape_name(t.as_bytes()))))
            })
            .collect();
        part(entries);
    }
    Ok(())
}

pub fn remove(path: &str, recursive: bool) -> Result<()> {
    let (dir, name) = resolve::parent(path, false)?;
    let failed = |e| FileError::errno(path, e);
    match rustix::fs::unlinkat(dir.as_fd(), &name, AtFlags::empty()) {
        Err(Errno::ISDIR | Errno::PERM) => {}
        other => return other.map_err(failed),
    }
    match rustix::fs::unlinkat(dir.as_fd(), &name, AtFlags::REMOVEDIR) {
        Err(Errno::NOTEMPTY | Errno::EXIST) if recursive => {}
        other => return other.map_err(failed),
    }
    tree::remove_at(dir.as_fd(), &name).map_err(|e| FileError::errno(path, Errno::from_raw_os_error(e.errno)))
}

pub fn make_dir(path: &str) -> Result<()> {
    let full = resolve::absolute(path)?;
    resolve::make_dirs(path, &full).map(drop)
}
