use std::collections::VecDeque;

use clap::Args;
use forkyard_agent::JournalEntry;
use forkyard_core::view::RunStatus;
use forkyard_store::{EventQuery, Recorded};

use super::events::record;
use super::target::Target;
use crate::cli::Global;
use crate::error::Result;
use crate::exit::Exit;
use crate::output::Output;
use crate::place::Place;
use crate::render::session;
use crate::render::style::Style;
use crate::runs::{the_fork, the_run, the_target, with_place};

#[derive(Debug, Clone, Args)]
pub struct LogsArgs {
    /// RUN or RUN/N [default: the run here that is under way, else the newest].
    #[arg(value_name = "RUN")]
    pub target: Option<Target>,
    /// Go on until the run ends.
    #[arg(short, long)]
    pub follow: bool,
    /// Only the last lines.
    #[arg(short = 'n', long, value_name = "N", value_parser = clap::value_parser!(u32).range(0..=1_000_000))]
    pub tail: Option<u32>,
}

impl LogsArgs {
    pub fn run(&self, global: &Global, out: &mut Output<'_>) -> Result<Exit> {
        with_place(global, async |place| {
            let (style, json) = (out.style, out.json);
            let target = the_target(place, self.target.as_ref()).await?;
            let whole_run = target.fork.is_none();
            let mut last: VecDeque<String> = VecDeque::new();
            // With a tail, what is there already is only known at its end.
            let mut tail = self.tail.map(|n| n as usize);
            let query = EventQuery { fork: target.fork, kinds: vec!["agent.".into()], ..Default::default() };
            read(place, &target, query, self.follow, async |news| {
                match news {
                    News::Event(r) => {
                        let lines = if json {
                            vec![serde_json::to_string(&record(&r)).map_err(std::io::Error::from)?]
                        } else {
                            lines(r, whole_run, &style)
                        };
                        for line in lines {
                            match tail {
                                Some(max) => {
                                    last.push_back(line);
                                    if last.len() > max {
                                        last.pop_front();
                                    }
                                }
                                None => out.line(&line)?,
                            }
                        }
                    }
                    News::CaughtUp => {
                        tail = None;
                        for line in last.drain(..) {
                            out.line(&line)?;
                        }
                    }
                }
                Ok(())
            })
            .await
        })?;
        Ok(Exit::Success)
    }
}

fn lines(r: Recorded, whole_run: bool, style: &Style) -> Vec<String> {
    let fork = r.stream.fork();
    // What another version wrote is told by `events`.
    let Ok(entry) = JournalEntry::from_stored(&r.event.kind, r.event.version, r.event.at, r.event.data)
    else {
        return vec![];
    };
    let mark = match (whole_run, fork) {
        (true, Some(n)) => format!("[{n}] "),
        (true, None) | (false, _) => String::new(),
    };
    session::lines(&entry, style).into_iter().map(|l| format!("{mark}{l}")).collect()
}

pub enum News {
    Event(Recorded),
    /// All that was there is told.
    CaughtUp,
}

/// Tells the events of a run in the order of their positions; with `follow`, until the run (or the one fork) has ended.
pub async fn read(
    place: &dyn Place,
    target: &Target,
    mut query: EventQuery,
    follow: bool,
    mut tell: impl AsyncFnMut(News) -> Result<()>,
) -> Result<()> {
    the_run(place, &target.run).await?;
    if let Some(n) = target.fork {
        the_fork(place, &target.run, n).await?;
    }
    let mut watch = place.watch(&target.run);
    loop {
        // Asked before reading: what is written until the end is read.
        let ended = match target.fork {
            Some(n) => the_fork(place, &target.run, n).await?.outcome.is_some(),
            None => the_run(place, &target.run).await?.status == RunStatus::Ended,
        };
        loop {
            let page = place.events(&target.run, &query).await?;
            let Some(newest) = page.last() else { break };
            query.after = newest.position;
            for r in page {
                tell(News::Event(r)).await?;
            }
        }
        tell(News::CaughtUp).await?;
        if ended || !follow {
            return Ok(());
        }
        tokio::select! {
            () = watch.changed() => {}
            signal = tokio::signal::ctrl_c() => { signal?; return Ok(()); }
        }
    }
}
