//! Tokens: made, listed, revoked. Only an admin's token may.

use axum::Extension;
use axum::extract::State;
use axum::http::StatusCode;
use forkyard_core::{Millis, Timestamp};
use forkyard_store::StoreError;
use serde::{Deserialize, Serialize};
use serde_json::json;
use utoipa::ToSchema;

use super::session::Scope;
use crate::App;
use crate::access::{Principal, make_token};
use crate::error::{ApiError, Code, Result};
use crate::extract::{Json, Path};

const MAX_NAME_CHARS: usize = 100;
const MAX_LIFETIME: Millis = Millis::secs(10 * 366 * 24 * 3600);

#[derive(Serialize, ToSchema)]
pub(super) struct Token {
    id: String,
    name: String,
    scope: Scope,
    /// Milliseconds since 1970.
    created_at: u64,
    expires_at: Option<u64>,
    revoked_at: Option<u64>,
}

impl From<forkyard_store::Token> for Token {
    fn from(t: forkyard_store::Token) -> Token {
        let ms = |t: Option<Timestamp>| t.map(|t| t.0);
        Token {
            id: t.id,
            name: t.name,
            scope: t.scope.into(),
            created_at: t.created_at.0,
            expires_at: ms(t.expires_at),
            revoked_at: ms(t.revoked_at),
        }
    }
}

#[derive(Serialize, ToSchema)]
pub(super) struct Tokens {
    tokens: Vec<Token>,
}

#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct CreateToken {
    /// Who or what it is for.
    #[schema(min_length = 1, max_length = 100)]
    name: String,
    scope: Scope,
    /// It ends after this time; never if it is not said.
    #[serde(default)]
    lifetime_ms: Option<u64>,
}

#[derive(Serialize, ToSchema)]
pub(super) struct NewToken {
    #[serde(flatten)]
    about: Token,
    /// Shown this once.
    token: String,
}

/// All tokens, revoked and expired ones included; browsers' sessions not.
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
    let name = r.name.trim();
    if name.is_empty() || name.chars().count() > MAX_NAME_CHARS || name.chars().any(char::is_control) {
        return Err(ApiError::field("name", name, "can't be used", "write 1 to 100 characters"));
    }
    if r.lifetime_ms.is_some_and(|ms| ms == 0 || ms > MAX_LIFETIME.0) {
        return Err(ApiError::field(
            "lifetime_ms",
            format!("{:?}", r.lifetime_ms),
            "is out of range",
            "give 1 ms to ten years",
        ));
    }
    let scope = r.scope.into();
    app.record(&by, "token.create", name, json!({ "scope": scope, "lifetime_ms": r.lifetime_ms })).await?;
    let made = make_token(app.store(), app.now(), name, scope, r.lifetime_ms.map(Millis)).await?;
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
