use clap::{Args, CommandFactory};
use clap_complete::Shell;

use crate::cli::Cli;
use crate::error::Result;
use crate::exit::Exit;
use crate::output::Output;

/// Print a completion script for a shell.
///
/// For bash: forkyard completions bash > ~/.local/share/bash-completion/completions/forkyard
#[derive(Debug, Args)]
pub struct CompletionsArgs {
    /// The shell.
    #[arg(value_enum, value_name = "SHELL")]
    pub shell: Shell,
}

impl CompletionsArgs {
    pub fn run(&self, out: &mut Output<'_>) -> Result<Exit> {
        let mut script = Vec::new();
        clap_complete::generate(self.shell, &mut Cli::command(), "forkyard", &mut script);
        out.text(&String::from_utf8_lossy(&script))?;
        Ok(Exit::Success)
    }
}
