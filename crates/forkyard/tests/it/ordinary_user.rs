//! The program as somebody without any rights has it: the other tests run as whoever runs them, in CI as root.

use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;

use serde_json::Value;

use super::{Ran, until};

/// No account has these. One for each process of tests, so that what runs as it is this test's.
const IDS: std::ops::Range<u32> = 64_400..65_400;

/// A home of an account's own, and the program where it can be read.
struct User {
    dir: tempfile::TempDir,
    /// None: whoever runs the tests is an ordinary user.
    id: Option<u32>,
}

impl User {
    fn new() -> User {
        let dir = tempfile::Builder::new().permissions(PermissionsExt::from_mode(0o755)).tempdir().unwrap();
        let id = rustix::process::geteuid()
            .is_root()
            .then(|| IDS.start + std::process::id() % (IDS.end - IDS.start));
        let user = User { dir, id };
        // By another process: a descriptor of ours, open for writing, could be inherited by a fork of another test.
        let copied = Command::new("cp").arg(env!("CARGO_BIN_EXE_forkyard")).arg(user.program()).status();
        assert!(copied.unwrap().success());
        std::fs::create_dir(user.home()).unwrap();
        std::os::unix::fs::chown(user.home(), id, id).unwrap();
        user
    }
    fn program(&self) -> PathBuf {
        self.dir.path().join("forkyard")
    }
    fn home(&self) -> PathBuf {
        self.dir.path().join("home")
    }
    fn run(&self, args: &[&str]) -> Ran {
        let mut program = Command::new(self.program());
        program
            .args(args)
            .current_dir(self.home())
            .env_clear()
            .env("PATH", "/usr/local/bin:/usr/bin:/bin")
            .env("HOME", self.home());
        if let Some(id) = self.id {
            program.uid(id).gid(id);
        }
        let output = program.output().unwrap();
        let text = |b: Vec<u8>| String::from_utf8(b).unwrap();
        Ran { code: output.status.code().unwrap(), stdout: text(output.stdout), stderr: text(output.stderr) }
    }
    /// What it says, if it is content.
    fn says(&self, args: &[&str]) -> String {
        let ran = self.run(args);
        assert_eq!((ran.code, ran.stderr.as_str()), (0, ""), "{args:?}: {}", ran.stdout);
        ran.stdout
    }
    fn json(&self, args: &[&str]) -> Value {
        let said = self.says(&[&["--json"][..], args].concat());
        serde_json::from_str(&said).unwrap_or_else(|e| panic!("{args:?}: {e}: {said}"))
    }
    /// Programs that run as it.
    fn processes(&self) -> Vec<String> {
        let Some(id) = self.id else { return Vec::new() };
        let all = std::fs::read_dir("/proc").unwrap().flatten();
        let its = all.filter(|p| {
            p.metadata().is_ok_and(|m| m.uid() == id)
                && p.file_name().to_string_lossy().parse::<u32>().is_ok()
        });
        its.filter_map(|p| std::fs::read_to_string(p.path().join("comm")).ok()).collect()
    }
}

impl Drop for User {
    fn drop(&mut self) {
        if std::thread::panicking() {
            drop(self.run(&["sandbox", "rm", "--all", "--yes"]));
        }
    }
}

#[test]
fn a_day_of_an_ordinary_user() {
    let user = User::new();
    let doctor = user.json(&["doctor"]);
    assert_eq!(doctor["sound"], true, "{doctor}");
    // System calls that are refused, and crowds of processes within their limit.
    let attack = user.json(&["doctor", "--attack", "--only", "16,22"]);
    assert_eq!((&attack["breaches"], &attack["not_tried"]), (&0.into(), &0.into()), "{attack}");
    assert!(attack["attempts"].as_array().unwrap().len() >= 2, "{attack}");

    let none = ["--network", "none"];
    let script = "id -u; pwd; echo err >&2; exit 7";
    let ran = user.run(&[&["sandbox", "run"][..], &none, &["--", "sh", "-c", script]].concat());
    assert_eq!((ran.code, ran.stdout.as_str(), ran.stderr.as_str()), (7, "1000\n/workspace\n", "err\n"));

    let create = ["sandbox", "create", "--name", "box1", "--label", "team=blue", "--network-rate", "1MiB"];
    assert_eq!(user.says(&create), "box1\n");
    std::fs::write(user.home().join("in.txt"), "from outside\n").unwrap();
    let copied = user.says(&["sandbox", "cp", "in.txt", "box1:/workspace/"]);
    assert_eq!(copied, "13 bytes to box1:/workspace/in.txt\n");
    let more = "cat in.txt; echo more >> in.txt; dd if=/dev/zero of=big bs=1M count=8 2>/dev/null";
    assert_eq!(user.says(&["sandbox", "exec", "box1", "--", "sh", "-c", more]), "from outside\n");
    assert_eq!(user.says(&["sandbox", "cp", "box1:in.txt", "out.txt"]), "18 bytes to out.txt\n");
    let out = user.home().join("out.txt");
    assert_eq!(std::fs::read_to_string(&out).unwrap(), "from outside\nmore\n");
    assert_eq!(Some(out.metadata().unwrap().uid()), user.id.or(Some(rustix::process::geteuid().as_raw())));

    let stats = user.json(&["sandbox", "stats", "box1"]);
    assert!(stats["stats"]["disk_bytes"].as_u64().unwrap() >= 8 << 20, "{stats}");
    let shown = user.says(&["sandbox", "stats", "box1"]);
    let kept = |what: &str| shown.lines().find(|l| l.starts_with(what)).unwrap().contains("kept by");
    // Whatever keeps them for this user on this machine, each is kept.
    assert!(["memory", "disk", "processes", "cpu"].into_iter().all(kept), "{shown}");
    assert!(shown.contains("kept by the proxy"), "{shown}");

    assert_eq!(user.says(&["sandbox", "snapshot", "box1", "--name", "snap1"]), "snap1\n");
    let from = [&["sandbox", "run", "--snapshot", "snap1"][..], &none, &["--", "cat", "in.txt"]].concat();
    assert_eq!(user.says(&from), "from outside\nmore\n");
    let child = user.says(&["sandbox", "fork", "box1"]).trim().to_string();
    assert_eq!(user.says(&["sandbox", "exec", &child, "--", "rm", "in.txt"]), "");
    assert_eq!(user.says(&["sandbox", "cat", "box1", "in.txt"]), "from outside\nmore\n");

    let list = user.json(&["sandbox", "list", "--label", "team=blue"]);
    let mut ids: Vec<_> =
        list["sandboxes"].as_array().unwrap().iter().map(|s| s["id"].as_str().unwrap()).collect();
    ids.sort_unstable();
    let mut both = ["box1", child.as_str()];
    both.sort_unstable();
    assert_eq!(ids, both);
    for id in both {
        assert_eq!(user.says(&["sandbox", "rm", id]), format!("{id} is gone.\n"));
    }
    assert_eq!(user.says(&["sandbox", "snapshots", "--remove", "snap1"]), "snap1 is gone.\n");
    assert_eq!(user.says(&["sandbox", "list"]), "There is no sandbox.\n");

    let state = user.home().join(".local/share/forkyard/sandboxes");
    for part in ["sandboxes", "trash", "layers", "snapshots"] {
        let left = || std::fs::read_dir(state.join(part)).unwrap().count();
        until(&format!("nothing is left in {part}"), || left() == 0);
    }
    until("no process is left", || user.processes().is_empty());
}
