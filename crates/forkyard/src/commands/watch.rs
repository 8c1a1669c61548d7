use std::io::IsTerminal;

use clap::Args;
use forkyard_core::view::RunStatus;
use forkyard_store::RunQuery;

use super::target::Target;
use crate::cli::Global;
use crate::error::{CliError, Result};
use crate::exit::Exit;
use crate::follow;
use crate::output::Output;
use crate::place::Place;
use crate::runs::with_place;
use crate::watch::watch;

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
        with_place(global, async |place| {
            let target = match &self.target {
                Some(target) => target.clone(),
                None => newest(place).await?,
            };
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

async fn newest(place: &dyn Place) -> Result<Target> {
    for live in [true, false] {
        let query = RunQuery { live, limit: 1, ..RunQuery::default() };
        if let Some(run) = place.runs(&query).await?.into_iter().next() {
            return Ok(Target { run: run.id, fork: None });
        }
    }
    Err(CliError::usage("there is no run to watch").hint("start one with `forkyard fork --no-wait`"))
}
