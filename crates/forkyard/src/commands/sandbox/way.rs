//! A command's way out of its sandbox, where several processes use that at once.
//!
//! Whoever offers the proxy takes connections of all commands inside, and they end with it. So one process at a time offers it,
//! and whoever waits goes on with it afterwards.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use forkyard_core::view::RunStatus;
use forkyard_core::{RunId, SandboxId};
use forkyard_sandbox::{Provider, Sandbox, SandboxInfo};
use rustix::fs::{FlockOperation, Mode, OFlags};
use tokio::task::JoinHandle;

use super::{find, not_reached};
use crate::error::Result;
use crate::place::Place;
use crate::runs::is_abandoned;

/// How soon after its holder's end another one offers the proxy: connections wait in the meantime.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// Held for as long as this process runs a command.
pub struct Way {
    _lock: Option<Lock>,
    waiting: Option<JoinHandle<()>>,
}

impl Drop for Way {
    fn drop(&mut self) {
        if let Some(waiting) = &self.waiting {
            waiting.abort();
        }
    }
}

impl Way {
    /// Of who made the sandbox, and offers its proxy.
    pub fn of_maker(home: &Path, id: &SandboxId) -> Way {
        Way { _lock: Lock::get(&path(home, id)), waiting: None }
    }
}

/// For a command: with a way out that no other command's connections come to depend on.
pub async fn attach(place: &dyn Place, id: &SandboxId) -> Result<(Arc<dyn Sandbox>, Way)> {
    let (provider, info) = find(place, id).await?;
    let failed = |e| not_reached(e, &info);
    let none = Way { _lock: None, waiting: None };
    let Some(yard) = place.here() else {
        return Ok((provider.attach_beside(id, info.attempt).await.map_err(failed)?, none));
    };
    if is_driven(place, &info).await? {
        return Ok((provider.observe(id, info.attempt).await.map_err(failed)?, none));
    }
    let path = path(&yard.settings.home, id);
    if let Some(lock) = Lock::get(&path) {
        let sandbox = provider.attach_beside(id, info.attempt).await.map_err(failed)?;
        return Ok((sandbox, Way { _lock: Some(lock), waiting: None }));
    }
    let sandbox = provider.observe(id, info.attempt).await.map_err(failed)?;
    let waiting = tokio::spawn(offer_later(provider, info, path));
    Ok((sandbox, Way { _lock: None, waiting: Some(waiting) }))
}

async fn offer_later(provider: Arc<dyn Provider>, info: SandboxInfo, path: PathBuf) {
    let _lock = loop {
        if let Some(lock) = Lock::get(&path) {
            break lock;
        }
        tokio::time::sleep(LOOK_EVERY).await;
    };
    match provider.attach_beside(&info.id, info.attempt).await {
        // Until the command has ended.
        Ok(_offers) => std::future::pending().await,
        Err(e) => tracing::debug!(sandbox = %info.id, error = %e, "it has no way out"),
    }
}

/// The process that drives a run offers the proxy of its sandboxes.
async fn is_driven(place: &dyn Place, info: &SandboxInfo) -> Result<bool> {
    let run = info.labels.get("run").and_then(|run| RunId::new(run.as_str()).ok());
    let Some(run) = run else { return Ok(false) };
    match place.run(&run).await? {
        Some(view) if view.status != RunStatus::Ended => Ok(!is_abandoned(place, &view).await?),
        Some(_) | None => Ok(false),
    }
}

fn path(home: &Path, id: &SandboxId) -> PathBuf {
    home.join("egress").join(format!("{id}.lock"))
}

/// Gone with its process, however that ends.
struct Lock {
    path: PathBuf,
    _file: std::os::fd::OwnedFd,
}

impl Lock {
    /// None if another process has it.
    fn get(path: &Path) -> Option<Lock> {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC;
        loop {
            let file = rustix::fs::open(path, flags, Mode::from_raw_mode(0o600)).ok()?;
            rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).ok()?;
            let (held, named) = (rustix::fs::fstat(&file).ok()?, path.metadata());
            // Whoever held it before may have removed it: only the file that the name leads to counts.
            if named.is_ok_and(|named| (named.dev(), named.ino()) == (held.st_dev, held.st_ino)) {
                return Some(Lock { path: path.to_path_buf(), _file: file });
            }
        }
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}
