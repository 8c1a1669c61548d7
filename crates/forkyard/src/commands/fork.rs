use std::path::{Path, PathBuf};

use clap::Args;
use forkyard_core::sandbox::{Labels, Root};
use forkyard_core::spec::{ModelKnown, RepoSpec, RunSpec, Start};
use forkyard_core::view::EngineKind;
use forkyard_engine::git::check_url;
use forkyard_sandbox::SandboxStatus;

use super::run_options::RunOptions;
use crate::cli::Global;
use crate::error::{CliError, Result};
use crate::exit::Exit;
use crate::follow;
use crate::output::Output;
use crate::place::Place;
use crate::runs::{leave_to_worker, with_place_flags};
use crate::settings::Settings;
use crate::yard::Yard;

#[derive(Debug, Clone, Default, Args)]
pub struct ForkArgs {
    /// A URL, or a folder of a local repository [default: here].
    #[arg(value_name = "REPO")]
    pub repo: Option<String>,
    /// Branch, tag or commit to start from [default: HEAD, or the remote's default branch].
    #[arg(short, long, value_name = "BRANCH")]
    pub branch: Option<String>,
    /// Carry uncommitted changes of a local repository.
    #[arg(long)]
    pub dirty: bool,
    /// What the agents are to do; several prompts are dealt out to the forks.
    #[arg(short, long, value_name = "TEXT", required_unless_present = "prompt_file")]
    pub prompt: Vec<String>,
    /// The same, from a file; `-` reads standard input.
    #[arg(long, value_name = "FILE")]
    pub prompt_file: Vec<PathBuf>,
    #[command(flatten)]
    pub options: RunOptions,
}

impl ForkArgs {
    pub fn run(&self, global: &Global, out: &mut Output<'_>) -> Result<Exit> {
        let mut flags = global.flags()?;
        self.options.add_to(&mut flags);
        with_place_flags(global, flags, async |place| {
            let spec = self.spec(place.settings(), &std::env::current_dir()?)?;
            start(place, global, spec, &self.options, out).await
        })
    }

    pub fn spec(&self, settings: &Settings, here: &Path) -> Result<RunSpec> {
        let repo = repo_spec(self.repo.as_deref(), self.branch.clone(), self.dirty, here)?;
        self.options.spec(settings, repo, &self.prompts()?)
    }

    fn prompts(&self) -> Result<Vec<String>> {
        let mut prompts = self.prompt.clone();
        for file in &self.prompt_file {
            let text = if file == Path::new("-") {
                std::io::read_to_string(std::io::stdin())
            } else {
                std::fs::read_to_string(file)
            };
            prompts.push(text.map_err(|e| {
                CliError::usage(format!("--prompt-file {}: {e}", file.display()))
                    .hint("name a readable text file")
            })?);
        }
        Ok(prompts)
    }
}

/// Submits a run and, as its options say, follows it to its end or leaves it to a worker.
pub async fn start(
    place: &dyn Place,
    global: &Global,
    spec: RunSpec,
    options: &RunOptions,
    out: &mut Output<'_>,
) -> Result<Exit> {
    if options.log_dir.is_some() {
        check_log_dir(place, &spec)?;
    }
    let (run, notice) = place.submit(spec).await?;
    if let Some(notice) = notice.filter(|_| !out.json) {
        out.line(&notice)?;
    }
    if options.waits() {
        return follow::to_the_end(place, &run, out).await;
    }
    leave_to_worker(place, global, &run).await?;
    out.said(
        "forkyard.command/1",
        "fork",
        &run,
        &format!("{run} is under way.\n\n  forkyard status {run}\n  forkyard logs -f {run}"),
    )?;
    Ok(Exit::Success)
}

/// What is wrong with a run, its models or its repository is told before anything is stored.
pub async fn check(yard: &Yard, spec: &RunSpec) -> Result<()> {
    for fork in &spec.forks {
        check_model(yard, &fork.model)?;
    }
    check_folders(yard, spec)?;
    if !forkyard_engine::activities::is_url(&spec.repo.source) {
        let repo = yard.git.open(Path::new(&spec.repo.source)).await?;
        yard.git.resolve(&repo, spec.repo.branch.as_deref()).await.map_err(|e| {
            let e = CliError::from(e);
            let hint =
                e.hint.clone().unwrap_or_else(|| "`git branch -a` and `git tag` show what there is".into());
            e.hint(hint)
        })?;
    }
    check_starts(yard, spec).await
}

/// A folder of this machine is asked for: those who write the logs have to be here.
fn check_log_dir(place: &dyn Place, spec: &RunSpec) -> Result<()> {
    let (who, there) = match (place.here(), spec.engine) {
        (None, _) => ("a server writes the logs of its runs", "in the server's configuration"),
        (Some(_), EngineKind::Temporal) => ("Temporal's workers write the logs", "where the workers run"),
        (Some(_), EngineKind::Embedded) => return Ok(()),
    };
    Err(CliError::usage(format!("--log-dir: {who}, and a folder of this machine says nothing there"))
        .hint(format!("leave it out and set `run.log_dir` {there}; `forkyard logs` shows them here, too")))
}

/// Folders of this machine that the run is to use. Where hosts share a store, those of a run that Temporal drives are the
/// workers': whoever lacks one says so when a sandbox is made.
fn check_folders(yard: &Yard, spec: &RunSpec) -> Result<()> {
    if spec.engine == EngineKind::Embedded || yard.settings.store_url.is_none() {
        for volume in &spec.sandbox.volumes {
            if !Path::new(&volume.host_path).is_dir() {
                return Err(CliError::usage(format!(
                    "--volume {}:{}: {} is not a folder of this machine",
                    volume.host_path, volume.path, volume.host_path
                ))
                .hint("make it first, or name one that is there"));
            }
        }
    }
    if let Some(dir) = yard.settings.log_dir.as_ref().filter(|_| spec.engine == EngineKind::Embedded) {
        std::fs::create_dir_all(dir).map_err(|e| {
            CliError::usage(format!("--log-dir {}: {e}", dir.display()))
                .hint("name a folder that can be made and written to")
        })?;
    }
    Ok(())
}

/// Sandboxes and snapshots that a run starts from are there, with the provider that makes its own.
async fn check_starts(yard: &Yard, spec: &RunSpec) -> Result<()> {
    let kind = spec.sandbox.provider;
    let Some(provider) = yard.providers.get(&kind) else {
        return Err(
            CliError::failure(format!("there is no {kind:?} provider here")).hint("see `forkyard doctor`")
        );
    };
    for start in spec.starts() {
        match start {
            Start::Parent(id) => {
                let all = provider.list(&Labels::new()).await?;
                match all.iter().find(|s| s.id == id).map(|s| s.status) {
                    Some(SandboxStatus::Running) => {}
                    Some(SandboxStatus::Paused | SandboxStatus::Stopped | SandboxStatus::Dead) => {
                        return Err(CliError::usage(format!("--sandbox {id}: it is not running")).hint(
                            format!("`forkyard sandbox resume {id}` or `start {id}` makes it run again"),
                        ));
                    }
                    None => {
                        return Err(CliError::usage(format!("--sandbox {id}: there is no such sandbox"))
                            .hint("`forkyard sandbox list` shows them"));
                    }
                }
            }
            Start::Root(Root::Snapshot(id)) => {
                if !provider.snapshots().await?.iter().any(|s| s.id == id) {
                    return Err(CliError::usage(format!("--snapshot {id}: there is no such snapshot"))
                        .hint("`forkyard sandbox snapshots` shows them"));
                }
            }
            Start::Root(Root::Directory(dir)) if spec.engine == EngineKind::Temporal => {
                return Err(CliError::usage(format!(
                    "--image dir:{dir}: Temporal's workers may be on other hosts, where it is another folder"
                ))
                .hint("name an image, or leave --engine temporal out"));
            }
            Start::Root(Root::Default | Root::Image(_) | Root::Directory(_)) => {}
        }
    }
    Ok(())
}

/// Whether a model is known and can be asked.
pub fn check_model(yard: &Yard, model: &str) -> Result<()> {
    if yard.models.known(model) == ModelKnown::No {
        return Err(CliError::usage(format!("-m {model}: there is no such model")).hint(
            "name sonnet, opus or haiku, a full model id of the price list, openai:NAME, or script:FILE",
        ));
    }
    yard.models.check(model).map_err(|why| match model.starts_with(forkyard_engine::models::SCRIPT) {
        true => {
            CliError::usage(format!("-m {model}: {why}")).hint("docs/script-model.md says what a script is")
        }
        false => CliError::usage(why),
    })
}

/// A URL as it is; a folder as an absolute path.
pub fn repo_spec(repo: Option<&str>, branch: Option<String>, dirty: bool, here: &Path) -> Result<RepoSpec> {
    let repo = repo.unwrap_or(".");
    let path = here.join(repo);
    if path.is_dir() {
        let path = path.canonicalize()?;
        let source = path.to_str().ok_or_else(|| CliError::usage("the repository's path is not UTF-8"))?;
        return Ok(RepoSpec { source: source.to_string(), branch, dirty });
    }
    check_url(repo).map_err(|e| {
        let error = CliError::from(e);
        CliError { message: format!("{repo:?} is neither a folder nor a URL of a repository"), ..error }
    })?;
    if dirty {
        return Err(CliError::usage("--dirty: a URL has no uncommitted changes")
            .hint("name a local folder, or leave --dirty out"));
    }
    Ok(RepoSpec { source: repo.to_string(), branch, dirty })
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use forkyard_core::Usd;
    use forkyard_core::sandbox::NetworkMode;

    use super::*;
    use crate::settings::{Flags, Sources, resolve};

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        fork: ForkArgs,
    }

    fn spec(args: &[&str]) -> Result<RunSpec> {
        let line = Line::try_parse_from(std::iter::once("fork").chain(args.iter().copied()))
            .map_err(|e| CliError::usage(e.to_string()))?;
        let mut flags = Flags::default();
        line.fork.options.add_to(&mut flags);
        let settings = resolve(&Sources { flags: flags.into_values(), ..Sources::default() })?.settings;
        line.fork.spec(&settings, &std::env::temp_dir())
    }

    #[test]
    fn defaults_are_a_valid_run() {
        let s = spec(&["https://example.com/r", "-p", "do it"]).unwrap();
        s.validate(|_| ModelKnown::Priced).unwrap();
        assert_eq!((s.forks.len(), s.max_concurrent, s.fork_timeout.0), (1, 5, 7_200_000));
        assert_eq!(
            (s.forks[0].model.as_str(), s.sandbox.root, s.repo.branch),
            ("sonnet", Root::Default, None)
        );
    }

    #[test]
    fn options_arrive_where_they_belong() {
        let s = spec(&[
            "https://example.com/r",
            "-b",
            "dev",
            "-p",
            "x",
            "-f",
            "3",
            "-m",
            "opus",
            "--max-concurrent",
            "2",
            "-t",
            "90s",
            "--budget",
            "$5",
            "--fork-budget",
            "1",
            "--memory",
            "1GiB",
            "--cpus",
            "0.5",
            "--network",
            "none",
            "--allow",
            "a",
            "--allow",
            "b",
            "--image",
            "debian",
            "--verify",
            "make",
            "--protect",
            "tests/**",
            "--volume",
            "/a:/b:rw",
            "--env",
            "A=1,2",
            "--keep",
            "--until-verified",
            "2",
            "--max-forks",
            "9",
            "--allowed-tools",
            "Read,Bash",
            "--no-wait",
        ])
        .unwrap();
        s.validate(|_| ModelKnown::Priced).unwrap();
        assert_eq!((s.forks.len(), s.max_concurrent, s.fork_timeout.0), (3, 2, 90_000));
        assert_eq!((s.budget.run, s.budget.fork), (Some(Usd::dollars(5)), Some(Usd::dollars(1))));
        assert_eq!((s.sandbox.limits.memory_bytes, s.sandbox.limits.cpus), (Some(1 << 30), Some(0.5)));
        assert_eq!((s.sandbox.network.mode, s.sandbox.network.allow.len()), (NetworkMode::None, 2));
        assert_eq!((s.sandbox.root, s.sandbox.volumes[0].writable), (Root::Image("debian".into()), true));
        assert_eq!((s.sandbox.env["A"].as_str(), s.agent.allowed_tools.len()), ("1,2", 2));
        assert_eq!((s.until_verified.unwrap().max_forks, s.keep), (9, true));
        assert_eq!((s.repo.branch.as_deref(), s.forks[2].model.as_str()), (Some("dev"), "opus"));
    }

    #[test]
    fn every_prompt_meets_every_model() {
        let s = spec(&["https://example.com/r", "-p", "a", "-p", "b", "-m", "x", "-m", "y"]).unwrap();
        let pairs: Vec<(&str, &str)> =
            s.forks.iter().map(|f| (f.prompt.as_str(), f.model.as_str())).collect();
        assert_eq!(pairs, [("a", "x"), ("b", "x"), ("a", "y"), ("b", "y")]);
        let e = spec(&["https://example.com/r", "-p", "a", "-p", "b", "-f", "1"]).unwrap_err();
        assert!(e.message.contains("need at least 2"), "{}", e.message);
    }

    #[test]
    fn bad_values_name_the_flag_and_the_fix() {
        for (args, expected) in [
            (&["-f", "0"][..], "--forks: `run.forks` = \"0\" can't be used; write something from 1 to 100"),
            (&["-f", "101"], "from 1 to 100"),
            (&["-t", "soon"], "--timeout: `run.timeout` = \"soon\" can't be used; write a duration"),
            (&["--budget=-5"], "--budget: `run.budget` = \"-5\" can't be used"),
            (&["--network", "open"], "write `none` | `isolated` | `bridge`"),
            (&["--volume", "a:b"], "with absolute paths"),
            (&["--secret", "nope"], "there is no such secret"),
            (&["--fork-budget", "x"], "--fork-budget"),
            (&["--snapshot", "../x"], "snapshot id"),
            (&["--agent-prompt", "/nonexistent"], "--agent-prompt /nonexistent"),
        ] {
            let all: Vec<&str> = ["https://example.com/r", "-p", "x"].iter().chain(args).copied().collect();
            let e = spec(&all).unwrap_err();
            assert!(e.message.contains(expected), "{args:?}: {}", e.message);
            assert_eq!(e.exit, crate::exit::Exit::Usage);
        }
        let e = spec(&["--upload-pack=x", "-p", "x"]).unwrap_err();
        assert_eq!(e.exit, crate::exit::Exit::Usage);
        let e = spec(&["no/such/folder", "-p", "x"]).unwrap_err();
        assert!(e.message.contains("neither a folder nor a URL"), "{}", e.message);
        let e = spec(&["https://example.com/r", "-p", "x", "--dirty"]).unwrap_err();
        assert!(e.message.contains("--dirty"), "{}", e.message);
    }

    #[test]
    fn a_local_folder_becomes_an_absolute_path() {
        let s = spec(&["-p", "x"]).unwrap();
        assert!(s.repo.source.starts_with('/'), "{}", s.repo.source);
    }
}
