//! Messages with descriptors, and the few sockets the guest makes.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::{Errno, Result};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg, sendmsg,
};

/// Most descriptors in one message: the kernel's own bound is 253; we never come near.
const MAX_DESCRIPTORS: usize = 64;
const SPACE: usize = rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS));

/// Sends bytes and descriptors; returns how many bytes were taken (all, on a SEQPACKET socket).
pub fn send(socket: BorrowedFd<'_>, data: &[u8], fds: &[BorrowedFd<'_>]) -> Result<usize> {
    let mut space = [MaybeUninit::uninit(); SPACE];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(Errno::TOOBIG);
    }
    sendmsg(socket, &[IoSlice::new(data)], &mut control, SendFlags::NOSIGNAL)
}

/// One message; no bytes means that the peer is gone. Descriptors are close-on-exec.
pub fn receive(socket: BorrowedFd<'_>, data: &mut [u8]) -> Result<(usize, Vec<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); SPACE];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut iov = [IoSliceMut::new(data)];
    let message =
        rustix::io::retry_on_intr(|| recvmsg(socket, &mut iov, &mut control, RecvFlags::CMSG_CLOEXEC))?;
    let mut fds = Vec::new();
    for part in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = part {
            fds.extend(rights);
        }
    }
    Ok((message.bytes, fds))
}

/// A listening TCP socket on loopback.
pub fn listen_loopback(port: u16) -> Result<OwnedFd> {
    let socket = rustix::net::socket_with(
        AddressFamily::INET,
        SocketType::STREAM,
        SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
        None,
    )?;
    let address = std::net::SocketAddrV4::new(std::net::Ipv4Addr::LOCALHOST, port);
    rustix::net::bind(socket.as_fd(), &address)?;
    rustix::net::listen(socket.as_fd(), 128)?;
    Ok(socket)
}

/// Brings `lo` of a new network namespace up.
pub fn loopback_up() -> Result<()> {
    let socket =
        rustix::net::socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
    // SAFETY: an all-zero ifreq is valid; the name is shorter than its array and stays zero-terminated.
    let request = unsafe {
        let mut request: libc::ifreq = std::mem::zeroed();
        request.ifr_name[0] = b'l' as libc::c_char;
        request.ifr_name[1] = b'o' as libc::c_char;
        request.ifr_ifru.ifru_flags = (libc::IFF_UP | libc::IFF_RUNNING) as libc::c_short;
        request
    };
    use std::os::fd::AsRawFd;
    // SAFETY: SIOCSIFFLAGS reads one ifreq, which lives across the call.
    super::check(
        unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS, &raw const request) } as libc::c_long
    )
    .map(drop)
}
