use clap::Args;
use forkyard_core::{ForkNum, RunId};
use forkyard_engine::results::Comparison;
use serde_json::json;

use super::diff::kind;
use crate::cli::Global;
use crate::error::{CliError, Result};
use crate::exit::Exit;
use crate::output::Output;
use crate::render::closing::{edited_tests, table};
use crate::render::table::left;
use crate::render::{Cell, Table, fit};
use crate::results::RunResult;
use crate::runs::{the_fork, the_run, with_place};

/// Compare the results of a run: files by forks, what they agree and differ on.
#[derive(Debug, Clone, Args)]
pub struct CompareArgs {
    /// The run.
    #[arg(value_name = "RUN")]
    pub run: RunId,
    /// Only these forks.
    #[arg(value_name = "N")]
    pub forks: Vec<ForkNum>,
}

impl CompareArgs {
    pub fn run(&self, global: &Global, out: &mut Output<'_>) -> Result<Exit> {
        with_place(global, async |place| {
            let view = the_run(place, &self.run).await?;
            let mut forks = place.forks(&self.run).await?;
            if !self.forks.is_empty() {
                for n in &self.forks {
                    the_fork(place, &self.run, *n).await?;
                }
                forks.retain(|f| self.forks.contains(&f.fork));
            }
            let results: Vec<ForkNum> = forks.iter().filter(|f| f.diff.is_some()).map(|f| f.fork).collect();
            let compared = place.compare(&view, &results).await?;
            if compared.changes.is_empty() {
                return Err(CliError::failure(format!("no fork of {} has a result yet", self.run))
                    .hint(format!("`forkyard status {}` says how far they are", self.run)));
            }
            let files = &compared.files;
            let mut result = RunResult::read(place, &view).await?;
            result.results.retain(|r| forks.iter().any(|f| f.fork == r.fork_num));
            if out.json {
                let list: Vec<_> = files
                    .iter()
                    .map(|(path, variants)| json!({ "path": path, "variants": variants }))
                    .collect();
                out.json(&json!({
                    "schema": "forkyard.comparison/1", "run": view.id, "winner": view.winner, "files": list,
                    "results": result.results,
                }))?;
                return Ok(Exit::Success);
            }
            let style = out.style;
            out.text(&table(&forks, &view.ranking, view.winner).render(&style))?;
            out.line("")?;
            out.text(&matrix(&compared).render(&style))?;
            out.line("")?;
            out.line(&format!(
                "{} changed by any of {} forks: {} the same in all, {} in different ways, {} by one fork alone",
                if files.len() == 1 { "1 file".to_string() } else { format!("{} files", files.len()) },
                compared.changes.len(),
                compared.same(),
                compared.differing(),
                compared.alone(),
            ))?;
            out.line("The same letter in a row is the same change.")?;
            for warning in edited_tests(&result) {
                out.line(&fit(&warning, style.width))?;
            }
            Ok(Exit::Success)
        })
    }
}

fn matrix(compared: &Comparison) -> Table {
    let Comparison { changes, files } = compared;
    let titles = changes.keys().map(|n| left(format!("Fork {n}")));
    let mut table = Table::new(titles.chain(std::iter::once(left("File"))).collect());
    for (path, variants) in files {
        let cells = changes.iter().map(|(fork, files)| match (files.get(path), variants.get(fork)) {
            (Some(change), Some(letter)) => {
                let (mark, color) = kind(change.kind);
                let lines =
                    change.lines.map_or(" binary".to_string(), |l| format!(" +{} -{}", l.added, l.removed));
                Cell::new(format!("{letter} {mark}{lines}")).color(color)
            }
            (None, _) | (_, None) => Cell::new("·"),
        });
        table.row(cells.chain(std::iter::once(Cell::new(path))).collect());
    }
    table
}
