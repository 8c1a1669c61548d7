use clap::Args;
use std::path::PathBuf;

use super::run_options::RunOptions;

/// Run a specification from a file: forks that differ in prompt, model, image or limits.
#[derive(Debug, Clone, Args)]
pub struct RunArgs {
    /// A TOML or YAML file; `-` reads TOML from standard input.
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// Options win over what the file says for all forks.
    #[command(flatten)]
    pub options: RunOptions,
}
