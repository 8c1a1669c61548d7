//! The activities: tasks performed with real sandboxes, agents and git. Each can be performed again after a crash.

mod agent;
mod base;
mod checkpoint;
mod collect;
mod extras;
mod verify;
mod worker;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use forkyard_agent::{HookConfig, Interceptor};
use forkyard_core::policy::PolicyConfig;
use forkyard_core::sandbox::{
    Labels, Lifetime, Limits, NetworkMode, NetworkSpec, ProviderKind, Root, SandboxSpec,
};
use forkyard_core::spec::NetworkPlan;
use forkyard_core::task::{ErrorClass, Output, Task, TaskError, TaskResult};
use forkyard_core::view::EngineKind;
use forkyard_core::{ForkNum, HostId, Millis, Role, RunId, SandboxId, Timestamp};
use forkyard_sandbox::egress::host::Host;
use forkyard_sandbox::{ErrorKind, ExecRequest, Provider, Sandbox, SandboxError};
use forkyard_store::{Store, StoreError};

pub use base::branch_name;
pub use collect::captured_key;

use crate::activity::{Activities, Job};
use crate::git::{Git, GitError, Repo};
use crate::models::Models;
use crate::ports::Onlooker;
use crate::results::{self, Outcome};
use crate::sweep::{Found, Yard};

pub use worker::Inside;

/// A sandbox lives at least as long as its fork, and then long enough to be collected from.
const LIFETIME_SLACK: Millis = Millis::minutes(30);
/// Of what a command printed, this much is kept for people.
const TAIL_BYTES: usize = 16 << 10;
/// And this much is looked at.
const MAX_OUTPUT_BYTES: u64 = 4 << 20;

/// What comes from the user's configuration and not from a run.
#[derive(Clone, Default)]
pub struct HandsConfig {
    pub policy: PolicyConfig,
    pub hooks: Vec<HookConfig>,
    /// Of a program that uses Forkyard as a library; after the hooks.
    pub interceptors: Vec<Arc<dyn Interceptor>>,
    pub skills_dir: Option<PathBuf>,
    pub log_dir: Option<PathBuf>,
    pub agent: AgentSettings,
    /// None: agents work from outside only.
    pub inside: Option<Arc<Inside>>,
}

/// How this host runs agents.
#[derive(Debug, Clone)]
pub struct AgentSettings {
    pub heartbeat: Duration,
    pub keep_checkpoints: u32,
    /// Other hosts share the store: checkpoints are kept where they can get them.
    pub travels: bool,
}

impl Default for AgentSettings {
    fn default() -> AgentSettings {
        AgentSettings {
            heartbeat: forkyard_agent::config::DEFAULT_HEARTBEAT,
            keep_checkpoints: forkyard_agent::config::DEFAULT_KEEP_CHECKPOINTS,
            travels: false,
        }
    }
}

/// Performs tasks on this host.
pub struct Hands {
    pub store: Arc<dyn Store>,
    pub providers: BTreeMap<ProviderKind, Arc<dyn Provider>>,
    pub git: Arc<Git>,
    pub models: Arc<Models>,
    pub host: HostId,
    pub config: HandsConfig,
    pub onlooker: Option<Arc<dyn Onlooker>>,
}

#[async_trait]
impl Activities for Hands {
    async fn perform(&self, job: Job) -> TaskResult {
        let cancel = job.cancel.clone();
        // An agent comes to a safe point by itself; everything else may be dropped anywhere and done again.
        let work = async {
            match &job.task {
                Task::PrepareBase { sandbox } => self.prepare_base(&job, sandbox).await,
                Task::VerifyBase { sandbox, base } => self.verify_base(&job, sandbox, base).await,
                Task::CheckBudget => self.check_budget(&job).await,
                Task::CreateSandbox { sandbox, base } => self.create(&job, sandbox, base).await,
                Task::HealthCheck { sandbox } => self.health_check(&job, sandbox).await,
                Task::RunAgent { sandbox, base } => self.run_agent(&job, sandbox, base).await,
                Task::Collect { sandbox, base } => self.collect(&job, sandbox, base).await,
                Task::Verify { sandbox, base, commit } => self.verify(&job, sandbox, base, commit).await,
                Task::Publish { collected } => self.publish(&job, collected).await,
                Task::Destroy { sandbox } => self.destroy_sandbox(&job, sandbox).await,
            }
        };
        if let Task::RunAgent { .. } = job.task {
            return work.await;
        }
        tokio::select! {
            biased;
            () = cancel.cancelled() => Err(TaskError::new(ErrorClass::Cancelled, "was stopped")),
            result = work => result,
        }
    }
}

impl Hands {
    fn provider(&self, job: &Job) -> Result<&Arc<dyn Provider>, TaskError> {
        let kind = job.spec.sandbox.provider;
        self.providers.get(&kind).ok_or_else(|| {
            TaskError::new(
                ErrorClass::Permanent,
                format!("this host has no {kind:?} provider: see `forkyard doctor`"),
            )
        })
    }

    fn fork(job: &Job) -> ForkNum {
        job.fork.as_ref().map_or(0, |f| f.0)
    }

    /// The sandbox that a run asks for.
    fn sandbox_spec(&self, job: &Job, root: Root, role: Role) -> SandboxSpec {
        let plan = &job.spec.sandbox;
        let mut limits = Limits::default().with(plan.limits);
        if let Some((_, fork)) = &job.fork {
            limits = limits.with(fork.limits);
        }
        let mut labels = Labels::from([
            ("run".to_string(), job.run.to_string()),
            ("attempt".to_string(), job.attempt.to_string()),
            ("role".to_string(), role.as_str().to_string()),
        ]);
        if let Some((n, _)) = &job.fork {
            labels.insert("fork".to_string(), n.to_string());
        }
        // Whoever judges a result gets no secrets.
        let secrets = match role {
            Role::Verify => vec![],
            Role::Base | Role::Work => plan.network.secrets.clone(),
        };
        SandboxSpec {
            root,
            limits,
            network: NetworkSpec {
                mode: plan.network.mode,
                allow: allowed(&plan.network, &job.spec.repo.source),
                no_default_allow: plan.network.no_default_allow,
                secrets,
                internal: role == Role::Work && job.spec.agent.in_sandbox,
            },
            env: plan.env.clone(),
            volumes: plan.volumes.clone(),
            labels,
            lifetime: Lifetime(job.spec.fork_timeout + job.spec.linger + LIFETIME_SLACK),
            strict: plan.strict,
            disk_image: plan.disk_image,
        }
    }

    async fn check_budget(&self, job: &Job) -> TaskResult {
        let balance = self.store.balance(&job.run).await.map_err(store_error)?;
        let fork = Self::fork(job);
        // A model that costs nothing needs no money.
        let free = job.fork.as_ref().is_some_and(|(_, f)| f.model.starts_with(crate::models::SCRIPT));
        if balance.is_exhausted(fork) && !free {
            return Err(TaskError::new(ErrorClass::BudgetExceeded, "nothing of the budget is left"));
        }
        Ok(Output::BudgetOk)
    }

    async fn health_check(&self, job: &Job, id: &SandboxId) -> TaskResult {
        let sandbox = self.provider(job)?.attach(id, job.attempt).await.map_err(sandbox_gone)?;
        let health = sandbox.health().await.map_err(sandbox_gone)?;
        if health.healthy {
            if job.spec.agent.in_sandbox {
                self.start_worker(job, sandbox).await?;
            }
            Ok(Output::Healthy)
        } else {
            Err(TaskError::new(ErrorClass::Permanent, format!("the sandbox is not well: {}", health.detail)))
        }
    }

    /// Removes what an interrupted try left, which is of unknown completeness, unless a newer attempt has it by now. One that comes
    /// between the look and the removal finds its sandbox lost, and tries again.
    async fn clear(&self, job: &Job, id: &SandboxId) -> Result<(), TaskError> {
        let provider = self.provider(job)?;
        match provider.attach(id, job.attempt).await {
            Err(e) if e.kind == ErrorKind::Stale => Err(sandbox_error(e)),
            Ok(_) | Err(_) => provider.destroy(id).await.map_err(sandbox_error),
        }
    }

    async fn destroy_sandbox(&self, job: &Job, sandbox: &SandboxId) -> TaskResult {
        let provider = self.provider(job)?;
        provider.destroy(sandbox).await.map_err(sandbox_error)?;
        if let Some(inside) = &self.config.inside {
            inside.let_go(sandbox);
        }
        if let Some((n, _)) = &job.fork {
            // Checkpoints are of use only to the fork's own agent, which has ended.
            let of_fork = |l: &Labels| {
                l.get("run").map(String::as_str) == Some(job.run.as_str())
                    && l.get("fork").map(String::as_str) == Some(n.to_string().as_str())
            };
            for s in provider.snapshots().await.unwrap_or_default().iter().filter(|s| of_fork(&s.labels)) {
                provider.remove_snapshot(&s.id).await.map_err(sandbox_error)?;
            }
        }
        Ok(Output::Destroyed)
    }

    async fn publish(&self, job: &Job, collected: &forkyard_core::task::Collected) -> TaskResult {
        let repo = self.repo(job).await?;
        let commit = crate::git::CommitId::new(&collected.commit).map_err(git_error)?;
        let name = Self::fork(job).to_string();
        self.git.keep(&repo, &job.run, &name, &commit).await.map_err(git_error)?;
        // The embedded engine's runs are of one host.
        if job.spec.engine == EngineKind::Temporal
            && let Some(base) = self.git.kept(&repo, &job.run, "base").await.map_err(git_error)?
        {
            let outcome = Outcome { repo, base, commit };
            results::hand_out(&self.git, &*self.store, &job.run, Self::fork(job), &outcome)
                .await
                .map_err(git_error)?;
        }
        Ok(Output::Published { reference: format!("refs/forkyard/{}/{name}", job.run) })
    }

    /// The repository that results go to: the user's own, or the cache of a remote one.
    async fn repo(&self, job: &Job) -> Result<Repo, TaskError> {
        open_repo(&self.git, &job.spec.repo.source).await.map_err(git_error)
    }
}

/// Hosts that a run's sandboxes may reach besides the list that is the same for all: the user's, and the run's git host.
fn allowed(network: &NetworkPlan, source: &str) -> Vec<String> {
    // An entry narrows what `bridge` opens: there is no need of one.
    let by_list = network.mode == NetworkMode::Isolated && !network.no_default_allow;
    let git_host = by_list.then(|| git_host(source)).flatten().map(|host| format!("{host}:ro"));
    network.allow.iter().cloned().chain(git_host).collect()
}

/// Where a repository is fetched from by HTTP: its host, with the port if that is an odd one. The same is no way for SSH.
fn git_host(source: &str) -> Option<&str> {
    let rest = ["https://", "http://"].iter().find_map(|scheme| source.strip_prefix(scheme))?;
    let authority = rest.split(['/', '?', '#']).next()?;
    let host = authority.rsplit('@').next()?;
    // What is no host for the proxy can't be asked for.
    Host::parse_with_port(host).is_ok().then_some(host)
}

/// A command of the user that has ended.
struct Ran {
    code: i32,
    stdout: String,
    /// There was more than is kept.
    cut: bool,
    /// The end of all that it printed.
    output: String,
}

/// Runs a command of the user in a sandbox.
async fn run_command(sandbox: &dyn Sandbox, script: &str, limit: Duration) -> Result<Ran, TaskError> {
    let request =
        ExecRequest { max_output: Some(MAX_OUTPUT_BYTES), ..ExecRequest::shell(script).timeout(limit) };
    let (result, out, err) =
        sandbox.exec(request).await.map_err(sandbox_error)?.output().await.map_err(sandbox_error)?;
    let stdout = String::from_utf8_lossy(&out).into_owned();
    let mut both = stdout.clone();
    both.push_str(&String::from_utf8_lossy(&err));
    Ok(Ran { code: result.exit_code, stdout, cut: result.truncated, output: tail(&both) })
}

fn tail(text: &str) -> String {
    let mut from = text.len().saturating_sub(TAIL_BYTES);
    while !text.is_char_boundary(from) {
        from += 1;
    }
    text[from..].to_string()
}

/// A URL's cache, or the repository that a path lies in.
pub async fn open_repo(git: &Git, source: &str) -> Result<Repo, GitError> {
    git.prepare().await?;
    if is_url(source) { git.cached(source).await } else { git.open(std::path::Path::new(source)).await }
}

pub fn is_url(source: &str) -> bool {
    source.contains("://") || (source.contains('@') && source.contains(':') && !source.starts_with('/'))
}

fn store_error(e: StoreError) -> TaskError {
    let class = if e.is_retryable() { ErrorClass::Transient } else { ErrorClass::Permanent };
    TaskError::new(class, e.to_string())
}

fn git_error(e: GitError) -> TaskError {
    let class = if e.is_retryable() { ErrorClass::Transient } else { ErrorClass::Permanent };
    TaskError::new(class, e.to_string())
}

fn sandbox_error(e: SandboxError) -> TaskError {
    let class = if e.is_retryable() { ErrorClass::Transient } else { ErrorClass::Permanent };
    TaskError::new(class, e.to_string())
}

/// For a sandbox that has to be there: one that is not, or does not answer, is lost.
fn sandbox_gone(e: SandboxError) -> TaskError {
    match e.kind {
        ErrorKind::NotFound | ErrorKind::Unavailable | ErrorKind::Timeout => {
            TaskError::new(ErrorClass::SandboxLost, e.to_string())
        }
        ErrorKind::Invalid
        | ErrorKind::Denied
        | ErrorKind::Auth
        | ErrorKind::Unsupported
        | ErrorKind::Stale
        | ErrorKind::TooLarge => sandbox_error(e),
    }
}

fn now() -> Timestamp {
    crate::clock::Clock::system().now()
}

/// What this host's providers have, for the sweep.
pub struct HostYard(pub Vec<Arc<dyn Provider>>);

#[async_trait]
impl Yard for HostYard {
    async fn list(&self) -> Result<Vec<Found>, String> {
        let mut all = vec![];
        for p in &self.0 {
            for s in p.list(&Labels::new()).await.map_err(|e| e.to_string())? {
                let run = s.labels.get("run").and_then(|r| RunId::new(r.as_str()).ok());
                all.push(Found { id: s.id, run, created_at: s.created_at });
            }
        }
        Ok(all)
    }
    async fn destroy(&self, id: &SandboxId) -> Result<(), String> {
        for p in &self.0 {
            p.destroy(id).await.map_err(|e| e.to_string())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_runs_git_host_is_on_the_default_list() {
        let network = NetworkPlan { allow: vec!["mine.example".into()], ..NetworkPlan::default() };
        for (source, expected) in [
            ("https://git.example/team/x.git", Some("git.example:ro")),
            ("http://git.example:3000/x", Some("git.example:3000:ro")),
            ("https://user:key@git.example:8443", Some("git.example:8443:ro")),
            ("https://git.example?x=@evil.example", Some("git.example:ro")),
            ("http://[fd00::1]:80/x", Some("[fd00::1]:80:ro")),
            ("https://git.example:/x", None),
            ("https://127.1/x", None),
            ("ssh://git@git.example/x", None),
            ("git@git.example:x", None),
            ("file:///srv/x", None),
            ("/srv/https://git.example/x", None),
        ] {
            let all: Vec<_> = ["mine.example"].into_iter().chain(expected).collect();
            assert_eq!(allowed(&network, source), all, "{source}");
        }
        let source = "https://git.example/x";
        let without = NetworkPlan { no_default_allow: true, ..network.clone() };
        assert_eq!(allowed(&without, source), ["mine.example"]);
        let bridge = NetworkPlan { mode: NetworkMode::Bridge, ..network };
        assert_eq!(allowed(&bridge, source), ["mine.example"], "nothing is narrowed");
    }
}
