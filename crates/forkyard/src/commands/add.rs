use clap::Args;
use forkyard_core::RunId;
use forkyard_core::run::Command;
use forkyard_engine::{Engine, log};

use crate::cli::Global;
use crate::error::{CliError, Result};
use crate::exit::Exit;
use crate::follow::engine_error;
use crate::output::Output;
use crate::runs::{the_live_run, with_yard};

/// Add forks to a run that is under way.
#[derive(Debug, Clone, Args)]
pub struct AddArgs {
    /// The run.
    #[arg(value_name = "RUN")]
    pub run: RunId,
    /// How many.
    #[arg(short, long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub forks: u32,
    /// Another prompt than the run's.
    #[arg(short, long, value_name = "TEXT")]
    pub prompt: Option<String>,
    /// Another model than the run's.
    #[arg(short, long, value_name = "MODEL")]
    pub model: Option<String>,
}

impl AddArgs {
    pub fn run(&self, global: &Global, out: &mut Output<'_>) -> Result<Exit> {
        with_yard(global, async |yard| {
            the_live_run(yard, &self.run).await?;
            let loaded = log::load_run(&*yard.store, &self.run).await.map_err(engine_error)?;
            let Some((state, _)) = loaded else {
                return Err(CliError::failure(format!("run {} is gone", self.run)));
            };
            let Some(first) = state.spec().forks.first() else {
                return Err(CliError::failure(format!("run {} has no fork to follow", self.run)));
            };
            let mut like = first.clone();
            like.name = None;
            if let Some(prompt) = &self.prompt {
                like.prompt = prompt.clone();
            }
            if let Some(model) = &self.model {
                yard.models.check(model).map_err(CliError::usage)?;
                like.model = model.clone();
            }
            let forks = vec![like; self.forks as usize];
            yard.engine.command(&self.run, Command::AddForks { forks }, None).await.map_err(engine_error)
        })?;
        let text = format!("{} more forks for {1}. See them with: forkyard status {1}", self.forks, self.run);
        out.said("forkyard.command/1", "add", &self.run, &text)?;
        Ok(Exit::Success)
    }
}
