//! A run on the full screen: a pure model of what is seen, a pure drawing of it, and a thin edge of terminal and store.

mod edit;
mod model;
mod rows;
mod terminal;
#[cfg(test)]
mod tests;
mod view;

use std::time::Duration;

use crossterm::event::{Event, EventStream, KeyEventKind};
use forkyard_agent::JournalEntry;
use forkyard_core::RunId;
use forkyard_core::run::Command;
use forkyard_core::view::RunView;
use forkyard_engine::clock::Clock;
use forkyard_engine::ports::Onlooker;
use forkyard_store::EventQuery;
use futures::StreamExt;
use futures::stream::FuturesUnordered;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;

use crate::cli::Global;
use crate::commands::add::Like;
use crate::commands::logs::{News, read};
use crate::commands::message::send;
use crate::commands::target::Target;
use crate::doing::Doing;
use crate::error::{CliError, Result};
use crate::follow::board;
use crate::place::Place;
use crate::runs::{is_idle, leave_to_worker, the_fork, the_run};
use crate::watch::model::{Screen, Wish};
pub use crate::watch::terminal::Terminal as FullScreen;

/// How often time goes on, and news are drawn.
const FRAME: Duration = Duration::from_millis(100);
/// How often it is asked whether anybody drives the run.
const IDLE_LOOK: Duration = Duration::from_secs(2);
/// Events that wait to be taken in.
const QUEUE: usize = 256;

/// What became of a wish.
enum Told {
    Notice(Result<String>),
    Patch(forkyard_core::ForkNum, Result<String>),
}

/// Shows a run until its user leaves; the run is as it was left.
pub async fn watch(place: &dyn Place, global: &Global, target: &Target, color: bool) -> Result<RunView> {
    let run = &target.run;
    if let Some(fork) = target.fork {
        the_fork(place, run, fork).await?;
    }
    let doing = Doing::default();
    let gone = || CliError::failure(format!("run {run} is gone"));
    let first = board(place, run, &doing).await?.ok_or_else(gone)?;
    let mut screen = Screen::new(first, target.fork);

    let (tell, mut events) = mpsc::channel(QUEUE);
    let whole = Target { run: run.clone(), fork: None };
    let query = EventQuery { kinds: vec!["agent.".into()], ..EventQuery::default() };
    let mut reading = std::pin::pin!(read(place, &whole, query, true, async |news| {
        if let News::Event(r) = news {
            // The other end is in this function.
            let _ = tell.send(r).await;
        }
        Ok(())
    }));
    let mut read_all = false;

    let mut changed = place.watch(run);
    let mut frame = tokio::time::interval(FRAME);
    frame.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Skip);
    let mut idle_look = tokio::time::interval(IDLE_LOOK);
    let mut signals =
        [signal(SignalKind::terminate())?, signal(SignalKind::hangup())?, signal(SignalKind::interrupt())?];
    let [term, hang_up, interrupt] = &mut signals;
    let mut wishes = FuturesUnordered::new();
    let mut terminal = FullScreen::take()?;
    let mut keys = EventStream::new();
    // News wait for the next frame; what a user does is seen at once.
    let (mut news, mut draw) = (false, true);
    loop {
        if let Some(wish) = screen.needs() {
            wishes.push(perform(place, global, run, wish));
        }
        if std::mem::take(&mut draw) {
            terminal.draw(|f| view::draw(&screen, f, color))?;
        }
        tokio::select! {
            biased;
            _ = term.recv() => break,
            _ = hang_up.recv() => break,
            _ = interrupt.recv() => break,
            event = keys.next() => {
                draw = true;
                let wish = match event.transpose()? {
                    Some(Event::Key(key)) if key.kind != KeyEventKind::Release => screen.key(key),
                    Some(Event::Paste(text)) => { screen.paste(&text); None }
                    Some(_) => None,
                    None => break,
                };
                match wish {
                    Some(Wish::Quit) => break,
                    Some(Wish::Suspend) => terminal.suspend()?,
                    Some(wish) => wishes.push(perform(place, global, run, wish)),
                    None => {}
                }
            }
            Some(told) = wishes.next() => {
                draw = true;
                match told {
                    Told::Notice(Ok(text)) => screen.say(text, false),
                    Told::Notice(Err(e)) => screen.say(e.message, true),
                    Told::Patch(fork, patch) => screen.result(fork, patch.map_err(|e| e.message)),
                }
            }
            _ = frame.tick() => {
                screen.tick(Clock::system().now());
                draw = true;
                if std::mem::take(&mut news) {
                    screen.look(board(place, run, &doing).await?.ok_or_else(gone)?);
                }
            }
            _ = idle_look.tick(), if !screen.ended() => screen.idle = is_idle(place, run).await?,
            Some(r) = events.recv() => {
                news = true;
                let Some(fork) = r.stream.fork() else { continue };
                // What another version wrote is told by `forkyard events`.
                if let Ok(entry) =
                    JournalEntry::from_stored(&r.event.kind, r.event.version, r.event.at, r.event.data)
                {
                    doing.recorded(run, fork, std::slice::from_ref(&entry));
                    screen.record(fork, &entry);
                }
            }
            () = changed.changed() => news = true,
            done = &mut reading, if !read_all => { done?; read_all = true; }
        }
    }
    drop(terminal);
    the_run(place, run).await
}

async fn perform(place: &dyn Place, global: &Global, run: &RunId, wish: Wish) -> Told {
    match wish {
        Wish::Diff(fork) => Told::Patch(fork, patch(place, run, fork).await),
        wish => Told::Notice(fulfil(place, global, run, wish).await),
    }
}

async fn patch(place: &dyn Place, run: &RunId, fork: forkyard_core::ForkNum) -> Result<String> {
    let view = the_run(place, run).await?;
    let patch = place.patch(&view, fork, &[]).await?;
    Ok(String::from_utf8_lossy(&patch).into_owned())
}

/// Does it, and says what was done.
async fn fulfil(place: &dyn Place, global: &Global, run: &RunId, wish: Wish) -> Result<String> {
    let command = async |command: Command| {
        place.command(run, command).await?;
        // A run that nobody drives would not hear of it.
        if is_idle(place, run).await? {
            leave_to_worker(place, global, run).await?;
        }
        Ok::<(), CliError>(())
    };
    match wish {
        Wish::Message { to, text, interrupt } => {
            let forks = send(place, &Target { run: run.clone(), fork: to }, &text, interrupt).await?;
            let names: Vec<String> = forks.iter().map(ToString::to_string).collect();
            Ok(format!("Sent to fork {}; it is read before the next tool call.", names.join(", ")))
        }
        Wish::Pause => {
            command(Command::Pause).await?;
            Ok("Pausing: requests that are under way end first.".into())
        }
        Wish::Resume => {
            command(Command::Resume).await?;
            Ok("It goes on.".into())
        }
        Wish::Cancel(Some(fork)) => {
            command(Command::CancelFork { fork }).await?;
            Ok(format!("Cancelling fork {fork}."))
        }
        Wish::Cancel(None) => {
            command(Command::Cancel).await?;
            Ok("Cancelling the run.".into())
        }
        Wish::Add(count) => {
            place.add(run, count, &Like::default()).await?;
            Ok(if count == 1 { "One more fork.".into() } else { format!("{count} more forks.") })
        }
        // The loop's own.
        Wish::Quit | Wish::Suspend | Wish::Diff(_) => Ok(String::new()),
    }
}
