//! A run's events: in pages, and as they happen.

use axum::Extension;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use forkyard_core::view::RunStatus;
use forkyard_store::EventQuery;

use crate::App;
use crate::access::Principal;
use crate::dto::event::{Event, EventPage, ReadEvents, SseMessage, StreamEvents, kinds};
use crate::error::{ApiError, Result};
use crate::extract::{Json, Path, Query};
use crate::page;
use crate::stream::{self, Filter, Tail};

const LAST_EVENT_ID: &str = "last-event-id";

/// A run's events, oldest first.
#[utoipa::path(get, path = "/api/v1/runs/{run}/events", tag = "events", params(("run" = String, Path), ReadEvents),
    security(("token" = ["read"])), responses((status = 200, body = EventPage)))]
pub(super) async fn list_events(
    State(app): State<App>,
    Path(run): Path<String>,
    Query(q): Query<ReadEvents>,
) -> Result<Json<EventPage>> {
    let view = app.run(&run).await?;
    let query = EventQuery {
        after: q.after.unwrap_or(0),
        fork: q.fork,
        kinds: kinds(q.types.as_deref())?,
        limit: page::limit(q.limit)?,
        ..Default::default()
    };
    let events: Vec<Event> =
        app.store().read_run(&view.id, &query).await?.into_iter().map(Into::into).collect();
    // Large events make short pages: only an empty one is the end.
    let next_after = events.last().map(|e| e.position);
    Ok(Json(EventPage { events, next_after }))
}

/// A run's events as they happen, after those that were recorded already.
///
/// Each has its position as `id`: a client that comes back with `Last-Event-ID` misses nothing and gets nothing twice.
/// `caught_up` says that all that was recorded is told, `catch_up` that the client was too slow and goes on from the
/// store, `end` that nothing follows. With `live=true` there are also `live` events: `{"fork", "delta": {"text", …}}`, a
/// few times a second, joined. Asked again after the end, the answer is 204, which tells a browser to stop.
#[utoipa::path(get, path = "/api/v1/runs/{run}/events/stream", tag = "events",
    params(("run" = String, Path), StreamEvents, ("Last-Event-ID" = Option<String>, Header, description = "The last position that was seen")),
    security(("token" = ["read"])),
    responses((status = 200, content_type = "text/event-stream", body = SseMessage), (status = 204, description = "Ended, and all was told")))]
pub(super) async fn stream_events(
    State(app): State<App>,
    Extension(by): Extension<Principal>,
    Path(run): Path<String>,
    Query(q): Query<StreamEvents>,
    headers: HeaderMap,
) -> Result<Response> {
    let view = app.run(&run).await?;
    let filter = Filter { fork: q.fork, kinds: kinds(q.types.as_deref())? };
    let back = last_event_id(&headers)?;
    let after = back.or(q.after).unwrap_or(0);
    // Asked in this order: a run that has ended gets no more events.
    if back.is_some()
        && view.status == RunStatus::Ended
        && after >= app.store().last_position(&view.id).await?
    {
        return Ok(StatusCode::NO_CONTENT.into_response());
    }
    let tail = Tail::open(&app, view.id, after, filter).await?.with_live(q.live.unwrap_or(false));
    Ok(stream::response(&app, by, stream::frames(tail)))
}

fn last_event_id(headers: &HeaderMap) -> Result<Option<u64>> {
    let Some(given) = headers.get(LAST_EVENT_ID) else { return Ok(None) };
    let text = given.to_str().unwrap_or_default().trim();
    let wrong =
        || ApiError::field("Last-Event-ID", text, "is not a position", "send the `id` of the last event");
    if text.is_empty() {
        return Ok(None);
    }
    text.parse().map(Some).map_err(|_| wrong())
}
