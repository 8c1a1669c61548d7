//! Is it there, and can it work?

use std::time::Duration;

use axum::extract::State;
use serde::Serialize;
use utoipa::ToSchema;

use crate::App;
use crate::error::{ApiError, Code, Result};
use crate::extract::Json;

/// A store that takes longer than this to answer can't serve anybody.
const STORE_ANSWER: Duration = Duration::from_secs(3);

#[derive(Serialize, ToSchema)]
pub(super) struct Health {
    #[schema(example = "ok")]
    status: String,
    version: String,
}

impl Health {
    fn ok() -> Json<Health> {
        Json(Health { status: "ok".into(), version: env!("CARGO_PKG_VERSION").into() })
    }
}

/// The process answers.
#[utoipa::path(get, path = "/api/v1/health", tag = "server", security(()), responses((status = 200, body = Health)))]
pub(super) async fn health() -> Json<Health> {
    Health::ok()
}

/// The store answers too: requests can be served.
#[utoipa::path(get, path = "/api/v1/ready", tag = "server", security(()), responses((status = 200, body = Health)))]
pub(super) async fn ready(State(app): State<App>) -> Result<Json<Health>> {
    match tokio::time::timeout(STORE_ANSWER, app.store().identity()).await {
        Ok(Ok(_)) => Ok(Health::ok()),
        // Who asks may be anybody: no more than that.
        Ok(Err(_)) | Err(_) => Err(ApiError::new(Code::Unavailable, "the store does not answer")),
    }
}
