//! A user's machine: Debian's own kernel with cgroup v2 under software emulation, in which the suites of the local provider
//! run as root and as an ordinary user, with and without delegated cgroups.

mod cpio;
mod image;
mod kernel;

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::setup::{self, Package, Probe};
use crate::steps::{WHOLE, cargo, on_path, seconds, target_dir};

/// Only this step needs them, and the first is large.
const PACKAGES: &[Package] = &[
    Package { name: "qemu-system-x86", probe: Probe::Program(QEMU), why: "a machine with another kernel" },
    Package { name: "e2fsprogs", probe: Probe::Program("mke2fs"), why: "its disk" },
    Package { name: "binutils", probe: Probe::Program("strip"), why: "a small copy of the tests for it" },
];
/// Whose suites these are.
pub const CRATE: &str = "forkyard-sandbox";
const QEMU: &str = "qemu-system-x86_64";
const MEMORY_MIB: u32 = 2048;
/// Sparse: what is not written takes no room.
const DISK: &str = "6G";
/// What the machine says to us; the rest of its console is shown only when something fails.
const MARK: &str = "vm: ";
/// Lines of the console before a failure that is not a test's.
const TAIL_LINES: usize = 40;

#[derive(clap::Args)]
pub struct VmArgs {
    /// As whom the suites run; may be given several times. All of them if none is given.
    #[arg(long = "as", value_enum, value_name = "MODE")]
    modes: Vec<Mode>,
    /// How much of the suites is run: what fits some minutes, or every test. Counts are those of CI: the processor is emulated.
    #[arg(long, value_enum, default_value = "full")]
    scale: Scale,
    /// Only tests whose path matches this extended regular expression.
    #[arg(long, value_name = "REGEX")]
    only: Option<String>,
    /// Build all of the workspace, as `cargo xtask test` does, so that nothing is built twice.
    #[arg(long)]
    workspace: bool,
    /// Show the whole console.
    #[arg(short, long)]
    verbose: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Mode {
    Root,
    User,
    Delegated,
    /// Memory and processes are delegated, the processor is not.
    Partly,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Scale {
    Ci,
    Full,
}

impl Scale {
    fn name(self) -> &'static str {
        match self {
            Scale::Ci => "ci",
            Scale::Full => "full",
        }
    }
}

impl Mode {
    fn name(self) -> &'static str {
        match self {
            Mode::Root => "root",
            Mode::User => "user",
            Mode::Delegated => "delegated",
            Mode::Partly => "partly",
        }
    }

    /// Which tests run, by their paths. What fits some minutes: all that the machine itself decides, and the suites where they
    /// differ most from those that ran outside of it.
    fn tests(self, scale: Scale) -> &'static str {
        match (scale, self) {
            (_, Mode::Partly) => "machine::",
            (Scale::Full, _) => "^(local|machine)",
            (Scale::Ci, Mode::User) => "machine::|conformance_here|attacks_here",
            (Scale::Ci, Mode::Root | Mode::Delegated) => "machine::|attacks_here",
        }
    }
}

/// What one boot runs.
struct Plan {
    /// As whom, and which tests.
    modes: Vec<(&'static str, String)>,
    scale: Scale,
    /// For each test, and for all of it.
    limit: Duration,
    deadline: Duration,
    verbose: bool,
}

impl Plan {
    fn new(args: &VmArgs) -> Plan {
        let tests = |mode: &Mode| args.only.clone().unwrap_or_else(|| mode.tests(args.scale).into());
        let all = [Mode::Root, Mode::User, Mode::Delegated, Mode::Partly];
        let modes = if args.modes.is_empty() { &all[..] } else { &args.modes };
        let minutes = match args.scale {
            Scale::Ci => 20,
            Scale::Full => 90,
        };
        Plan {
            modes: modes.iter().map(|mode| (mode.name(), tests(mode))).collect(),
            scale: args.scale,
            limit: Duration::from_secs(60 * minutes / 2),
            deadline: Duration::from_secs(60 * minutes),
            verbose: args.verbose,
        }
    }

    fn command_line(&self) -> String {
        let names: Vec<&str> = self.modes.iter().map(|(name, _)| *name).collect();
        let only: String =
            self.modes.iter().map(|(name, tests)| format!(" forkyard.only.{name}={tests}")).collect();
        format!(
            "console=ttyS0 quiet loglevel=2 panic=-1 forkyard.modes={} forkyard.limit={} forkyard.scale={}{only}",
            names.join(","),
            self.limit.as_secs(),
            self.scale.name(),
        )
    }
}

pub fn run(args: &VmArgs) -> Result<()> {
    setup::install(PACKAGES)?;
    boot_with(&Plan::new(args), if args.workspace { Scope::Workspace } else { Scope::Crate })
}

/// What is built together: as the tests before were, so that nothing is built twice.
#[derive(Clone, Copy)]
pub enum Scope {
    Workspace,
    Crate,
}

/// As a part of all tests: what fits some minutes.
pub fn in_ci(scope: Scope, verbose: bool) -> Result<()> {
    setup::install(PACKAGES)?;
    let args = VmArgs { modes: Vec::new(), scale: Scale::Ci, only: None, workspace: true, verbose };
    boot_with(&Plan::new(&args), scope)
}

fn boot_with(plan: &Plan, scope: Scope) -> Result<()> {
    if std::env::consts::ARCH != "x86_64" {
        bail!("the machine is an x86-64 one, and runs the tests that were built here: use such a machine");
    }
    if !on_path(QEMU) {
        bail!("there is no {QEMU}: install Debian's qemu-system-x86");
    }
    let dir = target_dir().join("vm");
    fs::create_dir_all(&dir)?;
    // Two machines would have one disk.
    let lock = fs::File::create(dir.join("lock"))?;
    lock.lock().context("lock of the machine")?;
    let kernel = kernel::find(&dir.join("kernel"))?;
    let mut programs = Vec::new();
    for (name, built) in test_programs(scope)? {
        programs.push(stripped(&built, &dir.join(format!("{name}_tests")))?);
    }
    let (archive, disk) = (dir.join("initramfs"), dir.join("disk"));
    image::make(&kernel, &programs, &dir, &archive)?;
    make_disk(&disk)?;
    let result = boot(plan, &kernel, &archive, &disk);
    let _ = fs::remove_file(&disk);
    result
}

/// The crate's tests of its parts and of the whole, built if they are not.
fn test_programs(scope: Scope) -> Result<Vec<(&'static str, PathBuf)>> {
    #[derive(serde::Deserialize)]
    struct Message {
        target: Option<Target>,
        manifest_path: Option<String>,
        executable: Option<PathBuf>,
    }
    #[derive(serde::Deserialize)]
    struct Target {
        name: String,
    }
    let scope: &[&str] = match scope {
        Scope::Workspace => &WHOLE,
        Scope::Crate => &["-p", CRATE, "--lib", "--test", "it"],
    };
    let built = cargo()
        .args(["test", "--locked", "--no-run", "--message-format=json-render-diagnostics"])
        .args(scope)
        .stderr(Stdio::inherit())
        .output()?;
    if !built.status.success() {
        bail!("the tests do not build");
    }
    let ours = |message: &Message| {
        message.manifest_path.as_ref().is_some_and(|path| path.ends_with(&format!("/{CRATE}/Cargo.toml")))
    };
    let messages: Vec<Message> = String::from_utf8_lossy(&built.stdout)
        .lines()
        .filter_map(|line| serde_json::from_str(line).ok())
        .filter(ours)
        .collect();
    let find = |name: &str| {
        let named = messages.iter().filter(|message| message.target.as_ref().is_some_and(|t| t.name == name));
        named.filter_map(|message| message.executable.clone()).next()
    };
    ["forkyard_sandbox", "it"]
        .into_iter()
        .map(|name| Ok((name, find(name).with_context(|| format!("cargo did not say where {name} is"))?)))
        .collect()
}

fn stripped(program: &Path, to: &Path) -> Result<PathBuf> {
    let status = Command::new("strip").arg("-o").arg(to).arg(program).status().context("strip")?;
    if !status.success() {
        bail!("strip {} failed", program.display());
    }
    Ok(to.into())
}

fn make_disk(disk: &Path) -> Result<()> {
    let _ = fs::remove_file(disk);
    let path = std::env::var_os("PATH").unwrap_or_default();
    let path =
        std::env::join_paths(std::env::split_paths(&path).chain(["/usr/sbin".into(), "/sbin".into()]))?;
    let made = Command::new("mke2fs")
        .args(["-q", "-F", "-t", "ext4", "-O", "quota,project", "-E", "nodiscard"])
        .arg(disk)
        .arg(DISK)
        .env("PATH", path)
        .output()
        .context("mke2fs")?;
    if !made.status.success() {
        bail!("mke2fs: {}", String::from_utf8_lossy(&made.stderr).trim());
    }
    Ok(())
}

/// Runs the machine until it says how it ended.
fn boot(plan: &Plan, kernel: &kernel::Kernel, archive: &Path, disk: &Path) -> Result<()> {
    let mut machine = Command::new(QEMU);
    machine
        .args(["-accel", "tcg,thread=multi", "-nographic", "-no-reboot", "-nic", "none", "-smp", "2"])
        .args(["-m", &MEMORY_MIB.to_string()])
        .arg("-kernel")
        .arg(&kernel.image)
        .arg("-initrd")
        .arg(archive)
        .args(["-append", &plan.command_line()])
        .args(["-drive", &format!("file={},format=raw,if=virtio,cache=unsafe", disk.display())]);
    println!("· {} {}", kernel.release, crate::steps::shown(&machine));
    let started = Instant::now();
    let mut child =
        machine.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::inherit()).spawn().context(QEMU)?;
    let console = child.stdout.take().expect("stdout is piped");
    let (lines, received) = mpsc::channel();
    let reader = std::thread::spawn(move || {
        for line in BufReader::new(console).split(b'\n').map_while(|line| line.ok()) {
            if lines.send(String::from_utf8_lossy(&line).trim_end().to_string()).is_err() {
                break;
            }
        }
    });
    let outcome = follow(plan, &received, started);
    let _ = child.kill();
    let _ = child.wait();
    drop(received);
    let _ = reader.join();
    println!("· the machine ran for {}", seconds(started.elapsed()));
    outcome
}

fn follow(plan: &Plan, lines: &mpsc::Receiver<String>, started: Instant) -> Result<()> {
    let (mut failed, mut console) = (Vec::new(), Vec::new());
    let mut showing = false;
    let why = loop {
        let left = plan.deadline.saturating_sub(started.elapsed());
        let line = match lines.recv_timeout(left) {
            Ok(line) => line,
            Err(mpsc::RecvTimeoutError::Timeout) => {
                break format!("nothing ended it within {}", seconds(plan.deadline));
            }
            Err(mpsc::RecvTimeoutError::Disconnected) => break "the machine ended early".to_string(),
        };
        // The firmware's own output may stand before the first line.
        let said = line.find(MARK).map(|at| &line[at + MARK.len()..]);
        match said {
            Some(said) => {
                println!("  {said}");
                showing = said.starts_with("FAILED ");
                failed.extend(said.strip_prefix("FAILED ").map(String::from));
                if let Some(end) = said.strip_prefix("end ") {
                    return judge(end, &failed);
                }
            }
            None if showing || plan.verbose => println!("    {line}"),
            None => {}
        }
        console.push(line);
    };
    let tail = &console[console.len().saturating_sub(TAIL_LINES)..];
    bail!("{why}\n{}", tail.join("\n"))
}

/// `end`: what the machine counted.
fn judge(end: &str, failed: &[String]) -> Result<()> {
    if !failed.is_empty() {
        bail!("{end}\n{}", failed.join("\n"));
    }
    // A filter that fits nothing must not look like success.
    if end.starts_with("0 passed") || !end.contains(" 0 failed") {
        bail!("{end}");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan() -> Plan {
        Plan::new(&VmArgs {
            modes: vec![Mode::User],
            scale: Scale::Ci,
            only: None,
            workspace: false,
            verbose: false,
        })
    }

    fn end(lines: &[&str]) -> Result<()> {
        let (send, receive) = mpsc::channel();
        for line in lines {
            send.send(line.to_string()).unwrap();
        }
        drop(send);
        follow(&plan(), &receive, Instant::now())
    }

    #[test]
    fn only_a_machine_that_says_so_has_passed() {
        assert!(
            end(&["c\u{1b}[?7lvm: up 6.1", "vm: ok user local::a 1.0 s", "vm: end 1 passed, 0 failed, 9 s"])
                .is_ok()
        );
        assert!(end(&["vm: up 6.1", "vm: ok user local::a 1.0 s"]).is_err(), "it ended early");
        assert!(end(&["vm: end 0 passed, 0 failed, 9 s"]).is_err(), "nothing ran");
        let failed =
            end(&["vm: FAILED user local::b 1.0 s, exit status 101", "vm: end 1 passed, 1 failed, 9 s"]);
        assert!(failed.unwrap_err().to_string().contains("local::b"));
    }

    #[test]
    fn the_command_line_carries_the_plan() {
        let line = plan().command_line();
        for word in [
            "forkyard.modes=user",
            "forkyard.only.user=machine::|conformance_here|attacks_here",
            "forkyard.limit=600",
            "forkyard.scale=ci",
        ] {
            assert!(line.split(' ').any(|w| w == word), "{word} in {line}");
        }
    }
}
