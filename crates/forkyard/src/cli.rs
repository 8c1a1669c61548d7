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
    /// Work on the runs and sandboxes of another Forkyard: where its `forkyard serve` is. FORKYARD_TOKEN is the token for it.
    #[arg(long, global = true, value_name = "URL")]
    pub server: Option<String>,
    /// Leave the project's own forkyard.toml out.
    #[arg(long, global = true)]
    pub no_project_file: bool,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    Demo(commands::demo::DemoArgs),
    Fork(commands::fork::ForkArgs),
    Status(commands::status::StatusArgs),
    List(commands::list::ListArgs),
    Watch(commands::watch::WatchArgs),
    Logs(commands::logs::LogsArgs),
    Events(commands::events::EventsArgs),
    Diff(commands::diff::DiffArgs),
    Compare(commands::compare::CompareArgs),
    Apply(commands::apply::ApplyArgs),
    Message(commands::message::MessageArgs),
    Pause(commands::pause::PauseArgs),
    Resume(commands::resume::ResumeArgs),
    Cancel(commands::cancel::CancelArgs),
    Add(commands::add::AddArgs),
    Replay(commands::replay::ReplayArgs),
    Worker(commands::worker::WorkerArgs),
    Serve(commands::serve::ServeArgs),
    Token(commands::token::TokenArgs),
    Run(commands::run::RunArgs),
    Cleanup(commands::cleanup::CleanupArgs),
    StopCleanup(commands::cleanup::StopCleanupArgs),
    Gc(commands::gc::GcArgs),
    Sandbox(commands::sandbox::SandboxArgs),
    Config(commands::config::ConfigArgs),
    Trust(commands::trust::TrustArgs),
    Doctor(commands::doctor::DoctorArgs),
    Bench(commands::bench::BenchArgs),
    Completions(commands::completions::CompletionsArgs),
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
        Ok(settings::load(flags, project)?)
    }

    /// Settings of a command over what is there already: a project's file that is wrong, or that nobody trusts, is none of
    /// its business and is left out.
    pub fn load_leniently(&self, flags: Flags) -> Result<Resolved> {
        match self.load(flags.clone()) {
            Ok(resolved) => Ok(resolved),
            Err(_) => Ok(settings::load(flags, Project::None)?),
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
        match command {
            Command::Demo(args) => args.run(&self.global, out),
            Command::Fork(args) => args.run(&self.global, out),
            Command::Status(args) => args.run(&self.global, out),
            Command::List(args) => args.run(&self.global, out),
            Command::Watch(args) => args.run(&self.global, out),
            Command::Logs(args) => args.run(&self.global, out),
            Command::Events(args) => args.run(&self.global, out),
            Command::Diff(args) => args.run(&self.global, out),
            Command::Compare(args) => args.run(&self.global, out),
            Command::Apply(args) => args.run(&self.global, out),
            Command::Message(args) => args.run(&self.global, out),
            Command::Pause(args) => args.run(&self.global, out),
            Command::Resume(args) => args.run(&self.global, out),
            Command::Cancel(args) => args.run(&self.global, out),
            Command::Add(args) => args.run(&self.global, out),
            Command::Replay(args) => args.run(&self.global, out),
            Command::Worker(args) => args.run(&self.global, out),
            Command::Serve(args) => args.run(&self.global, out),
            Command::Token(args) => args.run(&self.global, out),
            Command::Run(args) => args.run(&self.global, out),
            Command::Cleanup(args) => args.run(&self.global, out),
            Command::StopCleanup(args) => args.run(&self.global, out),
            Command::Gc(args) => args.run(&self.global, out),
            Command::Sandbox(args) => args.run(&self.global, out),
            Command::Config(args) => args.run(&self.global, out),
            Command::Trust(args) => args.run(&self.global, out),
            Command::Doctor(args) => args.run(&self.global, out),
            Command::Bench(args) => args.run(&self.global, out),
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
