//! Generated documents. The texts come from the code that they describe (settings, clap); the crate's own test compares
//! them with the files, and writes them instead when it is told to.

use anyhow::{Result, bail};

use crate::steps::cargo;
use crate::web;

/// The test of the `forkyard` crate that compares; this variable makes it write.
const TEST: &str = "docs::";
const UPDATE: &str = "FORKYARD_UPDATE_DOCS";

pub fn run(check: bool) -> Result<()> {
    let mut command = cargo();
    command.args(["test", "--quiet", "-p", "forkyard", "--test", "it", "--", TEST]);
    if !check {
        command.env(UPDATE, "1");
    }
    if command.status()?.success() {
        if !check && let Err(e) = web::types() {
            println!("· the dashboard's types were not made anew: {e:#}");
        }
        return Ok(());
    }
    if check {
        bail!("generated documents are out of date: run `cargo xtask codegen` and commit what it writes");
    }
    bail!("the documents could not be generated")
}
