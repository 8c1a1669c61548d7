//! A real Temporal service: the development server in a temporary folder, on free ports of loopback, with its database on disk.
//! It ends with the test process however that ends.

use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::{Mutex, mpsc};
use std::time::{Duration, Instant};

/// For the slowest machine.
const PATIENCE: Duration = Duration::from_secs(60);

pub struct Temporal {
    program: PathBuf,
    folder: PathBuf,
    port: u16,
    /// Where it is reached from elsewhere.
    relay: Option<SocketAddr>,
    ui_port: Option<u16>,
    server: Mutex<Option<Server>>,
}

struct Server {
    pid: i32,
    /// Closed when the server has ended and was reaped.
    ended: mpsc::Receiver<()>,
}

/// Put there by `cargo xtask setup`, beside what cargo builds.
pub fn program() -> Option<PathBuf> {
    let me = std::env::current_exe().ok()?;
    me.ancestors().map(|dir| dir.join("tools/temporal/bin/temporal")).find(|p| p.is_file())
}

fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    listener.local_addr().expect("it is bound").port()
}

/// Takes connections at a free port of the address and carries their bytes to and from the server, as long as the process lives.
fn relay(ip: Ipv4Addr, port: u16) -> SocketAddr {
    let listener = TcpListener::bind((ip, 0)).expect("an address of this machine");
    let address = listener.local_addr().expect("it is bound");
    std::thread::spawn(move || {
        for client in listener.incoming().flatten() {
            let Ok(server) = TcpStream::connect(("127.0.0.1", port)) else { continue };
            let halves = [(client.try_clone(), server.try_clone()), (Ok(server), Ok(client))];
            for (from, to) in halves {
                let (Ok(mut from), Ok(mut to)) = (from, to) else { continue };
                std::thread::spawn(move || {
                    let _ = std::io::copy(&mut from, &mut to);
                    let _ = to.shutdown(std::net::Shutdown::Both);
                });
            }
        }
    });
    address
}

impl Temporal {
    /// None, where the program is missing and need not be there.
    pub fn start() -> Option<Temporal> {
        Temporal::start_with(None, None)
    }

    /// Reached at another address than loopback's, by a relay: the server's own parts find each other on loopback alone.
    pub fn start_at(ip: Ipv4Addr) -> Option<Temporal> {
        Temporal::start_with(Some(ip), None)
    }

    /// With its web pages.
    pub fn start_with_ui() -> Option<Temporal> {
        Temporal::start_with(None, Some(free_port()))
    }

    fn start_with(ip: Option<Ipv4Addr>, ui_port: Option<u16>) -> Option<Temporal> {
        let Some(program) = program() else {
            assert!(
                std::env::var_os("FORKYARD_TEST_REQUIRE").is_none(),
                "temporal is missing: cargo xtask setup"
            );
            return None;
        };
        let folder =
            tempfile::Builder::new().prefix("forkyard-temporal-").tempdir().expect("a temporary folder");
        let path = folder.path().to_path_buf();
        crate::keep_until_exit(folder);
        let port = free_port();
        let relay = ip.map(|ip| relay(ip, port));
        let temporal = Temporal { program, folder: path, port, relay, ui_port, server: Mutex::new(None) };
        temporal.restart();
        Some(temporal)
    }

    /// `host:port` of the service.
    pub fn address(&self) -> String {
        self.relay.map_or_else(|| format!("127.0.0.1:{}", self.port), |relay| relay.to_string())
    }

    pub fn ui(&self) -> Option<String> {
        self.ui_port.map(|p| format!("http://127.0.0.1:{p}"))
    }

    /// Ends the server as a crash does.
    pub fn kill(&self) {
        let server = self.server.lock().expect("no test panics in here").take();
        if let Some(server) = server {
            // SAFETY: a plain system call; the pid is that of a server that we started and have not reaped.
            unsafe { libc::kill(server.pid, libc::SIGKILL) };
            // An error says that the other end is closed: what we wait for.
            let _ = server.ended.recv_timeout(PATIENCE);
        }
    }

    /// Starts the server again with the database that it had, and waits until it answers.
    pub fn restart(&self) {
        self.kill();
        let log = self.folder.join("log");
        let mut command = Command::new(&self.program);
        command
            .args(["server", "start-dev", "--log-level", "error", "--port", &self.port.to_string()])
            .arg("--db-filename")
            .arg(self.folder.join("temporal.db"))
            // It keeps settings of its users there.
            .env("HOME", &self.folder)
            .stdin(Stdio::null())
            .stdout(std::fs::File::create(&log).expect("a log file"))
            .stderr(std::fs::File::create(self.folder.join("errors")).expect("a log file"));
        match self.ui_port {
            Some(port) => command.args(["--ui-port", &port.to_string()]),
            None => command.arg("--headless"),
        };
        // SAFETY: prctl is a plain system call; nothing is allocated between fork and exec.
        unsafe {
            command.pre_exec(|| match libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) {
                0 => Ok(()),
                _ => Err(std::io::Error::last_os_error()),
            });
        }
        let (started, pid) = mpsc::channel();
        let (end, ended) = mpsc::channel::<()>();
        // The signal comes when the thread that started the server ends: this one waits for the server.
        std::thread::spawn(move || {
            let mut child = command.spawn().expect("temporal starts");
            started.send(child.id() as i32).expect("the test waits for it");
            let _ = child.wait();
            drop(end);
        });
        let pid = pid.recv().expect("the thread tells");
        *self.server.lock().expect("no test panics in here") = Some(Server { pid, ended });
        let begun = Instant::now();
        while !self.answers() {
            let said = std::fs::read_to_string(self.folder.join("errors")).unwrap_or_default();
            assert!(begun.elapsed() < PATIENCE, "Temporal does not start:\n{said}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    fn answers(&self) -> bool {
        // The namespace is there last.
        self.cli(&["operator", "namespace", "describe", "default"]).is_ok()
    }

    /// The service's own command line, against this server.
    pub fn cli(&self, args: &[&str]) -> Result<String, String> {
        let output = Command::new(&self.program)
            .args(args)
            .args(["--address", &self.address()])
            .env("HOME", &self.folder)
            .stdin(Stdio::null())
            .output()
            .map_err(|e| e.to_string())?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        if output.status.success() { Ok(text(&output.stdout)) } else { Err(text(&output.stderr)) }
    }
}

impl Drop for Temporal {
    fn drop(&mut self) {
        self.kill();
    }
}
