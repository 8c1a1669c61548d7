//! One command: its streams, its readers, its end.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use forkyard_guest::protocol::{Answer, ExitInfo, MAX_CHUNK, OUTPUT_WINDOW};
use rustix::io::Errno;

use super::outbox::Outbox;
use super::spool::Spool;

/// How long the output of a command that has ended may stay open before the call is called done: a server that was started in
/// the background keeps the pipe, and must not keep the call.
pub const DRAIN_GRACE: Duration = Duration::from_millis(100);
/// Read from one stream before others get their turn.
const READ_TURN: usize = 1 << 20;
const READ_SIZE: usize = 64 << 10;
/// Input that a command has not read yet.
pub const MAX_STDIN: usize = 8 << 20;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Which {
    Stdout,
    Stderr,
}

pub struct Stream {
    pub fd: Option<OwnedFd>,
    /// The loop watches the descriptor.
    pub watched: bool,
    pub total: u64,
    pub spool: Spool,
}

impl Stream {
    pub fn new(fd: Option<OwnedFd>, keep: bool) -> Stream {
        Stream { fd, watched: false, total: 0, spool: Spool::new(keep) }
    }
}

/// Somebody who reads a job's events.
pub struct Reader {
    pub conn: u64,
    pub seq: u32,
    pub out: Outbox,
    /// Frames that may still be sent before an acknowledgement.
    pub credit: u32,
    stdout_at: u64,
    stderr_at: u64,
}

impl Reader {
    pub fn new(conn: u64, seq: u32, out: Outbox) -> Reader {
        Reader { conn, seq, out, credit: OUTPUT_WINDOW, stdout_at: 0, stderr_at: 0 }
    }
}

pub struct Job {
    pub call: Option<String>,
    pub pid: i32,
    pub started: Instant,
    pub deadline: Option<Instant>,
    pub max_output: u64,
    pub stdout: Stream,
    pub stderr: Stream,
    pub stdin: Option<OwnedFd>,
    pub stdin_queue: VecDeque<u8>,
    pub stdin_watched: bool,
    /// Close stdin once the queue is empty.
    pub stdin_ending: bool,
    pub terminal: Option<OwnedFd>,
    pub timed_out: bool,
    pub oom_killed: bool,
    /// Kernel's count of memory kills when it started.
    pub oom_before: u64,
    pub truncated: bool,
    /// Said to the user after the output, on stderr.
    pub note: Option<String>,
    /// Wait status and when it came.
    pub ended: Option<(i32, Instant)>,
    pub exit: Option<ExitInfo>,
    pub readers: Vec<Reader>,
}

impl Job {
    pub fn stream(&mut self, which: Which) -> &mut Stream {
        match which {
            Which::Stdout => &mut self.stdout,
            Which::Stderr => &mut self.stderr,
        }
    }

    /// Takes in what the command wrote. `budget` is what all spools together may still take. Returns what was taken from it.
    pub fn read(
        &mut self,
        which: Which,
        buffer: &mut Vec<u8>,
        dir: Option<BorrowedFd<'_>>,
        budget: u64,
    ) -> u64 {
        let max = self.max_output;
        let keeps = self.call.is_some();
        let mut dropped = false;
        let mut taken = 0;
        // Its pages are touched only by what is read.
        buffer.reserve(READ_SIZE);
        let stream = self.stream(which);
        let mut turn = 0;
        while turn < READ_TURN {
            let Some(fd) = &stream.fd else { break };
            let room = stream.spool.room().min(READ_SIZE);
            if room == 0 {
                break;
            }
            match rustix::io::read(fd.as_fd(), &mut buffer.spare_capacity_mut()[..room]) {
                Ok(([], _)) => stream.fd = None,
                Ok((data, _)) => {
                    let n = data.len();
                    turn += n;
                    stream.total += n as u64;
                    let mut allowed = max.saturating_sub(stream.spool.length());
                    if keeps {
                        allowed = allowed.min(budget.saturating_sub(taken));
                    }
                    let keep = usize::try_from(allowed).unwrap_or(n).min(n);
                    if keep > 0 && stream.spool.push(&data[..keep], dir) {
                        taken += keep as u64;
                        dropped |= keep < n;
                    } else {
                        dropped = true;
                    }
                    if n < room {
                        break;
                    }
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => break,
                Err(_) => stream.fd = None, // a terminal whose last user is gone says EIO
            }
        }
        self.truncated |= dropped;
        taken
    }

    /// Sends readers what they have credit for, and the end once all is sent.
    pub fn pump(&mut self) {
        for reader in &mut self.readers {
            while reader.credit > 0 {
                let (stream, at, stderr) = if reader.stdout_at < self.stdout.spool.length() {
                    (&mut self.stdout, &mut reader.stdout_at, false)
                } else if reader.stderr_at < self.stderr.spool.length() {
                    (&mut self.stderr, &mut reader.stderr_at, true)
                } else {
                    break;
                };
                let data = stream.spool.read(*at, MAX_CHUNK);
                if data.is_empty() {
                    *at = stream.spool.length(); // the spool could not be read back: what is lost is lost
                    self.truncated = true;
                    continue;
                }
                *at += data.len() as u64;
                reader.credit -= 1;
                reader.out.push(reader.seq, Answer::Output { stderr }, &data);
            }
        }
        if let Some(mut exit) = self.exit {
            exit.truncated |= self.truncated;
            let (out, err) = (self.stdout.spool.length(), self.stderr.spool.length());
            self.readers.retain(|reader| {
                let done = reader.stdout_at >= out && reader.stderr_at >= err;
                if done {
                    reader.out.push(reader.seq, Answer::Exit(exit), &[]);
                }
                !done
            });
        }
    }

    /// When, if ever, an ended command counts as done without the end of its output.
    pub fn grace_until(&self) -> Option<Instant> {
        match (&self.ended, &self.exit) {
            (Some((_, at)), None) => Some(*at + DRAIN_GRACE),
            _ => None,
        }
    }

    /// Whether it has ended and its output is in: all of it, or what came within the grace.
    pub fn is_done(&self, now: Instant) -> bool {
        let Some(until) = self.grace_until() else { return false };
        // A stream that waits for its reader still has bytes to give.
        let in_hand = |s: &Stream| s.fd.is_none() || (s.spool.room() > 0 && now >= until);
        in_hand(&self.stdout) && in_hand(&self.stderr)
    }

    pub fn finish(&mut self) {
        let Some((status, at)) = self.ended else { return };
        if let Some(note) = self.note.take() {
            self.stderr.spool.push(note.as_bytes(), None);
        }
        let signal = libc::WIFSIGNALED(status).then(|| libc::WTERMSIG(status));
        let exit_code = match signal {
            _ if self.timed_out => 124,
            Some(signal) => 128 + signal,
            None => libc::WEXITSTATUS(status),
        };
        self.exit = Some(ExitInfo {
            exit_code,
            signal,
            timed_out: self.timed_out,
            oom_killed: self.oom_killed,
            duration_us: u64::try_from((at - self.started).as_micros()).unwrap_or(u64::MAX),
            stdout_bytes: self.stdout.total,
            stderr_bytes: self.stderr.total,
            truncated: self.truncated,
        });
    }

    /// Writes queued input. True if the loop must tell when more can be written.
    pub fn feed(&mut self) -> bool {
        while let Some(stdin) = &self.stdin {
            let (front, _) = self.stdin_queue.as_slices();
            if front.is_empty() {
                if self.stdin_ending {
                    self.stdin = None;
                }
                return false;
            }
            match rustix::io::write(stdin, front) {
                Ok(n) => drop(self.stdin_queue.drain(..n)),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return true,
                Err(_) => {
                    self.stdin = None; // it no longer reads
                    self.stdin_queue.clear();
                }
            }
        }
        false
    }
}
