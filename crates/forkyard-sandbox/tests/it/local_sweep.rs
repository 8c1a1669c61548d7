//! Nothing of a local sandbox outlives its cleanup, however its owner ended.

use std::collections::BTreeSet;
use std::io::BufRead;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use forkyard_core::{Attempt, CallId, Millis, SandboxId, SnapshotId};
use forkyard_sandbox::local::{LocalOptions, LocalProvider};
use forkyard_sandbox::{ExecRequest, Labels, Lifetime, Provider, Root, SandboxStatus};

use crate::local::{as_ordinary_user, assert_empty, scaled, sweep_until_empty};
use crate::local_roots::{offline, sh};

fn open(state: &Path) -> LocalProvider {
    LocalProvider::new(state, LocalOptions::default()).unwrap()
}

fn id(name: &str) -> SandboxId {
    SandboxId::new(name).unwrap()
}

/// Not a test by itself: makes, uses, snapshots, forks and removes sandboxes until it is killed.
#[tokio::test]
#[ignore = "run by another test"]
async fn a_busy_owner() {
    let (Ok(prefix), Some(state)) = (std::env::var("OWNER_PREFIX"), std::env::var_os("OWNER_STATE")) else {
        return;
    };
    println!("up");
    let provider = open(Path::new(&state));
    for i in 0.. {
        let parent = id(&format!("{prefix}p{i}"));
        let sandbox = provider.create(&parent, Attempt(1), &offline(Root::Default)).await.unwrap();
        println!("made {parent}");
        let call = CallId::new("call").unwrap();
        let exec = ExecRequest::shell("echo up; (setsid sleep 7654321 &) ; sleep 7654321").call(call);
        let mut running = sandbox.exec(exec).await.unwrap();
        running.events.recv().await.unwrap().unwrap();
        let snapshot = SnapshotId::new(format!("{prefix}s{i}")).unwrap();
        sandbox.snapshot(&snapshot, &Labels::new()).await.unwrap();
        let child = id(&format!("{prefix}c{i}"));
        let made = provider.create(&child, Attempt(1), &offline(Root::Snapshot(snapshot))).await.unwrap();
        println!("made {child}");
        sh(&made, "echo x > file").await;
        made.snapshot(&SnapshotId::new(format!("{prefix}t{i}")).unwrap(), &Labels::new()).await.unwrap();
        if i % 2 == 0 {
            println!("ends {parent}");
            provider.destroy(&parent).await.unwrap();
        }
    }
}

/// Groups of any hierarchy that carry this in their name.
fn groups(word: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut dirs = vec![PathBuf::from("/sys/fs/cgroup")];
    while let Some(dir) = dirs.pop() {
        for entry in dir.read_dir().into_iter().flatten().flatten() {
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                if entry.file_name().to_string_lossy().contains(word) {
                    found.push(entry.path());
                }
                dirs.push(entry.path());
            }
        }
    }
    found
}

/// Processes whose mounts or variables are of the given words: with them go their namespaces.
fn processes(words: &[&str]) -> Vec<String> {
    let holds = |path: PathBuf| {
        let text = std::fs::read(path).unwrap_or_default();
        words.iter().any(|word| text.windows(word.len()).any(|part| part == word.as_bytes()))
    };
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc").unwrap().flatten() {
        let is_process = entry.file_name().to_string_lossy().parse::<u32>().is_ok();
        if is_process && (holds(entry.path().join("mountinfo")) || holds(entry.path().join("environ"))) {
            let command = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
            found.push(format!("{:?} {}", entry.file_name(), String::from_utf8_lossy(&command)));
        }
    }
    found
}

/// What a provider could leave on the host; others' networks come and go meanwhile.
fn interfaces() -> Vec<String> {
    let names = std::fs::read_dir("/sys/class/net").unwrap().flatten();
    let mut names: Vec<String> = names.map(|e| e.file_name().to_string_lossy().into_owned()).collect();
    names.retain(|name| !["veth", "docker", "br-"].iter().any(|other| name.starts_with(other)));
    names.sort();
    names
}

#[tokio::test(flavor = "multi_thread")]
async fn cycles_of_kills_leave_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let word = dir.path().file_name().unwrap().to_string_lossy().into_owned();
    // Letters of the folder's name, which no other test has.
    let prefix: String =
        word.chars().filter(char::is_ascii_alphanumeric).map(|c| c.to_ascii_lowercase()).collect();
    let before = interfaces();
    for round in 0..scaled(100, 1000) {
        let prefix = format!("{prefix}r{round}x");
        let mut owner = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "local_sweep::a_busy_owner", "--ignored", "--nocapture"])
            .env("OWNER_PREFIX", &prefix)
            .env("OWNER_STATE", dir.path())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = std::io::BufReader::new(owner.stdout.take().unwrap()).lines();
        assert!(lines.by_ref().map_while(Result::ok).any(|line| line == "up"));
        // At another moment each time, from before the first sandbox to after the second.
        tokio::time::sleep(Duration::from_micros(u64::from(round) * 7919 % 80_000)).await;
        owner.kill().unwrap();
        let mut promised = BTreeSet::new();
        for line in lines.map_while(Result::ok) {
            match line.split_once(' ') {
                Some(("made", id)) => _ = promised.insert(id.to_string()),
                Some(("ends", id)) => _ = promised.remove(id),
                _ => {}
            }
        }
        owner.wait().unwrap();
        // As `forkyard cleanup` does, from two processes' providers at once.
        let (provider, other) = (open(dir.path()), open(dir.path()));
        let (one, two) = tokio::join!(provider.sweep(), other.sweep());
        one.and(two).unwrap();
        for info in provider.list(&Labels::new()).await.unwrap() {
            // One that was made lives on; one that was half made may have ended with its maker.
            let expected = match info.status {
                SandboxStatus::Running => true,
                SandboxStatus::Dead => !promised.contains(info.id.as_str()),
                _ => false,
            };
            assert!(expected, "{info:?}");
            other.destroy(&info.id).await.unwrap();
        }
        for info in provider.snapshots().await.unwrap() {
            provider.remove_snapshot(&info.id).await.unwrap();
        }
        provider.settle().await;
        sweep_until_empty(&other, dir.path()).await;
        let left = (processes(&[&prefix]), groups(&prefix));
        assert_eq!(left, (vec![], vec![]), "round {round}");
    }
    // Helpers end when their owner does.
    let gone = async {
        while !processes(&[&word]).is_empty() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), gone).await.expect("helpers of killed owners live on");
    assert_eq!(interfaces(), before);
}

#[test]
fn cycles_of_kills_as_an_ordinary_user() {
    as_ordinary_user("local_sweep::cycles_of_kills_leave_nothing");
}

/// As an ordinary user, who can be kept from moving a folder of its own.
#[tokio::test]
async fn what_can_not_be_removed_keeps_nothing_else() {
    if rustix::process::geteuid().is_root() {
        return as_ordinary_user("local_sweep::what_can_not_be_removed_keeps_nothing_else");
    }
    let dir = tempfile::tempdir().unwrap();
    let provider = open(dir.path());
    let folders = ["sandboxes/stuck", "sandboxes/a", "sandboxes/z", "layers/nobodys", "layers/lastdropped"];
    for folder in folders {
        std::fs::create_dir(dir.path().join(folder)).unwrap();
    }
    // Its last user went, and whoever took it away was killed before the folder went too.
    std::fs::create_dir(dir.path().join(folders[4]).join("refs")).unwrap();
    let part = dir.path().join("images/key.part1");
    std::fs::write(&part, "").unwrap();
    let stuck = dir.path().join(folders[0]);
    let set = |mode| std::fs::set_permissions(&stuck, std::os::unix::fs::PermissionsExt::from_mode(mode));
    set(0o500).unwrap();
    let told = provider.sweep().await.unwrap_err();
    assert!(told.message.contains("sandboxes/stuck"), "{told}");
    let left: Vec<_> = folders.into_iter().filter(|folder| dir.path().join(folder).exists()).collect();
    assert_eq!((left, part.exists()), (vec![folders[0]], false));
    set(0o700).unwrap();
    provider.sweep().await.unwrap();
    assert_empty(dir.path());
}

#[tokio::test]
async fn a_sandbox_past_its_deadline_goes_by_itself() {
    let dir = tempfile::tempdir().unwrap();
    let mut spec = offline(Root::Default);
    spec.lifetime = Lifetime(Millis(3000));
    let first = open(dir.path());
    first.create(&id("short"), Attempt(1), &spec).await.unwrap();
    first.settle().await;
    while first.list(&Labels::new()).await.unwrap()[0].status == SandboxStatus::Running {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    // Whoever comes next removes what it left; nobody has to ask for that.
    std::fs::remove_file(dir.path().join("swept")).unwrap();
    let second = open(dir.path());
    second.create(&id("next"), Attempt(1), &offline(Root::Default)).await.unwrap();
    second.settle().await;
    let left: Vec<_> = second.list(&Labels::new()).await.unwrap().into_iter().map(|info| info.id).collect();
    assert_eq!(left, [id("next")]);
    second.destroy(&id("next")).await.unwrap();
    second.settle().await;
    assert_empty(dir.path());
}
