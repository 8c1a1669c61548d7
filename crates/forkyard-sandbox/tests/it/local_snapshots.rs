//! Snapshots of the local provider across processes: whoever has the newest attempt can seal, and a kill at any moment loses
//! nothing.

use std::io::BufRead;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use forkyard_core::{Attempt, SandboxId, SnapshotId};
use forkyard_sandbox::local::{LocalOptions, LocalProvider};
use forkyard_sandbox::{
    Labels, LimitMeans, Provider, Root, Sandbox, SandboxSpec, SandboxStatus, SnapshotInfo, SnapshotMode,
    Volume,
};

use crate::local::{as_ordinary_user, scaled};
use crate::local_roots::{offline, sh};

fn id(name: &str) -> SandboxId {
    SandboxId::new(name).unwrap()
}

fn open(state: &Path) -> LocalProvider {
    LocalProvider::new(state, LocalOptions::default()).unwrap()
}

async fn snapshot(sandbox: &Arc<dyn Sandbox>, name: &str) -> SnapshotInfo {
    sandbox.snapshot(&SnapshotId::new(name).unwrap(), &Labels::new()).await.unwrap()
}

fn child_of(name: &str) -> SandboxSpec {
    offline(Root::Snapshot(SnapshotId::new(name).unwrap()))
}

/// An owner in a process of its own, which does not outlive this value.
struct Owner(Child);

impl Owner {
    fn kill(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.kill();
    }
}

/// This binary again; it says `made` when its sandbox is ready.
fn owner(role: &str, state: &Path) -> Owner {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "local_snapshots::an_owner", "--ignored", "--nocapture"])
        .env("OWNER_ROLE", role)
        .env("OWNER_STATE", state)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = std::io::BufReader::new(child.stdout.take().unwrap()).lines();
    let owner = Owner(child);
    assert!(lines.by_ref().map_while(Result::ok).any(|line| line == "made"));
    owner
}

/// Not a test by itself: makes a sandbox, says so, and works on it until it is killed.
#[tokio::test]
#[ignore = "run by other tests"]
async fn an_owner() {
    let (Ok(role), Some(state)) = (std::env::var("OWNER_ROLE"), std::env::var_os("OWNER_STATE")) else {
        return;
    };
    let provider = open(Path::new(&state));
    let sandbox = provider.create(&id("shared"), Attempt(1), &offline(Root::Default)).await.unwrap();
    sh(&sandbox, "echo first > file; : > log").await;
    println!("made");
    if role == "waits" {
        std::future::pending::<()>().await;
    }
    for i in 0.. {
        assert_eq!(sh(&sandbox, &format!("echo {i} >> log")).await, (0, String::new()));
        assert_eq!(snapshot(&sandbox, &format!("s{i}")).await.mode, SnapshotMode::Sealed);
    }
}

/// Why a root can't be mounted is told, at whatever moment the sandbox's groups come.
#[tokio::test]
async fn a_root_that_fails_says_why() {
    let dir = tempfile::tempdir().unwrap();
    let provider = open(dir.path());
    let sandbox = provider.create(&id("a"), Attempt(1), &offline(Root::Default)).await.unwrap();
    snapshot(&sandbox, "snap").await;
    for layer in std::fs::read_dir(dir.path().join("layers")).unwrap().flatten() {
        std::fs::rename(layer.path().join("fs"), layer.path().join("gone")).unwrap();
    }
    for n in 0..5 {
        let failed = provider.create(&id(&format!("b{n}")), Attempt(1), &child_of("snap")).await;
        let said = failed.err().unwrap().to_string();
        assert!(said.contains("overlay"), "{said}");
    }
    provider.destroy(&id("a")).await.unwrap();
}

/// Processes by their parent.
fn children(of: u32) -> Vec<u32> {
    let threads = std::fs::read_dir(format!("/proc/{of}/task")).unwrap().flatten();
    let texts = threads.filter_map(|thread| std::fs::read_to_string(thread.path().join("children")).ok());
    texts
        .flat_map(|text| text.split_whitespace().filter_map(|pid| pid.parse().ok()).collect::<Vec<_>>())
        .collect()
}

/// Whoever makes several gets clones that were made ahead: each is a sandbox of its own, and one that dies before it is needed
/// is no loss.
#[tokio::test]
async fn sandboxes_that_were_made_ahead_are_as_others() {
    let dir = tempfile::tempdir().unwrap();
    let provider = open(dir.path());
    let sandbox = async |n: usize| {
        let made = provider.create(&id(&format!("s{n}")), Attempt(1), &offline(Root::Default)).await.unwrap();
        assert_eq!(
            sh(&made, &format!("echo {n} > file; cat file; ls /proc/1/fd")).await.1.lines().next(),
            Some(&*n.to_string())
        );
        made
    };
    let zygotes = children(std::process::id());
    let (mut live, mut killed) = (Vec::new(), 0);
    for n in 0..8 {
        live.push(sandbox(n).await);
        let zygote = children(std::process::id()).into_iter().find(|pid| !zygotes.contains(pid)).unwrap();
        if n >= 4 {
            // All but the sandboxes themselves.
            let known: Vec<u32> = provider_pids(dir.path());
            for pid in children(zygote).into_iter().filter(|pid| !known.contains(pid)) {
                let process = rustix::process::Pid::from_raw(pid as i32).unwrap();
                if rustix::process::kill_process(process, rustix::process::Signal::KILL).is_ok() {
                    killed += 1;
                    while children(zygote).contains(&pid) {
                        tokio::time::sleep(Duration::from_millis(5)).await;
                    }
                }
            }
        }
    }
    // With cgroups of version 2 alone each is born in its own group, which the next one does not have yet.
    let born_in_groups = std::fs::read_to_string("/proc/self/cgroup").unwrap().lines().count() == 1;
    assert!(killed > 0 || born_in_groups, "none was made ahead");
    for (n, sandbox) in live.iter().enumerate() {
        assert_eq!(sh(sandbox, "cat file").await, (0, format!("{n}\n")));
        assert_eq!(snapshot(sandbox, &format!("snap{n}")).await.mode, SnapshotMode::Sealed);
        assert_eq!(sh(sandbox, "echo more >> file; wc -l < file").await, (0, "2\n".into()));
        provider.destroy(sandbox.id()).await.unwrap();
        assert!(
            sandbox.exec(forkyard_sandbox::ExecRequest::shell("true")).await.is_err(),
            "nobody else holds its line"
        );
    }
}

/// Of the sandboxes in a state folder.
fn provider_pids(state: &Path) -> Vec<u32> {
    let metas = std::fs::read_dir(state.join("sandboxes")).unwrap().flatten();
    let metas = metas.filter_map(|dir| std::fs::read(dir.path().join("meta.json")).ok());
    let pids = metas.filter_map(|text| serde_json::from_slice::<serde_json::Value>(&text).ok());
    pids.filter_map(|meta| meta["pid"].as_u64()).map(|pid| pid as u32).collect()
}

/// An owner that was killed between the making of a folder and its handing over leaves it to whoever comes next; overlayfs
/// would mount a root without writing rights over it.
#[tokio::test]
async fn half_made_folders_of_a_killed_owner_do_no_harm() {
    let dir = tempfile::tempdir().unwrap();
    let provider = open(dir.path());
    let sandbox = provider.create(&id("a"), Attempt(1), &offline(Root::Default)).await.unwrap();
    let folder = dir.path().join("sandboxes/a");
    for part in ["up1", "work1"] {
        std::fs::create_dir(folder.join(part)).unwrap();
    }
    assert_eq!(snapshot(&sandbox, "first").await.mode, SnapshotMode::Sealed);
    assert_eq!(sh(&sandbox, "echo 1 > file").await, (0, String::new()));
    // One that can't be made good: the sandbox goes on with the root that it has.
    std::fs::create_dir_all(folder.join("work2/work/full/of/files")).unwrap();
    if rustix::process::geteuid().is_root() {
        assert_eq!(snapshot(&sandbox, "second").await.mode, SnapshotMode::Copied);
    }
    assert_eq!(sh(&sandbox, "echo 2 >> file; cat file").await, (0, "1\n2\n".into()));
    provider.destroy(&id("a")).await.unwrap();
}

#[tokio::test]
async fn a_sandbox_whose_record_is_damaged_can_be_removed() {
    let dir = tempfile::tempdir().unwrap();
    let provider = open(dir.path());
    for name in ["a", "b"] {
        let sandbox = provider.create(&id(name), Attempt(1), &offline(Root::Default)).await.unwrap();
        assert_eq!(snapshot(&sandbox, &format!("of{name}")).await.mode, SnapshotMode::Sealed);
    }
    std::fs::write(dir.path().join("sandboxes/a/meta.json"), "").unwrap();
    std::fs::write(dir.path().join("snapshots/ofa.json"), "{").unwrap();
    let found = provider.list(&Labels::new()).await.unwrap();
    let found: Vec<_> = found.iter().map(|s| (s.id.as_str(), s.status)).collect();
    assert_eq!(found, [("a", SandboxStatus::Dead), ("b", SandboxStatus::Running)]);
    // What it carries is not known.
    assert!(provider.list(&Labels::from([("a".into(), "b".into())])).await.unwrap().is_empty());
    let e = provider.create(&id("a"), Attempt(1), &offline(Root::Default)).await.map(drop).unwrap_err();
    assert!(e.hint.is_some_and(|hint| hint.contains("forkyard sandbox rm a")), "{}", e.message);
    let names = |all: Vec<SnapshotInfo>| all.iter().map(|s| s.id.to_string()).collect::<Vec<_>>();
    assert_eq!(names(provider.snapshots().await.unwrap()), ["ofb"]);
    let damaged = provider.damaged_snapshots().await.unwrap();
    let [(name, e)] = damaged.as_slice() else { panic!("{damaged:?}") };
    assert!(name.as_str() == "ofa" && e.to_string().contains("--remove ofa"), "{e}");
    let e = provider.create(&id("c"), Attempt(1), &child_of("ofa")).await.map(drop).unwrap_err();
    assert!(e.to_string().contains("--remove ofa"), "{e}");
    // Neither does it keep what is left of others.
    provider.sweep().await.unwrap();
    for name in ["b", "a"] {
        provider.destroy(&id(name)).await.unwrap();
        provider.remove_snapshot(&SnapshotId::new(format!("of{name}")).unwrap()).await.unwrap();
    }
    provider.sweep().await.unwrap();
    provider.settle().await;
    crate::local::assert_empty(dir.path());
}

#[tokio::test]
async fn another_process_seals() {
    let dir = tempfile::tempdir().unwrap();
    for killed in [false, true] {
        let mut owner = owner("waits", dir.path());
        if killed {
            owner.kill();
        }
        let provider = open(dir.path());
        let sandbox = provider.attach(&id("shared"), Attempt(2)).await.unwrap();
        for (i, want) in ["first\n", "0 first\n", "1 0 first\n"].into_iter().enumerate() {
            let name = format!("snap{i}");
            assert_eq!(snapshot(&sandbox, &name).await.mode, SnapshotMode::Sealed);
            assert_eq!(sh(&sandbox, &format!("echo {i} $(cat file) > file")).await, (0, String::new()));
            let child = provider.create(&id("child"), Attempt(1), &child_of(&name)).await.unwrap();
            assert_eq!(sh(&child, "cat file; env > /dev/null").await, (0, want.into()));
            assert_eq!(sh(&sandbox, "cat file").await.1, format!("{i} {want}"));
            provider.destroy(&id("child")).await.unwrap();
            provider.remove_snapshot(&SnapshotId::new(name).unwrap()).await.unwrap();
        }
        // Landlock's rules, the limits and the mounts are those of the new root.
        assert_eq!(
            sh(&sandbox, "ls /usr/bin/env; echo x > /usr/x || echo closed").await.1.lines().count(),
            3
        );
        owner.kill();
        provider.destroy(&id("shared")).await.unwrap();
        crate::local::sweep_until_empty(&provider, dir.path()).await;
    }
}

#[test]
fn another_process_seals_as_an_ordinary_user() {
    as_ordinary_user("local_snapshots::another_process_seals");
}

#[tokio::test]
async fn a_kill_during_a_snapshot_loses_nothing() {
    let dir = tempfile::tempdir().unwrap();
    for round in 0..scaled(5, 100) {
        let mut owner = owner("snapshots", dir.path());
        // Somewhere within the first few snapshots, elsewhere each time.
        tokio::time::sleep(Duration::from_micros(u64::from(round) * 7919 % 40_000)).await;
        owner.kill();
        let provider = open(dir.path());
        let sandbox = provider.attach(&id("shared"), Attempt(2)).await.unwrap();
        let (code, log) = sh(&sandbox, "cat log").await;
        let numbers: Vec<usize> = log.lines().map(|line| line.parse().unwrap()).collect();
        assert_eq!((code, &numbers), (0, &(0..numbers.len()).collect()));
        let taken = snapshot(&sandbox, "after").await;
        assert_eq!(taken.mode, SnapshotMode::Sealed);
        assert_eq!(sh(&sandbox, "echo later >> log; echo later > file").await.0, 0);
        let mut names: Vec<_> = provider.snapshots().await.unwrap().into_iter().map(|s| s.id).collect();
        names.sort();
        for name in &names {
            let child = provider.create(&id("child"), Attempt(1), &child_of(name.as_str())).await.unwrap();
            // Snapshot `sN` was taken after line N and before the next.
            let want = match name.as_str().strip_prefix('s').and_then(|n| n.parse::<usize>().ok()) {
                Some(n) => (0..=n).map(|i| format!("{i}\n")).collect(),
                None => log.clone(),
            };
            assert_eq!(sh(&child, "cat log; cat file").await.1, want + "first\n", "{name} of {names:?}");
            provider.destroy(&id("child")).await.unwrap();
        }
        provider.stop(&id("shared")).await.unwrap();
        let sandbox = provider.start(&id("shared"), Attempt(3)).await.unwrap();
        assert_eq!(sh(&sandbox, "tail -n 1 log; cat file").await.1, "later\nlater\n");
        provider.destroy(&id("shared")).await.unwrap();
        for name in &names {
            provider.remove_snapshot(name).await.unwrap();
        }
        crate::local::sweep_until_empty(&provider, dir.path()).await;
    }
}

/// A sandbox that moves what is mounted in it must not get a way into the layer that is being sealed.
#[tokio::test]
async fn a_moved_mount_point_is_no_way_into_a_sealed_layer() {
    let dir = tempfile::tempdir().unwrap();
    let (state, shown) = (dir.path().join("state"), dir.path().join("shown"));
    std::fs::create_dir(&shown).unwrap();
    let provider = open(&state);
    let mut spec = offline(Root::Default);
    let host_path = shown.display().to_string();
    spec.volumes = vec![Volume { host_path, path: "/workspace/deep/shown".into(), writable: false }];
    let sandbox = provider.create(&id("mover"), Attempt(1), &spec).await.unwrap();
    assert_eq!(
        sh(&sandbox, "mv deep moved && mkdir -p deep/shown && echo before > deep/shown/file").await.0,
        0
    );
    assert_eq!(snapshot(&sandbox, "taken").await.mode, SnapshotMode::Copied);
    assert_eq!(sh(&sandbox, "echo after > deep/shown/file").await.0, 0);
    let child = provider.create(&id("child"), Attempt(1), &child_of("taken")).await.unwrap();
    assert_eq!(sh(&child, "cat deep/shown/file").await.1, "before\n");
    for name in ["mover", "child"] {
        provider.destroy(&id(name)).await.unwrap();
    }
    provider.remove_snapshot(&SnapshotId::new("taken").unwrap()).await.unwrap();
    provider.settle().await;
    crate::local::assert_empty(&state);
}

#[tokio::test]
async fn the_disk_limit_goes_on_after_a_snapshot() {
    let dir = tempfile::tempdir().unwrap();
    let provider = open(dir.path());
    let mut spec = offline(Root::Default);
    spec.limits.disk_bytes = 48 << 20;
    let sandbox = provider.create(&id("full"), Attempt(1), &spec).await.unwrap();
    // Long enough to be looked at; the last one is not waited for.
    let fill = |name: &str, mib: u32, s: u32| {
        format!("head -c {mib}M /dev/urandom > {name} || exit 9; sleep {s}; echo alive")
    };
    assert_eq!(sh(&sandbox, &fill("a", 16, 1)).await.1, "alive\n");
    assert_eq!(snapshot(&sandbox, "one").await.mode, SnapshotMode::Sealed);
    assert_eq!(sh(&sandbox, &fill("b", 16, 1)).await.1, "alive\n");
    let (code, out) = sh(&sandbox, &fill("c", 32, 600)).await;
    match sandbox.info().await.unwrap().achieved.disk {
        LimitMeans::Kernel => assert!(code == 9 && out.contains("Disk quota exceeded"), "{code}: {out}"),
        _ => assert!(code == 137 && out.contains("disk limit"), "{code}: {out}"),
    }
    provider.destroy(&id("full")).await.unwrap();
    provider.remove_snapshot(&SnapshotId::new("one").unwrap()).await.unwrap();
    provider.settle().await;
    crate::local::assert_empty(dir.path());
}
