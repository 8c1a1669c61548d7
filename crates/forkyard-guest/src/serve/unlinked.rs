//! Files without a name that somebody holds: no walk of folders finds them, and they fill the disk, or memory, all the same.

use std::collections::HashSet;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{AtFlags, FileType, MemfdFlags, Mode, OFlags, Stat, StatVfsMountFlags, StatxFlags};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};

use super::procs;
use crate::sys::process::shares_descriptors;

/// Descriptors and mappings looked at in one walk: more than commands have in earnest, and a fraction of a second.
const MAX_LOOKED_AT: usize = 200_000;
const OVERLAY: rustix::fs::FsWord = 0x794c_7630;
const BLOCK: u64 = 512;
/// `PIDFD_THREAD`: of this thread alone, whose descriptors may be its own. Since Linux 6.9.
const ONE_THREAD: PidfdFlags = PidfdFlags::from_bits_retain(OFlags::EXCL.bits());

/// Of the file system, and in it.
type Inode = (u64, u64);

/// What the commands hold.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Held {
    pub bytes: u64,
    /// There may be more: a process that can't be looked into, descriptors on their way through a socket, a mapped file that
    /// nobody has open any more.
    pub unseen: bool,
    /// Of any kind.
    pub descriptors: u64,
}

/// Such files on the disk of `upper`, as far as this thread may look into the commands.
pub fn on_disk(upper: BorrowedFd<'_>) -> Held {
    held(Place::of_disk(upper))
}

/// Such files in memory (memfd). Memory that processes share without a file is unseen.
pub fn in_memory() -> Held {
    match Place::of_memory() {
        Ok(place) => held(place),
        Err(_) => Held { unseen: true, ..Held::default() },
    }
}

fn held(place: Place) -> Held {
    let mut look =
        Look { place, open: HashSet::new(), mapped: HashSet::new(), looked_at: 0, held: Held::default() };
    for process in procs::all() {
        let looked = look.process(process.pid);
        look.settle(looked);
    }
    look.held.unseen |=
        look.looked_at > MAX_LOOKED_AT || look.mapped.iter().any(|it| !look.open.contains(it));
    look.held
}

/// It ended, or closed it, while it was looked at.
fn is_gone(e: Errno) -> bool {
    matches!(e, Errno::NOENT | Errno::SRCH)
}

fn errno(e: std::io::Error) -> Errno {
    Errno::from_io_error(&e).unwrap_or(Errno::IO)
}

/// Where the files lie that count.
struct Place {
    /// The mount by which the kernel tells of descriptors that lead there, if there is but one.
    mount: Option<u64>,
    /// File systems as mappings name them.
    devices: HashSet<u64>,
    is: Is,
}

enum Is {
    /// The root that is written to is an overlay on that disk.
    Overlay,
    /// Where it is not, as in a container: volumes below the folder, which are the devices.
    Volumes,
    /// The kernel's own file system in memory, which is mounted nowhere.
    Memory,
}

impl Place {
    fn of_disk(upper: BorrowedFd<'_>) -> Place {
        let writable =
            rustix::fs::statvfs("/").is_ok_and(|root| !root.f_flag.contains(StatVfsMountFlags::RDONLY));
        if !writable {
            return Place { mount: None, devices: devices(upper), is: Is::Volumes };
        }
        let mount = rustix::fs::statx(rustix::fs::CWD, "/", AtFlags::empty(), StatxFlags::MNT_ID);
        // Older kernels name the file below the overlay.
        let (root, below) = (rustix::fs::stat("/"), rustix::fs::fstat(upper));
        Place {
            mount: Some(mount.map_or(0, |root| root.stx_mnt_id)),
            devices: [root, below].into_iter().flatten().map(|stat| stat.st_dev).collect(),
            is: Is::Overlay,
        }
    }

    fn of_memory() -> Result<Place, Errno> {
        let file = rustix::fs::memfd_create("look", MemfdFlags::CLOEXEC)?;
        let mount = rustix::fs::statx(&file, "", AtFlags::EMPTY_PATH, StatxFlags::MNT_ID)?.stx_mnt_id;
        let devices = HashSet::from([rustix::fs::fstat(&file)?.st_dev]);
        Ok(Place { mount: Some(mount), devices, is: Is::Memory })
    }

    fn has(&self, file: BorrowedFd<'_>, stat: &Stat) -> bool {
        match self.is {
            Is::Overlay => rustix::fs::fstatfs(file).is_ok_and(|fs| fs.f_type == OVERLAY),
            Is::Volumes | Is::Memory => self.devices.contains(&stat.st_dev),
        }
    }

    /// Whether a mapping without a name may be one of them. Segments of System V lie beside files in memory, and are counted.
    fn may_have(&self, line: &[u8]) -> Option<Inode> {
        let counted = matches!(self.is, Is::Memory) && contains(line, b" /SYSV");
        let inode = if counted { None } else { mapped_inode(line) };
        inode.filter(|inode| self.devices.contains(&inode.0))
    }
}

fn contains(text: &[u8], part: &[u8]) -> bool {
    text.windows(part.len()).any(|it| it == part)
}

struct Look {
    place: Place,
    /// Regular files, by any descriptor.
    open: HashSet<Inode>,
    /// By a name that is gone.
    mapped: HashSet<Inode>,
    looked_at: usize,
    held: Held,
}

impl Look {
    /// Threads may have descriptors of their own, and outlive the first one, which has nothing then.
    fn process(&mut self, pid: i32) -> Result<(), Errno> {
        let mut memory_seen = false;
        let mut last = None;
        for thread in numbers(&format!("/proc/{pid}/task"))? {
            let task = format!("/proc/{pid}/task/{thread}");
            if !memory_seen {
                let looked = self.memory(&task);
                memory_seen = looked == Ok(true);
                self.settle(looked.map(drop));
            }
            if last.is_none_or(|last| !shares_descriptors(last, thread)) {
                let looked = self.descriptors(&task, thread, thread == pid);
                self.settle(looked);
                last = Some(thread);
            }
            if self.looked_at > MAX_LOOKED_AT {
                break;
            }
        }
        Ok(())
    }

    /// Counts it. Whether there are not too many by now.
    fn next_descriptor(&mut self) -> bool {
        self.looked_at += 1;
        self.held.descriptors += 1;
        self.looked_at <= MAX_LOOKED_AT
    }

    fn settle(&mut self, looked: Result<(), Errno>) {
        self.held.unseen |= looked.is_err_and(|e| !is_gone(e));
    }

    /// The program and the mappings. Whether there are any: who has ended has none.
    fn memory(&mut self, task: &str) -> Result<bool, Errno> {
        let maps = match std::fs::read(format!("{task}/maps")).map_err(errno) {
            Err(e) if is_gone(e) => return Ok(false),
            maps => maps?,
        };
        for line in maps.split(|b| *b == b'\n') {
            self.looked_at += 1;
            if line.ends_with(b" (deleted)") {
                self.mapped.extend(self.place.may_have(line));
            }
        }
        // A program may have let go of its own mappings.
        match rustix::fs::open(format!("{task}/exe"), OFlags::PATH | OFlags::CLOEXEC, Mode::empty()) {
            Ok(program) => self.file(program.as_fd())?,
            Err(e) if is_gone(e) => {}
            Err(e) => return Err(e),
        }
        Ok(!maps.is_empty())
    }

    fn descriptors(&mut self, task: &str, thread: i32, is_first: bool) -> Result<(), Errno> {
        let path = format!("{task}/fd");
        let dir = match rustix::fs::open(
            &path,
            OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC,
            Mode::empty(),
        ) {
            Err(Errno::ACCESS) => return self.closed_descriptors(task, thread, is_first),
            dir => dir?,
        };
        for number in numbers(&path)? {
            if !self.next_descriptor() {
                break;
            }
            let name = number.to_string();
            let Ok(stat) = rustix::fs::statat(&dir, &name, AtFlags::empty()) else { continue };
            match FileType::from_raw_mode(stat.st_mode) {
                FileType::RegularFile if stat.st_nlink > 0 => {
                    self.open.insert((stat.st_dev, stat.st_ino));
                }
                FileType::RegularFile => {
                    // It leads to the file itself, whatever its descriptor may do.
                    let file = rustix::fs::openat(&dir, &name, OFlags::PATH | OFlags::CLOEXEC, Mode::empty());
                    if let Ok(file) = file {
                        self.file(file.as_fd())?;
                    }
                }
                FileType::Socket => self.held.unseen |= descriptor(task, number)?.passes_others,
                _ => {}
            }
        }
        Ok(())
    }

    /// Of a process that has closed itself to its own user, and whose folder is nobody's that is known in here: with the right to
    /// look into it, they are told of, and can be taken. One that has ended and is not waited for yet is like that, and has none.
    fn closed_descriptors(&mut self, task: &str, thread: i32, is_first: bool) -> Result<(), Errno> {
        let mut process: Option<OwnedFd> = None;
        for number in numbers(&format!("{task}/fdinfo"))? {
            if !self.next_descriptor() {
                break;
            }
            let mount = self.place.mount.ok_or(Errno::ACCESS)?;
            let told = descriptor(task, number)?;
            self.held.unseen |= told.passes_others;
            // Nothing else is taken: to be the last who closes a socket may take as long as its owner said.
            if told.mount != Some(mount) {
                continue;
            }
            if process.is_none() {
                let id = Pid::from_raw(thread).ok_or(Errno::SRCH)?;
                process = Some(match pidfd_open(id, ONE_THREAD) {
                    Err(Errno::INVAL) if is_first => pidfd_open(id, PidfdFlags::empty())?,
                    opened => opened?,
                });
            }
            let Some(process) = &process else { continue };
            match pidfd_getfd(process, number, PidfdGetfdFlags::empty()) {
                Ok(file) => self.file(file.as_fd())?,
                Err(Errno::BADF) => {} // closed meanwhile
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }

    fn file(&mut self, file: BorrowedFd<'_>) -> Result<(), Errno> {
        let stat = rustix::fs::fstat(file)?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Ok(());
        }
        let is_new = self.open.insert((stat.st_dev, stat.st_ino));
        if is_new && stat.st_nlink == 0 && self.place.has(file, &stat) {
            self.held.bytes += u64::try_from(stat.st_blocks).unwrap_or(0) * BLOCK;
        }
        Ok(())
    }
}

/// What the kernel tells of a descriptor.
#[derive(Default)]
struct Descriptor {
    mount: Option<u64>,
    /// A socket in which others wait to be taken.
    passes_others: bool,
}

fn descriptor(task: &str, number: i32) -> Result<Descriptor, Errno> {
    let text = match std::fs::read_to_string(format!("{task}/fdinfo/{number}")).map_err(errno) {
        Err(e) if is_gone(e) => return Ok(Descriptor::default()),
        text => text?,
    };
    let field =
        |name: &str| text.lines().find_map(|line| line.strip_prefix(name)?.trim().parse::<u64>().ok());
    Ok(Descriptor {
        mount: field("mnt_id:"),
        passes_others: field("scm_fds:").is_some_and(|count| count > 0),
    })
}

/// `START-END rights offset MAJOR:MINOR inode path`
fn mapped_inode(line: &[u8]) -> Option<Inode> {
    let mut fields = line.split(|b| *b == b' ').filter(|field| !field.is_empty());
    let mut text = |skip| std::str::from_utf8(fields.nth(skip)?).ok();
    let (major, minor) = text(3)?.split_once(':')?;
    let number = |hex| u32::from_str_radix(hex, 16).ok();
    let inode = text(0)?.parse().ok()?;
    Some((rustix::fs::makedev(number(major)?, number(minor)?), inode))
}

/// Names in a folder of /proc that are numbers.
fn numbers(dir: &str) -> Result<Vec<i32>, Errno> {
    let entries = std::fs::read_dir(dir).map_err(errno)?;
    Ok(entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect())
}

/// Of the folder, and of what is mounted in it.
fn devices(folder: BorrowedFd<'_>) -> HashSet<u64> {
    let entries = rustix::fs::Dir::read_from(folder).into_iter().flatten().flatten();
    let names = entries.map(|entry| entry.file_name().to_owned()).filter(|name| name.as_c_str() != c"..");
    names.filter_map(|name| Some(rustix::fs::statat(folder, name, AtFlags::empty()).ok()?.st_dev)).collect()
}
