//! What a user's machine gives: its kernel, its modules, its cgroups. Those that need one of their own are ignored here and run in
//! the virtual machine of `cargo xtask vm`, which says by `FORKYARD_MACHINE` as whom.

mod quota;
mod refused;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::local::{as_ordinary_user, run_cases_on};
use forkyard_core::{Attempt, SandboxId};
use forkyard_sandbox::conformance::attacks;
use forkyard_sandbox::local::{Level, LocalOptions, LocalProvider, doctor};
use forkyard_sandbox::{
    ErrorKind, ExecEvent, ExecRequest, LimitMeans, NetworkMode, Provider, SandboxSpec, SandboxStatus,
};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Machine {
    Root,
    User,
    Delegated,
    /// Without the processor, as older versions of systemd do it.
    Partly,
}

fn machine() -> Machine {
    match std::env::var("FORKYARD_MACHINE").as_deref() {
        Ok("root") => Machine::Root,
        Ok("user") => Machine::User,
        Ok("delegated") => Machine::Delegated,
        Ok("partly") => Machine::Partly,
        other => panic!("FORKYARD_MACHINE is {other:?}: cargo xtask vm"),
    }
}

impl Machine {
    fn has_groups(self) -> bool {
        self != Machine::User
    }

    fn shares_out_the_processor(self) -> bool {
        self.has_groups() && self != Machine::Partly
    }
}

fn offline() -> SandboxSpec {
    let mut spec = SandboxSpec::default();
    spec.network.mode = NetworkMode::None;
    // Less than the machine has, or there would be nothing to keep.
    spec.limits.cpus = 0.5;
    spec
}

fn provider() -> (LocalProvider, tempfile::TempDir) {
    let dir = tempfile::tempdir().unwrap();
    (LocalProvider::new(dir.path(), LocalOptions::default()).unwrap(), dir)
}

fn id(name: &str) -> SandboxId {
    SandboxId::new(name).unwrap()
}

/// The group of a sandbox, wherever below the mount point it was made.
fn group_of(id: &SandboxId) -> Option<PathBuf> {
    fn find(dir: &Path, id: &str) -> Option<PathBuf> {
        let dirs = dir.read_dir().ok()?.flatten().map(|e| e.path()).filter(|p| p.is_dir());
        let dirs: Vec<PathBuf> = dirs.collect();
        let named = |p: &&PathBuf| {
            p.file_name().is_some_and(|n| n.to_string_lossy().split('.').any(|part| part == id))
        };
        dirs.iter().find(named).cloned().or_else(|| dirs.iter().find_map(|dir| find(dir, id)))
    }
    find(Path::new("/sys/fs/cgroup"), id.as_str())
}

fn read(dir: &Path, file: &str) -> String {
    std::fs::read_to_string(dir.join(file)).unwrap().trim().to_string()
}

#[tokio::test]
#[ignore = "needs a machine of its own: cargo xtask vm"]
async fn limits_are_kept_by_the_strongest_means_and_it_is_said_which() {
    let (provider, _dir) = provider();
    let id = id("means");
    let sandbox = provider.create(&id, Attempt(1), &offline()).await.unwrap();
    let achieved = sandbox.info().await.unwrap().achieved;
    let means = |kernel| if kernel { LimitMeans::Kernel } else { LimitMeans::Watchdog };
    let (memory, cpu) = (machine().has_groups(), machine().shares_out_the_processor());
    assert_eq!(
        (achieved.memory, achieved.cpu, achieved.disk, achieved.processes),
        (means(memory), means(cpu), means(machine() == Machine::Root), LimitMeans::Kernel)
    );
    assert!(achieved.layers.iter().any(|layer| layer == "landlock"), "{:?}", achieved.layers);
    match group_of(&id) {
        Some(group) => {
            assert!(machine().has_groups());
            assert_eq!(read(&group, "memory.max"), offline().limits.memory_bytes.to_string());
            assert!(!cpu || read(&group, "cpu.max") == "50000 100000");
        }
        None => assert!(!machine().has_groups()),
    }
    let found = doctor(&provider).await;
    let about =
        |what: &str| found.iter().find(|f| f.what == what).unwrap_or_else(|| panic!("nothing on {what}"));
    let freezer = if machine().has_groups() { "cgroup freezer" } else { "signals" };
    assert!(about("pause").detail.contains(freezer), "{:?}", about("pause"));
    for (what, kernel) in [("memory limit", memory), ("cpu limit", cpu)] {
        let (level, detail) = if kernel { (Level::Ok, "cgroup v2") } else { (Level::Weak, "watchdog") };
        assert_eq!(
            (about(what).level, about(what).detail.contains(detail)),
            (level, true),
            "{:?}",
            about(what)
        );
        assert_eq!(about(what).fix.is_some(), level == Level::Weak);
    }
    for what in ["kernel", "isolation", "landlock"] {
        assert_eq!(about(what).level, Level::Ok, "{:?}", about(what));
    }
    if !machine().has_groups() {
        let strict = SandboxSpec { strict: true, ..offline() };
        let refused = provider.create(&self::id("strict"), Attempt(1), &strict).await.err().unwrap();
        assert_eq!(refused.kind, ErrorKind::Unsupported);
        // Several are kept by weaker means; any of them is reason enough.
        let (strict, limit) = (refused.message.starts_with("strict: "), refused.message.contains(" limit"));
        assert!(strict && limit && refused.hint.is_some(), "{refused}");
    }
    provider.destroy(&id).await.unwrap();
    provider.settle().await;
    assert_eq!(group_of(&id), None, "the group stays");
}

/// Who may run programs ahead of all others (`@audio - rtprio 95` is usual) gives that to no command.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs a machine of its own: cargo xtask vm"]
async fn rights_to_real_time_stay_outside() {
    use rustix::process::{Resource, Rlimit, setrlimit};
    if machine() != Machine::Root {
        return; // nobody else can raise these bounds
    }
    for which in [Resource::Rtprio, Resource::Nice] {
        setrlimit(which, Rlimit { current: Some(40), maximum: Some(40) }).unwrap();
    }
    let mut cases = attacks();
    cases.retain(|case| case.name == "the_watchdog_can_not_be_starved");
    assert_eq!(cases.len(), 1);
    run_cases_on(cases, offline()).await;
}

/// On any machine, as anybody: what doctor says is what the next sandbox has.
#[tokio::test(flavor = "multi_thread")]
async fn doctor_says_what_a_sandbox_gets() {
    let (provider, _dir) = provider();
    let id = id("said");
    let sandbox = provider.create(&id, Attempt(1), &offline()).await.unwrap();
    let achieved = sandbox.info().await.unwrap().achieved;
    provider.destroy(&id).await.unwrap();
    let found = doctor(&provider).await;
    let about =
        |what: &str| found.iter().find(|f| f.what == what).unwrap_or_else(|| panic!("nothing on {what}"));
    for (what, means) in
        [("memory limit", achieved.memory), ("cpu limit", achieved.cpu), ("disk limit", achieved.disk)]
    {
        let kernel = means == LimitMeans::Kernel;
        let row = about(what);
        let expected = if kernel { Level::Ok } else { Level::Weak };
        assert_eq!((row.level, row.detail.starts_with("watchdog")), (expected, !kernel), "{row:?}");
        assert_eq!(row.fix.is_some(), !kernel, "{row:?}");
    }
    let landlock = achieved.layers.iter().any(|layer| layer == "landlock");
    assert_eq!(about("landlock").level == Level::Ok, landlock, "{:?}", about("landlock"));
    assert_eq!(about("isolation").level, Level::Ok, "{:?}", about("isolation"));
    // The rate is kept by the proxy, which a sandbox with one records as the weaker means.
    assert_eq!(about("network rate").level, Level::Weak);
    let shown = &about("host trees, read-only").detail;
    assert!(provider.shown().iter().all(|tree| shown.contains(tree.path.to_str().unwrap())), "{shown}");
    provider.settle().await;
    assert!(provider.list(&Default::default()).await.unwrap().is_empty(), "nothing is left");
}

/// After root, whose groups are there then and are nobody else's to use.
#[test]
fn doctor_says_what_an_ordinary_user_gets() {
    drop(provider());
    as_ordinary_user("machine::doctor_says_what_a_sandbox_gets");
}

#[tokio::test]
#[ignore = "needs a machine of its own: cargo xtask vm"]
async fn a_busy_sandbox_gets_its_share_of_the_processor_and_no_more() {
    let (provider, _dir) = provider();
    let mut spec = offline();
    spec.limits.cpus = 0.2;
    let sandbox = provider.create(&id("busy"), Attempt(1), &spec).await.unwrap();
    // Clock ticks of a loop that ran for five seconds: a hundred a second, if nobody held it back.
    let script = "(while :; do :; done) & sleep 5; read -r stat < /proc/$!/stat; set -- $stat; echo $((${14} + ${15})); kill -9 $!";
    let (result, out, _) = sandbox.exec(ExecRequest::shell(script)).await.unwrap().output().await.unwrap();
    let ticks: u32 = String::from_utf8(out).unwrap().trim().parse().unwrap();
    assert_eq!(result.exit_code, 0);
    assert!((1..250).contains(&ticks), "{ticks} ticks");
    provider.destroy(&id("busy")).await.unwrap();
    provider.settle().await;
}

#[tokio::test]
#[ignore = "needs a machine of its own: cargo xtask vm"]
async fn a_paused_sandbox_is_frozen_by_the_kernel() {
    let (provider, _dir) = provider();
    let id = id("frozen");
    let sandbox = provider.create(&id, Attempt(1), &offline()).await.unwrap();
    // It would tell of a signal to continue.
    let script = "trap 'echo woken' CONT; echo up; while :; do echo x >> beat; sleep 0.02; done";
    let mut command = sandbox.exec(ExecRequest::shell(script)).await.unwrap();
    assert_eq!(command.events.recv().await.unwrap().unwrap(), ExecEvent::Stdout("up\n".into()));
    let size = async || sandbox.stat("beat").await.map_or(0, |info| info.size);
    sandbox.pause().await.unwrap();
    assert_eq!(sandbox.info().await.unwrap().status, SandboxStatus::Paused);
    if let Some(group) = group_of(&id) {
        let commands = group.join("commands");
        assert_eq!(
            (read(&commands, "cgroup.freeze").as_str(), read(&group, "cgroup.freeze").as_str()),
            ("1", "0")
        );
        assert!(read(&commands, "cgroup.events").contains("frozen 1"));
    }
    let before = size().await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(size().await, before, "files can be read, and do not change");
    let refused = sandbox.exec(ExecRequest::new(["true"])).await.map(drop).unwrap_err();
    assert!(refused.message.contains("paused"), "{refused}");
    sandbox.resume().await.unwrap();
    while size().await <= before {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    command.control.signal(forkyard_sandbox::Signal::Kill).await.unwrap();
    let (_, out, _) = command.output().await.unwrap();
    assert_eq!(
        String::from_utf8_lossy(&out).contains("woken"),
        !machine().has_groups(),
        "who was frozen does not know"
    );
    // Frozen ones die too.
    let _left = sandbox.exec(ExecRequest::new(["sleep", "600"])).await.unwrap();
    sandbox.pause().await.unwrap();
    provider.destroy(&id).await.unwrap();
    provider.settle().await;
    assert_eq!(group_of(&id), None, "the group stays");
}

/// As a machine's administrator: watches who is moved to which group.
#[tokio::test]
#[ignore = "needs a machine of its own: cargo xtask vm"]
async fn a_sandbox_is_born_in_its_group() {
    if machine() != Machine::Root {
        return;
    }
    const TRACING: &str = "/sys/kernel/tracing";
    const MOVES: &str = "/sys/kernel/tracing/events/cgroup/cgroup_attach_task/enable";
    if !Path::new(MOVES).exists() {
        assert!(
            Command::new("mount").args(["-t", "tracefs", "tracefs", TRACING]).status().unwrap().success()
        );
    }
    let (provider, _dir) = provider();
    // The first one brings the helper, which is moved.
    provider.create(&id("first"), Attempt(1), &offline()).await.unwrap();
    std::fs::write(MOVES, "1").unwrap();
    let sandbox = provider.create(&id("born"), Attempt(1), &offline()).await.unwrap();
    let moves = || -> Vec<String> {
        let text = std::fs::read_to_string(format!("{TRACING}/trace")).unwrap();
        text.lines().filter(|line| line.contains("born.")).map(String::from).collect()
    };
    assert_eq!(moves(), Vec::<String>::new(), "a move holds up every fork of the machine");
    // Its commands are moved, one thread each, which does not.
    sandbox.exec(ExecRequest::new(["true"])).await.unwrap().output().await.unwrap();
    let moved = moves();
    std::fs::write(MOVES, "0").unwrap();
    assert!(moved.iter().all(|line| line.contains("/commands")) && moved.len() == 1, "{moved:?}");
    for name in ["first", "born"] {
        provider.destroy(&id(name)).await.unwrap();
    }
    provider.settle().await;
}

/// As a machine's administrator: takes overlayfs away.
#[tokio::test]
#[ignore = "needs a machine of its own: cargo xtask vm"]
async fn without_the_overlay_module_its_name_is_said() {
    if machine() != Machine::Root {
        return;
    }
    const LOADER: &str = "/proc/sys/kernel/modprobe";
    let loader = std::fs::read_to_string(LOADER).unwrap();
    std::fs::write(LOADER, "/bin/false").unwrap();
    let loaded =
        || std::fs::read_to_string("/proc/modules").unwrap().lines().any(|m| m.starts_with("overlay "));
    while loaded() {
        Command::new("busybox").args(["rmmod", "overlay"]).output().unwrap();
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let (provider, _dir) = provider();
    let refused = provider.create(&id("overlay"), Attempt(1), &offline()).await.err().unwrap();
    std::fs::write(LOADER, loader.trim()).unwrap();
    assert_eq!(refused.kind, ErrorKind::Unsupported);
    assert_eq!(refused.hint.as_deref(), Some("load the overlay module: modprobe overlay"), "{refused}");
    assert!(provider.list(&Default::default()).await.unwrap().is_empty());
    provider.create(&id("overlay"), Attempt(1), &offline()).await.expect("the kernel loads it by itself");
    provider.destroy(&id("overlay")).await.unwrap();
    provider.settle().await;
}

/// Not a test by itself: tells what the kernel it believes to run on leads to.
#[tokio::test]
#[ignore = "run by another test"]
async fn creation_on_this_kernel() {
    let (provider, _dir) = provider();
    let refused = provider.create(&id("old"), Attempt(1), &offline()).await.err().expect("it was made");
    println!("refused: {:?} {refused} {}", refused.kind, refused.hint.as_deref().unwrap_or_default());
    let found = doctor(&provider).await;
    println!("doctor: {:?}", found.iter().find(|f| f.what == "kernel").unwrap().level);
}

#[test]
fn an_older_kernel_is_refused_with_the_reason() {
    // A personality under which uname answers with 2.6.
    let output = Command::new("setarch")
        .args([std::env::consts::ARCH, "--uname-2.6"])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", "machine::creation_on_this_kernel", "--ignored", "--nocapture"])
        .output()
        .expect("setarch of util-linux");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}");
    assert!(text.contains("refused: Unsupported kernel 2.6.") && text.contains("6.1 or newer"), "{text}");
    assert!(text.contains("install a newer kernel") && text.contains("doctor: Missing"), "{text}");
}
