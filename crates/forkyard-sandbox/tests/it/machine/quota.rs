//! Disk limits by project quotas. The machine's disk is mounted with them; the kernels that other tests run on may know none.

use std::os::fd::AsRawFd;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use forkyard_core::{Attempt, SnapshotId};
use forkyard_sandbox::local::{GUEST, Level, LocalOptions, LocalProvider, doctor};
use forkyard_sandbox::{
    ErrorKind, ExecEvent, ExecRequest, Labels, LimitMeans, Provider, Root, Sandbox, SandboxSpec, SnapshotMode,
};

use super::{Machine, id, machine, offline, provider};
use crate::local::{assert_empty, sweep_until_empty};
use crate::local_roots::sh;

const DISK: u64 = 32 << 20;
const REFUSED: &str = "Disk quota exceeded";
/// Q_GETNEXTQUOTA of projects, and where Forkyard's ids begin.
const NEXT_QUOTA: u32 = 0x80_0009 << 8 | 2;
const FIRST_ID: u32 = 0x4000_0000;
/// The kernel's own deletions are done a moment after ours.
const GONE_WITHIN: Duration = Duration::from_secs(60);

/// `struct if_nextdqblk` of the kernel.
#[repr(C)]
#[derive(Debug, Default, Clone, Copy)]
struct Quota {
    bytes_limit: u64,
    bytes_soft: u64,
    bytes: u64,
    entries_limit: u64,
    entries_soft: u64,
    entries: u64,
    times: [u64; 2],
    valid: u32,
    id: u32,
}

/// Projects of Forkyard's on the disk of this folder that have a limit or a file.
fn quotas(dir: &Path) -> Vec<Quota> {
    let dir = std::fs::File::open(dir).unwrap();
    let (mut found, mut from) = (Vec::new(), FIRST_ID);
    loop {
        let mut next = Quota::default();
        // SAFETY: the kernel writes one if_nextdqblk, which lives across the call and has its layout.
        let done =
            unsafe { libc::syscall(libc::SYS_quotactl_fd, dir.as_raw_fd(), NEXT_QUOTA, from, &raw mut next) };
        if done != 0 {
            let error = std::io::Error::last_os_error();
            assert_eq!(error.raw_os_error(), Some(libc::ENOENT), "{error}");
            return found;
        }
        if [next.bytes_limit, next.entries_limit, next.bytes, next.entries] != [0; 4] {
            found.push(next);
        }
        from = next.id + 1;
    }
}

/// Nothing of any sandbox is left, limits included.
async fn no_quotas(dir: &Path) {
    let gone = async {
        while !quotas(dir).is_empty() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    if tokio::time::timeout(GONE_WITHIN, gone).await.is_err() {
        panic!("quotas stay: {:?}", quotas(dir));
    }
}

fn small() -> SandboxSpec {
    let mut spec = offline();
    spec.limits.disk_bytes = DISK;
    spec
}

fn snapshot_id(name: &str) -> SnapshotId {
    SnapshotId::new(name).unwrap()
}

async fn snapshot(sandbox: &Arc<dyn Sandbox>, name: &str) -> SnapshotMode {
    sandbox.snapshot(&snapshot_id(name), &Labels::new()).await.unwrap().mode
}

async fn disk_means(sandbox: &Arc<dyn Sandbox>) -> LimitMeans {
    sandbox.info().await.unwrap().achieved.disk
}

async fn is_refused(sandbox: &Arc<dyn Sandbox>, script: &str) {
    let (code, out) = sh(sandbox, script).await;
    assert!(code != 0 && out.contains(REFUSED), "{script}: {code}: {out}");
}

async fn works(sandbox: &Arc<dyn Sandbox>, script: &str) {
    let (code, out) = sh(sandbox, script).await;
    assert_eq!(code, 0, "{script}: {out}");
}

/// Or it would be beyond its limit.
async fn nobody_leaves_its_project(sandbox: &Arc<dyn Sandbox>) {
    sandbox.write_file("/tmp/probe", GUEST.into(), Some(0o755)).await.unwrap();
    for path in ["/workspace", "/workspace/small"] {
        let (_, told) = sh(sandbox, &format!("/tmp/probe probe project {path}")).await;
        let errnos: Vec<&str> =
            told.lines().filter_map(|line| line.split_once(' ')).map(|way| way.1).collect();
        // A file hands nothing down: there is nothing to take away from it.
        let tried = if path == "/workspace" { 3 } else { 2 };
        assert!(errnos.len() == 3 && errnos[..tried].iter().all(|errno| *errno != "0"), "{path}: {told}");
    }
    works(sandbox, "rm /tmp/probe").await;
}

#[tokio::test]
#[ignore = "needs a machine of its own: cargo xtask vm"]
async fn the_kernel_keeps_the_disk_limit() {
    let (provider, dir) = provider();
    let sandbox = provider.create(&id("full"), Attempt(1), &small()).await.unwrap();
    if machine() != Machine::Root {
        assert_eq!(disk_means(&sandbox).await, LimitMeans::Watchdog);
        provider.destroy(&id("full")).await.unwrap();
        return provider.settle().await;
    }
    assert_eq!(disk_means(&sandbox).await, LimitMeans::Kernel);
    let found = doctor(&provider).await;
    let row = found.iter().find(|f| f.what == "disk limit").unwrap();
    assert!(row.level == Level::Ok && row.detail.contains("project quota") && row.fix.is_none(), "{row:?}");
    let set = quotas(dir.path());
    assert!(
        matches!(set[..], [one] if one.bytes_limit * 1024 == DISK && one.entries_limit == DISK / 4096),
        "{set:?}"
    );
    is_refused(&sandbox, "echo kept > small; head -c 48M /dev/zero > big").await;
    let used = sandbox.stats().await.unwrap().disk_bytes;
    assert!((DISK - (1 << 20)..=DISK).contains(&used), "{used} bytes");
    let refused = sandbox.write_file("more", vec![7; 1 << 20].into(), None).await.unwrap_err();
    assert!(refused.kind == ErrorKind::TooLarge && refused.hint.is_some(), "{refused:?}");
    // It lives, has its files, and goes on as soon as there is room.
    works(&sandbox, "rm big").await;
    nobody_leaves_its_project(&sandbox).await;
    works(&sandbox, "[ $(cat small) = kept ] && echo more > other").await;
    // Full again it can be frozen, and what was frozen counts.
    is_refused(&sandbox, "head -c 48M /dev/zero > big").await;
    assert_eq!(snapshot(&sandbox, "one").await, SnapshotMode::Sealed);
    is_refused(&sandbox, "head -c 1M /dev/zero > next").await;
    assert_eq!(sh(&sandbox, "cat small other").await.1, "kept\nmore\n");
    let used = sandbox.stats().await.unwrap().disk_bytes;
    assert!((DISK - (1 << 20)..=DISK + (1 << 20)).contains(&used), "{used} bytes");
    // A child has its own, all of it.
    let child = SandboxSpec { root: Root::Snapshot(snapshot_id("one")), ..small() };
    let child = provider.create(&id("child"), Attempt(1), &child).await.unwrap();
    assert_eq!(disk_means(&child).await, LimitMeans::Kernel);
    works(&child, "[ $(cat small) = kept ] && head -c 24M /dev/zero > own").await;
    is_refused(&child, "head -c 16M /dev/zero > more").await;
    // Started again it is as it was, full.
    provider.stop(&id("full")).await.unwrap();
    let sandbox = provider.start(&id("full"), Attempt(2)).await.unwrap();
    assert_eq!(disk_means(&sandbox).await, LimitMeans::Kernel);
    is_refused(&sandbox, "head -c 1M /dev/zero > next").await;
    assert_eq!(sh(&sandbox, "cat small").await.1, "kept\n");
    // What a snapshot keeps is limited by nobody once its sandbox is gone.
    provider.destroy(&id("full")).await.unwrap();
    provider.settle().await;
    let left = quotas(dir.path());
    assert_eq!(left.iter().filter(|quota| quota.bytes_limit != 0).count(), 1, "the child's alone: {left:?}");
    provider.destroy(&id("child")).await.unwrap();
    provider.remove_snapshot(&snapshot_id("one")).await.unwrap();
    provider.settle().await;
    no_quotas(dir.path()).await;
    assert_empty(dir.path());
}

#[tokio::test]
#[ignore = "needs a machine of its own: cargo xtask vm"]
async fn what_is_frozen_counts_and_what_is_copied_does_not() {
    if machine() != Machine::Root {
        return;
    }
    let (provider, dir) = provider();
    let sandbox = provider.create(&id("half"), Attempt(1), &small()).await.unwrap();
    works(&sandbox, "head -c 12M /dev/zero > a").await;
    assert_eq!(snapshot(&sandbox, "sealed").await, SnapshotMode::Sealed);
    works(&sandbox, "head -c 12M /dev/zero > b").await;
    is_refused(&sandbox, "head -c 12M /dev/zero > c").await;
    works(&sandbox, "rm c && mv b moved && ln moved linked && mkdir -p deep && mv moved deep/b").await;
    // Written to, a file of the frozen layer becomes one of the live layer, and has no room there.
    is_refused(&sandbox, "echo x >> a").await;
    works(&sandbox, "rm linked deep/b && echo x >> a").await;
    // While something runs it is a copy, which is nobody's.
    let mut command = sandbox.exec(ExecRequest::shell("echo up; sleep 600")).await.unwrap();
    assert_eq!(command.events.recv().await.unwrap().unwrap(), ExecEvent::Stdout("up\n".into()));
    let before = sandbox.stats().await.unwrap().disk_bytes;
    assert_eq!(snapshot(&sandbox, "copied").await, SnapshotMode::Copied);
    let after = sandbox.stats().await.unwrap().disk_bytes;
    assert!(after.abs_diff(before) < 1 << 20, "{before}, then {after}");
    command.control.signal(forkyard_sandbox::Signal::Kill).await.unwrap();
    drop(command);
    // Empty files fill a disk too.
    works(&sandbox, "mkdir many").await;
    let entries = "i=0; cd many; while [ $i -lt 10000 ] && : > $i; do i=$((i+1)); done; [ $i = 10000 ]";
    is_refused(&sandbox, entries).await;
    works(&sandbox, "rm -r many").await;
    for name in ["sealed", "copied"] {
        provider.remove_snapshot(&snapshot_id(name)).await.unwrap();
    }
    provider.destroy(&id("half")).await.unwrap();
    provider.settle().await;
    no_quotas(dir.path()).await;
    assert_empty(dir.path());
}

#[tokio::test]
#[ignore = "needs a machine of its own: cargo xtask vm"]
async fn strict_is_content_with_a_quota() {
    let (provider, dir) = provider();
    let strict = SandboxSpec { strict: true, ..small() };
    let own_disk = SandboxSpec { disk_image: true, ..small() };
    let image = |name: &str| dir.path().join("sandboxes").join(name).join("disk.img");
    if machine() != Machine::Root {
        for (name, spec) in [("strict", &strict), ("own", &own_disk)] {
            let refused = provider.create(&id(name), Attempt(1), spec).await.err().unwrap();
            assert_eq!((refused.kind, refused.hint.is_some()), (ErrorKind::Unsupported, true), "{refused}");
        }
        return provider.settle().await;
    }
    let sandbox = provider.create(&id("strict"), Attempt(1), &strict).await.unwrap();
    assert_eq!((disk_means(&sandbox).await, image("strict").exists()), (LimitMeans::Kernel, false));
    assert_eq!(snapshot(&sandbox, "one").await, SnapshotMode::Sealed);
    is_refused(&sandbox, "head -c 48M /dev/zero > big").await;
    // On request it is a disk all the same, and counts against nobody.
    let sandbox = provider.create(&id("own"), Attempt(1), &own_disk).await.unwrap();
    assert_eq!((disk_means(&sandbox).await, image("own").exists()), (LimitMeans::Kernel, true));
    let (code, out) = sh(&sandbox, "head -c 48M /dev/zero > big").await;
    assert!(code != 0 && out.contains("No space left on device"), "{code}: {out}");
    assert_eq!(quotas(dir.path()).iter().filter(|quota| quota.bytes_limit != 0).count(), 1);
    for name in ["strict", "own"] {
        provider.destroy(&id(name)).await.unwrap();
    }
    provider.remove_snapshot(&snapshot_id("one")).await.unwrap();
    provider.settle().await;
    no_quotas(dir.path()).await;
}

#[tokio::test]
#[ignore = "needs a machine of its own: cargo xtask vm"]
async fn a_killed_owner_leaves_no_quota() {
    use std::io::BufRead;
    const STATE: &str = "QUOTA_OWNER_STATE";
    if machine() != Machine::Root {
        return;
    }
    if let Some(state) = std::env::var_os(STATE) {
        // The owner: makes sandboxes until it is killed.
        let provider = LocalProvider::new(Path::new(&state), LocalOptions::default()).unwrap();
        for i in 0.. {
            println!("made");
            let sandbox = provider.create(&id(&format!("owned{i}")), Attempt(1), &small()).await.unwrap();
            works(&sandbox, "head -c 1M /dev/zero > file").await;
        }
    }
    let dir = tempfile::tempdir().unwrap();
    for round in 0..6u64 {
        let mut owner = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "machine::quota::a_killed_owner_leaves_no_quota", "--ignored", "--nocapture"])
            .env(STATE, dir.path())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = std::io::BufReader::new(owner.stdout.as_mut().unwrap()).lines();
        assert!(lines.by_ref().map_while(Result::ok).any(|line| line.ends_with("made")));
        tokio::time::sleep(Duration::from_millis(round * 234)).await;
        owner.kill().unwrap();
        owner.wait().unwrap();
        let provider = LocalProvider::new(dir.path(), LocalOptions::default()).unwrap();
        provider.sweep().await.unwrap();
        for info in provider.list(&Labels::new()).await.unwrap() {
            provider.destroy(&info.id).await.unwrap();
        }
        sweep_until_empty(&provider, dir.path()).await;
        no_quotas(dir.path()).await;
    }
}
