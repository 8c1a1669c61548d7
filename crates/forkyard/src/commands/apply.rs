use std::path::{Path, PathBuf};

use clap::Args;
use forkyard_core::ForkNum;
use forkyard_core::view::RunView;
use forkyard_engine::activities::{branch_name, is_url};
use forkyard_engine::git::{Applied, check_path};
use serde_json::json;

use super::target::Target;
use crate::cli::Global;
use crate::error::{CliError, Result};
use crate::exit::Exit;
use crate::output::Output;
use crate::place::{Place, the_changes};
use crate::render::plain;
use crate::runs::{captured, chosen, with_place};

#[derive(Debug, Clone, Args)]
pub struct ApplyArgs {
    /// RUN/N, or RUN for its best fork.
    #[arg(value_name = "RUN/N")]
    pub target: Target,
    /// As a new branch of this name [default: forkyard/RUN-N].
    #[arg(long, value_name = "BRANCH", group = "how")]
    pub branch: Option<String>,
    /// Onto the files of the working tree, uncommitted.
    #[arg(long, group = "how")]
    pub work_tree: bool,
    /// As a patch into a file; `-` writes it to standard output.
    #[arg(long, value_name = "FILE", group = "how")]
    pub patch: Option<PathBuf>,
    /// The files that were captured beside the diff, into a new or empty folder.
    #[arg(long, value_name = "DIR", group = "how")]
    pub captured: Option<PathBuf>,
    /// The repository [default: the run's, or here].
    #[arg(long, value_name = "DIR")]
    pub into: Option<PathBuf>,
}

/// How a result is wanted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum How {
    /// None: a name that says where it came from.
    Branch(Option<String>),
    WorkTree,
    Patch(PathBuf),
    Captured(PathBuf),
}

impl ApplyArgs {
    pub fn how(&self) -> How {
        match (&self.patch, &self.captured, self.work_tree) {
            (Some(file), _, _) => How::Patch(file.clone()),
            (None, Some(dir), _) => How::Captured(dir.clone()),
            (None, None, true) => How::WorkTree,
            (None, None, false) => How::Branch(self.branch.clone()),
        }
    }

    pub fn run(&self, global: &Global, out: &mut Output<'_>) -> Result<Exit> {
        with_place(global, async |place| {
            let (view, fork) = chosen(place, &self.target).await?;
            let n = fork.fork;
            if let How::Captured(dir) = self.how() {
                let files = write_captured(place, &view, n, &dir).await?;
                let text = format!("Wrote {files} captured files into {}.", dir.display());
                return say(out, "captured", &dir.display().to_string(), &text);
            }
            the_changes(place, &view, n).await?;
            if fork.diff.is_some_and(|d| d.is_empty()) {
                return Err(CliError::usage(format!("fork {n} of {} changed nothing", view.id))
                    .hint(format!("`forkyard status {}` shows the others", view.id)));
            }
            if let How::Patch(file) = self.how() {
                let patch = place.whole_patch(&view, n).await?;
                if file.as_os_str() == "-" {
                    out.bytes(&patch)?;
                    return Ok(Exit::Success);
                }
                std::fs::write(&file, &patch).map_err(|e| {
                    CliError::failure(format!("{}: {e}", file.display()))
                        .hint("name a file in a folder that is there and may be written to")
                })?;
                return say(out, "patch", &file.display().to_string(), &format!("Wrote {}.", file.display()));
            }
            let git = place.git();
            git.prepare().await?;
            let target = match &self.into {
                Some(dir) => git.open(dir).await?,
                // A cache is nobody's place to look for a result, and a server's repository not this machine's.
                None if is_url(&view.repo) || place.here().is_none() => {
                    git.open(&std::env::current_dir()?).await?
                }
                None => git.open(Path::new(&view.repo)).await?,
            };
            match self.how() {
                How::WorkTree => {
                    let patch = place.whole_patch(&view, n).await?;
                    let files = match git.apply_work_tree(&target, patch).await? {
                        Applied::WorkTree { files } => files,
                        Applied::Branch { .. } => 0,
                    };
                    let at = target.work_tree.as_ref().map(|w| w.display().to_string()).unwrap_or_default();
                    let text =
                        format!("Applied {}/{n} to {files} files in {}, uncommitted.", view.id, plain(&at));
                    say(out, "work_tree", &at, &text)
                }
                How::Branch(name) => {
                    let name = name.unwrap_or_else(|| branch_name(&view.id, n));
                    place.branch(&view, n, &target, &name).await?;
                    let text = format!(
                        "Branch {} has the result. Take it with: git merge {}",
                        plain(&name),
                        plain(&name)
                    );
                    say(out, "branch", &name, &text)
                }
                How::Patch(_) | How::Captured(_) => Ok(Exit::Success),
            }
        })
    }
}

/// Only into a folder that has nothing in it: a name from a sandbox then leads nowhere else.
async fn write_captured(place: &dyn Place, view: &RunView, fork: ForkNum, dir: &Path) -> Result<usize> {
    let failed = |e: std::io::Error| CliError::failure(format!("{}: {e}", dir.display()));
    let paths = captured(place, &view.id, fork).await?;
    if paths.is_empty() {
        return Err(CliError::usage(format!("fork {fork} of {} captured no files", view.id))
            .hint("`forkyard fork --capture GLOB` says which to bring back"));
    }
    std::fs::create_dir_all(dir).map_err(failed)?;
    if std::fs::read_dir(dir).map_err(failed)?.next().is_some() {
        return Err(CliError::usage(format!("{} is not empty", dir.display())).hint("name a new folder"));
    }
    let mut written = 0;
    for path in paths {
        check_path(&path)?;
        let Some(data) = place.captured(&view.id, fork, &path).await? else { continue };
        let to = dir.join(&path);
        if let Some(parent) = to.parent() {
            std::fs::create_dir_all(parent).map_err(failed)?;
        }
        std::fs::write(&to, data).map_err(failed)?;
        written += 1;
    }
    Ok(written)
}

fn say(out: &mut Output<'_>, how: &str, to: &str, text: &str) -> Result<Exit> {
    if out.json {
        out.json(&json!({ "schema": "forkyard.applied/1", "as": how, "to": to }))?;
    } else {
        out.line(text)?;
    }
    Ok(Exit::Success)
}
