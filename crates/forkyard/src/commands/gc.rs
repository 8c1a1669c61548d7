use std::path::Path;
use std::time::Duration;

use clap::Args;
use forkyard_core::view::{RunStatus, RunView};
use forkyard_core::{Millis, RunId, SnapshotId, Timestamp};
use forkyard_engine::activities::{captured_key, open_repo};
use forkyard_engine::clock::Clock;
use forkyard_sandbox::{Labels, Provider, SnapshotInfo, bytes_in};
use forkyard_server::dto::chores::Freed;
use forkyard_store::{RunQuery, StoreError};
use serde_json::json;

use super::cleanup::{duration, leftovers};
use crate::cli::Global;
use crate::error::{CliError, Result};
use crate::exit::Exit;
use crate::follow::store_error;
use crate::output::Output;
use crate::render::plain;
use crate::runs::{captured, with_place};
use crate::yard::{Yard, decisions};

#[derive(Debug, Clone, Args)]
pub struct GcArgs {
    /// Only what is older than this.
    #[arg(long, value_name = "DURATION", default_value = "30d")]
    pub older_than: String,
    /// Say what would be removed.
    #[arg(long)]
    pub dry_run: bool,
}

/// Runs that are asked for at a time.
const PAGE: usize = 200;

/// All that is old, of this machine.
pub async fn collect(yard: &Yard, age: Millis, dry_run: bool) -> Result<Freed> {
    let gc = GcArgs { older_than: String::new(), dry_run };
    let before = Clock::system().now() - age;
    let mut freed = gc.remove_runs(yard, before).await?;
    gc.remove_orphans(yard, before, &mut freed).await?;
    gc.remove_caches(yard, before, &mut freed).await?;
    gc.remove_demos(yard, before, &mut freed);
    gc.remove_images(yard, Duration::from_millis(age.0), &mut freed).await;
    freed.bytes += decisions(&yard.settings.home).forget(Duration::from_millis(age.0), dry_run);
    if !dry_run {
        leftovers(yard).await;
        let (now, s) = (Clock::system().now(), &yard.settings);
        forget_access(yard, now - s.retention_audit, now - s.retention_tokens).await.map_err(store_error)?;
    }
    Ok(freed)
}

impl GcArgs {
    pub fn run(&self, global: &Global, out: &mut Output<'_>) -> Result<Exit> {
        let age = duration("--older-than", &self.older_than)?;
        let freed = with_place(global, async |place| place.gc(age, self.dry_run).await)?;
        if out.json {
            out.json(&json!({ "schema": "forkyard.gc/1", "dry_run": self.dry_run, "freed": freed }))?;
            return Ok(Exit::Success);
        }
        let word = if self.dry_run { "would remove" } else { "removed" };
        for run in &freed.runs {
            out.line(&format!("{word} run {run}"))?;
        }
        for id in &freed.snapshots {
            out.line(&format!("{word} snapshot {id}"))?;
        }
        for image in &freed.images {
            out.line(&format!("{word} prepared image {}", plain(image)))?;
        }
        for folder in &freed.folders {
            out.line(&format!("{word} {}", plain(folder)))?;
        }
        for left in &freed.left {
            out.line(&format!("left {}", plain(left)))?;
        }
        let counts = [
            (freed.runs.len(), "run"),
            (freed.snapshots.len(), "snapshot"),
            (freed.captured, "captured file"),
            (freed.images.len(), "prepared image"),
            (freed.folders.len(), "folder"),
        ];
        let counts = counts.map(|(n, what)| format!("{n} {what}{}", if n == 1 { "" } else { "s" }));
        let tense = if self.dry_run { "to free" } else { "freed" };
        out.line(&format!("{}: {} {tense}", counts.join(", "), size(freed.bytes)))?;
        Ok(Exit::Success)
    }

    /// Runs that ended before then, with all that belongs to them.
    async fn remove_runs(&self, yard: &Yard, before: Timestamp) -> Result<Freed> {
        let mut freed = Freed::default();
        for run in old_runs(yard, before).await? {
            if let Err(why) = self.remove_run(yard, &run, &mut freed).await {
                freed.left.push(format!("{}: {}", run.id, why.message));
            }
        }
        Ok(freed)
    }

    async fn remove_snapshot(
        &self,
        provider: &dyn Provider,
        s: SnapshotInfo,
        freed: &mut Freed,
    ) -> Result<()> {
        if !self.dry_run {
            provider.remove_snapshot(&s.id).await?;
        }
        freed.bytes += s.bytes.unwrap_or(0);
        freed.snapshots.push(s.id.to_string());
        Ok(())
    }

    /// Snapshots whose run nobody knows any more. Those that a user made have no run, and stay.
    async fn remove_orphans(&self, yard: &Yard, before: Timestamp, freed: &mut Freed) -> Result<()> {
        for provider in yard.providers.values() {
            for s in provider.measured_snapshots().await? {
                let run = s.labels.get("run").and_then(|r| RunId::new(r.as_str()).ok());
                let Some(run) = run.filter(|_| s.created_at <= before) else { continue };
                if yard.store.run(&run).await.map_err(store_error)?.is_none() {
                    self.remove_snapshot(&**provider, s, freed).await?;
                }
            }
        }
        Ok(())
    }

    async fn remove_caches(&self, yard: &Yard, before: Timestamp, freed: &mut Freed) -> Result<()> {
        for dir in yard.git.leftovers() {
            self.remove_folder(&dir, freed)?;
        }
        for cache in yard.git.caches().await? {
            // In a dry run, results of runs that would have gone before it are still there.
            let is_wanted = cache.results.iter().any(|run| !freed.runs.contains(run));
            if cache.used > before || is_wanted {
                continue;
            }
            let bytes = bytes_in(&cache.dir);
            if self.dry_run || yard.git.remove_cache(&cache).await? {
                freed.bytes += bytes;
                freed.folders.push(cache.dir.display().to_string());
            }
        }
        Ok(())
    }

    /// Images that providers prepared and nobody has used for so long.
    async fn remove_images(&self, yard: &Yard, age: Duration, freed: &mut Freed) {
        // In a dry run they are still there.
        let gone: Vec<SnapshotId> =
            freed.snapshots.iter().filter_map(|id| SnapshotId::new(id).ok()).collect();
        for provider in yard.providers.values() {
            match provider.unused_images(age, &gone, !self.dry_run).await {
                Ok(images) => {
                    freed.bytes += images.iter().map(|image| image.bytes).sum::<u64>();
                    freed.images.extend(images.into_iter().map(|image| image.name));
                }
                Err(e) => freed.left.push(format!("prepared images: {e}")),
            }
        }
    }

    /// The store goes last: whatever fails before it is tried again next time.
    async fn remove_run(&self, yard: &Yard, view: &RunView, freed: &mut Freed) -> Result<()> {
        // One that was kept is its user's, and nobody could say so once the run is gone.
        let labels = Labels::from([("run".to_string(), view.id.to_string())]);
        for provider in yard.providers.values() {
            if let Some(kept) = provider.list(&labels).await?.first() {
                let message =
                    format!("its sandbox {0} is still there: `forkyard sandbox rm {0}` removes it", kept.id);
                return Err(CliError::failure(message));
            }
        }
        for provider in yard.providers.values() {
            for s in provider.measured_snapshots().await? {
                if s.labels.get("run").map(String::as_str) != Some(view.id.as_str()) {
                    continue;
                }
                self.remove_snapshot(&**provider, s, freed).await?;
            }
        }
        let (captured, bytes) = captured_files(yard, &view.id).await?;
        if !self.dry_run {
            // A repository that is gone keeps nothing.
            if let Ok(repo) = open_repo(&yard.git, &view.repo).await {
                yard.git.drop_run(&repo, &view.id).await?;
            }
        }
        let logs = yard.settings.log_dir.clone().unwrap_or_else(|| yard.settings.home.join("logs"));
        self.remove_folder(&logs.join(view.id.as_str()), freed)?;
        let worker_log = yard.settings.home.join("logs").join(format!("worker-{}.log", view.id));
        if !self.dry_run {
            let _ = std::fs::remove_file(worker_log);
            yard.store.delete_run(&view.id).await.map_err(store_error)?;
        }
        freed.captured += captured;
        freed.bytes += bytes;
        freed.runs.push(view.id.to_string());
        Ok(())
    }

    /// Repositories that `demo` made, by their own age.
    fn remove_demos(&self, yard: &Yard, before: Timestamp, freed: &mut Freed) {
        let Ok(entries) = std::fs::read_dir(yard.settings.home.join("demo")) else { return };
        for entry in entries.flatten() {
            let made = entry.metadata().and_then(|m| m.modified()).ok();
            let made = made.and_then(|t| t.duration_since(std::time::UNIX_EPOCH).ok());
            let old = made.is_some_and(|t| t.as_millis() <= u128::from(before.0));
            if old && let Err(e) = self.remove_folder(&entry.path(), freed) {
                freed.left.push(format!("{}: {}", entry.path().display(), e.message));
            }
        }
    }

    fn remove_folder(&self, dir: &Path, freed: &mut Freed) -> Result<()> {
        if !dir.is_dir() {
            return Ok(());
        }
        let bytes = bytes_in(dir);
        if !self.dry_run {
            std::fs::remove_dir_all(dir)?;
        }
        freed.bytes += bytes;
        freed.folders.push(dir.display().to_string());
        Ok(())
    }
}

/// How often a process that stays looks for what was kept long enough.
const RETENTION_EVERY: Duration = Duration::from_secs(600);

/// Removes what was kept long enough by the settings, for as long as this is polled.
pub async fn keep_in_time(yard: &Yard) {
    let s = &yard.settings;
    loop {
        let now = Clock::system().now();
        if let Some(age) = s.retention_runs {
            forget_runs(yard, now - age).await;
        }
        if let Err(e) = forget_access(yard, now - s.retention_audit, now - s.retention_tokens).await {
            tracing::warn!("the old audit trail or old tokens can't be removed: {e}");
        }
        tokio::time::sleep(RETENTION_EVERY).await;
    }
}

async fn forget_runs(yard: &Yard, before: Timestamp) {
    let gc = GcArgs { older_than: String::new(), dry_run: false };
    match gc.remove_runs(yard, before).await {
        Ok(freed) => {
            for run in &freed.runs {
                tracing::info!(%run, "was kept long enough and is removed");
            }
            for left in &freed.left {
                tracing::warn!("a run that was kept long enough can't be removed: {left}");
            }
        }
        Err(e) => tracing::warn!("old runs can't be removed: {}", e.message),
    }
}

async fn forget_access(yard: &Yard, deeds: Timestamp, tokens: Timestamp) -> Result<(), StoreError> {
    let gone = yard.store.forget_tokens(tokens).await?;
    if gone > 0 {
        tracing::info!(gone, "tokens were over long enough and are removed");
    }
    while yard.store.forget_deeds(deeds).await? > 0 {}
    Ok(())
}

/// How many files a run has brought back beside its diffs, and their size. They go with the run.
async fn captured_files(yard: &Yard, run: &RunId) -> Result<(usize, u64)> {
    let (mut files, mut bytes) = (0, 0);
    for fork in yard.store.forks(run).await.map_err(store_error)? {
        for path in captured(yard, run, fork.fork).await? {
            if let Some(data) =
                yard.store.blob(&captured_key(run, fork.fork, &path)).await.map_err(store_error)?
            {
                files += 1;
                bytes += data.len() as u64;
            }
        }
    }
    Ok((files, bytes))
}

async fn old_runs(yard: &Yard, before: Timestamp) -> Result<Vec<RunView>> {
    let mut old = Vec::new();
    let mut query = RunQuery { limit: PAGE, ..RunQuery::default() };
    loop {
        let page = yard.store.runs(&query).await.map_err(store_error)?;
        let Some(last) = page.last() else { return Ok(old) };
        query.before = Some((last.created_at, last.id.clone()));
        old.extend(
            page.into_iter()
                .filter(|r| r.status == RunStatus::Ended && r.ended_at.is_some_and(|at| at <= before)),
        );
    }
}

pub fn size(bytes: u64) -> String {
    const UNITS: [&str; 4] = ["KiB", "MiB", "GiB", "TiB"];
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    let mut n = bytes as f64 / 1024.0;
    let mut unit = 0;
    while n >= 1024.0 && unit + 1 < UNITS.len() {
        n /= 1024.0;
        unit += 1;
    }
    format!("{n:.1} {}", UNITS[unit])
}
