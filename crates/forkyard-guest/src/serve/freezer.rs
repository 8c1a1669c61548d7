//! The commands in a group of their own, which the kernel freezes as one: none of them sees it, and none gets away by forking.

use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};

/// A process in the middle of a disk access stands still after it, not before.
const STILL_WITHIN: Duration = Duration::from_secs(1);

/// The group's files, opened by whoever made it.
pub struct Freezer {
    join: OwnedFd,
    freeze: OwnedFd,
    events: OwnedFd,
}

impl Freezer {
    /// `cgroup.threads`, `cgroup.freeze`, `cgroup.events`.
    pub fn new(files: Vec<OwnedFd>) -> Option<Freezer> {
        let [join, freeze, events] = <[OwnedFd; 3]>::try_from(files).ok()?;
        Some(Freezer { join, freeze, events })
    }

    pub fn files(&self) -> [&OwnedFd; 3] {
        [&self.join, &self.freeze, &self.events]
    }

    /// A process that writes "0" to it is in the group. By its threads, of which it has one: that needs no lock of the kernel's.
    pub fn join(&self) -> RawFd {
        self.join.as_raw_fd()
    }

    /// Returns when all of them stand still. False if the kernel refuses.
    pub fn freeze(&self) -> bool {
        if rustix::io::write(&self.freeze, b"1").is_err() {
            return false;
        }
        let until = Instant::now() + STILL_WITHIN;
        while !self.is_still() {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            let mut waiting = [PollFd::new(&self.events, PollFlags::PRI)];
            let _ = poll(&mut waiting, rustix::time::Timespec::try_from(left).ok().as_ref());
        }
        true
    }

    /// If the kernel refuses, it did so before.
    pub fn thaw(&self) {
        let _ = rustix::io::write(&self.freeze, b"0");
    }

    fn is_still(&self) -> bool {
        let mut text = [0; 256];
        let n = rustix::io::pread(&self.events, &mut text, 0).unwrap_or(0);
        String::from_utf8_lossy(&text[..n]).lines().any(|line| line == "frozen 1")
    }
}
