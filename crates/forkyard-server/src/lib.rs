//! The HTTP API: what the CLI can do, for programs and for pages, over the same engine and store.
//!
//! Routes describe themselves (OpenAPI), and [`access`] lets nobody past who lacks the scope that a description names.
//! Two routers: this one is for users. What runs inside a sandbox reaches another, with nothing of this one in it: see
//! [`inside`].

pub mod access;
mod assets;
mod audit;
mod bodies;
pub mod chores;
pub mod dto;
pub mod error;
mod extract;
mod figures;
pub mod inside;
mod listen;
mod once;
mod page;
mod requests;
pub mod routes;
pub mod stream;

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;

use axum::Router;
use axum::extract::DefaultBodyLimit;
use axum::http::{HeaderName, HeaderValue, header};
use axum::middleware::{Next, from_fn, from_fn_with_state};
use axum::response::Response;
use bytes::Bytes;
use forkyard_core::spec::RunSpec;
use forkyard_core::view::{ForkView, RunView};
use forkyard_core::{ForkNum, RunId, Timestamp};
use forkyard_engine::Engine;
use forkyard_engine::clock::Clock;
use forkyard_engine::git::Git;
use forkyard_engine::models::Models;
use forkyard_engine::ports::{JournalEntry, LiveEvent, Onlooker};
use forkyard_engine::sandboxes::Sandboxes;
use forkyard_store::{Store, StoreError};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

pub use listen::{Tls, serve};

use access::{LoginCodes, Needs};
use error::{ApiError, Code, Result};
use figures::Figures;
use inside::Inside;
use stream::Feeds;

/// Bytes of a request's body, where a route does not say otherwise: a prompt's bound, a few times over.
pub const MAX_BODY_BYTES: usize = 2 << 20;

/// What the server works with.
pub struct Parts {
    pub store: Arc<dyn Store>,
    pub engine: Arc<dyn Engine>,
    pub git: Arc<Git>,
    pub models: Arc<Models>,
    pub sandboxes: Sandboxes,
    /// For whoever works inside a sandbox.
    pub inside: Inside,
    pub clock: Clock,
    /// What a run is where a request says nothing: every setting.
    pub defaults: RunSpec,
    /// Text before every prompt.
    pub prompt_prefix: Option<String>,
    /// Paths of the host are taken only below this folder.
    pub root: Option<PathBuf>,
    /// Secrets of the configuration that a run may name.
    pub secrets: BTreeSet<String>,
    /// Who does what concerns the whole machine.
    pub chores: Option<Arc<dyn chores::Chores>>,
    /// Names of this server, besides localhost and numbers; in lower case.
    pub hosts: Vec<String>,
    /// It is reached by TLS alone.
    pub secure: bool,
    /// Streams end with it.
    pub stop: CancellationToken,
}

#[derive(Clone)]
pub struct App(Arc<Inner>);

struct Inner {
    parts: Parts,
    needs: Needs,
    openapi: Bytes,
    codes: LoginCodes,
    feeds: Feeds,
    figures: Figures,
    turns: once::Turns,
    room: bodies::Room,
    /// How many tokens were revoked here.
    revoked: watch::Sender<u64>,
    doctor: Option<routes::Doctor>,
}

impl App {
    /// Panics if a route does not describe itself: no program with such a route passes a single test.
    pub fn new(parts: Parts) -> App {
        App::with_doctor(parts, None)
    }

    /// One that can examine its machine, too.
    pub fn with_doctor(parts: Parts, doctor: Option<routes::Doctor>) -> App {
        let described = routes::openapi();
        let needs = Needs::read(&described).unwrap_or_else(|e| panic!("{e}"));
        let feeds = Feeds::new(parts.store.clone());
        let openapi = Bytes::from(described.to_string());
        let (codes, figures) = (LoginCodes::default(), Figures::default());
        let (turns, room) = (once::Turns::default(), bodies::Room::default());
        let revoked = watch::Sender::new(0);
        App(Arc::new(Inner { parts, needs, openapi, codes, feeds, figures, turns, room, revoked, doctor }))
    }

    /// Remembers what the machine's sandboxes use, for as long as it is waited for.
    pub async fn keep_figures(&self) {
        self.figures().keep(&self.parts().sandboxes, &self.parts().clock).await;
    }

    pub fn router(&self) -> Router {
        let api = routes::router().route_layer(from_fn_with_state(self.clone(), access::check_scope));
        api.fallback(assets::page)
            .layer(DefaultBodyLimit::max(MAX_BODY_BYTES))
            .layer(from_fn_with_state(self.clone(), access::check_place))
            .layer(from_fn(safe_headers))
            .with_state(self.clone())
    }

    /// A link that logs a browser in, once; `base` is where the server is reached.
    pub fn login_link(&self, base: &str, token: &str) -> String {
        format!("{base}/login?code={}", self.0.codes.make(token, self.now()))
    }

    pub(crate) fn store(&self) -> &dyn Store {
        &*self.0.parts.store
    }
    pub(crate) fn parts(&self) -> &Parts {
        &self.0.parts
    }
    pub(crate) fn engine(&self) -> &dyn Engine {
        &*self.0.parts.engine
    }
    pub(crate) fn now(&self) -> Timestamp {
        self.0.parts.clock.now()
    }
    pub(crate) fn hosts(&self) -> &[String] {
        &self.0.parts.hosts
    }
    pub(crate) fn needs(&self) -> &Needs {
        &self.0.needs
    }
    pub(crate) fn openapi(&self) -> Bytes {
        self.0.openapi.clone()
    }
    pub(crate) fn codes(&self) -> &LoginCodes {
        &self.0.codes
    }
    /// Ends a token for all that it has opened.
    pub(crate) async fn revoke(&self, token: &str) -> std::result::Result<(), StoreError> {
        self.store().revoke_token(token, self.now()).await?;
        self.0.revoked.send_modify(|n| *n += 1);
        Ok(())
    }
    pub(crate) fn revocations(&self) -> watch::Receiver<u64> {
        self.0.revoked.subscribe()
    }
    pub(crate) fn doctor(&self) -> Option<routes::Doctor> {
        self.0.doctor.clone()
    }
    pub(crate) fn figures(&self) -> &Figures {
        &self.0.figures
    }
    pub(crate) fn turns(&self) -> &once::Turns {
        &self.0.turns
    }
    pub(crate) fn room(&self) -> &bodies::Room {
        &self.0.room
    }
    pub(crate) fn feeds(&self) -> &Feeds {
        &self.0.feeds
    }

    /// A run by the name in an address.
    pub(crate) async fn run(&self, id: &str) -> Result<RunView> {
        let missing = || {
            let shown: String = id.chars().take(64).collect();
            ApiError::new(Code::RunNotFound, format!("there is no run {shown:?}"))
        };
        let id = RunId::new(id).map_err(|_| missing())?;
        self.store().run(&id).await?.ok_or_else(missing)
    }

    /// For what only makes sense before the end.
    pub(crate) async fn live_run(&self, id: &str) -> Result<RunView> {
        let run = self.run(id).await?;
        if run.outcome.is_some() {
            return Err(ApiError::new(Code::Ended, format!("run {} has ended", run.id)));
        }
        Ok(run)
    }

    pub(crate) async fn fork(&self, run: &RunView, fork: ForkNum) -> Result<ForkView> {
        let found = self.store().fork(&run.id, fork).await?;
        found.ok_or_else(|| ApiError::new(Code::ForkNotFound, format!("run {} has no fork {fork}", run.id)))
    }
}

/// Agents of this process are heard by those who watch their runs.
impl Onlooker for App {
    fn live(&self, run: &RunId, fork: ForkNum, event: &LiveEvent) {
        self.feeds().say(run, fork, event);
    }
    fn recorded(&self, _: &RunId, _: ForkNum, _: &[JournalEntry]) {}
}

/// Answers hold what repositories and agents said: no browser may take one for a page, frame it or keep it.
async fn safe_headers(request: axum::extract::Request, next: Next) -> Response {
    let mut response = next.run(request).await;
    let headers = response.headers_mut();
    for (name, value) in [
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::X_FRAME_OPTIONS, "DENY"),
        (header::REFERRER_POLICY, "no-referrer"),
        (header::CACHE_CONTROL, "no-store"),
        (header::CONTENT_SECURITY_POLICY, "default-src 'none'; frame-ancestors 'none'"),
        (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
    ] {
        headers.entry(name).or_insert(HeaderValue::from_static(value));
    }
    response
}
