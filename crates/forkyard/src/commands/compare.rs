use std::collections::{BTreeMap, BTreeSet};

use clap::Args;
use forkyard_core::view::ForkView;
use forkyard_core::{ForkNum, RunId};
use forkyard_engine::git::{ChangeKind, FileChange, MAX_OUTPUT_BYTES};
use serde_json::json;

use super::diff::kind;
use crate::cli::Global;
use crate::error::{CliError, Result};
use crate::exit::Exit;
use crate::follow::store_error;
use crate::output::Output;
use crate::render::closing::table;
use crate::render::table::left;
use crate::render::{Cell, Table};
use crate::runs::{outcome, the_fork, the_run, with_yard};
use crate::yard::Yard;

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

/// What one fork did to one file.
struct Change {
    file: FileChange,
    patch: Vec<u8>,
}

type Changes = BTreeMap<String, Change>;

impl CompareArgs {
    pub fn run(&self, global: &Global, out: &mut Output<'_>) -> Result<Exit> {
        with_yard(global, async |yard| {
            let view = the_run(yard, &self.run).await?;
            let mut forks = yard.store.forks(&self.run).await.map_err(store_error)?;
            if !self.forks.is_empty() {
                for n in &self.forks {
                    the_fork(yard, &self.run, *n).await?;
                }
                forks.retain(|f| self.forks.contains(&f.fork));
            }
            let mut changes: BTreeMap<ForkNum, Changes> = BTreeMap::new();
            for f in forks.iter().filter(|f| f.diff.is_some()) {
                changes.insert(f.fork, changes_of(yard, &view, f).await?);
            }
            if changes.is_empty() {
                return Err(CliError::failure(format!("no fork of {} has a result yet", self.run))
                    .hint(format!("`forkyard status {}` says how far they are", self.run)));
            }
            let files = agreement(&changes);
            if out.json {
                let list: Vec<_> = files
                    .iter()
                    .map(|(path, variants)| json!({ "path": path, "variants": variants }))
                    .collect();
                let result = crate::results::RunResult::read(yard, &view).await?;
                let results: Vec<_> =
                    result.results.iter().filter(|r| forks.iter().any(|f| f.fork == r.fork_num)).collect();
                out.json(&json!({
                    "schema": "forkyard.comparison/1", "run": view.id, "winner": view.winner, "files": list,
                    "results": results,
                }))?;
                return Ok(Exit::Success);
            }
            let style = out.style;
            out.text(&table(&forks, &view.ranking, view.winner).render(&style))?;
            out.line("")?;
            out.text(&matrix(&changes, &files).render(&style))?;
            out.line("")?;
            let all = changes.len();
            let same = files.values().filter(|v| v.len() == all && distinct(v) == 1).count();
            let one = files.values().filter(|v| v.len() == 1).count();
            out.line(&format!(
                "{} changed by any of {all} forks: {same} the same in all, {} in different ways, {one} by one fork alone",
                if files.len() == 1 { "1 file".to_string() } else { format!("{} files", files.len()) },
                files.values().filter(|v| distinct(v) > 1).count(),
            ))?;
            out.line("The same letter in a row is the same change.")?;
            Ok(Exit::Success)
        })
    }
}

async fn changes_of(yard: &Yard, view: &forkyard_core::view::RunView, f: &ForkView) -> Result<Changes> {
    let o = outcome(yard, view, f.fork).await?;
    let summary = yard.git.diff(&o.repo, &o.base, &o.commit).await?;
    let patch = yard.git.patch(&o.repo, &o.base, &o.commit, MAX_OUTPUT_BYTES).await?;
    let mut pieces = pieces(&patch).into_iter();
    let mut changes = Changes::new();
    for file in summary.files {
        // A file that became a link, or the like, is taken away and made anew.
        let parts = if file.kind == ChangeKind::TypeChanged { 2 } else { 1 };
        let patch = pieces.by_ref().take(parts).flatten().copied().collect();
        changes.insert(file.path.clone(), Change { file, patch });
    }
    Ok(changes)
}

/// A patch file by file, in its order. A changed line never begins with `d`, so the mark is unmistakable.
fn pieces(patch: &[u8]) -> Vec<&[u8]> {
    const MARK: &[u8] = b"diff --git ";
    let mut starts: Vec<usize> = Vec::new();
    let mut at = 0;
    for line in patch.split_inclusive(|b| *b == b'\n') {
        if line.starts_with(MARK) {
            starts.push(at);
        }
        at += line.len();
    }
    starts
        .iter()
        .enumerate()
        .map(|(i, from)| &patch[*from..starts.get(i + 1).copied().unwrap_or(patch.len())])
        .collect()
}

/// For each file, which forks did the same to it: the same letter is the same change.
fn agreement(changes: &BTreeMap<ForkNum, Changes>) -> BTreeMap<String, BTreeMap<ForkNum, char>> {
    let paths: BTreeSet<&String> = changes.values().flat_map(Changes::keys).collect();
    paths
        .into_iter()
        .map(|path| {
            let mut seen: Vec<&[u8]> = Vec::new();
            let mut variants = BTreeMap::new();
            for (fork, files) in changes {
                let Some(change) = files.get(path) else { continue };
                let at = seen.iter().position(|p| *p == change.patch).unwrap_or_else(|| {
                    seen.push(&change.patch);
                    seen.len() - 1
                });
                variants.insert(*fork, letter(at));
            }
            (path.clone(), variants)
        })
        .collect()
}

/// More variants than letters look alike, which a reader of that many columns will not mind.
fn letter(n: usize) -> char {
    char::from(b'a' + u8::try_from(n.min(25)).unwrap_or(25))
}

fn distinct(variants: &BTreeMap<ForkNum, char>) -> usize {
    variants.values().collect::<BTreeSet<_>>().len()
}

fn matrix(changes: &BTreeMap<ForkNum, Changes>, files: &BTreeMap<String, BTreeMap<ForkNum, char>>) -> Table {
    let titles = changes.keys().map(|n| left(format!("Fork {n}")));
    let mut table = Table::new(titles.chain(std::iter::once(left("File"))).collect());
    for (path, variants) in files {
        let cells = changes.iter().map(|(fork, files)| match (files.get(path), variants.get(fork)) {
            (Some(change), Some(letter)) => {
                let (mark, color) = kind(change.file.kind);
                let lines = change
                    .file
                    .lines
                    .map_or(" binary".to_string(), |l| format!(" +{} -{}", l.added, l.removed));
                Cell::new(format!("{letter} {mark}{lines}")).color(color)
            }
            (None, _) | (_, None) => Cell::new("·"),
        });
        table.row(cells.chain(std::iter::once(Cell::new(path))).collect());
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_patch_is_cut_at_its_files_alone() {
        let patch = b"diff --git a/x b/x\n+diff --git a/fake b/fake\ndiff --git a/y b/y\n-z\n";
        let found = pieces(patch);
        assert_eq!(found.len(), 2);
        assert!(found[1].starts_with(b"diff --git a/y"));
        assert!(pieces(b"").is_empty());
    }
}
