use std::path::PathBuf;

use clap::Args;

use super::target::Target;

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
}
