//! One clone ahead: a sandbox's namespaces, its network among them, are made before anybody asks for it, while nobody waits.
//!
//! Only for who makes sandboxes again and again, and not where a sandbox is born in its group, which the next one does not have
//! yet.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use forkyard_guest::zygote::{Ask, MAX_MESSAGE, SandboxAsk};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType};

use super::setup::{self, Born};
use super::{Common, SANDBOX_NAMESPACES, close, receive};
use crate::sys::process::{Cloned, clone_with, exit_now};
use crate::sys::socket;

/// Sandboxes that were made here before one is made ahead.
const AFTER: u32 = 2;

struct Blank {
    pid: i32,
    pidfd: OwnedFd,
    /// It says one byte when it is ready, then waits for its sandbox.
    channel: OwnedFd,
    /// Of the user inside.
    id: u32,
}

#[derive(Default)]
pub struct Blanks {
    blank: Option<Blank>,
    made: u32,
    /// The user inside the last one; None if that was born in its group.
    id: Option<u32>,
}

impl Blanks {
    /// Hands a sandbox to the clone that waits for one: its pid and pidfd. None if there is none that fits.
    pub fn give(&mut self, ask: &SandboxAsk, message: &[u8], fds: &[OwnedFd]) -> Option<(i32, OwnedFd)> {
        self.made = self.made.saturating_add(1);
        self.id = (!ask.group).then_some(ask.id);
        let blank = self.blank.as_ref().filter(|blank| Some(blank.id) == self.id)?;
        let mut byte = [0];
        match rustix::net::recv(&blank.channel, &mut byte, RecvFlags::DONTWAIT) {
            Ok((1.., _)) => {}
            Err(rustix::io::Errno::AGAIN) => return None, // not ready yet: the next one's
            Ok(_) | Err(_) => {
                self.blank = None;
                return None;
            }
        }
        let Blank { pid, pidfd, channel, .. } = self.blank.take()?;
        let fds: Vec<BorrowedFd<'_>> = fds.iter().map(|fd| fd.as_fd()).collect();
        socket::send(channel.as_fd(), message, &fds).ok()?;
        Some((pid, pidfd))
    }

    /// Makes the next one, if nobody waits for something else.
    pub fn make_up(&mut self, commands: BorrowedFd<'_>, common: &Common) {
        let Some(id) = self.id.filter(|_| self.made >= AFTER && self.blank.is_none()) else { return };
        let mut waiting = [PollFd::new(&commands, PollFlags::IN)];
        let now = rustix::time::Timespec { tv_sec: 0, tv_nsec: 0 };
        if poll(&mut waiting, Some(&now)) == Ok(0) {
            self.blank = clone(commands, id, common);
        }
    }
}

fn clone(commands: BorrowedFd<'_>, id: u32, common: &Common) -> Option<Blank> {
    let (ours, theirs) =
        rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
            .ok()?;
    // SAFETY: the zygote never starts a thread.
    match unsafe { clone_with(SANDBOX_NAMESPACES, None) }.ok()? {
        Cloned::Parent { pid, pidfd } => Some(Blank { pid, pidfd, channel: ours, id }),
        Cloned::Child => {
            close(commands);
            close(ours.as_fd());
            if setup::prepare(id).is_ok() && socket::send(theirs.as_fd(), &[0], &[]).is_ok() {
                let mut buffer = vec![0; MAX_MESSAGE];
                // None: the zygote is gone, and nobody will ask.
                if let Some((Ask::Sandbox(ask), fds)) = receive(theirs.as_fd(), &mut buffer) {
                    drop(buffer);
                    setup::sandbox(*ask, fds, Born { in_group: false, ready: true }, common);
                }
            }
            exit_now(0)
        }
    }
}
