//! What is done to the server's machine as a whole, by whoever opened the server on it.

use forkyard_core::Millis;
use forkyard_core::view::EngineKind;
use futures::future::BoxFuture;

use crate::dto::chores::{Cleaned, CleanupStopped, Freed};
use crate::error::Result;

pub trait Chores: Send + Sync {
    /// Removes orphaned sandboxes older than this, or says which it would.
    fn cleanup(&self, max_age: Millis, dry_run: bool) -> BoxFuture<'_, Result<Cleaned>>;
    /// Ends a cleanup that a process does, or the service that drives runs there.
    fn stop_cleanup(&self, engine: EngineKind) -> BoxFuture<'_, Result<CleanupStopped>>;
    /// Removes runs, snapshots and caches older than this, or says which it would.
    fn gc(&self, older_than: Millis, dry_run: bool) -> BoxFuture<'_, Result<Freed>>;
}
