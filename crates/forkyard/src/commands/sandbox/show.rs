use std::io::IsTerminal;
use std::time::Duration;

use clap::Args;
use forkyard_core::sandbox::{LimitMeans, ProviderKind};
use forkyard_core::view::RunStatus;
use forkyard_core::{RunId, SandboxId};
use forkyard_sandbox::{Health, Sandbox, SandboxInfo, SandboxStatus, Stats, owner};
use serde_json::json;

use super::{Removals, find, observe, provider_name};
use crate::commands::gc::size;
use crate::error::{CliError, Result};
use crate::exit::Exit;
use crate::output::Output;
use crate::place::Place;
use crate::render::session::day;
use crate::render::table::left;
use crate::render::{Cell, Color, Table, plain};
use crate::settings::{Raw, Value};

#[derive(Debug, Clone, Args)]
pub struct ListArgs {
    /// Only those of this provider: local or docker.
    #[arg(long, value_name = "NAME")]
    pub provider: Option<String>,
    /// Only those that carry this label; of several, all.
    #[arg(long, value_name = "KEY=VALUE")]
    pub label: Vec<String>,
}

impl ListArgs {
    fn wants(&self) -> Result<impl Fn(&SandboxInfo) -> bool> {
        let provider = self.provider.as_deref().map(provider).transpose()?;
        let mut labels = Vec::new();
        for text in &self.label {
            labels.push(text.split_once('=').ok_or_else(|| {
                CliError::usage(format!("--label {text:?} can't be used")).hint("write KEY=VALUE")
            })?);
        }
        Ok(move |s: &SandboxInfo| {
            provider.is_none_or(|kind| s.provider == kind)
                && labels.iter().all(|(key, value)| s.labels.get(*key).is_some_and(|v| v == value))
        })
    }
}

/// By the name that the settings have for it.
pub fn provider(text: &str) -> Result<ProviderKind> {
    ProviderKind::parse(&Raw::Text(text.to_string()))
        .map_err(|fix| CliError::usage(format!("--provider {text:?} can't be used")).hint(fix))
}

/// Why some may be missing.
fn tell_silent(place: &dyn Place) {
    if let Some(why) = place.sandboxes().silent() {
        eprintln!("{}", plain(why));
    }
}

impl ListArgs {
    pub async fn run(&self, place: &dyn Place, out: &mut Output<'_>) -> Result<Exit> {
        let wants = self.wants()?;
        let mut all = place.sandboxes().list().await?;
        all.retain(wants);
        tell_silent(place);
        if out.json {
            out.json(&json!({ "schema": "forkyard.sandboxes/1", "sandboxes": all }))?;
            return Ok(Exit::Success);
        }
        if all.is_empty() {
            let filtered = self.provider.is_some() || !self.label.is_empty();
            out.line(if filtered { "There is no such sandbox." } else { "There is no sandbox." })?;
            return Ok(Exit::Success);
        }
        let mut table = Table::new(vec![
            left("Sandbox"),
            left("Provider"),
            left("Status"),
            left("Run"),
            left("Ends (UTC)"),
            left("Limits"),
        ]);
        for s in &all {
            let (word, color) = match s.status {
                SandboxStatus::Running => ("running", Color::Green),
                SandboxStatus::Paused => ("paused", Color::Yellow),
                SandboxStatus::Stopped => ("stopped", Color::Dim),
                SandboxStatus::Dead => ("dead", Color::Red),
            };
            table.row(vec![
                s.id.as_str().into(),
                provider_name(s.provider).into(),
                Cell::new(word).color(color),
                Cell::new(s.labels.get("run").map(String::as_str).unwrap_or_default()),
                day(s.deadline).into(),
                format!("{}, {} cpus", size(s.limits.memory_bytes), s.limits.cpus).into(),
            ]);
        }
        let style = out.style;
        out.text(&table.render(&style))?;
        Ok(Exit::Success)
    }
}

/// Where the kernel counts in ticks of a hundredth of a second, they are a few percent of this.
const CPU_OVER: Duration = Duration::from_millis(300);

#[derive(Debug, Clone, Args)]
pub struct StatsArgs {
    /// The sandbox [default: all that run].
    #[arg(value_name = "SANDBOX")]
    pub sandbox: Option<SandboxId>,
}

impl StatsArgs {
    pub async fn run(&self, place: &dyn Place, out: &mut Output<'_>) -> Result<Exit> {
        match &self.sandbox {
            Some(id) => one_stats(place, id, out).await,
            None => all_stats(place, out).await,
        }
    }
}

async fn stats(sandbox: &dyn Sandbox) -> Result<(Stats, SandboxInfo)> {
    // What was used of the processor is told from one question to the next.
    sandbox.stats().await?;
    tokio::time::sleep(CPU_OVER).await;
    Ok((sandbox.stats().await?, sandbox.info().await?))
}

/// Of all that run, one beside the other.
async fn all_stats(place: &dyn Place, out: &mut Output<'_>) -> Result<Exit> {
    let mut all = place.sandboxes().list().await?;
    all.retain(|s| matches!(s.status, SandboxStatus::Running | SandboxStatus::Paused));
    tell_silent(place);
    let asked = all.iter().map(|s| async {
        let sandbox = place.sandboxes().provider(s.provider)?.observe(&s.id, s.attempt).await?;
        stats(&*sandbox).await
    });
    let asked = futures::future::join_all(asked).await;
    let mut found = Vec::new();
    for (s, answer) in all.iter().zip(asked) {
        match answer {
            Ok((stats, info)) => found.push((stats, info)),
            // It may have ended since it was listed.
            Err(e) => eprintln!("{}: {}", s.id, plain(&e.message)),
        }
    }
    if out.json {
        let each = found.iter().map(|(stats, info)| {
            json!({
                "sandbox_id": info.id, "stats": stats, "limits": info.limits, "achieved": info.achieved,
            })
        });
        let each: Vec<_> = each.collect();
        out.json(&json!({ "schema": "forkyard.all_stats/1", "sandboxes": each }))?;
        return Ok(Exit::Success);
    }
    if found.is_empty() {
        out.line("No sandbox is running.")?;
        return Ok(Exit::Success);
    }
    let mut table = Table::new(vec![
        left("Sandbox"),
        left("Memory"),
        left("Disk"),
        left("Processes"),
        left("CPU"),
        left("Network"),
    ]);
    for (stats, info) in &found {
        let l = info.limits;
        table.row(vec![
            info.id.as_str().into(),
            format!("{} of {}", size(stats.memory_bytes), size(l.memory_bytes)).into(),
            format!("{} of {}", size(stats.disk_bytes), size(l.disk_bytes)).into(),
            format!("{} of {}", stats.processes, l.processes).into(),
            format!("{:.0}% of {:.0}%", stats.cpu_percent, l.cpus * 100.0).into(),
            format!("{} in, {} out", size(stats.network_rx_bytes), size(stats.network_tx_bytes)).into(),
        ]);
    }
    let style = out.style;
    out.text(&table.render(&style))?;
    Ok(Exit::Success)
}

async fn one_stats(place: &dyn Place, id: &SandboxId, out: &mut Output<'_>) -> Result<Exit> {
    let sandbox = observe(place, id).await?;
    let (stats, info) = stats(&*sandbox).await?;
    if out.json {
        out.json(&json!({
            "schema": "forkyard.stats/1", "sandbox_id": id, "stats": stats, "limits": info.limits,
            "achieved": info.achieved,
        }))?;
        return Ok(Exit::Success);
    }
    let (l, by) = (info.limits, &info.achieved);
    for (name, used, of, by) in [
        ("memory", size(stats.memory_bytes), size(l.memory_bytes), by.memory),
        ("disk", size(stats.disk_bytes), size(l.disk_bytes), by.disk),
        ("processes", stats.processes.to_string(), l.processes.to_string(), by.processes),
        ("cpu", format!("{:.0}%", stats.cpu_percent), format!("{:.0}%", l.cpus * 100.0), by.cpu),
    ] {
        out.line(&format!("{name:<10} {used} of {of}{}", kept(by, "a watchdog")))?;
    }
    out.line(&format!(
        "{:<10} {} in, {} out",
        "network",
        size(stats.network_rx_bytes),
        size(stats.network_tx_bytes)
    ))?;
    if let Some(rate) = l.network_bytes_per_s {
        let by = kept(by.network, "the proxy");
        out.line(&format!("{:<10} at most {} a second each way{by}", "", size(rate)))?;
    }
    Ok(Exit::Success)
}

/// Who keeps a limit; `else_by`, where it is not the kernel.
fn kept(means: LimitMeans, else_by: &str) -> String {
    match means {
        LimitMeans::Kernel => ", kept by the kernel".into(),
        LimitMeans::Watchdog => format!(", kept by {else_by}"),
        LimitMeans::None => String::new(),
    }
}

#[derive(Debug, Clone, Args)]
pub struct HealthArgs {
    /// The sandbox [default: all that are not stopped].
    #[arg(value_name = "SANDBOX")]
    pub sandbox: Option<SandboxId>,
}

impl HealthArgs {
    pub async fn run(&self, place: &dyn Place, out: &mut Output<'_>) -> Result<Exit> {
        match &self.sandbox {
            Some(id) => {
                let health = observe(place, id).await?.health().await?;
                if out.json {
                    out.json(&json!({ "schema": "forkyard.health/1", "sandbox_id": id, "health": health }))?;
                } else {
                    say_health(id, &health, out)?;
                }
                Ok(if health.healthy { Exit::Success } else { Exit::Failure })
            }
            None => all_health(place, out).await,
        }
    }
}

fn say_health(id: &SandboxId, health: &Health, out: &mut Output<'_>) -> Result<()> {
    let word = if health.healthy { "well" } else { "not well" };
    out.line(&format!("{id} is {word}: {}", plain(&health.detail)))
}

async fn all_health(place: &dyn Place, out: &mut Output<'_>) -> Result<Exit> {
    let mut all = place.sandboxes().list().await?;
    all.retain(|s| s.status != SandboxStatus::Stopped);
    tell_silent(place);
    let asked = all.iter().map(|s| async {
        let provider = place.sandboxes().provider(s.provider)?;
        provider.observe(&s.id, s.attempt).await?.health().await
    });
    let asked = futures::future::join_all(asked).await;
    // One that can't be asked is not well.
    let answer = |asked: forkyard_sandbox::Result<Health>| {
        asked.unwrap_or_else(|e| Health { healthy: false, detail: e.message })
    };
    let found: Vec<_> = all.iter().map(|s| &s.id).zip(asked.into_iter().map(answer)).collect();
    if out.json {
        let each: Vec<_> =
            found.iter().map(|(id, health)| json!({ "sandbox_id": id, "health": health })).collect();
        out.json(&json!({ "schema": "forkyard.all_health/1", "sandboxes": each }))?;
    } else if found.is_empty() {
        out.line("No sandbox is running.")?;
    } else {
        for (id, health) in &found {
            say_health(id, health, out)?;
        }
    }
    Ok(if found.iter().all(|(_, health)| health.healthy) { Exit::Success } else { Exit::Failure })
}

#[derive(Debug, Clone, Args)]
pub struct RmArgs {
    /// The sandboxes.
    #[arg(value_name = "SANDBOX", required_unless_present = "all", conflicts_with = "all")]
    pub sandboxes: Vec<SandboxId>,
    /// All but those of runs and of `sandbox run` that are under way.
    #[arg(long)]
    pub all: bool,
    /// Do not ask.
    #[arg(short, long, requires = "all")]
    pub yes: bool,
}

impl RmArgs {
    pub async fn run(&self, place: &dyn Place, out: &mut Output<'_>) -> Result<Exit> {
        let ids = if self.all { removable(place).await? } else { self.sandboxes.clone() };
        if self.all && ids.is_empty() && !out.json {
            out.line("There is no sandbox to remove.")?;
            return Ok(Exit::Success);
        }
        if self.all && !ids.is_empty() && !self.yes && !confirmed(&ids)? {
            return Err(CliError::usage("nothing is removed"));
        }
        let mut removals = Removals::default();
        for id in &ids {
            let (provider, info) = match find(place, id).await {
                Ok(found) => found,
                // It may have ended meanwhile.
                Err(_) if self.all => continue,
                Err(e) => {
                    removals.note(id.as_str(), Err(e), out)?;
                    continue;
                }
            };
            place.record_removal("sandbox.delete", id.as_str(), json!(info.labels)).await;
            removals.note(id.as_str(), provider.destroy(id).await.map_err(Into::into), out)?;
        }
        removals.end("sandboxes", out)
    }
}

/// Those that nobody is at work with.
async fn removable(place: &dyn Place) -> Result<Vec<SandboxId>> {
    tell_silent(place);
    let mut ids = Vec::new();
    for s in place.sandboxes().list().await? {
        let run = s.labels.get("run").and_then(|run| RunId::new(run.as_str()).ok());
        let live = match run {
            Some(run) => place.run(&run).await?.is_some_and(|view| view.status != RunStatus::Ended),
            None => s.labels.contains_key(owner::OWNER),
        };
        if !live {
            ids.push(s.id);
        }
    }
    Ok(ids)
}

fn confirmed(ids: &[SandboxId]) -> Result<bool> {
    if !std::io::stdin().is_terminal() || !std::io::stderr().is_terminal() {
        return Err(CliError::usage(
            "--all removes sandboxes that nobody has named, and nobody can be asked",
        )
        .hint("say --yes; `forkyard sandbox list` shows what there is"));
    }
    let names: Vec<&str> = ids.iter().map(SandboxId::as_str).collect();
    let what = if ids.len() == 1 { "1 sandbox" } else { &format!("{} sandboxes", ids.len()) };
    eprint!("Remove {what} with all files in them: {}? [y/N] ", names.join(", "));
    let mut answer = String::new();
    std::io::stdin().read_line(&mut answer)?;
    Ok(matches!(answer.trim(), "y" | "Y" | "yes"))
}
