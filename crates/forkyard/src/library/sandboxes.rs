//! A manager of sandboxes, and sandboxes as programs use them.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use forkyard_core::{Attempt, Millis, SandboxId, SnapshotId};
use forkyard_sandbox::{
    ExecRequest, FileInfo, Health, Labels, Lifetime, Limits, LimitsOverride, NetworkMode, NetworkSpec,
    Provider, ProviderKind, Root, SandboxInfo, SandboxSpec, SandboxStatus, Stats, Volume,
};

use super::error::Result;
use crate::commands::run_options::{image, volume};
use crate::error::CliError;
use crate::settings::Settings;
use crate::yard::{Yard, random_text};

/// Commands of a sandbox whose configuration says nothing else.
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(300);
/// A file that is read into memory as a whole.
const MAX_READ: u64 = 100 << 20;
/// Tells the sandboxes of one manager from all others.
const LABEL: &str = "manager";

/// How a sandbox is made. What is not said is taken from the manager's defaults, then from the settings.
#[derive(Debug, Clone, Default)]
pub struct SandboxConfig {
    provider: Option<ProviderKind>,
    root: Option<Root>,
    limits: LimitsOverride,
    network: Option<NetworkMode>,
    allow: Vec<String>,
    secrets: Vec<String>,
    env: BTreeMap<String, String>,
    volumes: Vec<Volume>,
    workdir: Option<String>,
    timeout: Option<Duration>,
    lifetime: Option<Duration>,
    strict: bool,
    disk_image: bool,
}

impl SandboxConfig {
    pub fn new() -> SandboxConfig {
        SandboxConfig::default()
    }
    /// Who makes it. The local one needs no daemon and no image.
    pub fn provider(mut self, provider: ProviderKind) -> SandboxConfig {
        self.provider = Some(provider);
        self
    }
    /// A registry reference, `oci:PATH`, `archive:PATH` or `dir:PATH`, a folder of this machine as the root.
    pub fn image(mut self, image: impl Into<String>) -> SandboxConfig {
        self.root = Some(Root::Image(image.into()));
        self
    }
    /// A copy-on-write child of a snapshot.
    pub fn snapshot(mut self, id: impl Into<String>) -> Result<SandboxConfig> {
        self.root = Some(Root::Snapshot(SnapshotId::new(id)?));
        Ok(self)
    }
    pub fn memory_mb(mut self, mb: u64) -> SandboxConfig {
        self.limits.memory_bytes = Some(mb << 20);
        self
    }
    /// May be fractional.
    pub fn cpus(mut self, cpus: f64) -> SandboxConfig {
        self.limits.cpus = Some(cpus);
        self
    }
    pub fn disk_mb(mut self, mb: u64) -> SandboxConfig {
        self.limits.disk_bytes = Some(mb << 20);
        self
    }
    pub fn processes(mut self, n: u32) -> SandboxConfig {
        self.limits.processes = Some(n);
        self
    }
    /// Both directions, each.
    pub fn network_mbps(mut self, megabits: u64) -> SandboxConfig {
        self.limits.network_bytes_per_s = Some(megabits * 125_000);
        self
    }
    pub fn network(mut self, mode: NetworkMode) -> SandboxConfig {
        self.network = Some(mode);
        self
    }
    /// A host that it may reach besides the default list; `HOST:ro` for reading alone.
    pub fn allow(mut self, host: impl Into<String>) -> SandboxConfig {
        self.allow.push(host.into());
        self
    }
    /// A secret of `config.toml` that is put in on the way out, for the hosts that it is bound to.
    pub fn secret(mut self, name: impl Into<String>) -> SandboxConfig {
        self.secrets.push(name.into());
        self
    }
    pub fn env(mut self, name: impl Into<String>, value: impl Into<String>) -> SandboxConfig {
        self.env.insert(name.into(), value.into());
        self
    }
    /// A folder of the host.
    pub fn volume(
        mut self,
        host_path: impl Into<String>,
        path: impl Into<String>,
        writable: bool,
    ) -> SandboxConfig {
        self.volumes.push(Volume { host_path: host_path.into(), path: path.into(), writable });
        self
    }
    /// Where commands run; `/workspace` if not given.
    pub fn workdir(mut self, path: impl Into<String>) -> SandboxConfig {
        self.workdir = Some(path.into());
        self
    }
    /// How long a command may take that says nothing itself; 300 s if not given.
    pub fn timeout(mut self, timeout: Duration) -> SandboxConfig {
        self.timeout = Some(timeout);
        self
    }
    /// The sandbox ends by itself after this time, whatever happens to its maker; 3 h if not given.
    pub fn lifetime(mut self, lifetime: Duration) -> SandboxConfig {
        self.lifetime = Some(lifetime);
        self
    }
    /// Refuse a limit that the kernel itself can't enforce here.
    pub fn strict(mut self) -> SandboxConfig {
        self.strict = true;
        self
    }
    /// A disk of its own, whose limit the kernel keeps. Costs some speed, and snapshots are copies.
    pub fn disk_image(mut self) -> SandboxConfig {
        self.disk_image = true;
        self
    }

    /// What this one says, and where it says nothing, the other.
    fn over(self, other: &SandboxConfig) -> SandboxConfig {
        let o = other.clone();
        let (a, b) = (self.limits, o.limits);
        SandboxConfig {
            provider: self.provider.or(o.provider),
            root: self.root.or(o.root),
            limits: LimitsOverride {
                memory_bytes: a.memory_bytes.or(b.memory_bytes),
                cpus: a.cpus.or(b.cpus),
                disk_bytes: a.disk_bytes.or(b.disk_bytes),
                processes: a.processes.or(b.processes),
                network_bytes_per_s: a.network_bytes_per_s.or(b.network_bytes_per_s),
            },
            network: self.network.or(o.network),
            allow: o.allow.into_iter().chain(self.allow).collect(),
            secrets: o.secrets.into_iter().chain(self.secrets).collect(),
            env: o.env.into_iter().chain(self.env).collect(),
            volumes: o.volumes.into_iter().chain(self.volumes).collect(),
            workdir: self.workdir.or(o.workdir),
            timeout: self.timeout.or(o.timeout),
            lifetime: self.lifetime.or(o.lifetime),
            strict: self.strict || o.strict,
            disk_image: self.disk_image || o.disk_image,
        }
    }

    fn spec(&self, s: &Settings, provider: ProviderKind, labels: Labels) -> Result<SandboxSpec> {
        let root = match (&self.root, &s.snapshot, &s.image) {
            (Some(Root::Image(name)), _, _) | (None, None, Some(name)) => image(s, provider, name)?,
            (Some(root), _, _) => root.clone(),
            (None, Some(id), _) => Root::Snapshot(SnapshotId::new(id.clone())?),
            (None, None, None) => Root::Default,
        };
        let limits = Limits {
            memory_bytes: s.memory.0,
            cpus: s.cpus,
            disk_bytes: s.disk.0,
            processes: s.processes,
            network_bytes_per_s: s.network_rate.map(|r| r.0),
        };
        Ok(SandboxSpec {
            root,
            limits: limits.with(self.limits),
            network: NetworkSpec {
                mode: self.network.unwrap_or(s.network),
                allow: s.allow.iter().chain(&self.allow).cloned().collect(),
                no_default_allow: s.no_default_allow,
                secrets: self.secrets.clone(),
                internal: false,
            },
            env: s.sandbox_env.iter().chain(&self.env).map(|(k, v)| (k.clone(), v.clone())).collect(),
            volumes: s.volumes.iter().map(|v| volume(v)).chain(self.volumes.clone()).collect(),
            labels,
            lifetime: self.lifetime.map_or_else(Lifetime::default, |d| Lifetime(millis(d))),
            strict: self.strict || s.strict,
            disk_image: self.disk_image || s.disk_image,
        })
    }
}

pub(super) fn millis(d: Duration) -> Millis {
    Millis(u64::try_from(d.as_millis()).unwrap_or(u64::MAX))
}

/// Makes, finds and ends sandboxes.
///
/// A sandbox that nobody destroys ends by itself when its lifetime is over; dropping a manager or a [`Sandbox`] ends nothing.
#[derive(Clone)]
pub struct Sandboxes {
    yard: Arc<Yard>,
    id: String,
    defaults: SandboxConfig,
}

impl Sandboxes {
    pub(super) fn new(yard: Arc<Yard>) -> Sandboxes {
        Sandboxes { yard, id: random_text(12), defaults: SandboxConfig::default() }
    }

    /// What every sandbox is made with that says nothing else.
    pub fn with_defaults(mut self, defaults: SandboxConfig) -> Sandboxes {
        self.defaults = defaults;
        self
    }

    /// A new sandbox, started and ready.
    pub async fn create(&self, config: SandboxConfig) -> Result<Sandbox> {
        let config = config.over(&self.defaults);
        let kind = config.provider.unwrap_or(self.yard.settings.provider);
        let provider = self.provider(kind)?;
        let id = SandboxId::new(format!("s{}", random_text(9)))?;
        let spec = config.spec(&self.yard.settings, kind, self.labels())?;
        let inner = provider.create(&id, Attempt(1), &spec).await?;
        let (workdir, timeout) = (config.workdir, config.timeout.unwrap_or(DEFAULT_TIMEOUT));
        Ok(Sandbox { provider, inner, workdir, timeout })
    }

    /// Any sandbox of this home, also one that another manager, a run or the command line made.
    pub async fn get(&self, id: &str) -> Result<Sandbox> {
        let id = SandboxId::new(id)?;
        for provider in self.yard.providers.values() {
            if let Some(info) = provider.list(&Labels::new()).await?.into_iter().find(|s| s.id == id) {
                let inner = provider.attach(&id, info.attempt).await?;
                let (provider, workdir) = (provider.clone(), self.defaults.workdir.clone());
                let timeout = self.defaults.timeout.unwrap_or(DEFAULT_TIMEOUT);
                return Ok(Sandbox { provider, inner, workdir, timeout });
            }
        }
        Err(CliError::usage(format!("there is no sandbox {id}")).into())
    }

    /// Ids of those that this manager made and that have not been destroyed.
    pub async fn list(&self) -> Result<Vec<String>> {
        let mut all = Vec::new();
        for provider in self.yard.providers.values() {
            all.extend(provider.list(&self.labels()).await?.into_iter().map(|s| s.id.to_string()));
        }
        Ok(all)
    }

    /// Ends it and removes everything of it. Ok if it is gone already.
    pub async fn destroy(&self, id: &str) -> Result<()> {
        let id = SandboxId::new(id)?;
        for provider in self.yard.providers.values() {
            provider.destroy(&id).await?;
        }
        Ok(())
    }

    /// All that this manager made; says how many there were. Tries each of them before it says what failed.
    pub async fn destroy_all(&self) -> Result<usize> {
        let all = self.list().await?;
        let mut failed = None;
        for id in &all {
            if let Err(e) = self.destroy(id).await {
                failed = Some(e);
            }
        }
        failed.map_or(Ok(all.len()), Err)
    }

    /// What those that run use, by id. One that does not answer has its error.
    pub async fn stats_all(&self) -> Result<BTreeMap<String, Result<Stats>>> {
        self.ask(|s| async move { Ok(s.stats().await?) }).await
    }

    /// How those that run are, by id.
    pub async fn health_all(&self) -> Result<BTreeMap<String, Result<Health>>> {
        self.ask(|s| async move { Ok(s.health().await?) }).await
    }

    async fn ask<T, F: Future<Output = Result<T>>>(
        &self,
        question: impl Fn(Arc<dyn forkyard_sandbox::Sandbox>) -> F,
    ) -> Result<BTreeMap<String, Result<T>>> {
        let mut running = Vec::new();
        for provider in self.yard.providers.values() {
            let all = provider.list(&self.labels()).await?;
            let runs = |s: &SandboxInfo| s.status == SandboxStatus::Running;
            running.extend(all.into_iter().filter(runs).map(|info| (provider, info)));
        }
        let answers = running.iter().map(async |(provider, info)| {
            // An onlooker offers no way out, which a command could take and which would end with the answer.
            let answer = match provider.observe(&info.id, info.attempt).await {
                Ok(sandbox) => question(sandbox).await,
                Err(e) => Err(e.into()),
            };
            (info.id.to_string(), answer)
        });
        Ok(futures::future::join_all(answers).await.into_iter().collect())
    }

    fn labels(&self) -> Labels {
        Labels::from([(LABEL.to_string(), self.id.clone())])
    }

    fn provider(&self, kind: ProviderKind) -> Result<Arc<dyn Provider>> {
        self.yard.providers.get(&kind).cloned().ok_or_else(|| {
            let e = CliError::failure(format!("there is no {kind:?} provider here"));
            e.hint("see `forkyard doctor`").into()
        })
    }
}

/// A command: a program and its arguments, never a string for a shell.
#[derive(Debug, Clone, Default)]
pub struct Command {
    request: ExecRequest,
}

impl Command {
    pub fn new(program: impl Into<String>) -> Command {
        Command { request: ExecRequest::new([program.into()]) }
    }
    /// `sh -c SCRIPT`.
    pub fn shell(script: impl Into<String>) -> Command {
        Command { request: ExecRequest::shell(script) }
    }
    pub fn arg(mut self, arg: impl Into<String>) -> Command {
        self.request.argv.push(arg.into());
        self
    }
    pub fn args<S: Into<String>>(mut self, args: impl IntoIterator<Item = S>) -> Command {
        self.request.argv.extend(args.into_iter().map(Into::into));
        self
    }
    pub fn env(mut self, name: impl Into<String>, value: impl Into<String>) -> Command {
        self.request = self.request.env(name, value);
        self
    }
    pub fn workdir(mut self, path: impl Into<String>) -> Command {
        self.request = self.request.cwd(path);
        self
    }
    pub fn timeout(mut self, timeout: Duration) -> Command {
        self.request = self.request.timeout(timeout);
        self
    }
}

/// What a command did.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct CommandOutput {
    /// 124 after a timeout, 128 + n for a signal.
    pub exit_code: i32,
    pub stdout: String,
    pub stderr: String,
    pub duration: Duration,
    pub timed_out: bool,
    /// It was killed for using more memory than it may.
    pub oom_killed: bool,
    /// It wrote more than is kept (16 MiB each).
    pub truncated: bool,
}

impl CommandOutput {
    pub fn success(&self) -> bool {
        self.exit_code == 0
    }
}

/// A live sandbox. Paths are inside it; relative ones start at `/workspace`. Clones are the same sandbox.
#[derive(Clone)]
pub struct Sandbox {
    provider: Arc<dyn Provider>,
    inner: Arc<dyn forkyard_sandbox::Sandbox>,
    workdir: Option<String>,
    timeout: Duration,
}

impl Sandbox {
    pub fn id(&self) -> &str {
        self.inner.id().as_str()
    }

    /// Runs a program with arguments and waits for its end.
    pub async fn run<S: Into<String>>(
        &self,
        program: impl Into<String>,
        args: impl IntoIterator<Item = S>,
    ) -> Result<CommandOutput> {
        self.execute(Command::new(program).args(args)).await
    }

    /// Runs a command and waits for its end. That it fails is no error: its exit code says so.
    pub async fn execute(&self, command: Command) -> Result<CommandOutput> {
        let mut request = command.request;
        request.cwd = request.cwd.or_else(|| self.workdir.clone());
        request.timeout = request.timeout.or(Some(self.timeout));
        let (result, out, err) = self.inner.exec(request).await?.output().await?;
        Ok(CommandOutput {
            exit_code: result.exit_code,
            stdout: String::from_utf8_lossy(&out).into_owned(),
            stderr: String::from_utf8_lossy(&err).into_owned(),
            duration: result.duration,
            timed_out: result.timed_out,
            oom_killed: result.oom_killed,
            truncated: result.truncated,
        })
    }

    /// Creates parents; replaces the file as a whole.
    pub async fn write_file(&self, path: &str, data: impl AsRef<[u8]>) -> Result<()> {
        Ok(self.inner.write_file(path, data.as_ref().to_vec().into(), None).await?)
    }
    /// At most 100 MiB.
    pub async fn read_file(&self, path: &str) -> Result<Vec<u8>> {
        let data = self.inner.read_file(path, 0, MAX_READ + 1).await?;
        if data.len() as u64 > MAX_READ {
            return Err(CliError::failure(format!("{path} is larger than 100 MiB")).into());
        }
        Ok(data.to_vec())
    }
    pub async fn list_files(&self, path: &str) -> Result<Vec<FileInfo>> {
        Ok(self.inner.list_files(path).await?)
    }
    /// A folder with all that is in it.
    pub async fn delete_file(&self, path: &str) -> Result<()> {
        Ok(self.inner.remove(path, true).await?)
    }

    pub async fn stats(&self) -> Result<Stats> {
        Ok(self.inner.stats().await?)
    }
    pub async fn health(&self) -> Result<Health> {
        Ok(self.inner.health().await?)
    }

    /// Freezes the files; the snapshot's id is for [`SandboxConfig::snapshot`].
    pub async fn snapshot(&self) -> Result<String> {
        let id = SnapshotId::new(format!("n{}", random_text(9)))?;
        self.inner.snapshot(&id, &Labels::new()).await?;
        Ok(id.to_string())
    }
    /// Freezes all processes.
    pub async fn pause(&self) -> Result<()> {
        Ok(self.inner.pause().await?)
    }
    /// Lets them go on.
    pub async fn resume(&self) -> Result<()> {
        Ok(self.inner.resume().await?)
    }
    /// Ends its processes and keeps its files.
    pub async fn stop(&self) -> Result<()> {
        Ok(self.provider.stop(self.inner.id()).await?)
    }
    /// Starts it again on the files that it had.
    pub async fn start(&mut self) -> Result<()> {
        self.inner = self.provider.start(self.inner.id(), self.inner.attempt()).await?;
        Ok(())
    }
    /// Ends it and removes everything of it. Ok if it is gone already.
    pub async fn destroy(&self) -> Result<()> {
        Ok(self.provider.destroy(self.inner.id()).await?)
    }

    pub(super) fn inner(&self) -> Arc<dyn forkyard_sandbox::Sandbox> {
        self.inner.clone()
    }
}

impl std::fmt::Debug for Sandbox {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Sandbox").field(&self.id()).finish()
    }
}

impl std::fmt::Debug for Sandboxes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Sandboxes").field("defaults", &self.defaults).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_sandbox_says_wins_over_the_managers_defaults() {
        let defaults = SandboxConfig::new().image("a").memory_mb(512).cpus(1.0).env("A", "1").env("B", "1");
        let c = SandboxConfig::new().memory_mb(256).env("B", "2").workdir("/app").over(&defaults);
        assert_eq!(c.root, Some(Root::Image("a".into())));
        assert_eq!((c.limits.memory_bytes, c.limits.cpus), (Some(256 << 20), Some(1.0)));
        let env: Vec<_> = c.env.iter().map(|(k, v)| (k.as_str(), v.as_str())).collect();
        assert_eq!((env, c.workdir.as_deref()), (vec![("A", "1"), ("B", "2")], Some("/app")));
    }

    #[test]
    fn a_folder_is_for_whoever_is_to_make_the_sandbox() {
        let (home, root) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let set = [("sandbox.provider".into(), "docker".into())];
        let settings = super::super::load(Some(home.path().into()), &set).unwrap();
        let config = SandboxConfig::new().image(format!("dir:{}", root.path().display()));
        let spec = config.spec(&settings, ProviderKind::Local, Labels::new()).unwrap();
        assert!(matches!(spec.root, Root::Directory(_)), "{:?}", spec.root);
        let refused = config.spec(&settings, ProviderKind::Docker, Labels::new()).unwrap_err();
        assert_eq!(refused.kind, super::super::ErrorKind::Invalid);
    }

    #[test]
    fn errors_of_ids_are_the_callers() {
        assert_eq!(SandboxConfig::new().snapshot("../x").unwrap_err().kind, super::super::ErrorKind::Invalid);
    }
}
