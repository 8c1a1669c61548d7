//! Reaching a sandbox's guest and its process from any process of the owner.

use std::io::{Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use forkyard_core::{Attempt, SandboxId};
use forkyard_guest::protocol::{
    Answer, MAX_FRAME_TO_HOST, Op, PREFIX, Reply, Request, VERSION, decode_prefix, encode,
};
use rustix::fs::{Mode, OFlags};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use super::fd::{self, Messages};
use super::state::Meta;
use super::zygote::unavailable;
use crate::guest_client::{QUIET_WITHIN, Quiet, from_fault};
use crate::{ErrorKind, Result, SandboxError, born};

/// A guest answers at once or is not there.
pub const ANSWER_WITHIN: Duration = Duration::from_secs(10);
/// Until the kernel has ended every process of a sandbox.
const END_WITHIN: Duration = Duration::from_secs(30);

/// A path to the control socket that is short enough for an address, wherever the state folder is.
pub struct SocketPath {
    _dir: OwnedFd,
    pub path: String,
}

impl SocketPath {
    pub fn new(dir: &Path) -> std::io::Result<SocketPath> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let fd = rustix::fs::open(dir, flags, Mode::empty())?;
        let path = format!("/proc/self/fd/{}/ctl", fd.as_raw_fd());
        Ok(SocketPath { _dir: fd, path })
    }
}

fn ended(id: &SandboxId) -> SandboxError {
    SandboxError::ended(id)
}

pub fn connect(id: &SandboxId, dir: &Path) -> Result<UnixStream> {
    let path = SocketPath::new(dir).map_err(|_| ended(id))?;
    UnixStream::connect(&path.path).map_err(|_| ended(id))
}

pub fn is_alive(meta: &Meta) -> bool {
    // Of an earlier start of the machine both numbers may be somebody else's by now.
    meta.boot.goes_on()
        && u32::try_from(meta.pid).ok().filter(|pid| *pid > 0).and_then(born) == Some(meta.born)
}

/// A handle on the sandbox's pid 1 that can't come to mean another process. None if it is gone.
pub fn pidfd(meta: &Meta) -> Option<OwnedFd> {
    let fd = pidfd_open(Pid::from_raw(meta.pid)?, PidfdFlags::empty()).ok()?;
    is_alive(meta).then_some(fd)
}

/// Kills pid 1, and with it everything inside; returns when all of it is gone.
pub async fn kill(meta: &Meta) -> Result<()> {
    let Some(pidfd) = pidfd(meta) else { return Ok(()) };
    if pidfd_send_signal(&pidfd, Signal::KILL).is_err() {
        return Ok(()); // gone just now
    }
    match tokio::time::timeout(END_WITHIN, fd::wait_gone(pidfd.as_fd())).await {
        Ok(Ok(())) => Ok(()),
        Ok(Err(e)) => Err(unavailable(format!("waiting for the end of sandbox {}: {e}", meta.id))),
        Err(_) => Err(SandboxError::new(ErrorKind::Timeout, format!("sandbox {} does not end", meta.id))),
    }
}

/// Ends a sandbox whose maker did not write down what it made.
pub async fn shut_down_unknown(dir: &Path) {
    let Ok(path) = SocketPath::new(dir) else { return };
    let Ok(mut stream) = UnixStream::connect(&path.path) else { return };
    // No attempt is newer than this one.
    let hello = Op::Hello { version: VERSION, attempt: u32::MAX, token: None };
    let _ = stream.set_write_timeout(Some(ANSWER_WITHIN));
    let _ = stream.set_read_timeout(Some(ANSWER_WITHIN));
    let _ = stream.write_all(&encode(&Request { seq: 1, op: hello }, &[]));
    let _ = stream.write_all(&encode(&Request { seq: 2, op: Op::Shutdown }, &[]));
    let mut rest = Vec::new();
    let _ = tokio::task::spawn_blocking(move || stream.read_to_end(&mut rest)).await; // until it closes
}

/// A connection of its own for what goes with descriptors, one question at a time.
pub struct Line {
    id: SandboxId,
    messages: Messages,
}

impl AsFd for Line {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.messages.as_fd()
    }
}

impl Line {
    pub async fn open(id: &SandboxId, dir: &Path, attempt: Attempt) -> Result<Line> {
        let stream = connect(id, dir)?;
        stream.set_nonblocking(true).map_err(unavailable)?;
        let line = Line { id: id.clone(), messages: Messages::new(stream.into()).map_err(unavailable)? };
        let hello = Op::Hello { version: VERSION, attempt: attempt.0, token: None };
        line.ask(hello, Vec::new()).await?;
        Ok(line)
    }

    /// Nothing starts and nothing is written until `Thaw`, or until every holder of this line has closed it.
    pub async fn quiesce(&self) -> Result<Quiet> {
        match self.exchange(Op::Quiesce, Vec::new(), QUIET_WITHIN).await?.0 {
            Answer::Quiet { busy, layer } => Ok(Quiet { busy, layer }),
            _ => Err(unavailable(format!("sandbox {} does not answer as it should", self.id))),
        }
    }

    /// The descriptors that come with the answer.
    pub async fn ask(&self, op: Op, fds: Vec<OwnedFd>) -> Result<Vec<OwnedFd>> {
        Ok(self.exchange(op, fds, ANSWER_WITHIN).await?.1)
    }

    async fn exchange(&self, op: Op, fds: Vec<OwnedFd>, within: Duration) -> Result<(Answer, Vec<OwnedFd>)> {
        let ask = async {
            let borrowed: Vec<_> = fds.iter().map(|fd| fd.as_fd()).collect();
            self.messages.send(&encode(&Request { seq: 1, op }, &[]), &borrowed).await?;
            // They come with the first bytes of the answer, and nothing else is under way.
            let (frame, fds) = self.messages.receive().await?;
            let (length, head) = prefix(&frame)?;
            let reply = frame.get(PREFIX..PREFIX + head).filter(|_| frame.len() == PREFIX + length);
            let reply: Reply = serde_json::from_slice(reply.unwrap_or_default())?;
            std::io::Result::Ok((reply.answer, fds))
        };
        let asked = tokio::time::timeout(within, ask).await.unwrap_or_else(|late| Err(late.into()));
        match asked
            .map_err(|e| unavailable(format!("sandbox {} does not answer as it should: {e}", self.id)))?
        {
            (Answer::Error { kind, message }, _) => Err(from_fault(kind, message)),
            answer => Ok(answer),
        }
    }
}

fn prefix(frame: &[u8]) -> std::io::Result<(usize, usize)> {
    let bytes = frame.get(..PREFIX).and_then(|p| p.try_into().ok());
    let bytes = bytes.ok_or(std::io::ErrorKind::UnexpectedEof)?;
    decode_prefix(bytes, MAX_FRAME_TO_HOST).map_err(std::io::Error::other)
}
