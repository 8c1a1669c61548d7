use clap::Args;
use forkyard_core::RunId;
use forkyard_core::run::Command;
use forkyard_engine::Engine;

use crate::cli::Global;
use crate::error::Result;
use crate::exit::Exit;
use crate::follow::{self, engine_error};
use crate::output::Output;
use crate::runs::{leave_to_worker, the_live_run, with_yard};

/// Resume a run that is paused, detached or crashed, and drive it if nobody else does.
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
        with_yard(global, async |yard| {
            the_live_run(yard, &self.run).await?;
            yard.engine.command(&self.run, Command::Resume, None).await.map_err(engine_error)?;
            if self.no_wait {
                leave_to_worker(yard, global, &self.run).await?;
                let text = format!("{0} goes on. Follow it with: forkyard logs -f {0}", self.run);
                out.said("forkyard.command/1", "resume", &self.run, &text)?;
                return Ok(Exit::Success);
            }
            follow::to_the_end(yard, &self.run, out).await
        })
    }
}
