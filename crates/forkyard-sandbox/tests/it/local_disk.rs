//! A disk limit that the kernel keeps: on request, and under `strict` where it has no quotas, a local sandbox has a disk of its own.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use forkyard_core::{Attempt, SandboxId, SnapshotId};
use forkyard_sandbox::local::{LocalOptions, LocalProvider};
use forkyard_sandbox::{ErrorKind, Labels, LimitMeans, Provider, Root, SandboxSpec, SnapshotMode};

use crate::local::{as_ordinary_user, assert_empty, sweep_until_empty};
use crate::local_roots::{offline, sh};

const DISK: u64 = 64 << 20;

fn open(state: &Path) -> LocalProvider {
    LocalProvider::new(state, LocalOptions::default()).unwrap()
}

fn id(name: &str) -> SandboxId {
    SandboxId::new(name).unwrap()
}

fn own_disk() -> SandboxSpec {
    let mut spec = offline(Root::Default);
    (spec.disk_image, spec.limits.disk_bytes) = (true, DISK);
    spec
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Loop devices over files of this state folder.
fn devices(state: &Path) -> Vec<PathBuf> {
    let state = state.canonicalize().unwrap();
    let devices = std::fs::read_dir("/sys/block").unwrap().flatten().map(|entry| entry.path());
    devices
        .filter(|device| {
            let file = std::fs::read_to_string(device.join("loop/backing_file")).unwrap_or_default();
            Path::new(file.trim_end()).starts_with(&state)
        })
        .collect()
}

/// The kernel frees a device a moment after its last user.
async fn no_devices(state: &Path) {
    let freed = async {
        while !devices(state).is_empty() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(30), freed).await.expect("a loop device stays");
}

#[tokio::test]
async fn who_fills_its_own_disk_gets_no_space() {
    let dir = tempfile::tempdir().unwrap();
    let provider = open(dir.path());
    let made = provider.create(&id("full"), Attempt(1), &own_disk()).await;
    if !is_root() {
        let refused = made.err().unwrap();
        assert_eq!((refused.kind, refused.hint.as_deref()), (ErrorKind::Unsupported, Some("run as root")));
        provider.settle().await;
        return assert_empty(dir.path());
    }
    let sandbox = made.unwrap();
    assert_eq!(sandbox.info().await.unwrap().achieved.disk, LimitMeans::Kernel);
    assert_eq!(devices(dir.path()).len(), 1);
    let (code, out) = sh(&sandbox, "echo kept > small; head -c 200M /dev/zero > big").await;
    assert!(code != 0 && out.contains("No space left on device"), "{code}: {out}");
    // It lives, has its files, and goes on as soon as there is room.
    assert_eq!(
        sh(&sandbox, "cat small; rm big; echo more > other; cat other").await,
        (0, "kept\nmore\n".into())
    );
    let image = dir.path().join("sandboxes/full/disk.img").metadata().unwrap();
    assert!(
        image.len() <= DISK && image.blocks() * 512 <= DISK + (1 << 20),
        "the host gave more than was asked"
    );
    // A snapshot is a copy; a child of it has a disk of its own again.
    let snapshot = SnapshotId::new("copy").unwrap();
    assert_eq!(sandbox.snapshot(&snapshot, &Labels::new()).await.unwrap().mode, SnapshotMode::Copied);
    assert_eq!(sh(&sandbox, "echo later > small").await.0, 0);
    let child = SandboxSpec { root: Root::Snapshot(snapshot.clone()), ..own_disk() };
    let child = provider.create(&id("child"), Attempt(1), &child).await.unwrap();
    assert_eq!(sh(&child, "cat small").await.1, "kept\n");
    assert_eq!(devices(dir.path()).len(), 2);
    // Stopped it holds no device; started it has its files.
    provider.stop(&id("full")).await.unwrap();
    provider.destroy(&id("child")).await.unwrap();
    no_devices(dir.path()).await;
    let sandbox = provider.start(&id("full"), Attempt(2)).await.unwrap();
    assert_eq!(sh(&sandbox, "cat small other").await.1, "later\nmore\n");
    provider.destroy(&id("full")).await.unwrap();
    provider.remove_snapshot(&snapshot).await.unwrap();
    provider.settle().await;
    no_devices(dir.path()).await;
    assert_empty(dir.path());
}

#[tokio::test]
async fn strict_takes_whatever_means_the_kernel_has() {
    let dir = tempfile::tempdir().unwrap();
    let provider = open(dir.path());
    let spec = SandboxSpec { strict: true, disk_image: false, ..own_disk() };
    match provider.create(&id("strict"), Attempt(1), &spec).await {
        Ok(sandbox) => assert_eq!(sandbox.info().await.unwrap().achieved.disk, LimitMeans::Kernel),
        Err(e) => assert!(!is_root() && e.kind == ErrorKind::Unsupported && e.hint.is_some(), "{e}"),
    }
    provider.destroy(&id("strict")).await.unwrap();
    provider.settle().await;
    no_devices(dir.path()).await;
    assert_empty(dir.path());
}

/// A file system that is soon full.
struct Small {
    dir: tempfile::TempDir,
}

impl Small {
    fn new() -> Small {
        let dir = tempfile::tempdir().unwrap();
        let (image, state) = (dir.path().join("image"), dir.path().join("state"));
        std::fs::File::create(&image).unwrap().set_len(32 << 20).unwrap();
        std::fs::create_dir(&state).unwrap();
        let run = |program: &str, args: &[&str], path: &[&Path]| {
            let status = Command::new(program).args(args).args(path).stdout(Stdio::null()).status();
            assert!(status.unwrap().success(), "{program}");
        };
        run("mkfs.ext4", &["-q", "-F", "-m", "0"], &[&image]);
        run("mount", &["-o", "loop"], &[&image, &state]);
        Small { dir }
    }

    fn state(&self) -> PathBuf {
        self.dir.path().join("state/forkyard")
    }

    /// To the last block.
    fn fill(&self) -> PathBuf {
        let path = self.dir.path().join("state/filler");
        let mut file = std::fs::File::create(&path).unwrap();
        let full = loop {
            if let Err(e) = std::io::Write::write_all(&mut file, &[1; 4096]) {
                break e;
            }
        };
        assert_eq!(full.kind(), std::io::ErrorKind::StorageFull);
        path
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.dir.path().join("state")).status();
    }
}

/// The host's own disk, not a sandbox's.
#[tokio::test]
async fn a_full_host_is_told_and_loses_nothing() {
    if !is_root() {
        return; // nobody else mounts anything
    }
    let small = Small::new();
    let provider = open(&small.state());
    let spec = offline(Root::Default);
    let name = |name: &str| SnapshotId::new(name).unwrap();
    let sandbox = provider.create(&id("before"), Attempt(1), &spec).await.unwrap();
    assert_eq!(sh(&sandbox, "echo kept > file").await.0, 0);
    sandbox.snapshot(&name("good"), &Labels::new()).await.unwrap();
    let archive = small.dir.path().join("archive");
    provider.export_snapshot(&name("good"), &archive).await.unwrap();
    assert_eq!(sh(&sandbox, "echo more >> file").await.0, 0);
    provider.settle().await;

    let filler = small.fill();
    let full = |what: &str, e: Option<forkyard_sandbox::SandboxError>| {
        let e = e.unwrap_or_else(|| panic!("{what} found room"));
        assert_eq!((e.kind, e.hint.is_some()), (ErrorKind::TooLarge, true), "{what}: {e}");
    };
    full("a sandbox", provider.create(&id("after"), Attempt(1), &spec).await.err());
    let child = SandboxSpec { root: Root::Snapshot(name("good")), ..spec.clone() };
    full("a child", provider.create(&id("child"), Attempt(1), &child).await.err());
    full("a snapshot", sandbox.snapshot(&name("more"), &Labels::new()).await.err());
    full("an import", provider.import_snapshot(&name("again"), &archive, None).await.err());
    let (code, out) = sh(&sandbox, "cat file; head -c 100000 /dev/zero > other").await;
    assert!(code != 0 && out.starts_with("kept\nmore\n") && out.contains("No space left"), "{code}: {out}");
    let listed = async || {
        let sandboxes = provider.list(&Labels::new()).await.unwrap().into_iter().map(|s| s.id.to_string());
        let snapshots = provider.snapshots().await.unwrap().into_iter().map(|s| s.id.to_string());
        sandboxes.chain(snapshots).collect::<Vec<_>>()
    };
    assert_eq!(listed().await, ["before", "good"]);
    provider.sweep().await.unwrap();
    assert_eq!(listed().await, ["before", "good"]);

    std::fs::remove_file(filler).unwrap();
    let snapshot = sandbox.snapshot(&name("more"), &Labels::new()).await.unwrap();
    let child = SandboxSpec { root: Root::Snapshot(snapshot.id), ..spec };
    let child = provider.create(&id("child"), Attempt(1), &child).await.unwrap();
    assert_eq!(sh(&child, "cat file").await, (0, "kept\nmore\n".into()));
    for name in ["good", "more"].map(name) {
        provider.remove_snapshot(&name).await.unwrap();
    }
    for name in ["before", "child"].map(id) {
        provider.destroy(&name).await.unwrap();
    }
    provider.settle().await;
    assert_empty(&small.state());
}

#[test]
fn an_ordinary_user_is_told_why_not() {
    as_ordinary_user("local_disk::who_fills_its_own_disk_gets_no_space");
}

/// Not a test by itself: makes sandboxes with disks of their own until it is killed.
#[tokio::test]
#[ignore = "run by another test"]
async fn an_owner_with_disks() {
    let Some(state) = std::env::var_os("OWNER_STATE") else { return };
    let provider = open(Path::new(&state));
    for i in 0.. {
        println!("made");
        let sandbox = provider.create(&id(&format!("disk{i}")), Attempt(1), &own_disk()).await.unwrap();
        assert_eq!(sh(&sandbox, "head -c 8M /dev/zero > file").await.0, 0);
    }
}

#[tokio::test]
async fn a_killed_owner_leaves_no_device() {
    use std::io::BufRead;
    if !is_root() {
        return; // others can't have one
    }
    let dir = tempfile::tempdir().unwrap();
    for round in 0..crate::local::scaled(5, 50) {
        let mut owner = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "local_disk::an_owner_with_disks", "--ignored", "--nocapture"])
            .env("OWNER_STATE", dir.path())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = std::io::BufReader::new(owner.stdout.as_mut().unwrap()).lines();
        assert!(lines.by_ref().map_while(Result::ok).any(|line| line == "made"));
        tokio::time::sleep(Duration::from_micros(u64::from(round) * 23_456_789 % 150_000)).await;
        owner.kill().unwrap();
        owner.wait().unwrap();
        let provider = open(dir.path());
        provider.sweep().await.unwrap();
        for info in provider.list(&Labels::new()).await.unwrap() {
            provider.destroy(&info.id).await.unwrap();
        }
        sweep_until_empty(&provider, dir.path()).await;
        no_devices(dir.path()).await;
    }
}

#[tokio::test]
async fn the_kernel_takes_a_command_before_the_guest() {
    let dir = tempfile::tempdir().unwrap();
    let provider = open(dir.path());
    let sandbox = provider.create(&id("score"), Attempt(1), &offline(Root::Default)).await.unwrap();
    // The guest takes the command's score for the moment in which it starts one, and may be at that still.
    let script = "for i in 1 2 3 4 5 6 7 8 9; do
        [ $(cat /proc/1/oom_score_adj) -lt $(cat /proc/self/oom_score_adj) ] && break; sleep 0.2
    done; cat /proc/self/oom_score_adj /proc/1/oom_score_adj";
    let (_, scores) = sh(&sandbox, script).await;
    let scores: Vec<i32> = scores.lines().map(|line| line.parse().unwrap()).collect();
    assert!(matches!(scores[..], [command, guest] if command > guest), "{scores:?}");
    provider.destroy(&id("score")).await.unwrap();
    provider.settle().await;
}
