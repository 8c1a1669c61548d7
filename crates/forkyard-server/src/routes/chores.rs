//! Chores of the server's machine.

use std::sync::Arc;

use axum::Extension;
use axum::extract::State;
use forkyard_core::Millis;
use serde_json::json;

use crate::App;
use crate::access::Principal;
use crate::chores::Chores;
use crate::dto::chores::{Chore, Cleaned, CleanupStopped, Freed, StopCleanup};
use crate::error::{ApiError, Code, Result};
use crate::extract::Json;

fn chores(app: &App) -> Result<&Arc<dyn Chores>> {
    let none = || ApiError::new(Code::Unsupported, "this server does no chores");
    app.parts().chores.as_ref().ok_or_else(none)
}

/// Removes sandboxes of runs that nobody drives any more.
#[utoipa::path(post, path = "/api/v1/cleanup", tag = "server", request_body = Chore, security(("token" = ["admin"])),
    responses((status = 200, body = Cleaned)))]
pub(super) async fn cleanup(
    State(app): State<App>,
    Extension(by): Extension<Principal>,
    Json(r): Json<Chore>,
) -> Result<Json<Cleaned>> {
    app.record(&by, "server.cleanup", "server", json!(r)).await?;
    Ok(Json(chores(&app)?.cleanup(Millis(r.older_than_ms), r.dry_run).await?))
}

/// Ends a cleanup that was started by `forkyard cleanup`, and says what it has done.
#[utoipa::path(post, path = "/api/v1/cleanup/stop", tag = "server", request_body = StopCleanup, security(("token" = ["admin"])),
    responses((status = 200, body = CleanupStopped)))]
pub(super) async fn stop_cleanup(
    State(app): State<App>,
    Extension(by): Extension<Principal>,
    Json(r): Json<StopCleanup>,
) -> Result<Json<CleanupStopped>> {
    app.record(&by, "server.stop_cleanup", "server", json!(r)).await?;
    Ok(Json(chores(&app)?.stop_cleanup(r.engine.into()).await?))
}

/// Removes old runs, snapshots and caches.
#[utoipa::path(post, path = "/api/v1/gc", tag = "server", request_body = Chore, security(("token" = ["admin"])),
    responses((status = 200, body = Freed)))]
pub(super) async fn gc(
    State(app): State<App>,
    Extension(by): Extension<Principal>,
    Json(r): Json<Chore>,
) -> Result<Json<Freed>> {
    app.record(&by, "server.gc", "server", json!(r)).await?;
    Ok(Json(chores(&app)?.gc(Millis(r.older_than_ms), r.dry_run).await?))
}
