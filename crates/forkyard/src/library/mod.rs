//! What the command line does, for Rust programs: sandboxes, agents in sandboxes, and forks of a repository.

mod agents;
mod error;
mod runs;
mod sandboxes;

use std::path::PathBuf;
use std::sync::Arc;

pub use agents::{ActiveAgent, AgentResult, AgentTask, Agents};
pub use error::{Error, ErrorKind, Result};
pub use runs::{ForkOptions, Job, Run};
pub use sandboxes::{Command, CommandOutput, Sandbox, SandboxConfig, Sandboxes};

use crate::error::CliError;
use crate::settings::{self, Flags, Project, Settings};
use crate::yard::Yard;

/// Where and how a [`Forkyard`] works. What is not said here is as on the command line: the environment, then `config.toml`
/// in Forkyard's home, then the defaults.
#[derive(Debug, Clone, Default)]
pub struct Options {
    home: Option<PathBuf>,
    set: Vec<(String, String)>,
}

impl Options {
    pub fn new() -> Options {
        Options::default()
    }

    /// Where runs, sandboxes and caches are kept; an absolute path. `$FORKYARD_HOME` or the user's data folder if not given.
    pub fn home(mut self, path: impl Into<PathBuf>) -> Options {
        self.home = Some(path.into());
        self
    }

    /// Any setting of docs/configuration.md, such as `("model", "haiku")`.
    pub fn set(mut self, key: impl Into<String>, value: impl Into<String>) -> Options {
        self.set.push((key.into(), value.into()));
        self
    }
}

/// An open Forkyard: its store, its sandboxes, its models. Clones share it.
///
/// Opening starts nothing. Runs and sandboxes are kept in the home, so other processes, the command line among them, see and
/// steer them too.
#[derive(Clone)]
pub struct Forkyard {
    yard: Arc<Yard>,
    set: Arc<Vec<(String, String)>>,
}

impl Forkyard {
    pub async fn open(options: Options) -> Result<Forkyard> {
        // Fails only if the program has installed one already, which is as good.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let settings = load(options.home, &options.set)?;
        Ok(Forkyard { yard: Arc::new(Yard::open(settings).await?), set: Arc::new(options.set) })
    }

    /// A manager of sandboxes. Each has its own list: one does not destroy what another made.
    pub fn sandboxes(&self) -> Sandboxes {
        Sandboxes::new(self.yard.clone())
    }

    /// An executor of agents in sandboxes of their own.
    pub fn agents(&self) -> Agents {
        Agents::new(self.yard.clone())
    }

    /// Starts a run and drives it in this process. It goes on while the runtime lives, also when the [`Run`] is dropped; a run
    /// whose process has gone is taken up again by [`Forkyard::resume`] or `forkyard resume`.
    pub async fn start(&self, job: Job) -> Result<Run> {
        if job.set.is_empty() {
            return Run::start(self.yard.clone(), &self.yard.settings, &job).await;
        }
        let set: Vec<_> = self.set.iter().chain(&job.set).cloned().collect();
        let settings = load(Some(self.yard.settings.home.clone()), &set)?;
        Run::start(self.yard.clone(), &settings, &job).await
    }

    /// A run of this home, whoever drives it.
    pub async fn run(&self, id: &str) -> Result<Run> {
        Run::open(self.yard.clone(), id).await
    }

    /// Goes on with a run that is paused, detached or crashed, and drives it if nobody else does.
    pub async fn resume(&self, id: &str) -> Result<Run> {
        let run = self.run(id).await?;
        run.resume().await?;
        run.drive();
        Ok(run)
    }

    /// Ids of the newest runs, newest first.
    pub async fn runs(&self, limit: usize) -> Result<Vec<String>> {
        runs::newest(&self.yard, limit).await
    }
}

impl std::fmt::Debug for Forkyard {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Forkyard").field("home", &self.yard.settings.home).finish_non_exhaustive()
    }
}

/// The settings of a home with some that were given; the last of several for one key counts.
fn load(home: Option<PathBuf>, set: &[(String, String)]) -> Result<Settings> {
    let mut flags = Flags::default();
    for (key, value) in set {
        let setting = settings::setting(key).ok_or_else(|| unknown(key))?;
        flags.set(setting.key, key, value);
    }
    Ok(settings::load_from(home, flags, Project::None).map_err(CliError::from)?.settings)
}

fn unknown(key: &str) -> CliError {
    let near = settings::nearest(key, settings::TABLE.iter().map(|s| s.key));
    CliError::usage(format!("{key}: there is no such setting"))
        .hint(near.map_or("docs/configuration.md lists them".into(), |n| format!("did you mean `{n}`?")))
}
