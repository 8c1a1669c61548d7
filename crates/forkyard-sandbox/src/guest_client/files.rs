//! Files over the guest's protocol.

use bytes::{Bytes, BytesMut};
use forkyard_core::Timestamp;
use forkyard_guest::protocol::{Answer, FileMeta, Kind, MAX_CHUNK, Op};
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::sync::mpsc::error::TryRecvError;

use super::{GuestClient, unexpected};
use crate::{
    ChangedFile, ErrorKind, FileInfo, FileKind, GitExport, GlobRequest, GrepMatch, GrepRequest, GrepResult,
    Result, SandboxError, WorkDiff,
};

/// A file up to this size goes in one frame.
const ONE_FRAME: usize = 1 << 20;
/// Parts of a large file.
const PART: usize = MAX_CHUNK;
/// What a list, a glob or a grep may add up to here: a guest could be hostile.
const MAX_ENTRIES: usize = 1_100_000;

fn too_much() -> SandboxError {
    SandboxError::new(ErrorKind::TooLarge, "the guest sent more than was asked for")
}

fn to_info(meta: FileMeta) -> FileInfo {
    FileInfo {
        name: meta.name,
        kind: match meta.kind {
            Kind::File => FileKind::File,
            Kind::Dir => FileKind::Dir,
            Kind::Symlink => FileKind::Symlink,
            Kind::Other => FileKind::Other,
        },
        size: meta.size,
        mode: meta.mode,
        modified: Timestamp(meta.modified_ms),
        symlink_target: meta.symlink_target,
    }
}

/// By what the guest or its kernel says of it.
fn about_path(message: &str) -> &'static str {
    let says = |words: &str| message.ends_with(words) || message.contains(&format!("{words} (os error"));
    if says("is a directory") || says("Is a directory") {
        "name a file in it; `forkyard sandbox ls` lists a folder, `forkyard sandbox cp` copies one"
    } else if says("Not a directory") {
        "a part of the path before its end is a file"
    } else if says("Too many levels of symbolic links") {
        "name the file itself: links of /proc, and links in a circle, are not followed"
    } else if says("is not a regular file") {
        "only files are read and written: not pipes, sockets and devices"
    } else {
        "a path names a file or folder inside, without zero bytes and links that lead out"
    }
}

/// What a caller can do about a path.
fn of_path(e: SandboxError) -> SandboxError {
    match e.kind {
        ErrorKind::NotFound => {
            e.or_hint("paths are those inside the sandbox; relative ones start at /workspace")
        }
        ErrorKind::TooLarge => {
            e.or_hint("free space inside, or make the sandbox with a larger --disk or --memory")
        }
        ErrorKind::Denied => {
            e.or_hint("only what the user inside may use can be used: /workspace, /home/user, /tmp")
        }
        ErrorKind::Invalid => {
            let hint = about_path(&e.message);
            e.or_hint(hint)
        }
        _ => e,
    }
}

impl GuestClient {
    pub async fn read_file(&self, path: &str, offset: u64, max: u64) -> Result<Bytes> {
        self.read_parts(path, offset, max).await.map_err(of_path)
    }

    async fn read_parts(&self, path: &str, offset: u64, max: u64) -> Result<Bytes> {
        let mut answers = self.send(Op::Read { path: path.into(), offset, max }, &[]).await?;
        let mut all = BytesMut::new();
        loop {
            match answers.next().await? {
                (Answer::Data, part) => {
                    if (all.len() + part.len()) as u64 > max {
                        return Err(too_much());
                    }
                    all.extend_from_slice(&part);
                }
                (Answer::Done, _) => return Ok(all.freeze()),
                (other, _) => return Err(unexpected(&other)),
            }
        }
    }

    pub async fn write_file(&self, path: &str, data: Bytes, mode: Option<u32>) -> Result<()> {
        if data.len() <= ONE_FRAME {
            return self.ask_done(Op::Write { path: path.into(), mode }, &data).await.map_err(of_path);
        }
        self.write_file_from(path, &mut &data[..], mode).await.map(drop)
    }

    pub async fn write_file_from(
        &self,
        path: &str,
        data: &mut (dyn AsyncRead + Send + Unpin),
        mode: Option<u32>,
    ) -> Result<u64> {
        self.upload(Op::WriteBegin { path: path.into(), mode }, path, data).await.map_err(of_path)
    }

    pub async fn unpack(&self, dir: &str, archive: &mut (dyn AsyncRead + Send + Unpin)) -> Result<u64> {
        self.upload(Op::UnpackBegin { dir: dir.into() }, dir, archive).await.map_err(of_path)
    }

    async fn upload(&self, begin: Op, path: &str, data: &mut (dyn AsyncRead + Send + Unpin)) -> Result<u64> {
        let mut begun = self.send(begin, &[]).await?;
        let write = begun.seq;
        let mut guard = AbortOnDrop { client: self, write, armed: true };
        match begun.next().await {
            Ok((Answer::Done, _)) => {}
            Ok((other, _)) => return Err(unexpected(&other)),
            Err(e) => {
                guard.armed = false;
                return Err(e);
            }
        }
        let (mut buffer, mut total) = (vec![0; PART], 0);
        loop {
            let n = data
                .read(&mut buffer)
                .await
                .map_err(|e| SandboxError::new(ErrorKind::Unavailable, format!("source of {path}: {e}")))?;
            if n == 0 {
                break;
            }
            total += n as u64;
            self.pass(Op::Append { write }, &buffer[..n]).await;
            // An append that failed is answered under the number of the upload.
            match begun.receiver.try_recv() {
                Ok((Answer::Error { kind, message }, _)) => return Err(super::from_fault(kind, message)),
                Err(TryRecvError::Disconnected) => return begun.next().await.map(|_| total),
                Ok(_) | Err(TryRecvError::Empty) => {}
            }
        }
        let committed = self.ask_done(Op::Commit { write }, &[]).await;
        guard.armed = false;
        match begun.receiver.try_recv() {
            Ok((Answer::Error { kind, message }, _)) => Err(super::from_fault(kind, message)),
            _ => committed.map(|()| total),
        }
    }

    /// A folder as a stream, piece by piece, until whoever takes them stops.
    pub async fn pack(&self, path: &str, to: &tokio::sync::mpsc::Sender<Bytes>) -> Result<()> {
        let mut answers = self.send(Op::Pack { path: path.into() }, &[]).await?;
        loop {
            match answers.next().await? {
                (Answer::Data, part) => {
                    if to.send(part).await.is_err() {
                        return Ok(());
                    }
                }
                (Answer::Done, _) => return Ok(()),
                (other, _) => return Err(unexpected(&other)),
            }
        }
    }

    pub async fn stat(&self, path: &str) -> Result<FileInfo> {
        match self.ask(Op::Stat { path: path.into() }, &[]).await.map_err(of_path)? {
            (Answer::Stat { info }, _) => Ok(to_info(info)),
            (other, _) => Err(unexpected(&other)),
        }
    }

    pub async fn list_files(&self, path: &str) -> Result<Vec<FileInfo>> {
        let mut answers = self.send(Op::List { path: path.into() }, &[]).await?;
        let mut all = Vec::new();
        loop {
            match answers.next().await.map_err(of_path)? {
                (Answer::Entries { entries }, _) if all.len() + entries.len() <= MAX_ENTRIES => {
                    all.extend(entries.into_iter().map(to_info));
                }
                (Answer::Done, _) => return Ok(all),
                (Answer::Entries { .. }, _) => return Err(too_much()),
                (other, _) => return Err(unexpected(&other)),
            }
        }
    }

    pub async fn remove(&self, path: &str, recursive: bool) -> Result<()> {
        self.ask_done(Op::Remove { path: path.into(), recursive }, &[]).await.map_err(of_path)
    }

    pub async fn make_dir(&self, path: &str) -> Result<()> {
        self.ask_done(Op::MakeDir { path: path.into() }, &[]).await.map_err(of_path)
    }

    pub async fn glob(&self, request: GlobRequest) -> Result<Vec<String>> {
        let op = Op::Glob { pattern: request.pattern, path: request.path, max: request.max as u64 };
        let mut answers = self.send(op, &[]).await?;
        let mut all = Vec::new();
        loop {
            match answers.next().await? {
                (Answer::Names { names }, _) if all.len() + names.len() <= MAX_ENTRIES => all.extend(names),
                (Answer::Done, _) => return Ok(all),
                (Answer::Names { .. }, _) => return Err(too_much()),
                (other, _) => return Err(unexpected(&other)),
            }
        }
    }

    pub async fn grep(&self, request: GrepRequest) -> Result<GrepResult> {
        let op = Op::Grep {
            pattern: request.pattern,
            path: request.path,
            glob: request.glob,
            ignore_case: request.ignore_case,
            max: request.max as u64,
        };
        let mut answers = self.send(op, &[]).await?;
        let mut result = GrepResult::default();
        loop {
            match answers.next().await? {
                (Answer::Matches { matches, truncated, unsearched }, _)
                    if result.matches.len() + matches.len() + result.unsearched.len() + unsearched.len()
                        <= MAX_ENTRIES =>
                {
                    result.truncated |= truncated;
                    result.unsearched.extend(unsearched);
                    let convert = |m: forkyard_guest::protocol::MatchMeta| GrepMatch {
                        path: m.path,
                        line: m.line,
                        text: m.text,
                    };
                    result.matches.extend(matches.into_iter().map(convert));
                }
                (Answer::Done, _) => return Ok(result),
                (Answer::Matches { .. }, _) => return Err(too_much()),
                (other, _) => return Err(unexpected(&other)),
            }
        }
    }

    /// Checks sizes and counts against what was asked for; what the paths mean is for the caller to judge.
    pub async fn git_export(&self, export: GitExport) -> Result<WorkDiff> {
        let GitExport { repo, base, max_bytes, max_files } = export;
        let base: Vec<(String, u32, String)> = base.into_iter().map(|e| (e.path, e.mode, e.oid)).collect();
        let body = serde_json::to_vec(&base).expect("strings and numbers");
        if body.len() + 4096 > forkyard_guest::protocol::MAX_FRAME_TO_GUEST {
            return Err(SandboxError::new(ErrorKind::TooLarge, "the base has too many files for an export"));
        }
        let mut answers = self.send(Op::GitExport { repo, max_bytes, max_files }, &body).await?;
        let mut diff = WorkDiff::default();
        let mut budget = max_bytes;
        loop {
            match answers.next().await? {
                (Answer::Changed { path, mode, size }, _) => {
                    if size > budget || diff.changed.len() as u64 >= max_files {
                        return Err(too_much());
                    }
                    budget -= size;
                    let mut data = BytesMut::new();
                    while (data.len() as u64) < size {
                        match answers.next().await? {
                            (Answer::Data, part)
                                if (data.len() + part.len()) as u64 <= size && !part.is_empty() =>
                            {
                                data.extend_from_slice(&part);
                            }
                            (other, _) => return Err(unexpected(&other)),
                        }
                    }
                    diff.changed.push(ChangedFile { path, mode, data: data.freeze() });
                }
                (Answer::Exported { deleted, skipped }, _) => {
                    if diff.deleted.len() + diff.skipped.len() + deleted.len() + skipped.len() > MAX_ENTRIES {
                        return Err(too_much());
                    }
                    diff.deleted.extend(deleted);
                    diff.skipped.extend(skipped);
                }
                (Answer::Done, _) => {
                    diff.changed.sort_by(|a, b| a.path.cmp(&b.path));
                    return Ok(diff);
                }
                (other, _) => return Err(unexpected(&other)),
            }
        }
    }
}

/// An upload that is given up leaves no temporary file.
struct AbortOnDrop<'a> {
    client: &'a GuestClient,
    write: u32,
    armed: bool,
}

impl Drop for AbortOnDrop<'_> {
    fn drop(&mut self) {
        if self.armed {
            self.client.tell(Op::Abort { write: self.write });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_that_is_refused_comes_with_what_to_do() {
        let about = |message: &str| of_path(SandboxError::new(ErrorKind::Invalid, message)).hint.unwrap();
        assert!(about("/workspace: is a directory").contains("sandbox ls"));
        assert!(about("/proc/1/root: Too many levels of symbolic links (os error 40)").contains("/proc"));
        assert!(about("a/b: Not a directory (os error 20)").contains("is a file"));
        assert!(about("is a directory/x: Invalid argument (os error 22)").contains("zero bytes"));
    }
}
