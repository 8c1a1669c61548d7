//! Reaching the guest of a container: its socket lies in a folder that both sides see.
//!
//! The folder can be written from inside, so what lies there is hostile: the socket is opened without following a link and
//! must be a socket; then the connection goes to that very inode, which can only be somebody's inside the same sandbox.

use std::io::{self, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use forkyard_core::Attempt;
use forkyard_guest::protocol::{
    Answer, Descriptors, Fault, MAX_FRAME_TO_HOST, Op, PREFIX, Reply, Request, VERSION, decode_prefix, encode,
};
use rustix::fs::{FileType, Mode, OFlags};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};

use super::record::SOCKET_NAME;
use crate::error::STALE_HINT;
use crate::guest_client::GuestClient;
use crate::{ErrorKind, Result, SandboxError};

/// A guest answers at once or is not there.
const ANSWER_WITHIN: Duration = Duration::from_secs(10);
/// The answer with the descriptors is one small frame.
const ANSWER_BYTES: usize = 4096;

fn open(run: &Path) -> io::Result<UnixStream> {
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    let dir = rustix::fs::open(run, flags | OFlags::DIRECTORY, Mode::empty())?;
    let socket = rustix::fs::openat(&dir, SOCKET_NAME, flags | OFlags::NOFOLLOW, Mode::empty())?;
    let kind = FileType::from_raw_mode(rustix::fs::fstat(&socket)?.st_mode);
    if kind != FileType::Socket {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "not a socket"));
    }
    // Also short enough for an address, wherever the state folder is.
    UnixStream::connect(format!("/proc/self/fd/{}", socket.as_raw_fd()))
}

/// Greets the guest. The error is `NotFound` while nobody listens.
pub async fn guest(run: &Path, attempt: Attempt, token: &str) -> Result<GuestClient> {
    let nobody =
        |e: io::Error| SandboxError::new(ErrorKind::NotFound, format!("the guest does not answer: {e}"));
    let stream = open(run).map_err(nobody)?;
    let greeting = GuestClient::connect(stream, attempt, Some(token.to_string()));
    tokio::time::timeout(ANSWER_WITHIN, greeting)
        .await
        .map_err(|_| SandboxError::new(ErrorKind::Timeout, "the guest does not answer in time"))?
}

/// The listening socket inside that the egress proxy serves, passed out on a connection of its own.
pub async fn proxy_listener(run: &Path, attempt: Attempt, token: &str) -> Result<std::net::TcpListener> {
    let stream = open(run)
        .map_err(|e| SandboxError::new(ErrorKind::NotFound, format!("the guest does not answer: {e}")))?;
    let token = token.to_string();
    let fetched = tokio::task::spawn_blocking(move || fetch(stream, attempt, token))
        .await
        .map_err(|e| SandboxError::new(ErrorKind::Unavailable, e.to_string()))?;
    fetched.map_err(|e| match e {
        Refused::Stale(message) => SandboxError::new(ErrorKind::Stale, message).hint(STALE_HINT),
        Refused::Other(e) => SandboxError::new(
            ErrorKind::Unavailable,
            format!("the guest does not pass its proxy socket: {e}"),
        ),
    })
}

enum Refused {
    Stale(String),
    Other(io::Error),
}

impl<E: Into<io::Error>> From<E> for Refused {
    fn from(e: E) -> Refused {
        Refused::Other(e.into())
    }
}

fn fetch(mut stream: UnixStream, attempt: Attempt, token: String) -> Result<std::net::TcpListener, Refused> {
    stream.set_read_timeout(Some(ANSWER_WITHIN))?;
    stream.set_write_timeout(Some(ANSWER_WITHIN))?;
    let hello = Op::Hello { version: VERSION, attempt: attempt.0, token: Some(token) };
    stream.write_all(&encode(&Request { seq: 1, op: hello }, &[]))?;
    let mut prefix = [0; PREFIX];
    stream.read_exact(&mut prefix)?;
    let (length, head) = decode_prefix(prefix, MAX_FRAME_TO_HOST).map_err(io::Error::other)?;
    let mut rest = vec![0; length];
    stream.read_exact(&mut rest)?;
    accepted(&rest[..head])?;

    let ask = Op::Descriptors { what: Descriptors::Proxy };
    stream.write_all(&encode(&Request { seq: 2, op: ask }, &[]))?;
    let (frame, fds) = receive(&stream)?;
    let head = frame.get(..PREFIX).and_then(|p| <[u8; PREFIX]>::try_from(p).ok());
    let (_, head) = decode_prefix(head.ok_or(io::ErrorKind::UnexpectedEof)?, MAX_FRAME_TO_HOST)
        .map_err(io::Error::other)?;
    accepted(frame.get(PREFIX..PREFIX + head).ok_or(io::ErrorKind::UnexpectedEof)?)?;
    let fd = fds.into_iter().next().ok_or_else(|| io::Error::other("no descriptor came"))?;
    Ok(listening(fd)?)
}

/// What the guest passed is hostile until it is seen to be a listening TCP socket.
fn listening(fd: OwnedFd) -> io::Result<std::net::TcpListener> {
    use rustix::net::sockopt;
    let right = sockopt::socket_type(&fd)? == rustix::net::SocketType::STREAM
        && sockopt::socket_acceptconn(&fd)?
        && matches!(sockopt::socket_domain(&fd)?, rustix::net::AddressFamily::INET);
    if !right {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "not a listening TCP socket"));
    }
    let listener = std::net::TcpListener::from(fd);
    listener.set_nonblocking(true)?;
    Ok(listener)
}

fn accepted(head: &[u8]) -> Result<(), Refused> {
    match serde_json::from_slice::<Reply>(head)?.answer {
        Answer::Error { kind: Fault::Stale, message } => Err(Refused::Stale(message)),
        Answer::Error { message, .. } => Err(Refused::Other(io::Error::other(message))),
        _ => Ok(()),
    }
}

fn receive(stream: &UnixStream) -> io::Result<(Vec<u8>, Vec<OwnedFd>)> {
    let mut data = vec![0; ANSWER_BYTES];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let slices = &mut [IoSliceMut::new(&mut data)];
    let got = recvmsg(stream.as_fd(), slices, &mut control, RecvFlags::CMSG_CLOEXEC)?.bytes;
    data.truncate(got);
    let fds = control
        .drain()
        .filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(fds) => Some(fds.collect::<Vec<_>>()),
            _ => None,
        })
        .flatten()
        .collect();
    Ok((data, fds))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_in_the_sockets_place_leads_nowhere() {
        let dir = tempfile::tempdir().unwrap();
        let elsewhere = dir.path().join("host.sock");
        let _listener = std::os::unix::net::UnixListener::bind(&elsewhere).unwrap();
        let run = dir.path().join("run");
        std::fs::create_dir(&run).unwrap();
        std::os::unix::fs::symlink(&elsewhere, run.join(SOCKET_NAME)).unwrap();
        assert!(open(&run).is_err());
        std::fs::remove_file(run.join(SOCKET_NAME)).unwrap();
        std::fs::write(run.join(SOCKET_NAME), "").unwrap();
        assert!(open(&run).is_err());
        std::fs::remove_file(run.join(SOCKET_NAME)).unwrap();
        let _guest = std::os::unix::net::UnixListener::bind(run.join(SOCKET_NAME)).unwrap();
        assert!(open(&run).is_ok());
    }

    #[test]
    fn only_a_listening_tcp_socket_is_taken() {
        let (a, _b) = UnixStream::pair().unwrap();
        assert!(listening(a.into()).is_err());
        assert!(listening(std::fs::File::open("/dev/null").unwrap().into()).is_err());
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let client = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        assert!(listening(client.into()).is_err());
        assert!(listening(listener.into()).is_ok());
    }
}
