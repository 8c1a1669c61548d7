//! Where every request of a sandbox passes, on either router: it is counted before anything of it is read, and what is
//! read is bounded in bytes and in time, so that nobody inside fills the server's memory.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::body::{Body, Bytes, HttpBody};
use axum::extract::Request;
use axum::http::Method;
use axum::http::request::Parts;
use axum::middleware::Next;
use axum::response::Response;
use forkyard_core::SandboxId;
use forkyard_engine::inside::Claims;
use http_body_util::{BodyExt, LengthLimitError, Limited};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::model::{self, Place};
use super::rate::Class;
use super::{Inside, refused, wire};
use crate::error::{ApiError, Code, Result};

/// Of all bodies of one sandbox that are read or waited on at once: the largest of the model's and of the journal's.
const MAX_BYTES_AT_ONCE: usize = model::MAX_BODY_BYTES + wire::MAX_JOURNAL_BODY_BYTES;
/// Bodies are counted in these, so that a semaphore's count suffices.
const UNIT: usize = 1 << 10;
/// A body has to be there by then, its turn included.
const BODY: Duration = Duration::from_secs(60);
/// Sandboxes that are remembered; those that send nothing are forgotten first.
const MAX_SANDBOXES: usize = 10_000;

/// Bytes of bodies under way, by sandbox.
#[derive(Default)]
pub(super) struct Bodies(Mutex<HashMap<SandboxId, Arc<Semaphore>>>);

impl Bodies {
    fn of(&self, sandbox: &SandboxId) -> Arc<Semaphore> {
        const ALL: usize = MAX_BYTES_AT_ONCE / UNIT;
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if all.len() >= MAX_SANDBOXES {
            all.retain(|_, s| s.available_permits() < ALL);
        }
        all.entry(sandbox.clone()).or_insert_with(|| Arc::new(Semaphore::new(ALL))).clone()
    }
}

/// What a body takes of them. A small one takes nothing, and so waits for nobody: a sign of life must not stand behind what
/// is large, and how many there are in a minute is bounded.
type Room = Option<OwnedSemaphorePermit>;

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
) -> Result<(Request, Room)> {
    let (class, max) = rule(&parts.method, path);
    if let Some(class) = class {
        inside.0.rates.take(&claims.sandbox, class)?;
    }
    if path.starts_with("/v1/") {
        let place = inside.0.relays.place(&claims.sandbox);
        let place = place.map_err(|e| ApiError::new(Code::RateLimited, e.to_string()))?;
        parts.extensions.insert(Place::new(place));
    }
    let read = read(inside.0.bodies.of(&claims.sandbox), body, max);
    let (body, held) = tokio::time::timeout(BODY, read).await.map_err(|_| {
        ApiError::new(Code::TooSlow, format!("the body was not there after {} s", BODY.as_secs()))
    })??;
    parts.extensions.insert(claims);
    Ok((Request::from_parts(parts, Body::from(body)), held))
}

async fn read(bytes: Arc<Semaphore>, body: Body, max: usize) -> Result<(Bytes, Room)> {
    let too_large = || ApiError::new(Code::TooLarge, format!("a body may have {max} bytes here"));
    let size = body.size_hint();
    if size.lower() > max as u64 {
        return Err(too_large());
    }
    // Whoever does not say how much it sends may send all that is taken.
    let most = size.upper().map_or(max, |upper| (upper as usize).min(max));
    let mut held = None;
    if most > wire::MAX_EVENT_BODY_BYTES {
        let room = bytes.acquire_many_owned(most.div_ceil(UNIT) as u32).await;
        held = Some(room.map_err(|e| ApiError::new(Code::Internal, e.to_string()))?);
    }
    let read = Limited::new(body, max).collect().await.map_err(|e| {
        if e.is::<LengthLimitError>() { too_large() } else { ApiError::new(Code::BadRequest, e.to_string()) }
    })?;
    let read = read.to_bytes();
    if let Some(held) = &mut held {
        drop(held.split(held.num_permits().saturating_sub(read.len().div_ceil(UNIT))));
    }
    Ok((read, held))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn bodies_of_a_sandbox_are_read_only_as_far_as_there_is_room() {
        let bodies = Bodies::default();
        let (a, b) = (SandboxId::new("a").unwrap(), SandboxId::new("b").unwrap());
        let max = model::MAX_BODY_BYTES;
        let unsaid = || Body::from_stream(futures::stream::pending::<Result<Bytes, std::io::Error>>());
        let first = tokio::spawn(read(bodies.of(&a), unsaid(), max));
        tokio::task::yield_now().await;
        // Its rest is half a body; another that may be a whole one has to wait, a small one has not.
        let whole = tokio::time::timeout(BODY, read(bodies.of(&a), Body::from(vec![0; max]), max));
        assert!(whole.await.is_err());
        let small = read(bodies.of(&a), Body::from("x"), max);
        assert_eq!(tokio::time::timeout(BODY, small).await.unwrap().unwrap().0, "x");
        let other = read(bodies.of(&b), Body::from(vec![0; max]), max);
        assert_eq!(tokio::time::timeout(BODY, other).await.unwrap().unwrap().0.len(), max);
        first.abort();
        let _ = first.await;
        let whole = read(bodies.of(&a), Body::from(vec![0; max]), max);
        assert_eq!(tokio::time::timeout(BODY, whole).await.unwrap().unwrap().0.len(), max);
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
