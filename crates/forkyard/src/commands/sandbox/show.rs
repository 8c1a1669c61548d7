use std::time::Duration;

use clap::Args;
use forkyard_core::SandboxId;
use forkyard_sandbox::SandboxStatus;
use serde_json::json;

use super::{attach, find};
use crate::commands::gc::size;
use crate::error::Result;
use crate::exit::Exit;
use crate::output::Output;
use crate::place::Place;
use crate::render::session::day;
use crate::render::table::left;
use crate::render::{Cell, Color, Table, plain};

#[derive(Debug, Clone, Args)]
pub struct ListArgs {}

impl ListArgs {
    pub async fn run(&self, place: &dyn Place, out: &mut Output<'_>) -> Result<Exit> {
        let all = place.sandboxes().list().await?;
        if let Some(why) = place.sandboxes().silent() {
            eprintln!("{}", plain(why));
        }
        if out.json {
            out.json(&json!({ "schema": "forkyard.sandboxes/1", "sandboxes": all }))?;
            return Ok(Exit::Success);
        }
        if all.is_empty() {
            out.line("There is no sandbox.")?;
            return Ok(Exit::Success);
        }
        let mut table = Table::new(vec![
            left("Sandbox"),
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
    /// The sandbox.
    #[arg(value_name = "SANDBOX")]
    pub sandbox: SandboxId,
}

impl StatsArgs {
    pub async fn run(&self, place: &dyn Place, out: &mut Output<'_>) -> Result<Exit> {
        let sandbox = attach(place, &self.sandbox).await?;
        // What was used of the processor is told from one question to the next.
        sandbox.stats().await?;
        tokio::time::sleep(CPU_OVER).await;
        let stats = sandbox.stats().await?;
        let info = sandbox.info().await?;
        if out.json {
            out.json(&json!({
                "schema": "forkyard.stats/1", "sandbox_id": self.sandbox, "stats": stats, "limits": info.limits,
                "achieved": info.achieved,
            }))?;
            return Ok(Exit::Success);
        }
        let l = info.limits;
        for (name, used, of) in [
            ("memory", size(stats.memory_bytes), size(l.memory_bytes)),
            ("disk", size(stats.disk_bytes), size(l.disk_bytes)),
            ("processes", stats.processes.to_string(), l.processes.to_string()),
            ("cpu", format!("{:.0}%", stats.cpu_percent), format!("{:.0}%", l.cpus * 100.0)),
        ] {
            out.line(&format!("{name:<10} {used} of {of}"))?;
        }
        out.line(&format!(
            "{:<10} {} in, {} out",
            "network",
            size(stats.network_rx_bytes),
            size(stats.network_tx_bytes)
        ))?;
        Ok(Exit::Success)
    }
}

#[derive(Debug, Clone, Args)]
pub struct HealthArgs {
    /// The sandbox.
    #[arg(value_name = "SANDBOX")]
    pub sandbox: SandboxId,
}

impl HealthArgs {
    pub async fn run(&self, place: &dyn Place, out: &mut Output<'_>) -> Result<Exit> {
        let health = attach(place, &self.sandbox).await?.health().await?;
        if out.json {
            out.json(
                &json!({ "schema": "forkyard.health/1", "sandbox_id": self.sandbox, "health": health }),
            )?;
        } else {
            let word = if health.healthy { "well" } else { "not well" };
            out.line(&format!("{} is {word}: {}", self.sandbox, plain(&health.detail)))?;
        }
        Ok(if health.healthy { Exit::Success } else { Exit::Failure })
    }
}

#[derive(Debug, Clone, Args)]
pub struct RmArgs {
    /// The sandboxes.
    #[arg(value_name = "SANDBOX", required = true)]
    pub sandboxes: Vec<SandboxId>,
}

impl RmArgs {
    pub async fn run(&self, place: &dyn Place, out: &mut Output<'_>) -> Result<Exit> {
        for id in &self.sandboxes {
            let (provider, info) = find(place, id).await?;
            place.record_removal("sandbox.delete", id.as_str(), json!(info.labels)).await;
            provider.destroy(id).await?;
            if !out.json {
                out.line(&format!("{id} is gone."))?;
            }
        }
        if out.json {
            out.json(&json!({ "schema": "forkyard.removed/1", "sandboxes": self.sandboxes }))?;
        }
        Ok(Exit::Success)
    }
}
