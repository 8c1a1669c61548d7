use std::sync::Arc;

use clap::Args;
use forkyard_core::{Attempt, Millis, SandboxId, SnapshotId};
use forkyard_engine::sandboxes::Sandboxes;
use forkyard_sandbox::{
    Labels, Lifetime, Limits, NetworkSpec, Provider, Root, Sandbox, SandboxSpec, SnapshotMode,
};
use serde_json::json;

use super::exec::{run_inside, status};
use super::{attach, find};
use crate::commands::cleanup::duration;
use crate::commands::run_options::volume;
use crate::error::Result;
use crate::exit::Exit;
use crate::output::Output;
use crate::place::Place;
use crate::settings::{Flags, Settings};
use crate::yard::random_text;

// Not a doc comment, which would become the text of the command that it is a part of.
// How a sandbox is made. Values are checked with the settings that they override.
#[derive(Debug, Clone, Default, Args)]
pub struct MakeOptions {
    /// Who makes it: local or docker [default: local].
    #[arg(long, value_name = "NAME")]
    pub provider: Option<String>,
    /// Image to start from.
    #[arg(long, value_name = "IMAGE", conflicts_with = "snapshot")]
    pub image: Option<String>,
    /// Snapshot to start from.
    #[arg(long, value_name = "ID")]
    pub snapshot: Option<String>,
    /// Memory [default: 4GiB].
    #[arg(long, value_name = "SIZE")]
    pub memory: Option<String>,
    /// Processors [default: 2].
    #[arg(long, value_name = "N")]
    pub cpus: Option<String>,
    /// Disk [default: 8GiB].
    #[arg(long, value_name = "SIZE")]
    pub disk: Option<String>,
    /// Processes [default: 512].
    #[arg(long, value_name = "N")]
    pub processes: Option<String>,
    /// A variable inside.
    #[arg(long, value_name = "NAME=VALUE")]
    pub env: Vec<String>,
    /// A folder of the host: HOST:PATH (read-only) or HOST:PATH:rw.
    #[arg(long, value_name = "HOST:PATH")]
    pub volume: Vec<String>,
    /// What it can reach: none, isolated or bridge [default: isolated].
    #[arg(long, value_name = "MODE")]
    pub network: Option<String>,
    /// A host that it may reach besides the default list.
    #[arg(long, value_name = "HOST")]
    pub allow: Vec<String>,
    /// Refuse a limit that the kernel itself can't enforce here.
    #[arg(long)]
    pub strict: bool,
    /// It ends by itself after this time, whatever happens.
    #[arg(long, value_name = "DURATION", default_value = "2h")]
    pub lifetime: String,
}

impl MakeOptions {
    pub fn add_to(&self, flags: &mut Flags) {
        for (key, flag, value) in [
            ("sandbox.provider", "--provider", &self.provider),
            ("sandbox.image", "--image", &self.image),
            ("sandbox.snapshot", "--snapshot", &self.snapshot),
            ("sandbox.memory", "--memory", &self.memory),
            ("sandbox.cpus", "--cpus", &self.cpus),
            ("sandbox.disk", "--disk", &self.disk),
            ("sandbox.processes", "--processes", &self.processes),
            ("network.mode", "--network", &self.network),
        ] {
            flags.set_option(key, flag, value.as_ref());
        }
        flags.set_list("sandbox.env", "--env", &self.env);
        flags.set_list("sandbox.volumes", "--volume", &self.volume);
        flags.set_list("network.allow", "--allow", &self.allow);
        if self.strict {
            flags.set("sandbox.strict", "--strict", "true");
        }
    }

    fn spec(&self, s: &Settings) -> Result<SandboxSpec> {
        let root = match (&s.image, &s.snapshot) {
            (_, Some(id)) => Root::Snapshot(SnapshotId::new(id.clone())?),
            (Some(image), None) => Root::Image(image.clone()),
            (None, None) => Root::Default,
        };
        let mut limits = Limits {
            memory_bytes: s.memory.0,
            cpus: s.cpus,
            disk_bytes: s.disk.0,
            processes: s.processes,
            ..Limits::default()
        };
        if let Some(rate) = s.network_rate {
            limits.network_bytes_per_s = Some(rate.0);
        }
        Ok(SandboxSpec {
            root,
            limits,
            network: NetworkSpec {
                mode: s.network,
                allow: s.allow.clone(),
                no_default_allow: s.no_default_allow,
                secrets: vec![],
                internal: false,
            },
            env: s.sandbox_env.clone(),
            volumes: s.volumes.iter().map(|v| volume(v)).collect(),
            labels: Labels::new(),
            lifetime: Lifetime(duration("--lifetime", &self.lifetime)?),
            strict: s.strict,
        })
    }

    async fn make(
        &self,
        settings: &Settings,
        sandboxes: &Sandboxes,
        name: Option<SandboxId>,
    ) -> Result<(Arc<dyn Provider>, Arc<dyn Sandbox>)> {
        let provider = sandboxes.provider(settings.provider)?.clone();
        let spec = self.spec(settings)?;
        let id = match name {
            Some(id) => id,
            None => new_id()?,
        };
        let sandbox = provider.create(&id, Attempt(1), &spec).await?;
        Ok((provider, sandbox))
    }
}

fn new_id() -> Result<SandboxId> {
    Ok(SandboxId::new(format!("s{}", random_text(9)))?)
}

#[derive(Debug, Clone, Args)]
pub struct CreateArgs {
    /// Its name [default: one that nobody has].
    #[arg(long, value_name = "ID")]
    pub name: Option<SandboxId>,
    #[command(flatten)]
    pub options: MakeOptions,
}

impl CreateArgs {
    pub async fn run(&self, s: &Settings, sandboxes: &Sandboxes, out: &mut Output<'_>) -> Result<Exit> {
        let (_, sandbox) = self.options.make(s, sandboxes, self.name.clone()).await?;
        if out.json {
            let info = sandbox.info().await?;
            out.json(&json!({ "schema": "forkyard.sandbox/1", "sandbox": info }))?;
        } else {
            out.line(sandbox.id().as_str())?;
        }
        Ok(Exit::Success)
    }
}

#[derive(Debug, Clone, Args)]
pub struct RunArgs {
    #[command(flatten)]
    pub options: MakeOptions,
    /// Time that the command may take.
    #[arg(short, long, value_name = "DURATION")]
    pub timeout: Option<String>,
    /// Keep the sandbox.
    #[arg(long)]
    pub keep: bool,
    /// The command and its arguments.
    #[arg(value_name = "COMMAND", required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    pub command: Vec<String>,
}

impl RunArgs {
    pub async fn run(&self, s: &Settings, sandboxes: &Sandboxes, out: &mut Output<'_>) -> Result<Exit> {
        let timeout = self.timeout.as_deref().map(|t| duration("--timeout", t)).transpose()?;
        let (provider, sandbox) = self.options.make(s, sandboxes, None).await?;
        let id = sandbox.id().clone();
        let result = run_inside(&*sandbox, &self.command, None, timeout.map(Millis::as_duration), out).await;
        if self.keep {
            eprintln!("{id} is kept; remove it with: forkyard sandbox rm {id}");
        } else {
            provider.destroy(&id).await?;
        }
        Ok(status(&result?))
    }
}

#[derive(Debug, Clone, Args)]
pub struct SnapshotArgs {
    /// The sandbox.
    #[arg(value_name = "SANDBOX")]
    pub sandbox: SandboxId,
    /// The snapshot's name [default: one that nobody has].
    #[arg(long, value_name = "ID")]
    pub name: Option<SnapshotId>,
}

impl SnapshotArgs {
    pub async fn run(&self, place: &dyn Place, out: &mut Output<'_>) -> Result<Exit> {
        let sandbox = attach(place, &self.sandbox).await?;
        let id = match &self.name {
            Some(id) => id.clone(),
            None => SnapshotId::new(format!("n{}", random_text(9)))?,
        };
        place.record("sandbox.snapshot", self.sandbox.as_str(), json!({ "snapshot": id })).await?;
        let info = sandbox.snapshot(&id, &Labels::new()).await?;
        if out.json {
            out.json(&json!({ "schema": "forkyard.snapshot/1", "snapshot": info }))?;
        } else {
            let how = match info.mode {
                SnapshotMode::Sealed => "",
                SnapshotMode::Copied => " (copied while commands ran)",
            };
            out.line(&format!("{id}{how}"))?;
        }
        Ok(Exit::Success)
    }
}

#[derive(Debug, Clone, Args)]
pub struct ForkArgs {
    /// The sandbox.
    #[arg(value_name = "SANDBOX")]
    pub sandbox: SandboxId,
    /// How many.
    #[arg(short = 'n', long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub count: u32,
    /// They end by themselves after this time.
    #[arg(long, value_name = "DURATION", default_value = "2h")]
    pub lifetime: String,
}

impl ForkArgs {
    pub async fn run(&self, place: &dyn Place, out: &mut Output<'_>) -> Result<Exit> {
        find(place, &self.sandbox).await?;
        let options = MakeOptions { lifetime: self.lifetime.clone(), ..MakeOptions::default() };
        let snapshot = SnapshotId::new(format!("n{}", random_text(9)))?;
        let made = (0..self.count).map(|_| new_id()).collect::<Result<Vec<_>>>()?;
        let spec = options.spec(place.settings())?;
        place.record("sandbox.fork", self.sandbox.as_str(), json!({ "children": made })).await?;
        place.sandboxes().fork(&self.sandbox, &snapshot, &made, spec).await?;
        if out.json {
            out.json(
                &json!({ "schema": "forkyard.sandbox_fork/1", "parent": self.sandbox, "sandboxes": made }),
            )?;
        } else {
            for id in &made {
                out.line(id.as_str())?;
            }
        }
        Ok(Exit::Success)
    }
}
