//! Snapshots: the image's name, and each of its volumes as a stream that the guest packed ([`forkyard_guest::layer`]). A fork
//! unpacks them into volumes of its own, so it costs by size; holes stay holes.

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, BufWriter, Read, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use bytes::{Buf, Bytes};
use forkyard_core::SnapshotId;
use forkyard_guest::layer;
use forkyard_guest::zygote::UnpackLimits;
use tokio::sync::mpsc;

use super::container::VOLUMES;
use super::record::{Home, SnapshotRecord};
use crate::error::FULL_HINT;
use crate::guest_client::GuestClient;
use crate::traits::stands_too_long;
use crate::{ErrorKind, ProviderKind, Result, SandboxError, SnapshotInfo};

/// Of one volume. Bounds against a hostile guest or archive; disks fill long before.
const LIMITS: UnpackLimits = UnpackLimits { bytes: 256 << 30, entries: 10_000_000 };
/// The first line of an exported archive.
const MAX_RECORD_BYTES: u64 = 64 << 10;
/// Longest image reference that an import may name.
const MAX_IMAGE_LEN: usize = 255;
/// Pieces on their way from the guest to the disk.
const QUEUE: usize = 16;
const RECORD_FILE: &str = "snapshot.json";

/// The stream of a volume.
pub fn file_name(short: &str) -> String {
    format!("{short}.layer")
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
        let error = SandboxError::new(kind, format!("{what}: {e}"));
        if kind == ErrorKind::TooLarge { error.hint(FULL_HINT) } else { error }
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
        Ok(Staging { dir: home.stage(&target)?, target })
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

/// Packs the volumes of a sandbox whose commands stand still, which they do for no longer than `within`.
pub async fn take(
    home: &Home,
    guest: &GuestClient,
    record: SnapshotRecord,
    within: Option<Duration>,
) -> Result<SnapshotInfo> {
    let id = record.info.id.clone();
    let what = format!("snapshot {id}");
    let staging = Staging::new(home, &id).map_err(failed(&what))?;
    let pack = async {
        let mut bytes = 0;
        for (inside, short) in VOLUMES {
            bytes += packed(guest, inside, staging.dir.path().join(file_name(short))).await?;
        }
        Ok(bytes)
    };
    let packed = match within {
        Some(within) => tokio::time::timeout(within, pack).await.unwrap_or_else(|_| Err(stands_too_long())),
        None => pack.await,
    };
    let mut record = record;
    record.info.bytes = Some(packed?);
    blocking(move || staging.commit(&record)).await.map_err(failed(&what))?;
    existing(home, &id)
}

/// The info of a snapshot that exists.
pub fn existing(home: &Home, id: &SnapshotId) -> Result<SnapshotInfo> {
    home.read_snapshot(id)?
        .map(|record| record.info)
        .ok_or_else(|| SandboxError::new(ErrorKind::NotFound, format!("no snapshot {id}")))
}

/// One volume, from the guest into a file. The guest may have been taken over by what it guards, so its stream is checked.
async fn packed(guest: &GuestClient, inside: &str, to: PathBuf) -> Result<u64> {
    let (sender, receiver) = mpsc::channel(QUEUE);
    let writing = tokio::task::spawn_blocking(move || {
        let mut file = BufWriter::new(File::create(to)?);
        let bytes = layer::copy_checked(&mut Pieces { receiver, now: Bytes::new() }, &mut file, LIMITS)?;
        file.flush()?;
        Ok(bytes)
    });
    let sent = guest.pack(inside, &sender).await;
    drop(sender);
    let written = writing.await.map_err(|e| failed(inside)(io::Error::other(e)))?;
    sent?;
    written.map_err(failed(inside))
}

/// A stream's bytes as they arrive, for a thread that reads.
struct Pieces {
    receiver: mpsc::Receiver<Bytes>,
    now: Bytes,
}

impl Read for Pieces {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.now.is_empty() {
            match self.receiver.blocking_recv() {
                Some(piece) => self.now = piece,
                None => return Ok(0),
            }
        }
        let n = self.now.len().min(buffer.len());
        self.now.copy_to_slice(&mut buffer[..n]);
        Ok(n)
    }
}

pub async fn remove(home: &Home, id: &SnapshotId) -> Result<()> {
    let (home, path) = (home.clone(), home.snapshot(id));
    // Out of sight first, whole: who is killed in the middle of it leaves what a sweep knows for a leftover.
    let removed = blocking(move || {
        let staging = home.stage(&path)?;
        match fs::rename(&path, staging.path().join("removed")) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
            Ok(()) | Err(_) => staging.close(),
        }
    });
    removed.await.map_err(failed(&format!("snapshot {id}")))
}

/// The record as one line, then the volumes' streams one after another; whole or not at all.
pub async fn export(home: &Home, id: &SnapshotId, to: &Path) -> Result<()> {
    existing(home, id)?;
    let (dir, to) = (home.snapshot(id), to.to_path_buf());
    let write = move || {
        let parent = to.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let mut file = tempfile::NamedTempFile::new_in(parent)?;
        let record: SnapshotRecord = serde_json::from_slice(&fs::read(dir.join(RECORD_FILE))?)?;
        let mut line = serde_json::to_vec(&record)?;
        line.push(b'\n');
        file.write_all(&line)?;
        for (_, short) in VOLUMES {
            io::copy(&mut File::open(dir.join(file_name(short)))?, file.as_file_mut())?;
        }
        file.persist(&to).map_err(|e| e.error)?;
        Ok(())
    };
    blocking(write).await.map_err(failed(&format!("export of snapshot {id}")))
}

/// The archive is hostile: every frame of it is looked at before it is kept. So is the image that it names: commands would see all
/// that it holds, and its registry would be asked for it.
pub async fn import(home: &Home, id: &SnapshotId, from: &Path, image: &str) -> Result<SnapshotInfo> {
    if let Some(record) = home.read_snapshot(id)? {
        return Ok(record.info);
    }
    let what = format!("import of {}", from.display());
    let staging = Staging::new(home, id).map_err(failed(&what))?;
    let (id, from, allowed) = (id.clone(), from.to_path_buf(), image.to_string());
    let read = move || {
        let bad = |why: &str| io::Error::new(io::ErrorKind::InvalidData, why.to_string());
        let mut archive = BufReader::new(File::open(from)?);
        let mut line = Vec::new();
        (&mut archive).take(MAX_RECORD_BYTES).read_until(b'\n', &mut line)?;
        let mut record: SnapshotRecord =
            serde_json::from_slice(&line).map_err(|_| bad("not an exported snapshot"))?;
        if record.info.provider != ProviderKind::Docker {
            return Err(bad("a snapshot of another provider"));
        }
        let plain = |c: char| c.is_ascii_alphanumeric() || "._-/:@".contains(c);
        if record.image.is_empty() || record.image.len() > MAX_IMAGE_LEN || !record.image.chars().all(plain) {
            return Err(bad("its image reference is not one"));
        }
        if record.image != allowed {
            return Ok(Err(record.image));
        }
        let mut bytes = 0;
        for (_, short) in VOLUMES {
            let mut to = BufWriter::new(File::create(staging.dir.path().join(file_name(short)))?);
            bytes += layer::copy_checked(&mut archive, &mut to, LIMITS)?;
            to.flush()?;
        }
        if !archive.fill_buf()?.is_empty() {
            return Err(bad("more follows its end"));
        }
        record.info.id = id;
        record.info.bytes = Some(bytes);
        staging.commit(&record)?;
        Ok(Ok(record.info))
    };
    blocking(read).await.map_err(failed(&what))?.map_err(|named| {
        SandboxError::new(
            ErrorKind::Denied,
            format!("{what}: it starts from the image {named:?}, not from {image:?}"),
        )
        .hint(format!("if you trust it with that image: --image {named}"))
    })
}
