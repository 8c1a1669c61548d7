//! Machines that can't give the isolation, or hide what was made: nothing is left, and it is said what to do.

use std::path::PathBuf;
use std::process::Command;

use forkyard_core::Attempt;
use forkyard_sandbox::local::LocalProvider;
use forkyard_sandbox::{ErrorKind, Labels, Provider};

use super::{Machine, id, machine, offline, provider};
use crate::local::{as_ordinary_user, as_user_with, assert_empty};

/// What the error is to say.
const FIX: &str = "EXPECTED_FIX";
/// The test below that is run by the others.
const CREATION: &str = "machine::refused::creation_on_a_machine_that_refuses";

async fn nothing_is_made(fix: &str) -> (LocalProvider, tempfile::TempDir) {
    let (provider, dir) = provider();
    let refused = provider.create(&id("refused"), Attempt(1), &offline()).await.err().expect("it was made");
    assert_eq!(refused.kind, ErrorKind::Unsupported, "{refused}");
    assert!(refused.hint.as_ref().is_some_and(|hint| hint.contains(fix)), "{refused}: {:?}", refused.hint);
    assert!(provider.list(&Labels::new()).await.unwrap().is_empty());
    provider.settle().await;
    assert_eq!(dir.path().join("sandboxes").read_dir().unwrap().count(), 0);
    (provider, dir)
}

/// Not a test by itself: an ordinary user makes a sandbox.
#[tokio::test]
#[ignore = "run by another test"]
async fn creation_on_a_machine_that_refuses() {
    if rustix::process::geteuid().is_root() {
        return as_ordinary_user(CREATION);
    }
    nothing_is_made(&std::env::var(FIX).unwrap()).await;
}

/// A switch of the kernel that was turned, and is turned back when this goes.
struct Turned {
    path: PathBuf,
    before: String,
}

impl Turned {
    fn new(switch: &str, to: &str) -> Turned {
        let path = PathBuf::from("/proc/sys").join(switch.replace('.', "/"));
        let before = std::fs::read_to_string(&path).unwrap();
        assert_ne!(before.trim(), to, "{switch}");
        std::fs::write(&path, to).unwrap();
        Turned { path, before }
    }
}

impl Drop for Turned {
    fn drop(&mut self) {
        std::fs::write(&self.path, &self.before).unwrap();
    }
}

/// As a machine's administrator, who takes user namespaces away, from all or from ordinary users.
#[tokio::test]
#[ignore = "needs a machine of its own: cargo xtask vm"]
async fn without_user_namespaces_it_is_said_how_to_allow_them() {
    if machine() != Machine::Root {
        return;
    }
    for (switch, fix) in [
        ("user.max_user_namespaces", "raise user.max_user_namespaces"),
        ("kernel.unprivileged_userns_clone", "sysctl kernel.unprivileged_userns_clone=1"),
    ] {
        let turned = Turned::new(switch, "0");
        let (provider, dir) = nothing_is_made(fix).await;
        as_user_with(CREATION, &[(FIX, fix)], |_| {});
        drop(turned);
        provider.create(&id("again"), Attempt(1), &offline()).await.expect(switch);
        provider.destroy(&id("again")).await.unwrap();
        // What was begun is removed by a helper, which can be had again.
        provider.sweep().await.unwrap();
        provider.settle().await;
        assert_empty(dir.path());
    }
}

/// A sandbox whose guest its own user can't look at could be made, and never be ended.
#[test]
fn where_processes_are_hidden_no_sandbox_is_left() {
    if !rustix::process::geteuid().is_root() {
        return; // nobody else can mount it
    }
    for hidden in ["noaccess", "invisible"] {
        let output = Command::new("unshare")
            .args(["--mount", "sh", "-c"])
            .arg(format!("mount -t proc -o hidepid={hidden} proc /proc && exec \"$0\" \"$@\""))
            .arg(std::env::current_exe().unwrap())
            .args(["--exact", CREATION, "--ignored", "--nocapture"])
            .env(FIX, "hidepid=0")
            .output()
            .expect("unshare of util-linux");
        let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && text.contains("1 passed"), "{hidden}: {text}");
    }
}
