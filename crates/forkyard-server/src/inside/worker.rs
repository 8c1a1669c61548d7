//! The worker protocol: events and heartbeats, the journal, messages without delay, the task and its end.

use std::time::Duration;

use axum::Extension;
use axum::extract::State;
use axum::http::StatusCode;
use forkyard_core::Timestamp;
use forkyard_engine::inside::{
    Claims, DeskError, Entry, HEARTBEAT, TASK_COMPLETED, Testimony, is_journal_kind,
};
use forkyard_engine::ports::StoredText;
use serde_json::{Value, json};
use tokio::time::Instant;

use super::Inside;
use super::rate::Class;
use super::wire::*;
use crate::error::{ApiError, Code, Result};
use crate::extract::{Json, Path, Query};
use crate::page;
use crate::routes::{Task, task_of};

/// Kinds of the machines, which nobody inside speaks for.
const RESERVED: [&str; 2] = ["run.", "fork."];
/// A store that can't tell of news is looked into this often.
const LOOK_EVERY: Duration = Duration::from_secs(5);
/// Whoever was kept waiting for this long can't flood, and is not counted.
const WAITED: Duration = Duration::from_secs(1);

impl From<DeskError> for ApiError {
    fn from(e: DeskError) -> ApiError {
        match e {
            DeskError::Stale => ApiError::new(Code::StaleAttempt, e.to_string()),
            DeskError::Elsewhere { .. } => ApiError::new(Code::Conflict, e.to_string()),
            DeskError::Invalid(why) => ApiError::new(Code::Invalid, why),
            DeskError::Store(e) => e.into(),
        }
    }
}

fn check_type(kind: &str) -> Result<()> {
    let ok = (1..=MAX_EVENT_TYPE_CHARS).contains(&kind.len())
        && kind.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_' || b == b'.');
    if !ok {
        let fix = "use 1 to 100 characters of A-Z, a-z, 0-9, _ and .";
        return Err(ApiError::field("event_type", kind, "is not an event's type", fix));
    }
    if RESERVED.iter().any(|r| kind.starts_with(r)) || kind == TASK_COMPLETED || is_journal_kind(kind) {
        let fix = "use a name of your own; the journal is written at /journal, the end is reported to /task-complete";
        return Err(ApiError::field("event_type", kind, "is recorded by Forkyard alone", fix));
    }
    Ok(())
}

/// Says that something happened inside; `agent.heartbeat` says that somebody is there.
#[utoipa::path(post, path = "/api/v1/sandboxes/{sandbox}/events", tag = "worker", params(("sandbox" = String, Path)),
    request_body = PostEvent, security(("sandbox" = [])), responses((status = 201, body = Received)))]
pub(super) async fn post_event(
    State(inside): State<Inside>,
    Extension(claims): Extension<Claims>,
    Path(sandbox): Path<String>,
    event: Result<Json<PostEvent>>,
) -> Result<(StatusCode, Json<Received>)> {
    // What can't be taken is counted all the same.
    let beats = event.as_ref().is_ok_and(|Json(e)| e.event_type == HEARTBEAT);
    let class = if beats { Class::Heartbeats } else { Class::Events };
    inside.0.rates.take(&claims.sandbox, class)?;
    let Json(e) = event?;
    check_type(&e.event_type)?;
    let data = Value::Object(e.event_data);
    let size = data.to_string().len();
    if size > MAX_EVENT_DATA_BYTES {
        return Err(ApiError::new(
            Code::TooLarge,
            format!("event_data has {size} bytes: at most {MAX_EVENT_DATA_BYTES} are taken"),
        ));
    }
    if let Some(id) =
        e.event_id.as_ref().filter(|id| id.is_empty() || id.chars().count() > MAX_EVENT_ID_CHARS)
    {
        return Err(ApiError::field("event_id", id, "is not an id", "use 1 to 100 characters"));
    }
    let at = inside.now();
    let testimony = Testimony { id: e.event_id.clone(), kind: e.event_type.clone(), at, data };
    let position = inside.0.desk.testify(&claims, &testimony).await?;
    let received = Received {
        status: "received".into(),
        sandbox_id: sandbox,
        event_type: e.event_type,
        event_id: e.event_id.unwrap_or_else(|| position.to_string()),
        timestamp: at.0,
    };
    Ok((StatusCode::CREATED, Json(received)))
}

/// The journal of the fork's agent, from its beginning.
#[utoipa::path(get, path = "/api/v1/sandboxes/{sandbox}/journal", tag = "worker",
    params(("sandbox" = String, Path), ReadJournal), security(("sandbox" = [])),
    responses((status = 200, body = JournalPage)))]
pub(super) async fn read_journal(
    State(inside): State<Inside>,
    Extension(claims): Extension<Claims>,
    Query(q): Query<ReadJournal>,
) -> Result<Json<JournalPage>> {
    let after = q.after.unwrap_or(0);
    let (entries, more) = inside.0.desk.journal(&claims, after, page::limit(q.limit)?).await?;
    let next_after = more.then(|| after.saturating_add(entries.len() as u64));
    let entries = entries
        .into_iter()
        .map(|e| JournalEntry { event_type: e.kind, version: e.version, at: e.at.0, event_data: e.data })
        .collect();
    Ok(Json(JournalPage { entries, next_after }))
}

/// Appends to the journal of the fork's agent.
#[utoipa::path(post, path = "/api/v1/sandboxes/{sandbox}/journal", tag = "worker", params(("sandbox" = String, Path)),
    request_body = AppendJournal, security(("sandbox" = [])), responses((status = 200, body = Appended)))]
pub(super) async fn write_journal(
    State(inside): State<Inside>,
    Extension(claims): Extension<Claims>,
    Json(a): Json<AppendJournal>,
) -> Result<Json<Appended>> {
    let n = a.entries.len();
    if !(1..=MAX_ENTRIES).contains(&n) {
        return Err(ApiError::field("entries", n.to_string(), "is out of range", "send 1 to 500 at once"));
    }
    let entries: Vec<Entry> = a
        .entries
        .into_iter()
        .map(|e| Entry { kind: e.event_type, version: e.version, at: Timestamp(e.at), data: e.event_data })
        .collect();
    let position = inside.0.desk.record(&claims, a.position, &entries, &a.delivered).await?;
    Ok(Json(Appended { position }))
}

/// Messages for the agent, as soon as there are any.
#[utoipa::path(get, path = "/api/v1/sandboxes/{sandbox}/messages", tag = "worker",
    params(("sandbox" = String, Path), ReadInbox), security(("sandbox" = [])),
    responses((status = 200, body = InboxPage)))]
pub(super) async fn inbox(
    State(inside): State<Inside>,
    Extension(claims): Extension<Claims>,
    Query(q): Query<ReadInbox>,
) -> Result<Json<InboxPage>> {
    let wait = q.wait_ms.unwrap_or(0);
    if wait > MAX_WAIT_MS {
        let fix = "wait for at most 60000";
        return Err(ApiError::field("wait_ms", wait.to_string(), "is out of range", fix));
    }
    let (begin, after) = (Instant::now(), q.after.unwrap_or(0));
    let until = begin + Duration::from_millis(wait);
    let mut watch = inside.store().watch(Some(&claims.run));
    let messages = loop {
        let pending = inside.store().pending_messages(&claims.run, claims.fork).await?;
        let messages: Vec<InboxMessage> = pending
            .into_iter()
            .filter(|m| m.id > after)
            .filter_map(|m| {
                let text: StoredText = serde_json::from_value(m.data).ok()?;
                Some(InboxMessage {
                    id: m.id,
                    kind: text.kind.into(),
                    source: text.source.map(Into::into),
                    priority: text.priority.into(),
                    content: text.content,
                    at: m.at.0,
                })
            })
            .collect();
        if !messages.is_empty() || Instant::now() >= until || inside.0.stop.is_cancelled() {
            break messages;
        }
        tokio::select! {
            () = watch.changed() => {}
            () = tokio::time::sleep_until(until.min(Instant::now() + LOOK_EVERY)) => {}
            () = inside.0.stop.cancelled() => {}
        }
        // A newer attempt may have come while this one waited.
        let current = inside.store().attempt(&claims.run, claims.fork).await?;
        if current != Some(claims.attempt) {
            return Err(ApiError::new(Code::StaleAttempt, "a newer attempt owns this fork"));
        }
    };
    if begin.elapsed() >= WAITED {
        inside.0.rates.give_back(&claims.sandbox, Class::Messages);
    }
    Ok(Json(InboxPage { messages }))
}

/// The task, as the users' route of the same address tells it.
#[utoipa::path(get, path = "/api/v1/sandboxes/{sandbox}/task", tag = "worker", params(("sandbox" = String, Path)),
    security(("sandbox" = [])), responses((status = 200, body = Task)))]
pub(super) async fn task(
    State(inside): State<Inside>,
    Extension(claims): Extension<Claims>,
) -> Result<Json<Task>> {
    let fork = inside.store().fork(&claims.run, claims.fork).await?;
    let fork = fork.ok_or_else(|| ApiError::new(Code::ForkNotFound, "the fork has not begun"))?;
    Ok(Json(task_of(inside.store(), &claims.sandbox, fork).await?))
}

/// Reports the end of the work. Can be sent again until it is answered.
#[utoipa::path(post, path = "/api/v1/sandboxes/{sandbox}/task-complete", tag = "worker",
    params(("sandbox" = String, Path)), request_body = TaskComplete, security(("sandbox" = [])),
    responses((status = 200, body = Reported)))]
pub(super) async fn task_complete(
    State(inside): State<Inside>,
    Extension(claims): Extension<Claims>,
    Json(t): Json<TaskComplete>,
) -> Result<Json<Reported>> {
    let stop = match (t.stop_reason, t.success) {
        (Some(stop), success) => {
            if matches!(stop, StopReason::EndTurn | StopReason::MaxTokens) != success {
                let fix = "end_turn and max_tokens are successes, the others are not";
                return Err(ApiError::field(
                    "stop_reason",
                    format!("{stop:?}"),
                    "does not fit `success`",
                    fix,
                ));
            }
            stop
        }
        (None, true) => StopReason::EndTurn,
        (None, false) => {
            let fix = "say why: refusal, max_turns, budget_exceeded, timeout or context_too_long";
            return Err(ApiError::field("stop_reason", "", "is missing", fix));
        }
    };
    if t.final_output.chars().count() > MAX_OUTPUT_CHARS {
        return Err(ApiError::field("final_output", "…", "is too long", "send at most 50000 characters"));
    }
    let data = json!({
        "success": t.success, "stop_reason": stop, "turns": t.turns, "tool_calls": t.tool_calls, "errors": [],
        "cost_usd": 0.0, "usage": {}, "final_output": t.final_output, "branch_name": "", "duration_ms": 0,
    });
    let id = format!("{TASK_COMPLETED}/{}", claims.attempt);
    let testimony = Testimony { id: Some(id), kind: TASK_COMPLETED.into(), at: inside.now(), data };
    inside.0.desk.testify(&claims, &testimony).await?;
    Ok(Json(Reported { status: "received".into(), task_id: format!("{}/{}", claims.run, claims.fork) }))
}
