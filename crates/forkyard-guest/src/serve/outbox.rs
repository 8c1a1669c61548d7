//! What waits to be written to a connection. The event loop writes it out; threads put answers in.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};

use forkyard_guest::protocol::{Answer, Fault, Reply, encode};
use rustix::io::Errno;

use crate::sys::socket;

/// A thread waits while more than this is unsent: a slow reader costs that much memory and no more.
const MAX_UNSENT: usize = 4 << 20;

struct Queued {
    bytes: Vec<u8>,
    sent: usize,
    fds: Vec<OwnedFd>,
}

#[derive(Default)]
struct State {
    queue: VecDeque<Queued>,
    unsent: usize,
    /// Threads that wait for room.
    waiting: usize,
    closed: bool,
}

/// Shared by the loop and the threads that answer on one connection.
#[derive(Clone)]
pub struct Outbox {
    state: Arc<(Mutex<State>, Condvar)>,
    wake: Arc<OwnedFd>,
}

/// The connection is gone; whoever was answering can stop.
#[derive(Debug)]
pub struct Gone;

impl Outbox {
    pub fn new(wake: Arc<OwnedFd>) -> Outbox {
        Outbox { state: Arc::default(), wake }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// From the loop: never waits. Output is bounded by credit; a stranger gets one answer, an owner, who is trusted, one a
    /// request.
    pub fn push(&self, seq: u32, answer: Answer, body: &[u8]) {
        self.push_with(seq, answer, body, Vec::new());
    }

    pub fn push_with(&self, seq: u32, answer: Answer, body: &[u8], fds: Vec<OwnedFd>) {
        let bytes = encode(&Reply { seq, answer }, body);
        let mut state = self.lock();
        if !state.closed {
            state.unsent += bytes.len();
            state.queue.push_back(Queued { bytes, sent: 0, fds });
        }
    }

    /// From a thread: waits for room, then tells the loop.
    pub fn send(&self, seq: u32, answer: Answer, body: &[u8]) -> Result<(), Gone> {
        let bytes = encode(&Reply { seq, answer }, body);
        let mut state = self.lock();
        while state.unsent > MAX_UNSENT && !state.closed {
            state.waiting += 1;
            state = self.state.1.wait(state).unwrap_or_else(|poisoned| poisoned.into_inner());
            state.waiting -= 1;
        }
        if state.closed {
            return Err(Gone);
        }
        state.unsent += bytes.len();
        state.queue.push_back(Queued { bytes, sent: 0, fds: Vec::new() });
        drop(state);
        self.notify();
        Ok(())
    }

    pub fn notify(&self) {
        // Full means that a wake-up is pending already.
        let _ = rustix::io::write(&*self.wake, &1u64.to_ne_bytes());
    }

    pub fn error(&self, seq: u32, kind: Fault, message: impl Into<String>) {
        self.push(seq, Answer::Error { kind, message: message.into() }, &[]);
    }

    /// Writes what the socket takes. Ok(true): all is out. Ok(false): wait until it is writable.
    pub fn flush(&self, socket: BorrowedFd<'_>) -> Result<bool, Errno> {
        let mut state = self.lock();
        while let Some(first) = state.queue.front_mut() {
            let fds: Vec<BorrowedFd<'_>> = first.fds.iter().map(|fd| fd.as_fd()).collect();
            match socket::send(socket, &first.bytes[first.sent..], &fds) {
                Ok(n) => {
                    first.fds.clear();
                    first.sent += n;
                    let done = first.sent == first.bytes.len();
                    state.unsent -= n;
                    if done {
                        state.queue.pop_front();
                    }
                }
                Err(Errno::AGAIN) => return Ok(false),
                Err(Errno::INTR) => {}
                Err(e) => return Err(e),
            }
        }
        if state.waiting > 0 {
            self.state.1.notify_all();
        }
        Ok(true)
    }

    pub fn close(&self) {
        let mut state = self.lock();
        state.closed = true;
        state.queue.clear();
        state.unsent = 0;
        self.state.1.notify_all();
    }
}
