//! The inference endpoint: Anthropic's Messages API for whoever works inside, with a sandbox's token in place of a key. Money
//! is reserved and settled as for the built-in agent; the provider's key stays here.

use std::sync::Arc;

use axum::Extension;
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::extract::rejection::BytesRejection;
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use forkyard_engine::inside::{Asked, Claims, Refusal};
use futures::StreamExt;
use serde::{Deserialize, Serialize};
use tokio::sync::OwnedSemaphorePermit;
use utoipa::ToSchema;

use super::Inside;
use super::rate::Class;
use crate::dto::event::SseMessage;
use crate::error::{ApiError, Code};
use crate::extract::Json;

/// What the API itself takes.
pub const MAX_BODY_BYTES: usize = 32 << 20;

/// Says what of Forkyard refused, for a worker of ours; other clients go by status and type.
pub const CODE_HEADER: HeaderName = HeaderName::from_static("x-forkyard-code");

/// Headers of the provider's answer that pass. Others may name its account.
const PASSED_ON: [&str; 4] = ["content-type", "request-id", "retry-after", "x-should-retry"];

/// One of the places that a sandbox's requests to models have.
#[derive(Clone)]
pub(super) struct Place {
    _held: Arc<OwnedSemaphorePermit>,
}

impl Place {
    pub(super) fn new(held: OwnedSemaphorePermit) -> Place {
        Place { _held: Arc::new(held) }
    }
}

/// An error as clients of the Messages API know it.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct AnthropicError {
    /// `error`.
    #[serde(rename = "type")]
    kind: String,
    error: AnthropicDetail,
    #[serde(skip)]
    status: u16,
    #[serde(skip)]
    code: &'static str,
    #[serde(skip)]
    retry_after_s: u32,
}

#[derive(Debug, Clone, Serialize, ToSchema)]
struct AnthropicDetail {
    #[serde(rename = "type")]
    kind: String,
    message: String,
}

impl AnthropicError {
    fn new(status: StatusCode, kind: &str, code: &'static str, message: impl Into<String>) -> AnthropicError {
        AnthropicError {
            kind: "error".into(),
            error: AnthropicDetail { kind: kind.into(), message: message.into() },
            status: status.as_u16(),
            code,
            retry_after_s: 1,
        }
    }
}

impl From<ApiError> for AnthropicError {
    fn from(e: ApiError) -> AnthropicError {
        let status = e.code.status();
        let kind = match status {
            StatusCode::UNAUTHORIZED => "authentication_error",
            StatusCode::FORBIDDEN => "permission_error",
            StatusCode::NOT_FOUND => "not_found_error",
            StatusCode::PAYLOAD_TOO_LARGE => "request_too_large",
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            s if s.is_server_error() => "api_error",
            _ => "invalid_request_error",
        };
        let retry_after_s = e.retry_after_s;
        AnthropicError { retry_after_s, ..AnthropicError::new(status, kind, e.code.as_str(), e.message) }
    }
}

impl From<Refusal> for AnthropicError {
    fn from(e: Refusal) -> AnthropicError {
        let message = e.to_string();
        match e {
            Refusal::Invalid(_) => {
                AnthropicError::new(StatusCode::BAD_REQUEST, "invalid_request_error", "invalid", message)
            }
            Refusal::Budget(_) => {
                AnthropicError::new(StatusCode::PAYMENT_REQUIRED, "billing_error", "budget_exceeded", message)
            }
            Refusal::Stale => ApiError::new(Code::StaleAttempt, message).into(),
            Refusal::TooMany => ApiError::new(Code::RateLimited, message).into(),
            Refusal::Unavailable(_) => ApiError::new(Code::Unavailable, message).into(),
        }
    }
}

impl IntoResponse for AnthropicError {
    fn into_response(self) -> Response {
        let status = StatusCode::from_u16(self.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let (code, retry) = (HeaderValue::from_static(self.code), HeaderValue::from(self.retry_after_s));
        let mut response = (status, axum::Json(self)).into_response();
        let headers = response.headers_mut();
        headers.insert(CODE_HEADER, code);
        if matches!(status, StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE) {
            headers.insert(header::RETRY_AFTER, retry);
        }
        response
    }
}

fn asked(headers: &HeaderMap, body: Result<Bytes, BytesRejection>) -> Result<Asked, AnthropicError> {
    let body = body.map_err(|e| {
        let code =
            if e.status() == StatusCode::PAYLOAD_TOO_LARGE { Code::TooLarge } else { Code::BadRequest };
        AnthropicError::from(ApiError::new(code, e.body_text()))
    })?;
    let text = |name: &str| headers.get(name).and_then(|v| v.to_str().ok()).map(str::to_string);
    Ok(Asked { body, version: text("anthropic-version"), beta: text("anthropic-beta") })
}

/// A request to a model, streamed or not, in the format of Anthropic's Messages API.
#[utoipa::path(post, path = "/v1/messages", tag = "worker", security(("sandbox" = [])),
    request_body(content = serde_json::Value, content_type = "application/json"),
    responses((status = 200, description = "The provider's answer, as it came",
        content((serde_json::Value = "application/json"), (SseMessage = "text/event-stream")))))]
pub(super) async fn messages(
    State(inside): State<Inside>,
    Extension(claims): Extension<Claims>,
    Extension(place): Extension<Place>,
    headers: HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, AnthropicError> {
    let relayed = inside.0.relays.ask(&claims, asked(&headers, body)?).await?;
    // An answer that streams lasts, and how many there are at once is bounded by their places.
    let kind = relayed.headers.get("content-type");
    if relayed.status == 200 && kind.is_some_and(|kind| kind.starts_with("text/event-stream")) {
        inside.0.rates.give_back(&claims.sandbox, Class::Other);
    }
    let body = relayed.body.map(move |part| {
        let _held = &place;
        part
    });
    let mut response = Response::new(Body::from_stream(body));
    *response.status_mut() = StatusCode::from_u16(relayed.status).unwrap_or(StatusCode::BAD_GATEWAY);
    for name in PASSED_ON {
        if let Some(value) = relayed.headers.get(name).and_then(|v| HeaderValue::from_str(v).ok()) {
            response.headers_mut().insert(name, value);
        }
    }
    Ok(response)
}

#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub(super) struct Counted {
    input_tokens: u64,
}

/// How many tokens a request has.
#[utoipa::path(post, path = "/v1/messages/count_tokens", tag = "worker", security(("sandbox" = [])),
    request_body(content = serde_json::Value, content_type = "application/json"),
    responses((status = 200, body = Counted)))]
pub(super) async fn count_tokens(
    State(inside): State<Inside>,
    Extension(claims): Extension<Claims>,
    Extension(_place): Extension<Place>,
    headers: HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Result<Json<Counted>, AnthropicError> {
    let input_tokens = inside.0.relays.count(&claims, asked(&headers, body)?).await?;
    Ok(Json(Counted { input_tokens }))
}
