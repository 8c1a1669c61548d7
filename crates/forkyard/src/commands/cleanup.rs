use std::sync::Arc;

use clap::Args;
use forkyard_core::Millis;
use forkyard_core::view::{EngineKind, RunStatus, SandboxState};
use forkyard_engine::activities::HostYard;
use forkyard_engine::clock::Clock;
use forkyard_engine::sweep::{self, SweepConfig, SweepStats, Yard as _};
use forkyard_sandbox::Provider;
use forkyard_server::dto::chores::{Cleaned, CleanupStopped};
use forkyard_store::SandboxQuery;
use forkyard_temporal::service::CleanupStarted;
use serde_json::json;

use crate::cli::Global;
use crate::error::{CliError, Result};
use crate::exit::Exit;
use crate::follow::store_error;
use crate::output::Output;
use crate::place::Place;
use crate::render::plain;
use crate::render::session::day;
use crate::runs::{stop_on_signals, with_flags, with_place_flags};
use crate::settings::{Raw, Value};
use crate::temporal;
use crate::yard::Yard;

#[derive(Debug, Clone, Args)]
pub struct CleanupArgs {
    /// How often; a bare number is minutes [default: 15m].
    #[arg(long, value_name = "DURATION")]
    pub interval: Option<String>,
    /// Older than this, with no live run, is an orphan; a bare number is minutes [default: 3h].
    #[arg(long, value_name = "DURATION")]
    pub max_age: Option<String>,
    /// Look once and end.
    #[arg(long)]
    pub once: bool,
    /// Say what would be removed.
    #[arg(long)]
    pub dry_run: bool,
    /// Who looks: embedded is this process, temporal every host with a worker [default: embedded].
    #[arg(long, value_name = "NAME")]
    pub engine: Option<String>,
}

#[derive(Debug, Clone, Args)]
pub struct StopCleanupArgs {
    /// Whose: embedded or temporal [default: embedded].
    #[arg(long, value_name = "NAME")]
    pub engine: Option<String>,
}

/// A duration of the command line.
pub fn duration(flag: &str, text: &str) -> Result<Millis> {
    Millis::parse(&Raw::Text(text.to_string()))
        .map_err(|fix| CliError::usage(format!("{flag} {text:?} can't be used")).hint(fix))
}

/// Orphans are counted in minutes: an age of seconds that was meant so would remove what is in use.
fn minutes(flag: &str, text: Option<&str>) -> Result<Option<String>> {
    let Some(text) = text else { return Ok(None) };
    let bare = text.trim().parse::<f64>().is_ok();
    let given = if bare { format!("{}m", text.trim()) } else { text.to_string() };
    match Millis::parse(&Raw::Text(given.clone())) {
        Ok(_) => Ok(Some(given)),
        Err(_) => Err(CliError::usage(format!("{flag} {text:?} can't be used"))
            .hint("write a duration like 90s, 15m, 2h or 1d; a bare number is minutes")),
    }
}

impl CleanupArgs {
    pub fn run(&self, global: &Global, out: &mut Output<'_>) -> Result<Exit> {
        let mut flags = global.flags()?;
        for (key, flag, text) in [
            ("cleanup.interval", "--interval", &self.interval),
            ("cleanup.max_age", "--max-age", &self.max_age),
        ] {
            flags.set_option(key, flag, minutes(flag, text.as_deref())?.as_ref());
        }
        flags.set_option("engine.kind", "--engine", self.engine.as_ref());
        if self.once || self.dry_run {
            return with_place_flags(global, flags, async |place| {
                let max_age = place.settings().cleanup_max_age;
                report(&place.cleanup(max_age, self.dry_run).await?, out)
            });
        }
        with_flags(global, flags, async |yard| {
            let s = &yard.settings;
            let asked = json!({
                "older_than_ms": s.cleanup_max_age, "interval_ms": s.cleanup_interval, "engine": s.engine,
            });
            yard.record("server.start_cleanup", "server", asked).await?;
            if s.engine == EngineKind::Temporal {
                let (started, notice) = temporal::start_cleanup(yard).await?;
                return tell_started(&started, notice.as_deref(), out);
            }
            let config =
                SweepConfig { interval: s.cleanup_interval.as_duration(), max_age: s.cleanup_max_age };
            let here = yard.host.clone();
            let host = HostYard(yard.providers.values().cloned().collect::<Vec<Arc<dyn Provider>>>());
            if !out.json {
                out.line(
                    "Looking for orphaned sandboxes until stopped by ctrl-C or `forkyard stop-cleanup`.",
                )?;
            }
            let providers: Vec<_> = yard.providers.values().cloned().collect();
            let mut every = tokio::time::interval(config.interval);
            tokio::spawn(async move {
                loop {
                    every.tick().await;
                    sweep_all(&providers).await;
                }
            });
            let stop = stop_on_signals()?;
            let stats = sweep::sweep_until_stopped(&*yard.store, &host, &here, Clock::system(), config, stop)
                .await
                .map_err(store_error)?;
            tell(&stats, out)
        })
    }
}

impl StopCleanupArgs {
    pub fn run(&self, global: &Global, out: &mut Output<'_>) -> Result<Exit> {
        let mut flags = global.flags()?;
        flags.set_option("engine.kind", "--engine", self.engine.as_ref());
        with_place_flags(global, flags, async |place| {
            let CleanupStopped { stats, notice } = place.stop_cleanup(place.settings().engine).await?;
            if let Some(stats) = stats {
                return tell(&stats.into(), out);
            }
            if out.json {
                out.json(&json!({ "schema": "forkyard.cleanup/1", "notice": notice }))?;
            } else {
                out.line(notice.as_deref().unwrap_or_default())?;
            }
            Ok(Exit::Success)
        })
    }
}

/// Ends a cleanup of this machine's store, or of its task queue.
pub async fn stop(yard: &Yard, engine: EngineKind) -> Result<CleanupStopped> {
    match engine {
        EngineKind::Temporal => temporal::stop_cleanup(yard).await,
        EngineKind::Embedded => {
            sweep::stop_sweeping(&*yard.store).await.map_err(store_error)?;
            let stats = sweep::stats(&*yard.store).await.map_err(store_error)?;
            Ok(CleanupStopped { stats: Some(stats.into()), notice: None })
        }
    }
}

/// One look at this machine's orphans.
pub async fn once(yard: &Yard, max_age: Millis, dry_run: bool) -> Result<Cleaned> {
    let host = HostYard(yard.providers.values().cloned().collect::<Vec<Arc<dyn Provider>>>());
    if dry_run {
        return Ok(Cleaned {
            would_remove: Some(orphans(yard, &host, max_age).await?),
            ..Cleaned::default()
        });
    }
    leftovers(yard).await;
    let now = Clock::system().now();
    let swept = sweep::sweep(&*yard.store, &host, &yard.host, now, max_age).await;
    let (cleaned, error) = swept.map_err(store_error)?;
    Ok(Cleaned { cleaned, error, would_remove: None })
}

/// What crashes left of sandboxes that nobody knows any more.
pub async fn leftovers(yard: &Yard) {
    sweep_all(&yard.providers.values().cloned().collect::<Vec<_>>()).await;
    // Whoever lists sandboxes removes those whose process is no more, of every provider.
    if let Err(e) = yard.sandboxes.list().await {
        tracing::warn!(error = %e, "leftovers of sandboxes were not all removed");
    }
}

async fn sweep_all(providers: &[Arc<dyn Provider>]) {
    for provider in providers {
        if let Err(e) = provider.sweep().await {
            tracing::warn!(error = %e, "leftovers of sandboxes were not all removed");
        }
    }
}

fn tell_started(started: &CleanupStarted, notice: Option<&str>, out: &mut Output<'_>) -> Result<Exit> {
    let CleanupStarted { anew, interval } = started;
    if out.json {
        out.json(&json!({
            "schema": "forkyard.cleanup/1", "started": anew, "interval_ms": interval, "notice": notice,
        }))?;
        return Ok(Exit::Success);
    }
    let every = interval.map_or(String::new(), |i| format!(" every {i}"));
    let stop = "forkyard stop-cleanup --engine temporal";
    out.line(&match anew {
        true => format!("Every host with a worker looks for orphaned sandboxes{every}, until: {stop}"),
        false => format!(
            "A cleanup is under way already: every host looks{every}. To change that, stop it first: {stop}"
        ),
    })?;
    if let Some(notice) = notice {
        out.line(notice)?;
    }
    Ok(Exit::Success)
}

fn tell(stats: &SweepStats, out: &mut Output<'_>) -> Result<Exit> {
    if out.json {
        out.json(&json!({ "schema": "forkyard.cleanup/1", "stats": stats }))?;
    } else {
        let last = stats.last_cleanup.map_or("never".into(), |at| format!("{} UTC", day(at)));
        out.line(&format!("{} sandboxes removed so far, last look: {last}", stats.total_cleaned))?;
        if let Some(e) = &stats.last_error {
            out.line(&format!("The last look met an error: {}", plain(e)))?;
        }
    }
    Ok(Exit::Success)
}

fn report(done: &Cleaned, out: &mut Output<'_>) -> Result<Exit> {
    let (cleaned, error) = (done.cleaned, done.error.as_deref());
    if let Some(orphans) = &done.would_remove {
        if out.json {
            out.json(&json!({ "schema": "forkyard.cleanup/1", "would_remove": orphans }))?;
        } else {
            for id in orphans {
                out.line(&format!("would remove {id}"))?;
            }
            out.line(&format!("{} orphaned sandboxes.", orphans.len()))?;
        }
        return Ok(Exit::Success);
    }
    if out.json {
        out.json(&json!({ "schema": "forkyard.cleanup/1", "cleaned": cleaned, "error": error }))?;
    } else {
        out.line(&format!("{cleaned} orphaned sandboxes removed."))?;
    }
    match error {
        Some(e) if !out.json => {
            Err(CliError::failure(e).hint("run it again; `forkyard doctor` looks at the machine"))
        }
        Some(_) => Ok(Exit::Failure),
        None => Ok(Exit::Success),
    }
}

/// The same judgement as the sweep's, without its deeds.
async fn orphans(yard: &Yard, host: &HostYard, max_age: Millis) -> Result<Vec<String>> {
    let now = Clock::system().now();
    let mut orphans = Vec::new();
    for found in host.list().await.map_err(CliError::failure)? {
        let Some(run) = &found.run else { continue };
        if yard.store.run(run).await.map_err(store_error)?.is_some_and(|v| v.status != RunStatus::Ended) {
            continue;
        }
        let query = SandboxQuery { run: Some(run.clone()), ..Default::default() };
        let known = yard.store.sandboxes(&query).await.map_err(store_error)?;
        let due = match known.iter().find(|s| s.id == found.id).map(|s| s.state) {
            Some(SandboxState::HandedOver) => false,
            Some(SandboxState::Owed | SandboxState::Destroyed) => true,
            Some(SandboxState::Requested | SandboxState::Live) | None => {
                now.since(found.created_at) >= max_age
            }
        };
        if due {
            orphans.push(found.id.to_string());
        }
    }
    Ok(orphans)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bare_number_is_minutes() {
        let read = |text: &str| {
            minutes("--max-age", Some(text)).map(|t| Millis::parse(&Raw::Text(t.unwrap())).unwrap())
        };
        for (text, seconds) in
            [("15", 900), (" 180 ", 10_800), ("0.5", 30), ("0", 0), ("90s", 90), ("2h", 7200)]
        {
            assert_eq!(read(text).unwrap(), Millis::secs(seconds), "{text}");
        }
        for bad in ["x", "", "-1", "NaN", "inf", "1e400"] {
            assert_eq!(read(bad).unwrap_err().exit, Exit::Usage, "{bad}");
        }
        assert_eq!(minutes("--max-age", None).unwrap(), None);
    }
}
