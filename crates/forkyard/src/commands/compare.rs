use clap::Args;
use forkyard_core::{ForkNum, RunId};
use forkyard_engine::results::Comparison;
use serde_json::json;

use super::diff::kind;
use super::target::Target;
use crate::cli::Global;
use crate::error::{CliError, Result};
use crate::exit::Exit;
use crate::output::Output;
use crate::render::closing::{edited_tests, ranges, scores_failed, table};
use crate::render::table::left;
use crate::render::{Cell, Table, wrap};
use crate::results::RunResult;
use crate::runs::{the_fork, the_run, the_target, with_place};

#[derive(Debug, Clone, Args)]
pub struct CompareArgs {
    /// The run [default: the run here that is under way, else the newest].
    #[arg(value_name = "RUN")]
    pub run: Option<RunId>,
    /// Only these forks.
    #[arg(value_name = "N")]
    pub forks: Vec<ForkNum>,
}

impl CompareArgs {
    pub fn run(&self, global: &Global, out: &mut Output<'_>) -> Result<Exit> {
        with_place(global, async |place| {
            let named = self.run.clone().map(|run| Target { run, fork: None });
            let run = the_target(place, named.as_ref()).await?.run;
            let view = the_run(place, &run).await?;
            let mut forks = place.forks(&run).await?;
            if !self.forks.is_empty() {
                for n in &self.forks {
                    the_fork(place, &run, *n).await?;
                }
                forks.retain(|f| self.forks.contains(&f.fork));
            }
            let results: Vec<ForkNum> = forks.iter().filter(|f| f.diff.is_some()).map(|f| f.fork).collect();
            let compared = place.compare(&view, &results).await?;
            if compared.changes.is_empty() {
                return Err(CliError::failure(format!("no fork of {run} has a result yet"))
                    .hint(format!("`forkyard status {run}` says how far they are")));
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
            for warning in scores_failed(&result).into_iter().chain(edited_tests(&result)) {
                for line in wrap(&warning, style.width) {
                    out.line(&line)?;
                }
            }
            Ok(Exit::Success)
        })
    }
}

/// A column for each way that the files were changed. Forks that did the same share one, and those that changed nothing
/// have none.
fn matrix(compared: &Comparison) -> Table {
    let Comparison { changes, files } = compared;
    let mut columns: Vec<(Vec<Option<char>>, Vec<ForkNum>)> = vec![];
    for fork in changes.iter().filter(|(_, files)| !files.is_empty()).map(|(fork, _)| *fork) {
        let letters: Vec<Option<char>> =
            files.values().map(|variants| variants.get(&fork).copied()).collect();
        match columns.iter_mut().find(|(known, _)| *known == letters) {
            Some((_, forks)) => forks.push(fork),
            None => columns.push((letters, vec![fork])),
        }
    }
    let titles = columns.iter().map(|(_, forks)| {
        left(format!("{} {}", if forks.len() == 1 { "Fork" } else { "Forks" }, ranges(forks)))
    });
    let mut table = Table::new(titles.chain(std::iter::once(left("File"))).collect());
    for (row, path) in files.keys().enumerate() {
        let cells = columns.iter().map(|(letters, forks)| {
            let change = changes.get(&forks[0]).and_then(|files| files.get(path));
            match (change, letters[row]) {
                (Some(change), Some(letter)) => {
                    let (mark, color) = kind(change.kind);
                    let lines = change
                        .lines
                        .map_or(" binary".to_string(), |l| format!(" +{} -{}", l.added, l.removed));
                    Cell::new(format!("{letter} {mark}{lines}")).color(color)
                }
                (None, _) | (_, None) => Cell::new("·"),
            }
        });
        table.row(cells.chain(std::iter::once(Cell::new(path))).collect());
    }
    table
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use forkyard_engine::git::{ChangeKind, FileChange, Lines};

    use super::*;
    use crate::render::Style;

    #[test]
    fn forks_that_did_the_same_share_a_column() {
        assert_eq!(ranges(&[0, 1, 2, 5, 7, 8]), "0-2,5,7-8");
        let change = |path: &str| FileChange {
            path: path.into(),
            kind: ChangeKind::Modified,
            lines: Some(Lines { added: 1, removed: 0 }),
            old_mode: 0o100_644,
            new_mode: 0o100_644,
        };
        let mut compared = Comparison::default();
        for n in 0..100 {
            let files = if n == 99 { vec![] } else { vec![("a.txt".to_string(), change("a.txt"))] };
            compared.changes.insert(n, BTreeMap::from_iter(files));
        }
        let letters = (0..99).map(|n| (n, if n == 7 { 'b' } else { 'a' })).collect();
        compared.files.insert("a.txt".into(), letters);
        assert_eq!(
            matrix(&compared).render(&Style::PIPE),
            "Forks 0-6,8-98  Fork 7     File\n\
             a M +1 -0       b M +1 -0  a.txt\n"
        );
    }
}
