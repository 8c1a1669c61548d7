//! What a hostile program inside tries. Each case is a real attempt; it fails if the attempt works. Numbers are those of
//! docs/attacks.md, which is made from this list.

mod control;
mod files;
mod imports;
mod kernel;
mod memory;
mod network;
mod resources;
mod restless;
pub(super) mod stage;

use std::borrow::Cow;
use std::time::Duration;

use serde::Serialize;

use super::{Case, Ctx};
use crate::{Achieved, LimitMeans, ProviderKind};

pub use stage::Stage;

/// One that hangs must not hide the others.
pub const CASE_TIMEOUT: Duration = Duration::from_secs(120);

/// An attempt, in words, and what is known of its end.
#[derive(Debug, Clone, Copy)]
pub struct Attack {
    /// In the list of attacks.
    pub items: &'static [u8],
    pub attempt: &'static str,
    ending: Ending,
    layers: Layers,
}

#[derive(Debug, Clone, Copy)]
struct Layers {
    local: Layer,
    /// None: nothing; where that is said is in `ENGINE_LEAVES`.
    docker: Option<&'static str>,
}

/// Of what a container's engine bounds for nobody.
const ENGINE_LEAVES: &str = "nothing bounds it: docs/security.md, honest limits";

#[derive(Debug, Clone, Copy)]
enum Layer {
    Always(&'static str),
    /// By the means that a sandbox of this machine has for the limit.
    Means {
        of: fn(&Achieved) -> LimitMeans,
        kernel: &'static str,
        watchdog: &'static str,
    },
}

impl Attack {
    /// How it ends there.
    pub fn ending(&self, provider: ProviderKind) -> Ending {
        match provider {
            ProviderKind::Docker | ProviderKind::E2b | ProviderKind::Daytona
                if self.layers.docker.is_none() =>
            {
                Ending::Open
            }
            ProviderKind::Docker | ProviderKind::E2b | ProviderKind::Daytona | ProviderKind::Local => {
                self.ending
            }
        }
    }

    /// What stops it, or makes it harmless: of a sandbox that `achieved` this, or on any machine.
    pub fn layer(&self, provider: ProviderKind, achieved: Option<&Achieved>) -> Cow<'static, str> {
        match (provider, self.layers.local) {
            (ProviderKind::Docker | ProviderKind::E2b | ProviderKind::Daytona, local) => {
                let engines = self.layers.docker.unwrap_or(ENGINE_LEAVES);
                match local {
                    // An engine that can't keep it leaves it to the same watchdog.
                    Layer::Means { of, kernel, watchdog }
                        if kernel == engines && achieved.is_some_and(|a| of(a) != LimitMeans::Kernel) =>
                    {
                        watchdog.into()
                    }
                    Layer::Means { .. } | Layer::Always(_) => engines.into(),
                }
            }
            (ProviderKind::Local, Layer::Always(layer)) => layer.into(),
            (ProviderKind::Local, Layer::Means { of, kernel, watchdog }) => match achieved.map(of) {
                Some(LimitMeans::Kernel) => kernel.into(),
                Some(LimitMeans::Watchdog | LimitMeans::None) => watchdog.into(),
                None => format!("{kernel}, else {watchdog}").into(),
            },
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
    /// Nothing stops it, which is known and written down. It is not made.
    Open,
    /// It got further than it may.
    Breach,
    /// What it needs could not be made: nothing is known of it.
    NotTried,
}

impl Ending {
    pub fn as_str(self) -> &'static str {
        match self {
            Ending::Denied => "denied",
            Ending::Harmless => "harmless",
            Ending::Open => "not stopped",
            Ending::Breach => "breach",
            Ending::NotTried => "not tried",
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
    /// Nothing, unless something stopped it.
    pub layer: Option<Cow<'static, str>>,
    /// Of a breach: what was expected and what was. Of one that was not tried, or that nothing stops: why.
    pub detail: Option<String>,
}

macro_rules! attack {
    ($name:ident, $items:expr, $attempt:literal, $ending:ident by $layer:literal) => {
        attack!($name, $items, $attempt, $ending by local $layer docker $layer)
    };
    ($name:ident, $items:expr, $attempt:literal, $ending:ident by local $local:literal docker $docker:literal) => {
        attack!(@ $name, $items, $attempt, $ending, Some($docker),
            $crate::conformance::attacks::Layer::Always($local))
    };
    ($name:ident, $items:expr, $attempt:literal, $ending:ident by local $local:literal docker nothing) => {
        $crate::conformance::Case {
            applies: |c| c.provider == $crate::ProviderKind::Local,
            ..attack!(@ $name, $items, $attempt, $ending, None, $crate::conformance::attacks::Layer::Always($local))
        }
    };
    ($name:ident, $items:expr, $attempt:literal, $ending:ident
        by local $limit:ident $kernel:literal else $watchdog:literal docker $docker:literal) => {
        attack!(@ $name, $items, $attempt, $ending, Some($docker),
            $crate::conformance::attacks::Layer::Means {
                of: |achieved| achieved.$limit,
                kernel: $kernel,
                watchdog: $watchdog,
            })
    };
    (@ $name:ident, $items:expr, $attempt:literal, $ending:ident, $docker:expr, $local:expr) => {
        $crate::conformance::Case {
            attack: Some($crate::conformance::attacks::Attack {
                items: &$items,
                attempt: $attempt,
                ending: $crate::conformance::attacks::Ending::$ending,
                layers: $crate::conformance::attacks::Layers { local: $local, docker: $docker },
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
        memory::cases(),
        resources::cases(),
        restless::cases(),
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
    let provider = ctx.provider.capabilities().provider;
    if attack.ending(provider) == Ending::Open {
        return Some(AttackReport {
            items: attack.items,
            name: case.name,
            attempt: attack.attempt,
            outcome: Ending::Open,
            layer: None,
            detail: Some(ENGINE_LEAVES.into()),
        });
    }
    let (outcome, detail) = match tokio::time::timeout(CASE_TIMEOUT, case.run(ctx)).await {
        Ok(Ok(())) => (attack.ending(provider), None),
        Ok(Err(e)) if e.before => (Ending::NotTried, Some(e.why)),
        Ok(Err(e)) => (Ending::Breach, Some(e.why)),
        Err(_) => (Ending::Breach, Some(format!("it did not end within {} s", CASE_TIMEOUT.as_secs()))),
    };
    let stopped = matches!(outcome, Ending::Denied | Ending::Harmless);
    Some(AttackReport {
        items: attack.items,
        name: case.name,
        attempt: attack.attempt,
        outcome,
        layer: stopped.then(|| attack.layer(provider, ctx.achieved.as_ref())),
        detail,
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
         only what is the sandbox's own or stays within its limits. `not stopped`: nothing is in its way there, so it is not \
         made.\n\n| number | attempt | outcome | local: by | Docker: by |\n|---|---|---|---|---|\n",
    );
    for case in cases() {
        let Some(attack) = case.attack else { continue };
        let items: Vec<String> = attack.items.iter().map(u8::to_string).collect();
        out.push_str(&format!(
            "| {} | {} | {} | {} | {} |\n",
            items.join(", "),
            attack.attempt,
            attack.ending.as_str(),
            attack.layer(ProviderKind::Local, None),
            match attack.ending(ProviderKind::Docker) {
                Ending::Open =>
                    format!("{}: {}", Ending::Open.as_str(), attack.layer(ProviderKind::Docker, None)),
                _ => attack.layer(ProviderKind::Docker, None).into_owned(),
            },
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

    #[test]
    fn what_held_is_said_as_the_sandbox_recorded_it() {
        let by_of = |provider, name: &str, achieved: Option<&Achieved>| {
            let all = cases();
            let attack = all.iter().find(|case| case.name == name).unwrap().attack.unwrap();
            attack.layer(provider, achieved).into_owned()
        };
        let by = |name: &str, achieved| by_of(ProviderKind::Local, name, achieved);
        let achieved = |memory, disk| Achieved {
            memory,
            cpu: LimitMeans::Kernel,
            disk,
            processes: LimitMeans::Kernel,
            network: LimitMeans::None,
            layers: Vec::new(),
        };
        let strong = achieved(LimitMeans::Kernel, LimitMeans::Kernel);
        let weak = achieved(LimitMeans::Watchdog, LimitMeans::Watchdog);
        assert_eq!(by("memory_is_contained", Some(&strong)), "cgroup");
        assert_eq!(by("memory_is_contained", Some(&weak)), "watchdog");
        assert_eq!(by("memory_is_contained", None), "cgroup, else watchdog");
        assert_eq!(by("the_disk_is_contained", Some(&strong)), "project quota");
        assert_eq!(by("the_disk_is_contained", Some(&weak)), "watchdog");
        assert_eq!(by("namespaces_and_mounts", Some(&weak)), "seccomp");
        let docker = |name: &str, achieved| by_of(ProviderKind::Docker, name, achieved);
        assert_eq!(docker("memory_is_contained", Some(&strong)), "cgroup");
        assert_eq!(docker("memory_is_contained", Some(&weak)), "watchdog");
        assert_eq!(docker("memory_is_contained", None), "cgroup");
        assert_eq!(docker("nameless_files_are_contained", Some(&weak)), "watchdog: what is open counts");
    }

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
