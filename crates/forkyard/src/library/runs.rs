//! Forks of a repository, each with an agent in it: started, followed, steered, and their results.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use forkyard_core::budget::BudgetLimits;
use forkyard_core::run::Command;
use forkyard_core::sandbox::{NetworkMode, ProviderKind, Root};
use forkyard_core::spec::{ForkSpec, RunSpec, UntilVerified};
use forkyard_core::view::{Progress, RunStatus, RunView};
use forkyard_core::{RunId, SandboxId, Usd};
use forkyard_engine::activities::{captured_key, is_url};
use forkyard_engine::git::MAX_OUTPUT_BYTES;
use forkyard_store::{RunQuery, Watch};
use tokio_util::sync::CancellationToken;

use super::error::Result;
use super::sandboxes::millis;
use crate::commands::add::{Like, add};
use crate::commands::fork::{check, repo_spec};
use crate::commands::message::send;
use crate::commands::run_options::{RunOptions, image};
use crate::commands::target::Target;
use crate::error::CliError;
use crate::follow::{drive_patiently, engine_error, store_error};
use crate::place::Place;
use crate::results::RunResult;
use crate::runs::{the_fork, the_run};
use crate::settings::Settings;
use crate::yard::Yard;

/// What is to be done to a repository, how often, and how it is judged. What is not said is taken from the settings.
#[derive(Debug, Clone, Default)]
pub struct Job {
    repo: String,
    prompts: Vec<String>,
    branch: Option<String>,
    dirty: bool,
    forks: Option<u32>,
    models: Vec<String>,
    each: Vec<ForkOptions>,
    max_concurrent: Option<u32>,
    timeout: Option<Duration>,
    budget: Option<f64>,
    fork_budget: Option<f64>,
    max_turns: Option<u32>,
    setup: Option<String>,
    verify: Option<String>,
    score: Option<String>,
    protect: Vec<String>,
    capture: Vec<String>,
    until_verified: Option<UntilVerified>,
    provider: Option<ProviderKind>,
    image: Option<String>,
    network: Option<NetworkMode>,
    allow: Vec<String>,
    sandboxes: Vec<String>,
    secrets: Vec<String>,
    keep: bool,
    pub(super) set: Vec<(String, String)>,
}

impl Job {
    /// `repo` is a URL, or a folder of a local repository.
    pub fn new(repo: impl Into<String>, prompt: impl Into<String>) -> Job {
        Job { repo: repo.into(), prompts: vec![prompt.into()], ..Job::default() }
    }
    /// One more prompt: several are dealt out to the forks.
    pub fn prompt(mut self, prompt: impl Into<String>) -> Job {
        self.prompts.push(prompt.into());
        self
    }
    /// Branch, tag or commit to start from; HEAD or the remote's default branch if not given.
    pub fn branch(mut self, branch: impl Into<String>) -> Job {
        self.branch = Some(branch.into());
        self
    }
    /// Carry uncommitted changes of a local repository.
    pub fn dirty(mut self, yes: bool) -> Job {
        self.dirty = yes;
        self
    }
    /// How many, 1 to 100.
    pub fn forks(mut self, forks: u32) -> Job {
        self.forks = Some(forks);
        self
    }
    /// Several are dealt out to the forks.
    pub fn model(mut self, model: impl Into<String>) -> Job {
        self.models.push(model.into());
        self
    }
    /// One fork that differs; with any of these, they are all the forks that there are.
    pub fn fork(mut self, fork: ForkOptions) -> Job {
        self.each.push(fork);
        self
    }
    /// Forks that work at the same time.
    pub fn max_concurrent(mut self, forks: u32) -> Job {
        self.max_concurrent = Some(forks);
        self
    }
    /// Time that a fork may take.
    pub fn timeout(mut self, timeout: Duration) -> Job {
        self.timeout = Some(timeout);
        self
    }
    /// Most that the run may cost, in dollars, all forks together.
    pub fn budget(mut self, dollars: f64) -> Job {
        self.budget = Some(dollars);
        self
    }
    /// Most that one fork may cost, in dollars.
    pub fn fork_budget(mut self, dollars: f64) -> Job {
        self.fork_budget = Some(dollars);
        self
    }
    pub fn max_turns(mut self, turns: u32) -> Job {
        self.max_turns = Some(turns);
        self
    }
    /// Command that prepares the base, once for all forks.
    pub fn setup(mut self, command: impl Into<String>) -> Job {
        self.setup = Some(command.into());
        self
    }
    /// Command that judges a result, in a sandbox of its own: exit status 0 is verified.
    pub fn verify(mut self, command: impl Into<String>) -> Job {
        self.verify = Some(command.into());
        self
    }
    /// Command whose last line of output is a number; higher ranks better.
    pub fn score(mut self, command: impl Into<String>) -> Job {
        self.score = Some(command.into());
        self
    }
    /// Files that are as in the base when a result is judged.
    pub fn protect(mut self, glob: impl Into<String>) -> Job {
        self.protect.push(glob.into());
        self
    }
    /// Files to bring back beside the diff.
    pub fn capture(mut self, glob: impl Into<String>) -> Job {
        self.capture.push(glob.into());
        self
    }
    /// Start more forks, up to `max_forks`, until this many are verified.
    pub fn until_verified(mut self, verified: u32, max_forks: u32) -> Job {
        self.until_verified = Some(UntilVerified { verified, max_forks });
        self
    }
    pub fn provider(mut self, provider: ProviderKind) -> Job {
        self.provider = Some(provider);
        self
    }
    /// What [`crate::SandboxConfig::image`] takes.
    pub fn image(mut self, image: impl Into<String>) -> Job {
        self.image = Some(image.into());
        self
    }
    pub fn network(mut self, mode: NetworkMode) -> Job {
        self.network = Some(mode);
        self
    }
    /// A host that sandboxes may reach besides the default list.
    pub fn allow(mut self, host: impl Into<String>) -> Job {
        self.allow.push(host.into());
        self
    }
    /// Forks work in children of these sandboxes, which are never changed or destroyed.
    pub fn sandbox(mut self, id: impl Into<String>) -> Job {
        self.sandboxes.push(id.into());
        self
    }
    /// A secret of `config.toml` that is put in on the way out, for the hosts that it is bound to.
    pub fn secret(mut self, name: impl Into<String>) -> Job {
        self.secrets.push(name.into());
        self
    }
    /// Any setting of docs/configuration.md for this run alone, such as `("sandbox.memory", "1GiB")`,
    /// `("sandbox.snapshot", "tools")`, `("run.linger", "5m")` or `("agent.allowed_tools", "Read,Bash")`.
    pub fn set(mut self, key: impl Into<String>, value: impl Into<String>) -> Job {
        self.set.push((key.into(), value.into()));
        self
    }
    /// Keep the sandboxes afterwards, until their deadline.
    pub fn keep(mut self, yes: bool) -> Job {
        self.keep = yes;
        self
    }

    fn spec(&self, settings: &Settings, here: &Path) -> Result<RunSpec> {
        let options = RunOptions {
            forks: self.forks.map(|n| n.to_string()),
            model: self.models.clone(),
            sandbox: self.sandboxes.iter().map(SandboxId::new).collect::<Result<_, _>>()?,
            secret: self.secrets.clone(),
            keep: self.keep,
            ..RunOptions::default()
        };
        let mut settings = settings.clone();
        settings.forks = self.forks.unwrap_or(settings.forks);
        settings.provider = self.provider.unwrap_or(settings.provider);
        if self.image.is_some() {
            (settings.image, settings.snapshot) = (self.image.clone(), None);
        }
        let repo = repo_spec(Some(&self.repo), self.branch.clone(), self.dirty, here)?;
        let mut spec = options.spec(&settings, repo, &self.prompts)?;
        let some = |to: &mut Option<String>, from: &Option<String>| {
            if from.is_some() {
                to.clone_from(from);
            }
        };
        some(&mut spec.setup, &self.setup);
        some(&mut spec.verify, &self.verify);
        some(&mut spec.score, &self.score);
        spec.protect.extend_from_slice(&self.protect);
        spec.max_concurrent = self.max_concurrent.unwrap_or(spec.max_concurrent);
        spec.fork_timeout = self.timeout.map_or(spec.fork_timeout, millis);
        spec.max_turns = self.max_turns.unwrap_or(spec.max_turns);
        spec.until_verified = self.until_verified;
        let budget = spec.budget;
        spec.budget = BudgetLimits {
            run: dollars("budget", self.budget)?.or(budget.run),
            fork: dollars("fork_budget", self.fork_budget)?.or(budget.fork),
        };
        spec.sandbox.network.mode = self.network.unwrap_or(spec.sandbox.network.mode);
        spec.sandbox.network.allow.extend_from_slice(&self.allow);
        for fork in &mut spec.forks {
            fork.capture.extend_from_slice(&self.capture);
        }
        if let (false, Some(like)) = (self.each.is_empty(), spec.forks.first().cloned()) {
            spec.forks = self.each.iter().map(|f| f.over(&like)).collect();
        }
        for fork in &mut spec.forks {
            if let Some(Root::Image(name)) = &fork.root {
                fork.root = Some(image(&settings, settings.provider, name)?);
            }
        }
        Ok(spec)
    }
}

fn dollars(field: &str, amount: Option<f64>) -> Result<Option<Usd>> {
    let Some(amount) = amount else { return Ok(None) };
    match Usd::from_dollars(amount) {
        Some(usd) => Ok(Some(usd)),
        None => Err(CliError::usage(format!("{field} = {amount} can't be used"))
            .hint("give dollars, from 0 to 1000000")
            .into()),
    }
}

/// What makes one fork differ from the others.
#[derive(Debug, Clone, Default)]
pub struct ForkOptions {
    spec: ForkSpec,
    prompt: Option<String>,
    model: Option<String>,
    capture: Vec<String>,
}

impl ForkOptions {
    pub fn new(name: impl Into<String>) -> ForkOptions {
        let spec = ForkSpec { name: Some(name.into()), ..ForkSpec::default() };
        ForkOptions { spec, ..ForkOptions::default() }
    }
    pub fn prompt(mut self, prompt: impl Into<String>) -> ForkOptions {
        self.prompt = Some(prompt.into());
        self
    }
    pub fn model(mut self, model: impl Into<String>) -> ForkOptions {
        self.model = Some(model.into());
        self
    }
    pub fn system_prompt(mut self, text: impl Into<String>) -> ForkOptions {
        self.spec.system_prompt = Some(text.into());
        self
    }
    pub fn memory_mb(mut self, mb: u64) -> ForkOptions {
        self.spec.limits.memory_bytes = Some(mb << 20);
        self
    }
    pub fn cpus(mut self, cpus: f64) -> ForkOptions {
        self.spec.limits.cpus = Some(cpus);
        self
    }
    pub fn disk_mb(mut self, mb: u64) -> ForkOptions {
        self.spec.limits.disk_bytes = Some(mb << 20);
        self
    }
    /// The image that this fork starts from: what [`crate::SandboxConfig::image`] takes.
    pub fn image(mut self, image: impl Into<String>) -> ForkOptions {
        self.spec.root = Some(Root::Image(image.into()));
        self
    }
    pub fn capture(mut self, glob: impl Into<String>) -> ForkOptions {
        self.capture.push(glob.into());
        self
    }

    fn over(&self, like: &ForkSpec) -> ForkSpec {
        ForkSpec {
            prompt: self.prompt.clone().unwrap_or_else(|| like.prompt.clone()),
            model: self.model.clone().unwrap_or_else(|| like.model.clone()),
            capture: like.capture.iter().chain(&self.capture).cloned().collect(),
            parent: like.parent.clone(),
            ..self.spec.clone()
        }
    }
}

/// A run, whoever drives it. Commands reach it through the store.
pub struct Run {
    yard: Arc<Yard>,
    id: RunId,
    watch: Watch,
    told: Option<Progress>,
    ended: bool,
}

impl Run {
    pub(super) async fn start(yard: Arc<Yard>, settings: &Settings, job: &Job) -> Result<Run> {
        let here = std::env::current_dir().map_err(CliError::from)?;
        let spec = job.spec(settings, &here)?;
        check(&yard, &spec).await?;
        let submitted = yard.steering().submit(&yard.engine, Yard::new_run_id(), spec, None).await;
        let id = submitted.map_err(engine_error)?;
        let run = Run::new(yard, id);
        run.drive();
        Ok(run)
    }

    pub(super) async fn open(yard: Arc<Yard>, id: &str) -> Result<Run> {
        let id = RunId::new(id)?;
        the_run(&*yard, &id).await?;
        Ok(Run::new(yard, id))
    }

    fn new(yard: Arc<Yard>, id: RunId) -> Run {
        Run { watch: yard.store.watch(Some(&id)), yard, id, told: None, ended: false }
    }

    /// Drives it in this process, if nobody else does.
    pub(super) fn drive(&self) {
        let (yard, id) = (self.yard.clone(), self.id.clone());
        tokio::spawn(async move {
            // It stays resumable; whoever waits for it sees that it has not ended.
            if let Err(e) = drive_patiently(&yard, &id, CancellationToken::new()).await {
                tracing::error!(run = %id, "driving failed: {}", e.message);
            }
        });
    }

    pub fn id(&self) -> &str {
        self.id.as_str()
    }

    /// How far it is.
    pub async fn progress(&self) -> Result<Progress> {
        Ok(self.view().await?.progress)
    }

    /// Waits until it has come further than what was told last; None at the end.
    pub async fn next(&mut self) -> Result<Option<Progress>> {
        loop {
            let view = self.view().await?;
            if self.told.as_ref() != Some(&view.progress) {
                self.told = Some(view.progress.clone());
                return Ok(Some(view.progress));
            }
            if self.ended || view.status == RunStatus::Ended {
                self.ended = true;
                return Ok(None);
            }
            self.watch.changed().await;
        }
    }

    /// Waits for the end: what came of it.
    pub async fn wait(&mut self) -> Result<RunResult> {
        while self.view().await?.status != RunStatus::Ended {
            self.watch.changed().await;
        }
        self.result().await
    }

    /// What it has come to so far.
    pub async fn result(&self) -> Result<RunResult> {
        Ok(RunResult::read(&*self.yard, &self.view().await?).await?)
    }

    /// What a fork changed, as a patch that `git apply` takes.
    pub async fn patch(&self, fork: u32) -> Result<Vec<u8>> {
        let o = self.yard.outcome(&self.view().await?, fork).await?;
        let git = &self.yard.git;
        Ok(git.patch(&o.repo, &o.base, &o.commit, MAX_OUTPUT_BYTES).await.map_err(CliError::from)?)
    }

    /// Brings a result into the run's repository as a new branch.
    pub async fn apply_as_branch(&self, fork: u32, branch: &str) -> Result<()> {
        let (view, git) = (self.view().await?, &self.yard.git);
        if is_url(&view.repo) {
            return Err(CliError::usage("the run's repository is a URL: it has no branches here")
                .hint("take the patch and apply it to a clone")
                .into());
        }
        let o = self.yard.outcome(&view, fork).await?;
        git.apply_branch(&o.repo, &o.base, &o.commit, &o.repo, branch).await.map_err(CliError::from)?;
        Ok(())
    }

    /// Files that were captured from a fork, by their path.
    pub async fn files(&self, fork: u32) -> Result<BTreeMap<String, Vec<u8>>> {
        the_fork(&*self.yard, &self.id, fork).await?;
        let result = self.result().await?;
        let mut files = BTreeMap::new();
        for f in result.results.iter().filter(|f| f.fork_num == fork) {
            for path in &f.captured {
                let key = captured_key(&self.id, fork, path);
                if let Some(data) = self.yard.store.blob(&key).await.map_err(store_error)? {
                    files.insert(path.clone(), data);
                }
            }
        }
        Ok(files)
    }

    /// Says something to the agent of a fork, or of all forks; it reads it before its next tool call.
    pub async fn message(&self, fork: Option<u32>, text: &str) -> Result<()> {
        let target = Target { run: self.id.clone(), fork };
        send(&*self.yard, &target, text, false).await?;
        Ok(())
    }
    /// No fork starts and no model is asked until it is resumed.
    pub async fn pause(&self) -> Result<()> {
        self.command(Command::Pause).await
    }
    pub async fn resume(&self) -> Result<()> {
        self.command(Command::Resume).await
    }
    /// Ends it, or one fork of it. Work that is done stays.
    pub async fn cancel(&self, fork: Option<u32>) -> Result<()> {
        self.command(fork.map_or(Command::Cancel, |fork| Command::CancelFork { fork })).await
    }
    /// More forks like the first.
    pub async fn add_forks(&self, count: u32) -> Result<()> {
        Ok(add(&self.yard, &self.id, count, &Like::default()).await?)
    }

    async fn command(&self, command: Command) -> Result<()> {
        Ok(Place::command(&*self.yard, &self.id, command).await?)
    }

    async fn view(&self) -> Result<RunView> {
        Ok(the_run(&*self.yard, &self.id).await?)
    }
}

impl std::fmt::Debug for Run {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Run").field(&self.id()).finish()
    }
}

pub(super) async fn newest(yard: &Yard, limit: usize) -> Result<Vec<String>> {
    let query = RunQuery { limit, ..RunQuery::default() };
    let runs = yard.store.runs(&query).await.map_err(store_error)?;
    Ok(runs.into_iter().map(|r| r.id.to_string()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn images_are_those_of_the_runs_own_provider() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(dir.path().join("repo/.git")).unwrap();
        let set = [("sandbox.provider".into(), "docker".into()), ("sandbox.snapshot".into(), "tools".into())];
        let settings = super::super::load(Some(dir.path().join("home")), &set).unwrap();
        let folder = format!("dir:{}", dir.path().display());
        let job = Job::new(dir.path().join("repo").display().to_string(), "x").model("haiku").image(&folder);
        let spec = |job: &Job| job.spec(&settings, dir.path());
        let local = job.clone().provider(ProviderKind::Local);
        let made = spec(&local).unwrap().sandbox;
        assert_eq!(made.provider, ProviderKind::Local);
        assert!(matches!(made.root, Root::Directory(_)), "{:?}", made.root);
        let refused = spec(&job).unwrap_err();
        assert_eq!(refused.kind, crate::ErrorKind::Invalid);

        let own = [ForkOptions::new("a").image(&folder), ForkOptions::new("b").image("node:20")];
        let differing = own.into_iter().fold(local, Job::fork);
        let roots: Vec<_> = spec(&differing).unwrap().forks.into_iter().map(|fork| fork.root).collect();
        assert!(matches!(roots[0], Some(Root::Directory(_))), "{roots:?}");
        assert_eq!(roots[1], Some(Root::Image("node:20".into())));
    }
}
