use clap::Args;
use forkyard_core::RunId;
use forkyard_core::view::EngineKind;
use forkyard_store::ProcessKind;

use crate::cli::Global;
use crate::error::{CliError, Result};
use crate::exit::Exit;
use crate::follow;
use crate::observe::Observer;
use crate::output::Output;
use crate::runs::{stop_on_signals, the_run, with_flags};
use crate::temporal;

#[derive(Debug, Clone, Args)]
pub struct WorkerArgs {
    /// Only this run, then end.
    #[arg(long, value_name = "RUN")]
    pub run: Option<RunId>,
    /// Forks that work at the same time on this host.
    #[arg(long, value_name = "N")]
    pub concurrency: Option<String>,
    /// For whom: embedded drives the runs of the store, temporal works for a Temporal service [default: embedded].
    #[arg(long, value_name = "NAME")]
    pub engine: Option<String>,
    /// Be the agent of the sandbox that it runs in, as the variables of the environment say (CALLBACK_URL, SANDBOX_ID,
    /// TASK_DATA_BASE64, FORKYARD_TOKEN_FILE …).
    #[arg(long, conflicts_with_all = ["run", "concurrency"])]
    pub in_sandbox: bool,
    /// Leave the terminal that it was started from.
    #[arg(long, hide = true)]
    pub detached: bool,
}

impl WorkerArgs {
    pub fn run(&self, global: &Global, out: &mut Output<'_>) -> Result<Exit> {
        if self.in_sandbox {
            return crate::in_sandbox::run();
        }
        if self.detached {
            rustix::process::setsid()
                .map_err(|e| CliError::failure(format!("the terminal can't be left: {e}")))?;
        }
        let mut flags = global.flags()?;
        flags.set_option("engine.host_concurrency", "--concurrency", self.concurrency.as_ref());
        flags.set_option("engine.kind", "--engine", self.engine.as_ref());
        with_flags(global, flags, async |yard| {
            let mut observer = Observer::start(&yard.settings, self.run.is_none())?;
            let stop = stop_on_signals()?;
            if let Some(run) = &self.run {
                the_run(yard, run).await?;
                observer.over(yard, follow::drive_patiently(yard, run, stop)).await?;
                return Ok(Exit::Success);
            }
            if yard.settings.engine == EngineKind::Temporal {
                let watched = observer.watch_temporal(&yard.settings);
                let working = temporal::work(yard, watched, stop, out);
                yard.staying(observer.over(yard, working)).await?;
                return Ok(Exit::Success);
            }
            if !out.json {
                out.line("Driving runs until stopped by ctrl-C or SIGTERM.")?;
            }
            observer.over(yard, yard.staying(yard.engine.work(ProcessKind::Worker, stop))).await;
            Ok(Exit::Success)
        })
    }
}
