//! What one process, and one task of it, has at a time.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use crate::Result;
use crate::local::state::io_error;

/// Between two tries.
const POLL: Duration = Duration::from_millis(2);

/// A name, which is a byte of a file, of which none is there. The kernel frees it when its owner is no more.
pub(crate) struct Lock {
    file: OwnedFd,
    byte: i64,
}

/// The same in every process of every version.
fn byte_of(name: &str) -> i64 {
    let hash = <sha2::Sha256 as sha2::Digest>::digest(name);
    let (first, _) = hash.split_first_chunk().expect("a hash has more than that");
    i64::from_le_bytes(*first) & (i64::MAX >> 1)
}

impl Lock {
    pub async fn take(path: &Path, name: &str) -> Result<Lock> {
        loop {
            if let Some(lock) = Lock::try_take(path, name)? {
                return Ok(lock);
            }
            tokio::time::sleep(POLL).await;
        }
    }

    /// None if somebody has it.
    pub fn try_take(path: &Path, name: &str) -> Result<Option<Lock>> {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC;
        let file = rustix::fs::open(path, flags, Mode::from_raw_mode(0o600));
        let file = file.map_err(|e| io_error(path, &e.into()))?;
        let lock = Lock { file, byte: byte_of(name) };
        match lock.set(libc::F_WRLCK) {
            Ok(()) => Ok(Some(lock)),
            Err(Errno::AGAIN | Errno::ACCESS) => Ok(None),
            Err(e) => Err(io_error(path, &e.into())),
        }
    }

    /// Of the open file, not of the process: two tasks exclude each other as two processes do.
    fn set(&self, kind: libc::c_int) -> rustix::io::Result<()> {
        // SAFETY: an all-zero flock is valid; the kernel reads it during the call.
        let result = unsafe {
            let mut what: libc::flock = std::mem::zeroed();
            what.l_type = kind as libc::c_short;
            what.l_whence = libc::SEEK_SET as libc::c_short;
            (what.l_start, what.l_len) = (self.byte, 1);
            libc::fcntl(self.file.as_raw_fd(), libc::F_OFD_SETLK, &raw const what)
        };
        match result {
            -1 => Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)),
            _ => Ok(()),
        }
    }
}

impl AsFd for Lock {
    /// Whoever has a copy of it holds the lock too, if this process does not live to drop it.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        let _ = self.set(libc::F_UNLCK);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_lock_is_one_holders_by_its_name() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lock");
        let is_free = |name: &str| Lock::try_take(&path, name).unwrap().is_some();
        let lock = Lock::take(&path, "a").await.unwrap();
        assert!(!is_free("a") && is_free("b"));
        // A copy outlives the file that it is a copy of, not the lock.
        let copy = lock.as_fd().try_clone_to_owned().unwrap();
        drop(lock);
        assert!(is_free("a"));
        drop(copy);
    }
}
