//! The attack suite as a user's command: every attempt of a hostile program, made for real on this machine.

use std::sync::Arc;

use forkyard_core::sandbox::{NetworkMode, NetworkSpec, ProviderKind, Root, SandboxSpec};
use forkyard_sandbox::Provider;
use forkyard_sandbox::conformance::{Attack, AttackReport, Ctx, Ending, Stage, attacks, attempt};
use forkyard_sandbox::docker::{DockerOptions, DockerProvider};
use forkyard_sandbox::local::{LocalOptions, LocalProvider};
use serde_json::json;

use super::leaves;
use crate::commands::run_options::image;
use crate::error::{CliError, Result};
use crate::exit::Exit;
use crate::output::Output;
use crate::render::table::left;
use crate::render::{Cell, Color, Table, plain};
use crate::settings::Settings;

/// Both objects of a provider on a state folder of their own, as two processes would have.
struct Ground {
    providers: [Arc<dyn Provider>; 2],
    local: Option<LocalProvider>,
    _state: tempfile::TempDir,
}

async fn ground(s: &Settings, stage: &Stage) -> Result<Ground> {
    let below = s.home.join("doctor");
    std::fs::create_dir_all(&below)?;
    let state = tempfile::tempdir_in(&below)?;
    match s.provider {
        ProviderKind::Local => {
            let options = LocalOptions { egress: Some(stage.egress()), ..super::local_options() };
            let open = || LocalProvider::new(state.path(), options.clone());
            let (first, second) = (open()?, open()?);
            let providers: [Arc<dyn Provider>; 2] = [Arc::new(first.clone()), Arc::new(second)];
            Ok(Ground { providers, local: Some(first), _state: state })
        }
        ProviderKind::Docker => {
            let options = DockerOptions { egress: Some(stage.egress()), ..super::docker_options(s) };
            let first = DockerProvider::connect(state.path(), options.clone()).await?;
            let second = DockerProvider::connect(state.path(), options).await?;
            Ok(Ground { providers: [Arc::new(first), Arc::new(second)], local: None, _state: state })
        }
        kind @ (ProviderKind::E2b | ProviderKind::Daytona) => {
            Err(CliError::usage(format!("the attack suite does not run on {kind:?}"))
                .hint("use local or docker"))
        }
    }
}

async fn attack(s: &Settings, only: &[u8], out: &Output<'_>) -> Result<Vec<AttackReport>> {
    let stage = Arc::new(Stage::new()?);
    let ground = ground(s, &stage).await?;
    let [provider, other] = ground.providers.clone();
    let spec = SandboxSpec {
        root: s.image.as_deref().map_or(Ok(Root::Default), |name| image(s, s.provider, name))?,
        network: NetworkSpec { mode: NetworkMode::None, ..NetworkSpec::default() },
        ..SandboxSpec::default()
    };
    let capabilities = provider.capabilities();
    let mut ctx = Ctx::new(provider, other, spec).on(stage);
    let asked = |a: &Attack| only.is_empty() || a.items.iter().any(|item| only.contains(item));
    let mut cases = attacks();
    let is_open = |a: &Attack| a.ending(capabilities.provider) == Ending::Open;
    cases.retain(|case| {
        case.attack.as_ref().is_some_and(|a| asked(a) && ((case.applies)(&capabilities) || is_open(a)))
    });
    if cases.is_empty() {
        let only: Vec<String> = only.iter().map(u8::to_string).collect();
        return Err(CliError::usage(format!("--only {}: not a sandbox's to stop", only.join(",")))
            .hint("docs/attacks.md says who does"));
    }
    // Where no sandbox can be made nothing can be tried: that is one error with its fix, not a table of failures.
    ctx.trial().await?;
    let shows = !out.json && out.style.is_terminal();
    let mut reports = Vec::new();
    for (number, case) in cases.iter().enumerate() {
        if shows {
            let what = case.attack.map_or(case.name, |a| a.attempt);
            eprint!("\r\x1b[K{}/{} {}", number + 1, cases.len(), crate::render::fit(what, 60));
        }
        reports.extend(attempt(case, &ctx).await);
    }
    if shows {
        eprint!("\r\x1b[K");
    }
    if let Some(local) = &ground.local {
        local.settle().await;
    }
    Ok(reports)
}

pub fn run(s: &Settings, only: &[u8], out: &mut Output<'_>) -> Result<Exit> {
    let reports = crate::runtime()?.block_on(attack(s, only, out))?;
    let breaches = reports.iter().filter(|r| r.outcome == Ending::Breach).count();
    let not_tried = reports.iter().filter(|r| r.outcome == Ending::NotTried).count();
    let leaves = leaves(s);
    if out.json {
        out.json(&json!({
            "schema": "forkyard.attack/1",
            "provider": s.provider,
            "breaches": breaches,
            "not_tried": not_tried,
            "attempts": reports,
            "leaves": leaves,
        }))?;
    } else {
        let mut table = Table::new(vec![left("No."), left("Attempt"), left("Outcome"), left("By")]).wraps();
        for report in &reports {
            let items: Vec<String> = report.items.iter().map(u8::to_string).collect();
            let color = match report.outcome {
                Ending::Denied | Ending::Harmless => Color::Green,
                Ending::Breach => Color::Red,
                Ending::NotTried | Ending::Open => Color::Yellow,
            };
            table.row(vec![
                Cell::new(items.join(", ")),
                Cell::new(report.attempt),
                Cell::new(report.outcome.as_str()).color(color),
                Cell::new(report.layer.as_deref().unwrap_or_default()),
            ]);
        }
        let style = out.style;
        out.text(&table.render(&style))?;
        for report in &reports {
            let color = match report.outcome {
                Ending::Denied | Ending::Harmless => continue,
                Ending::Breach => Color::Red,
                Ending::NotTried | Ending::Open => Color::Yellow,
            };
            let (word, detail) = (report.outcome.as_str(), report.detail.as_deref().unwrap_or_default());
            out.line(&format!("{} {}: {}", style.paint(color, word), report.name, plain(detail)))?;
        }
        for open in &leaves {
            out.line(&format!("{} {}", style.paint(Color::Yellow, "open:"), plain(open)))?;
        }
        out.line(&summary(reports.len(), breaches, not_tried))?;
    }
    Ok(if breaches + not_tried == 0 { Exit::Success } else { Exit::Failure })
}

fn summary(attempts: usize, breaches: usize, not_tried: usize) -> String {
    let count = |n: usize, one: &str, many: &str| format!("{n} {}", if n == 1 { one } else { many });
    let mut parts = vec![count(attempts, "attempt", "attempts"), count(breaches, "breach", "breaches")];
    if not_tried > 0 {
        parts.push(format!("{not_tried} not tried"));
    }
    format!("{}.", parts.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_summary_counts_in_words() {
        assert_eq!(summary(1, 0, 0), "1 attempt, 0 breaches.");
        assert_eq!(summary(48, 1, 2), "48 attempts, 1 breach, 2 not tried.");
    }
}
