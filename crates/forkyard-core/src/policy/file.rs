//! Judges the path of a file tool.

use super::paths::{is_within, resolve};
use super::{Decision, PermissionMode, PolicyConfig, Rule, STRICT_DIRS, ToolCall, ToolKind, first_denial};

pub fn judge(config: &PolicyConfig, call: &ToolCall<'_>) -> Decision {
    let text = |key: &str| call.input.get(key).and_then(|v| v.as_str());
    let path = match ToolKind::of(call.tool) {
        ToolKind::Search => text("path").or(Some(config.workspace.as_str())),
        _ => text("file_path"),
    };
    // A call without its path is refused by the tool itself, with the name of the field.
    let Some(path) = path else { return Decision::Allow };
    let content_bytes = text("content").or_else(|| text("new_string")).map_or(0, str::len) as u64;
    if content_bytes > config.max_file_bytes {
        let reason =
            format!("{content_bytes} bytes are more than a file may have ({})", config.max_file_bytes);
        return Decision::deny(Rule::FileSize, reason);
    }
    // An absolute pattern, or one that climbs, goes where it says rather than below the path.
    let pattern =
        text("pattern").filter(|p| call.tool == "Glob" && (p.starts_with(['/', '~']) || p.contains("..")));
    first_denial([path].into_iter().chain(call.resolved_path).chain(pattern).map(|p| judge_path(config, p)))
}

fn judge_path(config: &PolicyConfig, path: &str) -> Decision {
    if path.contains('\0') {
        return Decision::deny(Rule::InvalidPath, "a path can't contain a NUL character");
    }
    let Some(full) = resolve(&config.workspace, path, &config.home) else {
        return Decision::deny(Rule::InvalidPath, "the path is empty");
    };
    if let Some(blocked) = config.blocked_roots().find(|b| is_within(&full, b)) {
        return Decision::deny(Rule::BlockedPath, format!("{full} is in a blocked place ({blocked})"));
    }
    if config.permission_mode == PermissionMode::BypassPermissions {
        return Decision::Allow;
    }
    if config.strict_paths && is_within(&full, &config.workspace) {
        let inside = full[config.workspace.len()..].trim_start_matches('/');
        return match inside.split_once('/') {
            Some((dir, _)) if !STRICT_DIRS.contains(&dir) => Decision::deny(
                Rule::NotAllowedPath,
                format!("strict paths: {dir}/ is not one of {}", STRICT_DIRS.join(", ")),
            ),
            Some(_) | None => Decision::Allow,
        };
    }
    if !config.allowed_roots().any(|a| is_within(&full, &a)) {
        let allowed = config.allowed_paths.join(", ");
        return Decision::deny(
            Rule::NotAllowedPath,
            format!("{full} is outside of the allowed paths ({allowed})"),
        );
    }
    Decision::Allow
}
