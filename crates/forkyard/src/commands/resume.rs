use clap::Args;
use forkyard_core::RunId;
use forkyard_core::run::Command;

use crate::cli::Global;
use crate::error::Result;
use crate::exit::Exit;
use crate::follow;
use crate::output::Output;
use crate::runs::{leave_to_worker, the_live_run, with_place_flags};
use crate::temporal;

#[derive(Debug, Clone, Args)]
pub struct ResumeArgs {
    /// The run.
    #[arg(value_name = "RUN")]
    pub run: RunId,
    /// Do not wait for its end.
    #[arg(long)]
    pub no_wait: bool,
}

impl ResumeArgs {
    pub fn run(&self, global: &Global, out: &mut Output<'_>) -> Result<Exit> {
        with_place_flags(global, global.flags()?, async |place| {
            let view = the_live_run(place, &self.run).await?;
            place.command(&self.run, Command::Resume).await?;
            if let Some(notice) = temporal::waits_for(place, &view).await? {
                out.stored("resume", &self.run, &notice)?;
                return Ok(Exit::Success);
            }
            if self.no_wait {
                leave_to_worker(place, global, &self.run).await?;
                let text = format!("{0} goes on. Follow it with: forkyard logs -f {0}", self.run);
                out.said("forkyard.command/1", "resume", &self.run, &text)?;
                return Ok(Exit::Success);
            }
            follow::to_the_end(place, &self.run, out).await
        })
    }
}
