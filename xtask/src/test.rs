//! Everything that must pass before a change lands.

use std::process::Command;

use anyhow::Result;

use crate::steps::{GUEST_PROGRAM, Output, Steps, WHOLE, cargo};
use crate::{setup, tidy, vm, web};

#[derive(clap::Args)]
pub struct TestArgs {
    /// Only this crate's clippy and tests; may be given several times.
    #[arg(short, long = "package", value_name = "CRATE")]
    packages: Vec<String>,
    /// Take it that everything is installed.
    #[arg(long)]
    no_setup: bool,
    /// How much of each long test is run: a tenth, or all of it.
    #[arg(long, value_enum, default_value = "ci")]
    scale: Scale,
    /// Show the output of every step.
    #[arg(short, long)]
    verbose: bool,
    /// Given to the test runner, after `--`.
    #[arg(last = true)]
    filter: Vec<String>,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum Scale {
    Ci,
    Full,
}

impl Scale {
    fn as_str(self) -> &'static str {
        match self {
            Scale::Ci => "ci",
            Scale::Full => "full",
        }
    }
}

/// What tests are told by their environment:
/// - `FORKYARD_TEST_REQUIRE=1`: a fixture that can't start what it needs fails; without it such a test may be skipped.
/// - `FORKYARD_TEST_SCALE=ci|full`: long tests run a tenth of their counts, or all of them.
pub fn test_env(command: &mut Command, scale: &str) {
    command.env("FORKYARD_TEST_REQUIRE", "1").env("FORKYARD_TEST_SCALE", scale);
}

pub fn run(args: &TestArgs) -> Result<()> {
    let mut steps = Steps::new(args.verbose);
    if !args.no_setup && !steps.call("setup", setup::run) {
        return steps.finish();
    }
    steps.command("fmt", cargo().args(["fmt", "--all", "--check"]), Output::Quiet);
    steps.call("tidy", tidy::run);
    if args.packages.is_empty() {
        steps.call("web", web::check);
    }
    steps.command(
        "clippy",
        scoped(cargo().args(["clippy", "--locked", "--all-targets"]), args).args(["--", "-D", "warnings"]),
        Output::Quiet,
    );
    let mut tests = cargo();
    if setup::has_nextest() {
        scoped(tests.args(["nextest", "run", "--locked", "--no-fail-fast"]), args)
            .args(["--status-level", "slow", "--final-status-level", "slow"])
            .args(&args.filter);
    } else {
        scoped(tests.args(["test", "--locked", "--no-fail-fast", "--all-targets"]), args)
            .arg("--")
            .args(&args.filter);
    }
    test_env(&mut tests, args.scale.as_str());
    steps.command("tests", &mut tests, Output::Shown);
    if args.filter.is_empty() {
        let mut doc = cargo();
        scoped(doc.args(["test", "--locked", "--doc", "--quiet"]), args);
        test_env(&mut doc, args.scale.as_str());
        steps.command("doc tests", &mut doc, Output::Quiet);
        if args.packages.is_empty() || args.packages.iter().any(|p| p == vm::CRATE) {
            let scope = if args.packages.is_empty() { vm::Scope::Workspace } else { vm::Scope::Crate };
            steps.call("machine", || vm::in_ci(scope, args.verbose));
        }
    }
    steps.finish()
}

fn scoped<'a>(command: &'a mut Command, args: &TestArgs) -> &'a mut Command {
    if args.packages.is_empty() {
        return command.args(WHOLE);
    }
    if args.packages.iter().any(|package| GUEST_PROGRAM.split('/').next() == Some(package)) {
        command.args(["--features", GUEST_PROGRAM]);
    }
    command.args(args.packages.iter().flat_map(|p| ["-p", p]))
}
