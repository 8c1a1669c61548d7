//! One connection of an owner: bytes in, requests out.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Instant;

use forkyard_guest::protocol::{MAX_FRAME_TO_GUEST, PREFIX, Request, decode_prefix};
use rustix::io::Errno;

use super::outbox::Outbox;
use crate::files::Incoming;
use crate::sys::socket;

/// Read at once where a request begins, which is most often all of it.
const FIRST_READ: usize = 4 << 10;
/// Read at once of a longer one; a file's part is four times as big.
const READ_SIZE: usize = 64 << 10;
/// A connection that has shown who it is may send long frames; one that has not, only a greeting.
const MAX_GREETING: usize = 4 << 10;

pub struct Conn {
    pub socket: OwnedFd,
    pub out: Outbox,
    /// Set by an accepted greeting.
    pub attempt: Option<u32>,
    /// A stranger that has not shown who it is by then is sent away.
    pub greets_by: Option<Instant>,
    /// A stranger that said something else gets one answer, and is sent away.
    pub refused: bool,
    /// Whether the loop is told when the socket can be written.
    pub wants_write: bool,
    pub uploads: HashMap<u32, Incoming>,
    /// A descriptor that came with the last bytes.
    pub passed: Option<OwnedFd>,
    input: Vec<u8>,
}

/// The peer left, or broke the protocol.
#[derive(Debug)]
pub struct Closed;

impl Conn {
    pub fn new(socket: OwnedFd, out: Outbox) -> Conn {
        Conn {
            socket,
            out,
            attempt: None,
            greets_by: None,
            refused: false,
            wants_write: false,
            uploads: HashMap::new(),
            passed: None,
            input: Vec::new(),
        }
    }

    /// Reads once.
    pub fn fill(&mut self) -> Result<(), Closed> {
        let start = self.input.len();
        let size = if start == 0 { FIRST_READ } else { READ_SIZE };
        self.input.resize(start + size, 0);
        let result = socket::receive(self.socket.as_fd(), &mut self.input[start..]);
        self.input.truncate(start + result.as_ref().map_or(0, |(n, _)| *n));
        match result {
            Ok((0, _)) => Err(Closed),
            Ok((_, mut fds)) => {
                self.passed = fds.pop().or(self.passed.take());
                Ok(())
            }
            Err(Errno::AGAIN) => Ok(()),
            Err(_) => Err(Closed),
        }
    }

    /// The next whole request, with its body.
    pub fn next(&mut self) -> Result<Option<(Request, Vec<u8>)>, Closed> {
        let Some(prefix) = self.input.get(..PREFIX).and_then(|p| <[u8; PREFIX]>::try_from(p).ok()) else {
            return Ok(None);
        };
        let max = if self.attempt.is_some() { MAX_FRAME_TO_GUEST } else { MAX_GREETING };
        let (length, head) = decode_prefix(prefix, max).map_err(|_| Closed)?;
        let end = PREFIX + length;
        if self.input.len() < end {
            self.input.reserve(end - self.input.len());
            return Ok(None);
        }
        let request = serde_json::from_slice(&self.input[PREFIX..PREFIX + head]).map_err(|_| Closed)?;
        let body = self.input[PREFIX + head..end].to_vec();
        if self.input.len() == end {
            self.input = Vec::new(); // an idle sandbox holds no buffers
        } else {
            self.input.drain(..end);
        }
        Ok(Some((request, body)))
    }
}
