//! Limits by cgroup: version 2 where its controllers are, else version 1; as root or in a part that was delegated to us.

use std::collections::BTreeMap;
use std::fs;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use forkyard_core::SandboxId;

use crate::Limits;
use crate::guest_client::file_pages;

/// The period that CPU quotas refer to.
const CPU_PERIOD_US: u64 = 100_000;
const PARENT: &str = "forkyard";
/// Beside the sandboxes' groups: the processes that they are cloned from.
const HELPERS: &str = "helpers";
/// Below a sandbox's group: all but its guest, to be frozen as one.
const COMMANDS: &str = "commands";

/// Where sandboxes' groups can be made on this machine.
#[derive(Debug, Clone, Default)]
pub struct Cgroups {
    /// What it was given: of a user, systemd may keep the processor.
    v2: Option<(PathBuf, Enforced)>,
    memory: Option<PathBuf>,
    cpu: Option<PathBuf>,
}

/// What a sandbox's groups enforce. Processes are bounded by their user namespace in any case.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Enforced {
    pub memory: bool,
    pub cpu: bool,
    pub processes: bool,
}

/// The groups of one sandbox.
#[derive(Default)]
pub struct Group {
    pub dirs: Vec<PathBuf>,
    /// Opened for a process to join by writing to them.
    pub joins: Vec<OwnedFd>,
    /// The directory of the one that a process may be born in.
    pub dir: Option<OwnedFd>,
    /// The kernel's counts of memory kills.
    pub oom_events: Option<OwnedFd>,
    /// Of the commands' own group: `cgroup.threads`, `cgroup.freeze`, `cgroup.events`. Empty where there is none.
    pub freezer: Vec<OwnedFd>,
    pub enforced: Enforced,
}

impl Cgroups {
    /// Finds out what may be used, by doing it.
    pub fn detect() -> Cgroups {
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        let own = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        let mut found = Cgroups { v2: detect_v2(&mounts, &own), ..Cgroups::default() };
        if found.v2.is_none() {
            found.memory = detect_v1(&mounts, &own, "memory");
            found.cpu = detect_v1(&mounts, &own, "cpu");
        }
        found
    }

    pub fn can(&self) -> Enforced {
        match &self.v2 {
            Some((_, can)) => *can,
            // A hierarchy of its own for what the user namespace bounds already would be one more to make, join and remove.
            None => Enforced { memory: self.memory.is_some(), cpu: self.cpu.is_some(), processes: false },
        }
    }

    /// `v2`, `v1` or `none`, for people.
    pub fn version(&self) -> &'static str {
        match self {
            Cgroups { v2: Some(_), .. } => "v2",
            Cgroups { memory: None, cpu: None, .. } => "none",
            _ => "v1",
        }
    }

    /// Whether a process can be born in its group, which has to be there before it then.
    pub fn births(&self) -> bool {
        self.v2.is_some()
    }

    /// Puts the helper of a provider that runs as root beside the sandboxes' groups, so that it may let sandboxes be born in them:
    /// for that the kernel asks for the right to move processes in the group above both. A user has it above all of its own.
    pub fn adopt(&self, helper: u32, owner: Option<u32>) {
        let (Some((parent, _)), Some(_)) = (&self.v2, owner) else { return };
        let dir = parent.join(HELPERS);
        if make_dir(&dir) && set(&dir, "cgroup.procs", helper) {
            allow_births(parent, owner);
        }
    }

    /// What can't be made is left out: the caller sees it in `enforced`.
    /// `owner`: as whom the helper runs, if not as we do.
    pub fn make(&self, tag: &str, id: &SandboxId, limits: &Limits, owner: Option<u32>) -> Group {
        // A name of its own for each start: the kernel may still be letting go of the last one.
        let name = format!("{tag}.{id}.{:08x}", super::state::unique() as u32);
        let mut group = Group::default();
        let quota = (limits.cpus * CPU_PERIOD_US as f64).max(1000.0) as u64;
        if let Some((parent, _)) = &self.v2 {
            let dir = parent.join(&name);
            if make_dir(&dir) {
                // One more for the guest itself, and room for the threads that answer questions about files.
                let pids = u64::from(limits.processes) + 64;
                let memory = set(&dir, "memory.max", limits.memory_bytes);
                set(&dir, "memory.swap.max", 0);
                set(&dir, "memory.oom.group", 0);
                group.enforced = Enforced {
                    memory,
                    cpu: set(&dir, "cpu.max", format!("{quota} {CPU_PERIOD_US}")),
                    processes: set(&dir, "pids.max", pids),
                };
                group.oom_events = open(&dir.join("memory.events"), false);
                group.joins.extend(open(&dir.join("cgroup.procs"), true));
                allow_births(&dir, owner);
                group.dir = open(&dir, false);
                let commands = dir.join(COMMANDS);
                group.dirs.push(dir);
                group.freezer = commands_group(&commands).unwrap_or_default();
            }
            return group;
        }
        let mut part = |parent: &Option<PathBuf>, fill: &dyn Fn(&Path) -> bool| {
            let dir = parent.as_ref()?.join(&name);
            if !make_dir(&dir) {
                return None;
            }
            let join = open(&dir.join("tasks"), true).filter(|_| fill(&dir));
            let Some(join) = join else {
                let _ = fs::remove_dir(&dir);
                return None;
            };
            group.joins.push(join);
            group.dirs.push(dir.clone());
            Some(dir)
        };
        let memory = part(&self.memory, &|dir| {
            let limited = set(dir, "memory.limit_in_bytes", limits.memory_bytes);
            set(dir, "memory.memsw.limit_in_bytes", limits.memory_bytes); // absent without swap accounting
            limited
        });
        let cpu = part(&self.cpu, &|dir| {
            set(dir, "cpu.cfs_period_us", CPU_PERIOD_US) && set(dir, "cpu.cfs_quota_us", quota)
        });
        group.oom_events = memory.as_ref().and_then(|dir| open(&dir.join("memory.oom_control"), false));
        group.enforced = Enforced { memory: memory.is_some(), cpu: cpu.is_some(), processes: false };
        group
    }
}

impl Cgroups {
    /// Groups that carry this tag, by sandbox.
    pub fn left(&self, tag: &str) -> BTreeMap<String, Vec<PathBuf>> {
        let mut found: BTreeMap<String, Vec<PathBuf>> = BTreeMap::new();
        for path in self.all() {
            if let Some((of, id)) = tag_and_sandbox(&path)
                && of == tag
            {
                found.entry(id.into()).or_default().push(path.clone());
            }
        }
        found
    }

    /// Removes groups of state folders that are gone, which nobody else would ever do. A group that nobody is in and that was made
    /// long ago is nobody's: a live sandbox is in its own, and one that starts enters it at once.
    pub fn remove_abandoned(&self, tag: &str) {
        const LONG: Duration = Duration::from_secs(600);
        let is_old = |path: &PathBuf| {
            let made = path.metadata().and_then(|meta| meta.modified());
            made.is_ok_and(|made| made.elapsed().is_ok_and(|age| age > LONG))
        };
        let others = |path: &PathBuf| tag_and_sandbox(path).is_some_and(|(of, _)| of != tag);
        for path in self.all().into_iter().filter(|path| others(path) && is_old(path)) {
            let _ = fs::remove_dir(path.join(COMMANDS));
            let _ = fs::remove_dir(&path); // refused while somebody is in it
        }
    }

    /// The groups of all sandboxes.
    fn all(&self) -> Vec<PathBuf> {
        let v2 = self.v2.as_ref().map(|(parent, _)| parent);
        let parents = v2.into_iter().chain([&self.memory, &self.cpu].into_iter().flatten());
        parents.flat_map(fs::read_dir).flatten().flatten().map(|entry| entry.path()).collect()
    }
}

/// Of a group's name.
fn tag_and_sandbox(path: &Path) -> Option<(&str, &str)> {
    let mut parts = path.file_name()?.to_str()?.split('.');
    match (parts.next(), parts.next(), parts.next(), parts.next()) {
        (Some(tag), Some(id), Some(_), None) => Some((tag, id)),
        _ => None,
    }
}

/// A group that shares its parent's limits and has only the processes that join it. Threaded, because a single thread joins such
/// a group without the lock that stops every fork of the machine.
fn commands_group(dir: &Path) -> Option<Vec<OwnedFd>> {
    if !make_dir(dir) {
        return None;
    }
    let files = set(dir, "cgroup.type", "threaded").then(|| {
        let files = [("cgroup.threads", true), ("cgroup.freeze", true), ("cgroup.events", false)];
        files.into_iter().filter_map(|(name, write)| open(&dir.join(name), write)).collect::<Vec<_>>()
    });
    let files = files.filter(|files| files.len() == 3);
    if files.is_none() {
        let _ = fs::remove_dir(dir);
    }
    files
}

/// Ends whoever is left in groups and removes them. The kernel needs a moment to let go of them, under load a long one.
pub async fn remove(dirs: &[PathBuf]) {
    const WITHIN: Duration = Duration::from_secs(10);
    const PAUSE: Duration = Duration::from_millis(2);
    let begun = Instant::now();
    for dir in dirs {
        loop {
            let _ = fs::remove_dir(dir.join(COMMANDS));
            match fs::remove_dir(dir) {
                Err(e) if e.raw_os_error() == Some(libc::EBUSY) && begun.elapsed() < WITHIN => {
                    set(dir, "cgroup.kill", 1); // what is below it too
                    tokio::time::sleep(PAUSE.max(begun.elapsed() / 10)).await;
                }
                _ => break,
            }
        }
    }
}

/// Memory in use by the sandbox's group, and its CPU time in microseconds, where the kernel counts them. Version 1 counts time by a
/// controller of its own, which often comes with the one that limits it.
pub fn usage(dirs: &[PathBuf]) -> (Option<u64>, Option<u64>) {
    let number =
        |dir: &PathBuf, file: &str| fs::read_to_string(dir.join(file)).ok()?.trim().parse::<u64>().ok();
    let memory = dirs.iter().find_map(|dir| {
        let used = number(dir, "memory.current").or_else(|| number(dir, "memory.usage_in_bytes"))?;
        let parts = fs::read_to_string(dir.join("memory.stat")).unwrap_or_default();
        let part = |name: &str| {
            let mut parts = parts.lines().filter_map(|line| line.split_once(' '));
            parts.find_map(|(key, value)| (key == name).then(|| value.trim().parse().ok())?)
        };
        Some(used.saturating_sub(file_pages(part)))
    });
    let cpu = dirs.iter().find_map(|dir| {
        let text = fs::read_to_string(dir.join("cpu.stat")).unwrap_or_default();
        let counted = text.lines().find_map(|line| line.strip_prefix("usage_usec ")?.trim().parse().ok());
        counted.or_else(|| Some(number(dir, "cpuacct.usage")? / 1000)) // nanoseconds
    });
    (memory, cpu)
}

/// The helper of a provider that runs as root is not root.
fn allow_births(dir: &Path, owner: Option<u32>) {
    if let Some(id) = owner {
        let _ = std::os::unix::fs::chown(dir.join("cgroup.procs"), Some(id), None);
    }
}

fn make_dir(dir: &Path) -> bool {
    match fs::create_dir(dir) {
        Ok(()) => true,
        Err(e) => e.kind() == std::io::ErrorKind::AlreadyExists,
    }
}

/// The group that sandboxes' groups are made in. One that somebody else made is there and may still not be ours to make groups in.
fn make_parent(dir: &Path) -> bool {
    use rustix::fs::{Access, AtFlags, CWD, accessat};
    make_dir(dir) && accessat(CWD, dir, Access::WRITE_OK | Access::EXEC_OK, AtFlags::EACCESS).is_ok()
}

fn set(dir: &Path, file: &str, value: impl std::fmt::Display) -> bool {
    // Opened for writing only: create would be refused in a cgroup.
    let file = fs::OpenOptions::new().write(true).open(dir.join(file));
    file.and_then(|mut f| std::io::Write::write_all(&mut f, value.to_string().as_bytes())).is_ok()
}

fn open(path: &Path, write: bool) -> Option<OwnedFd> {
    fs::OpenOptions::new().read(!write).write(write).open(path).ok().map(OwnedFd::from)
}

/// The mount point of a hierarchy, and the path in it that the mount shows as its root.
fn mount_of(mounts: &str, fits: impl Fn(&str, &str) -> bool) -> Option<(PathBuf, PathBuf)> {
    mounts.lines().find_map(|line| {
        let (left, right) = line.split_once(" - ")?;
        let left: Vec<&str> = left.split(' ').collect();
        let right: Vec<&str> = right.split(' ').collect();
        fits(right.first()?, right.get(2)?).then(|| (PathBuf::from(left[4]), PathBuf::from(left[3])))
    })
}

/// This process' own group in a hierarchy, as a path below its mount point.
fn own_dir(mount: &(PathBuf, PathBuf), own: &str, fits: impl Fn(&str) -> bool) -> Option<PathBuf> {
    let path = own.lines().find_map(|line| {
        let mut parts = line.splitn(3, ':');
        let (_, controllers, path) = (parts.next()?, parts.next()?, parts.next()?);
        fits(controllers).then_some(path)
    })?;
    let below = Path::new(path).strip_prefix(&mount.1).unwrap_or(Path::new(""));
    Some(mount.0.join(below))
}

/// Sandboxes of version 1 lie below our own group, so that its limits hold for them too.
fn detect_v1(mounts: &str, own: &str, controller: &str) -> Option<PathBuf> {
    let has = |list: &str| list.split(',').any(|c| c == controller);
    let mount = mount_of(mounts, |kind, options| kind == "cgroup" && has(options))?;
    let parent = own_dir(&mount, own, has)?.join(PARENT);
    make_parent(&parent).then_some(parent)
}

/// In version 2 a group with processes can't have groups with controllers, so sandboxes lie below the highest group above us
/// that we may write to and that has no processes of its own.
fn detect_v2(mounts: &str, own: &str) -> Option<(PathBuf, Enforced)> {
    let mount = mount_of(mounts, |kind, _| kind == "cgroup2")?;
    let own = own_dir(&mount, own, str::is_empty)?;
    let mut candidates: Vec<&Path> = own.ancestors().take_while(|dir| dir.starts_with(&mount.0)).collect();
    candidates.reverse();
    candidates.into_iter().find_map(|dir| {
        let offered = fs::read_to_string(dir.join("cgroup.controllers")).ok()?;
        let offered: Vec<&str> = ["memory", "pids", "cpu"]
            .into_iter()
            .filter(|c| offered.split_whitespace().any(|o| o == *c))
            .collect();
        let parent = dir.join(PARENT);
        let all = offered.iter().map(|c| format!("+{c}")).collect::<Vec<_>>().join(" ");
        let enable = |dir: &Path| set(dir, "cgroup.subtree_control", &all);
        // Without memory it is not worth the while: a watchdog has to look anyway.
        let usable = offered.contains(&"memory")
            && enable(dir)
            && make_parent(&parent)
            && enable(&parent)
            && open(&dir.join("cgroup.procs"), true).is_some();
        let has = |name| offered.contains(&name);
        usable.then(|| (parent, Enforced { memory: has("memory"), cpu: has("cpu"), processes: has("pids") }))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOUNTS: &str = "\
29 22 0:26 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
30 22 0:27 /docker/x /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct
31 22 0:28 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
";

    #[test]
    fn a_group_of_somebody_else_is_not_ours_to_make_groups_in() {
        let dir = tempfile::tempdir().unwrap();
        let parent = dir.path().join(PARENT);
        assert!(make_parent(&parent) && make_parent(&parent), "our own, made and found");
        // That it is there says nothing: only root may write to it now.
        fs::set_permissions(&parent, std::os::unix::fs::PermissionsExt::from_mode(0o555)).unwrap();
        assert!(make_dir(&parent));
        assert_eq!(make_parent(&parent), rustix::process::geteuid().is_root());
    }

    #[test]
    fn hierarchies_are_found_by_controller() {
        let has = |want: &'static str| {
            move |kind: &str, options: &str| kind == "cgroup" && options.split(',').any(|c| c == want)
        };
        assert_eq!(mount_of(MOUNTS, has("memory")).unwrap().0, Path::new("/sys/fs/cgroup/memory"));
        assert_eq!(mount_of(MOUNTS, has("cpu")).unwrap().0, Path::new("/sys/fs/cgroup/cpu,cpuacct"));
        assert!(mount_of(MOUNTS, has("pids")).is_none());
        assert_eq!(mount_of(MOUNTS, |k, _| k == "cgroup2").unwrap().0, Path::new("/sys/fs/cgroup/unified"));
    }

    #[test]
    fn our_own_group_is_seen_through_the_mounts_root() {
        let mount = (PathBuf::from("/sys/fs/cgroup/cpu"), PathBuf::from("/docker/x"));
        let own = "5:cpu,cpuacct:/docker/x/inner\n0::/a\n";
        let dir = own_dir(&mount, own, |c| c.split(',').any(|c| c == "cpu")).unwrap();
        assert_eq!(dir, Path::new("/sys/fs/cgroup/cpu/inner"));
        let unified = (PathBuf::from("/sys/fs/cgroup"), PathBuf::from("/"));
        assert_eq!(own_dir(&unified, own, str::is_empty).unwrap(), Path::new("/sys/fs/cgroup/a"));
    }

    #[test]
    fn usage_is_read_from_either_version() {
        let parent = tempfile::tempdir().unwrap();
        let group = |name: &str, files: &[(&str, &str)]| {
            let dir = parent.path().join(name);
            fs::create_dir(&dir).unwrap();
            for (file, text) in files {
                fs::write(dir.join(file), text).unwrap();
            }
            dir
        };
        let throttled = ("cpu.stat", "nr_periods 1\nnr_throttled 0\nthrottled_time 0\n");
        let v2 = [
            ("memory.current", "4096\n"),
            ("memory.stat", "anon 9\nfile 8\ninactive_file 90\nactive_file 6\n"),
            ("cpu.stat", "usage_usec 70\nuser_usec 50\n"),
        ];
        let v2 = group("v2", &v2);
        let parts = "inactive_file 1\nactive_file 1\ntotal_inactive_file 2\ntotal_active_file 190\n";
        let memory = group("memory", &[("memory.usage_in_bytes", "8192\n"), ("memory.stat", parts)]);
        let joint = group("cpu,cpuacct", &[throttled, ("cpuacct.usage", "90000\n")]);
        let alone = group("cpu", &[throttled]);
        assert_eq!(usage(&[v2]), (Some(4000), Some(70)));
        assert_eq!(usage(&[memory.clone(), joint]), (Some(8000), Some(90)));
        assert_eq!(usage(&[memory, alone]), (Some(8000), None), "the guest counts");
    }

    #[test]
    fn groups_of_folders_that_are_gone_are_removed() {
        let parent = tempfile::tempdir().unwrap();
        let make = |name: &str, made: Duration| {
            let dir = parent.path().join(name);
            fs::create_dir(&dir).unwrap();
            fs::File::open(&dir).unwrap().set_modified(std::time::SystemTime::now() - made).unwrap();
        };
        let (now, once) = (Duration::ZERO, Duration::from_secs(3600));
        for (name, made) in [("gone.a.1", once), ("gone.b.2", now), ("mine.c.3", once), ("helpers", once)] {
            make(name, made);
        }
        // A real group with somebody in it can't be removed, as a folder that is not empty can't.
        make("gone.d.4", now);
        make("gone.d.4/somebody", now);
        fs::File::open(parent.path().join("gone.d.4"))
            .unwrap()
            .set_modified(std::time::SystemTime::now() - once)
            .unwrap();
        let groups = Cgroups { memory: Some(parent.path().into()), ..Cgroups::default() };
        groups.remove_abandoned("mine");
        let mut left: Vec<_> = fs::read_dir(&parent).unwrap().map(|e| e.unwrap().file_name()).collect();
        left.sort();
        assert_eq!(left, ["gone.b.2", "gone.d.4", "helpers", "mine.c.3"]);
    }
}

/// On a machine with cgroup v2, as whom `FORKYARD_MACHINE` says: root, an ordinary user, or one with a delegated part.
#[cfg(test)]
mod machine {
    use std::io::Write;
    use std::process::{Child, Command, ExitStatus, Stdio};
    use std::time::{Duration, Instant};

    use super::*;

    const WITHIN: Duration = Duration::from_secs(120);

    fn limits() -> Limits {
        Limits {
            memory_bytes: 64 << 20,
            cpus: 1.0,
            disk_bytes: 1 << 30,
            processes: 8,
            network_bytes_per_s: None,
        }
    }

    /// None for whom no part is delegated: detection must say so.
    fn group(limits: &Limits) -> Option<Group> {
        let found = Cgroups::detect();
        if std::env::var("FORKYARD_MACHINE").unwrap() == "user" {
            assert_eq!((found.version(), found.can()), ("none", Enforced::default()));
            return None;
        }
        assert_eq!(found.version(), "v2");
        let group = found.make("tag", &SandboxId::new("machine").unwrap(), limits, None);
        let cpu = std::env::var("FORKYARD_MACHINE").unwrap() != "partly";
        assert_eq!(found.can(), Enforced { memory: true, cpu, processes: true });
        assert_eq!(group.enforced, found.can());
        assert_eq!((group.dirs.len(), group.freezer.len()), (1, 3));
        Some(group)
    }

    /// A shell in the group; it begins once it is there.
    fn shell(group: &Group, script: &str) -> Child {
        let mut child = Command::new("sh")
            .args(["-c", &format!("read go; {script}")])
            .stdin(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        fs::write(group.dirs[0].join("cgroup.procs"), child.id().to_string()).unwrap();
        child.stdin.take().unwrap().write_all(b"go\n").unwrap();
        child
    }

    fn count(group: &Group, file: &str, what: &str) -> u64 {
        let text = fs::read_to_string(group.dirs[0].join(file)).unwrap();
        text.lines().find_map(|line| line.strip_prefix(what)?.trim().parse().ok()).unwrap()
    }

    fn ended(child: &mut Child) -> ExitStatus {
        let until = Instant::now() + WITHIN;
        loop {
            if let Some(status) = child.try_wait().unwrap() {
                return status;
            }
            assert!(Instant::now() < until, "it runs on");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    async fn removed(group: &Group) {
        remove(&group.dirs).await;
        assert!(group.dirs.iter().all(|dir| !dir.exists()), "{:?}", group.dirs);
    }

    #[tokio::test]
    #[ignore = "needs cgroup v2: cargo xtask vm"]
    async fn memory_is_bounded() {
        let Some(group) = group(&limits()) else { return };
        let status = ended(&mut shell(&group, "exec tail /dev/zero"));
        assert_eq!(std::os::unix::process::ExitStatusExt::signal(&status), Some(libc::SIGKILL), "{status}");
        assert!(count(&group, "memory.events", "oom_kill ") > 0);
        removed(&group).await;
    }

    #[tokio::test]
    #[ignore = "needs cgroup v2: cargo xtask vm"]
    async fn processes_are_bounded_and_none_outlives_its_group() {
        let Some(group) = group(&limits()) else { return };
        let mut bomb = shell(&group, "while :; do sleep 1000 & done");
        let until = Instant::now() + WITHIN;
        while count(&group, "pids.events", "max ") == 0 {
            assert!(Instant::now() < until, "nobody stops it");
            std::thread::sleep(Duration::from_millis(10));
        }
        assert!(
            fs::read_to_string(group.dirs[0].join("pids.current")).unwrap().trim().parse::<u32>().unwrap()
                <= 8 + 64
        );
        removed(&group).await;
        ended(&mut bomb);
    }

    #[tokio::test]
    #[ignore = "needs cgroup v2: cargo xtask vm"]
    async fn the_processor_is_shared_out() {
        let Some(group) = group(&Limits { cpus: 0.2, ..limits() }).filter(|group| group.enforced.cpu) else {
            return;
        };
        let before = Instant::now();
        let mut busy = shell(&group, "while :; do :; done");
        while count(&group, "cpu.stat", "nr_throttled ") < 10 {
            assert!(before.elapsed() < WITHIN, "nobody stops it");
            std::thread::sleep(Duration::from_millis(50));
        }
        let used = Duration::from_micros(count(&group, "cpu.stat", "usage_usec "));
        assert!(used < before.elapsed() / 2, "{used:?} of {:?}", before.elapsed());
        removed(&group).await;
        ended(&mut busy);
    }
}
