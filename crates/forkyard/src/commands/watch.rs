use std::io::IsTerminal;

use clap::Args;
use forkyard_core::view::RunStatus;

use super::target::Target;
use crate::cli::Global;
use crate::error::{CliError, Result};
use crate::exit::Exit;
use crate::follow;
use crate::output::Output;
use crate::runs::{the_target, with_place};
use crate::watch::watch;

#[derive(Debug, Clone, Args)]
pub struct WatchArgs {
    /// RUN or RUN/N [default: the run here that is under way, else the newest].
    #[arg(value_name = "RUN")]
    pub target: Option<Target>,
}

impl WatchArgs {
    pub fn run(&self, global: &Global, out: &mut Output<'_>) -> Result<Exit> {
        if out.json || !std::io::stdout().is_terminal() || !std::io::stdin().is_terminal() {
            return Err(CliError::usage("watch needs a terminal")
                .hint("`forkyard logs -f RUN` follows a run in a pipe, `forkyard events -f --json RUN` for a program"));
        }
        with_place(global, async |place| {
            let target = the_target(place, self.target.as_ref()).await?;
            let view = watch(place, global, &target, out.style.color).await?;
            if view.status == RunStatus::Ended {
                // How the run came out is no failure of watching it.
                follow::close(place, &view, out).await?;
            } else {
                out.line(&format!("{0} goes on. Come back with: forkyard watch {0}", view.id))?;
            }
            Ok(Exit::Success)
        })
    }
}
