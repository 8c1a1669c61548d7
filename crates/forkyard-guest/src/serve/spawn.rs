//! Starting a command: a clone that shares our memory until it execs, so that its cost does not depend on our size.

use std::collections::BTreeMap;
use std::ffi::{CString, c_char, c_int, c_void};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};
use rustix::thread::futex;
use rustix::time::Timespec;

use crate::sys::landlock;

/// Room for the few frames between clone and exec.
const STACK_SIZE: usize = 64 << 10;
const DEFAULT_PATH: &str = "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin";
/// Soft and hard bound on open files of a command: many tools raise the soft one to the hard one and then loop over it.
const OPEN_FILES: u64 = 65_536;
/// Of 1000, for which the kernel would choose it whatever its size.
const COMMAND_SCORE: i32 = 500;
/// Most programs begin within a millisecond. After this one looks whether it was stopped.
const EXEC_LOOK: Duration = Duration::from_millis(20);
/// A program on a slow disk takes its time to be read; the guest does nothing else meanwhile.
const EXEC_WITHIN: Duration = Duration::from_secs(5);
/// Until a command has memory of its own, which most have by the first look.
const SETTLE_TRIES: usize = 5;
const SETTLE_PAUSE: Duration = Duration::from_micros(200);
/// One that gets no processor may take far longer: it is looked at again after other work.
pub const SETTLE_AGAIN: Duration = Duration::from_millis(5);
const NONE: libc::rlimit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };

/// Where it failed; the caller words it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    Arguments,
    Clone,
    /// Before it was itself.
    Stopped,
    Setup,
    Directory,
    Landlock,
    Exec,
}

#[derive(Debug)]
pub struct SpawnError {
    pub stage: Stage,
    pub errno: i32,
}

/// The environment of commands, laid out once for all of them.
pub struct Environment {
    vars: BTreeMap<String, String>,
    /// None if one can't be said to a program.
    block: Option<Vec<CString>>,
}

impl Environment {
    pub fn new(vars: BTreeMap<String, String>) -> Environment {
        let block = vars.iter().map(|(k, v)| CString::new(format!("{k}={v}")).ok()).collect();
        Environment { vars, block }
    }

    pub fn with(&self, more: &BTreeMap<String, String>) -> Environment {
        let more = more.iter().map(|(k, v)| (k.clone(), v.clone()));
        Environment::new(self.vars.clone().into_iter().chain(more).collect())
    }

    fn path(&self) -> &str {
        self.vars.get("PATH").map_or(DEFAULT_PATH, String::as_str)
    }
}

pub struct Command<'a> {
    pub argv: &'a [String],
    pub env: &'a Environment,
    pub cwd: &'a str,
    pub stdio: [RawFd; 3],
    /// stdin is a terminal that becomes the controlling one.
    pub terminal: bool,
    pub processes: u32,
    pub landlock: Option<RawFd>,
    /// A `cgroup.threads` to join.
    pub group: Option<RawFd>,
}

/// All that the child needs, laid out before it exists: it must not allocate.
struct Plan {
    programs: Vec<CString>,
    /// In the folders of PATH: what matters of one of them does not matter of all.
    searched: bool,
    argv: Vec<*const c_char>,
    env: Vec<*const c_char>,
    cwd: CString,
    stdio: [RawFd; 3],
    terminal: bool,
    processes: libc::rlimit,
    open_files: libc::rlimit,
    landlock: RawFd,
    group: RawFd,
    failed: Option<(Stage, i32)>,
}

pub struct Spawner {
    stack: Vec<u128>,
    score: Option<OomScore>,
    /// Started since the score was raised for it.
    raised: Vec<i32>,
    open_files: libc::rlim_t,
}

/// When memory is short the kernel's choice is a command, before the guest and before anything of the host. A command inherits
/// its score, and can't lower it below the guest's own.
pub struct OomScore {
    file: std::fs::File,
    own: Vec<u8>,
}

impl OomScore {
    /// Only as long as the process is open to itself: see `set_dumpable`.
    pub fn open() -> Option<OomScore> {
        let file = std::fs::File::options().read(true).write(true).open("/proc/self/oom_score_adj").ok()?;
        let mut own = vec![0; 16];
        let length = file.read_at(&mut own, 0).ok()?;
        own.truncate(length);
        Some(OomScore { file, own })
    }

    /// Whoever started the guest may have given it more than commands get: then they have the same.
    fn is_below_commands(&self) -> bool {
        parse_score(&self.own).is_some_and(|own| own < COMMAND_SCORE)
    }

    fn set(&self, value: &[u8]) {
        let _ = self.file.write_at(value, 0);
    }

    /// Whether the guest has its own score, and the command the one of commands. One that is gone, that hides itself or that
    /// offers itself first is left as it is.
    fn is_settled(&self, pid: i32) -> bool {
        self.set(&self.own);
        let file = format!("/proc/{pid}/oom_score_adj");
        let its = std::fs::read(&file).ok().and_then(|text| parse_score(&text));
        if pid < 0 || !self.is_below_commands() || its.is_none_or(|its| its >= COMMAND_SCORE) {
            return true;
        }
        if let Ok(file) = std::fs::File::options().write(true).open(file) {
            let _ = file.write_at(COMMAND_SCORE.to_string().as_bytes(), 0);
        }
        false
    }
}

impl std::os::fd::AsFd for OomScore {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.file.as_fd()
    }
}

fn errno() -> i32 {
    // SAFETY: the location is always valid for the calling thread.
    unsafe { *libc::__errno_location() }
}

impl Spawner {
    pub fn new(score: Option<OomScore>) -> Spawner {
        // Descriptors that are under way between processes are counted by user, and compared with the sender's own bound: with
        // half of it, no command can use up what the guests and the zygote of this user need.
        let most = rustix::process::getrlimit(rustix::process::Resource::Nofile).maximum;
        let open_files = most.map_or(OPEN_FILES, |most| OPEN_FILES.min(most / 2));
        Spawner { stack: vec![0; STACK_SIZE / size_of::<u128>()], score, raised: Vec::new(), open_files }
    }

    /// Returns the pid once the program runs (or has failed to).
    pub fn spawn(&mut self, command: &Command<'_>) -> Result<i32, SpawnError> {
        let unusable = || SpawnError { stage: Stage::Arguments, errno: libc::EINVAL };
        let text = |s: &str| CString::new(s).map_err(|_| unusable());
        let argv: Vec<CString> = command.argv.iter().map(|a| text(a)).collect::<Result<_, _>>()?;
        let (Some(env), Some(program)) =
            (&command.env.block, command.argv.first().filter(|program| !program.is_empty()))
        else {
            return Err(unusable());
        };
        let searched = !program.contains('/');
        let programs = if !searched {
            vec![text(program)?]
        } else {
            let dirs = command.env.path().split(':').filter(|dir| !dir.is_empty());
            dirs.map(|dir| text(&format!("{dir}/{program}"))).collect::<Result<_, _>>()?
        };
        let pointers =
            |list: &[CString]| list.iter().map(|s| s.as_ptr()).chain([std::ptr::null()]).collect::<Vec<_>>();
        let processes = libc::rlim_t::from(command.processes);
        let mut plan = Plan {
            programs,
            searched,
            argv: pointers(&argv),
            env: pointers(env),
            cwd: text(command.cwd)?,
            stdio: command.stdio,
            terminal: command.terminal,
            processes: libc::rlimit { rlim_cur: processes, rlim_max: processes },
            open_files: libc::rlimit { rlim_cur: self.open_files, rlim_max: self.open_files },
            landlock: command.landlock.unwrap_or(-1),
            group: command.group.unwrap_or(-1),
            failed: None,
        };
        // By glibc's clone: others refuse CLONE_CHILD_CLEARTID. Not CLONE_VFORK, which waits without an end for a child that others here may stop: the kernel clears `busy` and wakes
        // who waits for it at the same moment, when the child has exec'd or ended.
        let busy = AtomicU32::new(1);
        let flags = libc::CLONE_VM | libc::CLONE_CHILD_CLEARTID | libc::SIGCHLD;
        if let Some(score) = &self.score {
            score.set(COMMAND_SCORE.to_string().as_bytes());
        }
        // SAFETY: `wait_for_exec` keeps this thread (and thus `plan`, `busy` and the stack) in place until the child has exec'd
        // or ended; the stack pointer is the aligned end of memory that we own; the child only makes system calls.
        let pid = unsafe {
            let top = self.stack.as_mut_ptr().add(self.stack.len());
            let (none, busy) = (std::ptr::null_mut::<c_void>(), busy.as_ptr());
            let plan = (&raw mut plan).cast::<c_void>();
            libc::clone(child, top.cast::<c_void>(), flags, plan, none, none, busy)
        };
        let why = errno();
        let stopped = pid > 0 && wait_for_exec(pid, &busy);
        self.raised.push(pid);
        if pid < 0 {
            return Err(SpawnError { stage: Stage::Clone, errno: why });
        }
        // SAFETY: the child, which wrote to it, no longer has this memory.
        match unsafe { std::ptr::read_volatile(&raw const plan.failed) } {
            Some((stage, errno)) => Err(SpawnError { stage, errno }),
            None if stopped => Err(SpawnError { stage: Stage::Stopped, errno: libc::EINTR }),
            None => Ok(pid),
        }
    }
}

impl Spawner {
    /// Takes the guest's own score again. Whoever shares its memory gets the same from the kernel, and a command does so for a
    /// moment after it was said to be itself: so it is looked at, and put right.
    pub fn settle(&mut self) {
        let Some(score) = &self.score else { return self.raised.clear() };
        for last in (0..SETTLE_TRIES).rev() {
            self.raised.retain(|pid| !score.is_settled(*pid));
            if self.raised.is_empty() || last == 0 {
                return;
            }
            std::thread::sleep(SETTLE_PAUSE);
        }
    }

    pub fn is_settled(&self) -> bool {
        self.raised.is_empty()
    }
}

fn parse_score(text: &[u8]) -> Option<i32> {
    std::str::from_utf8(text).ok()?.trim().parse().ok()
}

/// Returns when the child has exec'd or ended. True if that was not its own doing: whoever shares its user id can stop it before it
/// is itself, and must not stop the guest with it.
fn wait_for_exec(pid: i32, busy: &AtomicU32) -> bool {
    let (begun, mut killed) = (Instant::now(), false);
    let Some(child) = Pid::from_raw(pid) else { return false };
    let look = Timespec { tv_sec: 0, tv_nsec: EXEC_LOOK.subsec_nanos().into() };
    while busy.load(Ordering::Acquire) != 0 {
        // Shared, not private: the kernel's own wake-up is. No call in here may go by way of the C library: the child has the
        // same errno.
        let _ = futex::wait(busy, futex::Flags::empty(), 1, Some(&look));
        if busy.load(Ordering::Acquire) != 0
            && !killed
            && (is_stopped(child) || begun.elapsed() > EXEC_WITHIN)
        {
            killed = kill_process(child, Signal::KILL).is_ok();
        }
    }
    killed
}

fn is_stopped(child: Pid) -> bool {
    let look = WaitIdOptions::STOPPED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
    matches!(waitid(WaitId::Pid(child), look), Ok(Some(_)))
}

/// Between clone and exec: system calls only, no allocation, no unwinding.
extern "C" fn child(plan: *mut c_void) -> c_int {
    // SAFETY: `spawn` passes a Plan that it does not touch until this process has exec'd or ended.
    let plan = unsafe { &mut *plan.cast::<Plan>() };
    let stage = run_child(plan);
    plan.failed = Some((stage, errno()));
    crate::sys::process::exit_now(127)
}

fn run_child(plan: &Plan) -> Stage {
    // SAFETY: plain system calls on values and on memory of `plan`; signal dispositions are the child's own copy, because
    // CLONE_SIGHAND is not set.
    unsafe {
        libc::setsid();
        if plan.group >= 0 && libc::write(plan.group, c"0".as_ptr().cast(), 1) != 1 {
            return Stage::Setup;
        }
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&mut set);
        libc::sigprocmask(libc::SIG_SETMASK, &set, std::ptr::null_mut());
        libc::signal(libc::SIGPIPE, libc::SIG_DFL);
        for (to, from) in plan.stdio.iter().enumerate() {
            if libc::dup2(*from, to as c_int) < 0 {
                return Stage::Setup;
            }
        }
        if plan.terminal && libc::ioctl(0, libc::TIOCSCTTY, 0) < 0 {
            return Stage::Setup;
        }
        // It reaps its own orphans: whoever forks twice stays below it, where kill_tree finds them.
        libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0);
        if libc::setrlimit(libc::RLIMIT_NPROC, &plan.processes) < 0 {
            return Stage::Setup;
        }
        // Lower bounds that are already there stay.
        libc::setrlimit(libc::RLIMIT_NOFILE, &plan.open_files);
        libc::setrlimit(libc::RLIMIT_CORE, &NONE);
        // Whoever runs Forkyard may have leave for these; no quota of processors binds what has it.
        if libc::setrlimit(libc::RLIMIT_RTPRIO, &NONE) < 0 || libc::setrlimit(libc::RLIMIT_NICE, &NONE) < 0 {
            return Stage::Setup;
        }
        if libc::chdir(plan.cwd.as_ptr()) < 0 {
            return Stage::Directory;
        }
        if plan.landlock >= 0 && !landlock::restrict_self(plan.landlock) {
            return Stage::Landlock;
        }
        let mut found_but_denied = false;
        for program in &plan.programs {
            // To ask is cheaper than to try, and most folders of a search path do not have it.
            if plan.programs.len() == 1 || libc::access(program.as_ptr(), libc::F_OK) == 0 {
                libc::execve(program.as_ptr(), plan.argv.as_ptr(), plan.env.as_ptr());
            }
            match errno() {
                libc::ENOENT | libc::ENOTDIR => {}
                libc::EACCES => found_but_denied = true,
                _ => return Stage::Exec,
            }
        }
        if plan.searched {
            *libc::__errno_location() = if found_but_denied { libc::EACCES } else { libc::ENOENT };
        }
        Stage::Exec
    }
}

/// A pair of descriptors for a command's stream: ours (non-blocking), theirs.
pub fn output_pipe() -> rustix::io::Result<(OwnedFd, OwnedFd)> {
    let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
    rustix::io::ioctl_fionbio(&read, true)?;
    Ok((read, write))
}

pub fn input_pipe() -> rustix::io::Result<(OwnedFd, OwnedFd)> {
    let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
    rustix::io::ioctl_fionbio(&write, true)?;
    Ok((write, read))
}

/// A terminal: ours (non-blocking), theirs.
pub fn terminal(cols: u16, rows: u16) -> rustix::io::Result<(OwnedFd, OwnedFd)> {
    use rustix::pty::{OpenptFlags, ioctl_tiocgptpeer, openpt, unlockpt};
    let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC)?;
    unlockpt(&master)?;
    let slave = ioctl_tiocgptpeer(&master, OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC)?;
    resize(&master, cols, rows)?;
    rustix::io::ioctl_fionbio(&master, true)?;
    Ok((master, slave))
}

pub fn resize(master: &OwnedFd, cols: u16, rows: u16) -> rustix::io::Result<()> {
    let size = libc::winsize { ws_row: rows, ws_col: cols, ws_xpixel: 0, ws_ypixel: 0 };
    // SAFETY: TIOCSWINSZ reads one winsize, which lives across the call.
    let result = unsafe { libc::ioctl(master.as_raw_fd(), libc::TIOCSWINSZ, &raw const size) };
    crate::sys::check(result as libc::c_long).map(drop)
}
