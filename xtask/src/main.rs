//! Forkyard's chores: `cargo xtask setup | test | vm | web | tidy | codegen | soak | bench`.

mod codegen;
mod engine;
mod report;
mod scenarios;
mod setup;
mod steps;
mod test;
mod tidy;
mod vm;
mod web;

use anyhow::Result;
use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(name = "cargo xtask", about = "Forkyard's chores", arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Install what the tests need (Debian packages, cargo-nextest). Quick when all is there.
    Setup,
    /// Setup, then fmt, tidy, clippy, all tests and doc tests. What CI runs.
    Test(test::TestArgs),
    /// Run the local provider's suites in a virtual machine with Debian's own kernel: as root and as an ordinary user.
    Vm(vm::VmArgs),
    /// Build the dashboard from web/ into what the server embeds.
    Web(web::WebArgs),
    /// Check the rules that no compiler checks: crate direction, orphan files, file length, purity, markers, licences.
    Tidy,
    /// Write the generated documents (docs/configuration.md, docs/cli.md, docs/openapi.json …).
    Codegen {
        /// Only say whether they are current.
        #[arg(long)]
        check: bool,
    },
    /// Run long tests at their full counts and write docs/soak/DATE.md.
    Soak(report::ScenarioArgs),
    /// Run the benchmarks and write docs/bench/DATE.md.
    Bench(report::ScenarioArgs),
}

fn main() -> Result<()> {
    std::env::set_current_dir(steps::root())?;
    match Cli::parse().command {
        Command::Setup => alone("setup", setup::run),
        Command::Test(args) => test::run(&args),
        Command::Vm(args) => vm::run(&args),
        Command::Web(args) => web::run(&args),
        Command::Tidy => alone("tidy", tidy::run),
        Command::Codegen { check } => codegen::run(check),
        Command::Soak(args) => report::run(scenarios::Kind::Soak, &args),
        Command::Bench(args) => report::run(scenarios::Kind::Bench, &args),
    }
}

fn alone(name: &str, work: fn() -> Result<()>) -> Result<()> {
    let mut steps = steps::Steps::new(false);
    steps.call(name, work);
    steps.finish()
}
