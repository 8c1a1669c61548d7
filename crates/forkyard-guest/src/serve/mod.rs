//! The guest at work: one event loop for connections and commands, a thread for each question about files.

mod commands;
mod conn;
mod freezer;
mod job;
mod outbox;
mod owners;
mod procs;
mod quiet;
mod running;
mod server;
mod spawn;
mod spool;
mod unlinked;
mod watch;
mod work;

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::process::ExitCode;

use forkyard_guest::zygote::Watch;
use serde::Deserialize;

pub use freezer::Freezer;
pub use outbox::Outbox;
pub use spawn::OomScore;

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
}

/// Pid 1 of a container. Commands run as the same user, so that the guest is closed to them and owners show a token.
pub fn container(socket: &str) -> ExitCode {
    let fail = |what: String| {
        eprintln!("forkyard-guest: {what}");
        ExitCode::FAILURE
    };
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
    let _ = std::fs::remove_file(socket);
    let listener = match std::os::unix::net::UnixListener::bind(socket) {
        Ok(listener) => listener,
        Err(e) => return fail(format!("{socket}: {e}")),
    };
    let proxy = match config.proxy_port.map(crate::sys::socket::listen_loopback).transpose() {
        Ok(proxy) => proxy,
        Err(e) => return fail(format!("proxy socket: {e}")),
    };
    let open_dir = |path: &str| {
        let flags = rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::DIRECTORY | rustix::fs::OFlags::CLOEXEC;
        rustix::fs::open(path, flags, rustix::fs::Mode::empty())
    };
    let upper = match config.disk.as_ref().map(|(path, _)| open_dir(path)).transpose() {
        Ok(upper) => upper,
        Err(e) => return fail(format!("disk: {e}")),
    };
    // As many as there may be already: commands keep what the container has.
    let most = rustix::process::getrlimit(rustix::process::Resource::Nproc).maximum.unwrap_or(u64::MAX);
    let most = u32::try_from(most).unwrap_or(u32::MAX);
    run(Config {
        env: config.env,
        lifetime_ms: config.lifetime_ms,
        attempt: config.attempt,
        token: Some(config.token),
        processes: config.processes.unwrap_or(most).min(most),
        watch: Watch { disk_bytes: config.disk.map(|(_, bytes)| bytes), ..Default::default() },
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
