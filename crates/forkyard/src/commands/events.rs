use std::collections::BTreeMap;

use clap::Args;
use forkyard_agent::AgentEvent;
use forkyard_core::{ForkNum, RunId};
use forkyard_store::{EventQuery, Recorded};
use serde_json::{Value, json};

use super::logs::{News, read};
use super::target::Target;
use crate::cli::Global;
use crate::doing::describe;
use crate::error::{CliError, Result};
use crate::exit::Exit;
use crate::output::Output;
use crate::render::session::clock;
use crate::render::table::{left, right};
use crate::render::{Cell, Color, Table, fit, plain};
use crate::runs::{the_target, with_place};

#[derive(Debug, Clone, Args)]
pub struct EventsArgs {
    /// RUN or RUN/N [default: the run here that is under way, else the newest].
    #[arg(value_name = "RUN")]
    pub target: Option<Target>,
    /// Go on until the run ends.
    #[arg(short, long)]
    pub follow: bool,
    /// Only events of these types; agent.* takes a whole category.
    #[arg(short = 't', long = "type", value_name = "TYPE", value_delimiter = ',')]
    pub types: Vec<String>,
    /// Only events after this position.
    #[arg(long, value_name = "POSITION")]
    pub since: Option<u64>,
    /// Put the forks side by side: what each did, step by step.
    #[arg(long, conflicts_with = "follow")]
    pub compare: bool,
}

/// Columns of one fork's step in a comparison.
const STEP_WIDTH: usize = 36;

impl EventsArgs {
    pub fn run(&self, global: &Global, out: &mut Output<'_>) -> Result<Exit> {
        let mut query = EventQuery {
            after: self.since.unwrap_or(0),
            // `agent.*` is the category with a dot at its end.
            kinds: self.types.iter().map(|t| t.trim_end_matches('*').to_string()).collect(),
            ..EventQuery::default()
        };
        if self.compare && query.kinds.is_empty() {
            query.kinds = vec!["agent.tool_use".into()];
        }
        let mut steps: BTreeMap<ForkNum, Vec<String>> = BTreeMap::new();
        let mut unknown: Vec<&String> = self.types.iter().filter(|t| !is_known(t)).collect();
        let run = with_place(global, async |place| {
            let target = the_target(place, self.target.as_ref()).await?;
            query.fork = target.fork;
            read(place, &target, query, self.follow, async |news| {
                let News::Event(r) = news else { return Ok(()) };
                // Whoever works inside a sandbox may have types of its own.
                unknown.retain(|t| !is_of(&r.event.kind, t));
                if self.compare {
                    if let Some(fork) = r.stream.fork() {
                        steps.entry(fork).or_default().push(summary(&r));
                    }
                    return Ok(());
                }
                if out.json {
                    return out.json_line(&record(&r));
                }
                let fork = r.stream.fork().map_or("-".into(), |n| n.to_string());
                let line = format!(
                    "{:>6} {} {:>3} {} {}",
                    r.position,
                    clock(r.event.at),
                    fork,
                    out.style.paint(Color::Cyan, &plain(&r.event.kind)),
                    plain(&summary(&r)),
                );
                let wide = out.style.width;
                // Colour has no width; a line in colour may be cut late, never early.
                out.line(&if out.style.color { line } else { fit(&line, wide) })
            })
            .await?;
            Ok(target.run)
        })?;
        if let Some(t) = unknown.first() {
            return Err(CliError::usage(format!("-t {}: no event has this type", plain(t)))
                .hint(format!("there are run.*, fork.*, agent.*: {}", AgentEvent::KINDS.join(", "))));
        }
        if self.compare {
            show_steps(&run, &steps, out)?;
        }
        Ok(Exit::Success)
    }
}

fn show_steps(run: &RunId, steps: &BTreeMap<ForkNum, Vec<String>>, out: &mut Output<'_>) -> Result<()> {
    if out.json {
        return out.json(&json!({ "schema": "forkyard.steps/1", "run": run, "forks": steps }));
    }
    let titles = steps.keys().map(|n| left(format!("Fork {n}")));
    let mut table = Table::new(std::iter::once(right("Step")).chain(titles).collect());
    for i in 0..steps.values().map(Vec::len).max().unwrap_or(0) {
        let cells =
            steps.values().map(|s| Cell::new(s.get(i).map_or(String::new(), |t| fit(&plain(t), STEP_WIDTH))));
        table.row(std::iter::once(Cell::new((i + 1).to_string())).chain(cells).collect());
    }
    let style = out.style;
    out.text(&table.render(&style))
}

/// Whether an event of this kind was asked for: `agent.*` is a whole category.
fn is_of(kind: &str, asked: &str) -> bool {
    match asked.strip_suffix('*') {
        Some(category) => kind.starts_with(category),
        None => kind == asked || (asked.ends_with('.') && kind.starts_with(asked)),
    }
}

/// Whether Forkyard itself writes such events.
fn is_known(asked: &str) -> bool {
    ["run.", "fork."].iter().any(|machine| asked.starts_with(machine))
        || AgentEvent::KINDS.iter().any(|kind| is_of(kind, asked))
}

/// One event as a program reads it.
pub fn record(r: &Recorded) -> Value {
    json!({
        "schema": "forkyard.event/1",
        "run": r.stream.run(),
        "fork_num": r.stream.fork(),
        "position": r.position,
        "seq": r.seq,
        "type": r.event.kind,
        "version": r.event.version,
        "at": r.event.at,
        "source": r.event.source,
        "sandbox_id": r.event.sandbox,
        "data": r.event.data,
    })
}

/// What is worth knowing of an event, in one line.
fn summary(r: &Recorded) -> String {
    let data = &r.event.data;
    if let Some(tool) = data.get("tool").and_then(Value::as_str) {
        let input = data.get("input").or_else(|| data.get("tool_input")).unwrap_or(&Value::Null);
        return describe(tool, input);
    }
    if let Some(text) = data["content"][0]["text"].as_str() {
        return text.to_string();
    }
    match data {
        Value::Null => String::new(),
        Value::Object(map) if map.is_empty() => String::new(),
        other => fit(&other.to_string(), MAX_SUMMARY),
    }
}

/// `--json` has the whole.
const MAX_SUMMARY: usize = 160;
