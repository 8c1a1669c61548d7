//! The event loop. What it does at an event: [`super::owners`], [`super::commands`], [`super::running`], [`super::work`],
//! [`super::quiet`].

use std::collections::{BTreeMap, HashMap};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::{Duration, Instant};

use forkyard_guest::protocol::Request;
use rustix::event::{EventfdFlags, epoll, eventfd};
use rustix::io::Errno;

use super::commands::{Spare, Stdio};
use super::conn::Conn;
use super::job::{Job, Which};
use super::quiet::Quiet;
use super::spawn::{Environment, SETTLE_AGAIN, Spawner};
use super::watch::Watchdog;
use super::{Config, procs};
use crate::sys::process::child_signals;
use crate::sys::{Result, Step};

const EVENTS: usize = 64;

/// What an event is about. The number is a connection's or a job's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Token {
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
    pub(super) fn pack(self) -> u64 {
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
    pub(super) env: Environment,
    pub(super) epoll: OwnedFd,
    pub(super) wake: Arc<OwnedFd>,
    pub(super) children: OwnedFd,
    ends_at: Instant,
    next: u64,
    pub(super) conns: HashMap<u64, Conn>,
    pub(super) jobs: HashMap<u64, Job>,
    pub(super) drains: HashMap<u64, OwnedFd>,
    pub(super) spawner: Spawner,
    /// Kernel's count of memory kills when it was read last: after every child's end, at least.
    pub(super) oom_seen: u64,
    pub(super) spare: Spare,
    pub(super) landlock: Option<OwnedFd>,
    pub(super) spooled: u64,
    /// Changes of files under way, and all file threads.
    pub(super) changes: Arc<AtomicUsize>,
    pub(super) threads: Arc<AtomicUsize>,
    pub(super) waiting: std::collections::VecDeque<(u64, Request, Vec<u8>)>,
    pub(super) quiet: Option<Quiet>,
    pub(super) deferred: Vec<(u64, Request, Vec<u8>)>,
    pub(super) paused: bool,
    /// Who stands still for that, where there is no freezer.
    pub(super) still: Option<procs::Held>,
    pub(super) watchdog: Watchdog,
    pub(super) next_look: Option<Instant>,
    pub(super) buffer: Vec<u8>,
    pub(super) ending: bool,
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
            spawner: Spawner::new(config.oom_score.take()),
            oom_seen: 0,
            spare: Spare::No,
            landlock: None,
            env: Environment::new(std::mem::take(&mut config.env)),
            config,
            epoll,
            wake,
            children,
            next: 0,
            conns: HashMap::new(),
            jobs: HashMap::new(),
            drains: HashMap::new(),
            spooled: 0,
            changes: Arc::default(),
            threads: Arc::default(),
            waiting: Default::default(),
            quiet: None,
            deferred: Vec::new(),
            paused: false,
            still: None,
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

    pub(super) fn watch(
        &self,
        fd: BorrowedFd<'_>,
        token: Token,
        flags: epoll::EventFlags,
    ) -> rustix::io::Result<()> {
        epoll::add(&self.epoll, fd, epoll::EventData::new_u64(token.pack()), flags)
    }

    pub(super) fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    pub(super) fn adopt(&mut self, lifetime_ms: u64, env: BTreeMap<String, String>) {
        self.env = Environment::new(env);
        self.ends_at = Instant::now() + Duration::from_millis(lifetime_ms);
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
            self.spawner.settle();
            self.make_spare();
        }
        0
    }

    /// While a command runs: after its end somebody waits for the answer, and for this process to make room for them.
    fn make_spare(&mut self) {
        if matches!(self.spare, Spare::Wanted) && self.jobs.values().any(|job| job.ended.is_none()) {
            self.spare = Stdio::new().map_or(Spare::No, Spare::Ready);
        }
    }

    fn next_moment(&self) -> Option<Instant> {
        let jobs = self.jobs.values().flat_map(|job| {
            let deadline = if job.ended.is_none() && !job.timed_out { job.deadline } else { None };
            [deadline, job.grace_until()]
        });
        let strangers = self.conns.values().map(|conn| conn.greets_by);
        let settles = (!self.spawner.is_settled()).then(|| Instant::now() + SETTLE_AGAIN);
        jobs.chain(strangers).chain([self.next_look, settles, Some(self.ends_at)]).flatten().min()
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
        if self.has_to_look() {
            self.look(now);
        }
        self.send_strangers_away(now);
        self.flush_all();
    }
}

/// Every process inside is our child or below one, so that without children there is nobody else.
pub(super) fn has_children() -> bool {
    // SAFETY: an all-zero siginfo is valid, lives across the call, and WNOWAIT leaves the children as they are.
    unsafe {
        let mut info: libc::siginfo_t = std::mem::zeroed();
        libc::waitid(libc::P_ALL, 0, &mut info, libc::WEXITED | libc::WNOHANG | libc::WNOWAIT) == 0
    }
}
