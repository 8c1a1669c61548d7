use std::io::{IsTerminal, Seek, Write};
use std::path::{Path, PathBuf};

use clap::Args;
use forkyard_core::SnapshotId;
use forkyard_sandbox::SnapshotInfo;
use serde_json::json;

use super::make::refuse_snapshot;
use super::show::provider;
use super::{Removals, provider_name};
use crate::commands::gc::size;
use crate::error::{CliError, Result};
use crate::exit::Exit;
use crate::output::Output;
use crate::place::Place;
use crate::render::session::day;
use crate::render::table::left;
use crate::render::{Cell, Table, plain};
use crate::yard::random_text;

#[derive(Debug, Clone, Args)]
pub struct SnapshotsArgs {
    /// Remove these; sandboxes that were made from them keep working.
    #[arg(long, value_name = "ID", num_args = 1..)]
    pub remove: Vec<SnapshotId>,
    /// Write a snapshot to a file, from which --import makes it again, here or on another machine; `-` is standard output.
    #[arg(long, value_names = ["ID", "FILE"], num_args = 2, conflicts_with_all = ["remove", "import"])]
    pub export: Vec<String>,
    /// Make a snapshot of what --export wrote; `-` is standard input.
    #[arg(long, value_name = "FILE", conflicts_with = "remove")]
    pub import: Option<PathBuf>,
    /// With --import: the snapshot's name [default: one that nobody has].
    #[arg(long, value_name = "ID", requires = "import")]
    pub name: Option<SnapshotId>,
    /// With --import: whose it becomes, local or docker; it has to be of the same kind [default: local].
    #[arg(long, value_name = "NAME", requires = "import")]
    pub provider: Option<String>,
    /// With --import of a Docker snapshot: the image that it may start from [default: sandbox.image].
    #[arg(long, value_name = "IMAGE", requires = "import")]
    pub image: Option<String>,
}

fn missing(id: &str) -> CliError {
    CliError::usage(format!("there is no snapshot {id}"))
        .hint("`forkyard sandbox snapshots` shows those that there are")
}

/// For a person who waits.
fn say(text: &str) {
    if std::io::stderr().is_terminal() {
        eprintln!("{}", plain(text));
    }
}

impl SnapshotsArgs {
    async fn export(&self, place: &dyn Place, id: &str, to: &str, out: &mut Output<'_>) -> Result<Exit> {
        let all = place.sandboxes().snapshots().await?;
        let found = all.iter().find(|s| s.id.as_str() == id).ok_or_else(|| missing(id))?;
        let provider = place.sandboxes().provider(found.provider)?;
        let stdout = to == "-";
        if stdout && out.json {
            return Err(CliError::usage("standard output can't be the archive and a JSON document")
                .hint("name a file, or leave --json out"));
        }
        if stdout && std::io::stdout().is_terminal() {
            return Err(
                CliError::usage("an archive is not for a terminal").hint("name a file, or use a pipe")
            );
        }
        if Path::new(to).is_dir() {
            return Err(CliError::usage(format!("{to} is a folder")).hint("name a file"));
        }
        let folder = Path::new(to).parent().filter(|dir| !dir.as_os_str().is_empty());
        if let Some(folder) = folder.filter(|dir| !stdout && !dir.is_dir()) {
            return Err(CliError::usage(format!("{to}: there is no folder {}", folder.display()))
                .hint("make it first, or name a file in one that is there"));
        }
        place.record("snapshot.export", id, json!({})).await?;
        say(&format!("writing {id} …"));
        if stdout {
            // Providers write files.
            let dir = tempfile::tempdir()?;
            let path = dir.path().join("snapshot");
            provider.export_snapshot(&found.id, &path).await?;
            let copied = std::io::copy(&mut std::fs::File::open(&path)?, &mut std::io::stdout().lock());
            return match copied {
                Err(e) if e.kind() == std::io::ErrorKind::BrokenPipe => Ok(Exit::Command(128 + 13)),
                copied => Ok(copied.map(|_| Exit::Success)?),
            };
        }
        provider.export_snapshot(&found.id, Path::new(to)).await?;
        let bytes = std::fs::metadata(to)?.len();
        if out.json {
            out.json(&json!({
                "schema": "forkyard.snapshot_file/1", "snapshot": found, "file": to, "bytes": bytes,
            }))?;
        } else {
            out.line(&format!("{id} is in {}: {}.", plain(to), size(bytes)))?;
        }
        Ok(Exit::Success)
    }

    async fn import(&self, place: &dyn Place, from: &Path, out: &mut Output<'_>) -> Result<Exit> {
        let id = match &self.name {
            Some(id) => {
                refuse_snapshot(place, id).await?;
                id.clone()
            }
            None => SnapshotId::new(format!("n{}", random_text(9)))?,
        };
        let kind = match &self.provider {
            Some(name) => provider(name)?,
            None => place.settings().provider,
        };
        let provider = place.sandboxes().provider(kind)?;
        let mut spool = None;
        if from == Path::new("-") {
            let mut file = tempfile::NamedTempFile::new()?;
            std::io::copy(&mut std::io::stdin().lock(), &mut file)?;
            file.flush()?;
            file.rewind()?;
            spool = Some(file);
        } else if let Err(e) = std::fs::File::open(from) {
            return Err(CliError::usage(format!("{}: {e}", from.display())));
        }
        place.record("snapshot.import", id.as_str(), json!({ "file": from })).await?;
        say(&format!("reading {} …", from.display()));
        let path = spool.as_ref().map_or(from, |file| file.path());
        let info = provider.import_snapshot(&id, path, self.image.as_deref()).await?;
        if out.json {
            out.json(&json!({ "schema": "forkyard.snapshot/1", "snapshot": info }))?;
        } else {
            out.line(id.as_str())?;
        }
        Ok(Exit::Success)
    }

    pub async fn run(&self, place: &dyn Place, out: &mut Output<'_>) -> Result<Exit> {
        if let [id, to] = &self.export[..] {
            return self.export(place, id, to, out).await;
        }
        if let Some(from) = &self.import {
            return self.import(place, from, out).await;
        }
        let damaged = place.sandboxes().damaged_snapshots().await?;
        if self.remove.is_empty() {
            for (_, id, why) in &damaged {
                eprintln!("{}", plain(&format!("{id} is damaged: {why}")));
            }
            return list(place.sandboxes().measured_snapshots().await?, out);
        }
        let all = place.sandboxes().snapshots().await?;
        let mut removals = Removals::default();
        for id in &self.remove {
            let removed = async {
                let known = all.iter().find(|s| s.id == *id).map(|s| (s.provider, json!(s.labels)));
                let broken = || damaged.iter().find(|(_, d, _)| d == id).map(|(kind, ..)| (*kind, json!({})));
                let (kind, labels) = known.or_else(broken).ok_or_else(|| missing(id.as_str()))?;
                place.record_removal("snapshot.delete", id.as_str(), labels).await;
                Ok(place.sandboxes().provider(kind)?.remove_snapshot(id).await?)
            };
            removals.note(id.as_str(), removed.await, out)?;
        }
        removals.end("snapshots", out)
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
    let mut table =
        Table::new(vec![left("Snapshot"), left("Provider"), left("Run"), left("Made (UTC)"), left("Size")]);
    for s in &all {
        table.row(vec![
            s.id.as_str().into(),
            provider_name(s.provider).into(),
            Cell::new(s.labels.get("run").map(String::as_str).unwrap_or_default()),
            day(s.created_at).into(),
            s.bytes.map_or_else(|| "unknown".into(), size).into(),
        ]);
    }
    let style = out.style;
    out.text(&table.render(&style))?;
    Ok(Exit::Success)
}
