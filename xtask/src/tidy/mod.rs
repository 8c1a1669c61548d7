//! The rules that no compiler checks. Each is a pure function over texts, with a test that plants a breach.

mod crates;
mod licenses;
mod modules;
mod purity;
mod source;
mod words;

use std::fmt;
use std::fs;
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::steps::cargo;

/// One breach of a rule.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Finding {
    pub path: String,
    /// From 1; 0 for the file as a whole.
    pub line: usize,
    pub text: String,
}

impl Finding {
    fn new(path: &str, line: usize, text: impl Into<String>) -> Self {
        Finding { path: path.to_string(), line, text: text.into() }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.line {
            0 => write!(f, "{}: {}", self.path, self.text),
            n => write!(f, "{}:{n}: {}", self.path, self.text),
        }
    }
}

/// A text file of the repository.
pub struct Text {
    pub path: String,
    pub text: String,
}

pub fn run() -> Result<()> {
    let texts = texts()?;
    let metadata = metadata()?;
    let deny = fs::read_to_string("deny.toml").context("deny.toml")?;
    let mut findings = Vec::new();
    findings.extend(crates::check(&metadata));
    findings.extend(licenses::check(&metadata, &deny)?);
    findings.extend(modules::check(&metadata, &texts));
    findings.extend(purity::check(&texts));
    findings.extend(words::check(&texts));
    if findings.is_empty() {
        return Ok(());
    }
    findings.sort();
    let list: Vec<String> = findings.iter().map(ToString::to_string).collect();
    bail!("{}\n{} findings", list.join("\n"), list.len())
}

/// What git knows or would add: build output and ignored files are nobody's business.
fn texts() -> Result<Vec<Text>> {
    let out = Command::new("git")
        .args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"])
        .output()?;
    if !out.status.success() {
        bail!("git ls-files: {}", String::from_utf8_lossy(&out.stderr).trim());
    }
    Ok(String::from_utf8_lossy(&out.stdout)
        .split_terminator('\0')
        .filter_map(|path| Some(Text { path: path.to_string(), text: fs::read_to_string(path).ok()? }))
        .collect())
}

fn metadata() -> Result<crates::Metadata> {
    let host = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
    let out = cargo()
        .args(["metadata", "--locked", "--format-version", "1", "--filter-platform", &host])
        .output()?;
    if !out.status.success() {
        bail!("cargo metadata: {}", String::from_utf8_lossy(&out.stderr).trim());
    }
    serde_json::from_slice(&out.stdout).context("cargo metadata")
}
