//! More than a sandbox may have.

use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::process::ExitCode;
use std::time::Duration;

/// Folders of this many files: none is slow by itself.
const IN_A_FOLDER: u64 = 1000;

/// Empty files without end, until one can't be made.
pub fn inodes(dir: &str) -> ExitCode {
    for number in 0u64.. {
        let folder = format!("{dir}/{}", number / IN_A_FOLDER);
        let made = if number.is_multiple_of(IN_A_FOLDER) { std::fs::create_dir_all(&folder) } else { Ok(()) };
        if let Err(e) = made.and_then(|()| std::fs::File::create(format!("{folder}/{number}")).map(drop)) {
            println!("{number} {e}");
            break;
        }
    }
    ExitCode::FAILURE
}

/// Files deeper than any path leads, each with a second name in a folder below them. Says that it is done.
pub fn deep() -> ExitCode {
    const DEPTH: u32 = 100;
    const FILES: u32 = 10;
    let made = || {
        let name = "a".repeat(250);
        for _ in 0..DEPTH {
            std::fs::create_dir(&name)?;
            std::env::set_current_dir(&name)?;
        }
        std::fs::create_dir("s")?;
        for i in 0..FILES {
            std::fs::write(format!("f{i}"), "")?;
            std::fs::hard_link(format!("f{i}"), format!("s/g{i}"))?;
        }
        std::io::Result::Ok(())
    };
    match made() {
        Ok(()) => println!("done"),
        Err(e) => println!("{e}"),
    }
    ExitCode::SUCCESS
}

/// A process that waits, and below it a chain of others: each lives for microseconds, makes the next and ends. Now and then one adds
/// a byte to the file.
pub fn hop(file: &str) -> ExitCode {
    const HOPS_A_BYTE: u32 = 10;
    // SAFETY: this process has one thread, and nothing that a child would do twice.
    unsafe {
        libc::signal(libc::SIGCHLD, libc::SIG_IGN);
        if libc::fork() != 0 {
            libc::pause();
            return ExitCode::SUCCESS;
        }
    }
    for hops in 1u32.. {
        // SAFETY: as above.
        unsafe {
            libc::setsid();
            if libc::fork() > 0 {
                libc::_exit(0);
            }
        }
        if hops.is_multiple_of(HOPS_A_BYTE) {
            let _ =
                std::fs::File::options().append(true).create(true).open(file).and_then(|mut f| f.write(b"."));
        }
    }
    ExitCode::SUCCESS
}

/// Of each file that is held.
const HELD_MIB: usize = 8;

/// Files without a name that nobody can look at, without end; a line for each MiB. It ends where a quota refuses it.
pub fn hold(way: &str, dir: &str) -> ExitCode {
    let dir = dir.to_string();
    let nobody_looks_in = || {
        // SAFETY: this process only; no memory of ours is touched.
        unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 0, 0, 0, 0) };
    };
    match way {
        "closed" => {
            nobody_looks_in();
            fill(&dir, |file, held| held.push(file.into()));
        }
        "mapped" => fill(&dir, map),
        "closed-mapped" => {
            nobody_looks_in();
            fill(&dir, map);
        }
        "passed" => fill(&dir, |file, held| {
            let (one, other) = std::os::unix::net::UnixStream::pair().expect("a pair of sockets");
            crate::sys::socket::send(one.as_fd(), b".", &[file.as_fd()]).expect("on its way");
            held.extend([OwnedFd::from(one), other.into()]);
        }),
        "thread" | "survivor" => {
            let thread = std::thread::spawn(move || {
                // SAFETY: no descriptor has such a number; what changes is whose table this thread has.
                unsafe {
                    libc::syscall(libc::SYS_close_range, u32::MAX, u32::MAX, libc::CLOSE_RANGE_UNSHARE)
                };
                fill(&dir, |file, held| held.push(file.into()));
                std::process::exit(9)
            });
            if way == "survivor" {
                // SAFETY: ends this thread alone; the other one has all that it uses.
                unsafe { libc::syscall(libc::SYS_exit, 0) };
            }
            let _ = thread.join();
        }
        _ => return ExitCode::FAILURE,
    }
    ExitCode::from(9)
}

fn fill(dir: &str, mut keep: impl FnMut(File, &mut Vec<OwnedFd>)) {
    let (mib, mut held) = (vec![7; 1 << 20], Vec::new());
    for number in 0u64.. {
        let path = format!("{dir}/held{number}");
        let Ok(mut file) = File::options().read(true).write(true).create_new(true).open(&path) else {
            return;
        };
        if std::fs::remove_file(path).is_err() {
            return;
        }
        for _ in 0..HELD_MIB {
            if file.write_all(&mib).is_err() {
                return;
            }
            println!();
            std::thread::sleep(Duration::from_millis(10));
        }
        keep(file, &mut held);
    }
}

/// A page of it is enough.
fn map(file: File, _: &mut Vec<OwnedFd>) {
    // SAFETY: a new mapping, that nothing refers to.
    unsafe {
        let nowhere = std::ptr::null_mut();
        libc::mmap(nowhere, 4096, libc::PROT_READ, libc::MAP_PRIVATE, file.as_raw_fd(), 0);
    }
}

/// All there are of something that the kernel counts for many. Tells how many; holds them until it is killed.
pub fn take(what: &str) -> ExitCode {
    let one = || match what {
        "terminals" => File::options().read(true).write(true).open("/dev/ptmx").ok().map(OwnedFd::from),
        // SAFETY: makes a new descriptor, if any, that only we own.
        "watchers" => unsafe {
            use std::os::fd::FromRawFd;
            let fd = libc::inotify_init1(libc::IN_CLOEXEC);
            (fd >= 0).then(|| OwnedFd::from_raw_fd(fd))
        },
        _ => None,
    };
    let all: Vec<OwnedFd> = std::iter::from_fn(one).collect();
    println!("{} {}", all.len(), std::io::Error::last_os_error());
    std::thread::sleep(Duration::from_secs(600));
    ExitCode::SUCCESS
}

/// Takes a file or folder out of the project by which its disk is limited. Tells the errno of each way; 0: it worked.
pub fn project(path: &str) -> ExitCode {
    const GET: libc::Ioctl = 0x801C_581F_u32 as libc::Ioctl;
    const SET: libc::Ioctl = 0x401C_5820_u32 as libc::Ioctl;
    /// Of the kernel's `struct fsxattr`: flags first, the project fourth.
    const PROJECT: usize = 3;
    const INHERIT: u32 = 0x200;
    let Ok(file) = std::fs::File::open(path) else { return ExitCode::FAILURE };
    type Way = (&'static str, fn(&mut [u32; 7]));
    let ways: [Way; 3] = [
        ("no-project", |it| it[PROJECT] = 0),
        ("another-project", |it| it[PROJECT] = it[PROJECT].wrapping_add(1)),
        ("not-inherited", |it| it[0] &= !INHERIT),
    ];
    for (name, change) in ways {
        let mut it = [0u32; 7];
        // SAFETY: the kernel reads or writes one struct of 28 bytes, which lives across the calls.
        let failed = unsafe {
            libc::ioctl(file.as_raw_fd(), GET, it.as_mut_ptr()) != 0 || {
                change(&mut it);
                libc::ioctl(file.as_raw_fd(), SET, it.as_ptr()) != 0
            }
        };
        let errno = std::io::Error::last_os_error().raw_os_error().unwrap_or(0);
        println!("{name} {}", if failed { errno } else { 0 });
    }
    ExitCode::SUCCESS
}

/// Works in a thread whose process has no first thread any more, in a session of its own, and is let go on by timers however often
/// it is stopped. Now and then it adds a byte to the file.
pub fn restless(file: &str) -> ExitCode {
    wake_oneself();
    // SAFETY: a plain call.
    unsafe { libc::setsid() };
    let file = file.to_string();
    std::thread::spawn(move || {
        use std::io::Write;
        loop {
            let until = std::time::Instant::now() + std::time::Duration::from_millis(5);
            while std::time::Instant::now() < until {}
            let _ = std::fs::File::options()
                .append(true)
                .create(true)
                .open(&file)
                .and_then(|mut f| f.write(b"."));
        }
    });
    end_first_thread()
}

/// The same process, with memory: so many MiB, one by one.
pub fn headless(mib: &str) -> ExitCode {
    let mib: usize = mib.parse().unwrap_or(0);
    super::memory::stay();
    std::thread::spawn(move || {
        let mut held = Vec::new();
        for _ in 0..mib {
            held.push(vec![1_u8; 1 << 20]);
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        println!("{} MiB are held", held.len());
        // SAFETY: nothing is left to be done.
        unsafe { libc::_exit(0) }
    });
    end_first_thread()
}

fn end_first_thread() -> ExitCode {
    // SAFETY: this thread alone ends; nothing of it is used by the other one.
    unsafe { libc::syscall(libc::SYS_exit, 0) };
    ExitCode::FAILURE
}

fn wake_oneself() {
    // SAFETY: values that live across the calls; the signal's own action is to go on.
    unsafe {
        let mut event: libc::sigevent = std::mem::zeroed();
        (event.sigev_notify, event.sigev_signo) = (libc::SIGEV_SIGNAL, libc::SIGCONT);
        let mut timer: libc::timer_t = std::mem::zeroed();
        let every = libc::timespec { tv_sec: 0, tv_nsec: 3_000_000 };
        let times = libc::itimerspec { it_interval: every, it_value: every };
        if libc::timer_create(libc::CLOCK_MONOTONIC, &raw mut event, &raw mut timer) == 0 {
            libc::timer_settime(timer, 0, &raw const times, std::ptr::null_mut());
        }
    }
}
