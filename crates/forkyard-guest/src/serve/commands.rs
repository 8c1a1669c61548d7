//! Requests about commands.

use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::time::{Duration, Instant};

use forkyard_guest::protocol::{Answer, ExecOp, Fault, OUTPUT_WINDOW};
use rustix::fs::{Mode, OFlags};

use super::job::{Job, MAX_STDIN, Reader, Stream};
use super::outbox::Outbox;
use super::server::{Server, has_children};
use super::spawn::{self, Command, SpawnError, Stage};
use super::{procs, spool};
use crate::files::WORKSPACE;

/// Calls that are kept for their owner; whoever journals forgets them one by one.
const MAX_CALLS: usize = 4096;

/// A command's three descriptors, and our ends of them.
pub(super) struct Stdio {
    theirs: [RawFd; 3],
    _held: Vec<OwnedFd>,
    stdin: Option<OwnedFd>,
    stdout: OwnedFd,
    stderr: Option<OwnedFd>,
    terminal: Option<OwnedFd>,
}

/// What the next command needs, made while one runs. A sandbox that was never used has none.
pub(super) enum Spare {
    No,
    Wanted,
    Ready(Stdio),
}

impl Stdio {
    /// Of a command that is only read from.
    pub(super) fn new() -> rustix::io::Result<Stdio> {
        let null = rustix::fs::open("/dev/null", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
        Stdio::with(null, None)
    }

    fn with(input: OwnedFd, stdin: Option<OwnedFd>) -> rustix::io::Result<Stdio> {
        let (stdout, out) = spawn::output_pipe()?;
        let (stderr, err) = spawn::output_pipe()?;
        let theirs = [input.as_raw_fd(), out.as_raw_fd(), err.as_raw_fd()];
        let stderr = Some(stderr);
        Ok(Stdio { theirs, _held: vec![input, out, err], stdin, stdout, stderr, terminal: None })
    }

    fn terminal(cols: u16, rows: u16) -> rustix::io::Result<Stdio> {
        let (master, slave) = spawn::terminal(cols, rows)?;
        let theirs = [slave.as_raw_fd(); 3];
        let (stdin, stdout) =
            (rustix::io::fcntl_dupfd_cloexec(&master, 3)?, rustix::io::fcntl_dupfd_cloexec(&master, 3)?);
        let (stdin, terminal) = (Some(stdin), Some(master));
        Ok(Stdio { theirs, _held: vec![slave], stdin, stdout, stderr: None, terminal })
    }
}

fn spawn_fault(op: &ExecOp, cwd: &str, e: &SpawnError) -> (Fault, String) {
    let program = op.argv.first().map_or("", String::as_str);
    let reason = std::io::Error::from_raw_os_error(e.errno);
    match (e.stage, e.errno) {
        (Stage::Arguments, _) => (Fault::Invalid, "the command is empty or has a zero byte in it".into()),
        (Stage::Directory, _) => (Fault::Invalid, format!("working directory {cwd}: {reason}")),
        (Stage::Exec, libc::ENOENT) => (Fault::NotFound, format!("{program}: command not found")),
        (Stage::Exec, libc::EACCES) => (Fault::Denied, format!("{program}: {reason}")),
        (Stage::Exec, _) => (Fault::Invalid, format!("{program}: {reason}")),
        (Stage::Clone, libc::EAGAIN) => {
            (Fault::Unavailable, "the sandbox is at its limit of processes".to_string())
        }
        (Stage::Stopped, _) => {
            (Fault::Unavailable, format!("{program}: a process in the sandbox stopped it before it began"))
        }
        (Stage::Clone | Stage::Setup | Stage::Landlock, _) => {
            (Fault::Unavailable, format!("can't start {program}: {:?}: {reason}", e.stage))
        }
    }
}

impl Server {
    fn out(&self, conn: u64) -> Option<Outbox> {
        self.conns.get(&conn).map(|conn| conn.out.clone())
    }

    /// The job that this connection knows as `exec`.
    fn job_of(&self, conn: u64, exec: u32) -> Option<u64> {
        let reads = |job: &Job| job.readers.iter().any(|r| r.conn == conn && r.seq == exec);
        self.jobs.iter().find(|(_, job)| reads(job)).map(|(number, _)| *number)
    }

    pub(super) fn exec(&mut self, conn: u64, seq: u32, op: ExecOp) {
        let Some(out) = self.out(conn) else { return };
        let reader = Reader::new(conn, seq, out.clone());
        let known = op.call.as_ref().and_then(|call| {
            self.jobs.iter().find(|(_, job)| job.call.as_ref() == Some(call)).map(|(number, _)| *number)
        });
        if let Some(number) = known {
            out.push(seq, Answer::Started { resumed: true }, &[]);
            if let Some(job) = self.jobs.get_mut(&number) {
                job.readers.push(reader);
            }
            return self.progress(number);
        }
        if op.call.is_some() && self.jobs.values().filter(|job| job.call.is_some()).count() >= MAX_CALLS {
            return out.error(seq, Fault::TooLarge, format!("{MAX_CALLS} calls are kept; forget some"));
        }
        if self.paused {
            // It would stand still before it is itself, and we with it.
            return out.error(seq, Fault::Unavailable, "the sandbox is paused: resume it first");
        }
        match self.start(&op) {
            Ok(mut job) => {
                job.readers.push(reader);
                let number = self.number();
                self.jobs.insert(number, job);
                out.push(seq, Answer::Started { resumed: false }, &[]);
                self.watch_job(number);
                self.expect_work();
            }
            Err((fault, message)) => out.error(seq, fault, message),
        }
    }

    fn stdio(&mut self, op: &ExecOp) -> rustix::io::Result<Stdio> {
        if let Some((cols, rows)) = op.pty {
            return Stdio::terminal(cols, rows);
        }
        if op.stdin {
            let (ours, theirs) = spawn::input_pipe()?;
            return Stdio::with(theirs, Some(ours));
        }
        match std::mem::replace(&mut self.spare, Spare::Wanted) {
            Spare::Ready(stdio) => Ok(stdio),
            Spare::No | Spare::Wanted => Stdio::new(),
        }
    }

    fn start(&mut self, op: &ExecOp) -> Result<Job, (Fault, String)> {
        // Without children nobody was there to be killed since the last one was reaped.
        if has_children() {
            self.see_oom();
        }
        let io = self.stdio(op).map_err(|e| (Fault::Unavailable, format!("pipes: {e}")))?;
        let its_own = (!op.env.is_empty()).then(|| self.env.with(&op.env));
        let cwd = op.cwd.as_deref().unwrap_or(WORKSPACE);
        let cwd = if cwd.starts_with('/') { cwd.to_string() } else { format!("{WORKSPACE}/{cwd}") };
        let command = Command {
            argv: &op.argv,
            env: its_own.as_ref().unwrap_or(&self.env),
            cwd: &cwd,
            stdio: io.theirs,
            terminal: io.terminal.is_some(),
            processes: self.config.processes,
            landlock: self.landlock.as_ref().map(|fd| fd.as_raw_fd()),
            group: self.config.freezer.as_ref().map(|freezer| freezer.join()),
        };
        let started = Instant::now();
        let pid = self.spawner.spawn(&command).map_err(|e| spawn_fault(op, &cwd, &e))?;
        let keep = op.call.is_some();
        Ok(Job {
            call: op.call.clone(),
            pid,
            started,
            deadline: op.timeout_ms.map(|ms| started + Duration::from_millis(ms)),
            max_output: op.max_output,
            stdout: Stream::new(Some(io.stdout), keep),
            stderr: Stream::new(io.stderr, keep),
            stdin: io.stdin,
            stdin_queue: Default::default(),
            stdin_watched: false,
            stdin_ending: false,
            terminal: io.terminal,
            timed_out: false,
            oom_killed: false,
            oom_before: self.oom_seen,
            truncated: false,
            note: None,
            ended: None,
            exit: None,
            readers: Vec::new(),
        })
    }

    pub(super) fn stdin(&mut self, conn: u64, seq: u32, exec: u32, data: &[u8]) {
        let Some(out) = self.out(conn) else { return };
        let Some((number, job)) = self.job_of(conn, exec).and_then(|n| Some((n, self.jobs.get_mut(&n)?)))
        else {
            return out.error(seq, Fault::NotFound, "the command has ended");
        };
        if job.stdin.is_none() || job.stdin_ending {
            return out.error(seq, Fault::Invalid, "the command's stdin is closed");
        }
        if job.stdin_queue.len() + data.len() > MAX_STDIN {
            return out.error(seq, Fault::TooLarge, "the command does not read its stdin");
        }
        job.stdin_queue.extend(data);
        self.feed(number);
        out.push(seq, Answer::Done, &[]);
    }

    pub(super) fn close_stdin(&mut self, conn: u64, seq: u32, exec: u32) {
        let Some(out) = self.out(conn) else { return };
        if let Some(number) = self.job_of(conn, exec) {
            if let Some(job) = self.jobs.get_mut(&number) {
                match &job.terminal {
                    // The end of a terminal's input is a character.
                    Some(_) => job.stdin_queue.push_back(4),
                    None => job.stdin_ending = true,
                }
            }
            self.feed(number);
        }
        out.push(seq, Answer::Done, &[]);
    }

    pub(super) fn signal(&mut self, conn: u64, seq: u32, exec: u32, signal: i32) {
        let Some(out) = self.out(conn) else { return };
        if let Some(job) = self.job_of(conn, exec).and_then(|n| self.jobs.get(&n))
            && job.ended.is_none()
        {
            if signal == libc::SIGKILL {
                procs::kill_tree(job.pid);
            } else {
                let _ = crate::sys::process::kill(-job.pid, signal);
            }
        }
        out.push(seq, Answer::Done, &[]);
    }

    pub(super) fn resize(&mut self, conn: u64, seq: u32, exec: u32, cols: u16, rows: u16) {
        let Some(out) = self.out(conn) else { return };
        let terminal = self.job_of(conn, exec).and_then(|n| self.jobs.get(&n)?.terminal.as_ref());
        match terminal.map(|terminal| spawn::resize(terminal, cols, rows)) {
            Some(Ok(())) => out.push(seq, Answer::Done, &[]),
            Some(Err(e)) => out.error(seq, Fault::Unavailable, e.to_string()),
            None => out.error(seq, Fault::Invalid, "the command has no terminal"),
        }
    }

    pub(super) fn ack(&mut self, conn: u64, exec: u32, frames: u32) {
        let Some(number) = self.job_of(conn, exec) else { return };
        if let Some(job) = self.jobs.get_mut(&number) {
            for reader in job.readers.iter_mut().filter(|r| r.conn == conn && r.seq == exec) {
                reader.credit = reader.credit.saturating_add(frames).min(OUTPUT_WINDOW);
            }
        }
        self.progress(number);
    }

    pub(super) fn drop_reader(&mut self, conn: u64, exec: u32) {
        let Some(number) = self.job_of(conn, exec) else { return };
        if let Some(job) = self.jobs.get_mut(&number) {
            job.readers.retain(|r| !(r.conn == conn && r.seq == exec));
            if job.call.is_none() && job.ended.is_none() {
                procs::kill_tree(job.pid);
            }
        }
        self.progress(number);
    }

    /// A call that still runs is killed: its owner has no more interest in it.
    pub(super) fn forget(&mut self, call: &str, seq: u32, out: &Outbox) {
        let known =
            self.jobs.iter().find(|(_, job)| job.call.as_deref() == Some(call)).map(|(number, _)| *number);
        if let Some(number) = known {
            if let Some(job) = self.jobs.get_mut(&number) {
                let kept = job.stdout.spool.length() + job.stderr.spool.length();
                self.spooled = self.spooled.saturating_sub(kept);
                job.call = None;
                if job.ended.is_none() {
                    procs::kill_tree(job.pid);
                }
            }
            self.progress(number);
        }
        debug_assert!(self.spooled <= spool::MAX_TOTAL);
        out.push(seq, Answer::Done, &[]);
    }
}
