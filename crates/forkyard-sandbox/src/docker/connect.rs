//! Reaching the guest of a container: its socket lies in a folder that both sides see.
//!
//! The folder can be written from inside, so what lies there is hostile: the socket is opened without following a link and
//! must be a socket; then the connection goes to that very inode, which can only be somebody's inside the same sandbox. It is
//! the guest's if the first process of the container listens there; nobody else is told the token.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;

use forkyard_core::{Attempt, SandboxId};
use forkyard_guest::protocol::{Descriptors, Op};
use rustix::fs::{FileType, Mode, OFlags};

use super::record::SOCKET_NAME;
use crate::guest_client::GuestClient;
use crate::local::link::{ANSWER_WITHIN, Line, connect_now};
use crate::{ErrorKind, Result, SandboxError};

/// `NotFound` while nobody listens.
fn no_guest(e: io::Error) -> SandboxError {
    let kind = match e.kind() {
        io::ErrorKind::WouldBlock => ErrorKind::Unavailable,
        _ => ErrorKind::NotFound,
    };
    SandboxError::new(kind, format!("the guest does not answer: {e}"))
}

fn open(run: &Path) -> io::Result<UnixStream> {
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    let dir = rustix::fs::open(run, flags | OFlags::DIRECTORY, Mode::empty())?;
    let socket = rustix::fs::openat(&dir, SOCKET_NAME, flags | OFlags::NOFOLLOW, Mode::empty())?;
    let kind = FileType::from_raw_mode(rustix::fs::fstat(&socket)?.st_mode);
    if kind != FileType::Socket {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "not a socket"));
    }
    // Also short enough for an address, wherever the state folder is.
    connect_now(Path::new(&format!("/proc/self/fd/{}", socket.as_raw_fd())))
}

/// A connection to the guest itself.
fn reach(run: &Path) -> Result<UnixStream> {
    let stream = open(run).map_err(no_guest)?;
    if is_first(peer_pid(&stream).map_err(no_guest)?) {
        return Ok(stream);
    }
    Err(SandboxError::new(ErrorKind::Denied, "another process listens in the guest's place")
        .hint("a command inside put it there: remove the sandbox"))
}

/// Whether it is the first process of its container. Of one that can't be seen from here, as from inside another container,
/// nobody can tell.
fn is_first(pid: i32) -> bool {
    let Ok(status) = std::fs::read_to_string(format!("/proc/{pid}/status")) else { return pid <= 0 };
    let numbers = status.lines().find_map(|line| line.strip_prefix("NSpid:"));
    numbers.is_some_and(|numbers| numbers.split_whitespace().next_back() == Some("1"))
}

/// Of whoever listens; 0: it can't be seen from here.
fn peer_pid(stream: &UnixStream) -> io::Result<i32> {
    let mut peer = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut length = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: SO_PEERCRED writes one ucred of the length given; both live across the call.
    let done = unsafe {
        let to = (&raw mut peer).cast();
        libc::getsockopt(stream.as_raw_fd(), libc::SOL_SOCKET, libc::SO_PEERCRED, to, &raw mut length)
    };
    if done == 0 { Ok(peer.pid) } else { Err(io::Error::last_os_error()) }
}

/// Greets the guest. The error is `NotFound` while nobody listens.
pub async fn guest(run: &Path, attempt: Attempt, token: &str) -> Result<GuestClient> {
    let stream = reach(run)?;
    let greeting = GuestClient::connect(stream, attempt, Some(token.to_string()));
    tokio::time::timeout(ANSWER_WITHIN, greeting)
        .await
        .map_err(|_| SandboxError::new(ErrorKind::Timeout, "the guest does not answer in time"))?
}

/// The listening socket inside that the egress proxy serves, passed out on a connection of its own.
pub async fn proxy_listener(
    id: &SandboxId,
    run: &Path,
    attempt: Attempt,
    token: &str,
) -> Result<std::net::TcpListener> {
    let line = Line::new(id, reach(run)?)?;
    line.greet(attempt, Some(token.to_string())).await?;
    let mut fds = line.ask(Op::Descriptors { what: Descriptors::Proxy }, Vec::new()).await?;
    let passed = fds.pop().ok_or_else(|| io::Error::other("no descriptor came")).and_then(listening);
    passed.map_err(|e| {
        let message = format!("the guest of sandbox {id} does not pass its proxy socket: {e}");
        SandboxError::new(ErrorKind::Unavailable, message)
    })
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

    /// Whatever runs inside can put its own socket there.
    #[tokio::test]
    async fn who_is_not_the_first_process_is_not_told_the_token() {
        use std::io::Read;
        let dir = tempfile::tempdir().unwrap();
        let listener = std::os::unix::net::UnixListener::bind(dir.path().join(SOCKET_NAME)).unwrap();
        let id = SandboxId::new("stranger").unwrap();
        let greeted = guest(dir.path(), Attempt(1), "token").await.err().unwrap();
        let asked = proxy_listener(&id, dir.path(), Attempt(1), "token").await.unwrap_err();
        for refused in [greeted, asked] {
            assert_eq!(refused.kind, ErrorKind::Denied, "{refused}");
            let mut told = Vec::new();
            listener.accept().unwrap().0.read_to_end(&mut told).unwrap();
            assert_eq!(told, b"");
        }
        // Nobody listens: it may only not have begun.
        drop(listener);
        let gone = guest(dir.path(), Attempt(1), "token").await.err().unwrap();
        assert_eq!(gone.kind, ErrorKind::NotFound);
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
