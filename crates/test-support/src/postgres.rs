//! A real PostgreSQL server in a temporary folder, from the machine's package, on a Unix socket or at an address. It runs as an unprivileged
//! user, since PostgreSQL refuses root, and ends with the test process however that ends.

use std::net::{Ipv4Addr, TcpListener};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, OnceLock, mpsc};
use std::time::{Duration, Instant};

use crate::at_exit;

/// `nobody`: it has a name everywhere, and owns nothing.
const UNPRIVILEGED: u32 = 65534;
/// For the slowest machine.
const PATIENCE: Duration = Duration::from_secs(60);

pub struct Postgres {
    folder: PathBuf,
    server: Mutex<Option<Server>>,
    databases: AtomicU32,
    arguments: Vec<String>,
    /// Where it listens besides its socket.
    address: Option<(Ipv4Addr, u16)>,
}

struct Server {
    pid: i32,
    /// Closed when the server has ended and was reaped.
    ended: mpsc::Receiver<()>,
}

impl Postgres {
    /// The one instance of this test process.
    pub fn shared() -> &'static Postgres {
        static SHARED: OnceLock<Postgres> = OnceLock::new();
        SHARED.get_or_init(Postgres::start)
    }

    /// An instance of one's own, to be killed and restarted.
    pub fn start() -> Postgres {
        Postgres::start_with(&[])
    }

    /// With arguments of one's own for the server.
    pub fn start_with(arguments: &[&str]) -> Postgres {
        Postgres::start_listening(arguments, None)
    }

    /// An instance that others of this address's network (of 256) reach too.
    pub fn start_at(address: Ipv4Addr) -> Postgres {
        let listener = TcpListener::bind((address, 0)).expect("an address of this machine");
        let port = listener.local_addr().expect("it is bound").port();
        drop(listener);
        Postgres::start_listening(&[], Some((address, port)))
    }

    fn start_listening(arguments: &[&str], address: Option<(Ipv4Addr, u16)>) -> Postgres {
        let folder = tempfile::Builder::new().prefix("forkyard-pg-").tempdir().expect("a temporary folder");
        let path = folder.path().to_path_buf();
        if is_root() {
            std::os::unix::fs::chown(&path, Some(UNPRIVILEGED), Some(UNPRIVILEGED)).expect("chown");
        }
        let postgres = Postgres {
            folder: path.clone(),
            server: Mutex::new(None),
            databases: AtomicU32::new(0),
            arguments: arguments.iter().map(ToString::to_string).collect(),
            address,
        };
        let data = path.join("data");
        run(tool("initdb").arg("-D").arg(&data).args([
            "--auth=trust",
            "--no-sync",
            "--locale=C",
            "--encoding=UTF8",
            "-U",
            "forkyard",
        ]));
        if let Some((address, _)) = address {
            let [a, b, c, _] = address.octets();
            let rules = format!("local all all trust\nhost all all {a}.{b}.{c}.0/24 trust\n");
            std::fs::write(data.join("pg_hba.conf"), rules).expect("its folder");
        }
        postgres.restart();
        at_exit(move || drop(folder));
        let pid_file = data.join("postmaster.pid");
        at_exit(move || {
            // Whichever process serves this folder now.
            let pid = std::fs::read_to_string(&pid_file).ok().and_then(|t| t.lines().next()?.parse().ok());
            if let Some(pid) = pid {
                signal(pid, libc::SIGQUIT);
                let started = Instant::now();
                while pid_file.exists() && started.elapsed() < Duration::from_secs(5) {
                    std::thread::sleep(Duration::from_millis(5));
                }
            }
        });
        postgres
    }

    /// The URL of a new, empty database.
    pub fn database(&self) -> String {
        let name = format!("t{}", self.databases.fetch_add(1, Ordering::Relaxed));
        run(self.reaching("createdb").args(["-U", "forkyard", &name]));
        match self.address {
            Some((address, port)) => format!("postgres://forkyard@{address}:{port}/{name}"),
            None => format!("postgres://forkyard@localhost/{name}?host={}", self.folder.display()),
        }
    }

    /// A tool that finds the server's socket.
    fn reaching(&self, name: &str) -> Command {
        let mut command = tool(name);
        command.arg("-h").arg(&self.folder);
        if let Some((_, port)) = self.address {
            command.args(["-p", &port.to_string()]);
        }
        command
    }

    /// Ends the server as a crash does: no checkpoint, connections cut.
    pub fn kill(&self) {
        let server = self.server.lock().expect("no test panics in here").take();
        if let Some(server) = server {
            signal(server.pid, libc::SIGQUIT);
            // An error says that the other end is closed: what we wait for.
            let _ = server.ended.recv_timeout(PATIENCE);
        }
    }

    /// Stops the server and all that it has started where they are (SIGSTOP), until the answer is dropped.
    pub fn stand_still(&self) -> StandsStill {
        let server = self.server.lock().expect("no test panics in here");
        let server = server.as_ref().expect("it runs").pid;
        // The first starts the others, so it comes first.
        let mut stopped = StandsStill(vec![server]);
        signal(server, libc::SIGSTOP);
        let children = std::fs::read_to_string(format!("/proc/{server}/task/{server}/children"));
        for pid in children.expect("its processes").split_whitespace().flat_map(str::parse) {
            stopped.0.push(pid);
            signal(pid, libc::SIGSTOP);
        }
        stopped
    }

    /// Starts the server again and waits until it answers.
    pub fn restart(&self) {
        self.kill();
        let mut command = tool("postgres");
        command
            .arg("-D")
            .arg(self.folder.join("data"))
            .arg("-k")
            .arg(&self.folder)
            // What is tested here are crashes of processes; those of the machine are PostgreSQL's own.
            .args([
                "-c",
                "listen_addresses=",
                "-c",
                "fsync=off",
                "-c",
                "shared_buffers=32MB",
                "-c",
                "max_connections=200",
            ])
            .args(&self.arguments)
            .stdout(Stdio::null())
            .stderr(std::fs::File::create(self.folder.join("log")).expect("a log file"));
        if let Some((address, port)) = self.address {
            command.args(["-c", &format!("listen_addresses={address}"), "-c", &format!("port={port}")]);
        }
        // SAFETY: prctl is a plain system call; nothing is allocated between fork and exec.
        unsafe {
            command.pre_exec(|| match libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGQUIT) {
                0 => Ok(()),
                _ => Err(std::io::Error::last_os_error()),
            });
        }
        let (started, pid) = mpsc::channel();
        let (end, ended) = mpsc::channel::<()>();
        // The signal comes when the thread that started the server ends: this one waits for the server.
        std::thread::spawn(move || {
            let mut child = command.spawn().expect("postgres starts");
            started.send(child.id() as i32).expect("the test waits for it");
            let _ = child.wait();
            drop(end);
        });
        let pid = pid.recv().expect("the thread tells");
        *self.server.lock().expect("no test panics in here") = Some(Server { pid, ended });
        let begun = Instant::now();
        while !self.reaching("pg_isready").arg("-q").status().expect("pg_isready").success() {
            let log = std::fs::read_to_string(self.folder.join("log")).unwrap_or_default();
            assert!(begun.elapsed() < PATIENCE, "PostgreSQL does not start:\n{log}");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// Goes on when dropped.
pub struct StandsStill(Vec<i32>);

impl Drop for StandsStill {
    fn drop(&mut self) {
        for pid in &self.0 {
            signal(*pid, libc::SIGCONT);
        }
    }
}

fn is_root() -> bool {
    // SAFETY: has no arguments and can't fail.
    unsafe { libc::geteuid() == 0 }
}

fn signal(pid: i32, signal: i32) {
    // SAFETY: a plain system call; the pid is that of a server that we started.
    unsafe { libc::kill(pid, signal) };
}

/// Where Debian puts the programs that are not on the path; the newest version.
fn bin() -> &'static Path {
    static BIN: OnceLock<PathBuf> = OnceLock::new();
    BIN.get_or_init(|| {
        let mut found: Vec<(u32, PathBuf)> = std::fs::read_dir("/usr/lib/postgresql")
            .into_iter()
            .flatten()
            .flatten()
            .filter_map(|e| Some((e.file_name().to_str()?.parse().ok()?, e.path().join("bin"))))
            .filter(|(_, bin)| bin.join("postgres").exists())
            .collect();
        found.sort();
        found.pop().expect("PostgreSQL is installed (package postgresql)").1
    })
}

fn tool(name: &str) -> Command {
    let mut command = Command::new(bin().join(name));
    // The folder that the tests run in may be closed to the other user.
    command.current_dir("/").stdin(Stdio::null());
    if is_root() {
        command.uid(UNPRIVILEGED).gid(UNPRIVILEGED);
    }
    command
}

fn run(command: &mut Command) {
    let output = command.output().expect("the program starts");
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
}
