//! The dashboard's built files. They are made from `web/` by Node and committed where the server embeds them, so that
//! building Forkyard needs no Node. Versions are pinned and the build is the same every time: a difference means that
//! somebody changed one and not the other.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::steps::{on_path, root, shown};

const BUILT: &str = "crates/forkyard-server/assets/web";
const TYPES: &str = "web/src/api/schema.d.ts";
/// What the build's tools ask for.
const MIN_NODE: u32 = 20;

#[derive(clap::Args)]
pub struct WebArgs {
    /// Fail if what is built differs from what was there.
    #[arg(long)]
    check: bool,
}

pub fn run(args: &WebArgs) -> Result<()> {
    install()?;
    let before = built()?;
    for script in ["types", "check", "build"] {
        npm(&["run", "--silent", script])?;
    }
    let after = built()?;
    let names = before.keys().chain(after.keys()).collect::<std::collections::BTreeSet<_>>();
    let changed: Vec<String> = names
        .into_iter()
        .filter(|n| before.get(*n) != after.get(*n))
        .map(|n| n.display().to_string())
        .collect();
    if args.check && !changed.is_empty() {
        bail!(
            "built files were not those of the sources; commit what `cargo xtask web` made:\n{}",
            changed.join("\n")
        );
    }
    Ok(())
}

/// The API's types, from its description in docs/.
pub fn types() -> Result<()> {
    install()?;
    npm(&["run", "--silent", "types"])
}

/// The check, as a step of the tests.
pub fn check() -> Result<()> {
    run(&WebArgs { check: true })
}

/// The tools of the build and of the browser's tests, as the lock file has them.
pub fn install() -> Result<()> {
    let version = Command::new("node").arg("--version").output().ok().filter(|o| o.status.success());
    let text = version.map(|o| String::from_utf8_lossy(&o.stdout).trim().to_string()).unwrap_or_default();
    let major = text.trim_start_matches('v').split('.').next().and_then(|n| n.parse::<u32>().ok());
    if major.is_none_or(|m| m < MIN_NODE) || !on_path("npm") {
        bail!("the dashboard's tools need Node {MIN_NODE} or newer and npm; found {text:?}");
    }
    let (lock, installed) =
        (root().join("web/package-lock.json"), root().join("web/node_modules/.package-lock.json"));
    let time = |path: &Path| fs::metadata(path).and_then(|m| m.modified());
    if let (Ok(lock), Ok(installed)) = (time(&lock), time(&installed))
        && installed >= lock
    {
        return Ok(());
    }
    npm(&["ci", "--no-audit", "--no-fund", "--ignore-scripts"])
}

fn npm(args: &[&str]) -> Result<()> {
    let mut command = Command::new("npm");
    command.args(args).current_dir(root().join("web")).env("NO_UPDATE_NOTIFIER", "1");
    let out = command.output().with_context(|| shown(&command))?;
    let said = format!("{}{}", String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
    if !out.status.success() {
        bail!("{}\n{}", shown(&command), said.trim());
    }
    for line in said.lines().filter(|l| l.starts_with("first load")) {
        println!("· {line}");
    }
    Ok(())
}

fn built() -> Result<BTreeMap<PathBuf, Vec<u8>>> {
    let mut files = BTreeMap::new();
    let mut folders = vec![root().join(BUILT)];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).with_context(|| folder.display().to_string())? {
            let path = entry?.path();
            if path.is_dir() {
                folders.push(path);
            } else {
                files.insert(path.clone(), fs::read(&path)?);
            }
        }
    }
    let types = root().join(TYPES);
    files.insert(types.clone(), fs::read(&types).unwrap_or_default());
    Ok(files)
}
