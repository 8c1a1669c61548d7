//! Files: each belongs to a module tree, and none is too long.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Component, Path, PathBuf};

use super::crates::Metadata;
use super::{Finding, Text, source};
use crate::steps;

/// Longer than this, a file holds more than one thing.
const MAX_LINES: usize = 800;

/// Files that may be longer, and why.
const LONG_FILES: &[(&str, &str)] = &[];

pub fn check(metadata: &Metadata, texts: &[Text]) -> Vec<Finding> {
    let relative =
        |p: &str| Path::new(p).strip_prefix(steps::root()).ok().map(|p| p.to_string_lossy().into_owned());
    let ours: BTreeSet<&str> = metadata.workspace_members.iter().map(String::as_str).collect();
    let mut roots = Vec::new();
    let mut dirs = Vec::new();
    for package in metadata.packages.iter().filter(|p| ours.contains(p.id.as_str())) {
        roots.extend(package.targets.iter().filter_map(|t| relative(&t.src_path)));
        dirs.extend(
            relative(&package.manifest_path)
                .map(|m| format!("{}/", Path::new(&m).parent().unwrap_or(Path::new("")).display())),
        );
    }
    let files: BTreeMap<&str, &str> = texts
        .iter()
        .filter(|t| t.path.ends_with(".rs"))
        .map(|t| (t.path.as_str(), t.text.as_str()))
        .collect();
    let mut findings = orphans(&files, &roots);
    findings.retain(|f| dirs.iter().any(|d| f.path.starts_with(d.as_str())));
    findings.extend(too_long(&files));
    findings
}

fn too_long(files: &BTreeMap<&str, &str>) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (path, text) in files {
        let lines = text.lines().count();
        if lines > MAX_LINES && !LONG_FILES.iter().any(|(p, _)| p == path) {
            findings.push(Finding::new(path, 0, format!("{lines} lines; at most {MAX_LINES} (split it)")));
        }
    }
    for (path, _) in LONG_FILES {
        if files.get(path).is_none_or(|t| t.lines().count() <= MAX_LINES) {
            findings.push(Finding::new(path, 0, "is short enough now: take it off the list of long files"));
        }
    }
    findings
}

/// Files that no module declares, starting from the targets' root files.
fn orphans(files: &BTreeMap<&str, &str>, roots: &[String]) -> Vec<Finding> {
    let mut seen: BTreeSet<String> = BTreeSet::new();
    let mut todo: Vec<(String, bool)> = roots.iter().map(|r| (r.clone(), true)).collect();
    while let Some((path, is_root)) = todo.pop() {
        let Some(text) = files.get(path.as_str()) else { continue };
        if !seen.insert(path.clone()) {
            continue;
        }
        todo.extend(declared(&path, is_root, text, files).into_iter().map(|p| (p, false)));
    }
    files
        .keys()
        .filter(|p| !seen.contains(**p))
        .map(|p| Finding::new(p, 0, "no module declares this file"))
        .collect()
}

/// Files that the `mod`, `#[path]` and `include!` lines of one file name.
fn declared(path: &str, is_root: bool, text: &str, files: &BTreeMap<&str, &str>) -> Vec<String> {
    let here = Path::new(path);
    let dir = here.parent().unwrap_or(Path::new(""));
    let stem = here.file_stem().unwrap_or_default().to_string_lossy();
    // Where the files of `mod name;` lie.
    let below = if is_root || stem == "mod" { dir.to_path_buf() } else { dir.join(&*stem) };
    let mut inline: Vec<(usize, String)> = Vec::new();
    let mut depth = 0usize;
    let mut next_path: Option<String> = None;
    let mut found = Vec::new();
    for (raw, line) in text.lines().zip(source::blank(text).lines()) {
        let trimmed = line.trim();
        if trimmed.starts_with("#[path") {
            next_path = quoted(raw);
        }
        if line.contains("include!(") {
            found.extend(quoted(raw).map(|q| clean(&dir.join(q))));
        }
        if let Some(name) = mod_name(trimmed) {
            if trimmed.ends_with(';') {
                let inside: PathBuf = inline.iter().map(|(_, n)| n.as_str()).collect();
                if let Some(p) = next_path.take() {
                    found.push(clean(&dir.join(p)));
                } else {
                    let base = below.join(inside);
                    let options = [base.join(format!("{name}.rs")), base.join(&name).join("mod.rs")];
                    found.extend(options.iter().map(|p| clean(p)).filter(|p| files.contains_key(p.as_str())));
                }
            } else if trimmed.contains('{') {
                inline.push((depth, name));
            }
        }
        depth += line.matches('{').count();
        depth = depth.saturating_sub(line.matches('}').count());
        while inline.last().is_some_and(|(d, _)| depth <= *d) {
            inline.pop();
        }
    }
    found
}

/// The name in `mod name`, with any visibility before it.
fn mod_name(line: &str) -> Option<String> {
    let mut rest = line;
    if let Some(after) = rest.strip_prefix("pub") {
        rest = after.trim_start();
        if rest.starts_with('(') {
            rest = rest.split_once(')')?.1.trim_start();
        }
    }
    let name = rest.strip_prefix("mod ")?.trim_start();
    let end = name.find(|c: char| !(c.is_alphanumeric() || c == '_')).unwrap_or(name.len());
    (end > 0).then(|| name[..end].to_string())
}

fn quoted(line: &str) -> Option<String> {
    line.split('"').nth(1).map(str::to_string)
}

/// `a/b/../c` as `a/c`.
fn clean(path: &Path) -> String {
    let mut parts: Vec<String> = Vec::new();
    for c in path.components() {
        match c {
            Component::ParentDir => {
                parts.pop();
            }
            Component::Normal(p) => parts.push(p.to_string_lossy().into_owned()),
            Component::CurDir | Component::RootDir | Component::Prefix(_) => {}
        }
    }
    parts.join("/")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn orphans_are_found_and_declared_files_are_not() {
        let files = BTreeMap::from([
            (
                "c/src/lib.rs",
                "mod a;\npub(crate) mod b;\nmod inner {\n    mod deep;\n}\n#[path = \"odd/x.rs\"]\nmod x;\n// mod dead;\n",
            ),
            ("c/src/a.rs", "mod sub;"),
            ("c/src/a/sub.rs", ""),
            ("c/src/b/mod.rs", "mod sub;"),
            ("c/src/b/sub.rs", "include!(\"../gen.rs\");"),
            ("c/src/gen.rs", ""),
            ("c/src/inner/deep.rs", ""),
            ("c/src/odd/x.rs", ""),
            ("c/src/dead.rs", ""),
            ("c/src/sub.rs", ""),
        ]);
        let found: Vec<String> =
            orphans(&files, &["c/src/lib.rs".into()]).into_iter().map(|f| f.path).collect();
        assert_eq!(found, ["c/src/dead.rs", "c/src/sub.rs"]);
    }

    #[test]
    fn long_files_are_found() {
        let long = "x\n".repeat(MAX_LINES + 1);
        let files = BTreeMap::from([("a.rs", long.as_str()), ("b.rs", "x")]);
        assert_eq!(too_long(&files).iter().map(|f| f.path.as_str()).collect::<Vec<_>>(), ["a.rs"]);
    }
}
