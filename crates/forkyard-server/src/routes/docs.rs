//! The API's own description, and a page that shows it. The page loads nothing from anywhere else.

use axum::extract::State;
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;

use crate::App;

const PAGE: &str = include_str!("../../assets/reference.html");
const SCRIPT: &str = include_str!("../../assets/reference.js");

/// This description.
#[utoipa::path(get, path = "/api/v1/openapi.json", tag = "server", security(()),
    responses((status = 200, content_type = "application/json", body = serde_json::Value)))]
pub(super) async fn openapi_json(State(app): State<App>) -> Response {
    typed("application/json", app.openapi())
}

/// This description, for people.
#[utoipa::path(get, path = "/api/v1/docs", tag = "server", security(()),
    responses((status = 200, content_type = "text/html", body = String)))]
pub(super) async fn reference() -> Response {
    let mut response = typed("text/html; charset=utf-8", Bytes::from_static(PAGE.as_bytes()));
    let policy = "default-src 'none'; script-src 'self'; style-src 'unsafe-inline'; connect-src 'self'; \
                  base-uri 'none'; form-action 'none'; frame-ancestors 'none'";
    response.headers_mut().insert(header::CONTENT_SECURITY_POLICY, HeaderValue::from_static(policy));
    response
}

/// What draws that page.
#[utoipa::path(get, path = "/api/v1/docs.js", tag = "server", security(()),
    responses((status = 200, content_type = "text/javascript", body = String)))]
pub(super) async fn reference_script() -> Response {
    typed("text/javascript; charset=utf-8", Bytes::from_static(SCRIPT.as_bytes()))
}

fn typed(kind: &'static str, body: Bytes) -> Response {
    ([(header::CONTENT_TYPE, HeaderValue::from_static(kind))], body).into_response()
}
