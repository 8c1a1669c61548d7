use clap::Args;
use forkyard_engine::git::ChangeKind;
use serde_json::json;

use super::target::Target;
use crate::cli::Global;
use crate::error::Result;
use crate::exit::Exit;
use crate::output::Output;
use crate::place::the_changes;
use crate::render::session::diff_color;
use crate::render::table::{left, right};
use crate::render::{Cell, Color, Style, Table, plain_block};
use crate::runs::{chosen, the_target, with_place};

#[derive(Debug, Clone, Args)]
pub struct DiffArgs {
    /// RUN/N, or RUN for its best fork [default: the run here that is under way, else the newest].
    #[arg(value_name = "RUN/N")]
    pub target: Option<Target>,
    /// Only these files, after `--`: diff RUN/N -- src/lib.rs.
    #[arg(value_name = "PATH", last = true)]
    pub paths: Vec<String>,
    /// Only names and numbers of lines.
    #[arg(long, conflicts_with = "patch")]
    pub stat: bool,
    /// A patch that git apply takes, binary files included.
    #[arg(long)]
    pub patch: bool,
}

impl DiffArgs {
    pub fn run(&self, global: &Global, out: &mut Output<'_>) -> Result<Exit> {
        with_place(global, async |place| {
            let target = the_target(place, self.target.as_ref()).await?;
            let (view, fork) = chosen(place, &target).await?;
            let n = fork.fork;
            if self.patch {
                let patch = place.whole_patch(&view, n).await?;
                // For a program: as it is, byte by byte.
                out.bytes(&patch)?;
                return Ok(Exit::Success);
            }
            let mut changes = the_changes(place, &view, n).await?;
            if !self.paths.is_empty() {
                let wanted = |path: &str| {
                    self.paths.iter().any(|p| {
                        path == p
                            || path.strip_prefix(p.trim_end_matches('/')).is_some_and(|r| r.starts_with('/'))
                    })
                };
                changes.files.retain(|f| wanted(&f.path));
            }
            if out.json {
                out.json(&json!({
                    "schema": "forkyard.diff/1", "run": view.id, "fork_num": n, "base": changes.base,
                    "commit": changes.commit, "files": changes.files,
                }))?;
                return Ok(Exit::Success);
            }
            let style = out.style;
            if self.stat {
                let mut table = Table::new(vec![left(""), right(""), right(""), left("")]);
                for f in &changes.files {
                    let (mark, color) = kind(f.kind);
                    let (added, removed) = f.lines.map_or(("binary".into(), String::new()), |l| {
                        (format!("+{}", l.added), format!("-{}", l.removed))
                    });
                    table.row(vec![
                        Cell::new(mark).color(color),
                        added.into(),
                        removed.into(),
                        f.path.as_str().into(),
                    ]);
                }
                // Without its empty titles.
                out.text(table.render(&style).trim_start_matches('\n'))?;
                return Ok(Exit::Success);
            }
            let patch = place.patch(&view, n, &self.paths).await?;
            out.text(&painted(&String::from_utf8_lossy(&patch), &style))?;
            Ok(Exit::Success)
        })
    }
}

pub fn kind(kind: ChangeKind) -> (&'static str, Color) {
    match kind {
        ChangeKind::Added => ("A", Color::Green),
        ChangeKind::Modified => ("M", Color::Cyan),
        ChangeKind::Deleted => ("D", Color::Red),
        ChangeKind::TypeChanged => ("T", Color::Yellow),
    }
}

/// In colour on a terminal, and harmless everywhere.
fn painted(patch: &str, style: &Style) -> String {
    let mut out = String::with_capacity(patch.len());
    for line in patch.lines() {
        let color = diff_color(line);
        let text = plain_block(line);
        out.push_str(&color.map_or(text.clone(), |c| style.paint(c, &text)));
        out.push('\n');
    }
    out
}
