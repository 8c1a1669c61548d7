//! Words that must not be left behind: markers of unfinished work, and paths of somebody's machine.

use super::{Finding, Text};

/// Written in halves, so that this file does not find itself.
const MARKERS: &[&str] = &[
    concat!("TO", "DO"),
    concat!("FIX", "ME"),
    concat!("XX", "X:"),
    concat!("to", "do!("),
    concat!("unimpl", "emented!("),
    concat!("not yet impl", "emented"),
    concat!("<<<", "<<<<"),
    concat!(">>>", ">>>>"),
];

/// Starts of absolute paths that mean one machine only.
const MACHINE_PATHS: &[&str] = &[concat!("/wo", "rk/"), concat!("/mnt/", "data/"), concat!("/Us", "ers/")];

/// Other people's texts.
const EXEMPT: &[&str] = &["LICENSE", "Cargo.lock"];

pub fn check(texts: &[Text]) -> Vec<Finding> {
    let mut findings = Vec::new();
    for t in texts.iter().filter(|t| !EXEMPT.contains(&t.path.as_str())) {
        for (i, line) in t.text.lines().enumerate() {
            if let Some(m) =
                MARKERS.iter().find(|m| line.match_indices(**m).any(|(at, _)| !quoted(&t.path, line, at)))
            {
                findings.push(Finding::new(&t.path, i + 1, format!("{m:?}: finish it or take it out")));
            }
            if let Some(p) = MACHINE_PATHS.iter().find(|p| starts_path(line, p)) {
                findings.push(Finding::new(&t.path, i + 1, format!("{p:?} is a path of one machine")));
            }
        }
    }
    findings
}

/// In a literal of Rust a marker is data: a fixture that is searched for it, say.
fn quoted(path: &str, line: &str, at: usize) -> bool {
    path.ends_with(".rs") && line[..at].replace("\\\"", "").matches('"').count() % 2 == 1
}

/// Whether an absolute path in `line` starts with `path`: `/a/wo…` does not, since it starts with `/a`.
fn starts_path(line: &str, path: &str) -> bool {
    line.match_indices(path)
        .any(|(at, _)| !line[..at].ends_with(|c: char| c.is_alphanumeric() || "_-.}~*$/>)]".contains(c)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn markers_and_machine_paths_are_found() {
        let bad = [
            concat!("// TO", "DO later"),
            concat!("unimpl", "emented!()"),
            concat!("cd /wo", "rk/x"),
            concat!("\"/Us", "ers/me\""),
        ];
        for text in bad {
            assert_eq!(check(&[Text { path: "a.md".into(), text: text.into() }]).len(), 1, "{text}");
        }
        let data = Text { path: "a.rs".into(), text: concat!("f(\"TO", "DO\")").into() };
        assert_eq!(check(&[data]), []);
        for text in ["/workspace/x", "{dir}/work/y", "upper/work/", "autodone"] {
            assert_eq!(check(&[Text { path: "a.md".into(), text: text.into() }]), [], "{text}");
        }
    }
}
