//! Paths as text. Symlinks are the sandbox's business; where it resolved one, both names are judged.

use super::glob;
use super::shell::UNKNOWN;

/// An absolute path without `.`, `..` and doubled slashes; None for the empty one.
pub fn resolve(cwd: &str, path: &str, home: &str) -> Option<String> {
    if path.is_empty() {
        return None;
    }
    let full = match path.strip_prefix('~') {
        Some(rest) if rest.is_empty() || rest.starts_with('/') => format!("{home}{rest}"),
        _ if path.starts_with('/') => path.to_string(),
        _ => format!("{cwd}/{path}"),
    };
    let mut parts: Vec<&str> = Vec::new();
    for part in full.split('/') {
        match part {
            "" | "." => {}
            ".." => {
                parts.pop();
            }
            part => parts.push(part),
        }
    }
    Some(format!("/{}", parts.join("/")))
}

/// Whether `path` is `dir` or below it. Both are absolute and plain.
pub fn is_within(path: &str, dir: &str) -> bool {
    dir == "/" || path == dir || path.strip_prefix(dir).is_some_and(|rest| rest.starts_with('/'))
}

/// How a path with wildcards relates to a plain one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Relation {
    /// It is the other, or below it.
    Within,
    /// The other is below it.
    Above,
    Apart,
}

/// Compares part by part; a wildcard matches within its part, as in a shell. A part that is only known at run time matches
/// nothing.
pub fn relation(pattern: &str, path: &str) -> Relation {
    let pattern: Vec<&str> = pattern.split('/').filter(|p| !p.is_empty()).collect();
    let path: Vec<&str> = path.split('/').filter(|p| !p.is_empty()).collect();
    let same = pattern.iter().zip(&path).all(|(a, b)| !a.contains(UNKNOWN) && glob::matches(a, b));
    match same {
        false => Relation::Apart,
        true if pattern.len() >= path.len() => Relation::Within,
        true => Relation::Above,
    }
}
