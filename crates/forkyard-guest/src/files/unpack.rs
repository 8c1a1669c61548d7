//! An archive that is unpacked as it arrives: files and symbolic links, in the tar format with pax headers. Nothing of the image
//! is needed for it, and nothing in it leads outside of the folder that it is unpacked into.

use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};

use forkyard_guest::protocol::Fault;
use rustix::fs::{AtFlags, Mode, OFlags, ResolveFlags, openat2};
use rustix::io::Errno;

use super::{FileError, Result, resolve, tree};

const BLOCK: usize = 512;
/// Paths and link targets are at most 4 KiB each.
const MAX_PAX: u64 = 64 << 10;
const OPEN_DIR: OFlags = OFlags::PATH.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);

pub struct Unpack {
    root: OwnedFd,
    /// Where the last file went: the next one usually goes there too.
    at: Option<(String, OwnedFd)>,
    header: Vec<u8>,
    state: State,
    /// What a pax header said of the next entry.
    path: Option<String>,
    link: Option<String>,
    size: Option<u64>,
}

enum State {
    Header,
    Pax { text: Vec<u8>, left: u64 },
    File { path: String, file: File, left: u64 },
    Padding { left: usize },
    End,
}

impl Unpack {
    pub fn begin(dir: &str) -> Result<Unpack> {
        let full = resolve::absolute(dir)?;
        let root = resolve::make_dirs(dir, &full)?;
        let (at, header, state) = (None, Vec::with_capacity(BLOCK), State::Header);
        Ok(Unpack { root, at, header, state, path: None, link: None, size: None })
    }

    pub fn append(&mut self, mut data: &[u8]) -> Result<()> {
        while !data.is_empty() {
            match &mut self.state {
                State::End => return Ok(()),
                State::Padding { left } => {
                    let n = data.len().min(*left);
                    data = &data[n..];
                    *left -= n;
                    if *left == 0 {
                        self.state = State::Header;
                    }
                }
                State::Header => {
                    let n = data.len().min(BLOCK - self.header.len());
                    self.header.extend_from_slice(&data[..n]);
                    data = &data[n..];
                    if self.header.len() == BLOCK {
                        let header = std::mem::take(&mut self.header);
                        self.entry(&header)?;
                    }
                }
                State::Pax { text, left } => {
                    let n = data.len().min(usize::try_from(*left).unwrap_or(usize::MAX));
                    text.extend_from_slice(&data[..n]);
                    data = &data[n..];
                    *left -= n as u64;
                    if *left == 0 {
                        let text = std::mem::take(text);
                        self.pax(&text)?;
                        self.state = padding(text.len() as u64);
                    }
                }
                State::File { path, file, left } => {
                    let n = data.len().min(usize::try_from(*left).unwrap_or(usize::MAX));
                    file.write_all(&data[..n]).map_err(|e| {
                        FileError::errno(
                            path,
                            Errno::from_raw_os_error(e.raw_os_error().unwrap_or(libc::EIO)),
                        )
                    })?;
                    data = &data[n..];
                    *left -= n as u64;
                    if *left == 0 {
                        self.state = self.padding_of_file();
                    }
                }
            }
        }
        Ok(())
    }

    pub fn commit(self) -> Result<()> {
        match self.state {
            State::End => Ok(()),
            State::Header | State::Pax { .. } | State::File { .. } | State::Padding { .. } => {
                Err(bad("the archive ends too early"))
            }
        }
    }

    fn padding_of_file(&mut self) -> State {
        padding(self.size.take().unwrap_or(0))
    }

    fn entry(&mut self, header: &[u8]) -> Result<()> {
        if header.iter().all(|b| *b == 0) {
            self.state = State::End;
            return Ok(());
        }
        let size = match self.size.take() {
            Some(size) => size,
            None => octal(&header[124..136])?,
        };
        match header[156] {
            b'x' => {
                if size > MAX_PAX {
                    return Err(bad("a header is too long"));
                }
                let text = Vec::with_capacity(size as usize);
                self.state = if size == 0 { State::Header } else { State::Pax { text, left: size } };
                Ok(())
            }
            b'0' | 0 => {
                let path = self.path.take().map_or_else(|| text(&header[..100]), Ok)?;
                let mode = if octal(&header[100..108])? & 0o100 == 0 { 0o644 } else { 0o755 };
                let file = self.file(&path, mode)?;
                self.size = Some(size);
                self.state = if size == 0 { padding(0) } else { State::File { path, file, left: size } };
                if size == 0 {
                    self.size = None;
                }
                Ok(())
            }
            b'2' => {
                let path = self.path.take().map_or_else(|| text(&header[..100]), Ok)?;
                let target = self.link.take().map_or_else(|| text(&header[157..257]), Ok)?;
                self.symlink(&path, &target)?;
                self.state = State::Header;
                Ok(())
            }
            other => Err(bad(&format!("an entry is of kind {other}"))),
        }
    }

    /// `LENGTH KEY=VALUE\n`, again and again.
    fn pax(&mut self, mut text: &[u8]) -> Result<()> {
        while !text.is_empty() {
            let space = text.iter().position(|b| *b == b' ').ok_or_else(|| bad("a header has no length"))?;
            let length: usize = std::str::from_utf8(&text[..space])
                .ok()
                .and_then(|n| n.parse().ok())
                .filter(|n| *n > space + 1 && *n <= text.len())
                .ok_or_else(|| bad("a header has a wrong length"))?;
            let record =
                std::str::from_utf8(&text[space + 1..length - 1]).map_err(|_| bad("a name is not UTF-8"))?;
            match record.split_once('=') {
                Some(("path", value)) => self.path = Some(value.into()),
                Some(("linkpath", value)) => self.link = Some(value.into()),
                Some(("size", value)) => self.size = value.parse().ok(),
                Some(_) | None => {}
            }
            text = &text[length..];
        }
        Ok(())
    }

    /// The folder of a path, made if it is missing, never by way of a link; and the last name.
    fn parent<'p>(&mut self, path: &'p str) -> Result<(&OwnedFd, &'p str)> {
        let odd = |part: &str| part.is_empty() || part == "." || part == "..";
        if path.split('/').any(odd) || path.contains('\0') {
            return Err(bad(&format!("{path:?} is no path of an archive")));
        }
        let (dir, name) = path.rsplit_once('/').unwrap_or(("", path));
        if self.at.as_ref().is_none_or(|(known, _)| known != dir) {
            let failed = |e| FileError::errno(path, e);
            let mut at = rustix::io::fcntl_dupfd_cloexec(&self.root, 3).map_err(failed)?;
            for part in dir.split('/').filter(|part| !part.is_empty()) {
                at = match enter(&at, part) {
                    Err(Errno::NOENT) => make(&at, part),
                    // A file or a link is in the place of the folder.
                    Err(Errno::NOTDIR | Errno::LOOP) => {
                        rustix::fs::unlinkat(at.as_fd(), part, AtFlags::empty()).map_err(failed)?;
                        make(&at, part)
                    }
                    other => other,
                }
                .map_err(failed)?;
            }
            self.at = Some((dir.to_string(), at));
        }
        match &self.at {
            Some((_, at)) => Ok((at, name)),
            None => Err(bad("no folder is open")),
        }
    }

    fn file(&mut self, path: &str, mode: u32) -> Result<File> {
        let (at, name) = self.parent(path)?;
        clear(at, name).map_err(|e| FileError::errno(path, e))?;
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let fd = rustix::fs::openat(at.as_fd(), name, flags, Mode::from_raw_mode(mode))
            .map_err(|e| FileError::errno(path, e))?;
        Ok(File::from(fd))
    }

    fn symlink(&mut self, path: &str, target: &str) -> Result<()> {
        let (at, name) = self.parent(path)?;
        clear(at, name).map_err(|e| FileError::errno(path, e))?;
        rustix::fs::symlinkat(target, at.as_fd(), name).map_err(|e| FileError::errno(path, e))
    }
}

fn enter(at: &OwnedFd, name: &str) -> rustix::io::Result<OwnedFd> {
    openat2(at.as_fd(), name, OPEN_DIR, Mode::empty(), ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS)
}

fn make(at: &OwnedFd, name: &str) -> rustix::io::Result<OwnedFd> {
    rustix::fs::mkdirat(at.as_fd(), name, Mode::from_raw_mode(0o755))?;
    enter(at, name)
}

/// Whatever was in the place of a new entry is gone.
fn clear(at: &OwnedFd, name: &str) -> rustix::io::Result<()> {
    match rustix::fs::unlinkat(at.as_fd(), name, AtFlags::empty()) {
        Err(Errno::ISDIR) => tree::remove_at(at.as_fd(), name).map_err(|e| Errno::from_raw_os_error(e.errno)),
        Err(Errno::NOENT) => Ok(()),
        other => other,
    }
}

fn padding(size: u64) -> State {
    match (size % BLOCK as u64) as usize {
        0 => State::Header,
        over => State::Padding { left: BLOCK - over },
    }
}

fn text(field: &[u8]) -> Result<String> {
    let end = field.iter().position(|b| *b == 0).unwrap_or(field.len());
    std::str::from_utf8(&field[..end]).map(str::to_string).map_err(|_| bad("a name is not UTF-8"))
}

fn octal(field: &[u8]) -> Result<u64> {
    let text = text(field)?;
    u64::from_str_radix(text.trim_matches([' ', '\0']), 8).map_err(|_| bad("a number is not octal"))
}

fn bad(why: &str) -> FileError {
    FileError::new(Fault::Invalid, why)
}
