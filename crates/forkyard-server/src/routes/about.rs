//! This server and its machine: what it offers, and what `forkyard doctor` says of it.

use std::sync::Arc;

use axum::extract::State;
use forkyard_core::spec::MAX_FORKS;

use crate::App;
use crate::dto::about::{About, Check, CheckHealth, Checks};
use crate::error::{ApiError, Code, Result};
use crate::extract::Json;

/// Looks at the machine, which takes a moment and blocks.
pub type Doctor = Arc<dyn Fn() -> Vec<Check> + Send + Sync>;

/// What this server offers, and what a run is where its request says nothing.
#[utoipa::path(get, path = "/api/v1/about", tag = "server", security(("token" = ["read"])),
    responses((status = 200, body = About)))]
pub(super) async fn about(State(app): State<App>) -> Json<About> {
    let parts = app.parts();
    Json(About {
        version: env!("CARGO_PKG_VERSION").into(),
        now: app.now().0,
        root: parts.root.as_ref().map(|r| r.display().to_string()),
        models: parts.models.names(),
        secrets: parts.secrets.iter().cloned().collect(),
        max_forks: MAX_FORKS,
        defaults: (&parts.defaults).into(),
    })
}

/// What this machine offers, found by trying it, and how to get the rest.
#[utoipa::path(get, path = "/api/v1/doctor", tag = "server", security(("token" = ["read"])),
    responses((status = 200, body = Checks)))]
pub(super) async fn doctor(State(app): State<App>) -> Result<Json<Checks>> {
    let Some(doctor) = app.doctor() else {
        return Err(ApiError::new(Code::Unsupported, "this server can't examine its machine")
            .hint("run `forkyard doctor` there"));
    };
    let looked = tokio::task::spawn_blocking(move || doctor()).await;
    let checks = looked.map_err(|e| ApiError::new(Code::Internal, format!("the examination failed: {e}")))?;
    Ok(Json(Checks { sound: checks.iter().all(|c| c.health != CheckHealth::Bad), checks }))
}
