//! The event loop.

use std::collections::HashMap;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use forkyard_guest::protocol::{Answer, Descriptors, Fault, Op, Request, VERSION};
use rustix::event::{EventfdFlags, epoll, eventfd};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use super::conn::Conn;
use super::job::{Job, Which};
use super::outbox::Outbox;
use super::spawn::Spawner;
use super::watch::{INTERVAL, Verdict, Watchdog};
use super::{Config, procs, spool};
use crate::files;
use crate::sys::process::child_signals;
use crate::sys::{Result, Step, landlock};

/// Connections at once: an owner has one or two.
const MAX_CONNS: usize = 64;
/// Requests that wait for the end of a snapshot.
const MAX_DEFERRED: usize = 4096;
const EVENTS: usize = 64;
/// A thread's stack; grep's engine is the hungriest of them.
const THREAD_STACK: usize = 1 << 20;
/// File threads at once; more requests wait in their connection's order of arrival.
const MAX_THREADS: usize = 32;

/// What an event is about. The number is a connection's or a job's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Token {
    Listener,
    Children,
    Wake,
    Conn(u64),
    Output(Which, u64),
    Stdin(u64),
    /// Output of a call that is done, from a process that lives on: read and dropped.
    Drain(u64),
}

impl Token {
    fn pack(self) -> u64 {
        let (kind, number) = match self {
            Token::Listener => (0, 0),
            Token::Children => (1, 0),
            Token::Wake => (2, 0),
            Token::Conn(n) => (3, n),
            Token::Output(Which::Stdout, n) => (4, n),
            Token::Output(Which::Stderr, n) => (5, n),
            Token::Stdin(n) => (6, n),
            Token::Drain(n) => (7, n),
        };
        kind << 56 | number
    }
    fn unpack(value: u64) -> Option<Token> {
        let number = value & ((1 << 56) - 1);
        Some(match value >> 56 {
            0 => Token::Listener,
            1 => Token::Children,
            2 => Token::Wake,
            3 => Token::Conn(number),
            4 => Token::Output(Which::Stdout, number),
            5 => Token::Output(Which::Stderr, number),
            6 => Token::Stdin(number),
            7 => Token::Drain(number),
            _ => return None,
        })
    }
}

pub struct Server {
    pub(super) config: Config,
    epoll: OwnedFd,
    wake: Arc<OwnedFd>,
    children: OwnedFd,
    ends_at: Instant,
    next: u64,
    pub(super) conns: HashMap<u64, Conn>,
    pub(super) jobs: HashMap<u64, Job>,
    drains: HashMap<u64, OwnedFd>,
    pub(super) spawner: Spawner,
    pub(super) landlock: Option<OwnedFd>,
    pub(super) spooled: u64,
    /// Changes of files under way, and all file threads.
    changes: Arc<AtomicUsize>,
    threads: Arc<AtomicUsize>,
    waiting: std::collections::VecDeque<(u64, Request, Vec<u8>)>,
    /// Who asked for quiet, and whether that was answered.
    quiet: Option<(u64, u32, bool)>,
    deferred: Vec<(u64, Request, Vec<u8>)>,
    pub(super) paused: bool,
    watchdog: Watchdog,
    next_look: Option<Instant>,
    buffer: Vec<u8>,
    ending: bool,
}

impl Server {
    pub fn new(mut config: Config) -> Result<Server> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).step("epoll")?;
        let wake = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).step("eventfd")?);
        let children = child_signals().step("signalfd")?;
        let control = config.control.take();
        let mut server = Server {
            ends_at: Instant::now() + Duration::from_millis(config.lifetime_ms),
            watchdog: Watchdog::new(config.watch, config.upper.take()),
            landlock: None,
            config,
            epoll,
            wake,
            children,
            next: 0,
            conns: HashMap::new(),
            jobs: HashMap::new(),
            drains: HashMap::new(),
            spawner: Spawner::new(),
            spooled: 0,
            changes: Arc::default(),
            threads: Arc::default(),
            waiting: Default::default(),
            quiet: None,
            deferred: Vec::new(),
            paused: false,
            next_look: None,
            buffer: Vec::new(),
            ending: false,
        };
        server.watch(server.children.as_fd(), Token::Children, epoll::EventFlags::IN).step("epoll")?;
        server.watch(server.wake.as_fd(), Token::Wake, epoll::EventFlags::IN).step("epoll")?;
        if let Some(listener) = &server.config.listener {
            rustix::io::ioctl_fionbio(listener, true).step("listener")?;
            server.watch(listener.as_fd(), Token::Listener, epoll::EventFlags::IN).step("epoll")?;
        }
        if let Some(control) = control {
            server.add_conn(control).step("control connection")?;
        }
        server.renew_landlock()?;
        Ok(server)
    }

    fn renew_landlock(&mut self) -> Result<()> {
        self.landlock = None;
        if self.config.landlock {
            let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
            let root = rustix::fs::open("/", flags, Mode::empty()).step("landlock")?;
            self.landlock = landlock::ruleset(root.as_fd()).step("landlock")?;
        }
        Ok(())
    }

    fn watch(&self, fd: BorrowedFd<'_>, token: Token, flags: epoll::EventFlags) -> rustix::io::Result<()> {
        epoll::add(&self.epoll, fd, epoll::EventData::new_u64(token.pack()), flags)
    }

    pub(super) fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    fn add_conn(&mut self, socket: OwnedFd) -> rustix::io::Result<()> {
        rustix::io::ioctl_fionbio(&socket, true)?;
        let number = self.number();
        self.watch(socket.as_fd(), Token::Conn(number), epoll::EventFlags::IN)?;
        self.conns.insert(number, Conn::new(socket, Outbox::new(Arc::clone(&self.wake))));
        Ok(())
    }

    /// Returns the code to exit with.
    pub fn run(&mut self) -> i32 {
        let mut events = [MaybeUninit::<epoll::Event>::uninit(); EVENTS];
        while !self.ending {
            let now = Instant::now();
            if now >= self.ends_at {
                return 0;
            }
            self.on_time(now);
            let timeout = self.next_moment().map(|at| {
                let left = at.saturating_duration_since(Instant::now()) + Duration::from_millis(1);
                rustix::time::Timespec::try_from(left).expect("a lifetime fits")
            });
            let ready = match epoll::wait(&self.epoll, &mut events, timeout.as_ref()) {
                Ok((ready, _)) => ready.iter().map(|e| (e.data.u64(), e.flags)).collect::<Vec<_>>(),
                Err(Errno::INTR) => continue,
                Err(_) => return 1,
            };
            for (data, flags) in ready {
                let Some(token) = Token::unpack(data) else { continue };
                self.on_event(token, flags);
            }
            self.flush_all();
        }
        0
    }

    fn next_moment(&self) -> Option<Instant> {
        let jobs = self.jobs.values().flat_map(|job| {
            let deadline = if job.ended.is_none() && !job.timed_out { job.deadline } else { None };
            [deadline, job.grace_until()]
        });
        jobs.chain([self.next_look, Some(self.ends_at)]).flatten().min()
    }

    fn on_event(&mut self, token: Token, flags: epoll::EventFlags) {
        match token {
            Token::Listener => self.accept(),
            Token::Children => self.reap(),
            Token::Wake => {
                let mut count = [0; 8];
                let _ = rustix::io::read(&*self.wake, &mut count);
                self.on_quiet();
                self.start_waiting();
            }
            Token::Conn(number) => {
                if flags.intersects(epoll::EventFlags::IN | epoll::EventFlags::HUP | epoll::EventFlags::ERR) {
                    self.read_conn(number);
                }
            }
            Token::Output(which, number) => self.read_output(number, which),
            Token::Stdin(number) => self.feed(number),
            Token::Drain(number) => {
                let mut sink = [0; 4096];
                if let Some(fd) = self.drains.get(&number) {
                    match rustix::io::read(fd, &mut sink) {
                        Ok(n) if n > 0 => {}
                        Err(Errno::AGAIN | Errno::INTR) => {}
                        _ => drop(self.drains.remove(&number)),
                    }
                }
            }
        }
    }

    fn accept(&mut self) {
        let Some(listener) = &self.config.listener else { return };
        let flags = rustix::net::SocketFlags::CLOEXEC | rustix::net::SocketFlags::NONBLOCK;
        let Ok(socket) = rustix::net::accept_with(listener, flags) else { return };
        // Locally a peer outside of this pid namespace has no number in it; one that has is a command, and no owner.
        if self.config.token.is_none() && peer_pid(&socket) != Some(0) || self.conns.len() >= MAX_CONNS {
            return;
        }
        let _ = self.add_conn(socket);
    }

    fn read_conn(&mut self, number: u64) {
        loop {
            let Some(conn) = self.conns.get_mut(&number) else { return };
            match conn.fill() {
                Ok(true) => {}
                Ok(false) => return,
                Err(_) => return self.close_conn(number),
            }
            loop {
                let Some(conn) = self.conns.get_mut(&number) else { return };
                match conn.next() {
                    Ok(Some((request, body))) => self.on_request(number, request, body),
                    Ok(None) => break,
                    Err(_) => return self.close_conn(number),
                }
            }
        }
    }

    pub(super) fn close_conn(&mut self, number: u64) {
        let Some(conn) = self.conns.remove(&number) else { return };
        let _ = epoll::delete(&self.epoll, &conn.socket);
        conn.out.close();
        self.changes.fetch_sub(conn.uploads.len(), Ordering::SeqCst);
        drop(conn);
        for job in self.jobs.values_mut() {
            job.readers.retain(|reader| reader.conn != number);
            if job.readers.is_empty() && job.call.is_none() && job.ended.is_none() {
                procs::kill_tree(job.pid);
            }
        }
        self.jobs.retain(|_, job| job.call.is_some() || job.ended.is_none() || !job.readers.is_empty());
        if self.quiet.is_some_and(|(owner, ..)| owner == number) {
            self.thaw();
        }
    }

    fn on_request(&mut self, number: u64, request: Request, body: Vec<u8>) {
        let Some(conn) = self.conns.get(&number) else { return };
        let (seq, out) = (request.seq, conn.out.clone());
        if conn.attempt.is_none() && !matches!(request.op, Op::Hello { .. }) {
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
            Op::Drop { exec } => self.drop_reader(number, exec),
            Op::Forget { call } => self.forget(&call, seq, &out),
            Op::Calls => {
                let calls = self.jobs.values().filter_map(|job| job.call.clone()).collect();
                out.push(seq, Answer::Calls { calls }, &[]);
            }
            Op::WriteBegin { path, mode } => match files::write::Upload::begin(&path, mode) {
                Ok(upload) => {
                    self.changes.fetch_add(1, Ordering::SeqCst);
                    if let Some(conn) = self.conns.get_mut(&number) {
                        conn.uploads.insert(seq, upload);
                    }
                    out.push(seq, Answer::Done, &[]);
                }
                Err(e) => out.error(seq, e.kind, e.message),
            },
            Op::Append { write } | Op::Commit { write } | Op::Abort { write } => {
                self.upload(number, seq, write, &request.op, &body);
            }
            Op::Stats => self.stats(seq, out),
            Op::Quiesce => match self.quiet {
                Some(_) => out.error(seq, Fault::Unavailable, "another snapshot is being taken"),
                None => {
                    self.quiet = Some((number, seq, false));
                    self.on_quiet();
                }
            },
            Op::Thaw { layer } => {
                let renewed = match layer {
                    Some(layer) => {
                        self.config.layer = Some(layer);
                        self.renew_landlock()
                    }
                    None => Ok(()),
                };
                self.thaw();
                match renewed {
                    Ok(()) => out.push(seq, Answer::Done, &[]),
                    Err(e) => out.error(seq, Fault::Unavailable, e.step),
                }
            }
            Op::Pause => {
                self.paused = true;
                if !self.config.freezer.as_ref().is_some_and(|freezer| freezer.freeze()) {
                    procs::stop_all();
                }
                out.push(seq, Answer::Done, &[]);
            }
            Op::Resume => {
                self.paused = false;
                if !self.config.freezer.as_ref().is_some_and(|freezer| freezer.thaw()) {
                    procs::continue_all();
                }
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
            | Op::GitExport { .. } => self.ask_files(number, request, body),
        }
    }

    fn hello(&mut self, number: u64, seq: u32, version: u32, attempt: u32, token: Option<String>) {
        let Some(conn) = self.conns.get_mut(&number) else { return };
        let out = conn.out.clone();
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
        out.push(seq, Answer::Welcome { version: VERSION, layer: self.config.layer.clone() }, &[]);
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

    /// Runs in a thread; at most so many at once.
    fn ask_files(&mut self, number: u64, request: Request, body: Vec<u8>) {
        let Some(conn) = self.conns.get(&number) else { return };
        if self.threads.load(Ordering::SeqCst) >= MAX_THREADS {
            self.waiting.push_back((number, request, body));
            return;
        }
        let out = conn.out.clone();
        let changes = files::changes_files(&request.op).then(|| Arc::clone(&self.changes));
        if let Some(changes) = &changes {
            changes.fetch_add(1, Ordering::SeqCst);
        }
        self.threads.fetch_add(1, Ordering::SeqCst);
        let threads = Arc::clone(&self.threads);
        let (seq, failed) = (request.seq, (out.clone(), changes.clone()));
        let thread = std::thread::Builder::new().stack_size(THREAD_STACK).spawn(move || {
            files::answer(request.seq, request.op, &body, &out);
            if let Some(changes) = changes {
                changes.fetch_sub(1, Ordering::SeqCst);
            }
            threads.fetch_sub(1, Ordering::SeqCst);
            out.notify();
        });
        if thread.is_err() {
            self.threads.fetch_sub(1, Ordering::SeqCst);
            let (out, changes) = failed;
            if let Some(changes) = changes {
                changes.fetch_sub(1, Ordering::SeqCst);
            }
            out.error(seq, Fault::Unavailable, "no thread: the sandbox is at its limit of processes");
        }
    }

    fn start_waiting(&mut self) {
        while self.threads.load(Ordering::SeqCst) < MAX_THREADS {
            let Some((number, request, body)) = self.waiting.pop_front() else { return };
            self.ask_files(number, request, body);
        }
    }

    fn upload(&mut self, number: u64, seq: u32, write: u32, op: &Op, body: &[u8]) {
        let Some(conn) = self.conns.get_mut(&number) else { return };
        let out = conn.out.clone();
        if let Op::Append { .. } = op {
            // Not answered: an error is kept for the commit by dropping the upload.
            let failed = conn.uploads.get_mut(&write).and_then(|upload| upload.append(body).err());
            if let Some(e) = failed {
                conn.uploads.remove(&write);
                self.changes.fetch_sub(1, Ordering::SeqCst);
                out.error(write, e.kind, e.message);
            }
            return;
        }
        let Some(upload) = conn.uploads.remove(&write) else {
            return out.error(seq, Fault::NotFound, "no such upload");
        };
        let result = if let Op::Commit { .. } = op { upload.commit() } else { Ok(()) };
        self.changes.fetch_sub(1, Ordering::SeqCst);
        match result {
            Ok(()) => out.push(seq, Answer::Done, &[]),
            Err(e) => out.error(seq, e.kind, e.message),
        }
        self.on_quiet();
    }

    fn stats(&mut self, seq: u32, out: Outbox) {
        let disk = self.watchdog.disk();
        let spawned = std::thread::Builder::new().stack_size(THREAD_STACK).spawn({
            let out = out.clone();
            move || {
                let processes = procs::all();
                let page = rustix::param::page_size() as u64;
                let tick_us = 1_000_000 / rustix::param::clock_ticks_per_second().max(1);
                let ticks: u64 = processes.iter().map(|p| p.ticks).sum();
                let answer = Answer::Stats {
                    memory_bytes: processes.iter().map(|p| p.resident_pages * page).sum(),
                    cpu_us: ticks * tick_us + children_cpu_us(),
                    processes: processes.len() as u32,
                    disk_bytes: disk.has_upper().then(|| disk.measure()),
                };
                let _ = out.send(seq, answer, &[]);
            }
        });
        if spawned.is_err() {
            out.error(seq, Fault::Unavailable, "no thread: the sandbox is at its limit of processes");
        }
    }

    fn descriptors(&mut self, seq: u32, what: Descriptors, out: &Outbox) {
        let open = |path: &str| rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty());
        let fds: rustix::io::Result<Vec<OwnedFd>> = match what {
            Descriptors::Proxy => self.config.proxy.iter().map(rustix::io::dup).collect(),
            Descriptors::Namespaces => {
                ["/proc/self/ns/user", "/proc/self/ns/mnt"].into_iter().map(open).collect()
            }
        };
        match fds {
            Ok(fds) if !fds.is_empty() => out.push_with(seq, Answer::Done, &[], fds),
            Ok(_) => out.error(seq, Fault::NotFound, "this sandbox has no proxy socket"),
            Err(e) => out.error(seq, Fault::Unavailable, e.to_string()),
        }
    }

    /// Answers whoever asked for quiet, once nothing changes any more.
    fn on_quiet(&mut self) {
        let Some((owner, seq, false)) = self.quiet else { return };
        if self.changes.load(Ordering::SeqCst) > 0 {
            return;
        }
        self.quiet = Some((owner, seq, true));
        let busy = has_children();
        if let Some(conn) = self.conns.get(&owner) {
            conn.out.push(seq, Answer::Quiet { busy }, &[]);
        }
    }

    fn thaw(&mut self) {
        self.quiet = None;
        for (number, request, body) in std::mem::take(&mut self.deferred) {
            self.on_request(number, request, body);
        }
    }

    fn flush_all(&mut self) {
        let mut broken = Vec::new();
        for (number, conn) in &mut self.conns {
            let wants = match conn.out.flush(conn.socket.as_fd()) {
                Ok(done) => !done,
                Err(_) => {
                    broken.push(*number);
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
        for number in broken {
            self.close_conn(number);
        }
    }

    /// Watches the streams of a job that can take more, and no others: a closed pipe would report itself for ever.
    pub(super) fn watch_job(&mut self, number: u64) {
        let Some(job) = self.jobs.get_mut(&number) else { return };
        for which in [Which::Stdout, Which::Stderr] {
            let stream = job.stream(which);
            let Some(fd) = &stream.fd else {
                stream.watched = false; // closing took it out
                continue;
            };
            let wanted = stream.spool.room() > 0;
            if wanted != stream.watched {
                stream.watched = wanted;
                let data = epoll::EventData::new_u64(Token::Output(which, number).pack());
                let _ = if wanted {
                    epoll::add(&self.epoll, fd, data, epoll::EventFlags::IN)
                } else {
                    epoll::delete(&self.epoll, fd)
                };
            }
        }
    }

    fn read_output(&mut self, number: u64, which: Which) {
        let Some(job) = self.jobs.get_mut(&number) else { return };
        let dir = self.config.spool.as_ref().map(|fd| fd.as_fd());
        let budget = spool::MAX_TOTAL.saturating_sub(self.spooled);
        let taken = job.read(which, &mut self.buffer, dir, budget);
        if job.call.is_some() {
            self.spooled += taken;
        }
        self.progress(number);
    }

    /// After anything happened to a job: pass output on, notice its end, forget it if nobody waits for it.
    pub(super) fn progress(&mut self, number: u64) {
        let Some(job) = self.jobs.get_mut(&number) else { return };
        job.pump();
        if job.exit.is_none() && job.is_done(Instant::now()) {
            job.finish();
            let left = [job.stdout.fd.take(), job.stderr.fd.take()];
            job.stdin = None;
            job.pump();
            for fd in left.into_iter().flatten() {
                let drain = self.number();
                let _ = epoll::delete(&self.epoll, &fd);
                if self.watch(fd.as_fd(), Token::Drain(drain), epoll::EventFlags::IN).is_ok() {
                    self.drains.insert(drain, fd);
                }
            }
        }
        let Some(job) = self.jobs.get(&number) else { return };
        if job.exit.is_some() && job.call.is_none() && job.readers.is_empty() {
            self.jobs.remove(&number);
        } else {
            self.watch_job(number);
        }
    }

    pub(super) fn feed(&mut self, number: u64) {
        let Some(job) = self.jobs.get_mut(&number) else { return };
        let wants = job.feed();
        let Some(stdin) = &job.stdin else {
            job.stdin_watched = false;
            return;
        };
        if wants != job.stdin_watched {
            job.stdin_watched = wants;
            let data = epoll::EventData::new_u64(Token::Stdin(number).pack());
            let _ = if wants {
                epoll::add(&self.epoll, stdin, data, epoll::EventFlags::OUT)
            } else {
                epoll::delete(&self.epoll, stdin)
            };
        }
    }

    /// Takes in every child that has ended, commands and orphans alike.
    fn reap(&mut self) {
        let mut info = [0; 512];
        while rustix::io::read(&self.children, &mut info).is_ok_and(|n| n > 0) {}
        loop {
            let mut status = 0;
            // SAFETY: waitpid writes one status, which lives across the call.
            let pid = unsafe { libc::waitpid(-1, &mut status, libc::WNOHANG) };
            if pid <= 0 {
                break;
            }
            let found =
                self.jobs.iter().find(|(_, job)| job.pid == pid && job.ended.is_none()).map(|(n, _)| *n);
            let Some(number) = found else { continue };
            let oom_now = self.oom_count();
            if let Some(job) = self.jobs.get_mut(&number) {
                job.ended = Some((status, Instant::now()));
                job.oom_killed |= oom_now > job.oom_before;
            }
            // What it wrote last is in the pipe by now.
            for which in [Which::Stdout, Which::Stderr] {
                self.read_output(number, which);
            }
            self.progress(number);
        }
    }

    /// The kernel's count of processes that it killed for this sandbox's memory limit.
    pub(super) fn oom_count(&self) -> u64 {
        let Some(events) = &self.config.oom_events else { return 0 };
        let mut text = [0; 512];
        let n = rustix::io::pread(events, &mut text, 0).unwrap_or(0);
        String::from_utf8_lossy(&text[..n])
            .lines()
            .filter_map(|line| line.strip_prefix("oom_kill ")?.trim().parse::<u64>().ok())
            .sum()
    }

    fn on_time(&mut self, now: Instant) {
        let late: Vec<u64> = self
            .jobs
            .iter()
            .filter(|(_, j)| j.ended.is_none() && !j.timed_out && j.deadline.is_some_and(|at| now >= at))
            .map(|(number, _)| *number)
            .collect();
        for number in late {
            if let Some(job) = self.jobs.get_mut(&number) {
                job.timed_out = true;
                procs::kill_tree(job.pid);
            }
        }
        let due: Vec<u64> = self
            .jobs
            .iter()
            .filter(|(_, j)| j.grace_until().is_some_and(|at| now >= at))
            .map(|(n, _)| *n)
            .collect();
        for number in due {
            self.progress(number);
        }
        if self.watchdog.is_needed() {
            self.look(now);
        }
        self.flush_all();
    }

    fn look(&mut self, now: Instant) {
        if self.next_look.is_some_and(|at| now < at) {
            return;
        }
        if !has_children() {
            self.next_look = None;
            return;
        }
        self.next_look = Some(now + INTERVAL);
        let note = match self.watchdog.look(self.paused) {
            Verdict::Fine => return,
            Verdict::Memory => "forkyard: killed, because the sandbox passed its memory limit\n",
            Verdict::Disk => "forkyard: killed, because the sandbox passed its disk limit\n",
        };
        for job in self.jobs.values_mut().filter(|job| job.ended.is_none()) {
            job.note = Some(note.into());
            job.oom_killed |= note.contains("memory");
        }
        self.watchdog.kill();
    }

    /// A new command may be what the watchdog has to look at.
    pub(super) fn expect_work(&mut self) {
        if !self.watchdog.is_needed() {
            return;
        }
        if self.next_look.is_none() {
            self.watchdog.begin();
            self.next_look = Some(Instant::now() + INTERVAL);
        }
        self.watchdog.measure_if_over();
    }
}

/// Every process inside is our child or below one, so that without children there is nobody else.
fn has_children() -> bool {
    // SAFETY: an all-zero siginfo is valid, lives across the call, and WNOWAIT leaves the children as they are.
    unsafe {
        let mut info: libc::siginfo_t = std::mem::zeroed();
        libc::waitid(libc::P_ALL, 0, &mut info, libc::WEXITED | libc::WNOHANG | libc::WNOWAIT) == 0
    }
}

fn children_cpu_us() -> u64 {
    // SAFETY: an all-zero rusage is valid and lives across the call.
    let usage = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_CHILDREN, &mut usage);
        usage
    };
    let us = |t: libc::timeval| t.tv_sec as u64 * 1_000_000 + t.tv_usec as u64;
    us(usage.ru_utime) + us(usage.ru_stime)
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
