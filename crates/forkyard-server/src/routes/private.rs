//! What of a sandbox's files is not for its watchers: the worker's own folder, where its token lies, and /proc, where the
//! memory of those who have read the token does. Whoever may look could spend money with it otherwise.

use forkyard_engine::inside::WORKER_DIR;
use forkyard_engine::sandboxes::types::{ErrorKind, Sandbox};
use forkyard_store::Scope;

use super::files::WORKSPACE;
use crate::access::Principal;
use crate::error::{ApiError, Code, Result};

/// The kernel's own bound for a path.
const MAX_LINKS: usize = 40;

/// Refuses a path that leads there, unless an admin asks.
pub(super) async fn check(sandbox: &dyn Sandbox, by: &Principal, path: &str) -> Result<()> {
    if by.scope < Scope::Admin && is_private(&resolve(sandbox, path).await?) {
        return Err(ApiError::new(Code::PathRefused, format!("{path:?} is the sandbox's own"))
            .hint("only a token of scope admin reaches it"));
    }
    Ok(())
}

/// Wherever the home is. A repository may have a folder of the same name, with skills.
fn is_private(path: &str) -> bool {
    let mut parts = path.split('/').skip(1);
    match parts.next() {
        Some("proc") => true,
        Some("workspace") => false,
        first => first.into_iter().chain(parts).any(|part| part == WORKER_DIR),
    }
}

/// Where a path leads to, link by link, as the kernel goes there. A race with somebody inside gains that one nothing: who
/// can change links there can copy the token, too.
async fn resolve(sandbox: &dyn Sandbox, path: &str) -> Result<String> {
    let from = if path.starts_with('/') { String::new() } else { format!("{WORKSPACE}/") };
    let mut ahead = parts(&format!("{from}{path}"));
    let (mut at, mut links) = (String::new(), 0);
    while let Some(part) = ahead.pop() {
        match part.as_str() {
            "" | "." => continue,
            ".." => {
                at.truncate(at.rfind('/').unwrap_or(0));
                continue;
            }
            _ => {}
        }
        let next = format!("{at}/{part}");
        let target = match sandbox.stat(&next).await {
            Ok(found) => found.symlink_target,
            // What is not there yet can be made there; what may not be looked at is refused there.
            Err(e) if matches!(e.kind, ErrorKind::NotFound | ErrorKind::Denied) => None,
            Err(e) => return Err(e.into()),
        };
        let Some(target) = target else {
            at = next;
            continue;
        };
        links += 1;
        // Bytes that are not text are told escaped: where such a link leads can't be looked at.
        if links > MAX_LINKS || target.contains('\\') {
            return Err(ApiError::new(Code::PathRefused, format!("{path:?} leads through links")));
        }
        if target.starts_with('/') {
            at.clear();
        }
        ahead.extend(parts(&target));
    }
    Ok(if at.is_empty() { "/".into() } else { at })
}

/// The last part first.
fn parts(path: &str) -> Vec<String> {
    path.split('/').rev().map(String::from).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_worker_s_folder_is_private_and_a_repository_s_is_not() {
        for path in
            ["/home/user/.forkyard", "/root/.forkyard/token", "/.forkyard/run", "/proc", "/proc/1/mem"]
        {
            assert!(is_private(path), "{path}");
        }
        for path in ["/", "/home/user", "/workspace/.forkyard/skills/a", "/process", "/home/user/.forkyard2"]
        {
            assert!(!is_private(path), "{path}");
        }
    }
}
