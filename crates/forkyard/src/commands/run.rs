use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use clap::Args;
use forkyard_core::sandbox::{LimitsOverride, Root};
use forkyard_core::spec::{ForkSpec, RunSpec};
use forkyard_core::{SandboxId, SnapshotId};
use serde::Deserialize;

use super::fork::{repo_spec, start};
use super::run_options::{RunOptions, image};
use crate::cli::Global;
use crate::error::{CliError, Result};
use crate::exit::Exit;
use crate::output::Output;
use crate::runs::with_place_flags;
use crate::settings::{ByteSize, Raw, Settings, Value};

#[derive(Debug, Clone, Args)]
pub struct RunArgs {
    /// A TOML or YAML file; `-` reads TOML from standard input.
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// Options win over what the file says for all forks.
    #[command(flatten)]
    pub options: RunOptions,
}

/// A number or a text: `forks = 3` and `budget = "$5"` alike.
#[derive(Debug, Clone, Deserialize)]
#[serde(untagged)]
enum Scalar {
    Text(String),
    Whole(i64),
    Number(f64),
}

impl Scalar {
    fn text(&self) -> String {
        match self {
            Scalar::Text(t) => t.clone(),
            Scalar::Whole(n) => n.to_string(),
            Scalar::Number(n) => n.to_string(),
        }
    }
}

/// `prompt = "a"` and `prompt = ["a", "b"]` alike.
#[derive(Debug, Clone, Deserialize)]
#[serde(untagged, expecting = "expected a text or a list of texts")]
enum Texts {
    One(String),
    Many(Vec<String>),
}

impl Default for Texts {
    fn default() -> Texts {
        Texts::Many(vec![])
    }
}

impl Texts {
    fn list(&self) -> Vec<String> {
        match self {
            Texts::One(text) => vec![text.clone()],
            Texts::Many(texts) => texts.clone(),
        }
    }
}

/// The options of `fork` by their long names, and forks that differ.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct RunFile {
    repo: Option<String>,
    branch: Option<String>,
    dirty: bool,
    prompt: Texts,
    model: Texts,
    forks: Option<Scalar>,
    max_concurrent: Option<Scalar>,
    timeout: Option<Scalar>,
    budget: Option<Scalar>,
    fork_budget: Option<Scalar>,
    max_turns: Option<Scalar>,
    until_verified: Option<u32>,
    max_forks: Option<u32>,
    setup: Option<String>,
    verify: Option<String>,
    score: Option<String>,
    protect: Vec<String>,
    capture: Vec<String>,
    provider: Option<String>,
    image: Option<String>,
    snapshot: Option<String>,
    sandbox: Vec<SandboxId>,
    env: BTreeMap<String, Scalar>,
    volumes: Vec<String>,
    strict: bool,
    disk_image: bool,
    memory: Option<Scalar>,
    cpus: Option<Scalar>,
    disk: Option<Scalar>,
    processes: Option<Scalar>,
    network: Option<String>,
    allow: Vec<String>,
    no_default_allow: bool,
    network_rate: Option<Scalar>,
    secrets: Vec<String>,
    allowed_tools: Vec<String>,
    disallowed_tools: Vec<String>,
    permission_mode: Option<String>,
    effort: Option<String>,
    in_sandbox: bool,
    agent_prompt: Option<PathBuf>,
    log_dir: Option<PathBuf>,
    engine: Option<String>,
    linger: Option<Scalar>,
    keep: bool,
    fork: Vec<ForkFile>,
}

/// What one fork has of its own.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct ForkFile {
    name: Option<String>,
    prompt: Option<String>,
    model: Option<String>,
    system_prompt: Option<String>,
    image: Option<String>,
    snapshot: Option<SnapshotId>,
    sandbox: Option<SandboxId>,
    memory: Option<Scalar>,
    cpus: Option<f64>,
    disk: Option<Scalar>,
    processes: Option<u32>,
    capture: Option<Vec<String>>,
}

impl RunArgs {
    pub fn run(&self, global: &Global, out: &mut Output<'_>) -> Result<Exit> {
        let file = self.read()?;
        let mut options = self.options.clone();
        file.fill(&mut options);
        let mut flags = global.flags()?;
        options.add_to(&mut flags);
        // A repository's path is meant from the file that names it.
        let near = self.file.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let here = if file.repo.is_some() { near.canonicalize()? } else { std::env::current_dir()? };
        with_place_flags(global, flags, async |place| {
            let spec = file.spec(&options, place.settings(), &here)?;
            start(place, global, spec, &options, out).await
        })
    }

    fn read(&self) -> Result<RunFile> {
        let shown = self.file.display().to_string();
        let wrong = |e: String| {
            CliError::usage(format!("{shown}: {e}")).hint(
                "names are those of `forkyard fork --help`; each [[fork]] may have its own prompt and model",
            )
        };
        let text = if self.file == Path::new("-") {
            std::io::read_to_string(std::io::stdin())
        } else {
            std::fs::read_to_string(&self.file)
        };
        let text = text.map_err(|e| CliError::usage(format!("{shown}: {e}")).hint("name a readable file"))?;
        let yaml = self.file.extension().is_some_and(|e| e == "yaml" || e == "yml");
        if yaml {
            serde_norway::from_str(&text).map_err(|e| wrong(e.to_string()))
        } else {
            toml::from_str(&text).map_err(|e| wrong(e.to_string()))
        }
    }
}

impl RunFile {
    /// Where the command line says nothing.
    fn fill(&self, o: &mut RunOptions) {
        let text = |s: &Option<Scalar>| s.as_ref().map(Scalar::text);
        for (option, value) in [
            (&mut o.max_concurrent, text(&self.max_concurrent)),
            (&mut o.timeout, text(&self.timeout)),
            (&mut o.budget, text(&self.budget)),
            (&mut o.fork_budget, text(&self.fork_budget)),
            (&mut o.max_turns, text(&self.max_turns)),
            (&mut o.setup, self.setup.clone()),
            (&mut o.verify, self.verify.clone()),
            (&mut o.score, self.score.clone()),
            (&mut o.provider, self.provider.clone()),
            (&mut o.image, self.image.clone()),
            (&mut o.snapshot, self.snapshot.clone()),
            (&mut o.network_rate, text(&self.network_rate)),
            (&mut o.engine, self.engine.clone()),
            (&mut o.memory, text(&self.memory)),
            (&mut o.cpus, text(&self.cpus)),
            (&mut o.disk, text(&self.disk)),
            (&mut o.processes, text(&self.processes)),
            (&mut o.network, self.network.clone()),
            (&mut o.permission_mode, self.permission_mode.clone()),
            (&mut o.effort, self.effort.clone()),
            (&mut o.linger, text(&self.linger)),
            (&mut o.forks, text(&self.forks)),
        ] {
            if option.is_none() {
                *option = value;
            }
        }
        let env: Vec<String> = self.env.iter().map(|(k, v)| format!("{k}={}", v.text())).collect();
        for (option, value) in [
            (&mut o.env, &env),
            (&mut o.volume, &self.volumes),
            (&mut o.secret, &self.secrets),
            (&mut o.protect, &self.protect),
            (&mut o.capture, &self.capture),
            (&mut o.allow, &self.allow),
            (&mut o.allowed_tools, &self.allowed_tools),
            (&mut o.disallowed_tools, &self.disallowed_tools),
        ] {
            if option.is_empty() {
                option.clone_from(value);
            }
        }
        for (option, value) in [(&mut o.agent_prompt, &self.agent_prompt), (&mut o.log_dir, &self.log_dir)] {
            if option.is_none() {
                option.clone_from(value);
            }
        }
        if o.sandbox.is_empty() {
            o.sandbox.clone_from(&self.sandbox);
        }
        o.strict |= self.strict;
        o.disk_image |= self.disk_image;
        o.no_default_allow |= self.no_default_allow;
        if o.model.is_empty() {
            o.model = self.model.list();
        }
        o.until_verified = o.until_verified.or(self.until_verified);
        o.max_forks = o.max_forks.or(self.max_forks);
        o.keep |= self.keep;
        o.in_sandbox |= self.in_sandbox;
    }

    fn spec(&self, options: &RunOptions, settings: &Settings, here: &Path) -> Result<RunSpec> {
        let repo = repo_spec(self.repo.as_deref(), self.branch.clone(), self.dirty, here)?;
        let mut prompts = self.prompt.list();
        if prompts.is_empty() {
            prompts.extend(self.fork.iter().find_map(|f| f.prompt.clone()));
        }
        if prompts.is_empty() {
            return Err(CliError::usage("the file has no prompt").hint("write prompt = \"what to do\""));
        }
        let mut spec = options.spec(settings, repo, &prompts)?;
        if self.fork.is_empty() {
            return Ok(spec);
        }
        if options.forks.is_some() {
            return Err(CliError::usage("`forks` and [[fork]] contradict each other")
                .hint("leave `forks` out: every [[fork]] is one"));
        }
        // Sandboxes are dealt out to the forks, as everywhere.
        let like = spec.forks.clone();
        spec.forks = self
            .fork
            .iter()
            .enumerate()
            .map(|(i, f)| f.spec(i, &like[i % like.len()], !self.prompt.list().is_empty(), settings))
            .collect::<Result<_>>()?;
        Ok(spec)
    }
}

impl ForkFile {
    fn spec(&self, i: usize, like: &ForkSpec, has_prompt: bool, settings: &Settings) -> Result<ForkSpec> {
        if self.prompt.is_none() && !has_prompt {
            return Err(CliError::usage(format!("fork[{i}] has no prompt"))
                .hint("give it one, or write one for all forks at the top"));
        }
        let bytes = |name: &str, value: &Option<Scalar>| match value {
            Some(v) => ByteSize::parse(&Raw::Text(v.text()))
                .map(|b| Some(b.0))
                .map_err(|fix| CliError::usage(format!("fork[{i}].{name} can't be used")).hint(fix)),
            None => Ok(None),
        };
        let own = [self.image.is_some(), self.snapshot.is_some(), self.sandbox.is_some()];
        if own.iter().filter(|given| **given).count() > 1 {
            return Err(CliError::usage(format!(
                "fork[{i}] has more than one of image, snapshot and sandbox"
            ))
            .hint("leave one: it is what the fork starts from"));
        }
        let root = match (&self.image, &self.snapshot) {
            (Some(name), _) => Some(image(settings, settings.provider, name)?),
            (None, Some(id)) => Some(Root::Snapshot(id.clone())),
            (None, None) => None,
        };
        // What a fork says of its own start goes before what is said for all.
        let parent = if root.is_some() { None } else { self.sandbox.clone().or_else(|| like.parent.clone()) };
        Ok(ForkSpec {
            root,
            parent,
            name: self.name.clone(),
            prompt: self.prompt.clone().unwrap_or_else(|| like.prompt.clone()),
            model: self.model.clone().unwrap_or_else(|| like.model.clone()),
            system_prompt: self.system_prompt.clone(),
            limits: LimitsOverride {
                memory_bytes: bytes("memory", &self.memory)?,
                cpus: self.cpus,
                disk_bytes: bytes("disk", &self.disk)?,
                processes: self.processes,
                network_bytes_per_s: None,
            },
            capture: self.capture.clone().unwrap_or_else(|| like.capture.clone()),
        })
    }
}
