//! Runs scenarios and keeps their figures: one file a day under docs/soak or docs/bench, one section a scenario.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, bail};

use crate::engine::Engine;
use crate::scenarios::{Kind, Program, SCENARIOS, Scenario};
use crate::steps::{WHOLE, cargo, seconds, target_dir};
use crate::{setup, test};

#[derive(clap::Args)]
pub struct ScenarioArgs {
    /// Names of scenarios; all of them if none is given.
    names: Vec<String>,
    /// Say which there are.
    #[arg(long)]
    list: bool,
    /// Do not write the report.
    #[arg(long)]
    dry: bool,
}

pub fn run(kind: Kind, args: &ScenarioArgs) -> Result<()> {
    let all: Vec<&Scenario> = SCENARIOS.iter().filter(|s| s.kind == kind).collect();
    if args.list {
        for s in &all {
            println!("{:<24} {}", s.name, s.shows);
        }
        return Ok(());
    }
    for name in &args.names {
        if !all.iter().any(|s| s.name == name) {
            let known: Vec<&str> = all.iter().map(|s| s.name).collect();
            bail!("there is no scenario {name:?}; there are: {}", known.join(", "));
        }
    }
    setup::run()?;
    let mut failed = Vec::new();
    for s in all.iter().filter(|s| args.names.is_empty() || args.names.iter().any(|n| n == s.name)) {
        let (section, ok) = one(s)?;
        if !ok {
            failed.push(s.name);
        }
        if !args.dry {
            let path = write(kind, s.name, section)?;
            println!("· written to {}", path.display());
        }
    }
    if failed.is_empty() { Ok(()) } else { bail!("failed: {}", failed.join(", ")) }
}

fn one(s: &Scenario) -> Result<(String, bool)> {
    let mut command = command(&s.program)?;
    test::test_env(&mut command, "full");
    // The test runner reports where others complain.
    let runs_tests = matches!(s.program, Program::Tests(_));
    if runs_tests {
        command.stderr(Stdio::piped())
    } else {
        command.stdout(Stdio::piped())
    };
    let engine = match s.program {
        Program::BesideDocker(_) => Engine::start()?,
        Program::Tests(_) | Program::Cargo(_) | Program::Example(..) => None,
    };
    if let Some(engine) = &engine {
        command.env("DOCKER_HOST", engine.host());
    }
    println!("· {}: {}", s.name, crate::steps::shown(&command));
    let started = Instant::now();
    let mut child = command.spawn().with_context(|| s.name.to_string())?;
    let mut table = String::new();
    let said: Box<dyn Read> = match child.stderr.take() {
        Some(stderr) => Box::new(stderr),
        None => Box::new(child.stdout.take().expect("one of them is piped")),
    };
    for line in BufReader::new(said).lines() {
        let line = line?;
        println!("{line}");
        if is_kept(&line, runs_tests) {
            table.push_str(line.trim_start());
            table.push('\n');
        }
    }
    // A promise without its yardstick does not hold: it was not looked at.
    let ok = child.wait()?.success() && !table.contains(NOT_MEASURED);
    let took = seconds(started.elapsed());
    println!("{} {:<24} {took}", if ok { "✓" } else { "✗" }, s.name);
    let section = format!(
        "{}: {}, {took}, at {}\n\n`{}`\n\n{table}",
        s.shows,
        if ok { "passed" } else { "**failed**" },
        text(Command::new("git").args(["describe", "--always", "--dirty"])),
        line(&s.program),
    );
    Ok((section, ok))
}

/// How a benchmark says what it had nothing to compare with for.
const NOT_MEASURED: &str = "Not measured";

/// Tables, what the runner says of all tests and of those that failed, and what a benchmark says of where it ran.
fn is_kept(line: &str, of_tests: bool) -> bool {
    let line = line.trim_start();
    if of_tests {
        line.contains("tests run:") || is_failure(line)
    } else {
        ["|", "Kernel ", NOT_MEASURED].iter().any(|start| line.starts_with(start))
    }
}

/// The runner begins a line with a status of capitals, such as `TRY 2 SIGSEGV`, before a duration in brackets.
fn is_failure(line: &str) -> bool {
    let status = line.split_once(" [").map_or("", |(status, _)| status);
    // The short ones stand behind the number of a try: a timeout, and a failure that left a process behind.
    let fails = ["FAIL", "TIMEOUT", "ABORT", "TMT", "FL+LK"].iter().any(|word| status.contains(word))
        || status.split(' ').any(|word| word.starts_with("SIG"));
    fails && !status.contains(|c: char| c.is_ascii_lowercase())
}

fn command(program: &Program) -> Result<Command> {
    let (path, example, args) = match program {
        Program::Tests(filter) => {
            let mut command = cargo();
            command.args(TESTS).args(WHOLE).args(["-E", filter]);
            return Ok(command);
        }
        Program::Cargo(args) => {
            let mut command = cargo();
            command.args(*args);
            return Ok(command);
        }
        Program::Example(name, args) => (PathBuf::from("examples").join(name), *name, args),
        // Some example is built with it: without one it would have other features, and everything would be built again.
        Program::BesideDocker(args) => (PathBuf::from("forkyard"), "simulate", args),
    };
    let build = ["build", "--release", "--locked", "--workspace", "--bins", "--example", example];
    if !cargo().args(build).status().context("cargo build")?.success() {
        bail!("the programs of the scenarios are not built");
    }
    let mut command = Command::new(target_dir().join("release").join(path));
    command.args(*args);
    Ok(command)
}

/// Built for all of them at once: a package built alone has other features.
const TESTS: [&str; 5] = ["nextest", "run", "--no-fail-fast", "--profile", "soak"];

/// What a reader types to see the same.
fn line(program: &Program) -> String {
    match program {
        Program::Tests(filter) => {
            format!("FORKYARD_TEST_SCALE=full cargo {} {} -E '{filter}'", TESTS.join(" "), WHOLE.join(" "))
        }
        Program::Cargo(args) => format!("cargo {}", args.join(" ")),
        Program::Example(name, args) => format!("target/release/examples/{name} {}", args.join(" ")),
        Program::BesideDocker(args) => format!("target/release/forkyard {}", args.join(" ")),
    }
    .trim_end()
    .to_string()
}

/// Puts the section into today's report and leaves the others as they are.
fn write(kind: Kind, name: &str, section: String) -> Result<PathBuf> {
    let dir = match kind {
        Kind::Soak => "docs/soak",
        Kind::Bench => "docs/bench",
    };
    fs::create_dir_all(dir)?;
    let date = text(Command::new("date").args(["-u", "+%F"]));
    let path = PathBuf::from(dir).join(format!("{date}.md"));
    let mut sections = sections(&fs::read_to_string(&path).unwrap_or_default());
    sections.insert(name.to_string(), section);
    fs::write(&path, render(&date, &sections))?;
    Ok(path)
}

fn sections(report: &str) -> BTreeMap<String, String> {
    report
        .split("\n## ")
        .skip(1)
        .filter_map(|s| s.split_once('\n'))
        .map(|(name, body)| (name.trim().to_string(), body.trim().to_string()))
        .collect()
}

fn render(date: &str, sections: &BTreeMap<String, String>) -> String {
    let cores = std::thread::available_parallelism().map_or(0, |n| n.get());
    let kernel = text(Command::new("uname").args(["-sr"]));
    let mut out = format!("# {date}\n\n{cores} cores, {kernel}\n");
    for (name, body) in sections {
        out.push_str(&format!("\n## {name}\n\n{}\n", body.trim()));
    }
    out
}

fn text(command: &mut Command) -> String {
    command.output().map(|o| String::from_utf8_lossy(&o.stdout).trim().to_string()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_keeps_the_sections_of_others() {
        let mut all = BTreeMap::from([("a".to_string(), "x\n\n| 1 |".to_string())]);
        let first = render("2030-01-01", &all);
        all = sections(&first);
        all.insert("b".into(), "y".into());
        let second = sections(&render("2030-01-01", &all));
        assert_eq!(second["a"], "x\n\n| 1 |");
        assert_eq!(second["b"], "y");
    }

    #[test]
    fn every_way_to_fail_is_reported() {
        for line in [
            "        FAIL [   0.010s] (1/2) forkyard::it list::a",
            "     TIMEOUT [ 120.000s] (1/2) forkyard::it list::a",
            "     SIGABRT [   0.010s] (1/2) forkyard::it list::a",
            "   LEAK-FAIL [   0.010s] (1/2) forkyard::it list::a",
            "       XFAIL [         ] (1/2) forkyard::it list::a",
            "  TRY 2 FAIL [   0.010s] (1/2) forkyard::it list::a",
            "   TRY 2 TMT [ 120.000s] (1/2) forkyard::it list::a",
            "TRY 1 SIGSEGV [   0.010s] (1/2) forkyard::it list::a",
            "     Summary [   0.010s] 2 tests run: 1 passed, 1 failed, 0 skipped",
        ] {
            assert!(is_kept(line, true), "{line}");
        }
        for line in [
            "        PASS [   0.010s] (1/2) forkyard::it list::FAIL",
            "        SLOW [> 60.000s] (1/2) forkyard::it list::SIGABRT",
            "    a test wrote: SIGABRT [whatever it means]",
        ] {
            assert!(!is_kept(line, true), "{line}");
        }
    }

    #[test]
    fn soak_forgets_no_crate() {
        let filters: String = SCENARIOS
            .iter()
            .filter_map(|s| match s.program {
                Program::Tests(filter) => Some(filter),
                Program::Cargo(_) | Program::Example(..) | Program::BesideDocker(_) => None,
            })
            .collect();
        for entry in fs::read_dir(crate::steps::root().join("crates")).unwrap() {
            let name = entry.unwrap().file_name().into_string().unwrap();
            assert!(filters.contains(&format!("package({name})")), "{name} is in no scenario of soak");
        }
    }

    #[test]
    fn names_of_scenarios_are_unique() {
        for kind in [Kind::Soak, Kind::Bench] {
            let mut names: Vec<_> = SCENARIOS.iter().filter(|s| s.kind == kind).map(|s| s.name).collect();
            names.sort_unstable();
            let count = names.len();
            names.dedup();
            assert_eq!(names.len(), count);
        }
    }
}
