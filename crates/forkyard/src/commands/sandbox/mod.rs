//! Sandboxes by hand: what runs use, for people.

mod egress;
mod exec;
mod files;
mod make;
mod shell;
mod show;
mod snapshots;
mod stream;
mod tree;
mod way;

use std::sync::Arc;

use clap::{Args, Subcommand};
use forkyard_core::SandboxId;
use forkyard_sandbox::{
    ErrorKind, Provider, ProviderKind, Sandbox, SandboxError, SandboxInfo, SandboxStatus,
};
use serde_json::{Value, json};

use crate::cli::Global;
use crate::error::{CliError, Result};
use crate::exit::Exit;
use crate::output::Output;
use crate::place::Place;
use crate::runs::{with_place, with_sandboxes};

#[derive(Debug, Clone, Args)]
pub struct SandboxArgs {
    #[command(subcommand)]
    pub command: SandboxCommand,
}

#[derive(Debug, Clone, Subcommand)]
#[command(defer = true)]
pub enum SandboxCommand {
    /// Run a command in a new sandbox and remove it afterwards.
    Run(make::RunArgs),
    /// Make a sandbox, which lives until it is removed or its lifetime is over.
    Create(make::CreateArgs),
    /// List sandboxes, those of runs included.
    List(show::ListArgs),
    /// Run a command in a sandbox; its exit status becomes this program's, 127 if it is not there and 126 if it can't be executed.
    Exec(exec::ExecArgs),
    /// Open a shell in a sandbox, on a terminal of its own.
    Shell(shell::ShellArgs),
    /// Copy a file or a folder into a sandbox or out of it.
    Cp(files::CpArgs),
    /// List the files of a folder in a sandbox.
    Ls(files::LsArgs),
    /// Write a file of a sandbox to standard output, byte by byte.
    Cat(files::CatArgs),
    /// Show what a sandbox uses, or all that run.
    Stats(show::StatsArgs),
    /// Ask a sandbox whether it is well, or all that there are; exit status 1 if one is not.
    Health(show::HealthArgs),
    /// Show what a sandbox reached of the network and what it was refused, also after its end.
    Egress(egress::EgressArgs),
    /// Start a stopped sandbox on the files that it had.
    Start(OneArgs),
    /// End a sandbox's processes and keep its files.
    Stop(OneArgs),
    /// Freeze the files of a sandbox under a name, from which others can start.
    Snapshot(make::SnapshotArgs),
    /// List snapshots, those of runs included, remove some, or write one to a file and read it again.
    ///
    /// Size is what a snapshot takes on the disk: what it shares with an older one counts there, what is its image's not at all.
    Snapshots(snapshots::SnapshotsArgs),
    /// Make copy-on-write children of a sandbox; it goes on as it is.
    Fork(make::ForkArgs),
    /// Freeze all processes of a sandbox.
    Pause(OneArgs),
    /// Let a paused sandbox go on.
    Resume(OneArgs),
    /// End sandboxes and remove everything of them.
    Rm(show::RmArgs),
}

#[derive(Debug, Clone, Args)]
pub struct OneArgs {
    /// The sandbox.
    #[arg(value_name = "SANDBOX")]
    pub sandbox: SandboxId,
}

impl SandboxArgs {
    pub fn run(&self, global: &Global, out: &mut Output<'_>) -> Result<Exit> {
        match &self.command {
            SandboxCommand::Run(a) => {
                let mut flags = global.flags()?;
                a.options.add_to(&mut flags);
                with_sandboxes(global, flags, async |s, sandboxes| a.run(s, sandboxes, out).await)
            }
            SandboxCommand::Create(a) => {
                let mut flags = global.flags()?;
                a.options.add_to(&mut flags);
                with_sandboxes(global, flags, async |s, sandboxes| a.run(s, sandboxes, out).await)
            }
            SandboxCommand::List(a) => with_place(global, async |place| a.run(place, out).await),
            SandboxCommand::Exec(a) => with_place(global, async |place| a.run(place, out).await),
            SandboxCommand::Shell(a) => with_place(global, async |place| a.run(place, out).await),
            SandboxCommand::Cp(a) => with_place(global, async |place| a.run(place, out).await),
            SandboxCommand::Ls(a) => with_place(global, async |place| a.run(place, out).await),
            SandboxCommand::Cat(a) => with_place(global, async |place| a.run(place, out).await),
            SandboxCommand::Stats(a) => with_place(global, async |place| a.run(place, out).await),
            SandboxCommand::Health(a) => with_place(global, async |place| a.run(place, out).await),
            SandboxCommand::Snapshot(a) => with_place(global, async |place| a.run(place, out).await),
            SandboxCommand::Snapshots(a) => with_place(global, async |place| a.run(place, out).await),
            SandboxCommand::Fork(a) => with_place(global, async |place| a.run(place, out).await),
            SandboxCommand::Rm(a) => with_place(global, async |place| a.run(place, out).await),
            SandboxCommand::Egress(a) => a.run(global, out),
            SandboxCommand::Start(a) => steer(global, a, Steer::Start, out),
            SandboxCommand::Stop(a) => steer(global, a, Steer::Stop, out),
            SandboxCommand::Pause(a) => steer(global, a, Steer::Pause, out),
            SandboxCommand::Resume(a) => steer(global, a, Steer::Resume, out),
        }
    }
}

/// What a word alone does to a sandbox.
#[derive(Debug, Clone, Copy)]
enum Steer {
    Start,
    Stop,
    Pause,
    Resume,
}

impl Steer {
    fn word(self) -> &'static str {
        match self {
            Steer::Start => "start",
            Steer::Stop => "stop",
            Steer::Pause => "pause",
            Steer::Resume => "resume",
        }
    }

    /// Of a sandbox that was in this state before.
    fn outcome(self, before: SandboxStatus) -> &'static str {
        use SandboxStatus::{Dead, Paused, Running, Stopped};
        match (self, before) {
            (Steer::Start | Steer::Resume, Running) => "is running already.",
            (Steer::Start, Paused) => "is paused; `forkyard sandbox resume` lets it go on.",
            (Steer::Start, Stopped | Dead) => "is running.",
            (Steer::Resume, Paused | Stopped | Dead) => "is running again.",
            (Steer::Stop, Stopped) => "is stopped already.",
            (Steer::Stop, Running | Paused | Dead) => "is stopped.",
            (Steer::Pause, Paused) => "is paused already.",
            (Steer::Pause, Running | Stopped | Dead) => "is paused.",
        }
    }
}

fn steer(global: &Global, args: &OneArgs, what: Steer, out: &mut Output<'_>) -> Result<Exit> {
    with_place(global, async |place| {
        let id = &args.sandbox;
        let (provider, info) = find(place, id).await?;
        let word = what.word();
        let action = format!("sandbox.{word}");
        match what {
            Steer::Stop => place.record_removal(&action, id.as_str(), Value::Null).await,
            Steer::Start | Steer::Pause | Steer::Resume => {
                place.record(&action, id.as_str(), Value::Null).await?;
            }
        }
        match what {
            Steer::Start => drop(provider.start(id, info.attempt).await?),
            Steer::Stop => provider.stop(id).await?,
            Steer::Pause => reach(&*provider, &info).await?.pause().await?,
            Steer::Resume => reach(&*provider, &info).await?.resume().await?,
        }
        said(out, word, id, &format!("{id} {}", what.outcome(info.status)))
    })
}

fn said(out: &mut Output<'_>, command: &str, id: &SandboxId, text: &str) -> Result<Exit> {
    if out.json {
        out.json(&json!({ "schema": "forkyard.sandbox_command/1", "command": command, "sandbox_id": id }))?;
    } else {
        out.line(text)?;
    }
    Ok(Exit::Success)
}

/// Several are removed: one that can't be does not keep the others.
#[derive(Default)]
struct Removals {
    gone: Vec<String>,
    failed: Vec<CliError>,
}

impl Removals {
    fn note(&mut self, id: &str, removed: Result<()>, out: &mut Output<'_>) -> Result<()> {
        match removed {
            Ok(()) => {
                if !out.json {
                    out.line(&format!("{id} is gone."))?;
                }
                self.gone.push(id.into());
            }
            Err(e) => self.failed.push(e),
        }
        Ok(())
    }

    /// What is there was removed; the first of the failures is the command's own.
    fn end(self, what: &str, out: &mut Output<'_>) -> Result<Exit> {
        if out.json && (self.failed.is_empty() || !self.gone.is_empty()) {
            out.json(&json!({ "schema": "forkyard.removed/1", what: self.gone }))?;
        }
        let mut failed = self.failed.into_iter();
        let Some(mut first) = failed.next() else { return Ok(Exit::Success) };
        if !self.gone.is_empty() {
            // Something was changed.
            first.exit = Exit::Failure;
        }
        Err(failed
            .fold(first, |all, e| CliError { message: format!("{}\n{}", all.message, e.message), ..all }))
    }
}

/// Whoever has it.
async fn find(place: &dyn Place, id: &SandboxId) -> Result<(Arc<dyn Provider>, SandboxInfo)> {
    place.sandboxes().find(id).await.map_err(|e| match e.kind {
        ErrorKind::NotFound => CliError { exit: Exit::Usage, ..e.into() },
        _ => e.into(),
    })
}

/// For who does not run anything inside: no connection of a command comes to depend on this one.
async fn observe(place: &dyn Place, id: &SandboxId) -> Result<Arc<dyn Sandbox>> {
    let (provider, info) = find(place, id).await?;
    reach(&*provider, &info).await
}

async fn reach(provider: &dyn Provider, info: &SandboxInfo) -> Result<Arc<dyn Sandbox>> {
    provider.observe(&info.id, info.attempt).await.map_err(|e| not_reached(e, info))
}

/// A sandbox that can't be connected to, and what to do about it.
fn not_reached(e: SandboxError, info: &SandboxInfo) -> CliError {
    match (e.kind, info.status) {
        (ErrorKind::NotFound, SandboxStatus::Stopped) => {
            CliError::failure(e.message).hint(format!("start it with: forkyard sandbox start {}", info.id))
        }
        _ => e.into(),
    }
}

/// As the settings and JSON have it.
fn provider_name(kind: ProviderKind) -> &'static str {
    match kind {
        ProviderKind::Local => "local",
        ProviderKind::Docker => "docker",
        ProviderKind::E2b => "e2b",
        ProviderKind::Daytona => "daytona",
    }
}
