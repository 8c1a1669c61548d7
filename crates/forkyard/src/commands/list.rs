use clap::Args;
use forkyard_core::view::{RunOutcome, RunView};
use forkyard_store::RunQuery;
use serde_json::json;

use crate::cli::Global;
use crate::error::Result;
use crate::exit::Exit;
use crate::output::Output;
use crate::render::session::day;
use crate::render::table::{left, right};
use crate::render::{Cell, Color, Table};
use crate::runs::with_place;
use crate::temporal;

#[derive(Debug, Clone, Args)]
pub struct ListArgs {
    /// How many.
    #[arg(short, long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub limit: u32,
    /// Only those that have not ended.
    #[arg(long)]
    pub live: bool,
}

impl ListArgs {
    pub fn run(&self, global: &Global, out: &mut Output<'_>) -> Result<Exit> {
        let query = RunQuery { live: self.live, limit: self.limit as usize, ..RunQuery::default() };
        let (runs, notice) = with_place(global, async |place| {
            let mut runs = place.runs(&query).await?;
            let notice = temporal::notice(place, &mut runs).await?;
            Ok((runs, notice))
        })?;
        if let Some(notice) = &notice {
            eprintln!("{notice}");
        }
        if out.json {
            out.json(&json!({ "schema": "forkyard.runs/1", "runs": runs, "notice": notice }))?;
            return Ok(Exit::Success);
        }
        if runs.is_empty() && self.live {
            out.line("No run is under way. `forkyard list` shows those that have ended.")?;
            return Ok(Exit::Success);
        }
        if runs.is_empty() {
            out.line("There is no run. Start one with `forkyard fork`, or see `forkyard demo`.")?;
            return Ok(Exit::Success);
        }
        let mut table = Table::new(vec![
            left("Run"),
            left("Status"),
            right("Forks"),
            right("Best"),
            left("Started (UTC)"),
            left("Repository"),
            left("Prompt"),
        ]);
        for run in &runs {
            let (word, color) = state(run);
            table.row(vec![
                run.id.as_str().into(),
                Cell::new(word).color(color),
                format!("{}/{}", run.progress.completed, run.progress.total_forks).into(),
                run.winner.map(|n| n.to_string()).unwrap_or_default().into(),
                day(run.created_at).into(),
                short_repo(&run.repo).into(),
                run.prompt.lines().next().unwrap_or_default().into(),
            ]);
        }
        let style = out.style;
        out.text(&table.render(&style))?;
        Ok(Exit::Success)
    }
}

/// A run's state in one word, and its colour.
pub fn state(run: &RunView) -> (&'static str, Color) {
    match run.outcome {
        Some(RunOutcome::Success) => ("success", Color::Green),
        Some(RunOutcome::Failed) => ("failed", Color::Red),
        Some(RunOutcome::Cancelled) => ("cancelled", Color::Yellow),
        None if run.cancelling => ("cancelling", Color::Yellow),
        None if run.detached => ("detached", Color::Yellow),
        None if run.paused => ("paused", Color::Yellow),
        None => (run.status.as_str(), Color::Cyan),
    }
}

/// The last two parts tell repositories apart.
fn short_repo(source: &str) -> String {
    let shown = forkyard_engine::git::shown_url(source);
    let mut parts: Vec<&str> = shown.rsplit('/').take(2).collect();
    parts.reverse();
    parts.join("/")
}
