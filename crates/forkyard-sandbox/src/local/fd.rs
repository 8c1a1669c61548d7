//! Messages with descriptors between this process and its zygote, and waiting for processes.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// What the zygote and its clones say is short; what they are asked may be long.
const MAX_ANSWER: usize = 16 << 10;
const MAX_DESCRIPTORS: usize = 64;
const SPACE: usize = rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS));

/// A pair of message sockets: ours (non-blocking), theirs.
pub fn message_pair() -> rustix::io::Result<(OwnedFd, OwnedFd)> {
    let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    rustix::io::ioctl_fionbio(&ours, true)?;
    Ok((ours, theirs))
}

pub fn send(socket: BorrowedFd<'_>, data: &[u8], fds: &[BorrowedFd<'_>]) -> rustix::io::Result<()> {
    let mut space = [MaybeUninit::uninit(); SPACE];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(rustix::io::Errno::TOOBIG);
    }
    sendmsg(socket, &[IoSlice::new(data)], &mut control, SendFlags::NOSIGNAL).map(drop)
}

/// One message with its descriptors. No bytes means that the peer is gone.
pub fn receive(socket: BorrowedFd<'_>) -> rustix::io::Result<(Vec<u8>, Vec<OwnedFd>)> {
    let mut data = vec![0; MAX_ANSWER];
    let mut space = [MaybeUninit::uninit(); SPACE];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let n = recvmsg(socket, &mut [IoSliceMut::new(&mut data)], &mut control, RecvFlags::CMSG_CLOEXEC)?.bytes;
    data.truncate(n);
    let mut fds = Vec::new();
    for part in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = part {
            fds.extend(rights);
        }
    }
    Ok((data, fds))
}

/// A message socket in a runtime, which is told of it only when there is something to read: it would else be woken by every
/// message that the other side has taken.
pub struct Messages(AsyncFd<OwnedFd>);

impl Messages {
    pub fn new(socket: OwnedFd) -> std::io::Result<Messages> {
        // SAFETY: an OwnedFd names the same open file until it is dropped, and it is dropped with the AsyncFd.
        Ok(Messages(unsafe { AsyncFd::register_with_interest(socket, Interest::READABLE) }?))
    }

    pub async fn send(&self, data: &[u8], fds: &[BorrowedFd<'_>]) -> std::io::Result<()> {
        match send(self.0.get_ref().as_fd(), data, fds) {
            Err(rustix::io::Errno::AGAIN) => {}
            sent => return Ok(sent?),
        }
        let full = self.0.get_ref().try_clone()?;
        // SAFETY: see above. The runtime takes a descriptor once, so this is another one.
        let full = unsafe { AsyncFd::register_with_interest(full, Interest::WRITABLE) }?;
        full.async_io(Interest::WRITABLE, |socket| send(socket.as_fd(), data, fds).map_err(Into::into)).await
    }

    pub async fn receive(&self) -> std::io::Result<(Vec<u8>, Vec<OwnedFd>)> {
        self.0.async_io(Interest::READABLE, |socket| receive(socket.as_fd()).map_err(Into::into)).await
    }
}

impl AsFd for Messages {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.get_ref().as_fd()
    }
}

/// Waits until the process behind a pidfd is gone.
pub async fn wait_gone(pidfd: BorrowedFd<'_>) -> std::io::Result<()> {
    let own = pidfd.try_clone_to_owned()?;
    // SAFETY: an OwnedFd names the same open file until it is dropped, and it is dropped with the AsyncFd.
    let watched = unsafe { AsyncFd::register_with_interest(own, Interest::READABLE) }?;
    watched.readable().await.map(drop)
}
