//! Steps of a chore: each is one line with the time that it took; what a quiet step printed is shown only if it fails.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

/// Lines of a failed step's output that are repeated on the terminal; the rest is in its log file.
const TAIL_LINES: usize = 200;

/// The workspace's root.
pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask lies in the workspace")
}

pub fn target_dir() -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), PathBuf::from)
}

/// All that there is to be built and tested, the guest's program too, which the host only embeds. The same wherever all is built,
/// or it would be built twice.
pub const WHOLE: [&str; 3] = ["--workspace", "--features", GUEST_PROGRAM];
pub const GUEST_PROGRAM: &str = "forkyard-guest/program";

/// The cargo that started us, so that a `+toolchain` stays the same all the way down.
pub fn cargo() -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    // What it told us of ourselves is news to the build scripts of others, which would run again.
    let ours = |name: &str| name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_");
    for name in std::env::vars_os().map(|(name, _)| name).filter(|name| name.to_str().is_some_and(ours)) {
        command.env_remove(name);
    }
    command
}

/// Where a step's output goes while it runs.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Output {
    /// Into a log file; shown if the step fails.
    Quiet,
    /// Straight to the terminal.
    Shown,
}

/// A list of steps that goes on after a failure and says at the end what failed.
pub struct Steps {
    failed: Vec<String>,
    started: Instant,
    /// Every step is shown.
    verbose: bool,
}

impl Steps {
    pub fn new(verbose: bool) -> Self {
        Steps { failed: Vec::new(), started: Instant::now(), verbose }
    }

    /// Runs a piece of our own code as a step.
    pub fn call(&mut self, name: &str, work: impl FnOnce() -> Result<()>) -> bool {
        let started = Instant::now();
        let result = work();
        self.end(name, started.elapsed(), result.map_err(|e| format!("{e:#}")))
    }

    /// Runs a command as a step.
    pub fn command(&mut self, name: &str, command: &mut Command, output: Output) -> bool {
        let output = if self.verbose { Output::Shown } else { output };
        let started = Instant::now();
        let result = match output {
            Output::Quiet => quiet(name, command),
            Output::Shown => {
                println!("· {name}: {}", shown(command));
                match command.status() {
                    Ok(status) if status.success() => Ok(()),
                    Ok(status) => Err(status.to_string()),
                    Err(e) => Err(format!("{}: {e}", shown(command))),
                }
            }
        };
        self.end(name, started.elapsed(), result)
    }

    fn end(&mut self, name: &str, took: Duration, result: Result<(), String>) -> bool {
        match result {
            Ok(()) => {
                println!("✓ {name:<24} {}", seconds(took));
                true
            }
            Err(why) => {
                println!("✗ {name:<24} {}\n{}", seconds(took), why.trim_end());
                self.failed.push(name.to_string());
                false
            }
        }
    }

    pub fn finish(self) -> Result<()> {
        let took = seconds(self.started.elapsed());
        if self.failed.is_empty() {
            println!("all passed in {took}");
            return Ok(());
        }
        bail!("failed after {took}: {}", self.failed.join(", "))
    }
}

fn quiet(name: &str, command: &mut Command) -> Result<(), String> {
    let log = log_path(name);
    let mut run = || -> Result<bool> {
        fs::create_dir_all(log.parent().expect("a log lies in a folder"))?;
        let file = File::create(&log)?;
        let status = command
            .stdin(Stdio::null())
            .stdout(file.try_clone()?)
            .stderr(file)
            .status()
            .with_context(|| shown(command))?;
        Ok(status.success())
    };
    match run() {
        Ok(true) => Ok(()),
        Ok(false) => {
            let text = fs::read(&log).map(|b| String::from_utf8_lossy(&b).into_owned()).unwrap_or_default();
            Err(format!("{}\n(all of it: {})", tail(&text), log.display()))
        }
        Err(e) => Err(format!("{e:#}")),
    }
}

fn tail(text: &str) -> String {
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(TAIL_LINES)..].join("\n")
}

fn log_path(name: &str) -> PathBuf {
    let file: String = name.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).collect();
    target_dir().join("xtask").join(format!("{file}.log"))
}

/// A command as one would type it.
pub fn shown(command: &Command) -> String {
    std::iter::once(command.get_program())
        .chain(command.get_args())
        .map(|a| a.to_string_lossy())
        .collect::<Vec<_>>()
        .join(" ")
}

pub fn seconds(d: Duration) -> String {
    let s = d.as_secs_f64();
    if s < 100.0 {
        format!("{s:.1} s")
    } else {
        format!("{} min {:02} s", d.as_secs() / 60, d.as_secs() % 60)
    }
}

/// Whether a program of that name can be found.
pub fn on_path(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    // /usr/sbin is where dockerd and iptables are, and it is missing in an ordinary user's PATH.
    std::env::split_paths(&path)
        .chain(["/usr/sbin".into(), "/sbin".into()])
        .any(|dir| dir.join(program).is_file())
}
