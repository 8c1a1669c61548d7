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
    let ways: [(&str, fn(&mut [u32; 7])); 3] = [
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
