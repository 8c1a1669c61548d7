use clap::Args;
use forkyard_core::RunId;
use forkyard_core::run::Command;
use forkyard_core::spec::ForkSpec;
use forkyard_core::view::EngineKind;
use forkyard_engine::log;
use forkyard_temporal::wire::check_size;

use super::fork::check_model;
use crate::cli::Global;
use crate::error::{CliError, Result};
use crate::exit::Exit;
use crate::follow::engine_error;
use crate::output::Output;
use crate::place::Place;
use crate::runs::{see_to, the_live_run, the_run, with_place};
use crate::temporal;
use crate::yard::Yard;

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
        let like = Like { prompt: self.prompt.clone(), model: self.model.clone() };
        let (detached, notice) = with_place(global, async |place| {
            place.add(&self.run, self.forks, &like).await?;
            see_to(place, global, &self.run).await?;
            let view = the_run(place, &self.run).await?;
            Ok((view.detached, temporal::waits_for(place, &view).await?))
        })?;
        if let Some(notice) = notice {
            out.stored("add", &self.run, &notice)?;
            return Ok(Exit::Success);
        }
        let more =
            if self.forks == 1 { "One more fork".into() } else { format!("{} more forks", self.forks) };
        let text = if detached {
            format!("{more} for {0}, which is detached. Go on with: forkyard resume {0}", self.run)
        } else {
            format!("{more} for {0}. See them with: forkyard status {0}", self.run)
        };
        out.said("forkyard.command/1", "add", &self.run, &text)?;
        Ok(Exit::Success)
    }
}

/// How an added fork differs from the run's first.
#[derive(Debug, Clone, Default)]
pub struct Like {
    pub prompt: Option<String>,
    pub model: Option<String>,
}

/// Asks the run's driver for more forks.
pub async fn add(yard: &Yard, run: &RunId, count: u32, like: &Like) -> Result<()> {
    let view = the_live_run(yard, run).await?;
    let Some((state, _)) = log::load_run(&*yard.store, run).await.map_err(engine_error)? else {
        return Err(CliError::failure(format!("run {run} is gone")));
    };
    let Some(first) = state.spec().forks.first() else {
        return Err(CliError::failure(format!("run {run} has no fork to follow")));
    };
    let (there, most) = (state.fork_count(), yard.settings.max_forks);
    if there + count as usize > most as usize {
        let message =
            format!("{count} more forks for a run of {there} are more than `run.max_forks` = {most}");
        return Err(CliError::usage(message).hint("raise run.max_forks or ask for fewer"));
    }
    let mut fork = ForkSpec { name: None, ..first.clone() };
    if let Some(prompt) = &like.prompt {
        fork.prompt = prompt.clone();
    }
    if let Some(model) = &like.model {
        check_model(yard, model)?;
        fork.model = model.clone();
    }
    let command = Command::AddForks { forks: vec![fork; count as usize] };
    if view.engine == EngineKind::Temporal {
        check_size(&command).map_err(CliError::usage)?;
    }
    yard.command(run, command).await
}
