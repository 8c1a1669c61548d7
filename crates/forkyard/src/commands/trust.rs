use std::path::PathBuf;

use clap::Args;
use serde_json::json;

use crate::cli::Global;
use crate::error::{CliError, Result};
use crate::exit::Exit;
use crate::output::Output;
use crate::render::{plain, plain_block};
use crate::settings::{Origin, PROJECT_FILE, Trust, environment, find_project_file, home, read_file};

#[derive(Debug, Args)]
pub struct TrustArgs {
    /// The file; by default that of the repository around the current folder.
    #[arg(value_name = "FILE")]
    pub file: Option<PathBuf>,
    /// Do not trust it any more.
    #[arg(long)]
    pub revoke: bool,
}

impl TrustArgs {
    pub fn run(&self, _global: &Global, out: &mut Output<'_>) -> Result<Exit> {
        let home = home(&environment())?;
        let path = match &self.file {
            Some(file) => file.clone(),
            None => find_project_file(&std::env::current_dir()?).ok_or_else(|| {
                CliError::usage(format!("there is no {PROJECT_FILE} here"))
                    .hint("name the file, or go to the repository that has it")
            })?,
        };
        let shown = path.display().to_string();
        let file = read_file(&path, |line| Origin::Project { path: shown.clone(), line })?
            .ok_or_else(|| CliError::usage(format!("there is no file {shown}")))?;
        let trust = Trust::new(&home);
        let was = trust.is_trusted(&file.text)?;
        if self.revoke {
            trust.remove(&file.text)?;
        } else {
            let absolute = std::path::absolute(&path)?;
            trust.add(&file.text, &absolute.display().to_string())?;
        }
        let sum = Trust::sum(&file.text);
        if out.json {
            out.json(&json!({ "schema": "forkyard.trust/1", "file": shown, "sha256": sum, "trusted": !self.revoke, "was_trusted": was }))?;
            return Ok(Exit::Success);
        }
        let shown = plain(&shown);
        match (self.revoke, was) {
            (true, true) => out.line(&format!("{shown} is not trusted any more."))?,
            (true, false) => out.line(&format!("{shown} was not trusted."))?,
            (false, true) => out.line(&format!("{shown} is trusted already ({}).", &sum[..12]))?,
            (false, false) => {
                // What is trusted is shown: nobody should have to believe the name.
                out.text(&plain_block(&file.text))?;
                out.line(&format!("\n{shown} is trusted with this content ({}).", &sum[..12]))?;
            }
        }
        Ok(Exit::Success)
    }
}
