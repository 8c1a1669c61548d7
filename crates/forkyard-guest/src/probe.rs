//! Attempts from inside a sandbox, for the attack suite: each is a real system call, reported as `name errno` (0: it worked) or
//! `name signal N`. It runs as a command of the sandbox, with no more rights than any other.

use std::process::ExitCode;

const PAGE: usize = 4096;

type Attempt = (&'static str, fn() -> libc::c_long);

/// Runs every attempt in a child of its own, since some are answered with a signal.
pub fn run() -> ExitCode {
    for (name, attempt) in ATTEMPTS {
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
                        println!("{name} signal {}", libc::WTERMSIG(status));
                    } else {
                        println!("{name} {}", libc::WEXITSTATUS(status));
                    }
                }
                _ => println!("{name} fork-failed"),
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

static ZEROS: [u64; PAGE / 8] = [0; PAGE / 8];

const ATTEMPTS: &[Attempt] = &[
    ("unshare-user", || call!(libc::SYS_unshare, libc::CLONE_NEWUSER)),
    ("unshare-mount", || call!(libc::SYS_unshare, libc::CLONE_NEWNS)),
    ("clone-user", || call!(libc::SYS_clone, libc::CLONE_NEWUSER | libc::SIGCHLD, 0, 0, 0, 0)),
    ("clone3", || call!(libc::SYS_clone3, ZEROS.as_ptr(), 88)),
    ("setns", || {
        let fd = open(c"/proc/self/ns/user", libc::O_RDONLY);
        call!(libc::SYS_setns, fd, 0)
    }),
    ("mount", || call!(libc::SYS_mount, c"none".as_ptr(), c"/tmp".as_ptr(), c"tmpfs".as_ptr(), 0, 0)),
    ("umount", || call!(libc::SYS_umount2, c"/proc".as_ptr(), libc::MNT_DETACH)),
    ("fsopen", || call!(libc::SYS_fsopen, c"tmpfs".as_ptr(), 0)),
    ("open-tree", || call!(libc::SYS_open_tree, libc::AT_FDCWD, c"/".as_ptr(), 1)),
    ("pivot-root", || call!(libc::SYS_pivot_root, c"/tmp".as_ptr(), c"/tmp".as_ptr())),
    ("chroot", || call!(libc::SYS_chroot, c"/tmp".as_ptr())),
    ("setuid-root", || call!(libc::SYS_setuid, 0)),
    ("mknod-disk", || {
        call!(libc::SYS_mknodat, libc::AT_FDCWD, c"/tmp/disk".as_ptr(), libc::S_IFBLK | 0o666, 0x0801)
    }),
    ("bpf", || call!(libc::SYS_bpf, 0, ZEROS.as_ptr(), 72)),
    ("userfaultfd", || call!(libc::SYS_userfaultfd, 1)),
    ("io-uring", || call!(libc::SYS_io_uring_setup, 4, ZEROS.as_ptr())),
    ("keyctl", || call!(libc::SYS_keyctl, 0, -3, 1)),
    ("add-key", || call!(libc::SYS_add_key, c"user".as_ptr(), c"x".as_ptr(), c"y".as_ptr(), 1, -3)),
    ("perf-event", || call!(libc::SYS_perf_event_open, ZEROS.as_ptr(), 0, -1, -1, 0)),
    ("kexec", || call!(libc::SYS_kexec_load, 0, 0, 0, 0)),
    ("init-module", || call!(libc::SYS_init_module, ZEROS.as_ptr(), PAGE, c"".as_ptr())),
    ("reboot", || call!(libc::SYS_reboot, 0xfee1_dead_u32, 672274793, 0x89ab_cdef_u32, 0)),
    ("swapon", || call!(libc::SYS_swapon, c"/tmp/x".as_ptr(), 0)),
    ("settime", || call!(libc::SYS_clock_settime, 0, ZEROS.as_ptr())),
    ("sethostname", || call!(libc::SYS_sethostname, c"evil".as_ptr(), 4)),
    ("syslog", || call!(libc::SYS_syslog, 3, ZEROS.as_ptr(), 16)),
    ("open-by-handle", || call!(libc::SYS_open_by_handle_at, libc::AT_FDCWD, ZEROS.as_ptr(), 0)),
    ("vsock", || call!(libc::SYS_socket, libc::AF_VSOCK, libc::SOCK_STREAM, 0)),
    ("packet-socket", || call!(libc::SYS_socket, libc::AF_PACKET, libc::SOCK_RAW, 0)),
    ("raw-socket", || call!(libc::SYS_socket, libc::AF_INET, libc::SOCK_RAW, 1)),
    ("alg-socket", || call!(libc::SYS_socket, libc::AF_ALG, libc::SOCK_SEQPACKET, 0)),
    ("tiocsti", || {
        let fd = open(c"/dev/ptmx", libc::O_RDWR | libc::O_NOCTTY);
        call!(libc::SYS_ioctl, fd, libc::TIOCSTI, c"x".as_ptr())
    }),
    ("ptrace-supervisor", || call!(libc::SYS_ptrace, libc::PTRACE_SEIZE, 1, 0, 0)),
    ("read-supervisor-memory", || open(c"/proc/1/mem", libc::O_RDONLY)),
    ("read-supervisor-environ", || open(c"/proc/1/environ", libc::O_RDONLY)),
    ("enter-supervisor-root", || open(c"/proc/1/root/etc", libc::O_RDONLY)),
    ("overwrite-supervisor-program", || open(c"/proc/1/exe", libc::O_WRONLY)),
    ("list-supervisor-descriptors", || open(c"/proc/1/fd", libc::O_RDONLY | libc::O_DIRECTORY)),
    ("steal-supervisor-descriptor", || {
        let fd = call!(libc::SYS_pidfd_open, 1, 0);
        if fd < 0 { fd } else { call!(libc::SYS_pidfd_getfd, fd, 3, 0) }
    }),
    ("sysrq", || open(c"/proc/sysrq-trigger", libc::O_WRONLY)),
    ("core-pattern", || open(c"/proc/sys/kernel/core_pattern", libc::O_WRONLY)),
    ("kcore", || open(c"/proc/kcore", libc::O_RDONLY)),
    ("write-usr", || open(c"/usr/bin/forkyard-was-here", libc::O_WRONLY | libc::O_CREAT)),
    ("write-dev", || open(c"/dev/forkyard-was-here", libc::O_WRONLY | libc::O_CREAT)),
    ("cgroup-release-agent", || open(c"/sys/fs/cgroup/release_agent", libc::O_WRONLY)),
    ("inherited-descriptors", || {
        // 0 to 2 are stdio. Success would be one more.
        // SAFETY: asks for flags of numbers, touches no memory.
        let open: Vec<i32> = (3..1024).filter(|fd| unsafe { libc::fcntl(*fd, libc::F_GETFD) } >= 0).collect();
        // SAFETY: sets our own errno.
        unsafe { *libc::__errno_location() = libc::EBADF };
        if open.is_empty() { -1 } else { 0 }
    }),
    #[cfg(target_arch = "x86_64")]
    ("x32-call", || call!(0x4000_0000 + 39)),
    #[cfg(target_arch = "x86_64")]
    ("32-bit-call", || {
        let result: i64;
        // SAFETY: the 32-bit getpid, which takes nothing; a filter that works ends this process.
        unsafe { std::arch::asm!("int 0x80", inlateout("rax") 20i64 => result, options(nostack)) };
        result
    }),
];
