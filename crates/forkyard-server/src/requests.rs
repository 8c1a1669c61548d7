//! From what a request says to what the core understands. Whatever names a path of the host is held to the server's root.

use std::path::{Path, PathBuf};

use forkyard_core::Usd;
use forkyard_core::budget::BudgetLimits;
use forkyard_core::sandbox::{LimitsOverride, Root};
use forkyard_core::spec::{ForkSpec, MAX_FORKS, RepoSpec, RunSpec, Start, UntilVerified};
use forkyard_core::{Millis, RunId, SandboxId, SnapshotId};
use forkyard_engine::activities::is_url;
use forkyard_engine::git::check_url;

use crate::App;
use crate::access::random_id;
use crate::dto::run::{AgentPlan, CreateRun, SandboxPlan};
use crate::error::{ApiError, Code, Result};

const SCRIPT: &str = "script:";
const FILE: &str = "file://";

pub fn new_run_id() -> RunId {
    RunId::new(format!("r{}", random_id())).expect("letters and digits")
}

impl App {
    /// The run that a request asks for, over the server's settings.
    pub(crate) fn run_spec(&self, request: CreateRun) -> Result<RunSpec> {
        let mut spec = self.parts().defaults.clone();
        spec.repo = RepoSpec {
            source: self.repo_source(&request.repo)?,
            branch: request.branch.clone(),
            dirty: request.dirty,
        };
        if request.dirty && is_url(&spec.repo.source) {
            return Err(ApiError::field("dirty", "true", "a URL has no uncommitted changes", "leave it out"));
        }
        spec.forks = self.deal(&request, &spec)?;
        for fork in &spec.forks {
            self.check_model(&fork.model)?;
        }
        set(&mut spec.max_concurrent, request.max_concurrent);
        set(&mut spec.fork_timeout, request.timeout_ms.map(Millis));
        set(&mut spec.max_turns, request.max_turns);
        set(&mut spec.linger, request.linger_ms.map(Millis));
        set(&mut spec.protect, request.protect);
        spec.budget = BudgetLimits {
            run: dollars("budget_usd", request.budget_usd)?.or(spec.budget.run),
            fork: dollars("fork_budget_usd", request.fork_budget_usd)?.or(spec.budget.fork),
        };
        spec.setup = request.setup.or(spec.setup);
        spec.verify = request.verify.or(spec.verify);
        spec.score = request.score.or(spec.score);
        spec.keep = request.keep;
        spec.until_verified =
            request.until_verified.map(|u| UntilVerified { verified: u.verified, max_forks: u.max_forks });
        if let Some(plan) = request.sandbox {
            self.sandbox_plan(&mut spec, plan)?;
        }
        if let Some(plan) = request.agent {
            agent_plan(&mut spec.agent, plan);
        }
        Ok(spec)
    }

    /// Fork n is variant n, beginning again after the last.
    fn deal(&self, request: &CreateRun, defaults: &RunSpec) -> Result<Vec<ForkSpec>> {
        let like = defaults.forks.first().cloned().unwrap_or_default();
        let variants = request.variants.len();
        let usual = if variants == 0 { defaults.forks.len().max(1) } else { variants };
        let count = request.forks.map_or(usual, |n| n as usize);
        let fix = format!("give {} to {MAX_FORKS}", variants.max(1));
        if !(variants.max(1)..=MAX_FORKS as usize).contains(&count) {
            return Err(ApiError::field("forks", count.to_string(), "is out of range", &fix));
        }
        let prefixed = |prompt: &String| match &self.parts().prompt_prefix {
            Some(prefix) => format!("{prefix}\n\n{prompt}"),
            None => prompt.clone(),
        };
        let fork = |n: usize| -> Result<ForkSpec> {
            let variant =
                if variants == 0 { Default::default() } else { request.variants[n % variants].clone() };
            let root = self.root_of("variants", variant.image, variant.snapshot)?;
            let parent = variant.sandbox.as_deref().map(sandbox_id).transpose()?;
            Ok(ForkSpec {
                name: variant.name,
                prompt: prefixed(variant.prompt.as_ref().unwrap_or(&request.prompt)),
                model: variant.model.or(request.model.clone()).unwrap_or_else(|| like.model.clone()),
                system_prompt: variant.system_prompt,
                root: root.or_else(|| like.root.clone()),
                parent: parent.or_else(|| like.parent.clone()),
                limits: LimitsOverride {
                    memory_bytes: variant.memory_bytes,
                    cpus: variant.cpus,
                    disk_bytes: variant.disk_bytes,
                    processes: variant.processes,
                    network_bytes_per_s: variant.network_bytes_per_s,
                },
                capture: variant.capture.or(request.capture.clone()).unwrap_or_else(|| like.capture.clone()),
            })
        };
        (0..count).map(fork).collect()
    }

    /// What a sandbox starts from, if one of the two is said.
    fn root_of(&self, field: &str, image: Option<String>, snapshot: Option<String>) -> Result<Option<Root>> {
        match (image, snapshot) {
            (Some(_), Some(snapshot)) => Err(ApiError::field(
                &format!("{field}.snapshot"),
                snapshot,
                "can't stand beside an image",
                "give one of the two",
            )),
            (Some(image), None) => Ok(Some(Root::Image(self.image(&image)?))),
            (None, Some(id)) => {
                let wrong = |e: forkyard_core::InvalidId| {
                    ApiError::field(
                        &format!("{field}.snapshot"),
                        &id,
                        &e.to_string(),
                        "name an existing snapshot",
                    )
                };
                Ok(Some(Root::Snapshot(SnapshotId::new(id.as_str()).map_err(wrong)?)))
            }
            (None, None) => Ok(None),
        }
    }

    /// Sandboxes that forks are to start from are there.
    pub(crate) async fn check_starts(&self, spec: &RunSpec) -> Result<()> {
        for start in spec.starts() {
            if let Start::Parent(id) = start {
                self.parts().sandboxes.find(&id).await?;
            }
        }
        Ok(())
    }

    /// Whether the configuration has all that are named.
    pub(crate) fn check_secrets(&self, field: &str, names: Option<&[String]>) -> Result<()> {
        match names.into_iter().flatten().find(|name| !self.parts().secrets.contains(*name)) {
            Some(name) => {
                let fix = "name one of the server's configuration";
                Err(ApiError::field(field, name, "there is no such secret", fix))
            }
            None => Ok(()),
        }
    }

    fn sandbox_plan(&self, spec: &mut RunSpec, plan: SandboxPlan) -> Result<()> {
        let sandbox = &mut spec.sandbox;
        set(&mut sandbox.provider, plan.provider.map(Into::into));
        set(&mut sandbox.root, self.root_of("sandbox", plan.image, plan.snapshot)?);
        sandbox.limits.memory_bytes = plan.memory_bytes.or(sandbox.limits.memory_bytes);
        sandbox.limits.cpus = plan.cpus.or(sandbox.limits.cpus);
        sandbox.limits.disk_bytes = plan.disk_bytes.or(sandbox.limits.disk_bytes);
        sandbox.limits.processes = plan.processes.or(sandbox.limits.processes);
        sandbox.limits.network_bytes_per_s = plan.network_bytes_per_s.or(sandbox.limits.network_bytes_per_s);
        set(&mut sandbox.env, plan.env);
        set(&mut sandbox.strict, plan.strict);
        set(&mut sandbox.disk_image, plan.disk_image);
        set(&mut sandbox.network.mode, plan.network.map(Into::into));
        set(&mut sandbox.network.allow, plan.allow);
        set(&mut sandbox.network.no_default_allow, plan.no_default_allow);
        self.check_secrets("sandbox.secrets", plan.secrets.as_deref())?;
        set(&mut sandbox.network.secrets, plan.secrets);
        Ok(())
    }

    /// A URL as it is, a path as it really is.
    fn repo_source(&self, repo: &str) -> Result<String> {
        if let Some(path) = repo.strip_prefix(FILE) {
            let path = self.below_root("repo", path)?;
            return Ok(format!("{FILE}{path}"));
        }
        if repo.starts_with('/') {
            return self.below_root("repo", repo);
        }
        check_url(repo)
            .map_err(|e| ApiError::field("repo", repo, &e.message, "give a URL, or an absolute path"))?;
        Ok(repo.to_string())
    }

    pub(crate) fn image(&self, image: &str) -> Result<String> {
        for scheme in ["oci:", "archive:"] {
            if let Some(path) = image.strip_prefix(scheme) {
                return Ok(format!("{scheme}{}", self.below_root("image", path)?));
            }
        }
        Ok(image.to_string())
    }

    /// A model that reads a file of the host is held to the root too.
    pub(crate) fn check_model(&self, model: &str) -> Result<()> {
        if let Some(path) = model.strip_prefix(SCRIPT) {
            self.below_root("model", path)?;
        }
        let wrong = |e: String| ApiError::field("model", model, &e, "name one that the server knows");
        self.parts().models.check(model).map_err(wrong)
    }

    fn below_root(&self, field: &str, path: &str) -> Result<String> {
        let refused = |why: &str| {
            ApiError::new(Code::PathRefused, format!("{field} = {path:?}: {why}"))
                .hint("paths are taken below the folder that `server.root` names")
        };
        let Some(root) = &self.parts().root else {
            return Err(refused("this server takes no paths of its host"));
        };
        // What is outside and what is not there look the same from outside.
        let real = real_path(path).ok_or_else(|| refused("there is no such path below the root"))?;
        let root = root.canonicalize().map_err(|_| refused("the root is not there"))?;
        if !real.starts_with(&root) {
            return Err(refused("there is no such path below the root"));
        }
        real.into_os_string().into_string().map_err(|_| refused("its real name is not UTF-8"))
    }
}

fn agent_plan(agent: &mut forkyard_core::spec::AgentPlan, plan: AgentPlan) {
    agent.permission_mode =
        plan.permission_mode.map(|m| m.as_str().to_string()).or(agent.permission_mode.take());
    set(&mut agent.allowed_tools, plan.allowed_tools);
    set(&mut agent.disallowed_tools, plan.disallowed_tools);
    agent.prompt_template = plan.prompt_template.or(agent.prompt_template.take());
    agent.max_tool_calls = plan.max_tool_calls.or(agent.max_tool_calls);
    agent.effort = plan.effort.map(Into::into).or(agent.effort);
    agent.max_output_tokens = plan.max_output_tokens.or(agent.max_output_tokens);
    set(&mut agent.in_sandbox, plan.in_sandbox);
}

fn sandbox_id(text: &str) -> Result<SandboxId> {
    SandboxId::new(text)
        .map_err(|e| ApiError::field("variants.sandbox", text, &e.to_string(), "name an existing sandbox"))
}

fn real_path(path: &str) -> Option<PathBuf> {
    if path.contains('\0') || !path.starts_with('/') {
        return None;
    }
    Path::new(path).canonicalize().ok()
}

fn set<T>(to: &mut T, given: Option<T>) {
    if let Some(given) = given {
        *to = given;
    }
}

fn dollars(field: &str, given: Option<f64>) -> Result<Option<Usd>> {
    let wrong =
        |d: f64| ApiError::field(field, d.to_string(), "is not an amount of dollars", "give 0 to 1000000");
    given.map(|d| Usd::from_dollars(d).ok_or_else(|| wrong(d))).transpose()
}
