use clap::Args;
use forkyard_core::SnapshotId;
use forkyard_sandbox::SnapshotInfo;
use serde_json::json;

use crate::commands::gc::size;
use crate::error::{CliError, Result};
use crate::exit::Exit;
use crate::output::Output;
use crate::place::Place;
use crate::render::session::day;
use crate::render::table::left;
use crate::render::{Cell, Table};

#[derive(Debug, Clone, Args)]
pub struct SnapshotsArgs {
    /// Remove these; sandboxes that were made from them keep working.
    #[arg(long, value_name = "ID", num_args = 1..)]
    pub remove: Vec<SnapshotId>,
}

impl SnapshotsArgs {
    pub async fn run(&self, place: &dyn Place, out: &mut Output<'_>) -> Result<Exit> {
        let all = place.sandboxes().snapshots().await?;
        if self.remove.is_empty() {
            return list(all, out);
        }
        for id in &self.remove {
            let Some(found) = all.iter().find(|s| s.id == *id) else {
                return Err(CliError::usage(format!("there is no snapshot {id}"))
                    .hint("`forkyard sandbox snapshots` shows those that there are"));
            };
            place.record_removal("snapshot.delete", id.as_str(), json!(found.labels)).await;
            place.sandboxes().provider(found.provider)?.remove_snapshot(id).await?;
            if !out.json {
                out.line(&format!("{id} is gone."))?;
            }
        }
        if out.json {
            out.json(&json!({ "schema": "forkyard.removed/1", "snapshots": self.remove }))?;
        }
        Ok(Exit::Success)
    }
}

fn list(all: Vec<SnapshotInfo>, out: &mut Output<'_>) -> Result<Exit> {
    if out.json {
        out.json(&json!({ "schema": "forkyard.snapshots/1", "snapshots": all }))?;
        return Ok(Exit::Success);
    }
    if all.is_empty() {
        out.line("There is no snapshot.")?;
        return Ok(Exit::Success);
    }
    let mut table = Table::new(vec![left("Snapshot"), left("Run"), left("Made (UTC)"), left("Size")]);
    for s in &all {
        table.row(vec![
            s.id.as_str().into(),
            Cell::new(s.labels.get("run").map(String::as_str).unwrap_or_default()),
            day(s.created_at).into(),
            s.bytes.map(size).unwrap_or_default().into(),
        ]);
    }
    let style = out.style;
    out.text(&table.render(&style))?;
    Ok(Exit::Success)
}
