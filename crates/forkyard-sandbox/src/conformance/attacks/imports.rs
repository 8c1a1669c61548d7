//! Archives of snapshots that were made to break out of where they are unpacked.

use std::io::{BufRead, BufReader, Read};
use std::sync::Arc;

use forkyard_core::SnapshotId;
use forkyard_guest::layer::Entry;
use forkyard_guest::protocol::encode;

use super::attack;
use crate::conformance::{Case, CaseResult, Ctx, Failed, ensure, ensure_eq};
use crate::{ErrorKind, Labels, ProviderKind, Root, Sandbox, SandboxSpec};

pub fn cases() -> Vec<Case> {
    let imports = attack!(hostile_archives, [9],
        "An imported snapshot with `..`, absolute names, a way through a symlink, devices, setuid programs",
        Denied by local "names of one part, unpacked in a fork without rights" docker "names of one part, unpacked inside");
    vec![Case { applies: |c| c.snapshot, ..imports }]
}

type Frames = Vec<(Entry, Vec<u8>)>;

/// The archive of an empty sandbox, with other contents.
struct Forger {
    head: Vec<u8>,
    /// Which it may start from, where the archive names one.
    image: Option<String>,
    /// Streams that follow the forged one.
    more: usize,
}

impl Forger {
    async fn new(ctx: &Ctx) -> Result<Forger, Failed> {
        let sandbox = ctx.sandbox().await?;
        let (id, dir) = (name(ctx)?, tempfile::tempdir()?);
        let archive = dir.path().join("archive");
        sandbox.snapshot(&id, &Labels::new()).await?;
        let exported = ctx.provider.export_snapshot(&id, &archive).await;
        ctx.provider.remove_snapshot(&id).await?;
        exported?;
        let mut head = Vec::new();
        BufReader::new(std::fs::File::open(&archive)?).take(64 << 10).read_until(b'\n', &mut head)?;
        let local = ctx.provider.capabilities().provider == ProviderKind::Local;
        let mut value: serde_json::Value = serde_json::from_slice(&head)?;
        let image = value["image"].as_str().map(String::from);
        if local {
            value["layers"] = 1.into();
            head = serde_json::to_vec(&value)?;
            head.push(b'\n');
        }
        Ok(Forger { head, image, more: if local { 0 } else { 2 } })
    }

    fn archive(&self, frames: &[u8]) -> Vec<u8> {
        let mut archive = self.head.clone();
        archive.extend_from_slice(frames);
        for _ in 0..self.more {
            archive.extend(encode(&Entry::End, b""));
        }
        archive
    }
}

fn name(ctx: &Ctx) -> Result<SnapshotId, Failed> {
    SnapshotId::new(ctx.id().as_str()).map_err(|e| Failed::new(e.to_string()))
}

fn stream(frames: Frames) -> Vec<u8> {
    frames.iter().chain(&[(Entry::End, Vec::new())]).flat_map(|(entry, body)| encode(entry, body)).collect()
}

fn file(name: &str) -> (Entry, Vec<u8>) {
    (Entry::File { mode: 0o6777, size: 1, mtime_ns: 0, number: Some(1) }, name.into())
}

fn dir(name: &str) -> (Entry, Vec<u8>) {
    (Entry::Dir { mode: 0o755, opaque: false }, name.into())
}

fn link(name: &str, target: &str) -> (Entry, Vec<u8>) {
    (Entry::Symlink { mtime_ns: 0 }, format!("{name}\0{target}").into())
}

const UP: Entry = Entry::Up { mtime_ns: 0 };

async fn hostile_archives(ctx: &Ctx) -> CaseResult {
    let forger = Forger::new(ctx).await?;
    let outside = tempfile::tempdir()?;
    let target = outside.path().display().to_string();
    let dir_up = || (UP, Vec::new());
    let hostile: Vec<(&str, Vec<u8>)> = vec![
        ("..", stream(vec![file("../escape")])),
        ("an absolute name", stream(vec![file(&format!("{target}/escape"))])),
        ("a name of two parts", stream(vec![dir("d"), dir_up(), file("d/f")])),
        ("more ups than downs", stream(vec![dir_up(), dir_up(), file("escape")])),
        ("a folder that is not closed", stream(vec![dir("d")])),
        ("a link to nothing", stream(vec![(Entry::Hard { number: 9 }, b"mine".to_vec())])),
        ("bytes beyond a file", stream(vec![file("f"), (Entry::Data { at: 1 << 40 }, b"x".to_vec())])),
        ("a device", encode(&serde_json::json!({ "k": "device", "mode": 0o666, "device": 0x0801 }), b"disk")),
        ("a frame without end", vec![0xff; 64]),
    ];
    let work = tempfile::tempdir()?;
    let path = work.path().join("archive");
    for (what, frames) in hostile {
        std::fs::write(&path, forger.archive(&frames))?;
        let id = name(ctx)?;
        let refused = ctx.provider.import_snapshot(&id, &path, forger.image.as_deref()).await.err();
        ensure!(refused.as_ref().is_some_and(|e| e.kind == ErrorKind::Invalid), "{what}: {refused:?}");
        ensure!(ctx.provider.snapshots().await?.iter().all(|s| s.id != id), "{what} is listed");
    }
    // A folder by the name of a symlink: refused at once, or unpacked where it leads nowhere.
    let through = stream(vec![link("way", &target), dir("way"), file("escape"), dir_up()]);
    try_inside(ctx, &forger, &path, &through).await?;
    // What may be in an archive loses what must not: setuid bits, and a way out.
    let tame = stream(vec![file("setuid"), (Entry::Data { at: 0 }, b"x".to_vec()), link("out", &target)]);
    let Some(sandbox) = try_inside(ctx, &forger, &path, &tame).await? else {
        return Err(Failed::new("a sound archive was refused"));
    };
    let mut modes = Vec::new();
    for dir in ["", "/workspace"] {
        modes.extend(sandbox.stat(&format!("{dir}/setuid")).await.map(|info| info.mode & 0o7777));
        ensure!(sandbox.list_files(&format!("{dir}/out")).await.is_err(), "a link leads out");
    }
    ensure_eq!(modes, [0o777]);
    ensure_eq!(outside.path().read_dir()?.count(), 0);
    Ok(())
}

/// Imports and starts from it, if the archive is taken at all.
async fn try_inside(
    ctx: &Ctx,
    forger: &Forger,
    path: &std::path::Path,
    frames: &[u8],
) -> Result<Option<Arc<dyn Sandbox>>, Failed> {
    std::fs::write(path, forger.archive(frames))?;
    let id = name(ctx)?;
    if ctx.provider.import_snapshot(&id, path, forger.image.as_deref()).await.is_err() {
        return Ok(None);
    }
    let spec = SandboxSpec { root: Root::Snapshot(id.clone()), ..ctx.spec.clone() };
    let made = ctx.sandbox_with(&spec).await;
    ctx.provider.remove_snapshot(&id).await?;
    Ok(made.ok())
}
