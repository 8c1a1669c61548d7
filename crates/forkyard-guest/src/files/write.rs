//! Files are replaced as a whole: a temporary file beside the target, then a rename.

use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};

use forkyard_guest::protocol::Fault;
use rustix::fs::{AtFlags, FileType, Mode, OFlags};
use rustix::io::Errno;

use super::{FileError, Result, resolve};

const DEFAULT_MODE: u32 = 0o644;

/// A file on its way. Dropping it leaves nothing behind.
pub struct Upload {
    path: String,
    dir: OwnedFd,
    name: String,
    temporary: String,
    file: Option<File>,
}

pub fn whole(path: &str, data: &[u8], mode: Option<u32>) -> Result<()> {
    let mut upload = Upload::begin(path, mode)?;
    upload.append(data)?;
    upload.commit()
}

impl Upload {
    pub fn begin(path: &str, mode: Option<u32>) -> Result<Upload> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let (dir, name) = target(path)?;
        let failed = |e| FileError::errno(path, e);
        let existing = match rustix::fs::statat(dir.as_fd(), &name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) if FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile => {
                Some(stat.st_mode & 0o7777)
            }
            Ok(_) => {
                return Err(FileError::new(
                    Fault::Invalid,
                    format!("{path}: exists and is not a regular file"),
                ));
            }
            Err(Errno::NOENT) => None,
            Err(e) => return Err(failed(e)),
        };
        let temporary =
            format!(".forkyard-{:x}-{:x}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let _ = rustix::fs::unlinkat(dir.as_fd(), &temporary, AtFlags::empty());
        let fd =
            rustix::fs::openat(dir.as_fd(), &temporary, flags, Mode::from_raw_mode(0o600)).map_err(failed)?;
        let upload = Upload { path: path.into(), dir, name, temporary, file: Some(File::from(fd)) };
        let mode = mode.or(existing).unwrap_or(DEFAULT_MODE) & 0o777; // no setuid, setgid or sticky files
        if let Some(file) = &upload.file {
            rustix::fs::fchmod(file, Mode::from_raw_mode(mode)).map_err(failed)?;
        }
        Ok(upload)
    }

    pub fn append(&mut self, data: &[u8]) -> Result<()> {
        let Some(file) = &mut self.file else { return Ok(()) };
        file.write_all(data).map_err(|e| {
            let errno = Errno::from_raw_os_error(e.raw_os_error().unwrap_or(libc::EIO));
            FileError::errno(&self.path, errno)
        })
    }

    pub fn commit(mut self) -> Result<()> {
        self.file = None;
        rustix::fs::renameat(self.dir.as_fd(), &self.temporary, self.dir.as_fd(), &self.name)
            .map_err(|e| FileError::errno(&self.path, e))?;
        self.temporary.clear();
        Ok(())
    }
}

impl Drop for Upload {
    fn drop(&mut self) {
        if !self.temporary.is_empty() {
            let _ = rustix::fs::unlinkat(self.dir.as_fd(), &self.temporary, AtFlags::empty());
        }
    }
}

/// Where a write to `path` goes: through a symlink, to the file it leads to.
fn target(path: &str) -> Result<(OwnedFd, String)> {
    let full = resolve::absolute(path)?;
    let Ok(existing) = resolve::open_raw(&full, OFlags::PATH) else { return resolve::parent(path, true) };
    // What the kernel found, by its real name. The name may be changed by the sandbox before we use it; all of this happens
    // inside its own root, so it can only move its own file.
    let mut link = [0; 4096];
    let own = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&existing));
    let real = rustix::fs::readlinkat_raw(rustix::fs::CWD, own.as_str(), &mut link[..])
        .ok()
        .and_then(|n| std::str::from_utf8(&link[..n]).ok())
        .filter(|real| real.starts_with('/'));
    resolve::parent(real.unwrap_or(path), true)
}
