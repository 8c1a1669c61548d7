//! From what a request says to what the core understands. Whatever names a path of the host is held to the server's root.

use std::path::{Path, PathBuf};

use forkyard_core::SnapshotId;
use forkyard_core::Usd;
use forkyard_core::budget::BudgetLimits;
use forkyard_core::sandbox::Root;
use forkyard_core::spec::{ForkSpec, MAX_FORKS, RepoSpec, RunSpec, UntilVerified};
use forkyard_core::{Millis, RunId};
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
        if let Some(AgentPlan { permission_mode, allowed_tools, disallowed_tools }) = request.agent {
            spec.agent.permission_mode =
                permission_mode.map(|m| m.as_str().to_string()).or(spec.agent.permission_mode.take());
            set(&mut spec.agent.allowed_tools, allowed_tools);
            set(&mut spec.agent.disallowed_tools, disallowed_tools);
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
        let fork = |n: usize| {
            let variant =
                if variants == 0 { Default::default() } else { request.variants[n % variants].clone() };
            ForkSpec {
                name: variant.name,
                prompt: prefixed(variant.prompt.as_ref().unwrap_or(&request.prompt)),
                model: variant.model.or(request.model.clone()).unwrap_or_else(|| like.model.clone()),
                system_prompt: variant.system_prompt,
                capture: request.capture.clone().unwrap_or_else(|| like.capture.clone()),
                ..like.clone()
            }
        };
        Ok((0..count).map(fork).collect())
    }

    fn sandbox_plan(&self, spec: &mut RunSpec, plan: SandboxPlan) -> Result<()> {
        let sandbox = &mut spec.sandbox;
        set(&mut sandbox.provider, plan.provider.map(Into::into));
        sandbox.root = match (plan.image, plan.snapshot) {
            (Some(_), Some(snapshot)) => {
                return Err(ApiError::field(
                    "sandbox.snapshot",
                    snapshot,
                    "can't stand beside an image",
                    "give one of the two",
                ));
            }
            (Some(image), None) => Root::Image(self.image(&image)?),
            (None, Some(id)) => Root::Snapshot(SnapshotId::new(id.as_str()).map_err(|e| {
                ApiError::field("sandbox.snapshot", &id, &e.to_string(), "name an existing snapshot")
            })?),
            (None, None) => sandbox.root.clone(),
        };
        sandbox.limits.memory_bytes = plan.memory_bytes.or(sandbox.limits.memory_bytes);
        sandbox.limits.cpus = plan.cpus.or(sandbox.limits.cpus);
        sandbox.limits.disk_bytes = plan.disk_bytes.or(sandbox.limits.disk_bytes);
        sandbox.limits.processes = plan.processes.or(sandbox.limits.processes);
        set(&mut sandbox.env, plan.env);
        set(&mut sandbox.strict, plan.strict);
        set(&mut sandbox.network.mode, plan.network.map(Into::into));
        set(&mut sandbox.network.allow, plan.allow);
        set(&mut sandbox.network.no_default_allow, plan.no_default_allow);
        if let Some(name) = plan.secrets.iter().flatten().find(|n| !self.parts().secrets.contains(*n)) {
            let fix = "name one of the server's configuration";
            return Err(ApiError::field("sandbox.secrets", name, "there is no such secret", fix));
        }
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
