//! Files of the sandbox. Paths are resolved by the kernel inside the sandbox's root, and never through /proc's magic links,
//! which would lead to what the guest itself has open.

pub mod archive;
mod copy;
mod export;
mod folders;
pub mod image;
mod look;
pub mod merge;
mod ops;
mod resolve;
mod search;
pub mod tree;
mod unpack;
pub mod write;

pub use resolve::close;

use forkyard_guest::protocol::{Answer, Fault, MAX_CHUNK, Op};
use rustix::io::Errno;

use crate::serve::Outbox;

/// Where relative paths start.
pub const WORKSPACE: &str = "/workspace";

/// Why a request about files failed.
#[derive(Debug)]
pub struct FileError {
    pub kind: Fault,
    pub message: String,
    /// The kernel's reason, if it was the kernel that refused.
    errno: Option<Errno>,
}

pub type Result<T> = std::result::Result<T, FileError>;

impl FileError {
    pub fn new(kind: Fault, message: impl Into<String>) -> FileError {
        FileError { kind, message: message.into(), errno: None }
    }

    pub fn errno(path: &str, errno: Errno) -> FileError {
        let kind = match errno {
            Errno::NOENT => Fault::NotFound,
            Errno::ACCESS | Errno::PERM | Errno::ROFS | Errno::XDEV | Errno::TXTBSY => Fault::Denied,
            Errno::NOSPC | Errno::DQUOT | Errno::FBIG => Fault::TooLarge,
            Errno::IO | Errno::NOMEM | Errno::MFILE | Errno::NFILE => Fault::Unavailable,
            _ => Fault::Invalid,
        };
        let message = format!("{path}: {}", std::io::Error::from(errno));
        FileError { kind, message, errno: Some(errno) }
    }
}

/// Something that arrives in parts.
pub enum Incoming {
    File(write::Upload),
    Archive(unpack::Unpack),
}

impl Incoming {
    /// None: the request is about something else.
    pub fn begin(op: &Op) -> Option<Result<Incoming>> {
        match op {
            Op::WriteBegin { path, mode } => Some(write::Upload::begin(path, *mode).map(Incoming::File)),
            Op::UnpackBegin { dir } => Some(unpack::Unpack::begin(dir).map(Incoming::Archive)),
            _ => None,
        }
    }
    pub fn append(&mut self, data: &[u8]) -> Result<()> {
        match self {
            Incoming::File(file) => file.append(data),
            Incoming::Archive(archive) => archive.append(data),
        }
    }
    pub fn commit(self) -> Result<()> {
        match self {
            Incoming::File(file) => file.commit(),
            Incoming::Archive(archive) => archive.commit(),
        }
    }
}

/// Whether a request changes files: those wait while a snapshot is taken.
pub fn changes_files(op: &Op) -> bool {
    matches!(
        op,
        Op::Write { .. }
            | Op::WriteBegin { .. }
            | Op::UnpackBegin { .. }
            | Op::Remove { .. }
            | Op::MakeDir { .. }
    )
}

/// Whether one that comes as a whole leaves more than there was.
pub fn adds_files(op: &Op) -> bool {
    matches!(op, Op::Write { .. } | Op::MakeDir { .. })
}

/// Answers one request about files; runs in a thread of its own.
pub fn answer(seq: u32, op: Op, body: &[u8], out: &Outbox) {
    let done = |()| Answer::Done;
    let result = match op {
        Op::Read { path, offset, max } => ops::read(&path, offset, max, |part| {
            out.send(seq, Answer::Data, part)
                .map_err(|_| FileError::new(Fault::Unavailable, "the reader is gone"))
        })
        .map(done),
        Op::Write { path, mode } => write::whole(&path, body, mode).map(done),
        Op::Stat { path } => ops::stat(&path).map(|info| Answer::Stat { info }),
        Op::List { path } => ops::list(&path, |entries| {
            let _ = out.send(seq, Answer::Entries { entries }, &[]);
        })
        .map(done),
        Op::Remove { path, recursive } => ops::remove(&path, recursive).map(done),
        Op::MakeDir { path } => ops::make_dir(&path).map(done),
        Op::Glob { pattern, path, max } => search::glob(&pattern, path.as_deref(), max, |names| {
            let _ = out.send(seq, Answer::Names { names }, &[]);
        })
        .map(done),
        Op::Grep { pattern, path, glob, ignore_case, max } => {
            let query = search::Grep { pattern, path, glob, ignore_case, max };
            search::grep(&query, |search::Found { matches, truncated, unsearched }| {
                let _ = out.send(seq, Answer::Matches { matches, truncated, unsearched }, &[]);
            })
            .map(done)
        }
        Op::GitExport { repo, max_bytes, max_files } => {
            export::run(repo.as_deref(), body, max_bytes, max_files, &mut |answer, data| {
                out.send(seq, answer, data)
                    .map_err(|_| FileError::new(Fault::Unavailable, "the reader is gone"))
            })
        }
        Op::Pack { path } => pack(&path, seq, out).map(done),
        other => Err(FileError::new(Fault::Invalid, format!("not a request about files: {other:?}"))),
    };
    let last = result.unwrap_or_else(|e| Answer::Error { kind: e.kind, message: e.message });
    let _ = out.send(seq, last, &[]);
}

fn pack(path: &str, seq: u32, out: &Outbox) -> Result<()> {
    struct Frames<'a>(u32, &'a Outbox);
    impl std::io::Write for Frames<'_> {
        fn write(&mut self, data: &[u8]) -> std::io::Result<usize> {
            let part = &data[..data.len().min(MAX_CHUNK)];
            let gone = |_| std::io::Error::from(std::io::ErrorKind::BrokenPipe);
            self.1.send(self.0, Answer::Data, part).map(|()| part.len()).map_err(gone)
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let dir = resolve::open(path, tree::OPEN_DIR)?;
    archive::pack_to(std::os::fd::AsFd::as_fd(&dir), &mut Frames(seq, out))
        .map(drop)
        .map_err(|e| FileError::errno(path, e))
}
