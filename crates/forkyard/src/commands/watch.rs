use std::io::IsTerminal;

use clap::Args;
use forkyard_core::view::RunStatus;
use forkyard_store::RunQuery;

use super::target::Target;
use crate::cli::Global;
use crate::error::{CliError, Result};
use crate::exit::Exit;
use crate::follow::{self, store_error};
use crate::output::Output;
use crate::runs::with_yard;
use crate::watch::watch;
use crate::yard::Yard;

/// Watch a run on the full screen: forks, live feed, diff, messages.
#[derive(Debug, Clone, Args)]
pub struct WatchArgs {
    /// RUN or RUN/N [default: the newest run that is live, else the newest].
    #[arg(value_name = "RUN")]
    pub target: Option<Target>,
}

impl WatchArgs {
    pub fn run(&self, global: &Global, out: &mut Output<'_>) -> Result<Exit> {
        if out.json || !std::io::stdout().is_terminal() || !std::io::stdin().is_terminal() {
            return Err(CliError::usage("watch needs a terminal")
                .hint("`forkyard logs -f RUN` follows a run in a pipe, `forkyard events -f --json RUN` for a program"));
        }
        with_yard(global, async |yard| {
            let target = match &self.target {
                Some(target) => target.clone(),
                None => newest(yard).await?,
            };
            let view = watch(yard, global, &target, out.style.color).await?;
            if view.status == RunStatus::Ended {
                // How the run came out is no failure of watching it.
                follow::close(yard, &view, out).await?;
            } else {
                out.line(&format!("{0} goes on. Come back with: forkyard watch {0}", view.id))?;
            }
            Ok(Exit::Success)
        })
    }
}

async fn newest(yard: &Yard) -> Result<Target> {
    for live in [true, false] {
        let query = RunQuery { live, before: None, limit: 1 };
        if let Some(run) = yard.store.runs(&query).await.map_err(store_error)?.into_iter().next() {
            return Ok(Target { run: run.id, fork: None });
        }
    }
    Err(CliError::usage("there is no run to watch").hint("start one with `forkyard fork --no-wait`"))
}
