//! Who may depend on whom. The table is the architecture; Cargo.toml files obey it.

use std::collections::{BTreeMap, BTreeSet};

use serde::Deserialize;

use super::Finding;

/// A crate of ours and those of ours that it may use. The order is that of the layers.
const MAY_USE: &[(&str, &[&str])] = &[
    ("forkyard-core", &[]),
    ("forkyard-store", &["forkyard-core"]),
    ("forkyard-guest", &[]),
    ("forkyard-sandbox", &["forkyard-core", "forkyard-guest"]),
    ("forkyard-agent", &["forkyard-core", "forkyard-sandbox"]),
    ("forkyard-engine", &["forkyard-core", "forkyard-store", "forkyard-sandbox", "forkyard-agent"]),
    ("forkyard-temporal", &["forkyard-core", "forkyard-store", "forkyard-engine"]),
    ("forkyard-server", &["forkyard-core", "forkyard-store", "forkyard-engine"]),
    (
        "forkyard",
        &[
            "forkyard-core",
            "forkyard-store",
            "forkyard-guest",
            "forkyard-sandbox",
            "forkyard-agent",
            "forkyard-engine",
            "forkyard-temporal",
            "forkyard-server",
        ],
    ),
    (
        TEST_SUPPORT,
        &[
            "forkyard-core",
            "forkyard-store",
            "forkyard-guest",
            "forkyard-sandbox",
            "forkyard-agent",
            "forkyard-engine",
        ],
    ),
    ("xtask", &[]),
];

/// Fakes and fixtures: a dev-dependency of anybody, a normal one of nobody.
const TEST_SUPPORT: &str = "test-support";

/// All that the pure core may reach, directly or not: (de)serialization and error derives, and what they are made of.
const CORE: &str = "forkyard-core";
const CORE_CLOSURE: &[&str] = &[
    "itoa",
    "memchr",
    "proc-macro2",
    "quote",
    "ryu",
    "serde",
    "serde_core",
    "serde_derive",
    "serde_json",
    "syn",
    "thiserror",
    "thiserror-impl",
    "unicode-ident",
    "zmij",
];

/// The part of `cargo metadata` that tidy reads.
#[derive(Deserialize)]
pub struct Metadata {
    pub packages: Vec<Package>,
    pub workspace_members: Vec<String>,
    pub resolve: Resolve,
}

#[derive(Deserialize)]
pub struct Package {
    pub id: String,
    pub name: String,
    pub version: String,
    pub source: Option<String>,
    pub license: Option<String>,
    pub manifest_path: String,
    pub targets: Vec<Target>,
}

#[derive(Deserialize)]
pub struct Target {
    pub src_path: String,
}

#[derive(Deserialize)]
pub struct Resolve {
    pub nodes: Vec<Node>,
}

#[derive(Deserialize)]
pub struct Node {
    pub id: String,
    pub deps: Vec<Dep>,
}

#[derive(Deserialize)]
pub struct Dep {
    pub pkg: String,
    pub dep_kinds: Vec<DepKind>,
}

#[derive(Deserialize)]
pub struct DepKind {
    /// None: a normal dependency.
    pub kind: Option<String>,
}

impl Dep {
    fn is_dev_only(&self) -> bool {
        self.dep_kinds.iter().all(|k| k.kind.as_deref() == Some("dev"))
    }
}

pub fn check(metadata: &Metadata) -> Vec<Finding> {
    let name: BTreeMap<&str, &str> =
        metadata.packages.iter().map(|p| (p.id.as_str(), p.name.as_str())).collect();
    let ours: BTreeSet<&str> = metadata.workspace_members.iter().map(|id| name[id.as_str()]).collect();
    let mut findings = Vec::new();
    for node in &metadata.resolve.nodes {
        let from = name[node.id.as_str()];
        if !ours.contains(from) {
            continue;
        }
        let at = format!("crate {from}");
        let Some((_, allowed)) = MAY_USE.iter().find(|(n, _)| *n == from) else {
            findings.push(Finding::new(&at, 0, "is not in the table of crates: give it a place (MAY_USE)"));
            continue;
        };
        for dep in &node.deps {
            let to = name[dep.pkg.as_str()];
            // A crate's tests may use the crate itself, with more features.
            let in_tests = (to == TEST_SUPPORT || to == from) && dep.is_dev_only();
            if !ours.contains(to) || allowed.contains(&to) || in_tests {
                continue;
            }
            let text = if to == TEST_SUPPORT {
                format!("{TEST_SUPPORT} must be a dev-dependency")
            } else {
                format!("may not depend on {to}")
            };
            findings.push(Finding::new(&at, 0, text));
        }
    }
    findings.extend(core_closure(metadata, &name));
    findings
}

fn core_closure(metadata: &Metadata, name: &BTreeMap<&str, &str>) -> Vec<Finding> {
    let nodes: BTreeMap<&str, &Node> = metadata.resolve.nodes.iter().map(|n| (n.id.as_str(), n)).collect();
    let mut todo: Vec<&str> = name.iter().filter(|(_, n)| **n == CORE).map(|(id, _)| *id).collect();
    let mut seen: BTreeSet<&str> = todo.iter().copied().collect();
    while let Some(id) = todo.pop() {
        for dep in nodes[id].deps.iter().filter(|d| d.dep_kinds.iter().any(|k| k.kind.is_none())) {
            if seen.insert(&dep.pkg) {
                todo.push(&dep.pkg);
            }
        }
    }
    seen.iter()
        .map(|id| name[*id])
        .filter(|n| *n != CORE && !CORE_CLOSURE.contains(n))
        .map(|n| Finding::new("crate forkyard-core", 0, format!("must stay pure, but reaches {n}")))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Packages by name; edges as (from, to, kind).
    fn metadata(ours: &[&str], others: &[&str], edges: &[(&str, &str, Option<&str>)]) -> Metadata {
        let package = |n: &&str| Package {
            id: n.to_string(),
            name: n.to_string(),
            version: "1.0.0".into(),
            source: None,
            license: None,
            manifest_path: String::new(),
            targets: vec![],
        };
        let node = |n: &&str| Node {
            id: n.to_string(),
            deps: edges
                .iter()
                .filter(|(from, _, _)| from == n)
                .map(|(_, to, kind)| Dep {
                    pkg: to.to_string(),
                    dep_kinds: vec![DepKind { kind: kind.map(str::to_string) }],
                })
                .collect(),
        };
        Metadata {
            packages: ours.iter().chain(others).map(package).collect(),
            workspace_members: ours.iter().map(|n| n.to_string()).collect(),
            resolve: Resolve { nodes: ours.iter().chain(others).map(node).collect() },
        }
    }

    #[test]
    fn a_breach_of_direction_is_found() {
        let m = metadata(
            &["forkyard-core", "forkyard-store", "forkyard-agent", "test-support", "new"],
            &["serde", "tokio"],
            &[
                ("forkyard-store", "forkyard-core", None),
                ("forkyard-agent", "forkyard-store", None),
                ("forkyard-core", "serde", None),
                ("serde", "tokio", None),
                ("forkyard-store", "test-support", Some("dev")),
                ("forkyard-agent", "test-support", None),
            ],
        );
        let found: Vec<String> = check(&m).iter().map(ToString::to_string).collect();
        assert_eq!(
            found,
            [
                "crate forkyard-agent: may not depend on forkyard-store",
                "crate forkyard-agent: test-support must be a dev-dependency",
                "crate new: is not in the table of crates: give it a place (MAY_USE)",
                "crate forkyard-core: must stay pure, but reaches tokio",
            ]
        );
    }
}
