//! One layer that looks like several stacked ones. Sealed layers never change, so files are shared by hard links: the cost is
//! that of their names, not of their bytes.

use std::ffi::CStr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{AtFlags, FileType, Mode, XattrFlags};
use rustix::io::{Errno, Result as IoResult};

use super::copy::attributes;
use super::tree::{OPEN_DIR, Size, Visitor, remove_at, walk};
use crate::sys::{Result, Step};

/// overlayfs' mark (with `userxattr`) on a directory that hides what is below it.
pub const OPAQUE: &CStr = c"user.overlay.opaque";

pub fn is_opaque(dir: BorrowedFd<'_>) -> bool {
    let mut value = [0; 4];
    rustix::fs::fgetxattr(dir, OPAQUE, &mut value[..]).is_ok_and(|n| &value[..n] == b"y")
}

pub fn is_whiteout(stat: &rustix::fs::Stat) -> bool {
    FileType::from_raw_mode(stat.st_mode) == FileType::CharacterDevice && stat.st_rdev == 0
}

/// `layers`: topmost first.
pub fn merge(layers: &[String], to: &str) -> Result<Size> {
    match rustix::fs::mkdir(to, Mode::from_raw_mode(0o755)) {
        Ok(()) | Err(Errno::EXIST) => {}
        Err(e) => return Err(e).step("merge"),
    }
    let mut size = Size::default();
    for layer in layers.iter().rev() {
        let source = rustix::fs::open(layer.as_str(), OPEN_DIR, Mode::empty()).step("merge")?;
        let at = rustix::fs::open(to, OPEN_DIR, Mode::empty()).step("merge")?;
        let mut merger = Merger { at, size };
        walk(source.as_fd(), &mut merger).step("merge")?;
        attributes(source.as_fd(), merger.at.as_fd()).step("merge")?;
        size = merger.size;
    }
    Ok(size)
}

struct Merger {
    at: OwnedFd,
    size: Size,
}

impl Merger {
    /// Whatever lower layers have under this name is gone.
    fn clear(&self, name: &CStr) -> IoResult<()> {
        match rustix::fs::unlinkat(self.at.as_fd(), name, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(Errno::ISDIR | Errno::PERM) => {
                remove_at(self.at.as_fd(), name).map_err(|e| Errno::from_raw_os_error(e.errno))
            }
            Err(e) => Err(e),
        }
    }
}

impl Visitor for Merger {
    fn file(&mut self, dir: BorrowedFd<'_>, name: &CStr) -> IoResult<()> {
        self.clear(name)?;
        self.size.entries += 1;
        let stat = rustix::fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW)?;
        if is_whiteout(&stat) {
            return rustix::fs::mknodat(self.at.as_fd(), name, FileType::CharacterDevice, Mode::empty(), 0);
        }
        self.size.bytes += u64::try_from(stat.st_size).unwrap_or(0);
        rustix::fs::linkat(dir, name, self.at.as_fd(), name, AtFlags::empty())
    }

    fn enter(&mut self, dir: BorrowedFd<'_>, name: &CStr) -> IoResult<()> {
        self.size.entries += 1;
        let below = rustix::fs::statat(self.at.as_fd(), name, AtFlags::SYMLINK_NOFOLLOW);
        let is_dir = below.is_ok_and(|s| FileType::from_raw_mode(s.st_mode) == FileType::Directory);
        // The whiteout that it takes the place of hid what layers below all of these may have.
        let hides = below.is_ok_and(|s| is_whiteout(&s));
        if !is_dir || is_opaque(dir) {
            self.clear(name)?;
            rustix::fs::mkdirat(self.at.as_fd(), name, Mode::from_raw_mode(0o700))?;
        }
        self.at = rustix::fs::openat(self.at.as_fd(), name, OPEN_DIR, Mode::empty())?;
        if hides {
            rustix::fs::fsetxattr(self.at.as_fd(), OPAQUE, b"y", XattrFlags::empty())?;
        }
        Ok(())
    }

    fn leave(&mut self, _: BorrowedFd<'_>, dir: BorrowedFd<'_>, _: &CStr) -> IoResult<()> {
        let up = rustix::fs::openat(self.at.as_fd(), "..", OPEN_DIR, Mode::empty())?;
        attributes(dir, self.at.as_fd())?;
        self.at = up;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;

    use super::*;

    #[test]
    fn a_folder_of_any_name_gives_way_to_a_file() {
        let root = std::env::temp_dir().join(format!("forkyard-merge-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&root);
        let name = OsStr::from_bytes(b"caf\xe9");
        std::fs::create_dir_all(root.join("low").join(name).join("deep")).unwrap();
        std::fs::create_dir(root.join("top")).unwrap();
        std::fs::write(root.join("top").join(name), "a file").unwrap();
        let path = |part: &str| root.join(part).to_str().unwrap().to_string();
        merge(&[path("top"), path("low")], &path("to")).unwrap();
        assert_eq!(std::fs::read(root.join("to").join(name)).unwrap(), b"a file");
        std::fs::remove_dir_all(&root).unwrap();
    }
}
