//! What we ship of others: banned crates, licences and sources, by deny.toml.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use serde::Deserialize;

use super::Finding;
use super::crates::Metadata;

const CRATES_IO: &str = "registry+https://github.com/rust-lang/crates.io-index";

#[derive(Deserialize)]
struct Deny {
    bans: Bans,
    licenses: Licenses,
}

#[derive(Deserialize)]
struct Bans {
    deny: Vec<Ban>,
}

#[derive(Deserialize)]
struct Ban {
    name: String,
    /// It may be had through these alone.
    #[serde(default)]
    wrappers: Vec<String>,
}

#[derive(Deserialize)]
struct Licenses {
    allow: Vec<String>,
    #[serde(default)]
    clarify: Vec<Clarified>,
}

/// A crate that names no licence but carries one.
#[derive(Deserialize)]
struct Clarified {
    #[serde(rename = "crate")]
    name: String,
    expression: String,
}

pub fn check(metadata: &Metadata, deny: &str) -> Result<Vec<Finding>> {
    let deny: Deny = toml::from_str(deny).context("deny.toml")?;
    let name: BTreeMap<&str, &str> =
        metadata.packages.iter().map(|p| (p.id.as_str(), p.name.as_str())).collect();
    let mut findings = Vec::new();
    // Only what is resolved for this platform: Cargo.lock also names what Windows would need.
    for node in &metadata.resolve.nodes {
        for dep in &node.deps {
            let (from, to) = (name[node.id.as_str()], name[dep.pkg.as_str()]);
            if let Some(ban) = deny.bans.deny.iter().find(|b| b.name == to)
                && !ban.wrappers.iter().any(|w| w == from)
            {
                findings.push(Finding::new("Cargo.lock", 0, format!("{to} is banned, and {from} needs it")));
            }
        }
    }
    for package in &metadata.packages {
        let what = format!("{} {}", package.name, package.version);
        if package.source.as_deref().is_some_and(|s| s != CRATES_IO) {
            findings.push(Finding::new("Cargo.lock", 0, format!("{what} is not from crates.io")));
        }
        let clarified =
            || deny.licenses.clarify.iter().find(|c| c.name == package.name).map(|c| c.expression.as_str());
        match package.license.as_deref().or_else(clarified) {
            Some(l) if allowed(l, &deny.licenses.allow) => {}
            license => findings.push(Finding::new(
                "Cargo.lock",
                0,
                format!("{what} has licence {license:?}: allow it in deny.toml or do without"),
            )),
        }
    }
    Ok(findings)
}

/// Whether an SPDX expression can be met with allowed licences alone.
fn allowed(expression: &str, allow: &[String]) -> bool {
    let spaced = expression.replace('(', " ( ").replace(')', " ) ").replace('/', " OR ");
    let tokens: Vec<&str> = spaced.split_whitespace().collect();
    let mut at = 0;
    let ok = any(&tokens, &mut at, allow);
    ok && at == tokens.len()
}

/// `OR` binds weakest.
fn any(tokens: &[&str], at: &mut usize, allow: &[String]) -> bool {
    let mut ok = all(tokens, at, allow);
    while tokens.get(*at) == Some(&"OR") {
        *at += 1;
        ok |= all(tokens, at, allow);
    }
    ok
}

fn all(tokens: &[&str], at: &mut usize, allow: &[String]) -> bool {
    let mut ok = one(tokens, at, allow);
    while tokens.get(*at) == Some(&"AND") {
        *at += 1;
        ok &= one(tokens, at, allow);
    }
    ok
}

fn one(tokens: &[&str], at: &mut usize, allow: &[String]) -> bool {
    let Some(&token) = tokens.get(*at) else { return false };
    *at += 1;
    if token == "(" {
        let ok = any(tokens, at, allow);
        let closed = tokens.get(*at) == Some(&")");
        *at += 1;
        return ok && closed;
    }
    let mut license = token.to_string();
    if tokens.get(*at) == Some(&"WITH") {
        license = format!("{token} WITH {}", tokens.get(*at + 1).unwrap_or(&""));
        *at += 2;
    }
    allow.contains(&license)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expressions_are_met_or_not() {
        let allow: Vec<String> =
            ["MIT", "ISC", "Apache-2.0 WITH LLVM-exception"].iter().map(|s| s.to_string()).collect();
        for ok in [
            "MIT",
            "GPL-3.0 OR MIT",
            "MIT/Apache-2.0",
            "(GPL-3.0 OR MIT) AND ISC",
            "Apache-2.0 WITH LLVM-exception",
        ] {
            assert!(allowed(ok, &allow), "{ok}");
        }
        for bad in
            ["", "GPL-3.0", "MIT AND GPL-3.0", "(MIT", "Apache-2.0", "MIT AND (GPL-3.0 OR X)", "MIT MIT"]
        {
            assert!(!allowed(bad, &allow), "{bad}");
        }
    }
}
