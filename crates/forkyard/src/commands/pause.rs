use clap::Args;
use forkyard_core::RunId;
use forkyard_core::run::Command;
use forkyard_core::view::EngineKind;

use crate::cli::Global;
use crate::error::Result;
use crate::exit::Exit;
use crate::follow::engine_error;
use crate::output::Output;
use crate::runs::{has_worker, the_live_run, with_place};
use crate::temporal;

#[derive(Debug, Clone, Args)]
pub struct PauseArgs {
    /// The run.
    #[arg(value_name = "RUN")]
    pub run: RunId,
}

impl PauseArgs {
    pub fn run(&self, global: &Global, out: &mut Output<'_>) -> Result<Exit> {
        let run = &self.run;
        let (driven, notice) = with_place(global, async |place| {
            let view = the_live_run(place, run).await?;
            place.command(run, Command::Pause).await?;
            let Some(yard) = place.here() else { return Ok((true, None)) };
            if view.engine == EngineKind::Temporal {
                return Ok((true, temporal::waits_for(place, &view).await?));
            }
            let driven = yard.engine.is_driven(run).await.map_err(engine_error)? || has_worker(yard).await?;
            Ok((driven, None))
        })?;
        if let Some(notice) = notice {
            out.stored("pause", run, &notice)?;
            return Ok(Exit::Success);
        }
        let text = if driven {
            format!("Pausing {run}: requests that are under way end first. Go on with: forkyard resume {run}")
        } else {
            format!("Nobody drives {run}, so nothing of it is under way. Go on with: forkyard resume {run}")
        };
        out.said("forkyard.command/1", "pause", run, &text)?;
        Ok(Exit::Success)
    }
}
