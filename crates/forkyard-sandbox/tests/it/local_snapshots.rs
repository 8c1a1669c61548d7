//! Snapshots of the local provider across processes: whoever has the newest attempt can seal, and a kill at any moment loses
//! nothing.

use std::io::BufRead;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use forkyard_core::{Attempt, SandboxId, SnapshotId};
use forkyard_sandbox::local::{LocalOptions, LocalProvider};
use forkyard_sandbox::{
    ErrorKind, ExecRequest, Labels, LimitMeans, Provider, Root, Sandbox, SandboxSpec, SandboxStatus,
    SnapshotInfo, SnapshotMode, Volume,
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
    // Under the name that it has once it is synced.
    let _ = std::fs::remove_file(dir.path().join("snapshots/ofa.unsynced"));
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
        // Whichever layer it writes to by now is the one that counts.
        assert_eq!(sh(&sandbox, "head -c 3000000 /dev/urandom > big; sync").await.0, 0);
        let used = sandbox.stats().await.unwrap().disk_bytes;
        assert!(used >= 3_000_000, "{used}");
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

/// Where a snapshot is written down, and whether it is known to be on the disk.
fn record(state: &Path, name: &str) -> (PathBuf, bool) {
    let [synced, unsynced] = ["json", "unsynced"].map(|end| state.join(format!("snapshots/{name}.{end}")));
    match unsynced.exists() {
        true => (unsynced, false),
        false => (synced, true),
    }
}

fn json(path: &Path) -> serde_json::Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

/// However often a busy sandbox is forked, its descendants lie on no more layers than others, and their archives are taken.
#[tokio::test]
async fn generations_of_busy_sandboxes_stay_shallow() {
    const GENERATIONS: usize = 20;
    let dir = tempfile::tempdir().unwrap();
    let provider = open(dir.path());
    let (mut spec, mut before) = (offline(Root::Default), None);
    for n in 0..GENERATIONS {
        let sandbox = provider.create(&id("parent"), Attempt(1), &spec).await.unwrap();
        let script = format!("echo {n} > f{n}; echo {n} >> all; rm -f f{}", n.wrapping_sub(2));
        assert_eq!(sh(&sandbox, &script).await.0, 0);
        let mut busy = sandbox.exec(ExecRequest::shell("echo up; sleep 600")).await.unwrap();
        busy.events.recv().await.unwrap().unwrap();
        let name = format!("snap{n}");
        assert_eq!(snapshot(&sandbox, &name).await.mode, SnapshotMode::Copied);
        let depth = json(&record(dir.path(), &name).0)["layers"].as_array().unwrap().len();
        assert!(depth <= 16, "{depth} layers after {n} generations");
        provider.destroy(&id("parent")).await.unwrap();
        if let Some(before) = before.replace(name.clone()) {
            provider.remove_snapshot(&SnapshotId::new(before).unwrap()).await.unwrap();
        }
        spec = child_of(&name);
    }
    let archive = dir.path().join("archive");
    let last = SnapshotId::new(before.unwrap()).unwrap();
    provider.export_snapshot(&last, &archive).await.unwrap();
    provider.import_snapshot(&SnapshotId::new("again").unwrap(), &archive, None).await.unwrap();
    for name in [last.as_str(), "again"] {
        let child = provider.create(&id("child"), Attempt(1), &child_of(name)).await.unwrap();
        assert_eq!(sh(&child, "wc -l < all; ls f*").await, (0, "20\nf18\nf19\n".into()), "{name}");
        provider.destroy(&id("child")).await.unwrap();
        provider.remove_snapshot(&SnapshotId::new(name).unwrap()).await.unwrap();
    }
    std::fs::remove_file(archive).unwrap();
    provider.settle().await;
    crate::local::assert_empty(dir.path());
}

#[tokio::test]
async fn what_can_not_be_copied_in_the_time_of_a_freeze_is_no_snapshot_and_commands_go_on() {
    let dir = tempfile::tempdir().unwrap();
    let options = LocalOptions { freeze: Duration::ZERO, ..LocalOptions::default() };
    let provider = LocalProvider::new(dir.path(), options).unwrap();
    let sandbox = provider.create(&id("busy"), Attempt(1), &offline(Root::Default)).await.unwrap();
    let writing = sandbox.exec(ExecRequest::shell("while :; do echo >> log; done")).await.unwrap();
    let grown_beyond = async |size| {
        let grown = async {
            loop {
                match sandbox.stat("log").await.map_or(0, |info| info.size) {
                    now if now > size => break now,
                    _ => tokio::time::sleep(Duration::from_millis(2)).await,
                }
            }
        };
        tokio::time::timeout(Duration::from_secs(60), grown).await.expect("the command does not go on")
    };
    grown_beyond(0).await;
    let name = SnapshotId::new("snap").unwrap();
    let refused = sandbox.snapshot(&name, &Labels::new()).await.unwrap_err();
    assert!(refused.kind == ErrorKind::Timeout && refused.hint.is_some(), "{refused}");
    let size = sandbox.stat("log").await.unwrap().size;
    grown_beyond(size).await;
    assert!(provider.snapshots().await.unwrap().is_empty());
    drop(writing);
    provider.destroy(&id("busy")).await.unwrap();
    provider.settle().await;
    crate::local::assert_empty(dir.path());
}

#[tokio::test]
async fn a_snapshot_is_synced_without_anybody_waiting_for_it() {
    let dir = tempfile::tempdir().unwrap();
    let provider = open(dir.path());
    let sandbox = provider.create(&id("a"), Attempt(1), &offline(Root::Default)).await.unwrap();
    for name in ["one", "two"] {
        snapshot(&sandbox, name).await;
    }
    let synced = async {
        while !["one", "two"].iter().all(|name| record(dir.path(), name).1) {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(300), synced).await.expect("nobody synced them");
    assert_eq!(provider.snapshots().await.unwrap().len(), 2);
    // What a process did not live to do is done by who sweeps later.
    snapshot(&sandbox, "owed").await;
    let (path, _) = record(dir.path(), "owed");
    let mut meta = json(&path);
    meta["info"]["created_at"] = 0.into();
    std::fs::write(&path, meta.to_string()).unwrap();
    provider.sweep().await.unwrap();
    assert!(record(dir.path(), "owed").1);
    provider.destroy(&id("a")).await.unwrap();
}

/// A reboot is told by the name of the machine's start, which is in every record.
#[tokio::test]
async fn after_a_reboot_only_what_was_synced_counts() {
    let dir = tempfile::tempdir().unwrap();
    let provider = open(dir.path());
    let sandbox = provider.create(&id("a"), Attempt(1), &offline(Root::Default)).await.unwrap();
    assert_eq!(sh(&sandbox, "echo kept > file").await.0, 0);
    let meta = {
        snapshot(&sandbox, "kept").await;
        let (path, _) = record(dir.path(), "kept");
        let mut meta = json(&path);
        assert!(meta["boot"].as_str().is_some_and(|boot| !boot.is_empty()));
        meta["boot"] = "an earlier one".into();
        let _ = std::fs::remove_file(path); // unless it was synced just now
        std::fs::write(dir.path().join("snapshots/kept.json"), meta.to_string()).unwrap();
        meta
    };
    let layer = dir.path().join("layers").join(meta["layers"][0].as_str().unwrap());
    for (name, text) in [("lost", meta.to_string().replace("\"kept\"", "\"lost\"")), ("torn", String::new())]
    {
        std::fs::write(layer.join(format!("refs/snapshot.{name}")), "").unwrap();
        std::fs::write(dir.path().join(format!("snapshots/{name}.unsynced")), text).unwrap();
    }
    let listed = async || -> Vec<String> {
        provider.snapshots().await.unwrap().into_iter().map(|info| info.id.to_string()).collect()
    };
    assert_eq!(listed().await, ["kept"]);
    for name in ["lost", "torn"] {
        let refused = provider.create(&id("child"), Attempt(1), &child_of(name)).await.err().unwrap();
        assert_eq!(refused.kind, ErrorKind::NotFound);
        assert!(refused.message.contains("when the machine stopped") && refused.hint.is_some(), "{refused}");
        let name = SnapshotId::new(name).unwrap();
        let refused = provider.export_snapshot(&name, &dir.path().join("archive")).await.unwrap_err();
        assert_eq!(refused.kind, ErrorKind::NotFound, "{refused}");
    }
    // Its name is free again, for the caller who takes it once more.
    assert_eq!(sh(&sandbox, "echo more >> file").await.0, 0);
    snapshot(&sandbox, "lost").await;
    provider.sweep().await.unwrap();
    assert_eq!(listed().await, ["kept", "lost"]);
    assert!(!dir.path().join("snapshots/torn.unsynced").exists());
    assert!(!layer.join("refs/snapshot.torn").exists());
    for (name, want) in [("kept", "kept\n"), ("lost", "kept\nmore\n")] {
        let child = provider.create(&id("child"), Attempt(1), &child_of(name)).await.unwrap();
        assert_eq!(sh(&child, "cat file").await.1, want);
        provider.destroy(&id("child")).await.unwrap();
    }
    // A process of now is not the one that an earlier start gave the same number.
    let path = dir.path().join("sandboxes/a/meta.json");
    let now = json(&path);
    for (boot, status) in [
        (Some("an earlier one"), SandboxStatus::Dead),
        (now["boot"].as_str(), SandboxStatus::Running),
        (None, SandboxStatus::Running),
    ] {
        let mut meta = now.clone();
        match boot {
            Some(boot) => meta["boot"] = boot.into(),
            None => drop(meta.as_object_mut().unwrap().remove("boot").unwrap()),
        }
        std::fs::write(&path, meta.to_string()).unwrap();
        assert_eq!(provider.list(&Labels::new()).await.unwrap()[0].status, status, "{boot:?}");
    }
    provider.destroy(&id("a")).await.unwrap();
    for name in ["kept", "lost"] {
        provider.remove_snapshot(&SnapshotId::new(name).unwrap()).await.unwrap();
    }
    provider.settle().await;
    crate::local::assert_empty(dir.path());
}

#[tokio::test]
async fn a_size_is_what_a_snapshot_adds_to_those_before_it() {
    const MIB: u64 = 1 << 20;
    let dir = tempfile::tempdir().unwrap();
    let provider = open(dir.path());
    let sandbox = provider.create(&id("a"), Attempt(1), &offline(Root::Default)).await.unwrap();
    for (name, script) in
        [("one", "head -c 8M /dev/urandom > a; ln a b"), ("two", "head -c 3M /dev/urandom > c")]
    {
        assert_eq!(sh(&sandbox, script).await.0, 0);
        assert_eq!(snapshot(&sandbox, name).await.bytes, None);
    }
    let sizes = async || -> Vec<u64> {
        loop {
            // A machine that has no time for it now has it for a later list.
            let all = provider.measured_snapshots().await.unwrap();
            if let Some(sizes) = all.into_iter().map(|info| Some(info.bytes? / MIB)).collect() {
                return sizes;
            }
        }
    };
    assert_eq!(sizes().await, [8, 3]);
    provider.remove_snapshot(&SnapshotId::new("one").unwrap()).await.unwrap();
    assert_eq!(sizes().await, [11], "it lies on all of it");
    provider.destroy(&id("a")).await.unwrap();
}
