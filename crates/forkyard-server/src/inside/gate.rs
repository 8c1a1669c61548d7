//! Where every request of a sandbox passes, on either router: it is counted before anything of it is read, and what is
//! read is bounded in bytes and in time, so that nobody inside fills the server's memory.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use axum::body::Body;
use axum::extract::Request;
use axum::http::Method;
use axum::http::request::Parts;
use axum::middleware::Next;
use axum::response::Response;
use forkyard_core::SandboxId;
use forkyard_engine::inside::Claims;
use tokio::sync::Semaphore;

use super::model::{self, Place};
use super::rate::Class;
use super::{Inside, refused, wire};
use crate::bodies::{self, Held};
use crate::error::{ApiError, Code, Result};

/// Of all bodies of one sandbox that are read or waited on at once: the largest of the model's and of the journal's.
const MAX_BYTES_AT_ONCE: usize = model::MAX_BODY_BYTES + wire::MAX_JOURNAL_BODY_BYTES;
/// What is smaller takes no room, and so waits for nobody: a sign of life must not stand behind what is large, and how many
/// there are in a minute is bounded.
const FREE: usize = wire::MAX_EVENT_BODY_BYTES;
/// Sandboxes that are remembered; those that send nothing are forgotten first.
const MAX_SANDBOXES: usize = 10_000;

/// Bytes of bodies under way, by sandbox.
#[derive(Default)]
pub(super) struct Bodies(Mutex<HashMap<SandboxId, Arc<Semaphore>>>);

impl Bodies {
    fn of(&self, sandbox: &SandboxId) -> Arc<Semaphore> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if all.len() >= MAX_SANDBOXES {
            all.retain(|_, room| !bodies::is_free(room, MAX_BYTES_AT_ONCE));
        }
        all.entry(sandbox.clone()).or_insert_with(|| bodies::room(MAX_BYTES_AT_ONCE)).clone()
    }
}

/// What is counted under which name, and how large a body may be. None: an event, which says itself which it is.
fn rule(method: &Method, path: &str) -> (Option<Class>, usize) {
    let read = method == Method::GET;
    match path.rsplit('/').next() {
        _ if path.starts_with("/v1/") => (Some(Class::Other), model::MAX_BODY_BYTES),
        Some("events") => (None, wire::MAX_EVENT_BODY_BYTES),
        Some("messages") => (Some(Class::Messages), wire::MAX_EVENT_BODY_BYTES),
        Some("journal") if !read => (Some(Class::Events), wire::MAX_JOURNAL_BODY_BYTES),
        Some(_) | None => (Some(Class::Other), wire::MAX_EVENT_BODY_BYTES),
    }
}

/// Counts, reads and passes on. `path` is the route's.
pub(crate) async fn pass(
    inside: &Inside,
    claims: Claims,
    path: &str,
    parts: Parts,
    body: Body,
    next: Next,
) -> Response {
    let (request, held) = match enter(inside, claims, path, parts, body).await {
        Ok(entered) => entered,
        Err(e) => return refused(path, e),
    };
    let response = next.run(request).await;
    drop(held);
    response
}

async fn enter(
    inside: &Inside,
    claims: Claims,
    path: &str,
    mut parts: Parts,
    body: Body,
) -> Result<(Request, Held)> {
    let (class, max) = rule(&parts.method, path);
    if let Some(class) = class {
        inside.0.rates.take(&claims.sandbox, class)?;
    }
    if path.starts_with("/v1/") {
        let place = inside.0.relays.place(&claims.sandbox);
        let place = place.map_err(|e| ApiError::new(Code::RateLimited, e.to_string()))?;
        parts.extensions.insert(Place::new(place));
    }
    // What only looks has nothing to say: whatever is sent with it stays unread.
    let body = if parts.method.is_safe() { Body::empty() } else { body };
    let (body, held) = bodies::whole(inside.0.bodies.of(&claims.sandbox), body, max, FREE).await?;
    parts.extensions.insert(claims);
    Ok((Request::from_parts(parts, Body::from(body)), held))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use axum::body::Bytes;

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(60);

    async fn read(room: Arc<Semaphore>, body: Body, max: usize) -> Result<Bytes> {
        Ok(bodies::read(room, body, max, FREE).await?.0)
    }

    #[tokio::test(start_paused = true)]
    async fn bodies_of_a_sandbox_are_read_only_as_far_as_there_is_room() {
        let bodies = Bodies::default();
        let (a, b) = (SandboxId::new("a").unwrap(), SandboxId::new("b").unwrap());
        let max = model::MAX_BODY_BYTES;
        let unsaid = || Body::from_stream(futures::stream::pending::<Result<Bytes, std::io::Error>>());
        let first = tokio::spawn(read(bodies.of(&a), unsaid(), max));
        tokio::task::yield_now().await;
        // Its rest is half a body; another that may be a whole one has to wait, a small one has not.
        let whole = tokio::time::timeout(PATIENCE, read(bodies.of(&a), Body::from(vec![0; max]), max));
        assert!(whole.await.is_err());
        let small = read(bodies.of(&a), Body::from("x"), max);
        assert_eq!(tokio::time::timeout(PATIENCE, small).await.unwrap().unwrap(), "x");
        let other = read(bodies.of(&b), Body::from(vec![0; max]), max);
        assert_eq!(tokio::time::timeout(PATIENCE, other).await.unwrap().unwrap().len(), max);
        first.abort();
        let _ = first.await;
        let whole = read(bodies.of(&a), Body::from(vec![0; max]), max);
        assert_eq!(tokio::time::timeout(PATIENCE, whole).await.unwrap().unwrap().len(), max);
        let large = read(bodies.of(&a), Body::from(vec![0; max + 1]), max);
        assert_eq!(large.await.unwrap_err().code, Code::TooLarge);
    }

    #[test]
    fn each_route_is_counted() {
        let at = |path: &str| format!("/api/v1/sandboxes/{{sandbox}}/{path}");
        for (method, path, class) in [
            (Method::POST, at("events"), None),
            (Method::GET, at("messages"), Some(Class::Messages)),
            (Method::GET, at("journal"), Some(Class::Other)),
            (Method::POST, at("journal"), Some(Class::Events)),
            (Method::GET, at("task"), Some(Class::Other)),
            (Method::POST, at("task-complete"), Some(Class::Other)),
            (Method::POST, "/v1/messages".into(), Some(Class::Other)),
            (Method::POST, "/v1/messages/count_tokens".into(), Some(Class::Other)),
        ] {
            assert_eq!(rule(&method, &path).0, class, "{method} {path}");
        }
    }
}
