//! Who steered what.

use axum::extract::State;
use forkyard_store::AuditQuery;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use crate::App;
use crate::error::Result;
use crate::extract::{Json, Query};
use crate::page;

#[derive(Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct ReadAudit {
    /// A run (with its forks), a fork as RUN/N, a sandbox or a token.
    target: Option<String>,
    #[param(minimum = 1, maximum = 500)]
    limit: Option<u32>,
    /// `next_cursor` of the page before.
    cursor: Option<String>,
}

#[derive(Serialize, ToSchema)]
pub(super) struct AuditPage {
    entries: Vec<AuditEntry>,
    /// For the next page; null at the end.
    next_cursor: Option<String>,
}

#[derive(Serialize, ToSchema)]
pub(super) struct AuditEntry {
    id: u64,
    /// Milliseconds since 1970.
    at: u64,
    token_id: String,
    who: String,
    /// `run.pause`, `fork.message`, `sandbox.exec` …
    action: String,
    target: String,
    detail: serde_json::Value,
}

/// What was done with which token, newest first.
#[utoipa::path(get, path = "/api/v1/audit", tag = "server", params(ReadAudit), security(("token" = ["admin"])),
    responses((status = 200, body = AuditPage)))]
pub(super) async fn read_audit(
    State(app): State<App>,
    Query(q): Query<ReadAudit>,
) -> Result<Json<AuditPage>> {
    let limit = page::limit(q.limit)?;
    let before = q.cursor.as_deref().map(page::read_number_cursor).transpose()?;
    // What the store could not hold is nobody's name.
    let target = q.target.filter(|t| !t.contains('\0'));
    let mut found = app.store().audit(&AuditQuery { before, target, limit: limit + 1 }).await?;
    let more = found.len() > limit;
    found.truncate(limit);
    let next_cursor = found.last().filter(|_| more).map(|e| e.id.to_string());
    let entry = |e: forkyard_store::AuditEntry| AuditEntry {
        id: e.id,
        at: e.deed.at.0,
        token_id: e.deed.token,
        who: e.deed.who,
        action: e.deed.action,
        target: e.deed.target,
        detail: e.deed.detail,
    };
    Ok(Json(AuditPage { entries: found.into_iter().map(entry).collect(), next_cursor }))
}
