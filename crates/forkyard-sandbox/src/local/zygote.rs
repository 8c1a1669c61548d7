//! The process that sandboxes are cloned from, as its owner sees it.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

use forkyard_guest::zygote::{Answer, Ask, Ready, Start, Work, WorkResult};
use rustix::fs::{MemfdFlags, SealFlags};
use tokio::sync::Mutex;

use super::fd::{Messages, message_pair};
use crate::{ErrorKind, Result, SandboxError};

/// The guest, built beside this library.
pub static GUEST: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/forkyard-guest"));

pub struct Zygote {
    commands: Arc<Mutex<Messages>>,
    child: std::sync::Mutex<Child>,
}

pub fn unavailable(what: impl std::fmt::Display) -> SandboxError {
    SandboxError::new(ErrorKind::Unavailable, what.to_string())
}

/// The guest as a sealed file in memory: nobody can change what runs, and nothing has to be installed.
fn program() -> std::io::Result<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let make = |extra| rustix::fs::memfd_create("forkyard-guest", flags | extra);
    // Kernels before 6.3 do not know the flag, and do not need it.
    let file = make(MemfdFlags::EXEC).or_else(|_| make(MemfdFlags::empty()))?;
    let mut writer = std::fs::File::from(file);
    std::io::Write::write_all(&mut writer, GUEST)?;
    let seals = SealFlags::SEAL | SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE;
    rustix::fs::fcntl_add_seals(&writer, seals)?;
    Ok(writer.into())
}

/// The guest at a task on this side, and our end of the socket that it knows.
pub fn spawn_guest(task: &str) -> Result<(Child, OwnedFd)> {
    let failed = |e: std::io::Error| unavailable(format!("can't start the sandbox helper: {e}"));
    let program = program().map_err(failed)?;
    let (ours, theirs) = message_pair().map_err(|e| failed(e.into()))?;
    let path = format!("/proc/self/fd/{}", program.as_raw_fd());
    let mut command = Command::new(path);
    // What it holds open or knows, every sandbox would hold or know.
    command
        .arg0("forkyard-guest")
        .arg(task)
        .env_clear()
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    let socket = theirs.as_raw_fd();
    command.arg(socket.to_string());
    // SAFETY: only async-signal-safe calls, on a descriptor that stays open until the spawn is over.
    unsafe {
        command.pre_exec(move || {
            // A library that opened files without close-on-exec must not leak them into sandboxes. Marked, not closed:
            // the standard library still needs its own to report a failed exec.
            libc::syscall(libc::SYS_close_range, 3, libc::c_uint::MAX, libc::CLOSE_RANGE_CLOEXEC);
            match libc::fcntl(socket, libc::F_SETFD, 0) {
                0 => Ok(()),
                _ => Err(std::io::Error::last_os_error()),
            }
        });
    }
    let child = command.spawn().map_err(failed)?;
    drop((theirs, program));
    Ok((child, ours))
}

impl Zygote {
    pub async fn start(start: &Start) -> Result<Zygote> {
        let (child, ours) = spawn_guest("zygote")?;
        let failed = |e: std::io::Error| unavailable(format!("can't start the sandbox helper: {e}"));
        let commands = Messages::new(ours).map_err(failed)?;
        let zygote = Zygote { commands: Arc::new(Mutex::new(commands)), child: std::sync::Mutex::new(child) };
        let text = serde_json::to_vec(start).expect("messages have string keys and no failing parts");
        let commands = zygote.commands.lock().await;
        commands.send(&text, &[]).await.map_err(failed)?;
        let (answer, _) = commands.receive().await.map_err(failed)?;
        drop(commands);
        match serde_json::from_slice(&answer) {
            Ok(Answer::Up) => Ok(zygote),
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
        matches!(child.try_wait(), Ok(None))
    }

    /// A question and its answer stay together even if the caller goes away between them.
    async fn ask(&self, ask: &Ask, fds: Vec<OwnedFd>) -> Result<(i32, OwnedFd)> {
        let text = serde_json::to_vec(ask).expect("messages have string keys and no failing parts");
        let commands = Arc::clone(&self.commands);
        let both = tokio::spawn(async move {
            let commands = commands.lock().await;
            let borrowed: Vec<BorrowedFd<'_>> = fds.iter().map(|fd| fd.as_fd()).collect();
            commands.send(&text, &borrowed).await?;
            commands.receive().await
        });
        let gone = || unavailable("the sandbox helper is gone");
        let (answer, mut got) = both.await.map_err(|_| gone())?.map_err(|_| gone())?;
        match serde_json::from_slice(&answer) {
            Ok(Answer::Cloned { pid }) => Ok((pid, got.pop().ok_or_else(gone)?)),
            Ok(Answer::Failed { step, errno }) => Err(setup_error(&step, errno)),
            Ok(Answer::Up) | Err(_) => Err(gone()),
        }
    }

    /// A new sandbox: its pid, its isolation layers and the proxy's socket.
    pub async fn sandbox(&self, ask: Ask, fds: Vec<OwnedFd>) -> Result<Cloned> {
        let (ready, theirs) = message_pair().map_err(unavailable)?;
        let mut all = vec![theirs];
        all.extend(fds);
        let (pid, _pidfd) = self.ask(&ask, all).await?;
        let ready = Messages::new(ready).map_err(unavailable)?;
        let (text, mut got) = ready.receive().await.map_err(unavailable)?;
        match serde_json::from_slice(&text) {
            Ok(Ready::Up { layers }) => Ok(Cloned { pid, layers, proxy: got.pop() }),
            Ok(Ready::Failed { step, errno }) => Err(setup_error(&step, errno)),
            Err(_) => Err(unavailable("the sandbox ended while it was set up")),
        }
    }

    /// Puts a new root under a quiet sandbox.
    pub async fn restack(&self, ask: Ask, namespaces: Vec<OwnedFd>) -> Result<()> {
        match self.job(ask, namespaces).await? {
            WorkResult::Done { .. } => Ok(()),
            WorkResult::Failed { step, errno } => Err(setup_error(&step, errno)),
            WorkResult::TimedOut | WorkResult::Refused { .. } => Err(unavailable("the new root was refused")),
        }
    }

    pub async fn work(&self, work: Work, fds: Vec<OwnedFd>) -> Result<WorkResult> {
        self.job(Ask::Work(work), fds).await
    }

    async fn job(&self, ask: Ask, fds: Vec<OwnedFd>) -> Result<WorkResult> {
        let (result, theirs) = message_pair().map_err(unavailable)?;
        let mut all = vec![theirs];
        all.extend(fds);
        self.ask(&ask, all).await?;
        let result = Messages::new(result).map_err(unavailable)?;
        let (text, _) = result.receive().await.map_err(unavailable)?;
        serde_json::from_slice(&text)
            .map_err(|_| unavailable("the sandbox helper's worker ended without a result"))
    }
}

pub struct Cloned {
    pub pid: i32,
    pub layers: Vec<String>,
    pub proxy: Option<OwnedFd>,
}

impl Drop for Zygote {
    fn drop(&mut self) {
        // It ends by itself when its socket closes; sandboxes live on. Killed and reaped here so that no zombie stays.
        let child = self.child.get_mut().unwrap_or_else(|poisoned| poisoned.into_inner());
        let _ = child.kill();
        let _ = child.wait();
    }
}

/// What a failed step of the setup means to a user.
pub fn setup_error(step: &str, errno: i32) -> SandboxError {
    let reason = std::io::Error::from_raw_os_error(errno);
    let message = format!("this machine can't give the isolation: {step}: {reason}");
    let unsupported = |hint: &str| SandboxError::new(ErrorKind::Unsupported, message.clone()).hint(hint);
    match (step, errno) {
        ("user namespace" | "id map" | "clone", libc::EPERM | libc::EACCES) => unsupported(
            "allow unprivileged user namespaces: sysctl kernel.unprivileged_userns_clone=1, and on Ubuntu sysctl kernel.apparmor_restrict_unprivileged_userns=0 or an AppArmor profile for forkyard",
        ),
        ("user namespace" | "clone", libc::ENOSPC | libc::EUSERS) => {
            unsupported("raise user.max_user_namespaces and its siblings with sysctl")
        }
        ("overlay", libc::ENODEV) => unsupported("load the overlay module: modprobe overlay"),
        ("overlay", libc::EPERM | libc::EINVAL) => unsupported(
            "overlayfs in user namespaces needs kernel 5.11 or newer and a state folder on a file system with extended attributes (ext4, xfs, btrfs)",
        ),
        ("clone", libc::EAGAIN | libc::ENOMEM)
        | (_, libc::ENOMEM | libc::ENOSPC | libc::EMFILE | libc::ENFILE) => SandboxError::new(
            ErrorKind::Unavailable,
            format!("no room for another sandbox: {step}: {reason}"),
        ),
        (_, libc::ENOSYS | libc::EPERM | libc::EACCES | libc::EINVAL) => {
            unsupported("`forkyard doctor` says what this machine offers; kernels from 6.1 on are supported")
        }
        _ => SandboxError::new(
            ErrorKind::Unavailable,
            format!("setup of the sandbox failed: {step}: {reason}"),
        ),
    }
}
