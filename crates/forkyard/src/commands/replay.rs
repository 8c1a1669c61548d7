use std::time::Duration;

use clap::Args;
use forkyard_agent::JournalEntry;
use forkyard_core::{ForkNum, ForkRef, InvalidId, RunId, Timestamp};
use forkyard_store::{EventQuery, Recorded, Source};

use super::target::Target;
use crate::cli::Global;
use crate::error::{CliError, Result};
use crate::exit::Exit;
use crate::output::Output;
use crate::place::Place;
use crate::render::session;
use crate::runs::{chosen, the_target, with_place};

#[derive(Debug, Clone, Args)]
pub struct ReplayArgs {
    /// The fork [default: the best one of the run here that is under way, else of the newest].
    #[arg(value_name = "RUN/N", value_parser = fork_ref)]
    pub fork: Option<ForkRef>,
    /// How many times faster than it was; 0 shows all at once.
    #[arg(long, value_name = "FACTOR", default_value_t = 4.0, value_parser = speed)]
    pub speed: f64,
}

/// Longer silences are cut: nobody watches a build again.
const MAX_SILENCE: Duration = Duration::from_secs(3);

/// All that the fork's agents recorded, in order.
async fn journal(place: &dyn Place, run: &RunId, fork: ForkNum) -> Result<Vec<Recorded>> {
    let mut query = EventQuery { fork: Some(fork), kinds: vec!["agent.".into()], ..EventQuery::default() };
    let mut all = vec![];
    loop {
        let page = place.events(run, &query).await?;
        let Some(last) = page.last() else { return Ok(all) };
        query.after = last.position;
        all.extend(page);
    }
}

/// A session is one fork's.
fn fork_ref(text: &str) -> Result<ForkRef, String> {
    match RunId::new(text) {
        Ok(run) => Err(format!("it is a run; name one of its forks: write {run}/0")),
        Err(_) => text.parse().map_err(|e: InvalidId| e.to_string()),
    }
}

/// Finite, not negative, and slow enough to be seen.
fn speed(text: &str) -> Result<f64, String> {
    let speed: Option<f64> = text.parse().ok();
    speed.filter(|s| (0.0..=1000.0).contains(s)).ok_or_else(|| "write a number from 0 to 1000".into())
}

impl ReplayArgs {
    pub fn run(&self, global: &Global, out: &mut Output<'_>) -> Result<Exit> {
        with_place(global, async |place| {
            let named = self.fork.clone().map(|f| Target { run: f.run, fork: Some(f.fork) });
            let target = the_target(place, named.as_ref()).await?;
            let (view, fork) = chosen(place, &target).await?;
            let (run, fork) = (&view.id, &fork.fork);
            let journal = journal(place, run, *fork).await?;
            // Beside its entries stands what others inside its sandbox testified.
            let journal: Vec<_> = journal.into_iter().filter(|r| r.event.source == Source::Agent).collect();
            if journal.is_empty() {
                return Err(CliError::failure(format!("the agent of {run}/{fork} has not begun"))
                    .hint(format!("`forkyard status {run}/{fork}` says how far it came")));
            }
            let style = out.style;
            let mut before: Option<Timestamp> = None;
            for r in journal {
                let entry =
                    JournalEntry::from_stored(&r.event.kind, r.event.version, r.event.at, r.event.data)
                        .map_err(|e| CliError::failure(e.to_string()).hint("use the newest forkyard"))?;
                let passed = before.map_or(Duration::ZERO, |b| entry.at.since(b).as_duration());
                before = Some(entry.at);
                if self.speed > 0.0 {
                    let wait = passed.div_f64(self.speed).min(MAX_SILENCE);
                    tokio::select! {
                        () = tokio::time::sleep(wait) => {}
                        signal = tokio::signal::ctrl_c() => { signal?; return Ok(Exit::Interrupted); }
                    }
                }
                if out.json {
                    let (kind, data) = entry.to_stored();
                    out.json_line(&serde_json::json!({
                        "schema": "forkyard.replay/1", "at": entry.at, "type": kind, "data": data,
                    }))?;
                    continue;
                }
                for line in session::lines(&entry, &style) {
                    out.line(&line)?;
                }
            }
            Ok(Exit::Success)
        })
    }
}
