//! A run's specification as the API asks for it: everything is said, nothing is left to the server's own settings.

use forkyard_core::sandbox::Root;
use forkyard_core::spec::RunSpec;
use forkyard_server::dto::run::{AgentPlan, CreateRun, PermissionMode, SandboxPlan, UntilVerified, Variant};

use crate::error::{CliError, Result};

pub fn create(spec: &RunSpec) -> Result<CreateRun> {
    let plan = &spec.sandbox;
    if !plan.volumes.is_empty() {
        return Err(CliError::usage("--volume: folders of a server are its own configuration's to give")
            .hint("leave it out, or let the server's owner set `sandbox.volumes`"));
    }
    let (image, snapshot) = root(Some(&plan.root))?;
    let variants = spec.forks.iter().map(variant).collect::<Result<Vec<_>>>()?;
    let agent = &spec.agent;
    Ok(CreateRun {
        repo: spec.repo.source.clone(),
        branch: spec.repo.branch.clone(),
        dirty: spec.repo.dirty,
        prompt: spec.forks.first().map(|f| f.prompt.clone()).unwrap_or_default(),
        model: None,
        forks: None,
        variants,
        max_concurrent: Some(spec.max_concurrent),
        timeout_ms: Some(spec.fork_timeout.0),
        budget_usd: spec.budget.run.map(|u| u.as_dollars()),
        fork_budget_usd: spec.budget.fork.map(|u| u.as_dollars()),
        max_turns: Some(spec.max_turns),
        setup: spec.setup.clone(),
        verify: spec.verify.clone(),
        score: spec.score.clone(),
        protect: Some(spec.protect.clone()),
        capture: None,
        linger_ms: Some(spec.linger.0),
        keep: spec.keep,
        until_verified: spec
            .until_verified
            .map(|u| UntilVerified { verified: u.verified, max_forks: u.max_forks }),
        sandbox: Some(SandboxPlan {
            provider: Some(plan.provider.into()),
            image,
            snapshot,
            memory_bytes: plan.limits.memory_bytes,
            cpus: plan.limits.cpus,
            disk_bytes: plan.limits.disk_bytes,
            processes: plan.limits.processes,
            network_bytes_per_s: plan.limits.network_bytes_per_s,
            env: Some(plan.env.clone()),
            strict: Some(plan.strict),
            disk_image: Some(plan.disk_image),
            network: Some(plan.network.mode.into()),
            allow: Some(plan.network.allow.clone()),
            no_default_allow: Some(plan.network.no_default_allow),
            secrets: Some(plan.network.secrets.clone()),
        }),
        agent: Some(AgentPlan {
            permission_mode: agent.permission_mode.as_deref().map(mode).transpose()?,
            allowed_tools: Some(agent.allowed_tools.clone()),
            disallowed_tools: Some(agent.disallowed_tools.clone()),
            prompt_template: agent.prompt_template.clone(),
            max_tool_calls: agent.max_tool_calls,
            effort: agent.effort.map(Into::into),
            max_output_tokens: agent.max_output_tokens,
            in_sandbox: Some(agent.in_sandbox),
        }),
    })
}

fn variant(f: &forkyard_core::spec::ForkSpec) -> Result<Variant> {
    let (image, snapshot) = root(f.root.as_ref())?;
    Ok(Variant {
        name: f.name.clone(),
        prompt: Some(f.prompt.clone()),
        model: Some(f.model.clone()),
        system_prompt: f.system_prompt.clone(),
        image,
        snapshot,
        sandbox: f.parent.as_ref().map(ToString::to_string),
        memory_bytes: f.limits.memory_bytes,
        cpus: f.limits.cpus,
        disk_bytes: f.limits.disk_bytes,
        processes: f.limits.processes,
        network_bytes_per_s: f.limits.network_bytes_per_s,
        capture: Some(f.capture.clone()),
    })
}

pub fn root(root: Option<&Root>) -> Result<(Option<String>, Option<String>)> {
    match root {
        None | Some(Root::Default) => Ok((None, None)),
        Some(Root::Image(image)) => Ok((Some(image.clone()), None)),
        Some(Root::Snapshot(id)) => Ok((None, Some(id.to_string()))),
        Some(Root::Directory(dir)) => {
            Err(CliError::usage(format!("{}: a server gives no folder of its own as a root", dir))
                .hint("name an image or a snapshot"))
        }
    }
}

fn mode(text: &str) -> Result<PermissionMode> {
    serde_json::from_value(text.into())
        .map_err(|_| CliError::usage(format!("{text:?} is not a permission mode")))
}
