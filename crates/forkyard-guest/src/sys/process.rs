//! Clones, ids, capabilities, signals.

use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use rustix::io::Result;

use super::check;

const CLONE_INTO_CGROUP: u64 = 1 << 33;

/// Which side of a clone this is.
pub enum Cloned {
    Child,
    Parent { pid: i32, pidfd: OwnedFd },
}

/// fork with namespaces (`CLONE_NEW*`), into a cgroup of version 2 if one is given (its directory).
///
/// # Safety
/// Only for a process with one thread: locks that another thread held would stay locked in the child for ever.
pub unsafe fn clone_with(namespaces: libc::c_int, group: Option<BorrowedFd<'_>>) -> Result<Cloned> {
    let mut pidfd: RawFd = -1;
    // SAFETY: an all-zero clone_args is valid.
    let mut args: libc::clone_args = unsafe { std::mem::zeroed() };
    args.flags = namespaces as u64 | libc::CLONE_PIDFD as u64;
    args.pidfd = &raw mut pidfd as u64;
    args.exit_signal = libc::SIGCHLD as u64;
    if let Some(group) = group {
        args.flags |= CLONE_INTO_CGROUP;
        args.cgroup = group.as_raw_fd() as u64;
    }
    // SAFETY: no stack is given, so this is a fork; `args` and `pidfd` outlive the call; the caller has one thread.
    let pid =
        check(unsafe { libc::syscall(libc::SYS_clone3, &raw const args, size_of::<libc::clone_args>()) })?;
    if pid == 0 {
        return Ok(Cloned::Child);
    }
    // SAFETY: the kernel has just put a new descriptor there.
    Ok(Cloned::Parent { pid: pid as i32, pidfd: unsafe { OwnedFd::from_raw_fd(pidfd) } })
}

/// Enters new namespaces (`CLONE_NEW*`).
pub fn unshare(namespaces: libc::c_int) -> Result<()> {
    // SAFETY: only namespace flags are passed, never CLONE_FILES or CLONE_VM, so no memory is affected.
    check(unsafe { libc::unshare(namespaces) } as libc::c_long).map(drop)
}

/// Maps one id of the namespace outside to `inside` in this new user namespace.
pub fn map_id(inside: u32, uid: u32, gid: u32) -> std::io::Result<()> {
    // An ordinary user may write gid_map only after giving up setgroups.
    std::fs::write("/proc/self/setgroups", "deny")?;
    std::fs::write("/proc/self/uid_map", format!("{inside} {uid} 1"))?;
    std::fs::write("/proc/self/gid_map", format!("{inside} {gid} 1"))
}

/// Root becomes `id` for good, with no other group.
pub fn become_id(id: u32) -> Result<()> {
    use rustix::thread::{set_thread_groups, set_thread_res_gid, set_thread_res_uid};
    let (uid, gid) = (rustix::fs::Uid::from_raw(id), rustix::fs::Gid::from_raw(id));
    set_thread_groups(&[])?;
    set_thread_res_gid(gid, gid, gid)?;
    set_thread_res_uid(uid, uid, uid)
}

/// Whether others of the same user may look into this process (`/proc/PID/{mem,fd,environ,root,exe}`, ptrace, pidfd_getfd).
pub fn set_dumpable(dumpable: bool) -> Result<()> {
    // SAFETY: PR_SET_DUMPABLE takes one integer and touches no memory of ours.
    check(unsafe { libc::prctl(libc::PR_SET_DUMPABLE, dumpable as libc::c_ulong, 0, 0, 0) } as libc::c_long)
        .map(drop)
}

/// No capability, now or after any exec. What stays permitted (not effective) is what the disk watch raises in its own thread, see
/// [`see_all`]. Exec by a user who is not root drops it.
pub fn drop_capabilities() -> Result<()> {
    rustix::thread::set_no_new_privs(true)?;
    for capability in 0..64 {
        // SAFETY: PR_CAPBSET_DROP takes one integer and touches no memory of ours.
        if unsafe { libc::prctl(libc::PR_CAPBSET_DROP, capability as libc::c_ulong, 0, 0, 0) } < 0 {
            break;
        }
    }
    see_all(false)
}

/// For this thread: the right to read one's own files whatever their modes, and to look into one's own processes even if they have
/// closed themselves.
pub fn see_all(raised: bool) -> Result<()> {
    use rustix::thread::{CapabilitySet, CapabilitySets};
    let permitted = CapabilitySet::DAC_READ_SEARCH | CapabilitySet::SYS_PTRACE;
    rustix::thread::set_capabilities(
        None,
        CapabilitySets {
            effective: if raised { permitted } else { CapabilitySet::empty() },
            permitted,
            inheritable: CapabilitySet::empty(),
        },
    )
}

/// Does something with this right.
pub fn seeing_all<T>(work: impl FnOnce() -> T) -> T {
    let raised = see_all(true).is_ok();
    let done = work();
    if raised {
        let _ = see_all(false);
    }
    done
}

/// Whether two threads have the same table of descriptors. False where that can't be asked.
pub fn shares_descriptors(one: i32, other: i32) -> bool {
    const FILES: libc::c_int = 2; // KCMP_FILES
    // SAFETY: kcmp takes numbers and touches no memory of ours.
    unsafe { libc::syscall(libc::SYS_kcmp, one, other, FILES, 0, 0) == 0 }
}

/// A descriptor that is readable when children have ended; the signal itself is blocked.
pub fn child_signals() -> Result<OwnedFd> {
    // SAFETY: the set is initialised by sigemptyset before use; signalfd makes a new descriptor that only we own.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&mut set);
        libc::sigaddset(&mut set, libc::SIGCHLD);
        libc::signal(libc::SIGCHLD, libc::SIG_DFL);
        libc::sigprocmask(libc::SIG_BLOCK, &set, std::ptr::null_mut());
        let fd = check(libc::signalfd(-1, &set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK) as libc::c_long)?;
        Ok(OwnedFd::from_raw_fd(fd as RawFd))
    }
}

/// Children are reaped by the kernel.
pub fn ignore_children() {
    // SAFETY: SIG_IGN installs no handler.
    unsafe { libc::signal(libc::SIGCHLD, libc::SIG_IGN) };
}

/// Sends a signal to a process, or to a group if `pid` is negative.
pub fn kill(pid: i32, signal: i32) -> Result<()> {
    // SAFETY: kill touches no memory of ours.
    check(unsafe { libc::kill(pid, signal) } as libc::c_long).map(drop)
}

/// Whoever started Forkyard may have had signals ignored, and a command would inherit that. Rust's own wish about SIGPIPE stays.
pub fn heed_signals() {
    for signal in (1..=libc::SIGRTMAX()).filter(|signal| *signal != libc::SIGPIPE) {
        // SAFETY: an all-zero sigaction is valid; only the default is set, and only where nothing handles the signal.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            if libc::sigaction(signal, std::ptr::null(), &mut action) == 0
                && action.sa_sigaction == libc::SIG_IGN
            {
                libc::signal(signal, libc::SIG_DFL);
            }
        }
    }
}

/// From now on this process does not take the processor from whoever wakes it: a command that ends closes its streams one by one
/// and is waited for after that, and is best heard once. It gets no less time, and its children are as ever.
pub fn defer_to_others() {
    let params = libc::sched_param { sched_priority: 0 };
    let policy = libc::SCHED_BATCH | libc::SCHED_RESET_ON_FORK;
    // SAFETY: one value that lives across the call. Not every C library has a function that does more than refuse.
    let _ = unsafe { libc::syscall(libc::SYS_sched_setscheduler, 0, policy, &raw const params) };
}

/// Ends this process at once: no destructors, no flushing of what the parent had buffered.
pub fn exit_now(code: i32) -> ! {
    // SAFETY: _exit does not return and runs nothing.
    unsafe { libc::_exit(code) }
}

/// Closes every descriptor from `first` up that is not in `keep`.
pub fn close_all_but(first: RawFd, keep: &[RawFd]) {
    let mut keep: Vec<RawFd> = keep.iter().copied().filter(|fd| *fd >= first).collect();
    keep.sort_unstable();
    let mut from = first as libc::c_uint;
    for fd in keep.iter().map(|fd| *fd as libc::c_uint).chain([libc::c_uint::MAX]) {
        if fd > from {
            // SAFETY: nobody in this process uses the closed descriptors: the callers keep all that they own.
            unsafe { libc::syscall(libc::SYS_close_range, from, fd.saturating_sub(1), 0) };
        }
        from = fd.saturating_add(1);
    }
}
