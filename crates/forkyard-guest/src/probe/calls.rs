//! System calls that must not work. Each attempt runs in a process of its own and is told as `number name errno` (0: it worked)
//! or `number name signal N`; the number is the attack's in docs/attacks.md.

use std::process::ExitCode;

const PAGE: usize = 4096;
/// The supervisor, as every process inside sees it.
const SUPERVISOR: libc::pid_t = 1;

type Attempt = (u8, &'static str, fn() -> libc::c_long);

/// Runs the attempts of the given attacks, by their numbers or each by its own name; all if none is given.
pub fn run(wanted: &[&str]) -> ExitCode {
    let asked = |number: u8, name: &str| {
        wanted.is_empty() || wanted.iter().any(|word| *word == name || word.parse() == Ok(number))
    };
    for (number, name, attempt) in ATTEMPTS.iter().filter(|(number, name, _)| asked(*number, name)) {
        // SAFETY: this program has one thread; the child only makes the attempt and ends.
        unsafe {
            match libc::fork() {
                0 => {
                    *libc::__errno_location() = 0;
                    let failed = attempt() < 0;
                    let errno = *libc::__errno_location();
                    libc::_exit(if failed { errno.clamp(1, 254) } else { 0 });
                }
                pid if pid > 0 => {
                    let mut status = 0;
                    libc::waitpid(pid, &mut status, 0);
                    if libc::WIFSIGNALED(status) {
                        println!("{number} {name} signal {}", libc::WTERMSIG(status));
                    } else {
                        println!("{number} {name} {}", libc::WEXITSTATUS(status));
                    }
                }
                _ => println!("{number} {name} fork-failed"),
            }
        }
    }
    ExitCode::SUCCESS
}

macro_rules! call {
    ($number:expr $(, $arg:expr)*) => {
        // SAFETY: an attempt that the kernel is expected to refuse; pointers are to static data or null, and the process
        // exists only for this call.
        unsafe { libc::syscall($number $(, $arg)*) }
    };
}

fn open(path: &std::ffi::CStr, flags: i32) -> libc::c_long {
    // SAFETY: a static path.
    unsafe { libc::open(path.as_ptr(), flags) as libc::c_long }
}

fn write(path: &std::ffi::CStr, text: &str) -> libc::c_long {
    let fd = open(path, libc::O_WRONLY);
    if fd < 0 {
        return fd;
    }
    // SAFETY: the text is alive and its length its own.
    unsafe { libc::write(fd as i32, text.as_ptr().cast(), text.len()) as libc::c_long }
}

fn setns(path: &std::ffi::CStr) -> libc::c_long {
    let fd = open(path, libc::O_RDONLY);
    call!(libc::SYS_setns, fd, 0)
}

fn clone(flag: libc::c_int) -> libc::c_long {
    let pid = call!(libc::SYS_clone, flag | libc::SIGCHLD, 0, 0, 0, 0);
    if pid == 0 {
        // SAFETY: the child of a clone that worked has nothing to do.
        unsafe { libc::_exit(0) }
    }
    pid
}

/// A new network interface, as `ip link add` asks for it.
fn new_link() -> libc::c_long {
    const NEW_LINK: u16 = 16;
    const REQUEST_ACK_CREATE: u16 = 0x1 | 0x4 | 0x400;
    let kind = b"\x0a\x00\x01\x00dummy\0\0\0";
    let mut message = vec![0u8; 16 + 16];
    message.extend_from_slice(&(4 + kind.len() as u16).to_le_bytes());
    message.extend_from_slice(&18u16.to_le_bytes());
    message.extend_from_slice(kind);
    let length = message.len() as u32;
    message[..4].copy_from_slice(&length.to_le_bytes());
    message[4..6].copy_from_slice(&NEW_LINK.to_le_bytes());
    message[6..8].copy_from_slice(&REQUEST_ACK_CREATE.to_le_bytes());
    netlink(libc::NETLINK_ROUTE, &message)
}

/// A line for the audit log, as a login program writes it.
fn audit() -> libc::c_long {
    const USER_MESSAGE: u16 = 1005;
    const REQUEST_ACK: u16 = 0x1 | 0x4;
    let mut message = vec![0u8; 16];
    message.extend_from_slice(b"op=forkyard-was-here\0\0\0\0");
    let length = message.len() as u32;
    message[..4].copy_from_slice(&length.to_le_bytes());
    message[4..6].copy_from_slice(&USER_MESSAGE.to_le_bytes());
    message[6..8].copy_from_slice(&REQUEST_ACK.to_le_bytes());
    netlink(libc::NETLINK_AUDIT, &message)
}

/// What the kernel says to a request that wants an answer.
fn netlink(protocol: libc::c_int, message: &[u8]) -> libc::c_long {
    // SAFETY: a socket of our own; both buffers are alive and as long as said.
    unsafe {
        let fd = libc::socket(libc::AF_NETLINK, libc::SOCK_RAW, protocol);
        if fd < 0 || libc::send(fd, message.as_ptr().cast(), message.len(), 0) < 0 {
            return -1;
        }
        let mut answer = [0u8; 256];
        if libc::recv(fd, answer.as_mut_ptr().cast(), answer.len(), 0) < 20 {
            return -1;
        }
        // An acknowledgement carries the negative errno after its head.
        let code = i32::from_le_bytes([answer[16], answer[17], answer[18], answer[19]]);
        *libc::__errno_location() = -code;
        if code == 0 { 0 } else { -1 }
    }
}

/// A word to a socket that takes messages.
fn datagram(path: &[u8]) -> libc::c_long {
    // SAFETY: an all-zero address is valid, the path is shorter than its room, and both live across the calls.
    unsafe {
        let mut address: libc::sockaddr_un = std::mem::zeroed();
        address.sun_family = libc::AF_UNIX as libc::sa_family_t;
        for (to, from) in address.sun_path.iter_mut().zip(path) {
            *to = *from as libc::c_char;
        }
        let fd = libc::socket(libc::AF_UNIX, libc::SOCK_DGRAM, 0);
        let length = size_of::<libc::sockaddr_un>() as libc::socklen_t;
        let word = b"forkyard was here";
        libc::sendto(fd, word.as_ptr().cast(), word.len(), 0, (&raw const address).cast(), length)
            as libc::c_long
    }
}

/// Gives a file of our own a capability, as `setcap` does.
fn file_capability() -> libc::c_long {
    // Version 2 with the effective flag, and every capability permitted.
    const ALL: [u32; 5] = [0x0200_0001, u32::MAX, 0, u32::MAX, 0];
    let fd = open(c"/tmp/forkyard-cap", libc::O_WRONLY | libc::O_CREAT);
    let name = c"security.capability".as_ptr();
    call!(libc::SYS_fsetxattr, fd, name, ALL.as_ptr(), 20, 0)
}

fn raise_capabilities() -> libc::c_long {
    const VERSION_3: u32 = 0x2008_0522;
    let head = [VERSION_3, 0];
    let data = [u32::MAX; 6];
    call!(libc::SYS_capset, head.as_ptr(), data.as_ptr())
}

static ZEROS: [u64; PAGE / 8] = [0; PAGE / 8];
/// A limit of nothing at all.
static NO_LIMIT: [u64; 2] = [0, 0];
static ENDLESS: [u64; 2] = [u64::MAX, u64::MAX];
/// `sched_param`: the highest priority of the real-time classes, and the only one of the others.
static HIGHEST: i32 = 99;
static ONLY: i32 = 0;
static FIRST_PROCESSOR: u64 = 1;
const SCHED_IDLE: i32 = 5;
const TIOCSETD: libc::c_ulong = 0x5423;
const IOPRIO_IDLE: i32 = 3 << 13;

const ATTEMPTS: &[Attempt] = &[
    (5, "link-usr", || {
        call!(libc::SYS_linkat, libc::AT_FDCWD, c"/bin/sh".as_ptr(), libc::AT_FDCWD, c"/bin/mine".as_ptr(), 0)
    }),
    (5, "write-usr", || open(c"/usr/bin/forkyard-was-here", libc::O_WRONLY | libc::O_CREAT)),
    (5, "write-dev", || open(c"/dev/forkyard-was-here", libc::O_WRONLY | libc::O_CREAT)),
    (7, "supervisor-environ", || open(c"/proc/1/environ", libc::O_RDONLY)),
    (7, "supervisor-root", || open(c"/proc/1/root/etc", libc::O_RDONLY)),
    (7, "supervisor-cwd", || open(c"/proc/1/cwd/.", libc::O_RDONLY)),
    (7, "supervisor-descriptors", || open(c"/proc/1/fd", libc::O_RDONLY | libc::O_DIRECTORY)),
    (7, "supervisor-maps", || open(c"/proc/1/map_files", libc::O_RDONLY | libc::O_DIRECTORY)),
    (8, "overwrite-supervisor", || open(c"/proc/1/exe", libc::O_WRONLY)),
    (16, "unshare-user", || call!(libc::SYS_unshare, libc::CLONE_NEWUSER)),
    (16, "unshare-mount", || call!(libc::SYS_unshare, libc::CLONE_NEWNS)),
    (16, "unshare-net", || call!(libc::SYS_unshare, libc::CLONE_NEWNET)),
    (16, "clone-user", || clone(libc::CLONE_NEWUSER)),
    (16, "clone-mount", || clone(libc::CLONE_NEWNS)),
    (16, "clone-pid", || clone(libc::CLONE_NEWPID)),
    (16, "clone3", || {
        let mut how = [0u64; 11];
        (how[0], how[4]) = (libc::CLONE_NEWUSER as u64, libc::SIGCHLD as u64);
        let pid = call!(libc::SYS_clone3, how.as_ptr(), size_of_val(&how));
        if pid == 0 {
            // SAFETY: as in `clone`.
            unsafe { libc::_exit(0) }
        }
        pid
    }),
    (16, "setns-user", || setns(c"/proc/self/ns/user")),
    (16, "setns-supervisor", || setns(c"/proc/1/ns/mnt")),
    (16, "mount", || call!(libc::SYS_mount, c"none".as_ptr(), c"/tmp".as_ptr(), c"tmpfs".as_ptr(), 0, 0)),
    (16, "remount-writable", || {
        call!(libc::SYS_mount, 0, c"/usr".as_ptr(), 0, libc::MS_REMOUNT | libc::MS_BIND, 0)
    }),
    (16, "umount", || call!(libc::SYS_umount2, c"/proc".as_ptr(), libc::MNT_DETACH)),
    (16, "fsopen", || call!(libc::SYS_fsopen, c"tmpfs".as_ptr(), 0)),
    (16, "open-tree", || call!(libc::SYS_open_tree, libc::AT_FDCWD, c"/".as_ptr(), 1)),
    (16, "mount-setattr", || {
        call!(libc::SYS_mount_setattr, libc::AT_FDCWD, c"/usr".as_ptr(), 0, ZEROS.as_ptr(), 32)
    }),
    (16, "pivot-root", || call!(libc::SYS_pivot_root, c"/tmp".as_ptr(), c"/tmp".as_ptr())),
    (16, "chroot", || call!(libc::SYS_chroot, c"/tmp".as_ptr())),
    (17, "setuid-root", || call!(libc::SYS_setuid, 0)),
    (17, "setgid-root", || call!(libc::SYS_setgid, 0)),
    (17, "setgroups", || call!(libc::SYS_setgroups, 1, ZEROS.as_ptr())),
    (17, "capset", raise_capabilities),
    (17, "ambient-capability", || {
        call!(libc::SYS_prctl, libc::PR_CAP_AMBIENT, libc::PR_CAP_AMBIENT_RAISE, 21, 0, 0)
    }),
    (17, "file-capability", file_capability),
    (17, "forget-no-new-privs", || call!(libc::SYS_prctl, libc::PR_SET_NO_NEW_PRIVS, 0, 0, 0, 0)),
    (17, "mknod-disk", || {
        call!(libc::SYS_mknodat, libc::AT_FDCWD, c"/tmp/disk".as_ptr(), libc::S_IFBLK | 0o666, 0x0801)
    }),
    (18, "ptrace-supervisor", || call!(libc::SYS_ptrace, libc::PTRACE_SEIZE, SUPERVISOR, 0, 0)),
    (18, "supervisor-memory", || open(c"/proc/1/mem", libc::O_RDONLY)),
    (18, "read-supervisor", || {
        let mut room = [0u8; 8];
        let ours = [room.as_mut_ptr() as usize, room.len()];
        // Whoever may look finds nothing there; whoever may not is told so first.
        let theirs = [ZEROS.as_ptr() as usize, room.len()];
        call!(libc::SYS_process_vm_readv, SUPERVISOR, ours.as_ptr(), 1, theirs.as_ptr(), 1, 0)
    }),
    (18, "steal-descriptor", || {
        let fd = call!(libc::SYS_pidfd_open, SUPERVISOR, 0);
        if fd < 0 { fd } else { call!(libc::SYS_pidfd_getfd, fd, 3, 0) }
    }),
    (19, "bpf", || {
        // A map: an array of one number.
        let mut map = [0u32; 18];
        map[..4].copy_from_slice(&[2, 4, 8, 1]);
        call!(libc::SYS_bpf, 0, map.as_ptr(), size_of_val(&map))
    }),
    (19, "userfaultfd", || call!(libc::SYS_userfaultfd, 1)),
    (19, "io-uring", || {
        let mut parameters = [0u64; 15];
        call!(libc::SYS_io_uring_setup, 4, parameters.as_mut_ptr())
    }),
    (19, "keyctl", || call!(libc::SYS_keyctl, 0, -3, 1)),
    (19, "add-key", || call!(libc::SYS_add_key, c"user".as_ptr(), c"x".as_ptr(), c"y".as_ptr(), 1, -3)),
    (19, "request-key", || {
        // One that is there, if it can be made.
        call!(libc::SYS_add_key, c"user".as_ptr(), c"forkyard".as_ptr(), c"y".as_ptr(), 1, -2);
        call!(libc::SYS_request_key, c"user".as_ptr(), c"forkyard".as_ptr(), 0, 0)
    }),
    (19, "perf-event", || {
        // The time that this process takes, outside of the kernel: what anybody may count where nobody forbids it.
        let mut event = [0u64; 8];
        (event[0], event[1], event[5]) = (1 | 64 << 32, 1, 1 << 5);
        call!(libc::SYS_perf_event_open, event.as_ptr(), 0, -1, -1, 0)
    }),
    (19, "kexec", || call!(libc::SYS_kexec_load, 0, 0, 0, 0)),
    (19, "init-module", || call!(libc::SYS_init_module, ZEROS.as_ptr(), PAGE, c"".as_ptr())),
    (19, "delete-module", || call!(libc::SYS_delete_module, c"overlay".as_ptr(), 0)),
    (19, "reboot", || call!(libc::SYS_reboot, 0xfee1_dead_u32, 672274793, 0x89ab_cdef_u32, 0)),
    (19, "swapon", || call!(libc::SYS_swapon, c"/tmp/x".as_ptr(), 0)),
    (19, "acct", || call!(libc::SYS_acct, c"/tmp/x".as_ptr())),
    (19, "quotactl", || call!(libc::SYS_quotactl, 0, c"/dev/sda".as_ptr(), 0, 0)),
    (19, "fanotify", || {
        const REPORT_FID: u32 = 0x200; // needs no rights
        call!(libc::SYS_fanotify_init, REPORT_FID, 0)
    }),
    (19, "sethostname", || call!(libc::SYS_sethostname, c"evil".as_ptr(), 4)),
    (19, "syslog", || {
        let mut room = [0u8; 16];
        call!(libc::SYS_syslog, 3, room.as_mut_ptr(), room.len())
    }),
    (19, "open-by-handle", || call!(libc::SYS_open_by_handle_at, libc::AT_FDCWD, ZEROS.as_ptr(), 0)),
    (19, "vsock", || call!(libc::SYS_socket, libc::AF_VSOCK, libc::SOCK_STREAM, 0)),
    (19, "packet-socket", || call!(libc::SYS_socket, libc::AF_PACKET, libc::SOCK_RAW, 0)),
    (19, "raw-socket", || call!(libc::SYS_socket, libc::AF_INET, libc::SOCK_RAW, 1)),
    (19, "odd-socket-type", || call!(libc::SYS_socket, libc::AF_INET, libc::SOCK_DCCP, 0)),
    (19, "odd-socket-protocol", || {
        call!(libc::SYS_socket, libc::AF_INET, libc::SOCK_STREAM, libc::IPPROTO_MPTCP)
    }),
    (19, "odd-socket-mix", || call!(libc::SYS_socket, libc::AF_INET, libc::SOCK_STREAM, libc::IPPROTO_UDP)),
    (19, "generic-netlink", || {
        call!(libc::SYS_socket, libc::AF_NETLINK, libc::SOCK_RAW, libc::NETLINK_GENERIC)
    }),
    (19, "odd-socket-pair", || {
        let mut pair = [0i32; 2];
        call!(libc::SYS_socketpair, libc::AF_TIPC, libc::SOCK_STREAM, 0, pair.as_mut_ptr())
    }),
    (19, "line-discipline", || {
        let slip = 1i32;
        let fd = open(c"/dev/ptmx", libc::O_RDWR | libc::O_NOCTTY);
        call!(libc::SYS_ioctl, fd, TIOCSETD, &raw const slip)
    }),
    (19, "alg-socket", || call!(libc::SYS_socket, libc::AF_ALG, libc::SOCK_SEQPACKET, 0)),
    (19, "new-interface", new_link),
    #[cfg(target_arch = "x86_64")]
    (19, "iopl", || call!(libc::SYS_iopl, 3)),
    #[cfg(target_arch = "x86_64")]
    (19, "x32-call", || call!(0x4000_0000 + 39)),
    #[cfg(target_arch = "x86_64")]
    (19, "32-bit-call", || {
        let result: i64;
        // SAFETY: the 32-bit getpid, which takes nothing; a filter that works ends this process.
        unsafe { std::arch::asm!("int 0x80", inlateout("rax") 20i64 => result, options(nostack)) };
        result
    }),
    (20, "release-agent", || open(c"/sys/fs/cgroup/release_agent", libc::O_WRONLY)),
    (20, "release-agent-v1", || open(c"/sys/fs/cgroup/memory/release_agent", libc::O_WRONLY)),
    (20, "cgroup-limit", || open(c"/sys/fs/cgroup/memory.max", libc::O_WRONLY)),
    (20, "mount-cgroup", || {
        call!(libc::SYS_mount, c"none".as_ptr(), c"/tmp".as_ptr(), c"cgroup".as_ptr(), 0, c"rdma".as_ptr())
    }),
    (20, "core-pattern", || open(c"/proc/sys/kernel/core_pattern", libc::O_WRONLY)),
    (20, "modprobe", || open(c"/proc/sys/kernel/modprobe", libc::O_WRONLY)),
    (20, "uevent-helper", || open(c"/sys/kernel/uevent_helper", libc::O_WRONLY)),
    (20, "binfmt", || open(c"/proc/sys/fs/binfmt_misc/register", libc::O_WRONLY)),
    (20, "sysrq", || open(c"/proc/sysrq-trigger", libc::O_WRONLY)),
    (20, "kcore", || open(c"/proc/kcore", libc::O_RDONLY)),
    (21, "tiocsti", || {
        let fd = open(c"/dev/ptmx", libc::O_RDWR | libc::O_NOCTTY);
        call!(libc::SYS_ioctl, fd, libc::TIOCSTI, c"x".as_ptr())
    }),
    (21, "tiocsti-own-terminal", || call!(libc::SYS_ioctl, 0, libc::TIOCSTI, c"x".as_ptr())),
    (21, "tioclinux", || call!(libc::SYS_ioctl, 0, libc::TIOCLINUX, c"\x02".as_ptr())),
    (21, "inherited-descriptors", || {
        // 0 to 2 are stdio. Success would be one more.
        // SAFETY: asks for flags of numbers, touches no memory.
        let open: Vec<i32> = (3..1024).filter(|fd| unsafe { libc::fcntl(*fd, libc::F_GETFD) } >= 0).collect();
        // SAFETY: sets our own errno.
        unsafe { *libc::__errno_location() = libc::EBADF };
        if open.is_empty() { -1 } else { 0 }
    }),
    (23, "kernel-log", || open(c"/dev/kmsg", libc::O_WRONLY)),
    (23, "kernel-log-read", || open(c"/proc/kmsg", libc::O_RDONLY)),
    (23, "console", || open(c"/dev/console", libc::O_WRONLY)),
    (23, "supervisor-output", || open(c"/proc/1/fd/1", libc::O_WRONLY)),
    (23, "supervisor-errors", || open(c"/proc/1/fd/2", libc::O_WRONLY)),
    (23, "system-log", || datagram(b"/dev/log")),
    (23, "journal", || datagram(b"/run/systemd/journal/socket")),
    (23, "journal-log", || datagram(b"/run/systemd/journal/dev-log")),
    (23, "audit", audit),
    (25, "set-clock", || call!(libc::SYS_clock_settime, 0, ZEROS.as_ptr())),
    (25, "adjust-clock", || {
        // One second more, at once (ADJ_SETOFFSET).
        let mut time = [0u64; 32];
        (time[0], time[9]) = (0x100, 1);
        call!(libc::SYS_clock_adjtime, 0, time.as_ptr())
    }),
    (25, "higher-priority", || call!(libc::SYS_setpriority, libc::PRIO_PROCESS, 0, -20)),
    (25, "real-time", || call!(libc::SYS_sched_setscheduler, 0, libc::SCHED_FIFO, &raw const HIGHEST)),
    (25, "idle-supervisor", || call!(libc::SYS_sched_setscheduler, SUPERVISOR, SCHED_IDLE, &raw const ONLY)),
    (25, "nice-supervisor", || call!(libc::SYS_setpriority, libc::PRIO_PROCESS, SUPERVISOR, 19)),
    (25, "nice-everybody", || call!(libc::SYS_setpriority, libc::PRIO_USER, 0, 19)),
    (25, "pin-supervisor", || call!(libc::SYS_sched_setaffinity, SUPERVISOR, 8, &raw const FIRST_PROCESSOR)),
    (25, "starve-supervisor-disk", || call!(libc::SYS_ioprio_set, 1, SUPERVISOR, IOPRIO_IDLE)),
    (25, "blind-supervisor", || {
        call!(libc::SYS_prlimit64, SUPERVISOR, libc::RLIMIT_NOFILE, NO_LIMIT.as_ptr(), 0)
    }),
    (24, "clone-sibling", || clone(libc::CLONE_PARENT)),
    (24, "orphans-to-supervisor", || call!(libc::SYS_prctl, libc::PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)),
    (25, "more-processes", || call!(libc::SYS_prlimit64, 0, libc::RLIMIT_NPROC, ENDLESS.as_ptr(), 0)),
    (25, "spared-by-oom", || write(c"/proc/self/oom_score_adj", "-1000")),
    (25, "supervisor-first-at-oom", || write(c"/proc/1/oom_score_adj", "1000")),
    (25, "supervisor-autogroup", || write(c"/proc/1/autogroup", "19")),
];
