//! What a sandbox reaches under `forkyard.internal`, in every network mode: the worker protocol and the inference endpoint
//! of that one sandbox, with its own token. Nothing of the users' routes exists there, so nothing of them can be reached
//! from inside, whatever a token says.
//!
//! The same routes are served beside the users' own, for sandboxes of other machines; there, too, a sandbox's token opens
//! nothing else, and a user's token opens none of them.

pub(crate) mod gate;
mod model;
mod rate;
pub mod wire;
mod worker;

use std::sync::Arc;

use axum::Router;
use axum::extract::{DefaultBodyLimit, FromRef, MatchedPath, RawPathParams, Request, State};
use axum::http::request::Parts;
use axum::http::{HeaderMap, header};
use axum::middleware::{Next, from_fn, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use forkyard_core::{SandboxId, Timestamp};
use forkyard_engine::clock::Clock;
use forkyard_engine::inside::{Claims, Desk, PREFIX, Refused, Relays, Tokens};
use forkyard_engine::models::Models;
use forkyard_store::Store;
use tokio_util::sync::CancellationToken;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::App;
use crate::error::{ApiError, Code, Result};
use crate::{routes, safe_headers};

use gate::Bodies;
pub use model::AnthropicError;
use rate::Rates;

/// On whose listener a request came in, by the proxy's word.
#[derive(Debug, Clone)]
pub struct Vouched(pub SandboxId);

/// What these routes work with. Clones share it.
#[derive(Clone)]
pub struct Inside(Arc<Inner>);

struct Inner {
    store: Arc<dyn Store>,
    tokens: Tokens,
    desk: Desk,
    relays: Relays,
    rates: Rates,
    bodies: Bodies,
    clock: Clock,
    stop: CancellationToken,
}

impl Inside {
    /// Requests end with `stop`.
    pub fn new(
        store: Arc<dyn Store>,
        models: Arc<Models>,
        tokens: Tokens,
        clock: Clock,
        stop: CancellationToken,
    ) -> Inside {
        Inside(Arc::new(Inner {
            desk: Desk::new(store.clone()),
            relays: Relays::new(store.clone(), models, stop.clone()),
            rates: Rates::default(),
            bodies: Bodies::default(),
            store,
            tokens,
            clock,
            stop,
        }))
    }

    fn store(&self) -> &dyn Store {
        &*self.0.store
    }
    fn now(&self) -> Timestamp {
        self.0.clock.now()
    }

    /// Who asks, by its token: for the sandbox that the address names and, inside, on that sandbox's own listener.
    pub(crate) async fn admit(&self, parts: &Parts, named: Option<&str>) -> Result<Claims> {
        let token = given(&parts.headers)
            .ok_or_else(|| ApiError::new(Code::Unauthenticated, "there is no sandbox token"))?;
        let claims = self.0.tokens.verify(&token, self.now()).await.map_err(|e| match e {
            Refused::Unknown => ApiError::new(Code::Unauthenticated, e.to_string()),
            Refused::Expired => ApiError::new(Code::TokenExpired, e.to_string()),
            Refused::Stale { .. } => ApiError::new(Code::StaleAttempt, e.to_string()),
            Refused::Store(e) => e.into(),
        })?;
        let vouched = parts.extensions.get::<Vouched>().map(|v| v.0.as_str());
        if [named, vouched].into_iter().flatten().any(|id| id != claims.sandbox.as_str()) {
            return Err(ApiError::new(Code::OtherSandbox, "the token is of another sandbox"));
        }
        Ok(claims)
    }
}

impl FromRef<App> for Inside {
    fn from_ref(app: &App) -> Inside {
        app.parts().inside.clone()
    }
}

/// The sandbox that an address names.
pub(crate) fn named(params: &RawPathParams) -> Option<&str> {
    params.iter().find(|(name, _)| *name == "sandbox").map(|(_, id)| id)
}

/// As Anthropic's clients send a key, or as everybody else.
fn given(headers: &HeaderMap) -> Option<String> {
    let text = |name| headers.get(name).and_then(|v: &axum::http::HeaderValue| v.to_str().ok());
    let bearer = text(header::AUTHORIZATION).and_then(|line| {
        let (scheme, token) = line.split_once(' ')?;
        scheme.eq_ignore_ascii_case("bearer").then(|| token.trim())
    });
    bearer.or_else(|| text(header::HeaderName::from_static("x-api-key"))).map(str::to_string)
}

/// Whether a request shows a sandbox's token, good or bad.
pub(crate) fn shows_token(headers: &HeaderMap) -> bool {
    given(headers).is_some_and(|t| t.strip_prefix(PREFIX).is_some_and(|rest| rest.starts_with('_')))
}

/// Routes that only a sandbox's token opens.
pub(crate) fn described<S>() -> OpenApiRouter<S>
where
    Inside: FromRef<S>,
    S: Clone + Send + Sync + 'static,
{
    let small = OpenApiRouter::new()
        .routes(routes!(worker::post_event))
        .routes(routes!(worker::inbox))
        .routes(routes!(worker::task_complete))
        .layer(DefaultBodyLimit::max(wire::MAX_EVENT_BODY_BYTES));
    let large = OpenApiRouter::new()
        .routes(routes!(worker::read_journal, worker::write_journal))
        .layer(DefaultBodyLimit::max(wire::MAX_JOURNAL_BODY_BYTES));
    let model = OpenApiRouter::new()
        .routes(routes!(model::messages))
        .routes(routes!(model::count_tokens))
        .layer(DefaultBodyLimit::max(model::MAX_BODY_BYTES));
    small.merge(large).merge(model)
}

/// All that `forkyard.internal` has. The proxy passes requests on to it, each with its [`Vouched`].
pub fn router(inside: Inside) -> Router {
    let described = described::<Inside>().routes(routes!(worker::task));
    let (router, _) = described.split_for_parts();
    router
        .route_layer(from_fn_with_state(inside.clone(), check_token))
        .fallback(routes::nowhere)
        .layer(from_fn(safe_headers))
        .with_state(inside)
}

async fn check_token(
    State(inside): State<Inside>,
    path: MatchedPath,
    params: RawPathParams,
    request: Request,
    next: Next,
) -> Response {
    let (parts, body) = request.into_parts();
    match inside.admit(&parts, named(&params)).await {
        Ok(claims) => gate::pass(&inside, claims, path.as_str(), parts, body, next).await,
        Err(e) => refused(path.as_str(), e),
    }
}

/// A refusal in the shape that clients of the address know.
pub(crate) fn refused(path: &str, e: ApiError) -> Response {
    if path.starts_with("/v1/") { AnthropicError::from(e).into_response() } else { e.into_response() }
}
