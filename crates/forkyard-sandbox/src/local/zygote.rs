//! The process that sandboxes are cloned from, as its owner sees it.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use forkyard_guest::zygote::{
    Answer, Ask, Groups, MAX_MESSAGE, RESTACK_FDS, Ready, RestackAsk, RootAsk, Start, Work, WorkResult,
};
use rustix::fs::{MemfdFlags, Mode, OFlags, SealFlags};
use tokio::sync::Mutex;

use super::fd::{Messages, message_pair};
use crate::error::FULL_HINT;
use crate::{ErrorKind, Result, SandboxError};

/// The guest, built beside this library.
pub static GUEST: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/forkyard-guest"));

/// Until the answer to a question, which as a rule is that a clone was made. One that takes longer is replaced: it may be at a
/// folder of the host's that never answers.
const ANSWER_WITHIN: Duration = Duration::from_secs(60);

/// The guest's task that sandboxes are cloned from.
const ZYGOTE: &str = "zygote";

pub struct Zygote {
    commands: Mutex<Commands>,
    child: std::sync::Mutex<Helper>,
    left: AtomicBool,
    /// What sandboxes of the default root see of the host.
    pub binds: Vec<String>,
    /// What isolates every sandbox.
    pub layers: Vec<String>,
}

/// One question at a time. Whoever gives up between a question and its answer leaves the answer to the next.
struct Commands {
    messages: Messages,
    owed: usize,
}

impl Commands {
    async fn ask(&mut self, text: &[u8], fds: &[BorrowedFd<'_>]) -> std::io::Result<(Vec<u8>, Vec<OwnedFd>)> {
        while self.owed > 0 {
            self.receive().await?;
        }
        self.messages.send(text, fds).await?;
        self.owed += 1;
        self.receive().await
    }

    async fn receive(&mut self) -> std::io::Result<(Vec<u8>, Vec<OwnedFd>)> {
        let answer = self.messages.receive().await?;
        self.owed -= 1;
        Ok(answer)
    }
}

pub fn unavailable(what: impl std::fmt::Display) -> SandboxError {
    SandboxError::new(ErrorKind::Unavailable, what.to_string())
}

/// The guest as a sealed file in memory: nobody can change what runs, and nothing has to be installed. Made once.
fn program() -> std::io::Result<&'static OwnedFd> {
    static PROGRAM: OnceLock<OwnedFd> = OnceLock::new();
    if let Some(program) = PROGRAM.get() {
        return Ok(program);
    }
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let make = |extra| rustix::fs::memfd_create("forkyard-guest", flags | extra);
    // Kernels before 6.3 do not know the flag, and do not need it.
    let file = make(MemfdFlags::EXEC).or_else(|_| make(MemfdFlags::empty()))?;
    let file = File::from(file);
    // Without the pages of our own mapping: other threads would wait for their memory meanwhile.
    if !copy_of_own_file(&file) {
        file.write_all_at(GUEST, 0)?;
    }
    let seals = SealFlags::SEAL | SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE;
    rustix::fs::fcntl_add_seals(&file, seals)?;
    // A running program must not be open for writing.
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    let program = rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    Ok(PROGRAM.get_or_init(|| program))
}

/// Whether all of the guest was copied to where this program's file has it.
fn copy_of_own_file(to: &File) -> bool {
    let (Some(mut at), Ok(own)) = (offset_in_own_file(GUEST), File::open("/proc/self/exe")) else {
        return false;
    };
    let mut left = GUEST.len();
    while left > 0 {
        match rustix::fs::sendfile(to, &own, Some(&mut at), left) {
            Ok(copied) if copied > 0 => left -= copied,
            _ => return false,
        }
    }
    // A program that was packed is mapped otherwise than its file has it.
    const LOOK: usize = 512;
    let is_it = |from: usize| {
        let mut part = [0; LOOK];
        to.read_exact_at(&mut part, from as u64).is_ok() && part == GUEST[from..from + LOOK]
    };
    is_it(0) && is_it(GUEST.len() / 2) && is_it(GUEST.len() - LOOK)
}

/// Where the file of this program has what is mapped there.
fn offset_in_own_file(data: &'static [u8]) -> Option<u64> {
    struct Wanted {
        address: u64,
        length: u64,
        offset: Option<u64>,
    }
    extern "C" fn look(
        object: *mut libc::dl_phdr_info,
        _: libc::size_t,
        wanted: *mut libc::c_void,
    ) -> libc::c_int {
        // SAFETY: the caller of this function passes an object with that many headers; `wanted` is what is passed below.
        let (object, wanted) = unsafe { (&*object, &mut *wanted.cast::<Wanted>()) };
        // SAFETY: see above.
        let parts = unsafe { std::slice::from_raw_parts(object.dlpi_phdr, usize::from(object.dlpi_phnum)) };
        wanted.offset = parts.iter().filter(|part| part.p_type == libc::PT_LOAD).find_map(|part| {
            let within = wanted.address.checked_sub(object.dlpi_addr + part.p_vaddr)?;
            (within + wanted.length <= part.p_filesz).then_some(part.p_offset + within)
        });
        1 // The first is the program itself: no other is looked at.
    }
    let mut wanted = Wanted { address: data.as_ptr() as u64, length: data.len() as u64, offset: None };
    // SAFETY: `look` has the right type, and `wanted` outlives the call.
    unsafe { libc::dl_iterate_phdr(Some(look), (&raw mut wanted).cast()) };
    wanted.offset
}

fn silent() -> SandboxError {
    SandboxError::new(ErrorKind::Timeout, "the sandbox helper does not answer")
}

/// It was asked, and ended: as with one that is late, what it cloned may be at work.
fn unanswered() -> SandboxError {
    SandboxError::new(ErrorKind::Timeout, "the sandbox helper ended before it answered")
}

fn not_started(e: std::io::Error) -> SandboxError {
    unavailable(format!("can't start the sandbox helper: {e}"))
}

/// A process of this side. Whoever drops it, also in the middle of a question, has killed it, and no zombie stays.
struct Helper(Option<Child>);

impl Helper {
    /// Returns when it is gone.
    fn end(mut self) {
        if let Some(mut child) = self.0.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    /// Gone as far as anybody here is concerned, however long the kernel takes.
    fn give_up(&mut self) {
        drop(Helper(self.0.take()));
    }

    /// It ends by itself, after this process.
    fn leave(&mut self) {
        self.0 = None;
    }

    fn id(&self) -> u32 {
        self.0.as_ref().map_or(0, Child::id)
    }

    fn is_alive(&mut self) -> bool {
        self.0.as_mut().is_some_and(|child| matches!(child.try_wait(), Ok(None)))
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        let Some(mut child) = self.0.take() else { return };
        let _ = child.kill();
        if matches!(child.try_wait(), Ok(None)) {
            // The kernel may need a while, and this may be a thread of the runtime.
            let reaps = move || drop(child.wait());
            let _ = std::thread::Builder::new().name("helper-end".into()).spawn(reaps);
        }
    }
}

/// The guest at a task on this side. It closes whatever else than its stdin it inherits.
fn spawn_guest(task: &str, stdin: OwnedFd) -> Result<Helper> {
    let program = program().map_err(not_started)?;
    // What it knows, every sandbox would know.
    Command::new(format!("/proc/self/fd/{}", program.as_raw_fd()))
        .arg0("forkyard-guest")
        .arg(task)
        .env_clear()
        .current_dir("/")
        .stdin(stdin)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .map(|child| Helper(Some(child)))
        .map_err(not_started)
}

/// A helper that is being started. What is said to it meanwhile waits in its socket.
struct Starting {
    socket: OwnedFd,
    child: Spawned,
}

enum Spawned {
    Here(Helper),
    Beside(JoinHandle<Result<Helper>>),
}

impl Starting {
    fn here() -> Result<Starting> {
        let (socket, theirs) = message_pair().map_err(|e| not_started(e.into()))?;
        Ok(Starting { socket, child: Spawned::Here(spawn_guest(ZYGOTE, theirs)?) })
    }

    fn beside() -> Option<Starting> {
        let (socket, theirs) = message_pair().ok()?;
        let caller = rustix::thread::gettid();
        let start = move || {
            part_from(caller);
            spawn_guest(ZYGOTE, theirs)
        };
        let thread = std::thread::Builder::new().name("zygote-start".into()).spawn(start).ok()?;
        // If it waits for this processor, it comes first: what it starts takes longer than what this thread has to do.
        std::thread::yield_now();
        Some(Starting { socket, child: Spawned::Beside(thread) })
    }
}

impl Spawned {
    /// After its answer, or the end of its socket: by then it was started, or was not, and nobody waits here.
    fn child(self) -> Result<Helper> {
        match self {
            Spawned::Here(child) => Ok(child),
            Spawned::Beside(thread) => match thread.join() {
                Ok(child) => child,
                Err(panic) => std::panic::resume_unwind(panic),
            },
        }
    }
}

/// What [`expect_sandboxes`] started and nobody has taken yet.
static AHEAD: std::sync::Mutex<Option<Starting>> = std::sync::Mutex::new(None);

/// For a program that will make a sandbox whatever it does first: the helper that sandboxes come from is started beside that.
/// If nobody takes it, it ends with this process.
pub fn expect_sandboxes() {
    *AHEAD.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = Starting::beside();
}

/// Sends the thread `other` to another processor if it waits for this one: a new thread often starts on that of the one which
/// made it, and one of them would wait until the kernel's next look, which comes after both could be done. It is the other that
/// goes, because what this one starts would inherit the trace that this leaves in a thread.
fn part_from(other: rustix::thread::Pid) {
    use rustix::thread::{sched_getaffinity, sched_getcpu, sched_setaffinity};
    let Ok(all) = sched_getaffinity(Some(other)) else { return };
    let mut elsewhere = all;
    elsewhere.unset(sched_getcpu());
    if elsewhere.count() > 0 && sched_setaffinity(Some(other), &elsewhere).is_ok() {
        let _ = sched_setaffinity(Some(other), &all);
    }
}

/// What a helper that was just started answers to its first message.
async fn first_answer(
    messages: &Messages,
    first: &impl serde::Serialize,
    fds: &[BorrowedFd<'_>],
) -> Result<std::io::Result<(Vec<u8>, Vec<OwnedFd>)>> {
    let text = serde_json::to_vec(first).expect("messages have string keys and no failing parts");
    let asked = async {
        messages.send(&text, fds).await?;
        messages.receive().await
    };
    tokio::time::timeout(ANSWER_WITHIN, asked).await.map_err(|_| silent())
}

/// One question to a guest that was started for it; it ends with its answer.
pub async fn ask_once<A: serde::Serialize>(
    task: &str,
    ask: &A,
    fds: &[BorrowedFd<'_>],
) -> Result<(Vec<u8>, Vec<OwnedFd>)> {
    let (socket, theirs) = message_pair().map_err(|e| not_started(e.into()))?;
    let child = spawn_guest(task, theirs)?;
    let messages = Messages::new(socket).map_err(unavailable)?;
    let answer = first_answer(&messages, ask, fds).await?;
    // It has answered or it is broken: either way it is at its end.
    child.end();
    answer.map_err(unavailable)
}

impl Zygote {
    pub async fn start(start: &Start) -> Result<Zygote> {
        let ahead = AHEAD.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).take();
        let Starting { socket, child } = ahead.map_or_else(Starting::here, Ok)?;
        let commands = Messages::new(socket).map_err(not_started)?;
        let answer = first_answer(&commands, start, &[]).await?;
        let mut zygote = Zygote {
            child: std::sync::Mutex::new(child.child()?),
            commands: Mutex::new(Commands { messages: commands, owed: 0 }),
            left: AtomicBool::new(false),
            binds: Vec::new(),
            layers: Vec::new(),
        };
        match serde_json::from_slice(&answer.map_err(not_started)?.0) {
            Ok(Answer::Up { binds, layers }) => {
                (zygote.binds, zygote.layers) = (binds, layers);
                Ok(zygote)
            }
            Ok(Answer::Failed { step, errno }) => Err(setup_error(&step, errno)),
            Ok(Answer::Cloned { .. }) | Err(_) => {
                Err(unavailable("the sandbox helper ended while it started"))
            }
        }
    }

    pub fn pid(&self) -> u32 {
        self.child.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).id()
    }

    /// False once it is gone: its owner starts another.
    pub fn is_alive(&self) -> bool {
        let mut child = self.child.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        child.is_alive()
    }

    async fn ask(&self, ask: &Ask, fds: Vec<OwnedFd>) -> Result<(i32, OwnedFd)> {
        let text = serde_json::to_vec(ask).expect("messages have string keys and no failing parts");
        if text.len() > MAX_MESSAGE {
            let what = format!("{} bytes are too many for the sandbox helper", text.len());
            return Err(SandboxError::new(ErrorKind::Invalid, what).hint("use fewer or shorter variables"));
        }
        let borrowed: Vec<BorrowedFd<'_>> = fds.iter().map(|fd| fd.as_fd()).collect();
        let mut commands = self.commands.lock().await;
        if !self.is_alive() {
            return Err(unavailable("the sandbox helper is gone"));
        }
        let answer = tokio::time::timeout(ANSWER_WITHIN, commands.ask(&text, &borrowed)).await;
        drop(commands);
        let Ok(answer) = answer else {
            // Another is started for the next question.
            self.child.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).give_up();
            return Err(silent());
        };
        let (answer, mut got) = answer.map_err(|_| unanswered())?;
        match serde_json::from_slice(&answer) {
            Ok(Answer::Cloned { pid }) => Ok((pid, got.pop().ok_or_else(unanswered)?)),
            Ok(Answer::Failed { step, errno }) => Err(setup_error(&step, errno)),
            Ok(Answer::Up { .. }) | Err(_) => Err(unanswered()),
        }
    }

    /// A new sandbox, which now sets itself up.
    pub async fn sandbox(&self, ask: Ask, fds: Vec<OwnedFd>) -> Result<Cloned> {
        let (channel, theirs) = message_pair().map_err(unavailable)?;
        let mut all = vec![theirs];
        all.extend(fds);
        let (pid, pidfd) = self.ask(&ask, all).await?;
        Ok(Cloned { pid, pidfd, channel: Messages::new(channel).map_err(unavailable)? })
    }

    /// Puts a new root under a quiet sandbox, whoever's zygote it was cloned from. `held`: its user and mount namespace, the line
    /// that keeps it quiet and its lock. What swaps the root may outlive this process: until its end the sandbox stays quiet and
    /// nobody else touches it.
    pub async fn restack(
        &self,
        root: RootAsk,
        ask: RestackAsk,
        directory: Vec<OwnedFd>,
        held: [BorrowedFd<'_>; RESTACK_FDS],
    ) -> Result<()> {
        let mut fds = directory;
        for fd in held {
            fds.push(fd.try_clone_to_owned().map_err(unavailable)?);
        }
        let not_done = || unavailable("the new root was not put under the sandbox");
        let made = self.job(Ask::Restack { root, ask: ask.clone() }, fds).await?;
        let (WorkResult::Done { .. }, mut mounts) = made else {
            return match made.0 {
                WorkResult::Failed { step, errno } => Err(setup_error(&step, errno)),
                _ => Err(not_done()),
            };
        };
        let Some(root) = mounts.pop() else { return Ok(()) };
        let [user, mount, line, lock] = held;
        let (text, _) = ask_once("restack", &ask, &[user, mount, root.as_fd(), line, lock]).await?;
        match serde_json::from_slice(&text) {
            Ok(WorkResult::Done { .. }) => Ok(()),
            Ok(WorkResult::Failed { step, errno }) => Err(setup_error(&step, errno)),
            Ok(WorkResult::TimedOut | WorkResult::Refused { .. }) | Err(_) => Err(not_done()),
        }
    }

    pub async fn work(&self, work: Work, fds: Vec<OwnedFd>) -> Result<WorkResult> {
        self.begin(work, fds).await?.result().await
    }

    /// Work that goes on from here whatever becomes of this process.
    pub async fn begin(&self, work: Work, fds: Vec<OwnedFd>) -> Result<Begun> {
        self.worker(Ask::Work(work), fds).await
    }

    async fn job(&self, ask: Ask, fds: Vec<OwnedFd>) -> Result<(WorkResult, Vec<OwnedFd>)> {
        self.worker(ask, fds).await?.both().await
    }

    async fn worker(&self, ask: Ask, fds: Vec<OwnedFd>) -> Result<Begun> {
        let (result, theirs) = message_pair().map_err(unavailable)?;
        let mut all = vec![theirs];
        all.extend(fds);
        self.ask(&ask, all).await?;
        Ok(Begun(Messages::new(result).map_err(unavailable)?))
    }

    /// This process ends now: its helper will see that by itself, and nobody has to wait for it.
    pub fn leave(&self) {
        self.left.store(true, Ordering::Relaxed);
    }
}

/// A worker of the helper; its result will come here.
pub struct Begun(Messages);

impl Begun {
    pub async fn result(&self) -> Result<WorkResult> {
        Ok(self.both().await?.0)
    }

    async fn both(&self) -> Result<(WorkResult, Vec<OwnedFd>)> {
        let (text, fds) = self.0.receive().await.map_err(unavailable)?;
        let result = serde_json::from_slice(&text)
            .map_err(|_| unavailable("the sandbox helper's worker ended without a result"))?;
        Ok((result, fds))
    }
}

/// A clone on its way to a sandbox.
pub struct Cloned {
    pub pid: i32,
    pub pidfd: OwnedFd,
    channel: Messages,
}

impl Cloned {
    /// The groups that it waits for.
    pub async fn join(&self, groups: &Groups, fds: &[OwnedFd]) {
        let text = serde_json::to_vec(groups).expect("messages have string keys and no failing parts");
        let borrowed: Vec<BorrowedFd<'_>> = fds.iter().map(|fd| fd.as_fd()).collect();
        // One that is gone has said why.
        let _ = self.channel.send(&text, &borrowed).await;
    }

    /// The end of its setup; the proxy's socket, if it has one.
    pub async fn ready(&self) -> Result<Option<OwnedFd>> {
        let (text, mut got) = self.channel.receive().await.map_err(unavailable)?;
        match serde_json::from_slice(&text) {
            Ok(Ready::Up) => Ok(got.pop()),
            Ok(Ready::Failed { step, errno }) => Err(setup_error(&step, errno)),
            Err(_) => Err(unavailable("the sandbox ended while it was set up")),
        }
    }
}

impl Drop for Zygote {
    fn drop(&mut self) {
        // It ends by itself when its socket closes; sandboxes live on.
        let child = self.child.get_mut().unwrap_or_else(|poisoned| poisoned.into_inner());
        match *self.left.get_mut() {
            true => child.leave(),
            false => Helper(child.0.take()).end(),
        }
    }
}

/// 1 where AppArmor keeps user namespaces of ordinary users from doing anything: it lets them be made and refuses what follows.
const APPARMOR_RESTRICTS: &str = "/proc/sys/kernel/apparmor_restrict_unprivileged_userns";

/// A step of a helper's work.
pub fn failed(what: &str, errno: i32) -> SandboxError {
    let message = format!("{what}: {}", std::io::Error::from_raw_os_error(errno));
    match errno {
        libc::ENOSPC | libc::EDQUOT => SandboxError::new(ErrorKind::TooLarge, message).hint(FULL_HINT),
        _ => unavailable(message),
    }
}

/// What a failed step of the setup means to a user.
pub fn setup_error(step: &str, errno: i32) -> SandboxError {
    let restricted = std::fs::read_to_string(APPARMOR_RESTRICTS).is_ok_and(|value| value.trim() == "1");
    explain_setup(step, errno, restricted)
}

fn explain_setup(step: &str, errno: i32, restricted: bool) -> SandboxError {
    let reason = std::io::Error::from_raw_os_error(errno);
    let message = format!("this machine can't give the isolation: {step}: {reason}");
    let unsupported = |hint: &str| SandboxError::new(ErrorKind::Unsupported, message.clone()).hint(hint);
    match (step, errno) {
        (_, libc::EPERM | libc::EACCES) if restricted => unsupported(
            "AppArmor restricts user namespaces here: sysctl kernel.apparmor_restrict_unprivileged_userns=0, or an AppArmor profile for forkyard that allows `userns`; or use --provider docker",
        ),
        ("user namespace" | "id map" | "clone", libc::EPERM | libc::EACCES) => unsupported(
            "allow unprivileged user namespaces: sysctl kernel.unprivileged_userns_clone=1; in a container, its own seccomp or AppArmor profile must allow them; or use --provider docker",
        ),
        ("user namespace" | "clone", libc::ENOSPC | libc::EUSERS) => {
            unsupported("raise user.max_user_namespaces and its siblings with sysctl")
        }
        ("overlay", libc::ENODEV) => unsupported("load the overlay module: modprobe overlay"),
        ("overlay", libc::EPERM | libc::EINVAL) => unsupported(
            "overlayfs in user namespaces needs kernel 5.11 or newer and a state folder on a file system with extended attributes (ext4, xfs, btrfs)",
        ),
        ("clone", libc::EAGAIN) | (_, libc::ENOMEM | libc::ENOSPC | libc::EMFILE | libc::ENFILE) => {
            failed(&format!("no room for another sandbox: {step}"), errno)
        }
        (_, libc::ENOSYS | libc::EPERM | libc::EACCES | libc::EINVAL) => {
            unsupported("`forkyard doctor` says what this machine offers; kernels from 6.1 on are supported")
        }
        _ => failed(&format!("setup of the sandbox failed: {step}"), errno),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refused_setup_names_who_refuses() {
        let hint = |step, errno, restricted| {
            let e = explain_setup(step, errno, restricted);
            (e.kind, e.hint.unwrap_or_default())
        };
        // With the restriction the namespace is made, and any later step can be the one that is refused.
        for step in ["user namespace", "id map", "clone", "mount", "overlay", "hostname", "private mounts"] {
            for errno in [libc::EPERM, libc::EACCES] {
                let (kind, said) = hint(step, errno, true);
                assert_eq!(kind, ErrorKind::Unsupported);
                assert!(said.contains("kernel.apparmor_restrict_unprivileged_userns=0"), "{step}: {said}");
                assert!(said.contains("AppArmor profile"), "{step}: {said}");
                let (_, said) = hint(step, errno, false);
                assert!(!said.contains("apparmor_restrict") && !said.is_empty(), "{step}: {said}");
            }
        }
        assert!(hint("user namespace", libc::EPERM, false).1.contains("unprivileged_userns_clone=1"));
        assert!(hint("clone", libc::ENOSPC, true).1.contains("user.max_user_namespaces"));
        assert!(hint("overlay", libc::ENODEV, true).1.contains("modprobe overlay"));
        assert_eq!(hint("clone", libc::EAGAIN, true).0, ErrorKind::Unavailable);
        assert_eq!(hint("overlay", libc::ENOSPC, true), (ErrorKind::TooLarge, FULL_HINT.into()));
    }

    #[test]
    fn the_guest_is_copied_from_this_programs_own_file() {
        let file = tempfile::tempfile().unwrap();
        assert!(copy_of_own_file(&file));
        let mut copy = vec![0; GUEST.len()];
        file.read_exact_at(&mut copy, 0).unwrap();
        assert!(copy == GUEST, "something else is at that place");
        assert_eq!(file.metadata().unwrap().len(), GUEST.len() as u64);
        assert_eq!(offset_in_own_file(Box::leak(vec![0].into_boxed_slice())), None);
    }

    /// Processes of this one that have ended and that nobody has reaped, or that go on.
    fn helpers() -> Vec<String> {
        let threads = std::fs::read_dir("/proc/self/task").unwrap().flatten();
        let texts = threads.filter_map(|thread| std::fs::read_to_string(thread.path().join("children")).ok());
        let pids: Vec<String> =
            texts.flat_map(|text| text.split_whitespace().map(String::from).collect::<Vec<_>>()).collect();
        pids.iter().filter_map(|pid| std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()).collect()
    }

    fn start_of_none() -> Start {
        Start {
            state: "/nowhere".into(),
            become_id: None,
            binds: Vec::new(),
            skeleton: "none".into(),
            files: Vec::new(),
        }
    }

    fn until_no_helper_is_left() {
        let until = std::time::Instant::now() + std::time::Duration::from_secs(30);
        while !helpers().is_empty() {
            assert!(std::time::Instant::now() < until, "{:?}", helpers());
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_helper_that_never_answers_is_given_up() {
        let (socket, _theirs) = message_pair().unwrap();
        let child = Command::new("sleep").arg("600").spawn().unwrap();
        let starting = Starting { socket, child: Spawned::Here(Helper(Some(child))) };
        *AHEAD.lock().unwrap() = Some(starting);
        let late = Zygote::start(&start_of_none()).await.err().unwrap();
        assert_eq!(late.kind, ErrorKind::Timeout, "{late}");
        until_no_helper_is_left();
        // As of one that was started for one question.
        let (socket, _theirs) = message_pair().unwrap();
        let late = first_answer(&Messages::new(socket).unwrap(), &"never read", &[]).await.unwrap_err();
        assert_eq!(late.kind, ErrorKind::Timeout, "{late}");
    }

    /// It was killed between a clone and its answer: what was asked may be done later, so nobody may take it for not done.
    #[tokio::test]
    async fn who_ends_before_its_answer_may_have_done_what_was_asked() {
        let (socket, theirs) = message_pair().unwrap();
        let commands = Commands { messages: Messages::new(socket).unwrap(), owed: 0 };
        let helper = Helper(Some(Command::new("sleep").arg("600").spawn().unwrap()));
        let zygote = Zygote {
            commands: Mutex::new(commands),
            child: std::sync::Mutex::new(helper),
            left: AtomicBool::new(false),
            binds: Vec::new(),
            layers: Vec::new(),
        };
        let ends = std::thread::spawn(move || {
            let (question, _) = crate::local::fd::receive(theirs.as_fd()).unwrap();
            assert!(!question.is_empty());
        });
        let work = zygote.begin(Work::Remove { path: "trash/none".into() }, Vec::new());
        let lost = work.await.err().unwrap();
        ends.join().unwrap();
        assert_eq!(lost.kind, ErrorKind::Timeout, "{lost}");
    }

    #[tokio::test]
    async fn a_question_that_is_given_up_leaves_no_process() {
        let asked = ask_once("trees", &"not a question yet", &[]);
        // Once is enough for it to be started.
        assert!(futures::poll!(Box::pin(asked)).is_pending());
        let start = start_of_none();
        assert!(futures::poll!(Box::pin(Zygote::start(&start))).is_pending());
        expect_sandboxes();
        assert!(futures::poll!(Box::pin(Zygote::start(&start))).is_pending());
        until_no_helper_is_left();
    }

    #[test]
    fn the_program_is_whole_and_nobody_can_change_it() {
        let program = File::from(program().unwrap().try_clone().unwrap());
        let mut whole = vec![0; GUEST.len()];
        program.read_exact_at(&mut whole, 0).unwrap();
        assert!(whole == GUEST);
        let path = format!("/proc/self/fd/{}", program.as_raw_fd());
        let writing = File::options().write(true).open(path).and_then(|file| file.write_all_at(b"x", 0));
        assert_eq!(writing.unwrap_err().raw_os_error(), Some(libc::EPERM));
    }
}
