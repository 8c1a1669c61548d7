//! More memory than a sandbox may have, where no process has it mapped.

use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::process::ExitCode;
use std::time::Duration;

const MIB: usize = 1 << 20;
/// Of each object that is held.
const OBJECT_MIB: usize = 8;
/// Between two MiB.
const PACE: Duration = Duration::from_millis(10);
const TABLE_REACH: usize = 2 * MIB;
const PAGE: usize = 4096;
/// The kernel takes 64 bytes for each.
const SEMAPHORES_A_MIB: libc::c_int = 16384;

/// Keeps this program's own pages where they are: a group of the kernel that is short of memory would take them away and read them
/// again for a long time before it says that there is none.
pub fn stay() {
    // SAFETY: touches nothing of ours. Where it is refused, all takes longer.
    unsafe { libc::mlockall(libc::MCL_CURRENT) };
}

/// Holds more and more of it; a line for each MiB. It ends where the kernel refuses it.
pub fn keep(way: &str) -> ExitCode {
    stay();
    let _ = match way {
        "file" => files(|file, held| {
            held.push(file.into());
            Ok(())
        }),
        "mapped" => files(|file, _| map(PAGE, libc::MAP_SHARED, Some(&file)).map(drop)),
        "passed" => files(|file, held| {
            let (one, other) = std::os::unix::net::UnixStream::pair()?;
            crate::sys::socket::send(one.as_fd(), b".", &[file.as_fd()])?;
            held.extend([OwnedFd::from(one), other.into()]);
            Ok(())
        }),
        "shared" => shared(),
        "segments" => segments(),
        "semaphores" => semaphores(),
        "sockets" => sockets(),
        "tables" => tables(),
        _ => return ExitCode::FAILURE,
    };
    ExitCode::from(9)
}

fn one_more() {
    println!();
    std::thread::sleep(PACE);
}

fn files(mut keep: impl FnMut(File, &mut Vec<OwnedFd>) -> std::io::Result<()>) -> std::io::Result<()> {
    let (mib, mut held) = (vec![7; MIB], Vec::new());
    loop {
        let file = rustix::fs::memfd_create("held", rustix::fs::MemfdFlags::CLOEXEC)?;
        let mut file = File::from(file);
        for _ in 0..OBJECT_MIB {
            file.write_all(&mib)?;
            one_more();
        }
        keep(file, &mut held)?;
    }
}

/// A new mapping, for ever.
fn map(bytes: usize, flags: libc::c_int, file: Option<&File>) -> std::io::Result<*mut u8> {
    let (flags, fd) = file.map_or((flags | libc::MAP_ANONYMOUS, -1), |file| (flags, file.as_raw_fd()));
    let rights = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a new mapping, that nothing refers to.
    let at = unsafe { libc::mmap(std::ptr::null_mut(), bytes, rights, flags | libc::MAP_NORESERVE, fd, 0) };
    if at == libc::MAP_FAILED { Err(std::io::Error::last_os_error()) } else { Ok(at.cast()) }
}

/// What processes could share: written, and let go of by the one that wrote it.
fn shared() -> std::io::Result<()> {
    loop {
        let at = map(OBJECT_MIB * MIB, libc::MAP_SHARED, None)?;
        for mib in 0..OBJECT_MIB {
            // SAFETY: inside of the mapping, which nothing else uses.
            unsafe {
                std::ptr::write_bytes(at.add(mib * MIB), 7, MIB);
                libc::madvise(at.add(mib * MIB).cast(), MIB, libc::MADV_DONTNEED);
            }
            one_more();
        }
    }
}

fn segments() -> std::io::Result<()> {
    loop {
        // SAFETY: a new segment, written within its bounds and let go of.
        unsafe {
            let id = libc::shmget(libc::IPC_PRIVATE, MIB, libc::IPC_CREAT | 0o600);
            let at = libc::shmat(id, std::ptr::null(), 0);
            if at.addr() == usize::MAX {
                return Err(std::io::Error::last_os_error());
            }
            std::ptr::write_bytes(at.cast::<u8>(), 7, MIB);
            libc::shmdt(at);
        }
        one_more();
    }
}

fn semaphores() -> std::io::Result<()> {
    loop {
        // SAFETY: makes something, and touches no memory of ours.
        if unsafe { libc::semget(libc::IPC_PRIVATE, SEMAPHORES_A_MIB, libc::IPC_CREAT | 0o600) } < 0 {
            return Err(std::io::Error::last_os_error());
        }
        one_more();
    }
}

/// Each is sent as much as it takes.
fn sockets() -> std::io::Result<()> {
    const SENT: usize = 32 << 10;
    let (mut held, mut bytes) = (Vec::new(), 0);
    loop {
        let (one, mut other) = std::os::unix::net::UnixStream::pair()?;
        other.set_nonblocking(true)?;
        while let Ok(sent @ 1..) = other.write(&[7; SENT]) {
            bytes += sent;
        }
        held.push((one, other));
        while bytes >= MIB {
            bytes -= MIB;
            one_more();
        }
    }
}

/// A page is read here and there, which takes a table of pages each time and no page of its own.
fn tables() -> std::io::Result<()> {
    const TABLES: usize = 16 * MIB / PAGE;
    loop {
        let at = map(TABLES * TABLE_REACH, libc::MAP_PRIVATE, None)?;
        // SAFETY: a hint for this mapping: no larger pages.
        unsafe { libc::madvise(at.cast(), TABLES * TABLE_REACH, libc::MADV_NOHUGEPAGE) };
        for table in 0..TABLES {
            // SAFETY: inside of the mapping; memory that nobody wrote is zero.
            unsafe { std::ptr::read_volatile(at.add(table * TABLE_REACH)) };
            if (table + 1).is_multiple_of(MIB / PAGE) {
                one_more();
            }
        }
    }
}
