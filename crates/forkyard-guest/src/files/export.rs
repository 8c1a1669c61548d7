//! What a work tree differs in from a commit that the host knows, found without git: no hook, filter or setting of the tree is
//! run or read, apart from its .gitignore files.

use std::collections::BTreeMap;
use std::io::Read;
use std::os::unix::ffi::OsStrExt;

use forkyard_guest::protocol::{Answer, Fault, MAX_CHUNK, escape_name};
use rustix::fs::{FileType, OFlags};
use rustix::io::Errno;
use sha1::{Digest, Sha1};

use super::look::{self, IgnoreFiles};
use super::tree::BLOCK;
use super::{FileError, Result, WORKSPACE, resolve};

/// Deeper paths are not what repositories hold, and git itself struggles with them.
const MAX_DEPTH: usize = 128;
/// Deleted or skipped names in one answer; more of them means that the base is not this tree's.
const MAX_NAMES: usize = 200_000;
/// .git is the sandbox's to write.
const IGNORE_FILES: IgnoreFiles = IgnoreFiles { names: &[".gitignore"], above: false };
/// Names in one frame: even the longest fit.
const NAMES_PART: usize = 256;
const MODE_FILE: u32 = 0o100644;
const MODE_EXECUTABLE: u32 = 0o100755;
const MODE_LINK: u32 = 0o120000;

pub type Send<'a> = &'a mut dyn FnMut(Answer, &[u8]) -> Result<()>;

/// Walks the files that are not ignored (tracked ones count even if ignored), in the order of their paths.
pub fn run(
    repo: Option<&str>,
    base: &[u8],
    max_bytes: u64,
    max_files: u64,
    send: Send<'_>,
) -> Result<Answer> {
    let root = resolve::absolute(repo.unwrap_or(WORKSPACE))?;
    resolve::open(&root, OFlags::PATH | OFlags::DIRECTORY)?;
    let base: Vec<(String, u32, String)> = if base.is_empty() {
        Vec::new()
    } else {
        serde_json::from_slice(base).map_err(|e| FileError::new(Fault::Invalid, format!("base: {e}")))?
    };
    let mut unseen: BTreeMap<String, (u32, String)> =
        base.into_iter().map(|(path, mode, oid)| (path, (mode, oid))).collect();
    let mut budget = Budget { whole: max_bytes, bytes: max_bytes, files: max_files };
    let mut names = Names::default();
    look::each(&root, &IGNORE_FILES, MAX_DEPTH, &mut |path, _| {
        match path.to_str().filter(|path| !path.contains('\\') || !path.contains("\\x")) {
            Some(path) => {
                let known = unseen.remove(path);
                one(&root, path, known.as_ref(), &mut budget, &mut names, send)?;
            }
            None => names.skip(escape_name(path.as_os_str().as_bytes()), send)?,
        }
        Ok(true)
    })?;
    // What is left was not met: deleted, or tracked in spite of an ignore rule.
    for (path, known) in unseen {
        match one(&root, &path, Some(&known), &mut budget, &mut names, send) {
            Ok(()) => {}
            Err(e) if e.kind == Fault::NotFound => names.delete(path, send)?,
            Err(e) => return Err(e),
        }
    }
    names.send(send)?;
    Ok(Answer::Done)
}

/// Paths without content, sent on before they are many.
#[derive(Default)]
struct Names {
    deleted: Vec<String>,
    skipped: Vec<String>,
    count: usize,
}

impl Names {
    fn delete(&mut self, path: String, send: Send<'_>) -> Result<()> {
        self.deleted.push(path);
        self.added(send)
    }

    fn skip(&mut self, path: String, send: Send<'_>) -> Result<()> {
        self.skipped.push(path);
        self.added(send)
    }

    fn added(&mut self, send: Send<'_>) -> Result<()> {
        self.count += 1;
        if self.count > MAX_NAMES {
            let message = format!("more than {MAX_NAMES} paths were deleted or can't be kept");
            return Err(FileError::new(Fault::TooLarge, message));
        }
        if self.deleted.len() + self.skipped.len() < NAMES_PART { Ok(()) } else { self.send(send) }
    }

    fn send(&mut self, send: Send<'_>) -> Result<()> {
        let (deleted, skipped) = (std::mem::take(&mut self.deleted), std::mem::take(&mut self.skipped));
        if deleted.is_empty() && skipped.is_empty() {
            return Ok(());
        }
        send(Answer::Exported { deleted, skipped }, &[])
    }
}

struct Budget {
    /// What `bytes` began with.
    whole: u64,
    bytes: u64,
    files: u64,
}

impl Budget {
    fn take(&mut self, path: &str, bytes: u64) -> Result<()> {
        if self.files == 0 || self.bytes < bytes {
            let message =
                format!("the changes are too large: {path} ({bytes} bytes) passes the bound of the export");
            return Err(FileError::new(Fault::TooLarge, message));
        }
        self.files -= 1;
        self.bytes -= bytes;
        Ok(())
    }
}

/// Sends one file if it differs from what the base has.
fn one(
    root: &str,
    path: &str,
    known: Option<&(u32, String)>,
    budget: &mut Budget,
    names: &mut Names,
    send: Send<'_>,
) -> Result<()> {
    let full = format!("{root}/{path}");
    let found = match resolve::open(&full, OFlags::PATH | OFlags::NOFOLLOW) {
        // A file, or a link that leads nowhere, in the place of a folder: the old path is gone.
        Err(e) if matches!(e.errno, Some(Errno::NOTDIR | Errno::LOOP)) => {
            return Err(FileError::new(Fault::NotFound, e.message));
        }
        other => other?,
    };
    let stat = rustix::fs::fstat(&found).map_err(|e| FileError::errno(path, e))?;
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::Symlink => {
            let target =
                rustix::fs::readlinkat(&found, "", Vec::new()).map_err(|e| FileError::errno(path, e))?;
            let data = target.as_bytes();
            if known.is_none_or(|(mode, oid)| *mode != MODE_LINK || *oid != blob_id(data)) {
                budget.take(path, data.len() as u64)?;
                send(Answer::Changed { path: path.into(), mode: MODE_LINK, size: data.len() as u64 }, &[])?;
                send_data(data, send)?;
            }
            Ok(())
        }
        FileType::RegularFile => {
            let mode = if stat.st_mode & 0o100 != 0 { MODE_EXECUTABLE } else { MODE_FILE };
            let size = u64::try_from(stat.st_size).unwrap_or(u64::MAX);
            let file = match super::ops::open_regular(&full) {
                Ok(file) => std::fs::File::from(file),
                Err(e) if e.kind == Fault::Denied => {
                    return names.skip(path.to_string(), send);
                }
                Err(e) => return Err(e),
            };
            if let Some((known_mode, oid)) = known {
                // Hashed in parts: a tracked file that did not change is never held in memory. One that is mostly holes takes
                // as long as its size says, which costs nothing to write: no further than it could be sent.
                let is_there =
                    size <= budget.whole || (stat.st_blocks as u64).saturating_mul(BLOCK) >= size / 2;
                if *known_mode == mode && is_there && file_id(&file, size).is_some_and(|id| id == *oid) {
                    return Ok(());
                }
            }
            budget.take(path, size)?;
            let mut data = Vec::new();
            use std::os::unix::fs::FileExt;
            data.resize(usize::try_from(size).unwrap_or(usize::MAX), 0);
            let mut filled = 0;
            while filled < data.len() {
                match file.read_at(&mut data[filled..], filled as u64) {
                    Ok(0) => break,
                    Ok(n) => filled += n,
                    Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
                    Err(_) => break,
                }
            }
            data.truncate(filled);
            send(Answer::Changed { path: path.into(), mode, size: data.len() as u64 }, &[])?;
            send_data(&data, send)
        }
        FileType::Directory if known.is_some() => Err(FileError::new(Fault::NotFound, path)),
        _ => names.skip(path.to_string(), send),
    }
}

fn send_data(data: &[u8], send: Send<'_>) -> Result<()> {
    data.chunks(MAX_CHUNK).try_for_each(|part| send(Answer::Data, part))
}

fn hex(digest: &[u8]) -> String {
    digest.iter().map(|b| format!("{b:02x}")).collect()
}

/// The name that git gives to these bytes.
fn blob_id(data: &[u8]) -> String {
    let mut hash = Sha1::new();
    hash.update(format!("blob {}\0", data.len()));
    hash.update(data);
    hex(&hash.finalize())
}

/// The same for a file; None if its size is no longer `size`.
fn file_id(mut file: &std::fs::File, size: u64) -> Option<String> {
    let mut hash = Sha1::new();
    hash.update(format!("blob {size}\0"));
    let mut buffer = vec![0; 128 << 10];
    let mut total = 0;
    loop {
        match file.read(&mut buffer) {
            Ok(0) => break,
            Ok(n) => {
                total += n as u64;
                hash.update(&buffer[..n]);
            }
            Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
            Err(_) => return None,
        }
    }
    (total == size).then(|| hex(&hash.finalize()))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn blobs_are_named_as_git_names_them() {
        assert_eq!(blob_id(b""), "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391");
        assert_eq!(blob_id(b"hello\n"), "ce013625030ba8dba906f756967f9e9ca394464a");
    }

    /// The paths that are gone, of a tree that had these.
    fn deleted(root: &Path, had: &[&str]) -> Result<Vec<String>> {
        let base: Vec<_> = had.iter().map(|path| (path, MODE_FILE, blob_id(b""))).collect();
        let base = serde_json::to_vec(&base).unwrap();
        let mut gone = Vec::new();
        run(root.to_str(), &base, 1 << 20, 100, &mut |answer, _| {
            if let Answer::Exported { deleted, .. } = answer {
                gone.extend(deleted);
            }
            Ok(())
        })?;
        Ok(gone)
    }

    #[test]
    fn what_became_of_a_folder_is_told_by_the_kernels_reason() {
        let root = std::env::temp_dir().join(format!("forkyard-export-{}", std::process::id()));
        for dir in ["kept", "Not a directory"] {
            std::fs::create_dir_all(root.join(dir)).unwrap();
        }
        std::fs::write(root.join("kept/f"), "").unwrap();
        std::fs::write(root.join("file"), "").unwrap();
        std::os::unix::fs::symlink("loop", root.join("loop")).unwrap();
        let had = ["file/f", "gone/f", "kept/f", "loop/f"];
        assert_eq!(deleted(&root, &had).unwrap(), ["file/f", "gone/f", "loop/f"]);
        // A name is no reason, whatever it says.
        let long = format!("Not a directory/{}", "x".repeat(300));
        let failed = deleted(&root, &[&long]).unwrap_err();
        assert_eq!((failed.kind, failed.errno), (Fault::Invalid, Some(Errno::NAMETOOLONG)));
        std::fs::remove_dir_all(&root).unwrap();
    }

    #[test]
    fn a_tracked_file_that_became_holes_is_not_read() {
        let root = std::env::temp_dir().join(format!("forkyard-holes-{}", std::process::id()));
        std::fs::create_dir(&root).unwrap();
        // Terabytes: hashing them takes hours.
        std::fs::File::create(root.join("file")).unwrap().set_len(8 << 40).unwrap();
        assert_eq!(deleted(&root, &["file"]).unwrap_err().kind, Fault::TooLarge);
        std::fs::remove_dir_all(&root).unwrap();
    }
}
