//! Which tools may be used at all: lists and permission mode.

use super::invocation;
use super::paths::resolve;
use super::shell::Start;
use super::{Decision, PermissionMode, PolicyConfig, Rule, ToolCall, glob};

/// What a tool does to the sandbox, as far as policy and scheduling care.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ToolKind {
    Command,
    ReadFile,
    WriteFile,
    Search,
    /// Subagents (whose own calls are judged one by one), skills, and tools that others add.
    Other,
}

impl ToolKind {
    pub fn of(tool: &str) -> ToolKind {
        match tool {
            "Bash" => ToolKind::Command,
            "Read" => ToolKind::ReadFile,
            "Write" | "Edit" => ToolKind::WriteFile,
            "Glob" | "Grep" => ToolKind::Search,
            _ => ToolKind::Other,
        }
    }

    pub fn only_reads(self) -> bool {
        match self {
            ToolKind::ReadFile | ToolKind::Search => true,
            ToolKind::Command | ToolKind::WriteFile | ToolKind::Other => false,
        }
    }
}

pub fn judge(config: &PolicyConfig, call: &ToolCall<'_>) -> Decision {
    let tool = call.tool;
    if let Some(pattern) = config.disallowed_tools.iter().find(|p| is_named(config, p, call, Quantifier::Any))
    {
        return Decision::deny(Rule::DisallowedTool, format!("the tool is disallowed by `{pattern}`"));
    }
    let named = config.allowed_tools.iter().any(|p| is_named(config, p, call, Quantifier::All));
    if !config.allowed_tools.is_empty() && !named {
        let allowed = config.allowed_tools.join(", ");
        return Decision::deny(
            Rule::NotAllowedTool,
            format!("{tool} with this input is not among: {allowed}"),
        );
    }
    let kind = ToolKind::of(tool);
    let changes = matches!(kind, ToolKind::Command | ToolKind::WriteFile);
    match config.permission_mode {
        PermissionMode::Plan if changes => Decision::deny(
            Rule::PermissionMode,
            format!("{tool} changes things; in plan mode only reading is allowed"),
        ),
        PermissionMode::Default if changes && !named => Decision::deny(
            Rule::PermissionMode,
            format!("{tool} would need approval in this permission mode; it is not among the allowed tools"),
        ),
        PermissionMode::Plan
        | PermissionMode::Default
        | PermissionMode::AcceptEdits
        | PermissionMode::BypassPermissions => Decision::Allow,
    }
}

/// Whether an entry of a list is about this tool: `Bash`, `Bash(git *)` and `*` are about Bash.
pub fn is_about(entry: &str, tool: &str) -> bool {
    glob::matches(entry.split('(').next().unwrap_or_default().trim(), tool)
}

pub fn offers(config: &PolicyConfig, tool: &str) -> bool {
    let names = |entry: &String| is_about(entry, tool);
    let disallowed = config.disallowed_tools.iter().any(|p| !p.contains('(') && names(p));
    let named = config.allowed_tools.iter().any(names);
    let changes = matches!(ToolKind::of(tool), ToolKind::Command | ToolKind::WriteFile);
    let by_mode = match config.permission_mode {
        PermissionMode::Plan => !changes,
        PermissionMode::Default => !changes || named,
        PermissionMode::AcceptEdits | PermissionMode::BypassPermissions => true,
    };
    !disallowed && by_mode && (config.allowed_tools.is_empty() || named)
}

/// Of a script's commands: must all of them fit the pattern, or any?
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Quantifier {
    All,
    Any,
}

/// `Tool`, `Tool*` or `Tool(specifier)`: a command pattern (`npm run *`, `npm run:*`) or a path pattern (`src/**`).
fn is_named(config: &PolicyConfig, pattern: &str, call: &ToolCall<'_>, quantifier: Quantifier) -> bool {
    let Some((tool, specifier)) = pattern.split_once('(') else {
        return glob::matches(pattern.trim(), call.tool);
    };
    let specifier = specifier.strip_suffix(')').unwrap_or(specifier);
    if !glob::matches(tool.trim(), call.tool) {
        return false;
    }
    let text = |key: &str| call.input.get(key).and_then(|v| v.as_str());
    match ToolKind::of(call.tool) {
        ToolKind::Command => {
            let Some(script) = text("command") else { return false };
            let start = Start { cwd: Some(&config.workspace), home: &config.home, depth: 0 };
            let found = invocation::of_script(script, &start);
            let fits = |i: &invocation::Invocation| {
                let words: Vec<&str> =
                    [i.name.as_str()].into_iter().chain(i.args.iter().map(|w| w.text.as_str())).collect();
                let line = words.join(" ");
                match specifier.strip_suffix(":*") {
                    Some(prefix) => line == prefix || line.starts_with(&format!("{prefix} ")),
                    None => glob::matches(specifier, &line),
                }
            };
            match quantifier {
                Quantifier::All => !found.too_complex && !found.all.is_empty() && found.all.iter().all(fits),
                Quantifier::Any => found.too_complex || found.all.iter().any(fits),
            }
        }
        ToolKind::ReadFile | ToolKind::WriteFile | ToolKind::Search => {
            let Some(path) = text("file_path").or_else(|| text("path")) else { return false };
            let absolute = |p: &str| resolve(&config.workspace, p, &config.home);
            let (Some(path), Some(specifier)) = (absolute(path), absolute(specifier)) else { return false };
            let through_link = call.resolved_path.and_then(absolute);
            let fits = |p: &String| {
                glob::matches(&specifier, p)
                    || specifier.strip_suffix("/**").is_some_and(|dir| super::paths::is_within(p, dir))
            };
            match quantifier {
                Quantifier::All => fits(&path) && through_link.as_ref().is_none_or(fits),
                Quantifier::Any => fits(&path) || through_link.as_ref().is_some_and(fits),
            }
        }
        ToolKind::Other => true,
    }
}
