//! What Forkyard keeps of git in its own home: caches of remote repositories, and what dead processes left behind.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use forkyard_core::Timestamp;

use super::command::{Git, git, io_error};
use super::error::Result;
use super::repo::Repo;

/// Touched whenever somebody fetches.
const USED: &str = "forkyard-used";

/// The cache of one URL.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cache {
    pub dir: PathBuf,
    pub used: Timestamp,
    /// Runs whose results it holds: they were not dropped.
    pub results: BTreeSet<String>,
}

pub(super) fn mark_used(git_dir: &Path) -> Result<()> {
    fs::write(git_dir.join(USED), "").map_err(io_error)
}

impl Git {
    pub async fn caches(&self) -> Result<Vec<Cache>> {
        self.prepare().await?;
        let mut caches = vec![];
        for dir in self.folders(&self.config.dir) {
            let marked = fs::metadata(dir.join(USED)).and_then(|m| m.modified());
            let Ok(used) = marked else { continue };
            caches.push(Cache { used: timestamp(used), results: self.results_in(&dir).await?, dir });
        }
        Ok(caches)
    }

    /// Unless it was used since, or holds results.
    pub async fn remove_cache(&self, cache: &Cache) -> Result<bool> {
        let _lock = self.lock(&cache.dir.with_extension("lock")).await?;
        let used = fs::metadata(cache.dir.join(USED)).and_then(|m| m.modified()).map(timestamp);
        if used.map_err(io_error)? != cache.used || !self.results_in(&cache.dir).await?.is_empty() {
            return Ok(false);
        }
        fs::remove_dir_all(&cache.dir).map_err(io_error)?;
        Ok(true)
    }

    async fn results_in(&self, dir: &Path) -> Result<BTreeSet<String>> {
        let repo = Repo { git_dir: dir.into(), common_dir: dir.into(), work_tree: None };
        let call = git(["for-each-ref", "--format=%(refname)", "refs/forkyard/"]);
        let refs = self.run(self.on_refs(&repo, call)).await?.text();
        let runs = refs.lines().filter_map(|r| r.strip_prefix("refs/forkyard/")?.split('/').next());
        Ok(runs.filter(|run| *run != "cache").map(String::from).collect())
    }

    /// Scratch repositories whose process is gone.
    pub fn leftovers(&self) -> Vec<PathBuf> {
        let gone = |dir: &PathBuf| {
            let name = dir.file_name().and_then(|n| n.to_str()).unwrap_or_default();
            let pid = name.split('-').next().and_then(|pid| pid.parse::<u32>().ok());
            pid.is_some_and(|pid| !fs::exists(format!("/proc/{pid}")).unwrap_or(true))
        };
        self.folders(&self.config.dir.join("quarantine")).into_iter().filter(gone).collect()
    }

    fn folders(&self, dir: &Path) -> Vec<PathBuf> {
        let mut found: Vec<PathBuf> = fs::read_dir(dir)
            .into_iter()
            .flatten()
            .flatten()
            .filter(|e| e.file_type().is_ok_and(|t| t.is_dir()))
            .map(|e| e.path())
            .collect();
        found.sort();
        found
    }
}

fn timestamp(at: SystemTime) -> Timestamp {
    Timestamp(at.duration_since(UNIX_EPOCH).map_or(0, |d| u64::try_from(d.as_millis()).unwrap_or(u64::MAX)))
}
