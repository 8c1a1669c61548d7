//! More than a sandbox may have.

use std::os::fd::AsRawFd;
use std::process::ExitCode;

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

/// A process that waits, and below it a chain of others: each lives for microseconds, makes the next and ends. Now and then one adds
/// a byte to the file.
pub fn hop(file: &str) -> ExitCode {
    use std::io::Write;
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
