use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;

use clap::{Args, Subcommand};
use forkyard_sandbox::bench::{self, Docker, Figure, Options, Outcome, Report, Unit, Want};
use serde_json::json;

use crate::cli::Global;
use crate::error::{CliError, Result};
use crate::exit::Exit;
use crate::output::Output;
use crate::render::table::{left, right};
use crate::render::{Cell, Color, Table};
use crate::yard::random_text;

#[derive(Debug, Clone, Args)]
pub struct BenchArgs {
    #[command(subcommand)]
    pub command: BenchCommand,
}

#[derive(Debug, Clone, Subcommand)]
pub enum BenchCommand {
    Sandbox(SandboxBenchArgs),
}

/// Measure local sandboxes beside bubblewrap, Docker and a plain spawn; as root, also for an ordinary user.
#[derive(Debug, Clone, Args)]
pub struct SandboxBenchArgs {
    /// How often each thing is done.
    #[arg(long, value_name = "N", default_value_t = 200, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub rounds: u32,
    /// Sandboxes that live at once, for their memory; 0 leaves this out.
    #[arg(long, value_name = "N", default_value_t = 1000, value_parser = clap::value_parser!(u32).range(0..=10_000))]
    pub alive: u32,
    /// Files, together 1 GiB, in a sandbox that is forked; 0 leaves this out.
    #[arg(long, value_name = "N", default_value_t = 50_000, value_parser = clap::value_parser!(u32).range(0..=400_000))]
    pub files: u32,
    /// Docker's image, with /bin/busybox [default: one that is made of the host's busybox].
    #[arg(long, value_name = "IMAGE")]
    pub docker_image: Option<String>,
    /// Leave Docker out.
    #[arg(long, conflicts_with = "docker_image")]
    pub no_docker: bool,
    /// Leave the ordinary user out.
    #[arg(long)]
    pub this_user_only: bool,
    /// Tables for a document.
    #[arg(long)]
    pub markdown: bool,
}

/// As root: whose figures are shown beside root's. No account has it.
const ORDINARY_ID: u32 = 64_320;

/// A folder that goes with this value.
struct Folder(PathBuf);

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

impl BenchArgs {
    pub fn run(&self, global: &Global, out: &mut Output<'_>) -> Result<Exit> {
        match &self.command {
            BenchCommand::Sandbox(args) => args.run(global, out),
        }
    }
}

impl SandboxBenchArgs {
    fn run(&self, global: &Global, out: &mut Output<'_>) -> Result<Exit> {
        let home = global.load(global.flags()?)?.settings.home;
        let folder = Folder(home.join(format!("bench-{}", random_text(8))));
        std::fs::create_dir_all(&folder.0)?;
        let options = Options {
            rounds: self.rounds as usize,
            alive: self.alive as usize,
            files: self.files as usize,
            program: Some(std::env::current_exe()?),
            dir: folder.0.clone(),
            docker: match &self.docker_image {
                _ if self.no_docker => Docker::LeftOut,
                Some(image) => Docker::Image(image.clone()),
                None => Docker::OwnImage,
            },
        };
        // As a task, like everything that uses sandboxes in earnest: what a guest says need not cross to another thread.
        let measured = async { tokio::spawn(async move { bench::run(&options).await }).await };
        let report = crate::runtime()?.block_on(measured).map_err(|e| CliError::failure(e.to_string()))??;
        let mut reports = vec![report];
        if reports[0].root && !self.this_user_only {
            reports.push(self.as_ordinary_user()?);
        }
        let holds = reports.iter().flat_map(|r| &r.outcomes).all(Outcome::holds);
        if out.json {
            out.json(&json!({ "schema": "forkyard.bench_sandbox/1", "holds": holds, "reports": reports }))?;
        } else {
            self.show(&reports, out)?;
        }
        Ok(if holds { Exit::Success } else { Exit::Failure })
    }

    /// The same program again, as somebody without any rights. Docker is root's: nothing is missing without it.
    fn as_ordinary_user(&self) -> Result<Report> {
        let folder = Folder(std::env::temp_dir().join(format!("forkyard-bench-{}", random_text(8))));
        std::fs::create_dir(&folder.0)?;
        std::fs::set_permissions(&folder.0, std::fs::Permissions::from_mode(0o755))?;
        let (program, home) = (folder.0.join("forkyard"), folder.0.join("home"));
        std::fs::copy(std::env::current_exe()?, &program)?;
        std::fs::create_dir(&home)?;
        std::os::unix::fs::chown(&home, Some(ORDINARY_ID), Some(ORDINARY_ID))?;
        let ran = Command::new(&program)
            .args(["--json", "bench", "sandbox", "--this-user-only", "--no-docker"])
            .args(["--rounds", &self.rounds.to_string(), "--alive", &self.alive.to_string()])
            .args(["--files", &self.files.to_string()])
            .env("HOME", &home)
            .env("FORKYARD_HOME", home.join("forkyard"))
            .current_dir(&home)
            .uid(ORDINARY_ID)
            .gid(ORDINARY_ID)
            .output()?;
        let document: serde_json::Value = serde_json::from_slice(&ran.stdout).unwrap_or_default();
        serde_json::from_value(document["reports"][0].clone()).map_err(|_| {
            let said = String::from_utf8_lossy(&ran.stderr);
            CliError::failure(format!("as an ordinary user: {}", crate::render::plain(said.trim())))
                .hint("--this-user-only leaves it out")
        })
    }

    fn show(&self, reports: &[Report], out: &mut Output<'_>) -> Result<()> {
        let first = &reports[0];
        out.line(&format!(
            "Kernel {}, {} processors, load {:.1}.{}",
            first.kernel,
            first.cpus,
            first.load,
            if first.load > 0.5 { " The machine is not quiet: look at ratios, not at times." } else { "" },
        ))?;
        let who = |report: &Report| if report.root { "root" } else { "user" };
        let times: Vec<Vec<String>> =
            merged(reports, |r| &r.figures, |f: &Figure| &f.name, |f| format!("{} / {}", f.p50_us, f.p95_us));
        let results = merged(
            reports,
            |r| &r.outcomes,
            |o: &Outcome| &o.name,
            |o| format!("{}{}", value(o), if o.holds() { "" } else { " ✗" }),
        );
        let wants: Vec<(String, String)> =
            reports.iter().flat_map(|r| &r.outcomes).map(|o| (o.name.clone(), want(o))).collect();
        let mut columns = vec!["µs, p50 / p95".to_string()];
        columns.extend(reports.iter().map(|r| who(r).to_string()));
        self.table(columns, times, out)?;
        out.line("")?;
        let mut columns = vec!["what".to_string()];
        columns.extend(reports.iter().map(|r| who(r).to_string()));
        columns.push("wanted".into());
        let rows = results.into_iter().map(|mut row| {
            let wanted = wants.iter().find(|(name, _)| *name == row[0]).map(|(_, want)| want.clone());
            row.push(wanted.unwrap_or_default());
            row
        });
        self.table(columns, rows.collect(), out)?;
        for missing in reports.iter().flat_map(|r| r.missing.iter().map(move |m| (who(r), m))) {
            out.line(&format!("Not measured ({}): {}", missing.0, crate::render::plain(missing.1)))?;
        }
        Ok(())
    }

    fn table(&self, columns: Vec<String>, rows: Vec<Vec<String>>, out: &mut Output<'_>) -> Result<()> {
        if self.markdown {
            out.line(&format!("| {} |", columns.join(" | ")))?;
            out.line(&format!("|{}", "---|".repeat(columns.len())))?;
            for row in rows {
                out.line(&format!("| {} |", row.join(" | ")))?;
            }
            return Ok(());
        }
        let titled = |(i, title): (usize, String)| if i == 0 { left(title) } else { right(title) };
        let mut table = Table::new(columns.into_iter().enumerate().map(titled).collect());
        for row in rows {
            let cell = |text: &String| match text.ends_with('✗') {
                true => Cell::new(text).color(Color::Red),
                false => Cell::new(text),
            };
            table.row(row.iter().map(cell).collect());
        }
        let style = out.style;
        out.text(&table.render(&style))
    }
}

/// One row for each name, one column for each report.
fn merged<T>(
    reports: &[Report],
    list: impl Fn(&Report) -> &Vec<T>,
    name: impl Fn(&T) -> &String,
    text: impl Fn(&T) -> String,
) -> Vec<Vec<String>> {
    let mut rows: Vec<Vec<String>> = Vec::new();
    for (column, report) in reports.iter().enumerate() {
        for entry in list(report) {
            let known = rows.iter().position(|row| row[0] == *name(entry));
            let at = known.unwrap_or_else(|| {
                rows.push(
                    std::iter::once(name(entry).clone())
                        .chain(reports.iter().map(|_| String::new()))
                        .collect(),
                );
                rows.len() - 1
            });
            rows[at][column + 1] = text(entry);
        }
    }
    rows
}

fn value(outcome: &Outcome) -> String {
    match outcome.unit {
        Unit::Times => format!("{:.2}", outcome.value),
        Unit::Ms => format!("{:.1} ms", outcome.value),
        Unit::KiB => format!("{:.0} KiB", outcome.value),
    }
}

fn want(outcome: &Outcome) -> String {
    match outcome.want {
        Want::AtMost(bound) => format!("at most {}", value(&Outcome { value: bound, ..outcome.clone() })),
        Want::AtLeast(bound) => format!("at least {}", value(&Outcome { value: bound, ..outcome.clone() })),
        Want::Nothing => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_reports_stand_side_by_side() {
        let outcome = |name: &str, value| Outcome {
            name: name.into(),
            value,
            unit: Unit::Times,
            want: Want::AtMost(1.0),
        };
        let report = |root, outcomes| Report {
            kernel: "6.1".into(),
            cpus: 2,
            load: 0.0,
            root,
            figures: vec![],
            outcomes,
            missing: vec![],
        };
        let reports = [
            report(true, vec![outcome("a", 0.5), outcome("only root", 2.0)]),
            report(false, vec![outcome("a", 1.5)]),
        ];
        let rows = merged(&reports, |r| &r.outcomes, |o: &Outcome| &o.name, value);
        assert_eq!(rows, [["a", "0.50", "1.50"], ["only root", "2.00", ""]]);
        assert_eq!(want(&reports[0].outcomes[0]), "at most 1.00");
    }
}
