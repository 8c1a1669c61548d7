use std::path::PathBuf;

use clap::Args;
use forkyard_engine::activities::is_url;
use forkyard_engine::git::{Applied, MAX_OUTPUT_BYTES};
use serde_json::json;

use super::target::Target;
use crate::cli::Global;
use crate::error::{CliError, Result};
use crate::exit::Exit;
use crate::output::Output;
use crate::render::plain;
use crate::runs::{chosen, outcome, with_yard};

/// Bring a result into the repository: as a branch, onto the working tree, or as a patch. All of it or nothing.
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
}

impl ApplyArgs {
    pub fn how(&self) -> How {
        match (&self.patch, self.work_tree) {
            (Some(file), _) => How::Patch(file.clone()),
            (None, true) => How::WorkTree,
            (None, false) => How::Branch(self.branch.clone()),
        }
    }

    pub fn run(&self, global: &Global, out: &mut Output<'_>) -> Result<Exit> {
        with_yard(global, async |yard| {
            let (view, fork) = chosen(yard, &self.target).await?;
            let n = fork.fork;
            let o = outcome(yard, &view, n).await?;
            if fork.diff.is_some_and(|d| d.is_empty()) {
                return Err(CliError::usage(format!("fork {n} of {} changed nothing", view.id))
                    .hint(format!("`forkyard status {}` shows the others", view.id)));
            }
            if let How::Patch(file) = self.how() {
                let patch = yard.git.patch(&o.repo, &o.base, &o.commit, MAX_OUTPUT_BYTES).await?;
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
            let target = match &self.into {
                Some(dir) => yard.git.open(dir).await?,
                // A cache is nobody's place to look for a result.
                None if is_url(&view.repo) => yard.git.open(&std::env::current_dir()?).await?,
                None => o.repo.clone(),
            };
            match self.how() {
                How::WorkTree => {
                    let patch = yard.git.patch(&o.repo, &o.base, &o.commit, MAX_OUTPUT_BYTES).await?;
                    let files = match yard.git.apply_work_tree(&target, patch).await? {
                        Applied::WorkTree { files } => files,
                        Applied::Branch { .. } => 0,
                    };
                    let at = target.work_tree.as_ref().map(|w| w.display().to_string()).unwrap_or_default();
                    let text =
                        format!("Applied {}/{n} to {files} files in {}, uncommitted.", view.id, plain(&at));
                    say(out, "work_tree", &at, &text)
                }
                How::Branch(name) => {
                    let name = name.unwrap_or_else(|| format!("forkyard/{}-{n}", view.id));
                    yard.git.apply_branch(&o.repo, &o.base, &o.commit, &target, &name).await?;
                    let text = format!(
                        "Branch {} has the result. Take it with: git merge {}",
                        plain(&name),
                        plain(&name)
                    );
                    say(out, "branch", &name, &text)
                }
                How::Patch(_) => Ok(Exit::Success),
            }
        })
    }
}

fn say(out: &mut Output<'_>, how: &str, to: &str, text: &str) -> Result<Exit> {
    if out.json {
        out.json(&json!({ "schema": "forkyard.applied/1", "as": how, "to": to }))?;
    } else {
        out.line(text)?;
    }
    Ok(Exit::Success)
}
