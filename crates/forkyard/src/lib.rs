//! Fork a repository into isolated sandboxes, run a coding agent in each, and keep the best result.
//!
//! This is the library behind the `forkyard` program: what the command line does, a Rust program does in a few lines.
//!
//! | what | with |
//! |---|---|
//! | open Forkyard | [`Forkyard::open`] |
//! | make and use sandboxes | [`Forkyard::sandboxes`]: [`Sandboxes`], [`Sandbox`], [`Command`] |
//! | run agents in sandboxes of their own | [`Forkyard::agents`]: [`Agents`], [`AgentTask`] |
//! | fork a repository, let agents work, rank the results | [`Forkyard::start`]: [`Job`], [`Run`], [`RunResult`] |
//!
//! Runs and sandboxes are kept in Forkyard's home: the command line and other processes see and steer them too.
//!
//! ```no_run
//! use forkyard::{Forkyard, Job, Options};
//!
//! #[tokio::main]
//! async fn main() -> forkyard::Result<()> {
//!     let yard = Forkyard::open(Options::new()).await?;
//!     let job = Job::new(".", "Make the failing tests pass.").forks(4).model("sonnet");
//!     let mut run = yard.start(job.verify("make test").protect("tests/**").budget(5.0)).await?;
//!     while let Some(progress) = run.next().await? {
//!         println!("{} of {} forks have ended", progress.completed + progress.failed, progress.total_forks);
//!     }
//!     let result = run.wait().await?;
//!     if let Some(best) = result.best() {
//!         println!("fork {} is the best, for ${:.2}", best.fork_num, best.total_cost);
//!         run.apply_as_branch(best.fork_num, "forkyard/best").await?;
//!     }
//!     Ok(())
//! }
//! ```
//!
//! More examples, which need no key and no network, are in the crate's `examples` folder.

mod cli;
mod commands;
mod doing;
mod error;
mod exit;
mod follow;
mod in_sandbox;
mod internal;
mod library;
mod observe;
mod output;
mod place;
mod reference;
mod remote;
mod render;
mod results;
mod runs;
mod settings;
mod temporal;
mod watch;
mod yard;

pub use forkyard_agent::{ToolRequest, ToolResponse, Verdict};
pub use forkyard_core::rank::{Ranked, Ranking};
pub use forkyard_core::sandbox::{NetworkMode, ProviderKind};
pub use forkyard_core::view::{DiffStat, Progress, RunOutcome, RunStatus};
pub use forkyard_sandbox::{FileInfo, FileKind, Health, Stats};
pub use library::{
    ActiveAgent, AgentResult, AgentTask, Agents, Command, CommandOutput, Error, ErrorKind, ForkOptions,
    Forkyard, Job, Options, Result, Run, Sandbox, SandboxConfig, Sandboxes,
};
pub use results::{ForkResult, RunResult, Totals};

/// The program itself. Not for others: it may change with every version.
#[doc(hidden)]
pub mod program {
    pub use crate::cli::{Cli, expects_sandbox};
    pub use crate::error::CliError;
    pub use crate::exit::Exit;
    pub use crate::output::Output;
    pub use crate::reference::markdown as commands_reference;
    pub use crate::render::Style;
    pub use crate::settings::{ColorMode, Raw, Value, environment, markdown as settings_reference};
    pub use crate::watch::FullScreen;
}

/// The runtime of commands that wait for something.
fn runtime() -> error::Result<tokio::runtime::Runtime> {
    Ok(tokio::runtime::Builder::new_multi_thread().enable_all().build()?)
}
