//! Tokens: made, listed, revoked. Only an admin's token may.

use axum::Extension;
use axum::extract::State;
use axum::http::StatusCode;
use forkyard_core::Millis;
use forkyard_store::StoreError;
use serde_json::json;

use crate::App;
use crate::access::{Principal, make_token};
use crate::dto::token::{CreateToken, NewToken, Tokens};
use crate::error::{ApiError, Code, Result};
use crate::extract::{Json, Path};

/// All tokens, revoked and expired ones included until they are forgotten; browsers' sessions not.
#[utoipa::path(get, path = "/api/v1/tokens", tag = "server", security(("token" = ["admin"])),
    responses((status = 200, body = Tokens)))]
pub(super) async fn list_tokens(State(app): State<App>) -> Result<Json<Tokens>> {
    let all = app.store().tokens().await?;
    Ok(Json(Tokens { tokens: all.into_iter().filter(|t| t.parent.is_none()).map(Into::into).collect() }))
}

/// Makes a token.
#[utoipa::path(post, path = "/api/v1/tokens", tag = "server", request_body = CreateToken, security(("token" = ["admin"])),
    responses((status = 201, body = NewToken)))]
pub(super) async fn create_token(
    State(app): State<App>,
    Extension(by): Extension<Principal>,
    Json(r): Json<CreateToken>,
) -> Result<(StatusCode, Json<NewToken>)> {
    let CreateToken { name, scope, lifetime_ms } = r.checked()?;
    app.record(&by, "token.create", &name, json!({ "scope": scope, "lifetime_ms": lifetime_ms })).await?;
    let lifetime = lifetime_ms.map(Millis);
    let made = make_token(app.store(), app.now(), &name, scope.into(), lifetime).await?;
    Ok((StatusCode::CREATED, Json(NewToken { about: made.token.into(), token: made.text })))
}

/// Ends a token and the sessions that it opened, at once.
#[utoipa::path(delete, path = "/api/v1/tokens/{token}", tag = "server", params(("token" = String, Path)),
    security(("token" = ["admin"])), responses((status = 204)))]
pub(super) async fn revoke_token(
    State(app): State<App>,
    Extension(by): Extension<Principal>,
    Path(id): Path<String>,
) -> Result<StatusCode> {
    let missing = || ApiError::new(Code::TokenNotFound, "there is no such token");
    if app.store().token(&id).await?.is_none() {
        return Err(missing());
    }
    if id == by.owner() {
        return Err(ApiError::new(Code::Conflict, "this is the token that you use")
            .hint("revoke it with another, or with `forkyard token revoke`"));
    }
    app.record(&by, "token.revoke", &id, serde_json::Value::Null).await?;
    match app.revoke(&id).await {
        Err(StoreError::NotFound { .. }) => Err(missing()),
        other => other.map(|()| StatusCode::NO_CONTENT).map_err(Into::into),
    }
}
