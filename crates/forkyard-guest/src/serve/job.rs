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
    /// What was still in it when the command's grace was over: that much is the command's, whoever else writes to it.
    owed: Option<u64>,
}

impl Stream {
    pub fn new(fd: Option<OwnedFd>, keep: bool) -> Stream {
        Stream { fd, watched: false, total: 0, spool: Spool::new(keep), owed: None }
    }

    /// Whether there is nothing more to come of a command that has ended.
    fn is_in(&mut self, late: bool) -> bool {
        let Some(fd) = &self.fd else { return true };
        late && *self.owed.get_or_insert_with(|| rustix::io::ioctl_fionread(fd).unwrap_or(0)) == 0
    }

    fn is_in_grace(&self) -> bool {
        self.fd.is_some() && self.owed.is_none()
    }
}

/// What reading a stream came to.
pub struct Taken {
    /// Of the budget.
    pub bytes: u64,
    /// Nothing can come any more. It is still open: the loop may watch it.
    pub over: bool,
}

/// What a command's stdin is waiting for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Feed {
    Nothing,
    /// That the command reads.
    Room,
    /// Nothing any more: it is to be closed.
    Over,
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

    /// Takes in what the command wrote. `budget` is what all spools together may still take.
    pub fn read(
        &mut self,
        which: Which,
        buffer: &mut Vec<u8>,
        dir: Option<BorrowedFd<'_>>,
        budget: u64,
    ) -> Taken {
        let max = self.max_output;
        let keeps = self.call.is_some();
        let mut dropped = false;
        let mut over = false;
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
                Ok(([], _)) => {
                    over = true;
                    break;
                }
                Ok((data, _)) => {
                    let n = data.len();
                    turn += n;
                    stream.total += n as u64;
                    stream.owed = stream.owed.map(|owed| owed.saturating_sub(n as u64));
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
                Err(_) => {
                    over = true; // a terminal whose last user is gone says EIO
                    break;
                }
            }
        }
        self.truncated |= dropped;
        Taken { bytes: taken, over }
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

    /// Until when the output of an ended command may come to its end; None if that was looked at, or need not be.
    pub fn grace_until(&self) -> Option<Instant> {
        let (_, at) = self.ended.filter(|_| self.exit.is_none())?;
        (self.stdout.is_in_grace() || self.stderr.is_in_grace()).then_some(at + DRAIN_GRACE)
    }

    /// Whether it has ended and its output is in: all of it, or what was there after the grace.
    pub fn is_done(&mut self, now: Instant) -> bool {
        let Some((_, at)) = self.ended else { return false };
        let late = now >= at + DRAIN_GRACE;
        // Both are looked at, so that the grace is over for both.
        let (out, err) = (self.stdout.is_in(late), self.stderr.is_in(late));
        out && err
    }

    /// By the kernel, itself or what it waited for: 137 is a shell's word for a child that was killed.
    pub fn was_killed(&self) -> bool {
        self.ended.is_some_and(|(status, _)| match libc::WIFSIGNALED(status) {
            true => libc::WTERMSIG(status) == libc::SIGKILL,
            false => libc::WEXITSTATUS(status) == 128 + libc::SIGKILL,
        })
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

    /// Writes queued input.
    pub fn feed(&mut self) -> Feed {
        let Some(stdin) = &self.stdin else { return Feed::Nothing };
        loop {
            let (front, _) = self.stdin_queue.as_slices();
            if front.is_empty() {
                return if self.stdin_ending { Feed::Over } else { Feed::Nothing };
            }
            match rustix::io::write(stdin, front) {
                Ok(n) => drop(self.stdin_queue.drain(..n)),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Feed::Room,
                Err(_) => {
                    self.stdin_queue.clear(); // it no longer reads
                    return Feed::Over;
                }
            }
        }
    }
}
