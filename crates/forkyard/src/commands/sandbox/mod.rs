//! Sandboxes by hand: what runs use, for people.

mod exec;
mod files;
mod make;
mod shell;
mod show;
mod snapshots;

use std::sync::Arc;

use clap::{Args, Subcommand};
use forkyard_core::SandboxId;
use forkyard_sandbox::{ErrorKind, Provider, Sandbox, SandboxInfo};
use serde_json::{Value, json};

use crate::cli::Global;
use crate::error::{CliError, Result};
use crate::exit::Exit;
use crate::output::Output;
use crate::place::Place;
use crate::runs::{with_place, with_sandboxes};

/// Make and use sandboxes by hand.
#[derive(Debug, Clone, Args)]
pub struct SandboxArgs {
    #[command(subcommand)]
    pub command: SandboxCommand,
}

#[derive(Debug, Clone, Subcommand)]
pub enum SandboxCommand {
    Run(make::RunArgs),
    Create(make::CreateArgs),
    List(show::ListArgs),
    Exec(exec::ExecArgs),
    Shell(shell::ShellArgs),
    Cp(files::CpArgs),
    Ls(files::LsArgs),
    Cat(files::CatArgs),
    Stats(show::StatsArgs),
    Health(show::HealthArgs),
    /// Start a stopped sandbox on the files that it had.
    Start(OneArgs),
    /// End a sandbox's processes and keep its files.
    Stop(OneArgs),
    Snapshot(make::SnapshotArgs),
    Snapshots(snapshots::SnapshotsArgs),
    Fork(make::ForkArgs),
    /// Freeze all processes of a sandbox.
    Pause(OneArgs),
    /// Let a paused sandbox go on.
    Resume(OneArgs),
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
        let one = |args: &OneArgs, out: &mut Output<'_>, word: &str| steer(global, args, word, out);
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
            SandboxCommand::Shell(a) => with_place(global, async |place| a.run(place).await),
            SandboxCommand::Cp(a) => with_place(global, async |place| a.run(place, out).await),
            SandboxCommand::Ls(a) => with_place(global, async |place| a.run(place, out).await),
            SandboxCommand::Cat(a) => with_place(global, async |place| a.run(place, out).await),
            SandboxCommand::Stats(a) => with_place(global, async |place| a.run(place, out).await),
            SandboxCommand::Health(a) => with_place(global, async |place| a.run(place, out).await),
            SandboxCommand::Snapshot(a) => with_place(global, async |place| a.run(place, out).await),
            SandboxCommand::Snapshots(a) => with_place(global, async |place| a.run(place, out).await),
            SandboxCommand::Fork(a) => with_place(global, async |place| a.run(place, out).await),
            SandboxCommand::Rm(a) => with_place(global, async |place| a.run(place, out).await),
            SandboxCommand::Start(a) => one(a, out, "start"),
            SandboxCommand::Stop(a) => one(a, out, "stop"),
            SandboxCommand::Pause(a) => one(a, out, "pause"),
            SandboxCommand::Resume(a) => one(a, out, "resume"),
        }
    }
}

fn steer(global: &Global, args: &OneArgs, word: &str, out: &mut Output<'_>) -> Result<Exit> {
    with_place(global, async |place| {
        let id = &args.sandbox;
        let (provider, info) = find(place, id).await?;
        place.record(&format!("sandbox.{word}"), id.as_str(), Value::Null).await?;
        match word {
            "start" => drop(provider.start(id, info.attempt).await?),
            "stop" => provider.stop(id).await?,
            "pause" => provider.attach(id, info.attempt).await?.pause().await?,
            _ => provider.attach(id, info.attempt).await?.resume().await?,
        }
        said(out, word, id, &format!("{id}: {word} done."))
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

/// Whoever has it.
async fn find(place: &dyn Place, id: &SandboxId) -> Result<(Arc<dyn Provider>, SandboxInfo)> {
    place.sandboxes().find(id).await.map_err(|e| match e.kind {
        ErrorKind::NotFound => CliError { exit: Exit::Usage, ..e.into() },
        _ => e.into(),
    })
}

async fn attach(place: &dyn Place, id: &SandboxId) -> Result<Arc<dyn Sandbox>> {
    let (provider, info) = find(place, id).await?;
    Ok(provider.attach(id, info.attempt).await?)
}
