//! Files without a name that somebody has open: no walk of folders finds them, and they fill the disk all the same.

use std::collections::HashSet;
use std::os::fd::{AsFd, BorrowedFd};

use rustix::fs::{AtFlags, FileType, Mode, OFlags, StatVfsMountFlags};

use super::procs;

/// Descriptors looked at in one walk: more than commands have in earnest, and a fraction of a second.
const MAX_LOOKED_AT: usize = 200_000;
const OVERLAY: rustix::fs::FsWord = 0x794c_7630;
const BLOCK: u64 = 512;

/// Bytes of such files on the disk of `upper`, as far as the commands' descriptors may be looked at.
pub fn bytes(upper: BorrowedFd<'_>) -> u64 {
    // A root that is written to is an overlay on that disk. Where it is not, as in a container, volumes below that folder are.
    let overlay = rustix::fs::statvfs("/").is_ok_and(|root| !root.f_flag.contains(StatVfsMountFlags::RDONLY));
    let volumes = if overlay { HashSet::new() } else { devices(upper) };
    let is_there = |file: BorrowedFd<'_>, device| {
        if overlay {
            rustix::fs::fstatfs(file).is_ok_and(|fs| fs.f_type == OVERLAY)
        } else {
            volumes.contains(&device)
        }
    };
    let (mut seen, mut looked_at, mut total) = (HashSet::new(), 0, 0);
    for process in procs::all() {
        let dir = format!("/proc/{}/fd", process.pid);
        let Ok(entries) = std::fs::read_dir(&dir) else { continue };
        let Ok(dir) =
            rustix::fs::open(dir, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
        else {
            continue;
        };
        for entry in entries.flatten() {
            looked_at += 1;
            if looked_at > MAX_LOOKED_AT {
                return total;
            }
            let Ok(stat) = rustix::fs::statat(&dir, entry.file_name(), AtFlags::empty()) else { continue };
            if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile || stat.st_nlink > 0 {
                continue;
            }
            // It leads to the file itself, whatever its descriptor may do.
            let file =
                rustix::fs::openat(&dir, entry.file_name(), OFlags::PATH | OFlags::CLOEXEC, Mode::empty());
            if file.is_ok_and(|file| is_there(file.as_fd(), stat.st_dev))
                && seen.insert((stat.st_dev, stat.st_ino))
            {
                total += u64::try_from(stat.st_blocks).unwrap_or(0) * BLOCK;
            }
        }
    }
    total
}

/// Of the folder, and of what is mounted in it.
fn devices(folder: BorrowedFd<'_>) -> HashSet<u64> {
    let entries = rustix::fs::Dir::read_from(folder).into_iter().flatten().flatten();
    let names = entries.map(|entry| entry.file_name().to_owned()).filter(|name| name.as_c_str() != c"..");
    names.filter_map(|name| Some(rustix::fs::statat(folder, name, AtFlags::empty()).ok()?.st_dev)).collect()
}
