//! Roots of the local provider that are not the default, and volumes.

use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::sync::Arc;

use forkyard_core::{Attempt, SandboxId, SnapshotId};
use forkyard_sandbox::local::{LocalOptions, LocalProvider};
use forkyard_sandbox::{
    ErrorKind, ExecRequest, Labels, NetworkMode, Provider, Root, Sandbox, SandboxSpec, SnapshotMode, Volume,
};

use crate::docker_fixture::needed;
use crate::local::as_ordinary_user;

pub fn offline(root: Root) -> SandboxSpec {
    let mut spec = SandboxSpec { root, ..SandboxSpec::default() };
    spec.network.mode = NetworkMode::None;
    spec
}

pub async fn sh(sandbox: &Arc<dyn Sandbox>, script: &str) -> (i32, String) {
    let (result, out, err) = sandbox.exec(ExecRequest::shell(script)).await.unwrap().output().await.unwrap();
    (result.exit_code, String::from_utf8_lossy(&out).into_owned() + &String::from_utf8_lossy(&err))
}

/// A root of one static program under its many names. None on a machine without one.
pub fn busybox_root(dir: &Path) -> Option<()> {
    let program = needed("busybox")?;
    for part in ["bin", "etc", "tmp"] {
        std::fs::create_dir_all(dir.join(part)).unwrap();
    }
    std::fs::copy(&program, dir.join("bin/busybox")).unwrap();
    std::fs::set_permissions(dir.join("bin/busybox"), PermissionsExt::from_mode(0o755)).unwrap();
    let listed = std::process::Command::new(program).arg("--list").output().unwrap();
    for name in String::from_utf8(listed.stdout).unwrap().lines().filter(|name| *name != "busybox") {
        symlink("busybox", dir.join("bin").join(name)).unwrap();
    }
    std::fs::write(
        dir.join("etc/passwd"),
        "root:x:0:0:root:/:/bin/sh\nuser:x:1000:1000::/home/user:/bin/sh\n",
    )
    .unwrap();
    Some(())
}

fn id(name: &str) -> SandboxId {
    SandboxId::new(name).unwrap()
}

/// Folders that both the state and the sandboxes' user can reach, apart from each other.
fn folders() -> (tempfile::TempDir, LocalProvider) {
    let dir = tempfile::Builder::new().permissions(PermissionsExt::from_mode(0o755)).tempdir().unwrap();
    let provider = LocalProvider::new(&dir.path().join("state"), LocalOptions::default()).unwrap();
    (dir, provider)
}

#[tokio::test]
async fn volumes_are_read_only_unless_said() {
    let (dir, provider) = folders();
    let (shown, given) = (dir.path().join("shown"), dir.path().join("given"));
    for folder in [&shown, &given] {
        std::fs::create_dir(folder).unwrap();
        std::fs::write(folder.join("file"), "from outside").unwrap();
        // As root the folder is somebody's; who that is inside must not matter.
        if rustix::process::geteuid().is_root() {
            for path in [folder.clone(), folder.join("file")] {
                std::os::unix::fs::chown(path, Some(54_321), Some(54_321)).unwrap();
            }
        }
    }
    symlink("/etc", given.join("link")).unwrap();
    let volume = |host: &Path, path: &str, writable| Volume {
        host_path: host.display().to_string(),
        path: path.into(),
        writable,
    };
    let mut spec = offline(Root::Default);
    spec.volumes = vec![volume(&shown, "/workspace/deep/shown", false), volume(&given, "/data", true)];
    let sandbox = provider.create(&id("vol"), Attempt(1), &spec).await.unwrap();
    let script = "cat deep/shown/file /data/file; echo; echo x > deep/shown/new; echo x > deep/shown/file; rm deep/shown/file
        echo mine > /data/new && cat /data/new; ls /data/link/shadow; touch /data/kept; rm -rf /data 2>/dev/null; ls -a /data | wc -l";
    let (_, out) = sh(&sandbox, script).await;
    assert!(out.starts_with("from outsidefrom outside\n"), "{out}");
    assert_eq!(out.matches("Read-only file system").count(), 3, "{out}");
    assert!(out.contains("mine\n"), "{out}");
    assert_eq!(std::fs::read_to_string(shown.join("file")).unwrap(), "from outside");
    assert!(Path::new("/etc/passwd").exists() && given.is_dir());
    // A snapshot does not hold them, and they are there after it.
    sh(&sandbox, "echo again > /data/file").await;
    let taken = sandbox.snapshot(&SnapshotId::new("volsnap").unwrap(), &Labels::new()).await.unwrap();
    assert_eq!(taken.mode, SnapshotMode::Sealed);
    assert_eq!(sh(&sandbox, "cat /data/file deep/shown/file").await.1, "again\nfrom outside");
    assert_eq!(std::fs::read_to_string(given.join("file")).unwrap(), "again\n");
    let child = offline(Root::Snapshot(SnapshotId::new("volsnap").unwrap()));
    let child = provider.create(&id("volchild"), Attempt(1), &child).await.unwrap();
    assert_eq!(sh(&child, "ls /data deep/shown | grep -c file").await.1, "0\n");
    // Stopped and started, it has them again.
    provider.stop(&id("vol")).await.unwrap();
    let sandbox = provider.start(&id("vol"), Attempt(2)).await.unwrap();
    assert_eq!(sh(&sandbox, "cat /data/file").await.1, "again\n");
    // A link of the sandbox's own is never a way to mount elsewhere.
    let hostile = provider.create(&id("hostile"), Attempt(1), &spec).await.unwrap();
    assert_eq!(
        sh(&hostile, "mv deep moved && mkdir other && ln -s other deep && mkdir other/shown").await,
        (0, String::new())
    );
    // A new root can't be filled: the mounts stay as they are, and the files are copied.
    let second = SnapshotId::new("second").unwrap();
    assert_eq!(hostile.snapshot(&second, &Labels::new()).await.unwrap().mode, SnapshotMode::Copied);
    provider.remove_snapshot(&second).await.unwrap();
    assert_eq!(sh(&hostile, "echo alive; cat moved/shown/file").await.1, "alive\nfrom outside");
    provider.stop(&id("hostile")).await.unwrap();
    assert!(provider.start(&id("hostile"), Attempt(2)).await.is_err());
    for name in ["vol", "volchild", "hostile"] {
        provider.destroy(&id(name)).await.unwrap();
    }
    provider.remove_snapshot(&SnapshotId::new("volsnap").unwrap()).await.unwrap();
    provider.settle().await;
    assert_eq!(std::fs::read_to_string(given.join("file")).unwrap(), "again\n", "volumes stay");
}

#[tokio::test]
async fn a_directory_is_a_root_that_nobody_writes_to() {
    let (dir, provider) = folders();
    let base = dir.path().join("base");
    std::fs::create_dir(&base).unwrap();
    let Some(()) = busybox_root(&base) else { return };
    std::fs::write(base.join("etc/mark"), "base").unwrap();
    let spec = offline(Root::Directory(base.display().to_string()));
    let sandbox = provider.create(&id("dir"), Attempt(1), &spec).await.unwrap();
    let script = "cat /etc/mark; echo; ls /usr 2>/dev/null; ls /; echo w > file; echo h > ~/file; echo t > /tmp/file && id -u";
    let (code, out) = sh(&sandbox, script).await;
    assert_eq!(
        (code, out.split_whitespace().collect::<Vec<_>>().join(" ").as_str()),
        (0, "base bin dev etc home proc tmp workspace 1000"),
    );
    let snapshot = SnapshotId::new("dirsnap").unwrap();
    sandbox.snapshot(&snapshot, &Labels::new()).await.unwrap();
    assert_eq!(sh(&sandbox, "cat /etc/mark file").await.1, "basew\n");
    let child = offline(Root::Snapshot(snapshot.clone()));
    let child = provider.create(&id("dirchild"), Attempt(1), &child).await.unwrap();
    assert_eq!(sh(&child, "cat /etc/mark file /tmp/file").await.1, "basew\nt\n");
    let refused = provider.export_snapshot(&snapshot, &dir.path().join("out")).await.unwrap_err();
    assert_eq!(refused.kind, ErrorKind::Unsupported);
    for name in ["dir", "dirchild"] {
        provider.destroy(&id(name)).await.unwrap();
    }
    provider.remove_snapshot(&snapshot).await.unwrap();
    provider.settle().await;
    assert_eq!(std::fs::read_dir(&base).unwrap().count(), 3, "the directory is as it was");
    let missing = offline(Root::Directory("/no/such/folder".into()));
    assert_eq!(
        provider.create(&id("no"), Attempt(1), &missing).await.err().unwrap().kind,
        ErrorKind::NotFound
    );
    assert!(provider.list(&Labels::new()).await.unwrap().is_empty());
}

#[test]
fn volumes_as_an_ordinary_user() {
    as_ordinary_user("local_roots::volumes_are_read_only_unless_said");
}

#[test]
fn a_directory_as_an_ordinary_user() {
    as_ordinary_user("local_roots::a_directory_is_a_root_that_nobody_writes_to");
}
