//! A run from its submission to its closing table, shown while it works.

use std::time::{Duration, Instant};

use forkyard_agent::JournalEntry;
use forkyard_core::RunId;
use forkyard_core::run::Command;
use forkyard_core::view::{EngineKind, ForkView, RunOutcome, RunView};
use forkyard_engine::EngineError;
use forkyard_engine::embedded::DriveEnd;
use forkyard_engine::ports::Onlooker;
use forkyard_store::EventQuery;
use serde_json::json;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

use crate::commands::logs::{News, read};
use crate::commands::target::Target;
use crate::doing::Doing;
use crate::error::{CliError, Result};
use crate::exit::Exit;
use crate::output::Output;
use crate::place::Place;
use crate::render::board::Board;
use crate::render::closing::closing;
use crate::render::live::Live;
use crate::render::session::day;
use crate::results::RunResult;
use crate::yard::Yard;

/// How often the picture is drawn anew, if something changed.
const FRAME: Duration = Duration::from_millis(100);
/// A second ctrl-C within this time cancels; a later one does not wait for what is under way.
const SECOND: Duration = Duration::from_secs(5);

/// How often a run that another process drives is tried again.
const LEASE_POLL: Duration = Duration::from_secs(1);

/// How the run was left.
pub enum Left {
    Ended(RunView),
    Detached,
    /// Another process drives it and goes on.
    Elsewhere,
}

/// Drives a run in this process and shows it until it ends or its user lets go of it.
pub async fn drive(place: &dyn Place, run: &RunId, out: &mut Output<'_>) -> Result<Left> {
    let leave = CancellationToken::new();
    let mut driving = std::pin::pin!(async {
        match place.here() {
            Some(yard) => drive_patiently(yard, run, leave.clone()).await,
            None => wait_for_end(place, run).await.map(|_| DriveEnd::Ended),
        }
    });
    // What agents of another machine do is known by what they record.
    let mut hearing = std::pin::pin!(overhear(place, run, true));
    let mut heard = place.here().is_some();
    let settings = place.settings();
    let color = settings.color;
    let mut live = Live::new(std::io::stderr(), crate::render::Style::stderr(color));
    let mut frame = tokio::time::interval(FRAME);
    let mut interrupted: Option<Instant> = None;
    // One listener for the whole time: a signal that comes while a frame is drawn counts too.
    let mut interrupts = signal(SignalKind::interrupt())?;
    let end = loop {
        tokio::select! {
            biased;
            end = &mut driving => break end?,
            all = &mut hearing, if !heard => { all?; heard = true; }
            Some(()) = interrupts.recv() => {
                // Whoever only watches has nothing to detach.
                if interrupted.is_none() && is_elsewhere(place, run).await? {
                    live.finish()?;
                    return Ok(Left::Elsewhere);
                }
                let command = match interrupted {
                    None => Command::Detach,
                    Some(at) if at.elapsed() < SECOND => Command::Cancel,
                    Some(_) => {
                        leave.cancel();
                        continue;
                    }
                };
                live.note(match command {
                    Command::Cancel => "cancelling: what has been done is collected, then everything is cleaned up",
                    _ => "detaching: requests under way are finished first (ctrl-C again within 5 s cancels the run, later leaves at once)",
                })?;
                interrupted = Some(Instant::now());
                place.command(run, command).await?;
            }
            _ = frame.tick() => {
                live.resize(crate::render::Style::stderr(color));
                if let Some(board) = board(place, run, place.doing()).await? {
                    if out.json { snapshot(out, &board)?; } else { live.show(board)?; }
                }
            }
        }
    };
    // What changed since the last frame: a pipe is told everything.
    if let Some(board) = board(place, run, place.doing()).await? {
        if out.json {
            snapshot(out, &board)?;
        } else {
            live.show(board)?;
        }
    }
    live.finish()?;
    match end {
        DriveEnd::Detached | DriveEnd::Stopped => Ok(Left::Detached),
        DriveEnd::Ended | DriveEnd::Lost => Ok(Left::Ended(wait_for_end(place, run).await?)),
    }
}

/// Takes in what the run's agents have recorded; with `follow`, until it ends.
pub async fn overhear(place: &dyn Place, run: &RunId, follow: bool) -> Result<()> {
    let whole = Target { run: run.clone(), fork: None };
    let query = EventQuery { kinds: vec!["agent.".into()], ..EventQuery::default() };
    read(place, &whole, query, follow, async |news| {
        if let News::Event(r) = news
            && let Some(fork) = r.stream.fork()
            && let Ok(entry) =
                JournalEntry::from_stored(&r.event.kind, r.event.version, r.event.at, r.event.data)
        {
            place.doing().recorded(run, fork, std::slice::from_ref(&entry));
        }
        Ok(())
    })
    .await
}

async fn is_elsewhere(place: &dyn Place, run: &RunId) -> Result<bool> {
    let Some(yard) = place.here() else { return Ok(true) };
    let view = place.run(run).await?;
    if view.is_some_and(|v| v.engine == EngineKind::Temporal) {
        return Ok(true);
    }
    Ok(!yard.engine.is_driving(run) && yard.engine.is_driven(run).await.map_err(engine_error)?)
}

/// What a user is told who let go of a run.
pub fn detached(run: &RunId) -> String {
    format!("Detached. Go on with: forkyard resume {run}\nOr end it with: forkyard cancel {run}")
}

/// Drives and shows a run, and says at its end what came of it.
pub async fn to_the_end(place: &dyn Place, run: &RunId, out: &mut Output<'_>) -> Result<Exit> {
    match drive(place, run, out).await? {
        Left::Ended(view) => close(place, &view, out).await,
        Left::Detached => {
            let text = detached(run);
            out.said("forkyard.command/1", "detach", run, &text)?;
            Ok(Exit::Interrupted)
        }
        Left::Elsewhere => {
            let text =
                format!("{run} goes on: another process drives it. Watch it with: forkyard logs -f {run}");
            out.said("forkyard.command/1", "leave", run, &text)?;
            Ok(Exit::Interrupted)
        }
    }
}

/// If another process drives it, waits for what comes of it.
pub async fn drive_patiently(yard: &Yard, run: &RunId, stop: CancellationToken) -> Result<DriveEnd> {
    let mut watch = yard.store.watch(Some(run));
    loop {
        match yard.engine.drive(run, stop.clone()).await.map_err(engine_error)? {
            Some(DriveEnd::Lost) | None => {
                let view = yard.store.run(run).await.map_err(store_error)?;
                if view.is_none_or(|v| v.outcome.is_some()) {
                    return Ok(DriveEnd::Ended);
                }
                tokio::select! {
                    () = stop.cancelled() => return Ok(DriveEnd::Stopped),
                    () = watch.changed() => {}
                    // A lease that runs out changes nothing that a watch would see.
                    () = tokio::time::sleep(LEASE_POLL) => {}
                }
            }
            Some(end) => return Ok(end),
        }
    }
}

async fn wait_for_end(place: &dyn Place, run: &RunId) -> Result<RunView> {
    let mut watch = place.watch(run);
    loop {
        match place.run(run).await? {
            Some(v) if v.outcome.is_some() => return Ok(v),
            Some(_) => watch.changed().await,
            None => return Err(CliError::failure(format!("run {run} is gone"))),
        }
    }
}

/// What there is to see at this moment, with what is known of the agents' doings.
pub async fn board(place: &dyn Place, run: &RunId, doing: &Doing) -> Result<Option<Board>> {
    let Some(view) = place.run(run).await? else { return Ok(None) };
    let mut forks = place.forks(run).await?;
    let texts = doing.fill(&mut forks);
    let spent = place.spent(run).await?;
    let now = forkyard_engine::clock::Clock::system().now();
    Ok(Some(Board { run: view, forks, doing: texts, spent, now }))
}

fn snapshot(out: &mut Output<'_>, board: &Board) -> Result<()> {
    let mut run = board.run.clone();
    // Only news is worth a line.
    run.updated_at = forkyard_core::Timestamp(0);
    let line = json!({ "schema": "forkyard.progress/1", "run": run.id, "status": run.status, "progress": run.progress });
    out.json_line_once(&line)
}

/// The closing table, or one document with `--json`.
pub async fn close(place: &dyn Place, view: &RunView, out: &mut Output<'_>) -> Result<Exit> {
    let result = RunResult::read(place, view).await?;
    if out.json {
        out.json_line(&result)?;
    } else {
        let forks = place.forks(&view.id).await?;
        let style = out.style;
        out.text(&closing(view, &forks, &result, &style))?;
        for line in kept(place, view, &forks).await? {
            out.line(&line)?;
        }
    }
    Ok(match view.outcome {
        Some(RunOutcome::Success) => Exit::Success,
        Some(RunOutcome::Failed | RunOutcome::Cancelled) | None => Exit::Failure,
    })
}

/// The sandboxes that the run has left to its user: how to get in, and how to be rid of them.
async fn kept(place: &dyn Place, view: &RunView, forks: &[ForkView]) -> Result<Vec<String>> {
    if !place.run_log(&view.id).await?.is_some_and(|run| run.spec().keep) {
        return Ok(vec![]);
    }
    let there = place.sandboxes().list().await?;
    let mine = there.iter().filter(|s| forks.iter().any(|f| f.sandbox.as_ref() == Some(&s.id)));
    Ok(mine
        .map(|s| {
            let until = day(s.deadline);
            format!(
                "Kept until {until} UTC: forkyard sandbox shell {0} (remove it: forkyard sandbox rm {0})",
                s.id
            )
        })
        .collect())
}

pub fn engine_error(e: EngineError) -> CliError {
    match e {
        EngineError::Invalid(_) | EngineError::Refused(_) => CliError::usage(e.to_string()),
        EngineError::NoSuchRun(_)
        | EngineError::OtherHost { .. }
        | EngineError::Store(_)
        | EngineError::Unreadable { .. } => CliError::failure(e.to_string()),
    }
}

pub fn store_error(e: forkyard_store::StoreError) -> CliError {
    CliError::failure(e.to_string())
}
