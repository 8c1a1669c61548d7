//! Logging in from a browser, and who one is.

use axum::Extension;
use axum::extract::State;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use forkyard_core::Millis;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use crate::App;
use crate::access::{Principal, SESSION_DAYS, Via, open_session, session_cookie};
use crate::assets;
use crate::dto::token::Scope;
use crate::error::{ApiError, Code, Result};
use crate::extract::{Json, Query};

const SESSION: Millis = Millis::secs(SESSION_DAYS * 24 * 3600);

#[derive(Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct LoginCode {
    /// Of a login link; it works once.
    code: String,
}

/// Where a login link leads: sets the session's cookie and goes on to the dashboard.
#[utoipa::path(get, path = "/login", tag = "server", security(()), params(LoginCode),
    responses((status = 303, description = "Logged in; on to /")))]
pub(super) async fn login(
    State(app): State<App>,
    headers: HeaderMap,
    Query(given): Query<LoginCode>,
) -> Result<Response> {
    let browser = headers.get(header::ACCEPT).is_some_and(|a| a.as_bytes().starts_with(b"text/html"));
    match open(&app, &given).await {
        Err(e) if browser => Ok(assets::failed(e.code.status()).unwrap_or_else(|| e.into_response())),
        opened => opened,
    }
}

async fn open(app: &App, given: &LoginCode) -> Result<Response> {
    let used = || {
        ApiError::new(Code::Unauthenticated, "this login link was used before, or is too old")
            .hint("`forkyard serve` prints one when it starts; POST /api/v1/login-links makes another")
    };
    let token = app.codes().take(&given.code, app.now()).ok_or_else(used)?;
    let token = app.store().token(&token).await?.filter(|t| t.revoked_at.is_none()).ok_or_else(used)?;
    if token.expires_at.is_some_and(|at| at <= app.now()) {
        return Err(used());
    }
    let session = open_session(app.store(), app.now(), &token, SESSION).await?;
    let lifetime = session.token.expires_at.map_or(SESSION, |at| at.since(session.token.created_at));
    let cookie = session_cookie(&session.text, app.parts().secure, lifetime);
    let cookie = HeaderValue::from_str(&cookie).map_err(|e| ApiError::new(Code::Internal, e.to_string()))?;
    let mut headers = HeaderMap::new();
    headers.insert(header::SET_COOKIE, cookie);
    headers.insert(header::LOCATION, HeaderValue::from_static("/"));
    Ok((StatusCode::SEE_OTHER, headers).into_response())
}

/// Who asks.
#[derive(Serialize, ToSchema)]
pub(super) struct Whoami {
    token_id: String,
    name: String,
    scope: Scope,
    /// A browser's session, by cookie.
    session: bool,
}

/// Who this token or session is.
#[utoipa::path(get, path = "/api/v1/session", tag = "server", security(("token" = ["read"])),
    responses((status = 200, body = Whoami)))]
pub(super) async fn whoami(Extension(by): Extension<Principal>) -> Json<Whoami> {
    Json(Whoami {
        token_id: by.owner().to_string(),
        name: by.name.clone(),
        scope: by.scope.into(),
        session: by.via == Via::Cookie,
    })
}

/// Ends a browser's session. A token's own holder revokes the token instead.
#[utoipa::path(delete, path = "/api/v1/session", tag = "server", security(("token" = ["read"])),
    responses((status = 204)))]
pub(super) async fn logout(State(app): State<App>, Extension(by): Extension<Principal>) -> Result<Response> {
    if by.via != Via::Cookie {
        return Err(ApiError::new(Code::Conflict, "this is a token, not a session")
            .hint("DELETE /api/v1/tokens/ID revokes a token"));
    }
    app.revoke(&by.token).await?;
    let gone = session_cookie("", app.parts().secure, Millis::ZERO);
    let gone = HeaderValue::from_str(&gone).map_err(|e| ApiError::new(Code::Internal, e.to_string()))?;
    Ok((StatusCode::NO_CONTENT, [(header::SET_COOKIE, gone)]).into_response())
}

#[derive(Serialize, ToSchema)]
pub(super) struct LoginLink {
    /// On this server; works once, for ten minutes.
    path: String,
}

/// A link that logs a browser in with this token's scope.
#[utoipa::path(post, path = "/api/v1/login-links", tag = "server", security(("token" = ["read"])),
    responses((status = 201, body = LoginLink)))]
pub(super) async fn create_login_link(
    State(app): State<App>,
    Extension(by): Extension<Principal>,
) -> Result<(StatusCode, Json<LoginLink>)> {
    app.record(&by, "login_link.create", by.owner(), serde_json::Value::Null).await?;
    Ok((StatusCode::CREATED, Json(LoginLink { path: app.login_link("", by.owner()) })))
}
