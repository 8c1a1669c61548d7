//! The guest at work: one event loop for connections and commands, a thread for each question about files.

mod aside;
mod commands;
mod conn;
mod freezer;
mod job;
mod memory;
mod outbox;
mod owners;
mod procs;
mod quiet;
mod running;
mod server;
mod share;
mod spawn;
mod spool;
mod unlinked;
mod watch;
mod work;

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process::ExitCode;

use forkyard_guest::container::{MountedFolder, NoStart};
use forkyard_guest::zygote::Watch;
use rustix::fs::{CWD, Mode, OFlags, ResolveFlags};
use serde::Deserialize;

use crate::sys::Step;
use crate::sys::landlock::{self, Rights};

pub use freezer::Freezer;
pub use outbox::Outbox;
pub use spawn::OomScore;

/// Of a container's guest: whoever has it started gets to see it.
const LEAST_MS: u64 = 1000;

/// What a guest needs to know. In a local sandbox the zygote fills it in.
pub struct Config {
    pub env: BTreeMap<String, String>,
    /// The sandbox ends by itself after this.
    pub lifetime_ms: u64,
    pub attempt: u32,
    /// Without one, whoever can reach the socket is an owner.
    pub token: Option<String>,
    /// Most processes of the user, for the commands.
    pub processes: u32,
    pub watch: Watch,
    pub control: Option<OwnedFd>,
    pub listener: Option<OwnedFd>,
    pub proxy: Option<OwnedFd>,
    /// A directory outside of what commands see.
    pub spool: Option<OwnedFd>,
    pub upper: Option<OwnedFd>,
    pub oom_events: Option<OwnedFd>,
    /// Without one, commands are paused by signals.
    pub freezer: Option<Freezer>,
    pub oom_score: Option<OomScore>,
    /// Commands may open only what is below the root, by Landlock where the kernel has it.
    pub landlock: bool,
}

/// Serves until the deadline or until it is told to end. Ending pid 1 ends every process of the sandbox.
pub fn run(config: Config) -> ! {
    crate::sys::process::defer_to_others();
    let code = match server::Server::new(config) {
        Ok(mut server) => server.run(),
        Err(_) => 1,
    };
    crate::sys::process::exit_now(code)
}

/// What a container's guest finds in `FORKYARD_GUEST`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ContainerConfig {
    token: String,
    lifetime_ms: u64,
    /// When it ends, in milliseconds since 1970: a container that is started again has what is left.
    #[serde(default)]
    deadline: Option<u64>,
    attempt: u32,
    #[serde(default)]
    env: BTreeMap<String, String>,
    #[serde(default)]
    proxy_port: Option<u16>,
    /// None: the engine's own limit is all there is. An rlimit would count the user's processes on the whole host.
    #[serde(default)]
    processes: Option<u32>,
    /// The folder that holds everything a command can fill, and how much it may hold.
    #[serde(default)]
    disk: Option<(String, u64)>,
    /// The folder that the socket lies in is the host's too, a mount of its own.
    #[serde(default)]
    shared: bool,
    /// What the engine can't keep, and the guest looks after.
    #[serde(default)]
    memory_bytes: Option<u64>,
    #[serde(default)]
    cpus: Option<f64>,
    /// A file that names each folder of the host, see [`MountedFolder`]. The host writes it before each start: the number of a
    /// device is of one mount, and a folder may be another by then.
    #[serde(default)]
    folders: Option<String>,
}

/// The engine follows paths of the host anew, and whoever could write there may have put a link in the place of a folder.
fn check_folders(list: &str) -> Result<(), (NoStart, String)> {
    // An image may have a link in its place.
    let opened = rustix::fs::openat2(CWD, list, OFlags::CLOEXEC, Mode::empty(), ResolveFlags::NO_SYMLINKS);
    let folders: Vec<MountedFolder> = opened
        .map_err(std::io::Error::from)
        .and_then(|file| Ok(serde_json::from_reader(std::fs::File::from(file))?))
        .map_err(|e| (NoStart::Other, format!("{list}: {e}")))?;
    for MountedFolder { path, device, inode } in folders {
        match rustix::fs::stat(path.as_str()) {
            Ok(seen) if (seen.st_dev, seen.st_ino) == (device, inode) => {}
            Ok(_) => {
                let what = format!("what is mounted at {path} is another folder than the one that was named");
                return Err((NoStart::OtherFolder, what));
            }
            Err(e) => {
                return Err((NoStart::UnseenFolder, format!("the folder at {path} can't be looked at: {e}")));
            }
        }
    }
    Ok(())
}

/// The folder that the socket lies in, which is the host's: an image that has links on the way there would have it elsewhere.
fn open_shared(socket: &Path) -> rustix::io::Result<OwnedFd> {
    let dir = socket.parent().unwrap_or(Path::new("/"));
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    rustix::fs::openat2(CWD, dir, flags, Mode::empty(), ResolveFlags::NO_SYMLINKS)
}

/// The folder of the root that leads to the socket is read-only from now on for this guest and all that it starts: it is the
/// host's too, and the guest's user may write there. One rule for all, so that commands may look at each other.
fn keep_out_of(socket: &Path) -> crate::sys::Result<()> {
    let own = socket.components().nth(1).map(|part| part.as_os_str().to_owned()).unwrap_or_default();
    let dirs = all_but(&own).step("folders of the root")?;
    match landlock::ruleset(dirs.iter().map(|(dir, rights)| (dir.as_fd(), *rights))).step("rules")? {
        Some(ruleset) if !landlock::restrict_self(ruleset.as_raw_fd()) => {
            Err(std::io::Error::last_os_error()).step("restrict")
        }
        Some(_) | None => Ok(()),
    }
}

fn all_but(own: &OsStr) -> rustix::io::Result<Vec<(OwnedFd, Rights)>> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let root = rustix::fs::open("/", flags, Mode::empty())?;
    let mut dirs = Vec::new();
    let list = rustix::fs::openat(&root, ".", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    for entry in rustix::fs::Dir::new(list)? {
        let name = entry?.file_name().to_owned();
        let skipped = [b".", b"..".as_slice(), own.as_bytes()].contains(&name.to_bytes());
        // Links lead to what has its own rights, and a root that is read-only has no files to change.
        if !skipped && let Ok(dir) = rustix::fs::openat(&root, name, flags, Mode::empty()) {
            dirs.push((dir, Rights::All));
        }
    }
    dirs.push((root, Rights::Read));
    Ok(dirs)
}

/// Never more than was left when it was started, except for who asked for less than an engine takes to start it.
fn left(lifetime_ms: u64, deadline: Option<u64>, now: u64) -> u64 {
    let left = deadline.map_or(lifetime_ms, |deadline| deadline.saturating_sub(now).min(lifetime_ms));
    left.max(lifetime_ms.min(LEAST_MS))
}

fn since_1970() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

/// Pid 1 of a container. Commands run as the same user, so that the guest is closed to them and owners show a token.
pub fn container(socket: &str) -> ExitCode {
    let fail_for = |why: NoStart, what: String| {
        eprintln!("forkyard-guest: {what}");
        ExitCode::from(why.code())
    };
    let fail = |what: String| fail_for(NoStart::Other, what);
    let config =
        match std::env::var("FORKYARD_GUEST").map(|text| serde_json::from_str::<ContainerConfig>(&text)) {
            Ok(Ok(config)) => config,
            Ok(Err(e)) => return fail(format!("FORKYARD_GUEST: {e}")),
            Err(_) => return fail("FORKYARD_GUEST is not set".into()),
        };
    let oom_score = OomScore::open();
    if let Err(e) = crate::sys::process::set_dumpable(false) {
        return fail(format!("can't close itself to the commands: {e}"));
    }
    // The same calls are refused as in a local sandbox, on top of what the engine refuses.
    if let Err(e) = crate::sys::seccomp::install(&crate::sys::seccomp::program()) {
        return fail(format!("seccomp: {e}"));
    }
    let socket = Path::new(socket);
    if config.shared {
        match open_shared(socket) {
            Ok(shared) => crate::files::close(&shared),
            Err(e) => {
                let what = format!("the image has something in the way of {}: {e}", socket.display());
                return fail_for(NoStart::Image, what);
            }
        }
    }
    if let Some(Err((why, what))) = config.folders.as_deref().map(check_folders) {
        return fail_for(why, what);
    }
    let _ = std::fs::remove_file(socket);
    let listener = match std::os::unix::net::UnixListener::bind(socket) {
        Ok(listener) => listener,
        Err(e) => return fail(format!("{}: {e}", socket.display())),
    };
    let proxy = match config.proxy_port.map(crate::sys::socket::listen_loopback).transpose() {
        Ok(proxy) => proxy,
        Err(e) => return fail(format!("proxy socket: {e}")),
    };
    let open_dir = |path: &str| {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        rustix::fs::open(path, flags, Mode::empty())
    };
    let upper = match config.disk.as_ref().map(|(path, _)| open_dir(path)).transpose() {
        Ok(upper) => upper,
        Err(e) => return fail(format!("disk: {e}")),
    };
    if config.shared
        && let Err(e) = keep_out_of(socket)
    {
        let why = rustix::io::Errno::from_raw_os_error(e.errno);
        return fail(format!("landlock: {}: {why}", e.step));
    }
    // As many as there may be already: commands keep what the container has.
    let most = rustix::process::getrlimit(rustix::process::Resource::Nproc).maximum.unwrap_or(u64::MAX);
    let most = u32::try_from(most).unwrap_or(u32::MAX);
    run(Config {
        env: config.env,
        lifetime_ms: left(config.lifetime_ms, config.deadline, since_1970()),
        attempt: config.attempt,
        token: Some(config.token),
        processes: config.processes.unwrap_or(most).min(most),
        watch: Watch {
            memory_bytes: config.memory_bytes,
            cpus: config.cpus,
            disk_bytes: config.disk.map(|(_, bytes)| bytes),
        },
        control: None,
        listener: Some(listener.into()),
        proxy,
        spool: None,
        upper,
        oom_events: None,
        freezer: None,
        oom_score,
        landlock: false,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_are_the_ones_that_the_host_looked_at() {
        use std::os::unix::fs::MetadataExt;
        let dir = std::env::temp_dir().join(format!("forkyard-folders-{}", std::process::id()));
        std::fs::create_dir(&dir).unwrap();
        let (list, link) = (dir.join("list"), dir.join("link"));
        std::os::unix::fs::symlink(&list, &link).unwrap();
        let meta = dir.metadata().unwrap();
        let right = MountedFolder { path: dir.display().to_string(), device: meta.dev(), inode: meta.ino() };
        let said = |name: &Path, folders: &[MountedFolder]| {
            std::fs::write(&list, serde_json::to_string(folders).unwrap()).unwrap();
            check_folders(name.to_str().unwrap())
        };
        assert_eq!(said(&list, std::slice::from_ref(&right)), Ok(()));
        let other = MountedFolder { inode: right.inode + 1, ..right.clone() };
        let (why, what) = said(&list, &[right.clone(), other]).unwrap_err();
        assert!(why == NoStart::OtherFolder && what.contains("another folder"), "{what}");
        let closed = MountedFolder { path: format!("{}/none", right.path), ..right.clone() };
        let (why, what) = said(&list, &[right.clone(), closed]).unwrap_err();
        assert!(why == NoStart::UnseenFolder && what.contains("No such file"), "{what}");
        let (why, _) = said(&link, &[right]).unwrap_err();
        assert_eq!(why, NoStart::Other, "a link in the list's place");
        std::fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn a_container_that_is_started_again_has_what_is_left() {
        assert_eq!(left(60_000, Some(100_000), 40_000), 60_000);
        assert_eq!(left(60_000, Some(100_000), 90_000), 10_000);
        assert_eq!(left(60_000, Some(100_000), 10_000), 60_000, "a clock that was set back gives nothing");
        assert_eq!(left(60_000, Some(100_000), 200_000), 1000);
        assert_eq!(left(300, Some(300), 500), 300, "the engine took longer than that");
        assert_eq!(left(60_000, None, 200_000), 60_000, "nobody's yet");
    }
}
