//! What a worker is told by its environment.

use std::collections::BTreeMap;
use std::path::PathBuf;

use forkyard_core::policy::PermissionMode;
use forkyard_engine::inside::{TaskData, WORKER_DIR};

use super::client::TokenSource;
use crate::error::{CliError, Result};

/// Variables of the protocol; the commands of the agent have no use for them.
const OWN: [&str; 16] = [
    "TASK_DATA_BASE64",
    "TASK_DESCRIPTION",
    "TASK_ID",
    "MODEL",
    "HEARTBEAT_INTERVAL",
    "MAX_TURNS",
    "MAX_BUDGET_USD",
    "PERMISSION_MODE",
    "ALLOWED_TOOLS",
    "DISALLOWED_TOOLS",
    "RESUME_SESSION_ID",
    "FORK_SESSION",
    "FORKYARD_TOKEN",
    "FORKYARD_TASK_FILE",
    "FORKYARD_WORKER_DIR",
    "CALLBACK_URL",
];

#[derive(Debug)]
pub struct Variables {
    pub callback_url: String,
    pub token: TokenSource,
    pub task: TaskData,
    /// Where the worker keeps what is its own.
    pub dir: PathBuf,
    /// What the agent's commands get.
    pub commands_env: BTreeMap<String, String>,
}

impl Variables {
    /// The task is a file's (FORKYARD_TASK_FILE) or a variable's (TASK_DATA_BASE64); single variables win over it.
    pub fn read(env: &BTreeMap<String, String>) -> Result<Variables> {
        let get = |name: &str| env.get(name).filter(|v| !v.is_empty());
        let wrong = |name: &str, why: String, fix: &str| {
            CliError::usage(format!("{name} {why}")).hint(fix.to_string())
        };
        let need = |name: &str, fix: &str| get(name).ok_or_else(|| wrong(name, "is not set".into(), fix));
        let callback_url = need("CALLBACK_URL", "set it to the server's address")?.clone();
        let token = match (get("FORKYARD_TOKEN_FILE"), get("FORKYARD_TOKEN")) {
            (Some(path), _) => TokenSource::File(PathBuf::from(path)),
            (None, Some(token)) => TokenSource::Fixed(token.clone()),
            (None, None) => {
                return Err(wrong(
                    "FORKYARD_TOKEN_FILE",
                    "is not set".into(),
                    "name the file with the sandbox's token",
                ));
            }
        };
        let mut task = match (get("FORKYARD_TASK_FILE"), get("TASK_DATA_BASE64")) {
            (Some(path), _) => {
                let bad =
                    |e: String| wrong("FORKYARD_TASK_FILE", format!("{path:?}: {e}"), "name a task's file");
                let text = std::fs::read(path).map_err(|e| bad(e.to_string()))?;
                serde_json::from_slice(&text).map_err(|e| bad(e.to_string()))?
            }
            (None, Some(text)) => TaskData::from_base64(text)
                .map_err(|e| wrong("TASK_DATA_BASE64", e, "give the task's JSON in base64"))?,
            (None, None) => {
                let fix = "give the task's JSON in base64, or FORKYARD_TASK_FILE";
                return Err(wrong("TASK_DATA_BASE64", "is not set".into(), fix));
            }
        };
        override_with(&mut task, env)?;
        if let Some(session) = get("RESUME_SESSION_ID").filter(|s| **s != task.task_id()) {
            let fix = format!("the session of this task is {}", task.task_id());
            return Err(wrong("RESUME_SESSION_ID", format!("{session:?} is another task's"), &fix));
        }
        let home = get("HOME").map_or_else(|| PathBuf::from(&task.policy.home), PathBuf::from);
        let dir = get("FORKYARD_WORKER_DIR").map_or_else(|| home.join(WORKER_DIR), PathBuf::from);
        let commands_env = env
            .iter()
            .filter(|(name, _)| !OWN.contains(&name.as_str()))
            .map(|(name, value)| (name.clone(), value.clone()))
            .collect();
        Ok(Variables { callback_url, token, task, dir, commands_env })
    }
}

fn override_with(task: &mut TaskData, env: &BTreeMap<String, String>) -> Result<()> {
    let get = |name: &str| env.get(name).filter(|v| !v.is_empty());
    let wrong = |name: &str, value: &str, fix: &str| {
        CliError::usage(format!("{name} = {value:?} can't be used")).hint(fix.to_string())
    };
    let list =
        |text: &String| text.split(',').map(|t| t.trim().to_string()).filter(|t| !t.is_empty()).collect();
    for (name, field) in [
        ("TASK_DESCRIPTION", &mut task.prompt),
        ("MODEL", &mut task.model),
        ("BRANCH_NAME", &mut task.branch),
    ] {
        if let Some(value) = get(name) {
            field.clone_from(value);
        }
    }
    if let Some(n) = get("MAX_TURNS") {
        task.max_turns =
            n.parse().ok().filter(|n| *n > 0).ok_or_else(|| wrong("MAX_TURNS", n, "give a number"))?;
    }
    if let Some(s) = get("HEARTBEAT_INTERVAL") {
        let seconds: Option<f64> = s.parse().ok().filter(|s| (0.01..=3600.0).contains(s));
        let seconds = seconds.ok_or_else(|| wrong("HEARTBEAT_INTERVAL", s, "give seconds, at most 3600"))?;
        task.heartbeat_ms = (seconds * 1000.0) as u64;
    }
    if let Some(mode) = get("PERMISSION_MODE") {
        let fix = "use default, acceptEdits, plan or bypassPermissions";
        task.policy.permission_mode = serde_json::from_value::<PermissionMode>(mode.clone().into())
            .map_err(|_| wrong("PERMISSION_MODE", mode, fix))?;
    }
    if let Some(tools) = get("ALLOWED_TOOLS") {
        task.policy.allowed_tools = list(tools);
    }
    if let Some(tools) = get("DISALLOWED_TOOLS") {
        task.policy.disallowed_tools = list(tools);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use forkyard_agent::AgentConfig;
    use forkyard_core::policy::PolicyConfig;
    use forkyard_core::{Attempt, RunId, SandboxId};

    use super::*;

    fn env(more: &[(&str, &str)]) -> BTreeMap<String, String> {
        let config = AgentConfig::new(RunId::new("r1").unwrap(), 2, Attempt(1), "sonnet", "do it");
        let task = TaskData::new(SandboxId::new("s1").unwrap(), &config, PolicyConfig::default());
        let usual = [
            ("CALLBACK_URL", "http://forkyard.internal".to_string()),
            ("FORKYARD_TOKEN", "t".to_string()),
            ("TASK_DATA_BASE64", task.to_base64()),
            ("PATH", "/bin".to_string()),
        ];
        let given = more.iter().map(|(k, v)| (k.to_string(), v.to_string()));
        usual.into_iter().map(|(k, v)| (k.to_string(), v)).chain(given).collect()
    }

    #[test]
    fn variables_win_over_the_task() {
        let v = Variables::read(&env(&[
            ("MAX_TURNS", "7"),
            ("HEARTBEAT_INTERVAL", "0.5"),
            ("PERMISSION_MODE", "plan"),
            ("ALLOWED_TOOLS", "Read, Grep"),
            ("BRANCH_NAME", "b"),
            ("RESUME_SESSION_ID", "r1/2"),
        ]))
        .unwrap();
        assert_eq!((v.task.max_turns, v.task.heartbeat_ms, v.task.branch.as_str()), (7, 500, "b"));
        assert_eq!(v.task.policy.permission_mode, PermissionMode::Plan);
        assert_eq!(v.task.policy.allowed_tools, ["Read", "Grep"]);
        assert_eq!((v.task.prompt.as_str(), v.task.model.as_str()), ("do it", "sonnet"));
        // The agent's commands see none of it.
        assert_eq!(v.commands_env.keys().collect::<Vec<_>>(), ["BRANCH_NAME", "PATH"]);
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (name, value) in [
            ("CALLBACK_URL", ""),
            ("FORKYARD_TOKEN", ""),
            ("TASK_DATA_BASE64", ""),
            ("TASK_DATA_BASE64", "%%"),
            ("MAX_TURNS", "0"),
            ("HEARTBEAT_INTERVAL", "never"),
            ("PERMISSION_MODE", "root"),
            ("RESUME_SESSION_ID", "r9/0"),
        ] {
            let e = Variables::read(&env(&[(name, value)])).unwrap_err();
            let named =
                e.message.contains(name) || name == "FORKYARD_TOKEN" && e.message.contains("TOKEN_FILE");
            assert!(named && e.hint.is_some(), "{name}={value}: {e:?}");
        }
    }
}
