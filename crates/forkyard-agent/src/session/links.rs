//! Where a path leads inside the sandbox. Only for policy's eyes: the sandbox resolves paths itself when it opens them.

use forkyard_core::policy::ToolKind;
use forkyard_sandbox::FileKind;
use serde_json::{Map, Value};

use super::{Halt, Session};
use crate::tools::Failure;

/// As many as the kernel follows.
const MAX_LINKS: u32 = 40;
/// Parts of a path that are looked at; longer ones name nothing that exists.
const MAX_PARTS: usize = 128;

/// The path of a file tool's call with symlinks followed, if it has any.
pub(super) async fn resolve(
    session: &Session,
    tool: &str,
    input: &Map<String, Value>,
) -> Result<Option<String>, Halt> {
    let field = match ToolKind::of(tool) {
        ToolKind::ReadFile | ToolKind::WriteFile => "file_path",
        ToolKind::Search => "path",
        ToolKind::Command | ToolKind::Other => return Ok(None),
    };
    let Some(path) = input.get(field).and_then(Value::as_str).filter(|p| !p.is_empty()) else {
        return Ok(None);
    };
    let full = session.absolute(path);
    let mut todo: Vec<String> = parts(&full).rev().map(str::to_string).collect();
    let mut done: Vec<String> = Vec::new();
    let mut links = 0;
    // Everything up to the workspace is the sandbox's own.
    let own = parts(&session.policy.workspace).count();
    if parts(&full).zip(parts(&session.policy.workspace)).filter(|(a, b)| a == b).count() == own
        && !full.contains("..")
    {
        done.extend(todo.drain(todo.len() - own..).rev());
    }
    while let Some(part) = todo.pop() {
        if done.len() >= MAX_PARTS {
            break;
        }
        match part.as_str() {
            "." => continue,
            ".." => {
                done.pop();
                continue;
            }
            _ => done.push(part),
        }
        let here = format!("/{}", done.join("/"));
        let info = match session.sandbox.stat(&here).await.map_err(Failure::from) {
            Ok(info) => info,
            // Not there yet: nothing below it can be a link.
            Err(Failure::Result(_)) => break,
            Err(Failure::Halt(halt)) => return Err(halt),
        };
        if let (FileKind::Symlink, Some(target)) = (info.kind, info.symlink_target) {
            links += 1;
            if links > MAX_LINKS {
                break;
            }
            done.pop();
            if target.starts_with('/') {
                done.clear();
            }
            todo.extend(parts(&target).rev().map(str::to_string));
        }
    }
    if links == 0 {
        return Ok(None);
    }
    done.extend(todo.into_iter().rev());
    Ok(Some(format!("/{}", done.join("/"))))
}

fn parts(path: &str) -> impl DoubleEndedIterator<Item = &str> {
    path.split('/').filter(|p| !p.is_empty())
}
