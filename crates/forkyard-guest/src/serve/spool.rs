//! What a command wrote, until its reader has it.

use std::collections::VecDeque;
use std::fs::File;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::FileExt;

use rustix::fs::{MemfdFlags, Mode, OFlags};

/// Kept in memory before a file is made: most commands say less.
const IN_MEMORY: usize = 64 << 10;
/// Unread output of a command without a call id; beyond it the command waits for its reader.
const WINDOW: usize = 256 << 10;
/// All spools of a sandbox together. They lie outside of its layers, so its disk limit does not cover them.
pub const MAX_TOTAL: u64 = 256 << 20;

/// Output that is kept: all of it (a call that is handed over by id), or what is unread.
pub enum Spool {
    All { memory: Vec<u8>, file: Option<File>, length: u64 },
    Unread { bytes: VecDeque<u8>, taken: u64 },
}

impl Spool {
    pub fn new(keep: bool) -> Spool {
        if keep {
            Spool::All { memory: Vec::new(), file: None, length: 0 }
        } else {
            Spool::Unread { bytes: VecDeque::new(), taken: 0 }
        }
    }

    /// Bytes that were taken in, ever.
    pub fn length(&self) -> u64 {
        match self {
            Spool::All { length, .. } => *length,
            Spool::Unread { bytes, taken } => taken + bytes.len() as u64,
        }
    }

    /// How much the reader lets us take in right now.
    pub fn room(&self) -> usize {
        match self {
            Spool::All { .. } => usize::MAX,
            Spool::Unread { bytes, .. } => WINDOW.saturating_sub(bytes.len()),
        }
    }

    /// Takes bytes in; false if there is no place for them.
    pub fn push(&mut self, data: &[u8], dir: Option<BorrowedFd<'_>>) -> bool {
        match self {
            Spool::Unread { bytes, .. } => {
                bytes.extend(data);
                true
            }
            Spool::All { memory, file, length } => {
                if file.is_none() && memory.len() + data.len() > IN_MEMORY {
                    let Some(new) = temporary(dir) else { return false };
                    if new.write_all_at(memory, 0).is_err() {
                        return false;
                    }
                    *memory = Vec::new();
                    *file = Some(new);
                }
                match file {
                    Some(file) => {
                        if file.write_all_at(data, *length).is_err() {
                            return false;
                        }
                    }
                    None => memory.extend_from_slice(data),
                }
                *length += data.len() as u64;
                true
            }
        }
    }

    /// Up to `max` bytes from `position`. What is unread is handed out once.
    pub fn read(&mut self, position: u64, max: usize) -> Vec<u8> {
        match self {
            Spool::Unread { bytes, taken } => {
                let n = bytes.len().min(max);
                *taken += n as u64;
                let data = bytes.drain(..n).collect();
                if bytes.is_empty() {
                    *bytes = VecDeque::new();
                }
                data
            }
            Spool::All { memory, file, length } => {
                let n = usize::try_from(*length - position.min(*length)).unwrap_or(max).min(max);
                match file {
                    None => memory[position as usize..position as usize + n].to_vec(),
                    Some(file) => {
                        let mut data = vec![0; n];
                        match file.read_exact_at(&mut data, position) {
                            Ok(()) => data,
                            Err(_) => Vec::new(),
                        }
                    }
                }
            }
        }
    }
}

/// A file without a name: in the spool folder, else in memory (which counts as the sandbox's).
fn temporary(dir: Option<BorrowedFd<'_>>) -> Option<File> {
    let fd = match dir {
        Some(dir) => rustix::fs::openat(
            dir,
            ".",
            OFlags::RDWR | OFlags::TMPFILE | OFlags::CLOEXEC,
            Mode::from_raw_mode(0o600),
        ),
        None => rustix::fs::memfd_create("spool", MemfdFlags::CLOEXEC),
    };
    fd.ok().map(File::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_is_kept_across_the_step_to_a_file() {
        let mut spool = Spool::new(true);
        let data: Vec<u8> = (0..200_000u32).map(|i| i as u8).collect();
        for part in data.chunks(7001) {
            assert!(spool.push(part, None));
        }
        assert_eq!(spool.length(), data.len() as u64);
        assert_eq!(spool.read(0, usize::MAX), data);
        assert_eq!(spool.read(199_990, 100), data[199_990..]);
        assert_eq!(spool.read(0, 3), data[..3], "reading again gives the same");
    }

    #[test]
    fn unread_output_is_handed_out_once_and_bounded() {
        let mut spool = Spool::new(false);
        spool.push(&[1; 1000], None);
        assert_eq!(spool.room(), WINDOW - 1000);
        assert_eq!(spool.read(0, 600).len(), 600);
        assert_eq!(spool.read(600, 600).len(), 400);
        assert_eq!((spool.length(), spool.room()), (1000, WINDOW));
    }
}
