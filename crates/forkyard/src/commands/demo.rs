use std::path::{Path, PathBuf};

use clap::Args;
use forkyard_core::ForkNum;
use forkyard_core::sandbox::NetworkMode;
use forkyard_core::spec::RunSpec;
use forkyard_core::view::RunView;
use forkyard_engine::activities::open_repo;

use super::fork::check_model;
use crate::cli::Global;
use crate::error::{CliError, Result};
use crate::exit::Exit;
use crate::follow::{self, Left};
use crate::output::Output;
use crate::temporal;
use crate::yard::{Yard, random_text};

#[derive(Debug, Args)]
pub struct DemoArgs {
    /// Model to use instead of the script, such as `sonnet` (needs its key).
    #[arg(short, long)]
    pub model: Option<String>,
    /// Forks; the script has something to say for four.
    #[arg(short, long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub forks: u32,
    /// Who drives the run: embedded or temporal [default: embedded].
    #[arg(long, value_name = "NAME")]
    pub engine: Option<String>,
}

const FILES: &[(&str, &str)] = &[
    ("README.md", include_str!("../../demo/repo/README.md")),
    ("roman.sh", include_str!("../../demo/repo/roman.sh")),
    ("tests/run.sh", include_str!("../../demo/repo/tests/run.sh")),
];
const SCRIPT: &str = include_str!("../../demo/script.toml");
const PROMPT: &str = "The tests in tests/run.sh fail. Find out why and correct roman.sh.";

impl DemoArgs {
    pub fn run(&self, global: &Global, out: &mut Output<'_>) -> Result<Exit> {
        let mut flags = global.flags()?;
        flags.set_option("engine.kind", "--engine", self.engine.as_ref());
        let settings = global.load(flags)?.settings;
        crate::runtime()?.block_on(async {
            let yard = Yard::open(settings).await?;
            let dir = yard.settings.home.join("demo").join(random_text(8));
            let repo = make_repository(&dir)?;
            let model = match &self.model {
                Some(model) => model.clone(),
                None => {
                    let script = dir.join("script.toml");
                    std::fs::write(&script, SCRIPT)?;
                    format!("{}{}", forkyard_engine::models::SCRIPT, script.display())
                }
            };
            check_model(&yard, &model)?;
            let mut spec = RunSpec::new(repo.display().to_string(), PROMPT, model, self.forks);
            spec.verify = Some("sh tests/run.sh".into());
            spec.protect = vec!["tests/**".into()];
            spec.sandbox.network.mode = NetworkMode::None;
            spec.sandbox.provider = yard.settings.provider;
            if !out.json {
                out.line(&format!(
                    "A repository with failing tests is in {}\nTask: {PROMPT}\n",
                    repo.display()
                ))?;
            }
            spec.engine = yard.settings.engine;
            let (run, notice) = temporal::submit(&yard, spec).await?;
            if let Some(notice) = notice.filter(|_| !out.json) {
                out.line(&notice)?;
            }
            match follow::drive(&yard, &run, out).await? {
                Left::Detached => {
                    let text = follow::detached(&run);
                    out.said("forkyard.command/1", "detach", &run, &text)?;
                    Ok(Exit::Interrupted)
                }
                Left::Elsewhere => Ok(Exit::Interrupted),
                Left::Ended(view) => {
                    let exit = follow::close(&yard, &view, out).await?;
                    if let Some(winner) = view.winner {
                        apply(&yard, &view, winner, &repo, out).await?;
                    }
                    Ok(exit)
                }
            }
        })
    }
}

/// The bundled files as a repository of their own.
fn make_repository(dir: &Path) -> Result<PathBuf> {
    let repo = dir.join("repo");
    for (path, text) in FILES {
        let at = repo.join(path);
        std::fs::create_dir_all(at.parent().unwrap_or(&repo))?;
        std::fs::write(at, text)?;
    }
    let git = |args: &[&str]| -> Result<()> {
        let done = std::process::Command::new("git")
            .args([
                "-c",
                "user.name=forkyard",
                "-c",
                "user.email=forkyard@localhost",
                "-c",
                "commit.gpgsign=false",
            ])
            .args(args)
            .current_dir(&repo)
            .output()
            .map_err(|e| CliError::failure(format!("git: {e}")).hint("install git"))?;
        if done.status.success() {
            return Ok(());
        }
        Err(CliError::failure(format!("git {}: {}", args[0], String::from_utf8_lossy(&done.stderr).trim())))
    };
    git(&["init", "-q", "-b", "main"])?;
    git(&["add", "-A"])?;
    git(&["commit", "-q", "-m", "Roman numerals"])?;
    Ok(repo)
}

async fn apply(
    yard: &Yard,
    view: &RunView,
    winner: ForkNum,
    repo: &Path,
    out: &mut Output<'_>,
) -> Result<()> {
    let failed = |e: forkyard_engine::git::GitError| CliError::failure(e.to_string());
    let target = open_repo(&yard.git, &repo.display().to_string()).await.map_err(failed)?;
    let kept = |name: String| {
        let (git, target, id) = (yard.git.clone(), target.clone(), view.id.clone());
        async move { git.kept(&target, &id, &name).await }
    };
    let (Some(base), Some(commit)) =
        (kept("base".into()).await.map_err(failed)?, kept(winner.to_string()).await.map_err(failed)?)
    else {
        return Err(CliError::failure("the winner's commit is gone"));
    };
    let patch = yard.git.patch(&target, &base, &commit, MAX_PATCH_BYTES).await.map_err(failed)?;
    yard.git.apply_work_tree(&target, patch).await.map_err(failed)?;
    if !out.json {
        out.line(&format!("\nApplied fork {winner} to {}: the tests there pass now.", repo.display()))?;
    }
    Ok(())
}

/// The demo's repository is small.
const MAX_PATCH_BYTES: u64 = 1 << 20;
