//! What a hostile program inside tries. Each case is a real attempt; it fails if the attempt works. Numbers are those of
//! docs/attacks.md, which is made from this list.

mod control;
mod files;
mod imports;
mod kernel;
mod network;
mod resources;
mod stage;

use std::time::Duration;

use serde::Serialize;

use super::{Case, Ctx};
use crate::ProviderKind;

pub use stage::Stage;

/// One that hangs must not hide the others.
pub const CASE_TIMEOUT: Duration = Duration::from_secs(120);

/// An attempt, in words, and what is known of its end.
#[derive(Debug, Clone, Copy)]
pub struct Attack {
    /// In the list of attacks.
    pub items: &'static [u8],
    pub attempt: &'static str,
    pub ending: Ending,
    layers: Layers,
}

#[derive(Debug, Clone, Copy)]
enum Layers {
    Same(&'static str),
    Each { local: &'static str, docker: &'static str },
}

impl Attack {
    /// What stops it, or makes it harmless.
    pub fn layer(&self, provider: ProviderKind) -> &'static str {
        match (self.layers, provider) {
            (Layers::Same(layer), _) | (Layers::Each { local: layer, .. }, ProviderKind::Local) => layer,
            (
                Layers::Each { docker, .. },
                ProviderKind::Docker | ProviderKind::E2b | ProviderKind::Daytona,
            ) => docker,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Ending {
    /// Refused.
    Denied,
    /// It works, and reaches only what is the sandbox's own or stays within its limits.
    Harmless,
    /// It got further than it may.
    Breach,
}

impl Ending {
    pub fn as_str(self) -> &'static str {
        match self {
            Ending::Denied => "denied",
            Ending::Harmless => "harmless",
            Ending::Breach => "breach",
        }
    }
}

/// What came of an attempt.
#[derive(Debug, Clone, Serialize)]
pub struct AttackReport {
    pub items: &'static [u8],
    pub name: &'static str,
    pub attempt: &'static str,
    pub outcome: Ending,
    pub layer: &'static str,
    /// Of a breach: what was expected and what was.
    pub detail: Option<String>,
}

macro_rules! attack {
    ($name:ident, $items:expr, $attempt:literal, $ending:ident by $layer:literal) => {
        attack!(@ $name, $items, $attempt, $ending, $crate::conformance::attacks::Layers::Same($layer))
    };
    ($name:ident, $items:expr, $attempt:literal, $ending:ident by local $local:literal docker $docker:literal) => {
        attack!(@ $name, $items, $attempt, $ending,
            $crate::conformance::attacks::Layers::Each { local: $local, docker: $docker })
    };
    (@ $name:ident, $items:expr, $attempt:literal, $ending:ident, $layers:expr) => {
        $crate::conformance::Case {
            attack: Some($crate::conformance::attacks::Attack {
                items: &$items,
                attempt: $attempt,
                ending: $crate::conformance::attacks::Ending::$ending,
                layers: $layers,
            }),
            ..$crate::conformance::case!($name)
        }
    };
}
use attack;

pub fn cases() -> Vec<Case> {
    let mut all: Vec<Case> = [
        files::cases(),
        imports::cases(),
        kernel::cases(),
        resources::cases(),
        network::cases(),
        control::cases(),
    ]
    .into_iter()
    .flatten()
    .collect();
    all.sort_by_key(|case| case.attack.map(|a| a.items));
    all
}

/// Makes one attempt and says what came of it. None: a case of conformance, which is no attempt.
pub async fn attempt(case: &Case, ctx: &Ctx) -> Option<AttackReport> {
    let attack = case.attack?;
    let failed = match tokio::time::timeout(CASE_TIMEOUT, case.run(ctx)).await {
        Ok(Ok(())) => None,
        Ok(Err(e)) => Some(e.to_string()),
        Err(_) => Some(format!("it did not end within {} s", CASE_TIMEOUT.as_secs())),
    };
    Some(AttackReport {
        items: attack.items,
        name: case.name,
        attempt: attack.attempt,
        outcome: if failed.is_some() { Ending::Breach } else { attack.ending },
        layer: attack.layer(ctx.provider.capabilities().provider),
        detail: failed,
    })
}

/// Attacks that are not a sandbox's to stop, and who does.
const ELSEWHERE: &[(&str, &str, &str)] = &[
    (
        "12",
        "Git settings and attributes that run programs",
        "the host's git: results are computed from objects alone",
    ),
    ("13", ".gitmodules, alternates", "the host's git: quarantine repository, no submodules"),
    ("14", "Branch names that look like options", "the host's git: names are checked, `--` before them"),
    ("15", "ANSI or HTML in names and transcripts", "the command line's `plain()`"),
    ("32", "Another tool or a subagent around a hook", "one chain of interceptors for every tool call"),
    ("36", "Forks that spend at once", "budget reservations in one ledger"),
    (
        "37",
        "Instructions in a README or an issue",
        "nothing inside can widen its own rights: sandbox, egress and budget bind",
    ),
    ("38", "kill -9, a full disk, torn writes", "recorded events, fenced attempts, sweep"),
    ("39", "Edited tests", "verify in a sandbox of its own, protected paths made equal to the base"),
];

/// docs/attacks.md.
pub fn markdown() -> String {
    let mut out = String::from(
        "# What an agent in a sandbox may try\n\n<!-- Generated from the attack suite: change it there and run `cargo xtask codegen`. -->\n\n\
         Each attempt is made for real by `forkyard doctor --attack` (`--provider docker` for Docker) and by the tests: on local \
         sandboxes as root and as an ordinary user, and on a Docker engine. `denied`: refused. `harmless`: it works, and reaches \
         only what is the sandbox's own or stays within its limits.\n\n\
         | number | attempt | outcome | local: by | Docker: by |\n|---|---|---|---|---|\n",
    );
    for case in cases() {
        let Some(attack) = case.attack else { continue };
        let items: Vec<String> = attack.items.iter().map(u8::to_string).collect();
        out.push_str(&format!(
            "| {} | {} | {} | {} | {} |\n",
            items.join(", "),
            attack.attempt,
            attack.ending.as_str(),
            attack.layer(ProviderKind::Local),
            attack.layer(ProviderKind::Docker),
        ));
    }
    out.push_str("\nNot a sandbox's to stop:\n\n| number | attempt | by |\n|---|---|---|\n");
    for (item, attempt, by) in ELSEWHERE {
        out.push_str(&format!("| {item} | {attempt} | {by} |\n"));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The numbers that concern a sandbox; 12 to 15, 32 and 36 to 39 are others'.
    #[test]
    fn every_attack_has_a_case_or_an_owner() {
        let own: Vec<u8> = cases().iter().filter_map(|c| c.attack).flat_map(|a| a.items.to_vec()).collect();
        for item in 1..=39u8 {
            let elsewhere = ELSEWHERE.iter().any(|(number, ..)| *number == item.to_string());
            assert!(own.contains(&item) != elsewhere, "{item}");
        }
    }
}
