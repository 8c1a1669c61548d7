//! What a sandbox reached of the network, and what it was refused.

use clap::Args;
use forkyard_core::SandboxId;
use forkyard_sandbox::egress::{Decision, Recorded};
use serde_json::json;

use crate::cli::Global;
use crate::error::{CliError, Result};
use crate::exit::Exit;
use crate::output::Output;
use crate::render::session::day;
use crate::render::table::{left, right};
use crate::render::{Cell, Color, Table, plain};
use crate::yard::decisions;

#[derive(Debug, Clone, Args)]
pub struct EgressArgs {
    /// The sandbox, which may have ended.
    #[arg(value_name = "SANDBOX")]
    pub sandbox: SandboxId,
    /// Only what was refused or failed.
    #[arg(long)]
    pub refused: bool,
}

impl EgressArgs {
    pub fn run(&self, global: &Global, out: &mut Output<'_>) -> Result<Exit> {
        let settings = global.load(global.flags()?)?.settings;
        if settings.remote_url.is_some() {
            return Err(CliError::usage(
                "what sandboxes reached is recorded on the machine that they ran on",
            )
            .hint("ask there, without --server"));
        }
        let mut all = decisions(&settings.home).read(&self.sandbox)?;
        all.retain(|r| !self.refused || r.decision.decision != Decision::Allowed);
        if out.json {
            let document = json!({
                "schema": "forkyard.sandbox_egress/1",
                "sandbox_id": self.sandbox,
                "decisions": all,
            });
            out.json(&document)?;
            return Ok(Exit::Success);
        }
        if all.is_empty() {
            out.line(&format!("Nothing is recorded of {}.", self.sandbox))?;
            return Ok(Exit::Success);
        }
        let mut table = Table::new(vec![
            left("When (UTC)"),
            left("Decision"),
            left("Host"),
            left("Why"),
            right("Times"),
            left("Detail"),
        ])
        .wraps();
        for Recorded { at, decision: d } in &all {
            let (word, color) = match d.decision {
                Decision::Allowed => ("allowed", Color::Green),
                Decision::Denied => ("denied", Color::Red),
                Decision::Failed => ("failed", Color::Yellow),
            };
            table.row(vec![
                day(*at).into(),
                Cell::new(word).color(color),
                // Of many others, or of no address at all, there is no port.
                match d.port {
                    0 => plain(&d.host).into(),
                    port => plain(&format!("{}:{port}", d.host)).into(),
                },
                d.reason.as_str().replace('_', " ").into(),
                d.count.to_string().into(),
                plain(&d.detail).into(),
            ]);
        }
        let style = out.style;
        out.text(&table.render(&style))?;
        Ok(Exit::Success)
    }
}
