//! A run from its submission to its closing table, shown while it works.

use std::time::{Duration, Instant};

use forkyard_core::RunId;
use forkyard_core::run::Command;
use forkyard_core::view::{EngineKind, RunOutcome, RunView};
use forkyard_engine::embedded::DriveEnd;
use forkyard_engine::{Engine, EngineError};
use serde_json::json;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

use crate::doing::Doing;
use crate::error::{CliError, Result};
use crate::exit::Exit;
use crate::output::Output;
use crate::render::board::Board;
use crate::render::closing::closing;
use crate::render::live::Live;
use crate::results::RunResult;
use crate::yard::Yard;

/// How often the picture is drawn anew, if something changed.
const FRAME: Duration = Duration::from_millis(100);
/// A second ctrl-C within this time cancels; later ones detach again.
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
pub async fn drive(yard: &Yard, run: &RunId, out: &mut Output<'_>) -> Result<Left> {
    let stop = CancellationToken::new();
    let mut driving = std::pin::pin!(drive_patiently(yard, run, stop.clone()));
    let mut live = Live::new(std::io::stderr(), crate::render::Style::stderr(yard.settings.color));
    let mut frame = tokio::time::interval(FRAME);
    let mut interrupted: Option<Instant> = None;
    // One listener for the whole time: a signal that comes while a frame is drawn counts too.
    let mut interrupts = signal(SignalKind::interrupt())?;
    let end = loop {
        tokio::select! {
            biased;
            end = &mut driving => break end?,
            Some(()) = interrupts.recv() => {
                // Whoever only watches has nothing to detach.
                if interrupted.is_none() && is_elsewhere(yard, run).await? {
                    live.finish()?;
                    return Ok(Left::Elsewhere);
                }
                let again = interrupted.is_some_and(|at| at.elapsed() < SECOND);
                let (command, note) = if again {
                    (Command::Cancel, "cancelling: what has been done is collected, then everything is cleaned up")
                } else {
                    (Command::Detach, "detaching: agents stop at a safe point (ctrl-C again within 5 s cancels the run)")
                };
                interrupted = Some(Instant::now());
                live.note(note)?;
                yard.engine.command(run, command, None).await.map_err(engine_error)?;
            }
            _ = frame.tick() => {
                live.resize(crate::render::Style::stderr(yard.settings.color));
                if let Some(board) = board(yard, run, &yard.doing).await? {
                    if out.json { snapshot(out, &board)?; } else { live.show(board)?; }
                }
            }
        }
    };
    // What changed since the last frame: a pipe is told everything.
    if let Some(board) = board(yard, run, &yard.doing).await? {
        if out.json {
            snapshot(out, &board)?;
        } else {
            live.show(board)?;
        }
    }
    live.finish()?;
    match end {
        DriveEnd::Detached | DriveEnd::Stopped => Ok(Left::Detached),
        DriveEnd::Ended | DriveEnd::Lost => Ok(Left::Ended(wait_for_end(yard, run).await?)),
    }
}

async fn is_elsewhere(yard: &Yard, run: &RunId) -> Result<bool> {
    let view = yard.store.run(run).await.map_err(store_error)?;
    if view.is_some_and(|v| v.engine == EngineKind::Temporal) {
        return Ok(true);
    }
    Ok(!yard.engine.is_driving(run) && yard.engine.is_driven(run).await.map_err(engine_error)?)
}

/// Drives and shows a run, and says at its end what came of it.
pub async fn to_the_end(yard: &Yard, run: &RunId, out: &mut Output<'_>) -> Result<Exit> {
    match drive(yard, run, out).await? {
        Left::Ended(view) => close(yard, &view, out).await,
        Left::Detached => {
            let text = format!("Detached. Go on with: forkyard resume {run}");
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

async fn wait_for_end(yard: &Yard, run: &RunId) -> Result<RunView> {
    let mut watch = yard.store.watch(Some(run));
    loop {
        match yard.store.run(run).await.map_err(store_error)? {
            Some(v) if v.outcome.is_some() => return Ok(v),
            Some(_) => watch.changed().await,
            None => return Err(CliError::failure(format!("run {run} is gone"))),
        }
    }
}

/// What there is to see at this moment, with what is known of the agents' doings.
pub async fn board(yard: &Yard, run: &RunId, doing: &Doing) -> Result<Option<Board>> {
    let Some(view) = yard.store.run(run).await.map_err(store_error)? else { return Ok(None) };
    let mut forks = yard.store.forks(run).await.map_err(store_error)?;
    let mut texts = std::collections::BTreeMap::new();
    for f in forks.iter_mut().filter(|f| f.outcome.is_none()) {
        if let Some(now) = doing.now(run, f.fork) {
            f.turns = f.turns.max(now.turn);
            f.tool_calls = f.tool_calls.max(now.tool_calls);
            f.cost = f.cost.max(now.cost);
            texts.insert(f.fork, now.text);
        }
    }
    let spent = yard.store.balance(run).await.map_err(store_error)?.spent;
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
pub async fn close(yard: &Yard, view: &RunView, out: &mut Output<'_>) -> Result<Exit> {
    let result = RunResult::read(yard, view).await?;
    if out.json {
        out.json_line(&result)?;
    } else {
        let forks = yard.store.forks(&view.id).await.map_err(store_error)?;
        let style = out.style;
        out.text(&closing(view, &forks, &result, &style))?;
    }
    Ok(match view.outcome {
        Some(RunOutcome::Success) => Exit::Success,
        Some(RunOutcome::Failed | RunOutcome::Cancelled) | None => Exit::Failure,
    })
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
