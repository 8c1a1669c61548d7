//! Policy: a pure judgement of one tool call. The chain that applies it, and the sandbox that binds whatever it says, are
//! elsewhere; policy is a guard rail that gives the model a reason, not the wall.

mod command;
mod file;
mod glob;
mod invocation;
mod paths;
mod shell;
mod tools;

#[cfg(test)]
mod properties;
#[cfg(test)]
mod table;

use serde::{Deserialize, Serialize};

pub use tools::{ToolKind, is_about};

/// Tool calls of one answer; a model that asks for more is looping.
pub const DEFAULT_MAX_CALLS_PER_TURN: u32 = 50;
/// Largest file that a tool writes or reads as a whole.
pub const DEFAULT_MAX_FILE_BYTES: u64 = 100 << 20;

/// What a call is judged by. It comes from the user's configuration, never from a repository.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PolicyConfig {
    pub permission_mode: PermissionMode,
    /// `Read`, `Bash(git *)`, `Edit(src/**)`, `mcp__*`. Empty allows every tool.
    pub allowed_tools: Vec<String>,
    pub disallowed_tools: Vec<String>,
    /// Where file tools may go. Relative ones are the workspace's.
    pub allowed_paths: Vec<String>,
    /// Closed to file tools; commands may read but not write there.
    pub blocked_paths: Vec<String>,
    /// Closed to commands, too.
    pub secret_paths: Vec<String>,
    /// Only the workspace's conventional directories and the files at its root.
    pub strict_paths: bool,
    /// Rules such as `sudo rm`, `mkfs*`, `git push --force`.
    pub blocked_commands: Vec<String>,
    pub block_fork_bombs: bool,
    pub max_file_bytes: u64,
    pub max_calls_per_turn: u32,
    pub workspace: String,
    pub home: String,
}

impl Default for PolicyConfig {
    fn default() -> Self {
        let list = |items: &[&str]| items.iter().map(|s| (*s).to_string()).collect::<Vec<_>>();
        PolicyConfig {
            permission_mode: PermissionMode::AcceptEdits,
            allowed_tools: Vec::new(),
            disallowed_tools: Vec::new(),
            allowed_paths: list(&["/workspace", "/tmp", "~"]),
            blocked_paths: list(&["/etc", "/var", "/usr", "/bin", "/sbin", "/boot", "/sys", "/proc"]),
            secret_paths: list(&["~/.ssh", "~/.aws", "~/.config"]),
            strict_paths: false,
            blocked_commands: list(&[
                "rm -r /",
                "rm --no-preserve-root",
                "sudo rm",
                "mkfs",
                "mkfs.*",
                "dd if=",
                "chmod 0",
                "chmod 00",
                "chmod 000",
                "chmod 0000",
                "chown root",
                "chown root:*",
                "chown 0",
                "chown 0:*",
                "fdisk",
                "sfdisk",
                "cfdisk",
                "parted",
                "shutdown",
                "reboot",
                "halt",
                "poweroff",
                "init 0",
                "init 6",
                "telinit",
                "systemctl reboot",
                "systemctl halt",
                "systemctl poweroff",
            ]),
            block_fork_bombs: true,
            max_file_bytes: DEFAULT_MAX_FILE_BYTES,
            max_calls_per_turn: DEFAULT_MAX_CALLS_PER_TURN,
            workspace: "/workspace".to_string(),
            home: "/home/user".to_string(),
        }
    }
}

/// Directories of a workspace that strict paths leave open, besides files at its root.
const STRICT_DIRS: &[&str] =
    &["temp", "specs", "workspace", "src", "tests", "docs", "scripts", "config", "data"];

impl PolicyConfig {
    fn expanded<'a>(&'a self, list: &'a [String]) -> impl Iterator<Item = String> + 'a {
        list.iter().flat_map(|entry| {
            let own = paths::resolve(&self.workspace, entry, &self.home);
            // A home path means every home that there can be.
            let root = entry.starts_with('~').then(|| paths::resolve("/", entry, "/root")).flatten();
            own.into_iter().chain(root)
        })
    }
    /// Whether some call of the tool could be allowed: a tool that never is need not be offered to a model.
    pub fn offers(&self, tool: &str) -> bool {
        tools::offers(self, tool)
    }
    fn secret_roots(&self) -> impl Iterator<Item = String> + '_ {
        self.expanded(&self.secret_paths)
    }
    fn blocked_roots(&self) -> impl Iterator<Item = String> + '_ {
        self.expanded(&self.blocked_paths).chain(self.secret_roots())
    }
    fn allowed_roots(&self) -> impl Iterator<Item = String> + '_ {
        self.expanded(&self.allowed_paths)
    }
}

/// What an agent may do without being asked. Nobody can be asked in a fork, so what would be asked for is denied.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum PermissionMode {
    /// Only reading, and the tools that are named as allowed.
    Default,
    /// Edits and commands, within the rest of the policy.
    #[default]
    AcceptEdits,
    /// Only reading.
    Plan,
    /// As `acceptEdits`, and the list of allowed paths does not apply; what is blocked stays blocked.
    BypassPermissions,
}

/// A tool call as policy sees it.
#[derive(Debug, Clone, PartialEq)]
pub struct ToolCall<'a> {
    pub tool: &'a str,
    pub input: &'a serde_json::Value,
    /// Which call of its turn this is, from 1.
    pub number_in_turn: u32,
    /// What the path of the call turned out to be inside the sandbox, where symlinks led elsewhere.
    pub resolved_path: Option<&'a str>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Decision {
    Allow,
    Deny { rule: Rule, reason: String },
}

/// Which part of the policy decided.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Rule {
    CallsPerTurn,
    DisallowedTool,
    NotAllowedTool,
    PermissionMode,
    BlockedCommand,
    BlockedPath,
    NotAllowedPath,
    InvalidPath,
    Device,
    FileSize,
    TooComplex,
    /// Not the policy itself: a hook or an interceptor of the user.
    Interceptor,
}

impl Rule {
    pub fn as_str(self) -> &'static str {
        match self {
            Rule::CallsPerTurn => "calls_per_turn",
            Rule::DisallowedTool => "disallowed_tool",
            Rule::NotAllowedTool => "not_allowed_tool",
            Rule::PermissionMode => "permission_mode",
            Rule::BlockedCommand => "blocked_command",
            Rule::BlockedPath => "blocked_path",
            Rule::NotAllowedPath => "not_allowed_path",
            Rule::InvalidPath => "invalid_path",
            Rule::Device => "device",
            Rule::FileSize => "file_size",
            Rule::TooComplex => "too_complex",
            Rule::Interceptor => "interceptor",
        }
    }
}

impl Decision {
    fn deny(rule: Rule, reason: impl Into<String>) -> Decision {
        Decision::Deny { rule, reason: reason.into() }
    }
}

/// Judges one call. Pure and total: the same call under the same policy always gets the same answer.
pub fn evaluate(config: &PolicyConfig, call: &ToolCall<'_>) -> Decision {
    if call.number_in_turn > config.max_calls_per_turn {
        return Decision::deny(
            Rule::CallsPerTurn,
            format!("at most {} tool calls a turn are allowed", config.max_calls_per_turn),
        );
    }
    first_denial([
        tools::judge(config, call),
        match ToolKind::of(call.tool) {
            ToolKind::Command => match call.input.get("command").and_then(|c| c.as_str()) {
                Some(script) => command::judge(config, script),
                None => Decision::Allow,
            },
            ToolKind::ReadFile | ToolKind::WriteFile | ToolKind::Search => file::judge(config, call),
            ToolKind::Other => Decision::Allow,
        },
    ])
}

fn first_denial(decisions: impl IntoIterator<Item = Decision>) -> Decision {
    decisions.into_iter().find(|d| *d != Decision::Allow).unwrap_or(Decision::Allow)
}
