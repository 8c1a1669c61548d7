//! What commands on existing runs share: finding them, their results, and somebody who drives them.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command as Program, Stdio};
use std::time::{Duration, Instant};

use forkyard_core::task::Collected;
use forkyard_core::view::{EngineKind, ForkView, RunStatus, RunView};
use forkyard_core::{ForkNum, RunId};
use forkyard_engine::embedded::is_gone;
use forkyard_engine::sandboxes::Sandboxes;
use forkyard_store::{ProcessKind, RunQuery};
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

use crate::cli::Global;
use crate::commands::target::Target;
use crate::error::{CliError, Result};
use crate::follow::{engine_error, store_error};
use crate::place::Place;
use crate::remote::Remote;
use crate::settings::{Flags, Settings};
use crate::yard::{self, Yard};

/// How long a new worker may take until its run has moved.
const WORKER_START: Duration = Duration::from_secs(20);
/// Runs that are looked through for the newest of a repository.
const NEWEST_LOOK: usize = 200;
/// Runs, or forks, that are listed for one to be chosen.
const MAX_NAMED: usize = 10;
/// Runs that are looked through for one that nobody drives.
const CLAIMABLE_LOOK: usize = 10_000;
/// How long a command's end waits for its sandboxes' remains to be removed.
const SETTLE_WITHIN: Duration = Duration::from_secs(5);
const STILL_REMOVING: &str = "what sandboxes left is still being removed; the next command goes on with it";
const WORKER_POLL: Duration = Duration::from_millis(50);

/// A command over runs and sandboxes that are there, wherever that is.
pub fn with_place<T>(global: &Global, work: impl AsyncFnOnce(&dyn Place) -> Result<T>) -> Result<T> {
    in_place(global.load_leniently(global.flags()?)?.settings, work)
}

/// A command that lets agents work: what the project's file says of them has to be right.
pub fn with_place_flags<T>(
    global: &Global,
    flags: Flags,
    work: impl AsyncFnOnce(&dyn Place) -> Result<T>,
) -> Result<T> {
    in_place(global.load(flags)?.settings, work)
}

/// Opens the place that the settings name, does its work in a runtime, and waits for it.
fn in_place<T>(settings: Settings, work: impl AsyncFnOnce(&dyn Place) -> Result<T>) -> Result<T> {
    crate::runtime()?.block_on(async {
        match settings.remote_url.clone() {
            Some(url) => {
                let remote = Remote::open(settings, &url)?;
                work(&remote as &dyn Place).await
            }
            None => {
                let yard = Yard::open(settings).await?;
                settled(&yard.sandboxes, work(&yard as &dyn Place)).await
            }
        }
    })
}

/// A command that makes a sandbox and knows nothing of runs: no store is opened for it.
pub fn with_sandboxes<T>(
    global: &Global,
    flags: Flags,
    work: impl AsyncFnOnce(&Settings, &Sandboxes) -> Result<T>,
) -> Result<T> {
    let settings = global.load(flags)?.settings;
    // One thread: a command in a sandbox is mostly waited for, and threads take longer to start than the sandbox's parts.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let done = runtime.block_on(async {
        match settings.remote_url.clone() {
            Some(url) => {
                let remote = Remote::open(settings, &url)?;
                work(remote.settings(), remote.sandboxes()).await
            }
            None => {
                let sandboxes = yard::sandboxes(&settings).await?;
                let done = work(&settings, &sandboxes).await;
                if tokio::time::timeout(SETTLE_WITHIN, sandboxes.leave()).await.is_err() {
                    tracing::warn!(STILL_REMOVING);
                }
                done
            }
        }
    });
    // Nothing is left that its threads would have to end.
    runtime.shutdown_background();
    done
}

/// Work of a process that ends with it: what it leaves behind in the background is waited for, so that nothing is left.
async fn settled<T>(sandboxes: &Sandboxes, work: impl Future<Output = T>) -> T {
    let done = work.await;
    if tokio::time::timeout(SETTLE_WITHIN, sandboxes.settle()).await.is_err() {
        tracing::warn!(STILL_REMOVING);
    }
    done
}

/// A command that only this machine can do.
pub fn with_flags<T>(global: &Global, flags: Flags, work: impl AsyncFnOnce(&Yard) -> Result<T>) -> Result<T> {
    let settings = global.load(flags)?.settings;
    if let Some(url) = &settings.remote_url {
        return Err(CliError::usage(format!("this command is about this machine, and --server says {url}"))
            .hint("run it on that server, or leave --server out and FORKYARD_SERVER unset"));
    }
    crate::runtime()?.block_on(async {
        let yard = Yard::open(settings).await?;
        settled(&yard.sandboxes, work(&yard)).await
    })
}

pub async fn the_run(place: &dyn Place, id: &RunId) -> Result<RunView> {
    let found = place.run(id).await?;
    found.ok_or_else(|| {
        CliError::usage(format!("there is no run {id}")).hint("`forkyard list` shows the runs")
    })
}

/// What a command that only looks is about: what was named, else the run that is meant without a doubt. Runs that nobody drives
/// are not under way. Which one it is, is said beside its output. Commands that change anything take nothing but a name.
pub async fn the_target(place: &dyn Place, named: Option<&Target>) -> Result<Target> {
    if let Some(target) = named {
        return Ok(target.clone());
    }
    let query = RunQuery { limit: NEWEST_LOOK, ..RunQuery::default() };
    let all = place.runs(&query).await?;
    let mut live = place.runs(&RunQuery { live: true, ..query }).await?;
    live.retain(|r| !r.detached);
    // Of another machine, folders of this one say nothing.
    let here = place.here().and_then(|_| repository(&std::env::current_dir().ok()?));
    let is_here = |r: &&RunView| here.is_some() && repository(Path::new(&r.repo)) == here;
    let (live, all, whose) = if live.iter().chain(&all).any(|r| is_here(&r)) {
        let of_here = |runs: Vec<RunView>| runs.into_iter().filter(|r| is_here(&r)).collect::<Vec<_>>();
        (of_here(live), of_here(all), " of this repository")
    } else {
        (live, all, if here.is_some() { ", none of this repository" } else { "" })
    };
    let mut driven = Vec::new();
    for run in live {
        if !is_abandoned(place, &run).await? {
            driven.push(run);
        }
    }
    let (run, why) = match (&driven[..], all.first()) {
        ([one], _) => (one, format!("the one{whose} that is under way")),
        ([], Some(newest)) => (newest, format!("the newest{whose}")),
        ([], None) => {
            return Err(CliError::usage("there is no run yet")
                .hint("start one with `forkyard fork`, or see `forkyard demo`"));
        }
        (several, _) => {
            let names = several.iter().map(|r| r.id.to_string());
            return Err(CliError::usage(format!(
                "{} runs{whose} are under way: {}",
                several.len(),
                first_few(names)
            ))
            .hint("name one of them; `forkyard list --live` shows them"));
        }
    };
    eprintln!("run {}: {why}", run.id);
    Ok(Target { run: run.id.clone(), fork: None })
}

/// The folder of the repository that a folder is in.
fn repository(folder: &Path) -> Option<PathBuf> {
    let folder = folder.canonicalize().ok()?;
    folder.ancestors().find(|f| f.join(".git").exists()).map(Path::to_path_buf)
}

fn first_few(names: impl Iterator<Item = String>) -> String {
    let mut names = names.take(MAX_NAMED + 1).collect::<Vec<_>>();
    if names.len() > MAX_NAMED {
        names[MAX_NAMED] = "…".into();
    }
    names.join(", ")
}

/// For commands that only make sense before the end.
pub async fn the_live_run(place: &dyn Place, id: &RunId) -> Result<RunView> {
    let view = the_run(place, id).await?;
    if view.status == RunStatus::Ended {
        return Err(CliError::usage(format!("run {id} has ended"))
            .hint(format!("`forkyard status {id}` shows what came of it")));
    }
    Ok(view)
}

pub async fn the_fork(place: &dyn Place, run: &RunId, fork: ForkNum) -> Result<ForkView> {
    if let Some(found) = place.fork(run, fork).await? {
        return Ok(found);
    }
    // Forks have no row of their own while the base is being prepared.
    let view = place.run(run).await?;
    if view.is_some_and(|v| v.outcome.is_none() && fork < v.progress.total_forks) {
        return Err(CliError::failure(format!(
            "fork {fork} of {run} has not begun: the base is being prepared"
        ))
        .hint("try again in a moment"));
    }
    Err(CliError::usage(format!("run {run} has no fork {fork}"))
        .hint(format!("`forkyard status {run}` shows its forks")))
}

/// The named fork; of a run alone, its best one.
pub async fn chosen(place: &dyn Place, target: &Target) -> Result<(RunView, ForkView)> {
    let view = the_run(place, &target.run).await?;
    let fork = match (target.fork, view.winner.or_else(|| view.ranking.first().copied())) {
        (Some(n), _) | (None, Some(n)) => n,
        (None, None) => {
            let names = (0..view.progress.total_forks).map(|n| format!("{}/{n}", view.id));
            return Err(CliError::usage(format!("run {} has no best fork yet", view.id))
                .hint(format!("name one of its forks: {}", first_few(names))));
        }
    };
    let fork = the_fork(place, &target.run, fork).await?;
    Ok((view, fork))
}

/// What the host has of a fork's work; None if it did not come that far.
pub async fn collected(place: &dyn Place, run: &RunId, fork: ForkNum) -> Result<Option<Collected>> {
    Ok(place.fork_log(run, fork).await?.and_then(|fork| fork.result().collected))
}

/// Files that were brought back beside the diff.
pub async fn captured(place: &dyn Place, run: &RunId, fork: ForkNum) -> Result<Vec<String>> {
    Ok(collected(place, run, fork).await?.map(|c| c.captured).unwrap_or_default())
}

/// Whether a process of this host takes on whatever has no driver.
pub async fn has_worker(yard: &Yard) -> Result<bool> {
    let processes = yard.store.processes().await.map_err(store_error)?;
    Ok(processes.iter().any(|p| {
        let drives = matches!(p.kind, ProcessKind::Worker | ProcessKind::Server);
        drives && p.host == yard.host && !is_gone(&p.id)
    }))
}

/// A command or a message was put down for a run: if nobody drives it, somebody is found who does.
pub async fn see_to(place: &dyn Place, global: &Global, run: &RunId) -> Result<()> {
    let Some(yard) = place.here() else { return Ok(()) };
    if yard.engine.is_driven(run).await.map_err(engine_error)? {
        return Ok(());
    }
    leave_to_worker(yard, global, run).await
}

/// Whether a run waits to be driven and nobody does. A driver that died is noticed when its lease runs out.
pub async fn is_idle(place: &dyn Place, run: &RunId) -> Result<bool> {
    // A server sees to its runs itself.
    let Some(yard) = place.here() else { return Ok(false) };
    Ok(yard.store.claimable(CLAIMABLE_LOOK).await.map_err(store_error)?.contains(run))
}

/// Whether a live run stands still until somebody resumes it: its driver is dead, and no process of this host takes it over.
pub async fn is_abandoned(place: &dyn Place, view: &RunView) -> Result<bool> {
    // A server sees to its runs itself, and Temporal to its own.
    let Some(yard) = place.here() else { return Ok(false) };
    if view.status == RunStatus::Ended || view.engine == EngineKind::Temporal {
        return Ok(false);
    }
    Ok(!yard.engine.is_driven(&view.id).await.map_err(engine_error)?
        && (view.detached || !has_worker(yard).await?))
}

/// Sees to it that a run goes on without this process: a worker is told by the store, or one is started for this run alone.
pub async fn leave_to_worker(place: &dyn Place, global: &Global, run: &RunId) -> Result<()> {
    let Some(yard) = place.here() else { return Ok(()) };
    // Temporal keeps its runs: a worker goes on with them when there is one.
    if the_run(yard, run).await?.engine == EngineKind::Temporal || has_worker(yard).await? {
        return Ok(());
    }
    let logs = yard.settings.home.join("logs");
    std::fs::create_dir_all(&logs)?;
    let path = logs.join(format!("worker-{run}.log"));
    let log = File::options().create(true).append(true).open(&path)?;
    let mut program = Program::new(std::env::current_exe()?);
    program.args(["worker", "--detached", "--run", run.as_str()]);
    for pair in &global.set {
        program.args(["--set", pair]);
    }
    if let Some(dir) = &yard.settings.log_dir {
        program.arg("--set").arg(format!("run.log_dir={}", dir.display()));
    }
    if global.no_project_file {
        program.arg("--no-project-file");
    }
    program.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
    let mut child = program.spawn()?;
    let give_up = Instant::now() + WORKER_START;
    while Instant::now() < give_up {
        let moved = the_run(yard, run).await?.status != RunStatus::Pending;
        let ended = child.try_wait()?;
        if moved || ended.is_some_and(|s| s.success()) {
            return Ok(());
        }
        if let Some(status) = ended {
            let said = std::fs::read_to_string(&path).unwrap_or_default();
            return Err(CliError::failure(format!(
                "the worker of {run} ended with {status}: {}",
                said.trim()
            ))
            .hint(format!("`forkyard resume {run}` goes on; the worker's log is {}", path.display())));
        }
        tokio::time::sleep(WORKER_POLL).await;
    }
    Ok(())
}

/// Cancelled by ctrl-C or SIGTERM, for what goes on until it is stopped.
pub fn stop_on_signals() -> Result<CancellationToken> {
    let (mut term, mut int) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let stop = CancellationToken::new();
    let stopping = stop.clone();
    tokio::spawn(async move {
        tokio::select! {
            _ = term.recv() => {}
            _ = int.recv() => {}
        }
        stopping.cancel();
    });
    Ok(stop)
}
