//! The probe's attempts themselves: where nothing holds them back they work, so that a refusal says something.

use std::process::Command;

use forkyard_sandbox::local::GUEST;

/// Those that harm nobody when they work, each in a process of its own, which ends.
const HARMLESS: &[&str] = &[
    "unshare-user",
    "unshare-mount",
    "unshare-net",
    "clone-user",
    "clone-mount",
    "clone-pid",
    "clone3",
    "fsopen",
    "open-tree",
    "bpf",
    "userfaultfd",
    "io-uring",
    "keyctl",
    "add-key",
    "request-key",
    "perf-event",
    "fanotify",
    "syslog",
    "packet-socket",
    "raw-socket",
    "generic-netlink",
    "real-time",
    "higher-priority",
];

#[test]
fn without_a_sandbox_the_attempts_work() {
    if !rustix::process::geteuid().is_root() {
        return; // most of these are root's
    }
    let dir = tempfile::tempdir().unwrap();
    let program = dir.path().join("probe");
    std::fs::write(&program, GUEST).unwrap();
    std::fs::set_permissions(&program, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let output = Command::new(&program).arg("probe").args(HARMLESS).output().unwrap();
    let said = String::from_utf8(output.stdout).unwrap();
    // A kernel may be made without one of them.
    let missing = format!(" {}", libc::ENOSYS);
    let failed: Vec<&str> = said.lines().filter(|l| !l.ends_with(" 0") && !l.ends_with(&missing)).collect();
    assert!(failed.is_empty() && said.lines().count() == HARMLESS.len(), "{said}");
}
