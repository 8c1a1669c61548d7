//! The command line as a whole. A command is listed here when it works.

use std::collections::BTreeMap;
use std::ffi::OsString;

use clap::{Args, Parser, Subcommand};

use crate::commands;
use crate::error::{CliError, Result};
use crate::exit::Exit;
use crate::output::Output;
use crate::settings::{self, Flags, Project, Resolved};

/// Fork a repository into isolated sandboxes, run a coding agent in each, and keep the best result.
#[derive(Debug, Parser)]
#[command(name = "forkyard", version, max_term_width = 110, after_help = AFTER_HELP)]
pub struct Cli {
    #[command(flatten)]
    pub global: Global,
    #[command(subcommand)]
    pub command: Option<Command>,
}

/// What the program says when it is asked for nothing.
const FIRST_PAGE: &str = "\
Fork a repository into isolated sandboxes, run a coding agent in each, and keep the best result.

  forkyard demo                                  a whole run that needs no key
  forkyard fork -p \"Fix the failing tests\" -f 4  on this repository; needs ANTHROPIC_API_KEY
  forkyard watch                                 the newest run on the full screen
  forkyard list                                  all runs
  forkyard doctor                                what this machine offers, and how to get the rest

`forkyard --help` lists all commands, `forkyard COMMAND --help` explains one.
";

const AFTER_HELP: &str = "Exit status: 0 success, 1 failure, 2 bad usage, 130 interrupted.";

/// Understood by every command.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Global options")]
pub struct Global {
    /// Write JSON: one document, or a line a record where output goes on.
    #[arg(long, global = true)]
    pub json: bool,
    /// Colour: auto, always or never.
    #[arg(long, global = true, value_name = "WHEN")]
    pub color: Option<String>,
    /// Set any setting for this command; `forkyard config` lists them.
    #[arg(long = "set", global = true, value_name = "KEY=VALUE")]
    pub set: Vec<String>,
    /// Work on the runs and sandboxes of another Forkyard: where its `forkyard serve` is. FORKYARD_TOKEN is the token for it. Commands
    /// that are about this machine alone refuse it.
    #[arg(long, global = true, value_name = "URL")]
    pub server: Option<String>,
    /// Leave the project's own forkyard.toml out.
    #[arg(long, global = true)]
    pub no_project_file: bool,
    /// The command is about this machine, whatever server the settings name.
    #[arg(skip)]
    pub here: bool,
}

#[derive(Debug, Subcommand)]
#[command(defer = true)]
pub enum Command {
    /// Watch a whole run on a small bundled repository: real sandboxes, real tools, a scripted model, no key.
    Demo(commands::demo::DemoArgs),
    /// Fork a repository, let an agent work in each fork, and rank the results.
    Fork(commands::fork::ForkArgs),
    /// Show a run and its forks, or one fork.
    Status(commands::status::StatusArgs),
    /// List runs, newest first.
    List(commands::list::ListArgs),
    /// Watch a run on the full screen: forks, live feed, diff, messages.
    Watch(commands::watch::WatchArgs),
    /// Show what the agents of a run said and did.
    Logs(commands::logs::LogsArgs),
    /// Show the events of a run.
    Events(commands::events::EventsArgs),
    /// Show what a fork changed.
    Diff(commands::diff::DiffArgs),
    /// Compare the results of a run: files by forks, what they agree and differ on.
    Compare(commands::compare::CompareArgs),
    /// Bring a result into the repository: as a branch, onto the working tree, or as a patch. All of it or nothing.
    Apply(commands::apply::ApplyArgs),
    /// Say something to a running agent; it reads it before its next tool call.
    Message(commands::message::MessageArgs),
    /// Pause a run: no fork starts and no model is asked until it is resumed.
    Pause(commands::pause::PauseArgs),
    /// Resume a run that is paused, detached or crashed, and drive it if nobody else does.
    Resume(commands::resume::ResumeArgs),
    /// Cancel a run, or one fork of it. Work that is done stays for diff and apply.
    Cancel(commands::cancel::CancelArgs),
    /// Add forks to a run that is under way.
    Add(commands::add::AddArgs),
    /// Play the session of a fork again, in the terminal.
    Replay(commands::replay::ReplayArgs),
    /// Drive runs of the store until stopped.
    Worker(commands::worker::WorkerArgs),
    /// Serve the dashboard and the HTTP API, and drive runs like a worker does.
    Serve(commands::serve::ServeArgs),
    /// Make, list and revoke tokens for the HTTP API.
    Token(commands::token::TokenArgs),
    /// Run a specification from a file: forks that differ in prompt, model, system prompt, image, limits or captured
    /// files.
    Run(commands::run::RunArgs),
    /// Look for orphaned sandboxes and remove them, until stopped.
    Cleanup(commands::cleanup::CleanupArgs),
    /// Stop a cleanup that another process does, and say what it has done.
    StopCleanup(commands::cleanup::StopCleanupArgs),
    /// Remove old runs, snapshots and caches, and say what that frees.
    Gc(commands::gc::GcArgs),
    /// Make and use sandboxes by hand.
    Sandbox(commands::sandbox::SandboxArgs),
    /// Show every setting, its value and where it comes from.
    Config(commands::config::ConfigArgs),
    /// Trust the exact content of a project's forkyard.toml.
    ///
    /// A project's file may set what acts inside the sandbox. Everything else in it (secrets, allow-lists, endpoints, volumes,
    /// policy) counts only after this, and only until the file changes.
    Trust(commands::trust::TrustArgs),
    /// Say what this machine offers, and how to get the rest.
    Doctor(commands::doctor::DoctorArgs),
    /// Measure this machine.
    Bench(commands::bench::BenchArgs),
    /// Print a completion script for a shell.
    ///
    /// For bash: forkyard completions bash > ~/.local/share/bash-completion/completions/forkyard
    Completions(commands::completions::CompletionsArgs),
}

impl Command {
    /// Why it works on this machine alone; None: on a server as well. The reference and the guide list these.
    fn only_here(&self) -> Option<&'static str> {
        match self {
            Command::Demo(_) => Some("a demo shows what this machine can do"),
            Command::Worker(_) => Some("a worker lends this machine to runs"),
            Command::Serve(_) => Some("it serves this machine"),
            Command::Bench(_) => Some("it measures this machine"),
            Command::Trust(_) => Some("a project's file is trusted on the machine that reads it"),
            Command::Completions(_) => Some("completions are for this machine's shell"),
            Command::Doctor(args) if args.attack => Some("attacks are made on this machine's own sandboxes"),
            Command::Doctor(_)
            | Command::Fork(_)
            | Command::Status(_)
            | Command::List(_)
            | Command::Watch(_)
            | Command::Logs(_)
            | Command::Events(_)
            | Command::Diff(_)
            | Command::Compare(_)
            | Command::Apply(_)
            | Command::Message(_)
            | Command::Pause(_)
            | Command::Resume(_)
            | Command::Cancel(_)
            | Command::Add(_)
            | Command::Replay(_)
            | Command::Token(_)
            | Command::Run(_)
            | Command::Cleanup(_)
            | Command::StopCleanup(_)
            | Command::Gc(_)
            | Command::Sandbox(_)
            | Command::Config(_) => None,
        }
    }
}

/// Whether a sandbox of this machine will be made, whatever else the command line says. Asked before that is read, since what
/// sandboxes come from can start meanwhile; a wrong answer costs a little time and nothing else.
pub fn expects_sandbox(args: &[OsString], env: &BTreeMap<String, String>) -> bool {
    let makes =
        matches!(args, [first, second, ..] if first == "sandbox" && (second == "run" || second == "create"));
    let elsewhere = args.iter().any(|arg| arg.as_encoded_bytes().starts_with(b"--server"))
        || settings::setting("remote.url").is_some_and(|s| s.env.iter().any(|v| env.contains_key(v.name)));
    makes && !elsewhere
}

impl Global {
    /// For a command that no server does: whoever names one on its own line expects something else. What the environment or a
    /// file says is for other commands.
    fn refuse_server(&self, why: &str) -> Result<()> {
        let set =
            self.set.iter().any(|pair| pair.split('=').next().is_some_and(|k| k.trim() == "remote.url"));
        if self.server.is_none() && !set {
            return Ok(());
        }
        Err(CliError::usage(format!("no server does this: {why}")).hint("leave --server out"))
    }

    /// What the global options say about settings, before a command adds its own.
    pub fn flags(&self) -> Result<Flags> {
        let mut flags = Flags::default();
        for pair in &self.set {
            let Some((key, value)) = pair.split_once('=') else {
                return Err(
                    CliError::usage(format!("--set {pair}: there is no `=`")).hint("write --set KEY=VALUE")
                );
            };
            let Some(setting) = settings::setting(key.trim()) else {
                let near = settings::nearest(key, settings::TABLE.iter().map(|s| s.key));
                let hint = near
                    .map_or("`forkyard config` lists the keys".into(), |n| format!("did you mean `{n}`?"));
                return Err(CliError::usage(format!("--set {key}: unknown key")).hint(hint));
            };
            flags.set(setting.key, &format!("--set {key}"), value);
        }
        flags.set_option("color", "--color", self.color.as_ref());
        flags.set_option("remote.url", "--server", self.server.as_ref());
        Ok(flags)
    }

    /// Settings of a command that works around the current folder.
    pub fn load(&self, flags: Flags) -> Result<Resolved> {
        let here = std::env::current_dir()?;
        let project = if self.no_project_file { Project::None } else { Project::Around(&here) };
        Ok(self.at_home(settings::load(flags, project)?))
    }

    fn at_home(&self, mut resolved: Resolved) -> Resolved {
        if self.here {
            resolved.settings.remote_url = None;
        }
        resolved
    }

    /// Settings of a command over what is there already: a project's file that is wrong, or that nobody trusts, is none of
    /// its business and is left out.
    pub fn load_leniently(&self, flags: Flags) -> Result<Resolved> {
        match self.load(flags.clone()) {
            Ok(resolved) => Ok(resolved),
            Err(_) => Ok(self.at_home(settings::load(flags, Project::None)?)),
        }
    }
}

impl Cli {
    /// Runs the command. Everything that it says goes to `out`.
    pub fn run(&self, out: &mut Output<'_>) -> Result<Exit> {
        let Some(command) = &self.command else {
            out.text(FIRST_PAGE)?;
            return Ok(Exit::Success);
        };
        let here;
        let global = match command.only_here() {
            Some(why) => {
                self.global.refuse_server(why)?;
                here = Global { here: true, ..self.global.clone() };
                &here
            }
            None => &self.global,
        };
        match command {
            Command::Demo(args) => args.run(global, out),
            Command::Fork(args) => args.run(global, out),
            Command::Status(args) => args.run(global, out),
            Command::List(args) => args.run(global, out),
            Command::Watch(args) => args.run(global, out),
            Command::Logs(args) => args.run(global, out),
            Command::Events(args) => args.run(global, out),
            Command::Diff(args) => args.run(global, out),
            Command::Compare(args) => args.run(global, out),
            Command::Apply(args) => args.run(global, out),
            Command::Message(args) => args.run(global, out),
            Command::Pause(args) => args.run(global, out),
            Command::Resume(args) => args.run(global, out),
            Command::Cancel(args) => args.run(global, out),
            Command::Add(args) => args.run(global, out),
            Command::Replay(args) => args.run(global, out),
            Command::Worker(args) => args.run(global, out),
            Command::Serve(args) => args.run(global, out),
            Command::Token(args) => args.run(global, out),
            Command::Run(args) => args.run(global, out),
            Command::Cleanup(args) => args.run(global, out),
            Command::StopCleanup(args) => args.run(global, out),
            Command::Gc(args) => args.run(global, out),
            Command::Sandbox(args) => args.run(global, out),
            Command::Config(args) => args.run(global, out),
            Command::Trust(args) => args.run(global, out),
            Command::Doctor(args) => args.run(global, out),
            Command::Bench(args) => args.run(global, out),
            Command::Completions(args) => args.run(out),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sandbox_of_this_machine_is_expected_from_its_commands_alone() {
        let expects = |line: &str, env: &[(&str, &str)]| {
            let args: Vec<OsString> = line.split(' ').map(OsString::from).collect();
            let env = env.iter().map(|(k, v)| (k.to_string(), v.to_string())).collect();
            expects_sandbox(&args, &env)
        };
        assert!(expects("sandbox run true", &[]));
        assert!(expects("sandbox create --memory 1GiB", &[("FORKYARD_HOME", "/x")]));
        assert!(!expects("sandbox list", &[]));
        assert!(!expects("run sandbox", &[]));
        assert!(!expects("sandbox run --server=http://other true", &[]));
        assert!(!expects("sandbox run true", &[("FORKYARD_SERVER", "http://other")]));
    }
}
