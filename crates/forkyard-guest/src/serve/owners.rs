//! Owners: who may connect, what they may ask, which attempt of them counts.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use forkyard_guest::protocol::{Answer, Fault, Op, Request, VERSION};
use rustix::event::epoll;

use super::conn::Conn;
use super::outbox::Outbox;
use super::procs;
use super::quiet::Quiet;
use super::server::{Server, Token};
use crate::files;

/// Connections of owners at once: each has one or two.
const MAX_CONNS: usize = 64;
/// Connections that have not shown whose they are. In a container any command can make them: a new one takes the place of the
/// oldest, so that they keep nobody out.
const MAX_STRANGERS: usize = 16;
/// Owners greet at once; their host may be slow.
const GREETS_WITHIN: Duration = Duration::from_secs(10);
/// Requests that wait for the end of a snapshot.
const MAX_DEFERRED: usize = 4096;

impl Server {
    pub(super) fn accept(&mut self) {
        let Some(listener) = &self.config.listener else { return };
        let flags = rustix::net::SocketFlags::CLOEXEC | rustix::net::SocketFlags::NONBLOCK;
        let Ok(socket) = rustix::net::accept_with(listener, flags) else { return };
        // Locally a peer outside of this pid namespace has no number in it; one that has is a command, and no owner.
        if self.config.token.is_none() && peer_pid(&socket) != Some(0) {
            return;
        }
        let strangers =
            self.conns.iter().filter(|(_, conn)| conn.attempt.is_none()).map(|(number, _)| *number);
        let strangers: Vec<u64> = strangers.collect();
        if self.conns.len() - strangers.len() >= MAX_CONNS {
            return;
        }
        if strangers.len() >= MAX_STRANGERS
            && let Some(oldest) = strangers.into_iter().min()
        {
            self.close_conn(oldest);
        }
        if let Ok(conn) = self.add_conn(socket) {
            conn.greets_by = Some(Instant::now() + GREETS_WITHIN);
        }
    }

    pub(super) fn add_conn(&mut self, socket: OwnedFd) -> rustix::io::Result<&mut Conn> {
        rustix::io::ioctl_fionbio(&socket, true)?;
        let number = self.number();
        self.watch(socket.as_fd(), Token::Conn(number), epoll::EventFlags::IN)?;
        let conn = Conn::new(socket, Outbox::new(Arc::clone(&self.wake)));
        Ok(self.conns.entry(number).insert_entry(conn).into_mut())
    }

    pub(super) fn send_strangers_away(&mut self, now: Instant) {
        let late = |conn: &Conn| conn.greets_by.is_some_and(|by| now >= by);
        let late: Vec<u64> = self.conns.iter().filter(|(_, conn)| late(conn)).map(|(n, _)| *n).collect();
        for number in late {
            self.close_conn(number);
        }
    }

    /// Reads once: the loop is told again of what is left, and whoever never stops writing holds up nothing else.
    pub(super) fn read_conn(&mut self, number: u64) {
        let Some(conn) = self.conns.get_mut(&number) else { return };
        if conn.fill().is_err() {
            return self.close_conn(number);
        }
        loop {
            let Some(conn) = self.conns.get_mut(&number) else { return };
            match conn.next() {
                Ok(Some((request, body))) => self.on_request(number, request, body),
                Ok(None) => return,
                Err(_) => return self.close_conn(number),
            }
        }
    }

    pub(super) fn close_conn(&mut self, number: u64) {
        let Some(conn) = self.conns.remove(&number) else { return };
        let _ = epoll::delete(&self.epoll, &conn.socket);
        conn.out.close();
        self.changes.fetch_sub(conn.uploads.len(), Ordering::SeqCst);
        drop(conn);
        self.deferred.retain(|(conn, ..)| *conn != number);
        self.waiting.retain(|(conn, ..)| *conn != number);
        for job in self.jobs.values_mut() {
            job.readers.retain(|reader| reader.conn != number);
            if job.readers.is_empty() && job.call.is_none() && job.ended.is_none() {
                procs::kill_tree(job.pid);
            }
        }
        self.jobs.retain(|_, job| job.call.is_some() || job.ended.is_none() || !job.readers.is_empty());
        if self.is_quiet_for(number) {
            self.thaw();
        } else {
            self.on_quiet();
        }
    }

    fn is_quiet_for(&self, number: u64) -> bool {
        self.quiet.as_ref().is_some_and(|quiet| quiet.owner == number)
    }

    pub(super) fn on_request(&mut self, number: u64, request: Request, body: Vec<u8>) {
        let Some(conn) = self.conns.get_mut(&number) else { return };
        let (seq, out) = (request.seq, conn.out.clone());
        if conn.refused {
            return;
        }
        if conn.attempt.is_none() && !matches!(request.op, Op::Hello { .. }) {
            conn.refused = true;
            return out.error(seq, Fault::Denied, "say hello first");
        }
        let starts = matches!(request.op, Op::Exec(_)) || files::changes_files(&request.op);
        if starts && self.quiet.is_some() {
            if self.deferred.len() < MAX_DEFERRED {
                self.deferred.push((number, request, body));
            } else {
                out.error(
                    seq,
                    Fault::Unavailable,
                    "a snapshot is being taken and too many requests wait for it",
                );
            }
            return;
        }
        match request.op {
            Op::Hello { version, attempt, token } => self.hello(number, seq, version, attempt, token),
            Op::Exec(op) => self.exec(number, seq, op),
            Op::Stdin { exec } => self.stdin(number, seq, exec, &body),
            Op::CloseStdin { exec } => self.close_stdin(number, seq, exec),
            Op::Signal { exec, signal } => self.signal(number, seq, exec, signal),
            Op::Resize { exec, cols, rows } => self.resize(number, seq, exec, cols, rows),
            Op::Ack { exec, frames } => self.ack(number, exec, frames),
            Op::Drop { exec } => {
                if !self.take_back(number, exec) {
                    self.drop_reader(number, exec);
                }
            }
            Op::Forget { call } => {
                self.forget_deferred(&call);
                self.forget(&call, seq, &out);
            }
            Op::Abort { write } if self.take_back(number, write) => out.push(seq, Answer::Done, &[]),
            Op::Calls => {
                let calls = self.jobs.values().filter_map(|job| job.call.clone()).collect();
                out.push(seq, Answer::Calls { calls }, &[]);
            }
            ref op @ (Op::WriteBegin { .. } | Op::UnpackBegin { .. }) => match files::Incoming::begin(op) {
                Some(Ok(upload)) => {
                    self.changes.fetch_add(1, Ordering::SeqCst);
                    if let Some(conn) = self.conns.get_mut(&number) {
                        conn.uploads.insert(seq, upload);
                    }
                    out.push(seq, Answer::Done, &[]);
                }
                Some(Err(e)) => out.error(seq, e.kind, e.message),
                None => out.error(seq, Fault::Invalid, "not a request about files"),
            },
            Op::Append { write } | Op::Commit { write } | Op::Abort { write } => {
                self.upload(number, seq, write, &request.op, &body);
            }
            Op::Adopt { lifetime_ms, env } => {
                self.adopt(lifetime_ms, env);
                out.push(seq, Answer::Done, &[]);
            }
            Op::Stats => self.stats(seq, out),
            Op::Quiesce => match &self.quiet {
                Some(_) => out.error(seq, Fault::Unavailable, "another snapshot is being taken"),
                None => {
                    self.quiet = Some(Quiet { owner: number, seq, since: None, next: None, frozen: false });
                    self.on_quiet();
                }
            },
            Op::Thaw => {
                // The quiet of another is not over because this one's would be.
                if self.is_quiet_for(number) {
                    self.thaw();
                }
                out.push(seq, Answer::Done, &[]);
            }
            Op::Next => {
                let upper = self.conns.get_mut(&number).and_then(|conn| conn.passed.take());
                match (&mut self.quiet, upper) {
                    (Some(quiet), Some(upper)) if quiet.owner == number => {
                        quiet.next = Some(upper);
                        out.push(seq, Answer::Done, &[]);
                    }
                    _ => {
                        out.error(seq, Fault::Invalid, "not quiet for this connection, or no descriptor came")
                    }
                }
            }
            Op::Pause | Op::Resume => {
                let still = matches!(request.op, Op::Pause);
                match &mut self.quiet {
                    Some(quiet) if quiet.owner == number => quiet.frozen = still,
                    _ => self.paused = still,
                }
                self.keep_still();
                out.push(seq, Answer::Done, &[]);
            }
            Op::Descriptors { what } => self.descriptors(seq, what, &out),
            Op::Shutdown => self.ending = true,
            Op::Read { .. }
            | Op::Write { .. }
            | Op::Stat { .. }
            | Op::List { .. }
            | Op::Remove { .. }
            | Op::MakeDir { .. }
            | Op::Glob { .. }
            | Op::Grep { .. }
            | Op::GitExport { .. }
            | Op::Pack { .. } => self.ask_files(number, request, body),
        }
    }

    /// Whether a request of this connection was still waiting. It is not any more.
    fn take_back(&mut self, number: u64, seq: u32) -> bool {
        let before = self.deferred.len();
        self.deferred.retain(|(conn, request, _)| (*conn, request.seq) != (number, seq));
        self.deferred.len() < before
    }

    fn forget_deferred(&mut self, call: &str) {
        let is_it =
            |request: &Request| matches!(&request.op, Op::Exec(op) if op.call.as_deref() == Some(call));
        let gone = self.deferred.extract_if(.., |(_, request, _)| is_it(request));
        for (conn, request, _) in gone.collect::<Vec<_>>() {
            if let Some(conn) = self.conns.get(&conn) {
                conn.out.error(request.seq, Fault::NotFound, "the call was forgotten before it began");
            }
        }
    }

    fn hello(&mut self, number: u64, seq: u32, version: u32, attempt: u32, token: Option<String>) {
        let Some(conn) = self.conns.get_mut(&number) else { return };
        let out = conn.out.clone();
        conn.refused = conn.attempt.is_none();
        if version != VERSION {
            return out.error(
                seq,
                Fault::Invalid,
                format!("the guest speaks version {VERSION}, not {version}"),
            );
        }
        if self.config.token != token {
            return out.error(seq, Fault::Denied, "wrong token");
        }
        if attempt < self.config.attempt {
            let newer = self.config.attempt;
            return out.error(
                seq,
                Fault::Stale,
                format!("attempt {newer} owns this sandbox, {attempt} is older"),
            );
        }
        conn.attempt = Some(attempt);
        conn.greets_by = None;
        conn.refused = false;
        out.push(seq, Answer::Welcome { version: VERSION }, &[]);
        if attempt > self.config.attempt {
            self.config.attempt = attempt;
            let older: Vec<u64> = self
                .conns
                .iter()
                .filter(|(_, c)| c.attempt.is_some_and(|a| a < attempt))
                .map(|(n, _)| *n)
                .collect();
            for number in older {
                if let Some(conn) = self.conns.get(&number) {
                    // Under no request's number: why the connection ends.
                    conn.out.error(0, Fault::Stale, format!("attempt {attempt} has taken over this sandbox"));
                    let _ = conn.out.flush(conn.socket.as_fd());
                }
                self.close_conn(number);
            }
        }
    }

    pub(super) fn flush_all(&mut self) {
        let mut over = Vec::new();
        for (number, conn) in &mut self.conns {
            let wants = match conn.out.flush(conn.socket.as_fd()) {
                // Whoever was refused has the answer: nothing more of it is read.
                Ok(true) if conn.refused => {
                    over.push(*number);
                    continue;
                }
                Ok(done) => !done,
                Err(_) => {
                    over.push(*number);
                    continue;
                }
            };
            if wants != conn.wants_write {
                conn.wants_write = wants;
                let flags = if wants {
                    epoll::EventFlags::IN | epoll::EventFlags::OUT
                } else {
                    epoll::EventFlags::IN
                };
                let data = epoll::EventData::new_u64(Token::Conn(*number).pack());
                let _ = epoll::modify(&self.epoll, &conn.socket, data, flags);
            }
        }
        for number in over {
            self.close_conn(number);
        }
    }
}

/// The peer's pid as this pid namespace sees it: 0 for one from outside.
fn peer_pid(socket: &OwnedFd) -> Option<i32> {
    let mut cred = libc::ucred { pid: -1, uid: 0, gid: 0 };
    let mut length = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: SO_PEERCRED writes one ucred of the length given; both live across the call.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut cred).cast(),
            &raw mut length,
        )
    };
    (result == 0).then_some(cred.pid)
}
