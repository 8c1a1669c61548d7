use std::collections::BTreeMap;
use std::sync::Arc;

use clap::Args;
use forkyard_core::sandbox::LimitsOverride;
use forkyard_core::{Attempt, SandboxId, SnapshotId};
use forkyard_engine::sandboxes::{Sandboxes, is_own};
use forkyard_sandbox::{
    ErrorKind, Labels, Lifetime, Limits, NetworkSpec, Provider, Sandbox, SandboxSpec, SnapshotMode, owner,
};
use serde_json::json;

use super::exec::{Asked, HowArgs, not_started, run_inside};
use super::stream::Signals;
use super::way::Way;
use super::{find, not_reached, observe};
use crate::commands::cleanup::duration;
use crate::commands::run_options::{check_secrets, root, volume};
use crate::error::{CliError, Result};
use crate::exit::Exit;
use crate::output::Output;
use crate::place::Place;
use crate::settings::{ByteSize, Flags, Raw, Settings, Value};
use crate::yard::{on_record, random_text};

// Not a doc comment, which would become the text of the command that it is a part of.
// How a sandbox is made. Values are checked with the settings that they override.
#[derive(Debug, Clone, Default, Args)]
pub struct MakeOptions {
    /// Who makes it: local or docker [default: local].
    #[arg(long, value_name = "NAME")]
    pub provider: Option<String>,
    /// Image to start from: a registry's name, `oci:PATH` (a layout), `archive:PATH` (what `docker save` wrote) or `dir:PATH` (a
    /// folder of this machine as the root, which stays as it is; local only).
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
    /// Leave the default list of hosts out.
    #[arg(long)]
    pub no_default_allow: bool,
    /// Bytes that it may send and receive a second, such as 1MiB [default: no limit].
    #[arg(long, value_name = "RATE")]
    pub network_rate: Option<String>,
    /// A secret of the configuration that its requests may carry.
    #[arg(long, value_name = "NAME")]
    pub secret: Vec<String>,
    /// A word to find it by, for `sandbox list --label`.
    #[arg(long, value_name = "KEY=VALUE")]
    pub label: Vec<String>,
    /// Refuse a limit that the kernel itself can't enforce here.
    #[arg(long)]
    pub strict: bool,
    /// Give it a disk of its own, whose limit the kernel keeps (as root).
    #[arg(long)]
    pub disk_image: bool,
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
            ("network.rate", "--network-rate", &self.network_rate),
        ] {
            flags.set_option(key, flag, value.as_ref());
        }
        flags.set_list("sandbox.env", "--env", &self.env);
        flags.set_list("sandbox.volumes", "--volume", &self.volume);
        flags.set_list("network.allow", "--allow", &self.allow);
        if self.strict {
            flags.set("sandbox.strict", "--strict", "true");
        }
        if self.no_default_allow {
            flags.set("network.no_default_allow", "--no-default-allow", "true");
        }
        if self.disk_image {
            flags.set("sandbox.disk_image", "--disk-image", "true");
        }
    }

    fn spec(&self, s: &Settings) -> Result<SandboxSpec> {
        check_secrets(s, &self.secret)?;
        let root = root(s)?;
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
                secrets: self.secret.clone(),
                internal: false,
            },
            env: s.sandbox_env.clone(),
            volumes: s.volumes.iter().map(|v| volume(v)).collect(),
            labels: labels(&self.label)?,
            lifetime: Lifetime(duration("--lifetime", &self.lifetime)?),
            strict: s.strict,
            disk_image: s.disk_image,
        })
    }

    async fn make(
        &self,
        settings: &Settings,
        sandboxes: &Sandboxes,
        id: &SandboxId,
        spec: &SandboxSpec,
    ) -> Result<(Arc<dyn Provider>, Arc<dyn Sandbox>)> {
        let provider = sandboxes.provider(settings.provider)?.clone();
        let sandbox = provider.create(id, Attempt(1), spec).await.map_err(|e| match e.kind {
            // What it was to be made of, which somebody wrote down.
            ErrorKind::NotFound => CliError { exit: Exit::Usage, ..e.into() },
            _ => e.into(),
        })?;
        Ok((provider, sandbox))
    }
}

/// Labels of the command line.
pub fn labels(given: &[String]) -> Result<Labels> {
    let pair = |text: &String| match text.split_once('=') {
        Some((key, _)) if is_own(key) => Err(CliError::usage(format!("--label {text:?} can't be used"))
            .hint(format!("{key} is a label of Forkyard's own: choose another"))),
        Some((key, value)) if !key.is_empty() => Ok((key.to_string(), value.to_string())),
        Some(_) | None => {
            Err(CliError::usage(format!("--label {text:?} can't be used")).hint("write KEY=VALUE"))
        }
    };
    given.iter().map(pair).collect()
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
        let id = match &self.name {
            Some(id) => {
                refuse_taken(s, sandboxes, id).await?;
                id.clone()
            }
            None => new_id()?,
        };
        let (_, sandbox) = self.options.make(s, sandboxes, &id, &self.options.spec(s)?).await?;
        if out.json {
            let info = sandbox.info().await?;
            out.json(&json!({ "schema": "forkyard.sandbox/1", "sandbox": info }))?;
        } else {
            out.line(sandbox.id().as_str())?;
        }
        Ok(Exit::Success)
    }
}

/// A name means one sandbox, whoever has it.
async fn refuse_taken(s: &Settings, sandboxes: &Sandboxes, id: &SandboxId) -> Result<()> {
    let elsewhere = s.remote_url.is_none() && on_record(s, id);
    match sandboxes.find(id).await {
        Ok(_) => {}
        Err(e) if e.kind == ErrorKind::NotFound && !elsewhere => return Ok(()),
        Err(e) if e.kind == ErrorKind::NotFound => {}
        Err(e) => return Err(e.into()),
    }
    Err(CliError::usage(format!("there is a sandbox {id} already"))
        .hint(format!("choose another --name, or remove it with: forkyard sandbox rm {id}")))
}

#[derive(Debug, Clone, Args)]
pub struct RunArgs {
    #[command(flatten)]
    pub options: MakeOptions,
    /// Folder inside [default: /workspace].
    #[arg(long, value_name = "DIR")]
    pub cwd: Option<String>,
    #[command(flatten)]
    pub how: HowArgs,
    /// Keep the sandbox.
    #[arg(long)]
    pub keep: bool,
    /// The command and its arguments; one that begins with a dash comes after `--`.
    #[arg(value_name = "COMMAND", required = true, trailing_var_arg = true)]
    pub command: Vec<String>,
}

impl RunArgs {
    pub async fn run(&self, s: &Settings, sandboxes: &Sandboxes, out: &mut Output<'_>) -> Result<Exit> {
        let (command, tty) = (&self.command, !self.how.no_tty);
        let (cwd, timeout) = (self.cwd.clone(), self.how.timeout()?);
        let asked = Asked { command, cwd, env: BTreeMap::new(), timeout, tty };
        let mut spec = self.options.spec(s)?;
        if !self.keep {
            // So that it goes even if we can't see to it.
            spec.labels.extend([owner::mark()]);
        }
        let id = new_id()?;
        let mut signals = Signals::take()?;
        let made = tokio::select! {
            made = self.options.make(s, sandboxes, &id, &spec) => made,
            word = signals.recv() => {
                sandboxes.provider(s.provider)?.destroy(&id).await?;
                return Ok(word.exit());
            }
        };
        let (provider, sandbox) = made?;
        let way = (s.remote_url.is_none() && spec.network.has_proxy()).then(|| Way::of_maker(&s.home, &id));
        let ended = run_inside(&*sandbox, asked, &mut signals, out).await;
        drop(way);
        if self.keep {
            eprintln!("{id} is kept; remove it with: forkyard sandbox rm {id}");
        } else {
            provider.destroy(&id).await?;
        }
        Ok(ended.map_err(|e| not_started(e, command))?.exit())
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
        let sandbox = observe(place, &self.sandbox).await?;
        let id = match &self.name {
            Some(id) => {
                refuse_snapshot(place, id).await?;
                id.clone()
            }
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

/// A name means one snapshot, whoever has it.
pub async fn refuse_snapshot(place: &dyn Place, id: &SnapshotId) -> Result<()> {
    if place.sandboxes().snapshots().await?.iter().all(|s| s.id != *id) {
        return Ok(());
    }
    Err(CliError::usage(format!("there is a snapshot {id} already"))
        .hint(format!("choose another --name, or remove it with: forkyard sandbox snapshots --remove {id}")))
}

#[derive(Debug, Clone, Args)]
pub struct ForkArgs {
    /// The sandbox.
    #[arg(value_name = "SANDBOX")]
    pub sandbox: SandboxId,
    /// How many.
    #[arg(short = 'n', long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub count: u32,
    /// Their memory [default: as their parent's, like the other limits].
    #[arg(long, value_name = "SIZE")]
    pub memory: Option<String>,
    /// Their processors.
    #[arg(long, value_name = "N")]
    pub cpus: Option<String>,
    /// Their disk.
    #[arg(long, value_name = "SIZE")]
    pub disk: Option<String>,
    /// Their processes.
    #[arg(long, value_name = "N")]
    pub processes: Option<String>,
    /// Bytes that each may send and receive a second, such as 1MiB.
    #[arg(long, value_name = "RATE")]
    pub network_rate: Option<String>,
    /// They end by themselves after this time.
    #[arg(long, value_name = "DURATION", default_value = "2h")]
    pub lifetime: String,
}

/// What a flag that is no setting says.
fn value<V: Value>(flag: &str, text: Option<&String>) -> Result<Option<V>> {
    let Some(text) = text else { return Ok(None) };
    let parsed = V::parse(&Raw::Text(text.clone()));
    parsed.map(Some).map_err(|fix| CliError::usage(format!("{flag} {text:?} can't be used")).hint(fix))
}

impl ForkArgs {
    fn limits(&self) -> Result<LimitsOverride> {
        let bytes = |flag, text: &Option<String>| {
            value::<ByteSize>(flag, text.as_ref()).map(|size| size.map(|size| size.0))
        };
        Ok(LimitsOverride {
            memory_bytes: bytes("--memory", &self.memory)?,
            cpus: value("--cpus", self.cpus.as_ref())?,
            disk_bytes: bytes("--disk", &self.disk)?,
            processes: value("--processes", self.processes.as_ref())?,
            network_bytes_per_s: bytes("--network-rate", &self.network_rate)?,
        })
    }

    pub async fn run(&self, place: &dyn Place, out: &mut Output<'_>) -> Result<Exit> {
        let (_, info) = find(place, &self.sandbox).await?;
        let (lifetime, limits) = (Lifetime(duration("--lifetime", &self.lifetime)?), self.limits()?);
        let snapshot = SnapshotId::new(format!("n{}", random_text(9)))?;
        let names = (0..self.count).map(|_| new_id()).collect::<Result<Vec<_>>>()?;
        place.record("sandbox.fork", self.sandbox.as_str(), json!({ "children": names })).await?;
        let made = place.sandboxes().fork(&self.sandbox, &snapshot, &names, lifetime, limits).await;
        let made = made.map_err(|e| not_reached(e, &info))?;
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
