//! Replacing a file so that it happens exactly once, whatever is killed in between.
//!
//! What the file is to become is computed first and recorded by its hash, then written. A later attempt that finds the record
//! without a result looks at the file: it has the new content (done), the old one (do it), or another (say so).

use bytes::{Bytes, BytesMut};
use forkyard_sandbox::{ErrorKind, FileKind, Sandbox};
use sha2::{Digest, Sha256};

use super::{Call, Failure};
use crate::event::FilePlan;

/// Read at a time.
const CHUNK_BYTES: u64 = 4 << 20;

#[derive(Debug, Clone)]
pub(crate) struct FileChange {
    pub path: String,
    pub existed: bool,
    /// None if it is too large to keep, or not known any more.
    pub before: Option<Bytes>,
    pub after: Bytes,
    pub plan: FilePlan,
    /// Of the file that is replaced.
    pub mode: Option<u32>,
}

fn sha256(data: &[u8]) -> String {
    hex(&Sha256::digest(data))
}

fn hex(digest: &[u8]) -> String {
    digest.iter().map(|b| format!("{b:02x}")).collect()
}

/// A file as it is: its hash, and its content where that is not more than `keep`.
pub(crate) struct Existing {
    pub sha256: String,
    pub content: Option<Bytes>,
    pub mode: u32,
}

/// None if there is no such file.
pub(crate) async fn look(
    sandbox: &dyn Sandbox,
    path: &str,
    keep: u64,
    max: u64,
) -> Result<Option<Existing>, Failure> {
    let info = match sandbox.stat(path).await {
        Ok(info) => info,
        Err(e) if e.kind == ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(e.into()),
    };
    match info.kind {
        FileKind::File | FileKind::Symlink => {}
        FileKind::Dir => return Err(Failure::result(format!("{path} is a directory"))),
        FileKind::Other => return Err(Failure::result(format!("{path} is not a regular file"))),
    }
    if info.size > max {
        return Err(Failure::result(format!("{path} has {} bytes; at most {max} are allowed", info.size)));
    }
    let mut hasher = Sha256::new();
    let mut content = BytesMut::new();
    let mut offset = 0;
    loop {
        let chunk = match sandbox.read_file(path, offset, CHUNK_BYTES).await {
            Ok(chunk) => chunk,
            // A dangling symlink: writing creates what it names.
            Err(e) if e.kind == ErrorKind::NotFound && info.kind == FileKind::Symlink => return Ok(None),
            Err(e) => return Err(e.into()),
        };
        hasher.update(&chunk);
        offset += chunk.len() as u64;
        if offset <= keep {
            content.extend_from_slice(&chunk);
        }
        if (chunk.len() as u64) < CHUNK_BYTES {
            break;
        }
        if offset > max {
            return Err(Failure::result(format!("{path} grew beyond {max} bytes while it was read")));
        }
    }
    Ok(Some(Existing {
        sha256: hex(&hasher.finalize()),
        content: (offset <= keep).then(|| content.freeze()),
        mode: info.mode & 0o7777,
    }))
}

/// The hash of a file as it is now; None if there is none.
pub(crate) async fn look_hash(call: &Call<'_>, path: &str) -> Result<Option<String>, Failure> {
    let existing = look(call.session.sandbox.as_ref(), path, 0, call.session.policy.max_file_bytes).await?;
    Ok(existing.map(|e| e.sha256))
}

impl FileChange {
    pub fn new(path: String, existing: Option<Existing>, after: Bytes) -> FileChange {
        let plan = FilePlan { before: existing.as_ref().map(|e| e.sha256.clone()), after: sha256(&after) };
        let existed = existing.is_some();
        let mode = existing.as_ref().map(|e| e.mode);
        FileChange { path, existed, before: existing.and_then(|e| e.content), after, plan, mode }
    }

    pub async fn write(&self, call: &Call<'_>) -> Result<(), Failure> {
        let sandbox = &call.session.sandbox;
        Ok(sandbox.write_file(&self.path, self.after.clone(), self.mode).await?)
    }
}
