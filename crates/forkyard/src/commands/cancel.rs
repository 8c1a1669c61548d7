use std::time::Duration;

use clap::Args;
use forkyard_core::ForkNum;
use forkyard_core::run::Command;
use forkyard_engine::Engine;
use tokio_util::sync::CancellationToken;

use super::target::Target;
use crate::cli::Global;
use crate::error::Result;
use crate::exit::Exit;
use crate::follow::{self, Left, engine_error, store_error};
use crate::output::Output;
use crate::runs::{leave_to_worker, the_fork, the_live_run, with_yard};
use crate::yard::Yard;

/// Cancel a run, or one fork of it. Work that is done stays for diff and apply.
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
        with_yard(global, async |yard| {
            the_live_run(yard, run).await?;
            if let Some(fork) = self.target.fork {
                the_fork(yard, run, fork).await?;
            }
            let command = self.target.fork.map_or(Command::Cancel, |fork| Command::CancelFork { fork });
            yard.engine.command(run, command, None).await.map_err(engine_error)?;
            if self.no_wait {
                leave_to_worker(yard, global, run).await?;
                out.said("forkyard.command/1", "cancel", run, &format!("Cancelling {}.", self.target))?;
                return Ok(Exit::Success);
            }
            match self.target.fork {
                Some(fork) => {
                    drive_until_ended(yard, &self.target, fork).await?;
                    out.said("forkyard.command/1", "cancel", run, &format!("{} is cancelled.", self.target))?;
                    Ok(Exit::Success)
                }
                None => match follow::drive(yard, run, out).await? {
                    Left::Detached | Left::Elsewhere => Ok(Exit::Interrupted),
                    Left::Ended(view) => {
                        follow::close(yard, &view, out).await?;
                        // That nothing succeeded is what was asked for.
                        Ok(Exit::Success)
                    }
                },
            }
        })
    }
}

/// If nobody else does, this process drives the run, for as long as that one fork takes to end.
async fn drive_until_ended(yard: &Yard, target: &Target, fork: ForkNum) -> Result<()> {
    let stop = CancellationToken::new();
    let mut watch = yard.store.watch(Some(&target.run));
    let mut driving = std::pin::pin!(follow::drive_patiently(yard, &target.run, stop.clone()));
    let mut driven = false;
    loop {
        let view = yard.store.fork(&target.run, fork).await.map_err(store_error)?;
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
