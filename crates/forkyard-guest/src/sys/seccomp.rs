//! The system call filter: a balanced tree over ranges of numbers.
//!
//! The kernel runs a new filter once for every system call number to fill its action cache, so a chain of comparisons costs the
//! square of its length to install (0.8 ms); the tree costs a sixteenth.

use libc::sock_filter;
use rustix::io::Result;

use super::check;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    Allow,
    /// "Operation not permitted": the call exists and is refused.
    Refuse,
    /// "Function not implemented": callers fall back to an older call.
    Unknown,
    /// clone: no new namespace, no sibling.
    Clone,
    /// prctl: whoever is the reaper of what is below it stays that.
    StaysReaper,
    /// ioctl: no typing into a terminal for somebody else, and no other line discipline than a terminal's: each is a module.
    Ioctl,
    /// socket: families that are confined to the network namespace, and of them what programs use: for any other the kernel
    /// would load a module.
    Socket,
    /// socketpair: of Unix sockets only. For other families it makes a socket before it finds that it can't make two.
    SocketPair,
    /// The first argument names a process: only the caller itself. The supervisor has the same user as its commands, and
    /// whoever took its descriptors or its processor away would blind the watchdog.
    OnlySelf,
    /// Threads are pinned by their numbers, so only the supervisor's own is refused.
    NotSupervisor,
    /// The first argument says what the second one names: only a process, and only the caller itself.
    OnlyOwnPriority(u32),
}

/// Calls that reach for the machine or for kernel code that an agent has no use for.
const REFUSED: &[libc::c_long] = &[
    libc::SYS_acct,
    libc::SYS_bpf,
    libc::SYS_chroot,
    libc::SYS_clock_settime,
    libc::SYS_delete_module,
    libc::SYS_fanotify_init,
    libc::SYS_finit_module,
    libc::SYS_fsconfig,
    libc::SYS_fsmount,
    libc::SYS_fsopen,
    libc::SYS_fspick,
    libc::SYS_init_module,
    libc::SYS_kexec_file_load,
    libc::SYS_kexec_load,
    libc::SYS_mount,
    libc::SYS_mount_setattr,
    libc::SYS_move_mount,
    libc::SYS_open_by_handle_at,
    libc::SYS_open_tree,
    libc::SYS_perf_event_open,
    libc::SYS_pivot_root,
    libc::SYS_quotactl,
    libc::SYS_quotactl_fd,
    libc::SYS_reboot,
    libc::SYS_setdomainname,
    libc::SYS_sethostname,
    libc::SYS_setns,
    libc::SYS_settimeofday,
    libc::SYS_swapoff,
    libc::SYS_swapon,
    libc::SYS_syslog,
    libc::SYS_umount2,
    libc::SYS_unshare,
    libc::SYS_vhangup,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_ioperm,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_iopl,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_modify_ldt,
];

/// Calls that programs probe for and live without.
const UNKNOWN: &[libc::c_long] = &[
    libc::SYS_add_key,
    libc::SYS_clone3, // its flags lie in memory, where a filter can't look: glibc falls back to clone
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    libc::SYS_io_uring_setup,
    libc::SYS_keyctl,
    libc::SYS_memfd_secret,
    libc::SYS_request_key,
    libc::SYS_userfaultfd,
];

/// The first number that this policy has not looked at; newer calls do not exist inside.
const FIRST_UNSEEN: u32 = 463;
/// statmount … lsm_list_modules: of no use inside.
const UNUSED: std::ops::Range<u32> = 457..462;

#[cfg(target_arch = "x86_64")]
const ARCH: u32 = 0xC000_003E;
#[cfg(target_arch = "aarch64")]
const ARCH: u32 = 0xC000_00B7;
/// x32 calls on x86-64 carry this bit.
const X32_BIT: u32 = 0x4000_0000;

/// Namespaces, and a child that is not below who made it: nobody would find it when a command is cancelled.
const REFUSED_FLAGS: u32 = (libc::CLONE_PARENT
    | libc::CLONE_NEWNS
    | libc::CLONE_NEWCGROUP
    | libc::CLONE_NEWUTS
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWUSER
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWNET) as u32
    | 0x80; // CLONE_NEWTIME

const IOPRIO_WHO_PROCESS: u32 = 1;
/// The guest, inside.
const SUPERVISOR_PID: u32 = 1;

/// What a socket's type is apart from its flags.
const SOCKET_TYPES: u32 = 0xf;
const NETLINK_PROTOCOLS: &[libc::c_int] = &[
    libc::NETLINK_ROUTE,
    libc::NETLINK_SOCK_DIAG,
    libc::NETLINK_AUDIT, // login programs want to be told that nobody listens
    libc::NETLINK_KOBJECT_UEVENT,
];
const TIOCSETD: u32 = 0x5423;

const LOAD: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
const JUMP_EQ: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
const JUMP_GE: u16 = (libc::BPF_JMP | libc::BPF_JGE | libc::BPF_K) as u16;
const JUMP_SET: u16 = (libc::BPF_JMP | libc::BPF_JSET | libc::BPF_K) as u16;
const AND: u16 = (libc::BPF_ALU | libc::BPF_AND | libc::BPF_K) as u16;
const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;

const OFFSET_NUMBER: u32 = 0;
const OFFSET_ARCH: u32 = 4;
const OFFSET_ARG0: u32 = 16;
const OFFSET_ARG1: u32 = 24;
const OFFSET_ARG2: u32 = 32;

const ALLOW: u32 = libc::SECCOMP_RET_ALLOW;
const KILL: u32 = libc::SECCOMP_RET_KILL_PROCESS;
const fn errno(errno: libc::c_int) -> u32 {
    libc::SECCOMP_RET_ERRNO | errno as u32
}

fn verdict(number: u32) -> Verdict {
    let call = libc::c_long::from(number);
    match call {
        libc::SYS_clone => Verdict::Clone,
        libc::SYS_prctl => Verdict::StaysReaper,
        libc::SYS_ioctl => Verdict::Ioctl,
        libc::SYS_socket => Verdict::Socket,
        libc::SYS_socketpair => Verdict::SocketPair,
        libc::SYS_prlimit64
        | libc::SYS_sched_setattr
        | libc::SYS_sched_setparam
        | libc::SYS_sched_setscheduler => Verdict::OnlySelf,
        libc::SYS_sched_setaffinity => Verdict::NotSupervisor,
        libc::SYS_setpriority => Verdict::OnlyOwnPriority(libc::PRIO_PROCESS),
        libc::SYS_ioprio_set => Verdict::OnlyOwnPriority(IOPRIO_WHO_PROCESS),
        _ if REFUSED.contains(&call) => Verdict::Refuse,
        _ if number >= FIRST_UNSEEN || UNUSED.contains(&number) || UNKNOWN.contains(&call) => {
            Verdict::Unknown
        }
        _ => Verdict::Allow,
    }
}

fn op(code: u16, jt: u8, jf: u8, k: u32) -> sock_filter {
    sock_filter { code, jt, jf, k }
}

fn leaf(verdict: Verdict) -> Vec<sock_filter> {
    let ret = |k| op(RETURN, 0, 0, k);
    match verdict {
        Verdict::Allow => vec![ret(ALLOW)],
        Verdict::Refuse => vec![ret(errno(libc::EPERM))],
        Verdict::Unknown => vec![ret(errno(libc::ENOSYS))],
        Verdict::Clone => vec![
            op(LOAD, 0, 0, OFFSET_ARG0),
            op(JUMP_SET, 0, 1, REFUSED_FLAGS),
            ret(errno(libc::EPERM)),
            ret(ALLOW),
        ],
        Verdict::StaysReaper => vec![
            op(LOAD, 0, 0, OFFSET_ARG0),
            op(JUMP_EQ, 0, 3, libc::PR_SET_CHILD_SUBREAPER as u32),
            op(LOAD, 0, 0, OFFSET_ARG1),
            op(JUMP_EQ, 0, 1, 0),
            ret(errno(libc::EPERM)),
            ret(ALLOW),
        ],
        // The kernel looks at the low half of the request only, and so do we.
        Verdict::Ioctl => vec![
            op(LOAD, 0, 0, OFFSET_ARG1),
            op(JUMP_EQ, 2, 0, libc::TIOCSTI as u32),
            op(JUMP_EQ, 1, 0, libc::TIOCLINUX as u32),
            op(JUMP_EQ, 0, 1, TIOCSETD),
            ret(errno(libc::EPERM)),
            ret(ALLOW),
        ],
        // Numbers of processes are 32 bits wide, of which the low half is all that the kernel reads.
        Verdict::OnlySelf => {
            vec![op(LOAD, 0, 0, OFFSET_ARG0), op(JUMP_EQ, 1, 0, 0), ret(errno(libc::EPERM)), ret(ALLOW)]
        }
        Verdict::NotSupervisor => vec![
            op(LOAD, 0, 0, OFFSET_ARG0),
            op(JUMP_EQ, 0, 1, SUPERVISOR_PID),
            ret(errno(libc::EPERM)),
            ret(ALLOW),
        ],
        Verdict::OnlyOwnPriority(process) => vec![
            op(LOAD, 0, 0, OFFSET_ARG0),
            op(JUMP_EQ, 0, 2, process),
            op(LOAD, 0, 0, OFFSET_ARG1),
            op(JUMP_EQ, 1, 0, 0),
            ret(errno(libc::EPERM)),
            ret(ALLOW),
        ],
        // vsock in particular knows no namespaces and would reach the hypervisor.
        Verdict::Socket => {
            let netlink = one_of(OFFSET_ARG2, NETLINK_PROTOCOLS, libc::EPROTONOSUPPORT);
            let blocks = [internet(libc::IPPROTO_ICMP), internet(libc::IPPROTO_ICMPV6), netlink];
            let families = [libc::AF_INET, libc::AF_INET6, libc::AF_NETLINK];
            let mut program =
                vec![op(LOAD, 0, 0, OFFSET_ARG0), op(JUMP_EQ, 0, 1, libc::AF_UNIX as u32), ret(ALLOW)];
            // Of those that follow each other, from behind the jump that leads to it.
            let mut to_block = families.len();
            for (family, block) in families.iter().zip(&blocks) {
                program.push(op(JUMP_EQ, short(to_block), 0, *family as u32));
                to_block += block.len() - 1;
            }
            program.push(ret(errno(libc::EAFNOSUPPORT)));
            program.extend(blocks.into_iter().flatten());
            program
        }
        Verdict::SocketPair => one_of(OFFSET_ARG0, &[libc::AF_UNIX], libc::EAFNOSUPPORT),
    }
}

/// How far a jump goes.
fn short(instructions: usize) -> u8 {
    u8::try_from(instructions).expect("a half of this tree stays far below 256 instructions")
}

/// A socket's type and protocol: for a pair that no protocol has, the kernel would look for a module.
fn internet(control: libc::c_int) -> Vec<sock_filter> {
    let streams = one_of(OFFSET_ARG2, &[libc::IPPROTO_IP, libc::IPPROTO_TCP], libc::EPROTONOSUPPORT);
    let datagrams =
        one_of(OFFSET_ARG2, &[libc::IPPROTO_IP, libc::IPPROTO_UDP, control], libc::EPROTONOSUPPORT);
    let mut program = vec![
        op(LOAD, 0, 0, OFFSET_ARG1),
        op(AND, 0, 0, SOCKET_TYPES),
        op(JUMP_EQ, 4, 0, libc::SOCK_STREAM as u32),
        op(JUMP_EQ, 3 + short(streams.len()), 0, libc::SOCK_DGRAM as u32),
        op(JUMP_EQ, 1, 0, libc::SOCK_RAW as u32),
        op(RETURN, 0, 0, errno(libc::ESOCKTNOSUPPORT)),
        op(RETURN, 0, 0, errno(libc::EPERM)), // as to anybody without the right to it
    ];
    program.extend(streams);
    program.extend(datagrams);
    program
}

/// Allows a call whose argument is one of these.
fn one_of(argument: u32, values: &[libc::c_int], otherwise: libc::c_int) -> Vec<sock_filter> {
    let mut program = vec![op(LOAD, 0, 0, argument)];
    for (i, value) in values.iter().enumerate() {
        program.push(op(JUMP_EQ, (values.len() - i) as u8, 0, *value as u32));
    }
    program.extend([op(RETURN, 0, 0, errno(otherwise)), op(RETURN, 0, 0, ALLOW)]);
    program
}

/// Ranges that start at the given numbers, halved until one is left.
fn tree(ranges: &[(u32, Verdict)]) -> Vec<sock_filter> {
    if let [(_, verdict)] = ranges {
        return leaf(*verdict);
    }
    let (low, high) = ranges.split_at(ranges.len() / 2);
    let (below, above) = (tree(low), tree(high));
    let mut program = vec![op(JUMP_GE, short(below.len()), 0, high[0].0)];
    program.extend(below);
    program.extend(above);
    program
}

/// The filter, to be made once and installed many times.
pub fn program() -> Vec<sock_filter> {
    let mut ranges: Vec<(u32, Verdict)> = Vec::new();
    for number in 0..=FIRST_UNSEEN {
        let verdict = verdict(number);
        if ranges.last().map(|(_, last)| *last) != Some(verdict) {
            ranges.push((number, verdict));
        }
    }
    let mut program = vec![
        op(LOAD, 0, 0, OFFSET_ARCH),
        op(JUMP_EQ, 1, 0, ARCH),
        op(RETURN, 0, 0, KILL),
        op(LOAD, 0, 0, OFFSET_NUMBER),
        op(JUMP_GE, 0, 1, X32_BIT),
        op(RETURN, 0, 0, KILL),
    ];
    program.extend(tree(&ranges));
    program
}

/// Binds this process and all its children. Needs no_new_privs.
pub fn install(program: &[sock_filter]) -> Result<()> {
    let filter = libc::sock_fprog {
        len: u16::try_from(program.len()).map_err(|_| rustix::io::Errno::INVAL)?,
        filter: program.as_ptr().cast_mut(),
    };
    // SAFETY: `filter` points at `program`, which outlives the call; the kernel only reads it.
    check(unsafe { libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, 0u32, &raw const filter) })
        .map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs the filter as the kernel would.
    fn judge(program: &[sock_filter], arch: u32, number: u32, args: [u32; 3]) -> u32 {
        let (mut at, mut value) = (0usize, 0u32);
        loop {
            let i = program[at];
            at += 1;
            match i.code {
                LOAD => {
                    value = match i.k {
                        OFFSET_NUMBER => number,
                        OFFSET_ARCH => arch,
                        OFFSET_ARG0 => args[0],
                        OFFSET_ARG1 => args[1],
                        OFFSET_ARG2 => args[2],
                        other => panic!("offset {other}"),
                    }
                }
                AND => value &= i.k,
                RETURN => return i.k,
                code => {
                    let taken = match code {
                        JUMP_EQ => value == i.k,
                        JUMP_GE => value >= i.k,
                        JUMP_SET => value & i.k != 0,
                        other => panic!("code {other:x}"),
                    };
                    at += usize::from(if taken { i.jt } else { i.jf });
                }
            }
        }
    }

    #[test]
    fn the_tree_says_what_the_table_says() {
        let program = program();
        for number in 0..600 {
            let expected = match verdict(number) {
                Verdict::Refuse => errno(libc::EPERM),
                Verdict::Unknown => errno(libc::ENOSYS),
                Verdict::Allow
                | Verdict::Clone
                | Verdict::StaysReaper
                | Verdict::Ioctl
                | Verdict::OnlySelf
                | Verdict::NotSupervisor => ALLOW,
                Verdict::OnlyOwnPriority(0) => ALLOW,
                Verdict::OnlyOwnPriority(_) => errno(libc::EPERM),
                Verdict::Socket | Verdict::SocketPair => errno(libc::EAFNOSUPPORT),
            };
            assert_eq!(judge(&program, ARCH, number, [0; 3]), expected, "call {number}");
        }
    }

    /// By their names, so that none falls out of a list unseen.
    #[test]
    fn what_reaches_for_the_machine_is_refused() {
        let program = program();
        let all = |calls: &[libc::c_long], expected| {
            for number in calls {
                assert_eq!(judge(&program, ARCH, *number as u32, [0; 3]), errno(expected), "call {number}");
            }
        };
        all(
            &[
                libc::SYS_bpf,
                libc::SYS_perf_event_open,
                libc::SYS_mount,
                libc::SYS_umount2,
                libc::SYS_pivot_root,
                libc::SYS_chroot,
                libc::SYS_unshare,
                libc::SYS_setns,
                libc::SYS_open_tree,
                libc::SYS_move_mount,
                libc::SYS_mount_setattr,
                libc::SYS_fsopen,
                libc::SYS_fsmount,
                libc::SYS_open_by_handle_at,
                libc::SYS_fanotify_init,
                libc::SYS_init_module,
                libc::SYS_finit_module,
                libc::SYS_kexec_load,
                libc::SYS_kexec_file_load,
                libc::SYS_reboot,
                libc::SYS_swapon,
                libc::SYS_syslog,
                libc::SYS_quotactl,
                libc::SYS_clock_settime,
                libc::SYS_sethostname,
            ],
            libc::EPERM,
        );
        all(
            &[
                libc::SYS_io_uring_setup,
                libc::SYS_io_uring_enter,
                libc::SYS_io_uring_register,
                libc::SYS_userfaultfd,
                libc::SYS_keyctl,
                libc::SYS_add_key,
                libc::SYS_request_key,
                libc::SYS_clone3,
                libc::SYS_memfd_secret,
            ],
            libc::ENOSYS,
        );
    }

    #[test]
    fn arguments_and_other_architectures_are_judged() {
        let program = program();
        let call = |number: libc::c_long, [a, b]: [u32; 2]| judge(&program, ARCH, number as u32, [a, b, 0]);
        assert_eq!(call(libc::SYS_clone, [libc::CLONE_NEWUSER as u32, 0]), errno(libc::EPERM));
        assert_eq!(call(libc::SYS_clone, [libc::CLONE_VM as u32 | libc::SIGCHLD as u32, 0]), ALLOW);
        assert_eq!(call(libc::SYS_clone, [libc::CLONE_PARENT as u32, 0]), errno(libc::EPERM));
        let reaper = libc::PR_SET_CHILD_SUBREAPER as u32;
        assert_eq!(call(libc::SYS_prctl, [reaper, 0]), errno(libc::EPERM));
        assert_eq!(call(libc::SYS_prctl, [reaper, 1]), ALLOW);
        assert_eq!(call(libc::SYS_prctl, [libc::PR_SET_NAME as u32, 0]), ALLOW);
        assert_eq!(call(libc::SYS_ioctl, [0, libc::TIOCSTI as u32]), errno(libc::EPERM));
        assert_eq!(call(libc::SYS_ioctl, [0, libc::TIOCLINUX as u32]), errno(libc::EPERM));
        assert_eq!(call(libc::SYS_ioctl, [0, TIOCSETD]), errno(libc::EPERM));
        assert_eq!(call(libc::SYS_ioctl, [0, libc::TIOCGWINSZ as u32]), ALLOW);
        for family in [libc::AF_UNIX, libc::AF_INET, libc::AF_INET6, libc::AF_NETLINK] {
            assert_eq!(call(libc::SYS_socket, [family as u32, libc::SOCK_DGRAM as u32]), ALLOW);
        }
        for family in [libc::AF_VSOCK, libc::AF_ALG, libc::AF_PACKET] {
            assert_eq!(call(libc::SYS_socket, [family as u32, 0]), errno(libc::EAFNOSUPPORT));
        }
        for family in [libc::AF_INET, libc::AF_INET6, libc::AF_TIPC] {
            assert_eq!(call(libc::SYS_socketpair, [family as u32, 1]), errno(libc::EAFNOSUPPORT));
        }
        assert_eq!(call(libc::SYS_socketpair, [libc::AF_UNIX as u32, 1]), ALLOW);
        let socket = |family: i32, kind: i32, protocol: i32| {
            judge(&program, ARCH, libc::SYS_socket as u32, [family as u32, kind as u32, protocol as u32])
        };
        let (stream, flags) = (libc::SOCK_STREAM, libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK);
        assert_eq!(socket(libc::AF_NETLINK, libc::SOCK_RAW | flags, libc::NETLINK_ROUTE), ALLOW);
        for (family, control, other) in [
            (libc::AF_INET, libc::IPPROTO_ICMP, libc::IPPROTO_ICMPV6),
            (libc::AF_INET6, libc::IPPROTO_ICMPV6, libc::IPPROTO_ICMP),
        ] {
            for protocol in [0, libc::IPPROTO_TCP] {
                assert_eq!(socket(family, stream | flags, protocol), ALLOW);
            }
            for protocol in [0, libc::IPPROTO_UDP, control] {
                assert_eq!(socket(family, libc::SOCK_DGRAM | flags, protocol), ALLOW);
            }
            let odd = [libc::IPPROTO_SCTP, libc::IPPROTO_DCCP, libc::IPPROTO_MPTCP, other];
            for protocol in odd.into_iter().chain([libc::IPPROTO_UDP, control]) {
                assert_eq!(socket(family, stream, protocol), errno(libc::EPROTONOSUPPORT));
            }
            for protocol in odd.into_iter().chain([libc::IPPROTO_TCP]) {
                assert_eq!(socket(family, libc::SOCK_DGRAM, protocol), errno(libc::EPROTONOSUPPORT));
            }
            assert_eq!(socket(family, libc::SOCK_RAW | flags, libc::IPPROTO_TCP), errno(libc::EPERM));
            for kind in [0, libc::SOCK_RDM, libc::SOCK_SEQPACKET, libc::SOCK_DCCP, 10] {
                assert_eq!(socket(family, kind | flags, 0), errno(libc::ESOCKTNOSUPPORT));
            }
        }
        for protocol in [libc::NETLINK_GENERIC, libc::NETLINK_NETFILTER, libc::NETLINK_XFRM] {
            assert_eq!(socket(libc::AF_NETLINK, libc::SOCK_RAW, protocol), errno(libc::EPROTONOSUPPORT));
        }
        for number in [libc::SYS_prlimit64, libc::SYS_sched_setscheduler] {
            assert_eq!(call(number, [0, 7]), ALLOW);
            assert_eq!(call(number, [1, 7]), errno(libc::EPERM));
            assert_eq!(call(number, [77, 7]), errno(libc::EPERM));
        }
        assert_eq!(call(libc::SYS_sched_setaffinity, [1, 8]), errno(libc::EPERM));
        assert_eq!(call(libc::SYS_sched_setaffinity, [77, 8]), ALLOW);
        for (number, process) in [(libc::SYS_setpriority, 0), (libc::SYS_ioprio_set, 1)] {
            assert_eq!(call(number, [process, 0]), ALLOW);
            assert_eq!(call(number, [process, 1]), errno(libc::EPERM));
            assert_eq!(call(number, [process + 1, 0]), errno(libc::EPERM));
        }
        assert_eq!(judge(&program, 0x4000_0003, 1, [0; 3]), KILL, "32-bit calls");
        assert_eq!(judge(&program, ARCH, X32_BIT | 1, [0; 3]), KILL, "x32 calls");
    }
}
