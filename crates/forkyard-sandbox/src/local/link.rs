//! Reaching a sandbox's guest and its process from any process of the owner.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use forkyard_core::{Attempt, SandboxId};
use forkyard_guest::protocol::{
    Answer, MAX_FRAME_TO_HOST, Op, PREFIX, Reply, Request, VERSION, decode_prefix, encode,
};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use super::fd::{self, Messages};
use super::state::Meta;
use super::zygote::unavailable;
use crate::guest_client::{QUIET_WITHIN, Quiet, from_fault};
use crate::{ErrorKind, Result, SandboxError, birth};

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
    pub fn new(dir: &Path) -> io::Result<SocketPath> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let fd = rustix::fs::open(dir, flags, Mode::empty())?;
        let path = format!("/proc/self/fd/{}/ctl", fd.as_raw_fd());
        Ok(SocketPath { _dir: fd, path })
    }
}

fn ended(id: &SandboxId) -> SandboxError {
    SandboxError::ended(id)
}

/// Without waiting for one that takes no connections, which may be for ever: that is `WouldBlock`. Non-blocking from then on.
pub fn connect_now(path: &Path) -> io::Result<UnixStream> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket.into())
}

pub fn connect(id: &SandboxId, dir: &Path) -> Result<UnixStream> {
    let path = SocketPath::new(dir).map_err(|_| ended(id))?;
    connect_now(Path::new(&path.path)).map_err(|e| match e.kind() {
        io::ErrorKind::WouldBlock => unavailable(format!("sandbox {id} takes no connections"))
            .hint(format!("remove it: forkyard sandbox rm {id}")),
        _ => ended(id),
    })
}

/// One that nobody can look at just now counts as alive: nothing is taken from it.
pub fn is_alive(meta: &Meta) -> bool {
    looked_at(meta).unwrap_or(true)
}

fn looked_at(meta: &Meta) -> io::Result<bool> {
    // Of an earlier start of the machine both numbers may be somebody else's by now.
    match u32::try_from(meta.pid) {
        Ok(pid) if pid > 0 && meta.boot.goes_on() => Ok(birth(pid)? == Some(meta.born)),
        _ => Ok(false),
    }
}

/// Whether /proc shows this user a process that runs. With `hidepid` it is not there, or is there and may not be looked at: either
/// way nobody could end it later.
pub fn is_seen(meta: &Meta) -> Result<bool> {
    match looked_at(meta) {
        Err(e) if e.kind() == io::ErrorKind::PermissionDenied => Ok(false),
        looked => looked.map_err(|e| not_looked_at(meta, &e)),
    }
}

fn not_looked_at(meta: &Meta, e: &io::Error) -> SandboxError {
    unavailable(format!("process of sandbox {}: {e}", meta.id))
}

/// A handle on the sandbox's pid 1 that can't come to mean another process. None if it is gone.
pub fn pidfd(meta: &Meta) -> Result<Option<OwnedFd>> {
    let failed = |e: io::Error| not_looked_at(meta, &e);
    let Some(pid) = Pid::from_raw(meta.pid) else { return Ok(None) };
    let fd = match pidfd_open(pid, PidfdFlags::empty()) {
        Err(Errno::SRCH) => return Ok(None),
        opened => opened.map_err(|e| failed(e.into()))?,
    };
    Ok(looked_at(meta).map_err(failed)?.then_some(fd))
}

/// Kills pid 1, and with it everything inside; returns when all of it is gone.
pub async fn kill(meta: &Meta) -> Result<()> {
    match pidfd(meta)? {
        Some(pidfd) => kill_by(pidfd, &meta.id).await,
        None => Ok(()),
    }
}

pub async fn kill_by(pidfd: OwnedFd, id: &SandboxId) -> Result<()> {
    if pidfd_send_signal(&pidfd, Signal::KILL).is_err() {
        return Ok(()); // gone just now
    }
    match tokio::time::timeout(END_WITHIN, fd::wait_gone(pidfd.as_fd())).await {
        Ok(Ok(())) => Ok(()),
        Ok(Err(e)) => Err(unavailable(format!("waiting for the end of sandbox {id}: {e}"))),
        Err(_) => Err(SandboxError::new(ErrorKind::Timeout, format!("sandbox {id} does not end"))),
    }
}

/// Ends a sandbox whose maker did not write down what it made.
pub async fn shut_down_unknown(id: &SandboxId, dir: &Path) {
    let Ok(line) = connect(id, dir).and_then(|stream| Line::new(id, stream)) else { return };
    // No attempt is newer than this one.
    let _ = line.greet(Attempt(u32::MAX), None).await;
    // Also to one that is late with its answer: it comes to this too.
    let _ = line.ask(Op::Shutdown, Vec::new()).await; // until it closes
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
        let line = Line::new(id, connect(id, dir)?)?;
        line.greet(attempt, None).await?;
        Ok(line)
    }

    /// Over what [`connect_now`] made. The guest has to be greeted first.
    pub fn new(id: &SandboxId, stream: UnixStream) -> Result<Line> {
        Ok(Line { id: id.clone(), messages: Messages::new(stream.into()).map_err(unavailable)? })
    }

    pub async fn greet(&self, attempt: Attempt, token: Option<String>) -> Result<()> {
        self.ask(Op::Hello { version: VERSION, attempt: attempt.0, token }, Vec::new()).await.map(drop)
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
            io::Result::Ok((reply.answer, fds))
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

fn prefix(frame: &[u8]) -> io::Result<(usize, usize)> {
    let bytes = frame.get(..PREFIX).and_then(|p| p.try_into().ok());
    let bytes = bytes.ok_or(io::ErrorKind::UnexpectedEof)?;
    decode_prefix(bytes, MAX_FRAME_TO_HOST).map_err(io::Error::other)
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// Listens, and takes no connection. The first that comes waits, for the others there is no room.
    pub fn deaf(path: &Path) -> OwnedFd {
        let listener = rustix::net::socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
        rustix::net::bind(&listener, &SocketAddrUnix::new(path).unwrap()).unwrap();
        rustix::net::listen(&listener, 0).unwrap();
        listener
    }

    #[tokio::test(start_paused = true)]
    async fn a_guest_that_takes_no_connection_is_not_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let id = SandboxId::new("deaf").unwrap();
        let _deaf = deaf(&dir.path().join("ctl"));
        let first = Line::open(&id, dir.path(), Attempt(1)).await.err().unwrap();
        assert_eq!(first.kind, ErrorKind::Unavailable, "{first}");
        let second = Line::open(&id, dir.path(), Attempt(1)).await.err().unwrap();
        assert!(second.is_retryable() && second.hint.is_some(), "{second}");
        shut_down_unknown(&id, dir.path()).await;
        let gone = connect(&id, &dir.path().join("none")).unwrap_err();
        assert_eq!(gone.kind, ErrorKind::NotFound, "{gone}");
    }
}
