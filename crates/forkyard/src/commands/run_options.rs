//! Options that every command that starts a run shares, and how they become a specification.

use std::path::PathBuf;

use clap::Args;
use forkyard_core::budget::BudgetLimits;
use forkyard_core::sandbox::{LimitsOverride, ProviderKind, Root, Volume};
use forkyard_core::spec::{AgentPlan, ForkSpec, NetworkPlan, RepoSpec, RunSpec, SandboxPlan, UntilVerified};
use forkyard_core::{SandboxId, SnapshotId};

use crate::error::{CliError, Result};
use crate::settings::{Flags, Settings, Value};

// Not a doc comment, which would become the text of the command that it is a part of.
// Values are checked with the settings that they override, so that errors are the same wherever one comes from.
#[derive(Debug, Clone, Default, Args)]
pub struct RunOptions {
    /// Forks of the run [default: 1, or one for each prompt and model].
    #[arg(short, long, value_name = "N")]
    pub forks: Option<String>,
    /// Model; several are dealt out to the forks [default: sonnet].
    #[arg(short, long, value_name = "MODEL")]
    pub model: Vec<String>,
    /// Forks that work at the same time [default: 5].
    #[arg(long, value_name = "N")]
    pub max_concurrent: Option<String>,
    /// Time that a fork may take [default: 2h].
    #[arg(short, long, value_name = "DURATION")]
    pub timeout: Option<String>,
    /// Most that the run may cost, all forks together.
    #[arg(long, value_name = "DOLLARS")]
    pub budget: Option<String>,
    /// Most that one fork may cost.
    #[arg(long, value_name = "DOLLARS")]
    pub fork_budget: Option<String>,
    /// Turns that an agent may take [default: 100].
    #[arg(long, value_name = "N")]
    pub max_turns: Option<String>,
    /// Start more forks until this many are verified.
    #[arg(long, value_name = "K")]
    pub until_verified: Option<u32>,
    /// Most forks that --until-verified may start.
    #[arg(long, value_name = "M", requires = "until_verified")]
    pub max_forks: Option<u32>,

    /// Command that prepares the base, once: installing dependencies, say.
    #[arg(long, value_name = "CMD", help_heading = "Judging")]
    pub setup: Option<String>,
    /// Command that judges a result, in a sandbox of its own: exit status 0 is verified.
    #[arg(long, value_name = "CMD", help_heading = "Judging")]
    pub verify: Option<String>,
    /// Command whose last line of output is a number; higher ranks better.
    #[arg(long, value_name = "CMD", help_heading = "Judging")]
    pub score: Option<String>,
    /// Files that are as in the base when a result is judged: tests, say.
    #[arg(long, value_name = "GLOB", help_heading = "Judging")]
    pub protect: Vec<String>,
    /// Files to bring back beside the diff.
    #[arg(long, value_name = "GLOB", help_heading = "Judging")]
    pub capture: Vec<String>,

    /// Who makes the sandboxes: local, docker, e2b or daytona [default: local].
    #[arg(long, value_name = "NAME", help_heading = "Sandbox")]
    pub provider: Option<String>,
    /// Image that sandboxes start from: a registry's name, `oci:PATH`, `archive:PATH` or `dir:PATH` (a folder of this machine as
    /// the root, which stays as it is; local only).
    #[arg(long, value_name = "IMAGE", conflicts_with = "snapshot", help_heading = "Sandbox")]
    pub image: Option<String>,
    /// Snapshot that sandboxes start from.
    #[arg(long, value_name = "ID", help_heading = "Sandbox")]
    pub snapshot: Option<String>,
    /// Forks work in children of these sandboxes, with the files that they have; the sandboxes are never changed or
    /// destroyed. One with an empty /workspace gets the repository.
    #[arg(long, value_name = "ID", help_heading = "Sandbox")]
    pub sandbox: Vec<SandboxId>,
    /// Memory of a sandbox [default: 4GiB].
    #[arg(long, value_name = "SIZE", help_heading = "Sandbox")]
    pub memory: Option<String>,
    /// Processors of a sandbox [default: 2].
    #[arg(long, value_name = "N", help_heading = "Sandbox")]
    pub cpus: Option<String>,
    /// Disk of a sandbox [default: 8GiB].
    #[arg(long, value_name = "SIZE", help_heading = "Sandbox")]
    pub disk: Option<String>,
    /// Processes of a sandbox [default: 512].
    #[arg(long, value_name = "N", help_heading = "Sandbox")]
    pub processes: Option<String>,
    /// A variable inside the sandbox.
    #[arg(long, value_name = "NAME=VALUE", help_heading = "Sandbox")]
    pub env: Vec<String>,
    /// A folder of the host: HOST:PATH (read-only) or HOST:PATH:rw.
    #[arg(long, value_name = "HOST:PATH", help_heading = "Sandbox")]
    pub volume: Vec<String>,
    /// Refuse a limit that the kernel itself can't enforce here.
    #[arg(long, help_heading = "Sandbox")]
    pub strict: bool,
    /// Give each sandbox a disk of its own, whose limit the kernel keeps (as root).
    #[arg(long, help_heading = "Sandbox")]
    pub disk_image: bool,
    /// Keep the sandboxes afterwards, until their deadline.
    #[arg(long, help_heading = "Sandbox")]
    pub keep: bool,

    /// What a sandbox can reach: none, isolated or bridge [default: isolated].
    #[arg(long, value_name = "MODE", help_heading = "Network")]
    pub network: Option<String>,
    /// A host that a sandbox may reach besides the default list; HOST:ro for reading alone.
    #[arg(long, value_name = "HOST", help_heading = "Network")]
    pub allow: Vec<String>,
    /// Leave the default list out.
    #[arg(long, help_heading = "Network")]
    pub no_default_allow: bool,
    /// Bytes a second, each way.
    #[arg(long, value_name = "SIZE", help_heading = "Network")]
    pub network_rate: Option<String>,
    /// A secret of the configuration that requests of this run may carry.
    #[arg(long, value_name = "NAME", help_heading = "Network")]
    pub secret: Vec<String>,

    /// Tools that the agent may use [default: all].
    #[arg(long, value_name = "TOOL", value_delimiter = ',', help_heading = "Agent")]
    pub allowed_tools: Vec<String>,
    /// Tools that the agent may not use.
    #[arg(long, value_name = "TOOL", value_delimiter = ',', help_heading = "Agent")]
    pub disallowed_tools: Vec<String>,
    /// default, acceptEdits, plan or bypassPermissions [default: acceptEdits].
    #[arg(long, value_name = "MODE", help_heading = "Agent")]
    pub permission_mode: Option<String>,
    /// How much the model should think: low, medium, high or max.
    #[arg(long, value_name = "LEVEL", help_heading = "Agent")]
    pub effort: Option<String>,
    /// Run the agent itself inside the sandbox: it reaches the model only through Forkyard, and no key is in there.
    #[arg(long, help_heading = "Agent")]
    pub in_sandbox: bool,
    /// Template of the agent's system prompt.
    #[arg(long, value_name = "FILE", help_heading = "Agent")]
    pub agent_prompt: Option<PathBuf>,
    /// How long an agent that is done waits for messages.
    #[arg(long, value_name = "DURATION", help_heading = "Agent")]
    pub linger: Option<String>,

    /// Folder for one log file a fork.
    #[arg(long, value_name = "DIR", help_heading = "Running")]
    pub log_dir: Option<PathBuf>,
    /// Who drives the run: embedded or temporal [default: embedded].
    #[arg(long, value_name = "NAME", help_heading = "Running")]
    pub engine: Option<String>,
    /// Wait for the run's end (the default).
    #[arg(long, overrides_with = "no_wait", help_heading = "Running")]
    pub wait: bool,
    /// Start it and return; `forkyard logs -f` follows it.
    #[arg(long, overrides_with = "wait", help_heading = "Running")]
    pub no_wait: bool,
}

impl RunOptions {
    /// What these options say about settings.
    pub fn add_to(&self, flags: &mut Flags) {
        for (key, flag, value) in [
            ("run.forks", "--forks", &self.forks),
            ("run.max_concurrent", "--max-concurrent", &self.max_concurrent),
            ("run.timeout", "--timeout", &self.timeout),
            ("run.budget", "--budget", &self.budget),
            ("run.max_turns", "--max-turns", &self.max_turns),
            ("run.setup", "--setup", &self.setup),
            ("run.verify", "--verify", &self.verify),
            ("run.score", "--score", &self.score),
            ("run.linger", "--linger", &self.linger),
            ("sandbox.provider", "--provider", &self.provider),
            ("sandbox.image", "--image", &self.image),
            ("sandbox.snapshot", "--snapshot", &self.snapshot),
            ("sandbox.memory", "--memory", &self.memory),
            ("sandbox.cpus", "--cpus", &self.cpus),
            ("sandbox.disk", "--disk", &self.disk),
            ("sandbox.processes", "--processes", &self.processes),
            ("network.mode", "--network", &self.network),
            ("network.rate", "--network-rate", &self.network_rate),
            ("agent.permission_mode", "--permission-mode", &self.permission_mode),
            ("agent.effort", "--effort", &self.effort),
            ("engine.kind", "--engine", &self.engine),
        ] {
            flags.set_option(key, flag, value.as_ref());
        }
        flags.set_list("run.protect", "--protect", &self.protect);
        flags.set_list("run.capture", "--capture", &self.capture);
        flags.set_list("sandbox.env", "--env", &self.env);
        flags.set_list("sandbox.volumes", "--volume", &self.volume);
        flags.set_list("network.allow", "--allow", &self.allow);
        flags.set_list("agent.allowed_tools", "--allowed-tools", &self.allowed_tools);
        flags.set_option(
            "run.log_dir",
            "--log-dir",
            self.log_dir.as_ref().map(|p| p.display().to_string()).as_ref(),
        );
        for (key, flag, on) in [
            ("sandbox.strict", "--strict", self.strict),
            ("sandbox.disk_image", "--disk-image", self.disk_image),
            ("network.no_default_allow", "--no-default-allow", self.no_default_allow),
        ] {
            if on {
                flags.set(key, flag, "true");
            }
        }
    }

    pub fn waits(&self) -> bool {
        !self.no_wait
    }

    /// The run that these options and settings ask for. What only the core can judge is left to [`RunSpec::validate`].
    pub fn spec(&self, settings: &Settings, repo: RepoSpec, prompts: &[String]) -> Result<RunSpec> {
        let s = settings;
        let models = if self.model.is_empty() { vec![s.model.clone()] } else { self.model.clone() };
        let forks = self.deal(s, prompts, &models)?;
        check_secrets(s, &self.secret)?;
        let fork_budget = match &self.fork_budget {
            Some(text) => {
                Some(forkyard_core::Usd::parse(&crate::settings::Raw::Text(text.clone())).map_err(|fix| {
                    CliError::usage(format!("--fork-budget {text:?} can't be used")).hint(fix)
                })?)
            }
            None => None,
        };
        let root = root(s)?;
        let prompt_template = match &self.agent_prompt {
            Some(path) => Some(std::fs::read_to_string(path).map_err(|e| {
                CliError::usage(format!("--agent-prompt {}: {e}", path.display()))
                    .hint("name a readable text file")
            })?),
            None => None,
        };
        let until_verified = self
            .until_verified
            .map(|verified| UntilVerified { verified, max_forks: self.max_forks.unwrap_or(s.max_forks) });
        Ok(RunSpec {
            engine: s.engine,
            repo,
            forks,
            max_concurrent: s.max_concurrent,
            fork_timeout: s.timeout,
            budget: BudgetLimits { run: s.budget, fork: fork_budget },
            sandbox: SandboxPlan {
                provider: s.provider,
                root,
                limits: LimitsOverride {
                    memory_bytes: Some(s.memory.0),
                    cpus: Some(s.cpus),
                    disk_bytes: Some(s.disk.0),
                    processes: Some(s.processes),
                    network_bytes_per_s: s.network_rate.map(|r| r.0),
                },
                network: NetworkPlan {
                    mode: s.network,
                    allow: s.allow.clone(),
                    no_default_allow: s.no_default_allow,
                    secrets: self.secret.clone(),
                },
                env: s.sandbox_env.clone(),
                volumes: s.volumes.iter().map(|v| volume(v)).collect(),
                strict: s.strict,
                disk_image: s.disk_image,
            },
            setup: s.setup.clone(),
            verify: s.verify.clone(),
            score: s.score.clone(),
            protect: s.protect.clone(),
            linger: s.linger,
            keep: self.keep,
            until_verified,
            max_turns: s.max_turns,
            agent: AgentPlan {
                permission_mode: Some(s.permission_mode.show()),
                allowed_tools: s.allowed_tools.clone(),
                disallowed_tools: self.disallowed_tools.clone(),
                prompt_template,
                max_tool_calls: Some(s.max_tool_calls),
                effort: s.effort,
                max_output_tokens: Some(s.max_output_tokens),
                in_sandbox: self.in_sandbox,
            },
        })
    }

    /// Every prompt meets every model; more forks than pairs go round again.
    fn deal(&self, s: &Settings, prompts: &[String], models: &[String]) -> Result<Vec<ForkSpec>> {
        let pairs = prompts.len() * models.len();
        let sandboxes = self.sandbox.len();
        let least = pairs.max(sandboxes);
        let count = if self.forks.is_some() { s.forks as usize } else { least.max(s.forks as usize) };
        if count < least {
            return Err(CliError::usage(format!(
                "--forks {count}: {} prompts, {} models and {sandboxes} sandboxes need at least {least}",
                prompts.len(),
                models.len()
            ))
            .hint(format!("write --forks {least}, or leave it out")));
        }
        Ok((0..count)
            .map(|n| {
                let prompt = &prompts[n % prompts.len()];
                ForkSpec {
                    prompt: match &s.prompt_prefix {
                        Some(prefix) => format!("{prefix}\n\n{prompt}"),
                        None => prompt.clone(),
                    },
                    model: models[n / prompts.len() % models.len()].clone(),
                    capture: s.capture.clone(),
                    parent: (sandboxes > 0).then(|| self.sandbox[n % sandboxes].clone()),
                    ..ForkSpec::default()
                }
            })
            .collect())
    }
}

/// What sandboxes start from.
pub fn root(s: &Settings) -> Result<Root> {
    match (&s.image, &s.snapshot) {
        (_, Some(id)) => Ok(Root::Snapshot(SnapshotId::new(id.clone())?)),
        (Some(name), None) => image(s, s.provider, name),
        (None, None) => Ok(Root::Default),
    }
}

/// An image as its user names it for this provider's sandboxes, which may be a folder of this machine.
pub fn image(s: &Settings, provider: ProviderKind, name: &str) -> Result<Root> {
    let Some(dir) = name.strip_prefix("dir:") else { return Ok(Root::Image(name.into())) };
    if provider != ProviderKind::Local {
        return Err(CliError::usage(format!(
            "--image {name}: only local sandboxes take a folder as their root"
        ))
        .hint("use --provider local, or name an image"));
    }
    match &s.remote_url {
        // Whoever asks a server for it refuses it.
        Some(_) => Ok(Root::Directory(dir.into())),
        None => Ok(Root::Directory(folder(dir)?)),
    }
}

/// What a Docker sandbox is made of if nobody says; None: the provider's own. An archive is only for whom it was named.
pub fn docker_image(s: &Settings) -> Option<String> {
    let local = ["dir:", "archive:", "oci:"];
    s.image.clone().filter(|image| !local.iter().any(|kind| image.starts_with(kind)))
}

/// As the provider wants it: whole.
fn folder(dir: &str) -> Result<String> {
    let named = |why: String| {
        CliError::usage(format!("--image dir:{dir}: {why}"))
            .hint("name a folder that is there, such as dir:/srv/root")
    };
    let path = std::path::Path::new(dir).canonicalize().map_err(|e| named(e.to_string()))?;
    if !path.is_dir() {
        return Err(named("it is not a folder".into()));
    }
    path.into_os_string().into_string().map_err(|_| named("its path is not UTF-8".into()))
}

/// Whether the configuration has all that `--secret` names.
pub fn check_secrets(s: &Settings, names: &[String]) -> Result<()> {
    // A server has its own.
    match names.iter().find(|name| s.remote_url.is_none() && !s.tables.secrets.contains_key(*name)) {
        Some(name) => Err(CliError::usage(format!("--secret {name}: there is no such secret"))
            .hint(format!("write a table [secrets.{name}] into config.toml"))),
        None => Ok(()),
    }
}

/// `HOST:PATH[:rw]`; the settings have checked its form.
pub fn volume(text: &str) -> Volume {
    let mut parts = text.split(':');
    let mut next = || parts.next().unwrap_or_default().to_string();
    let (host_path, path, mode) = (next(), next(), next());
    Volume { host_path, path, writable: mode == "rw" }
}
