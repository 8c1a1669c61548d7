//! Snapshots: the image's name, and an archive of each of its volumes. A fork unpacks them into volumes of its own, so it
//! costs by size.

use std::fs::{self, File};
use std::io::{self, BufReader, BufWriter, Read, Write};
use std::path::{Path, PathBuf};

use bollard::query_parameters::{DownloadFromContainerOptionsBuilder, UploadToContainerOptionsBuilder};
use bollard::{Docker, body_try_stream};
use bytes::{Buf, Bytes};
use forkyard_core::SnapshotId;
use futures::StreamExt;
use tokio::sync::mpsc;

use super::archive::{Copied, sanitise};
use super::container::VOLUMES;
use super::engine::translate;
use super::record::{Home, SnapshotRecord};
use crate::{ErrorKind, ProviderKind, Result, SandboxError, SnapshotInfo};

/// Of one archive. A bound against a hostile one; disks fill long before.
const MAX_ARCHIVE_BYTES: u64 = 256 << 30;
const MAX_RECORD_BYTES: u64 = 1 << 20;
/// Longest image reference that an import may name.
const MAX_IMAGE_LEN: usize = 255;
/// Pieces on their way from the engine to the disk.
const QUEUE: usize = 16;
const RECORD_FILE: &str = "snapshot.json";

/// The archive of a volume.
fn file_name(short: &str) -> String {
    format!("{short}.tar")
}

fn failed(what: &str) -> impl FnOnce(io::Error) -> SandboxError {
    let what = what.to_string();
    move |e| {
        let kind = match e.kind() {
            io::ErrorKind::InvalidData | io::ErrorKind::InvalidInput | io::ErrorKind::UnexpectedEof => {
                ErrorKind::Invalid
            }
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => ErrorKind::TooLarge,
            io::ErrorKind::NotFound => ErrorKind::NotFound,
            _ => ErrorKind::Unavailable,
        };
        SandboxError::new(kind, format!("{what}: {e}"))
    }
}

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> io::Result<T> + Send + 'static) -> io::Result<T> {
    tokio::task::spawn_blocking(work).await.map_err(io::Error::other)?
}

/// A snapshot in the making: a folder that becomes visible under its name as a whole, or not at all.
struct Staging {
    dir: tempfile::TempDir,
    target: PathBuf,
}

impl Staging {
    fn new(home: &Home, id: &SnapshotId) -> io::Result<Staging> {
        let target = home.snapshot(id);
        let parent = target.parent().unwrap_or(home.root());
        // The dot keeps it out of lists: ids have none.
        let dir = tempfile::Builder::new().prefix(".new-").tempdir_in(parent)?;
        Ok(Staging { dir, target })
    }

    /// Ok also if another one was first.
    fn commit(self, record: &SnapshotRecord) -> io::Result<()> {
        let mut file = File::create(self.dir.path().join(RECORD_FILE))?;
        serde_json::to_writer(&mut file, record)?;
        file.sync_all()?;
        match fs::rename(self.dir.path(), &self.target) {
            Ok(()) => {
                // The folder has its new name; there is nothing left to remove.
                let _ = self.dir.keep();
                Ok(())
            }
            Err(_) if self.target.join(RECORD_FILE).exists() => Ok(()),
            Err(e) => Err(e),
        }
    }
}

/// Archives the volumes of a container that nobody writes to now.
pub async fn take(
    docker: &Docker,
    home: &Home,
    container: &str,
    record: SnapshotRecord,
    user: (u32, u32),
) -> Result<SnapshotInfo> {
    let id = record.info.id.clone();
    let what = format!("snapshot {id}");
    let staging = Staging::new(home, &id).map_err(failed(&what))?;
    let mut bytes = 0;
    for (inside, short) in VOLUMES {
        let to = staging.dir.path().join(file_name(short));
        let copied = download(docker, container, inside, to, user).await?;
        bytes += copied.bytes;
    }
    let mut record = record;
    record.info.bytes = Some(bytes);
    blocking(move || staging.commit(&record)).await.map_err(failed(&what))?;
    existing(home, &id)
}

/// The info of a snapshot that exists.
pub fn existing(home: &Home, id: &SnapshotId) -> Result<SnapshotInfo> {
    home.read_snapshot(id)?
        .map(|record| record.info)
        .ok_or_else(|| SandboxError::new(ErrorKind::NotFound, format!("no snapshot {id}")))
}

async fn download(
    docker: &Docker,
    container: &str,
    inside: &str,
    to: PathBuf,
    user: (u32, u32),
) -> Result<Copied> {
    let options = DownloadFromContainerOptionsBuilder::default().path(&format!("{inside}/.")).build();
    let mut stream = Box::pin(docker.download_from_container(container, Some(options)));
    let (sender, receiver) = mpsc::channel(QUEUE);
    let writing = tokio::task::spawn_blocking(move || {
        let file = BufWriter::new(File::create(to)?);
        sanitise(Pieces { receiver, now: Bytes::new() }, file, user.0, user.1, MAX_ARCHIVE_BYTES)
    });
    let mut fault = None;
    while let Some(piece) = stream.next().await {
        let stop = piece.is_err();
        if let Err(e) = &piece {
            fault = Some(translate(inside, e));
        }
        let piece = piece.map_err(io::Error::other);
        // The writer stops reading when it fails, or when the archive's end mark was seen.
        if sender.send(piece).await.is_err() || stop {
            break;
        }
    }
    drop(sender);
    let written = writing.await.map_err(|e| failed(inside)(io::Error::other(e)))?;
    match fault {
        Some(fault) => Err(fault),
        None => written.map_err(failed(inside)),
    }
}

/// An archive's bytes as they arrive, for a thread that reads.
struct Pieces {
    receiver: mpsc::Receiver<io::Result<Bytes>>,
    now: Bytes,
}

impl Read for Pieces {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.now.is_empty() {
            match self.receiver.blocking_recv() {
                Some(piece) => self.now = piece?,
                None => return Ok(0),
            }
        }
        let n = self.now.len().min(buffer.len());
        self.now.copy_to_slice(&mut buffer[..n]);
        Ok(n)
    }
}

/// Unpacks a snapshot into the fresh volumes of a container that was not started yet.
pub async fn restore(docker: &Docker, home: &Home, id: &SnapshotId, container: &str) -> Result<()> {
    for (inside, short) in VOLUMES {
        let path = home.snapshot(id).join(file_name(short));
        let what = format!("snapshot {id}");
        let file = tokio::fs::File::open(&path).await.map_err(failed(&what))?;
        let options = UploadToContainerOptionsBuilder::default().path(inside).build();
        let body = body_try_stream(tokio_util::io::ReaderStream::with_capacity(file, 256 << 10));
        docker.upload_to_container(container, Some(options), body).await.map_err(|e| translate(&what, &e))?;
    }
    Ok(())
}

pub async fn remove(home: &Home, id: &SnapshotId) -> Result<()> {
    let path = home.snapshot(id);
    let removed = blocking(move || match fs::remove_dir_all(&path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
        Ok(()) | Err(_) => Ok(()),
    });
    removed.await.map_err(failed(&format!("snapshot {id}")))
}

/// One archive of the record and the volumes' archives; whole or not at all.
pub async fn export(home: &Home, id: &SnapshotId, to: &Path) -> Result<()> {
    existing(home, id)?;
    let (dir, to) = (home.snapshot(id), to.to_path_buf());
    let write = move || {
        let parent = to.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let mut file = tempfile::NamedTempFile::new_in(parent)?;
        let mut builder = tar::Builder::new(BufWriter::new(file.as_file_mut()));
        let archives = VOLUMES.map(|(_, short)| file_name(short));
        for name in [RECORD_FILE].into_iter().chain(archives.iter().map(String::as_str)) {
            builder.append_file(name, &mut File::open(dir.join(name))?)?;
        }
        builder.into_inner()?.flush()?;
        file.persist(&to).map_err(|e| e.error)?;
        Ok(())
    };
    blocking(write).await.map_err(failed(&format!("export of snapshot {id}")))
}

/// The archive is hostile: known names, each once, each checked; what is inside is cleaned entry by entry.
pub async fn import(home: &Home, id: &SnapshotId, from: &Path, user: (u32, u32)) -> Result<SnapshotInfo> {
    if let Some(record) = home.read_snapshot(id)? {
        return Ok(record.info);
    }
    let what = format!("import of {}", from.display());
    let staging = Staging::new(home, id).map_err(failed(&what))?;
    let (id, from) = (id.clone(), from.to_path_buf());
    let read = move || {
        let bad = |why: &str| io::Error::new(io::ErrorKind::InvalidData, why.to_string());
        let mut archive = tar::Archive::new(BufReader::new(File::open(from)?));
        let mut record: Option<SnapshotRecord> = None;
        let mut seen = [false; VOLUMES.len()];
        let mut bytes = 0;
        for entry in archive.entries()? {
            let entry = entry?;
            let name = entry.path()?.to_string_lossy().into_owned();
            if entry.header().entry_type() != tar::EntryType::Regular {
                return Err(bad("not an exported snapshot"));
            }
            if name == RECORD_FILE && record.is_none() {
                let mut text = Vec::new();
                entry.take(MAX_RECORD_BYTES).read_to_end(&mut text)?;
                record = Some(serde_json::from_slice(&text)?);
            } else if let Some(i) = VOLUMES.iter().position(|(_, short)| file_name(short) == name)
                && !seen[i]
            {
                seen[i] = true;
                let to = BufWriter::new(File::create(staging.dir.path().join(&name))?);
                bytes += sanitise(entry, to, user.0, user.1, MAX_ARCHIVE_BYTES)?.bytes;
            } else {
                return Err(bad("not an exported snapshot"));
            }
        }
        let mut record =
            record.filter(|_| seen.iter().all(|s| *s)).ok_or_else(|| bad("not a whole snapshot"))?;
        if record.info.provider != ProviderKind::Docker {
            return Err(bad("a snapshot of another provider"));
        }
        let plain = |c: char| c.is_ascii_alphanumeric() || "._-/:@".contains(c);
        if record.image.is_empty() || record.image.len() > MAX_IMAGE_LEN || !record.image.chars().all(plain) {
            return Err(bad("its image reference is not one"));
        }
        record.info.id = id;
        record.info.bytes = Some(bytes);
        staging.commit(&record)?;
        Ok(record.info)
    };
    // The reader of archives says `other` to what is broken.
    let broken = |e: io::Error| match e.kind() {
        io::ErrorKind::Other => io::Error::new(io::ErrorKind::InvalidData, e),
        _ => e,
    };
    blocking(read).await.map_err(broken).map_err(failed(&what))
}
