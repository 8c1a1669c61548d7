use std::time::Duration;

use clap::Args;
use forkyard_core::ForkNum;
use forkyard_core::run::Command;
use tokio_util::sync::CancellationToken;

use super::target::Target;
use crate::cli::Global;
use crate::error::{CliError, Result};
use crate::exit::Exit;
use crate::follow::{self, Left};
use crate::output::Output;
use crate::place::Place;
use crate::runs::{leave_to_worker, the_fork, the_live_run, with_place};
use crate::temporal;

#[derive(Debug, Clone, Args)]
pub struct CancelArgs {
    /// RUN or RUN/N.
    #[arg(value_name = "RUN")]
    pub target: Target,
    /// Do not wait until it has ended.
    #[arg(long)]
    pub no_wait: bool,
}

impl CancelArgs {
    pub fn run(&self, global: &Global, out: &mut Output<'_>) -> Result<Exit> {
        let run = &self.target.run;
        with_place(global, async |place| {
            let view = the_live_run(place, run).await?;
            if let Some(fork) = self.target.fork
                && the_fork(place, run, fork).await?.outcome.is_some()
            {
                return Err(CliError::usage(format!("fork {fork} of {run} has ended"))
                    .hint(format!("`forkyard status {run}` shows who is still at work")));
            }
            let command = self.target.fork.map_or(Command::Cancel, |fork| Command::CancelFork { fork });
            place.command(run, command).await?;
            if let Some(notice) = temporal::waits_for(place, &view).await? {
                out.stored("cancel", run, &notice)?;
                return Ok(Exit::Success);
            }
            if self.no_wait {
                leave_to_worker(place, global, run).await?;
                out.said("forkyard.command/1", "cancel", run, &format!("Cancelling {}.", self.target))?;
                return Ok(Exit::Success);
            }
            match self.target.fork {
                Some(fork) => {
                    drive_until_ended(place, &self.target, fork).await?;
                    out.said("forkyard.command/1", "cancel", run, &format!("{} is cancelled.", self.target))?;
                    Ok(Exit::Success)
                }
                None => match follow::drive(place, run, out).await? {
                    Left::Detached | Left::Elsewhere => Ok(Exit::Interrupted),
                    Left::Ended(view) => {
                        follow::close(place, &view, out).await?;
                        // That nothing succeeded is what was asked for.
                        Ok(Exit::Success)
                    }
                },
            }
        })
    }
}

/// If nobody else does, this process drives the run, for as long as that one fork takes to end.
async fn drive_until_ended(place: &dyn Place, target: &Target, fork: ForkNum) -> Result<()> {
    let stop = CancellationToken::new();
    let mut watch = place.watch(&target.run);
    let mut driving = std::pin::pin!(async {
        match place.here() {
            Some(yard) => follow::drive_patiently(yard, &target.run, stop.clone()).await.map(drop),
            None => {
                stop.cancelled().await;
                Ok(())
            }
        }
    });
    let mut driven = false;
    loop {
        let view = place.fork(&target.run, fork).await?;
        if driven || view.is_none_or(|f| f.outcome.is_some()) {
            break;
        }
        tokio::select! {
            biased;
            end = &mut driving => { end?; driven = true; }
            () = watch.changed() => {}
            () = tokio::time::sleep(Duration::from_secs(1)) => {}
        }
    }
    stop.cancel();
    if !driven {
        driving.await?;
    }
    Ok(())
}
