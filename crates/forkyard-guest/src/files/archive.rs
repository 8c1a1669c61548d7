//! A folder as a stream of frames ([`forkyard_guest::layer`]), and back.

use std::collections::HashMap;
use std::ffi::{CStr, CString};
use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use forkyard_guest::layer::{ENTRY_COST, Entry, MAX_DEPTH, MAX_NAME, is_name, read_frame};
use forkyard_guest::protocol::{MAX_CHUNK, encode};
use forkyard_guest::zygote::UnpackLimits;
use rustix::fs::{AtFlags, FileType, Mode, OFlags, SeekFrom, Timespec, Timestamps, XattrFlags};
use rustix::io::{Errno, Result as IoResult};

use super::folders::{Folders, Place, ROOT};
use super::merge::{OPAQUE, is_opaque, is_whiteout};
use super::tree::{OPEN_DIR, Size, Visitor, walk};
use crate::sys::{Failure, Result, Step};

pub fn pack(layer: &str, to: OwnedFd) -> Result<Size> {
    let source = rustix::fs::open(layer, OPEN_DIR, Mode::empty()).step("pack")?;
    pack_to(source.as_fd(), &mut File::from(to)).step("pack")
}

/// What lies below a folder. The folder itself is not part of it.
pub fn pack_to(source: BorrowedFd<'_>, to: &mut dyn Write) -> IoResult<Size> {
    let out = std::io::BufWriter::with_capacity(MAX_CHUNK, to);
    let mut packer = Packer { out, numbers: HashMap::new(), size: Size::default() };
    walk(source, &mut packer)?;
    packer.put(&Entry::End, b"")?;
    packer.out.flush().map_err(|e| errno(&e))?;
    Ok(packer.size)
}

struct Packer<'a> {
    out: std::io::BufWriter<&'a mut dyn Write>,
    numbers: HashMap<(u64, u64), u64>,
    size: Size,
}

/// A file that its owner closed to itself, where no capability helps: opened for a moment, since we are the same user.
fn open_closed(dir: BorrowedFd<'_>, name: &CStr, flags: OFlags) -> IoResult<OwnedFd> {
    let closed =
        rustix::fs::openat(dir, name, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?;
    let stat = rustix::fs::fstat(&closed)?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return Err(Errno::ACCESS);
    }
    let (mode, path) = (Mode::from_raw_mode(stat.st_mode), format!("/proc/self/fd/{}", closed.as_raw_fd()));
    rustix::fs::chmod(&path, mode | Mode::RUSR)?;
    let opened = rustix::fs::open(&path, flags - OFlags::NOFOLLOW, Mode::empty());
    rustix::fs::chmod(&path, mode)?;
    opened
}

fn errno(e: &std::io::Error) -> Errno {
    Errno::from_raw_os_error(e.raw_os_error().unwrap_or(libc::EIO))
}

fn mtime_ns(stat: &rustix::fs::Stat) -> i64 {
    stat.st_mtime.saturating_mul(1_000_000_000).saturating_add(stat.st_mtime_nsec as i64)
}

impl Packer<'_> {
    fn put(&mut self, entry: &Entry, body: &[u8]) -> IoResult<()> {
        self.out.write_all(&encode(entry, body)).map_err(|e| errno(&e))
    }

    fn content(&mut self, file: BorrowedFd<'_>, size: u64) -> IoResult<()> {
        let (mut at, mut buffer) = (0, vec![0; MAX_CHUNK]);
        while at < size {
            let data = match rustix::fs::seek(file, SeekFrom::Data(at)) {
                Ok(data) => data,
                Err(Errno::NXIO) => break,
                Err(e) => return Err(e),
            };
            let hole = rustix::fs::seek(file, SeekFrom::Hole(data))?.min(size);
            at = data;
            while at < hole {
                let want = buffer.len().min(usize::try_from(hole - at).unwrap_or(MAX_CHUNK));
                match rustix::io::pread(file, &mut buffer[..want], at)? {
                    0 => return Ok(()),
                    n => {
                        self.put(&Entry::Data { at }, &buffer[..n])?;
                        self.size.bytes += n as u64;
                        at += n as u64;
                    }
                }
            }
        }
        Ok(())
    }
}

impl Visitor for Packer<'_> {
    fn file(&mut self, dir: BorrowedFd<'_>, name: &CStr) -> IoResult<()> {
        let stat = rustix::fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW)?;
        let bytes = name.to_bytes();
        let mode = stat.st_mode & 0o777;
        self.size.entries += 1;
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile => {
                let mut number = None;
                if stat.st_nlink > 1 {
                    let next = self.numbers.len() as u64;
                    match self.numbers.entry((stat.st_dev, stat.st_ino)) {
                        std::collections::hash_map::Entry::Occupied(known) => {
                            let number = *known.get();
                            return self.put(&Entry::Hard { number }, bytes);
                        }
                        std::collections::hash_map::Entry::Vacant(new) => number = Some(*new.insert(next)),
                    }
                }
                let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
                let file = match rustix::fs::openat(dir, name, flags, Mode::empty()) {
                    Err(Errno::ACCESS) => open_closed(dir, name, flags)?,
                    opened => opened?,
                };
                let size = u64::try_from(stat.st_size).unwrap_or(0);
                self.put(&Entry::File { mode, size, mtime_ns: mtime_ns(&stat), number }, bytes)?;
                self.content(file.as_fd(), size)
            }
            FileType::Symlink => {
                let target = rustix::fs::readlinkat(dir, name, Vec::new())?;
                self.put(
                    &Entry::Symlink { mtime_ns: mtime_ns(&stat) },
                    &[bytes, b"\0", target.as_bytes()].concat(),
                )
            }
            FileType::Fifo => self.put(&Entry::Fifo { mode }, bytes),
            FileType::CharacterDevice if is_whiteout(&stat) => self.put(&Entry::Whiteout, bytes),
            _ => Ok(()), // sockets are of no use without who listened on them
        }
    }
    fn enter(&mut self, dir: BorrowedFd<'_>, name: &CStr) -> IoResult<()> {
        let stat = rustix::fs::fstat(dir)?;
        self.size.entries += 1;
        self.put(&Entry::Dir { mode: stat.st_mode & 0o1777, opaque: is_opaque(dir) }, name.to_bytes())
    }
    fn leave(&mut self, _: BorrowedFd<'_>, dir: BorrowedFd<'_>, _: &CStr) -> IoResult<()> {
        let stat = rustix::fs::fstat(dir)?;
        self.put(&Entry::Up { mtime_ns: mtime_ns(&stat) }, b"")
    }
}

/// Why an archive was not taken.
pub enum Refusal {
    Broken(String),
    Failed(Failure),
}

impl From<Failure> for Refusal {
    fn from(failure: Failure) -> Refusal {
        Refusal::Failed(failure)
    }
}

fn broken<T>(why: impl Into<String>) -> std::result::Result<T, Refusal> {
    Err(Refusal::Broken(why.into()))
}

struct Unpacker {
    input: File,
    /// The way down: each open directory, which of `folders` it is, and what it gets when it is left.
    stack: Vec<(OwnedFd, usize, u32)>,
    /// Every folder but the root.
    folders: Folders,
    /// Where the first of several names of a file is.
    numbers: HashMap<u64, Place>,
    /// Folders that their owner can't pass through, with their modes, deepest first: closed at the end.
    closed: Vec<(usize, u32)>,
    file: Option<(File, u64, i64)>,
    left: UnpackLimits,
    size: Size,
}

/// Without these its owner can't open a folder, or what is in it.
const PASSABLE: u32 = 0o500;

/// Makes `to` from one layer of the stream; reads not a byte beyond it.
pub fn unpack(from: OwnedFd, to: &str, limits: UnpackLimits) -> std::result::Result<Size, Refusal> {
    rustix::fs::mkdir(to, Mode::from_raw_mode(0o755)).step("unpack")?;
    unpack_into(from, to, limits)
}

/// The same into a folder that is there.
pub fn unpack_into(from: OwnedFd, to: &str, limits: UnpackLimits) -> std::result::Result<Size, Refusal> {
    let root = rustix::fs::open(to, OPEN_DIR, Mode::empty()).step("unpack")?;
    let mut unpacker = Unpacker {
        input: File::from(from),
        stack: vec![(root, ROOT, 0o755)],
        folders: Folders::default(),
        numbers: HashMap::new(),
        closed: Vec::new(),
        file: None,
        left: limits,
        size: Size::default(),
    };
    while let Some((entry, body)) = unpacker.next()? {
        unpacker.take(entry, &body)?;
    }
    if unpacker.stack.len() != 1 {
        return broken("a directory is not closed");
    }
    for (folder, mode) in std::mem::take(&mut unpacker.closed) {
        let dir = unpacker.folders.open(unpacker.root()?, folder).step("unpack")?;
        rustix::fs::fchmod(&dir, Mode::from_raw_mode(mode)).step("unpack")?;
    }
    Ok(unpacker.size)
}

fn name_of(body: &[u8]) -> std::result::Result<CString, Refusal> {
    match CString::new(body) {
        Ok(name) if is_name(body) => Ok(name),
        _ => {
            broken(format!("{:?} is not a name", String::from_utf8_lossy(&body[..body.len().min(MAX_NAME)])))
        }
    }
}

impl Unpacker {
    fn next(&mut self) -> std::result::Result<Option<(Entry, Vec<u8>)>, Refusal> {
        let (entry, body) = read_frame(&mut self.input).map_err(|e| {
            Refusal::Broken(match e.kind() {
                std::io::ErrorKind::UnexpectedEof => "the archive ends too early".into(),
                _ => e.to_string(),
            })
        })?;
        if entry == Entry::End {
            self.close_file()?;
            return Ok(None);
        }
        Ok(Some((entry, body)))
    }

    fn spend(&mut self, bytes: u64) -> std::result::Result<(), Refusal> {
        match self.left.bytes.checked_sub(bytes) {
            Some(left) => self.left.bytes = left,
            None => return broken("it holds more than the bound on bytes"),
        }
        Ok(())
    }

    fn count(&mut self) -> std::result::Result<(), Refusal> {
        self.size.entries += 1;
        self.spend(ENTRY_COST)?;
        match self.left.entries.checked_sub(1) {
            Some(left) => self.left.entries = left,
            None => return broken("it holds more than the bound on entries"),
        }
        Ok(())
    }

    fn close_file(&mut self) -> std::result::Result<(), Refusal> {
        if let Some((file, _, mtime)) = self.file.take() {
            rustix::fs::futimens(&file, &times(mtime)).step("unpack")?;
        }
        Ok(())
    }

    fn at(&self) -> std::result::Result<BorrowedFd<'_>, Refusal> {
        match self.stack.last() {
            Some((dir, ..)) => Ok(dir.as_fd()),
            None => broken("it leaves its own root"),
        }
    }

    fn root(&self) -> std::result::Result<BorrowedFd<'_>, Refusal> {
        match self.stack.first() {
            Some((root, ..)) => Ok(root.as_fd()),
            None => broken("it leaves its own root"),
        }
    }

    fn take(&mut self, entry: Entry, body: &[u8]) -> std::result::Result<(), Refusal> {
        if let Entry::Data { at } = entry {
            let Some((file, size, _)) = &self.file else { return broken("bytes without a file") };
            if at.saturating_add(body.len() as u64) > *size {
                return broken("a file is longer than it says");
            }
            std::os::unix::fs::FileExt::write_all_at(file, body, at).step("unpack")?;
            self.size.bytes += body.len() as u64;
            return self.spend(body.len() as u64);
        }
        self.close_file()?;
        if let Entry::Up { mtime_ns } = entry {
            let Some((dir, folder, mode)) = self.stack.pop().filter(|_| !self.stack.is_empty()) else {
                return broken("it leaves its own root");
            };
            if mode & PASSABLE == PASSABLE {
                rustix::fs::fchmod(&dir, Mode::from_raw_mode(mode)).step("unpack")?;
            } else {
                self.closed.push((folder, mode));
            }
            rustix::fs::futimens(&dir, &times(mtime_ns)).step("unpack")?;
            return Ok(());
        }
        self.count()?;
        match entry {
            Entry::Dir { mode, opaque } => {
                if self.stack.len() > MAX_DEPTH {
                    return broken("it is too deep");
                }
                let name = name_of(body)?;
                let at = self.at()?;
                rustix::fs::mkdirat(at, &name, Mode::from_raw_mode(0o700)).map_err(twice)?;
                let dir = rustix::fs::openat(at, &name, OPEN_DIR, Mode::empty()).step("unpack")?;
                if opaque {
                    rustix::fs::fsetxattr(&dir, OPAQUE, b"y", XattrFlags::empty()).step("unpack")?;
                }
                let parent = self.stack.last().map_or(ROOT, |(_, folder, _)| *folder);
                let number = self.folders.add(parent, name);
                self.stack.push((dir, number, mode & 0o1777));
            }
            Entry::File { mode, size, mtime_ns, number } => {
                let name = name_of(body)?;
                let flags =
                    OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
                let at = self.at()?;
                let file = rustix::fs::openat(at, &name, flags, Mode::from_raw_mode(0o600)).map_err(twice)?;
                rustix::fs::ftruncate(&file, size).step("unpack")?; // a hole costs nothing
                rustix::fs::fchmod(&file, Mode::from_raw_mode(mode & 0o777)).step("unpack")?;
                if let Some(number) = number {
                    let folder = self.stack.last().map_or(ROOT, |(_, folder, _)| *folder);
                    self.numbers.insert(number, (folder, name));
                }
                self.file = Some((File::from(file), size, mtime_ns));
            }
            Entry::Hard { number } => {
                let name = name_of(body)?;
                let Some(first) = self.numbers.get(&number) else {
                    return broken("a link to nothing");
                };
                let (Some((root, ..)), Some((at, ..))) = (self.stack.first(), self.stack.last()) else {
                    return broken("it leaves its own root");
                };
                self.folders.link(root.as_fd(), first, at.as_fd(), &name).map_err(twice)?;
            }
            Entry::Symlink { mtime_ns } => {
                let Some(zero) = body.iter().position(|b| *b == 0) else {
                    return broken("a symlink to nothing");
                };
                let (name, target) = (name_of(&body[..zero])?, CString::new(&body[zero + 1..]));
                let Ok(target) = target else { return broken("a symlink's target has a zero byte") };
                rustix::fs::symlinkat(&target, self.at()?, &name).map_err(twice)?;
                rustix::fs::utimensat(self.at()?, &name, &times(mtime_ns), AtFlags::SYMLINK_NOFOLLOW)
                    .step("unpack")?;
            }
            Entry::Fifo { mode } => {
                let name = name_of(body)?;
                let mode = Mode::from_raw_mode(mode & 0o777);
                rustix::fs::mknodat(self.at()?, &name, FileType::Fifo, mode, 0).map_err(twice)?;
            }
            Entry::Whiteout => {
                let name = name_of(body)?;
                rustix::fs::mknodat(self.at()?, &name, FileType::CharacterDevice, Mode::empty(), 0)
                    .map_err(twice)?;
            }
            Entry::Data { .. } | Entry::Up { .. } | Entry::End => {}
        }
        Ok(())
    }
}

/// `forkyard-guest unpack FILE FOLDER`: as a command of the sandbox, for a provider whose layers are archives.
pub fn unpack_command(from: &str, to: &str) -> std::process::ExitCode {
    // The archive was checked when it was taken in, and the sandbox's disk limit holds here.
    let limits = UnpackLimits { bytes: u64::MAX, entries: u64::MAX };
    let opened = rustix::fs::open(from, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).step("open");
    let why = match opened.map_err(Refusal::from).and_then(|file| unpack_into(file, to, limits)) {
        Ok(_) => return std::process::ExitCode::SUCCESS,
        Err(Refusal::Broken(why)) => why,
        Err(Refusal::Failed(e)) => format!("{}: {}", e.step, std::io::Error::from_raw_os_error(e.errno)),
    };
    eprintln!("{from}: {why}");
    std::process::ExitCode::FAILURE
}

fn twice(e: Errno) -> Refusal {
    match e {
        Errno::EXIST => Refusal::Broken("it holds a name twice".into()),
        other => Refusal::Failed(Failure { step: "unpack".into(), errno: other.raw_os_error() }),
    }
}

fn times(mtime_ns: i64) -> Timestamps {
    let at =
        Timespec { tv_sec: mtime_ns.div_euclid(1_000_000_000), tv_nsec: mtime_ns.rem_euclid(1_000_000_000) };
    Timestamps { last_access: at, last_modification: at }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{MetadataExt, PermissionsExt};
    use std::path::{Path, PathBuf};

    use rustix::process::{Resource, Rlimit, setrlimit};

    use super::*;

    fn scratch(name: &str) -> PathBuf {
        let dir = std::env::temp_dir().join(format!("forkyard-archive-{}-{name}", std::process::id()));
        let _ = std::fs::remove_dir_all(&dir);
        std::fs::create_dir(&dir).unwrap();
        dir
    }

    fn through_a_stream(root: &Path) {
        let path = |part: &str| root.join(part).to_str().unwrap().to_string();
        let stream = std::fs::File::create(root.join("stream")).unwrap();
        pack(&path("from"), stream.into()).ok().unwrap();
        let stream = std::fs::File::open(root.join("stream")).unwrap();
        match unpack(stream.into(), &path("to"), UnpackLimits { bytes: 1 << 30, entries: 1 << 20 }) {
            Ok(_) => {}
            Err(Refusal::Broken(why)) => panic!("{why}"),
            Err(Refusal::Failed(e)) => panic!("{e:?}"),
        }
    }

    #[test]
    fn links_are_not_bounded_by_descriptors() {
        const FILES: u64 = 400;
        let root = scratch("links");
        for dir in ["from/a/b", "from/c"] {
            std::fs::create_dir_all(root.join(dir)).unwrap();
        }
        for i in 0..FILES {
            // Each in a folder of its own, too.
            let own = root.join(format!("from/a/b/{i}"));
            std::fs::create_dir(&own).unwrap();
            std::fs::write(own.join("first"), i.to_string()).unwrap();
            std::fs::hard_link(own.join("first"), root.join(format!("from/c/{i}"))).unwrap();
        }
        setrlimit(Resource::Nofile, Rlimit { current: Some(FILES / 4), maximum: Some(FILES / 4) }).unwrap();
        through_a_stream(&root);
        for i in 0..FILES {
            let first = root.join(format!("to/a/b/{i}/first")).metadata().unwrap();
            assert_eq!(first.ino(), root.join(format!("to/c/{i}")).metadata().unwrap().ino(), "{i}");
        }
        std::fs::remove_dir_all(&root).unwrap();
    }

    #[test]
    fn folders_that_are_closed_are_so_in_the_end() {
        let root = scratch("closed");
        let modes = [("from/x/y", 0o755), ("from/x", 0o000), ("from/v/w", 0o600), ("from/v", 0o300)];
        for (dir, _) in modes {
            std::fs::create_dir_all(root.join(dir)).unwrap();
        }
        std::fs::write(root.join("from/x/y/first"), "text").unwrap();
        std::fs::hard_link(root.join("from/x/y/first"), root.join("from/v/w/second")).unwrap();
        let set = |dir: &str, mode| {
            std::fs::set_permissions(root.join(dir), std::fs::Permissions::from_mode(mode)).unwrap();
        };
        modes.iter().for_each(|(dir, mode)| set(dir, *mode));
        through_a_stream(&root);
        for (dir, mode) in modes.into_iter().rev() {
            let made = dir.replace("from", "to");
            assert_eq!(root.join(&made).metadata().unwrap().mode() & 0o7777, mode, "{made}");
            set(&made, 0o700);
            set(dir, 0o700);
        }
        assert_eq!(std::fs::read(root.join("to/v/w/second")).unwrap(), b"text");
        std::fs::remove_dir_all(&root).unwrap();
    }
}
