//! A fork's agent by the sandbox that it works in: what was reported of it, its task, and ways to speak to it.

use axum::Extension;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use forkyard_core::view::{ForkView, Lifecycle, RunView};
use forkyard_core::{ForkNum, SandboxId};
use forkyard_engine::inside::Claims;
use forkyard_engine::ports::{MessageKind, StoredText};
use forkyard_store::{AuditQuery, EventQuery, Recorded, Store};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::{IntoParams, ToSchema};

use super::forks::say;
use crate::App;
use crate::access::Principal;
use crate::dto::event::{Event, Source, kinds};
use crate::dto::fork::{ForkOutcome, InterventionSource, Message, MessageType, Priority, Queued, normal};
use crate::error::{ApiError, Code, Result};
use crate::extract::{Json, Path, Query};
use crate::once::Key;
use crate::page;

const DEFAULT_LIMIT: u32 = 100;
/// What is older is read from the beginning.
const MAX_OFFSET: usize = 100_000;

impl App {
    /// The run that a sandbox is of, and the fork that works in it, also when the sandbox is gone.
    pub(super) async fn whose(&self, sandbox: &str) -> Result<(String, Option<ForkNum>)> {
        let id = App::sandbox_id(sandbox)?;
        let missing = || ApiError::new(Code::SandboxNotFound, format!("no run has a sandbox {id}"));
        let query = EventQuery { limit: 1, newest_first: true, ..Default::default() };
        if let Some(event) = self.store().read_sandbox(&id, &query).await?.first() {
            return Ok((event.stream.run().to_string(), event.stream.fork()));
        }
        // Nothing of it is recorded yet. Whoever has it may have to look at a whole machine.
        let (_, info) = self.parts().sandboxes.find(&id).await.map_err(|_| missing())?;
        let run = info.labels.get("run").ok_or_else(missing)?;
        Ok((run.clone(), info.labels.get("fork").and_then(|n| n.parse().ok())))
    }

    /// The fork that a sandbox works for, also when the sandbox is gone.
    async fn fork_of(&self, sandbox: &str) -> Result<(RunView, ForkView)> {
        let missing =
            || ApiError::new(Code::SandboxNotFound, format!("no fork works in a sandbox {sandbox}"));
        let (run, fork) = self.whose(sandbox).await?;
        let fork = fork.ok_or_else(missing)?;
        let run = self.run(&run).await.map_err(|_| missing())?;
        let fork = self.fork(&run, fork).await.map_err(|_| missing())?;
        Ok((run, fork))
    }
}

#[derive(Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct ReadSandboxEvents {
    #[param(minimum = 1, maximum = 500)]
    limit: Option<u32>,
    /// Newer ones that are left out.
    #[param(maximum = 100000)]
    offset: Option<u32>,
    event_type: Option<String>,
}

#[derive(Serialize, ToSchema)]
pub(super) struct SandboxEvent {
    id: u64,
    event_type: String,
    event_data: Value,
    source: Source,
    /// Milliseconds since 1970.
    created_at: u64,
}

#[derive(Serialize, ToSchema)]
pub(super) struct SandboxEvents {
    events: Vec<SandboxEvent>,
    total_count: usize,
    sandbox_id: String,
}

/// What was reported of a sandbox, newest first.
#[utoipa::path(get, path = "/api/v1/sandboxes/{sandbox}/events", tag = "sandboxes",
    params(("sandbox" = String, Path), ReadSandboxEvents), security(("token" = ["read"])),
    responses((status = 200, body = SandboxEvents)))]
pub(super) async fn sandbox_events(
    State(app): State<App>,
    Path(sandbox): Path<String>,
    Query(q): Query<ReadSandboxEvents>,
) -> Result<Json<SandboxEvents>> {
    let id = App::sandbox_id(&sandbox)?;
    let limit = page::limit(Some(q.limit.unwrap_or(DEFAULT_LIMIT)))?;
    let offset = q.offset.unwrap_or(0) as usize;
    if offset > MAX_OFFSET {
        return Err(ApiError::field(
            "offset",
            offset.to_string(),
            "is out of range",
            "use /trajectory for what is older",
        ));
    }
    let kinds = kinds(q.event_type.as_deref())?;
    let total_count = app.store().count_sandbox(&id, &kinds).await?;
    if total_count == 0 {
        app.fork_of(&sandbox).await?;
    }
    let mut query = EventQuery { kinds, newest_first: true, skip: offset, limit, ..Default::default() };
    let mut events: Vec<SandboxEvent> = Vec::new();
    // Large events make short pages of the store; an answer has as many as it was asked for.
    while query.limit > 0 {
        let found = app.store().read_sandbox(&id, &query).await?;
        let Some(oldest) = found.last() else { break };
        (query.before, query.skip) = (Some(oldest.position), 0);
        query.limit -= found.len();
        events.extend(found.into_iter().map(Into::into));
    }
    Ok(Json(SandboxEvents { events, total_count: total_count as usize, sandbox_id: sandbox }))
}

impl From<Recorded> for SandboxEvent {
    fn from(r: Recorded) -> SandboxEvent {
        let e = Event::from(r);
        SandboxEvent {
            id: e.position,
            event_type: e.kind,
            event_data: e.data,
            source: e.source,
            created_at: e.at,
        }
    }
}

#[derive(Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct ReadTrajectory {
    #[param(minimum = 1, maximum = 500)]
    limit: Option<u32>,
    /// `next_cursor` of the page before.
    cursor: Option<String>,
}

#[derive(Serialize, ToSchema)]
pub(super) struct Trajectory {
    sandbox_id: String,
    events: Vec<SandboxEvent>,
    /// Heartbeats of this page, which are left out of it.
    heartbeats: Heartbeats,
    /// For the next page; null when there is nothing more now.
    next_cursor: Option<String>,
}

#[derive(Serialize, ToSchema)]
pub(super) struct Heartbeats {
    count: usize,
    first_at: Option<u64>,
    last_at: Option<u64>,
}

/// What happened in a sandbox from its beginning, without heartbeats.
#[utoipa::path(get, path = "/api/v1/sandboxes/{sandbox}/trajectory", tag = "sandboxes",
    params(("sandbox" = String, Path), ReadTrajectory), security(("token" = ["read"])),
    responses((status = 200, body = Trajectory)))]
pub(super) async fn sandbox_trajectory(
    State(app): State<App>,
    Path(sandbox): Path<String>,
    Query(q): Query<ReadTrajectory>,
) -> Result<Json<Trajectory>> {
    let id = App::sandbox_id(&sandbox)?;
    let after = q.cursor.as_deref().map(page::read_number_cursor).transpose()?.unwrap_or(0);
    let query = EventQuery { after, limit: page::limit(q.limit)?, ..Default::default() };
    let found = app.store().read_sandbox(&id, &query).await?;
    if found.is_empty() && after == 0 {
        app.fork_of(&sandbox).await?;
    }
    let next_cursor = found.last().map(|r| r.position.to_string());
    let (beats, events): (Vec<Recorded>, Vec<Recorded>) =
        found.into_iter().partition(|r| r.event.kind == "agent.heartbeat");
    let heartbeats = Heartbeats {
        count: beats.len(),
        first_at: beats.first().map(|r| r.event.at.0),
        last_at: beats.last().map(|r| r.event.at.0),
    };
    let events = events.into_iter().map(Into::into).collect();
    Ok(Json(Trajectory { sandbox_id: sandbox, events, heartbeats, next_cursor }))
}

#[derive(Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum TaskStatus {
    Pending,
    Assigned,
    Running,
    Completed,
    Failed,
}

/// A fork, as whoever works in its sandbox sees it.
#[derive(Serialize, ToSchema)]
pub(crate) struct Task {
    sandbox_id: String,
    /// RUN/N.
    task_id: String,
    status: TaskStatus,
    outcome: Option<ForkOutcome>,
    model: String,
    error: Option<String>,
}

/// Picked up is a task whose worker has been heard of, whatever its lifecycle says by now.
pub(crate) async fn task_of(store: &dyn Store, sandbox: &SandboxId, fork: ForkView) -> Result<Task> {
    let status = match fork.lifecycle {
        Lifecycle::Pending => TaskStatus::Pending,
        Lifecycle::Creating => {
            let heard = EventQuery { kinds: vec!["agent.".into()], limit: 1, ..Default::default() };
            if store.read_sandbox(sandbox, &heard).await?.is_empty() {
                TaskStatus::Assigned
            } else {
                TaskStatus::Running
            }
        }
        Lifecycle::Running | Lifecycle::Completing => TaskStatus::Running,
        Lifecycle::Completed => TaskStatus::Completed,
        Lifecycle::Failed => TaskStatus::Failed,
    };
    Ok(Task {
        sandbox_id: sandbox.to_string(),
        task_id: format!("{}/{}", fork.run, fork.fork),
        status,
        outcome: fork.outcome.map(Into::into),
        model: fork.model,
        error: fork.error,
    })
}

/// The task of the agent in a sandbox.
#[utoipa::path(get, path = "/api/v1/sandboxes/{sandbox}/task", tag = "sandboxes", params(("sandbox" = String, Path)),
    security(("token" = ["read"]), ("sandbox" = [])), responses((status = 200, body = Task)))]
pub(super) async fn sandbox_task(
    State(app): State<App>,
    claims: Option<Extension<Claims>>,
    Path(sandbox): Path<String>,
) -> Result<Json<Task>> {
    let fork = match claims {
        // Whoever is inside says by its token whom it works for.
        Some(Extension(c)) => app.fork(&app.run(c.run.as_str()).await?, c.fork).await?,
        None => app.fork_of(&sandbox).await?.1,
    };
    Ok(Json(task_of(app.store(), &App::sandbox_id(&sandbox)?, fork).await?))
}

/// Says something to the agent in a sandbox.
#[utoipa::path(post, path = "/api/v1/sandboxes/{sandbox}/messages", tag = "sandboxes",
    params(("sandbox" = String, Path), ("Idempotency-Key" = Option<String>, Header, description = "Makes the same request twice one message")),
    request_body = Message, security(("token" = ["steer"])), responses((status = 202, body = Queued)))]
pub(super) async fn sandbox_message(
    State(app): State<App>,
    Extension(by): Extension<Principal>,
    Path(sandbox): Path<String>,
    headers: HeaderMap,
    Json(m): Json<Message>,
) -> Result<(StatusCode, Json<Queued>)> {
    let (run, fork) = app.fork_of(&sandbox).await?;
    let text = StoredText::new(m.kind.into(), m.content);
    say(&app, &by, &run, &fork, text, Key::read(&headers, &by)?).await
}

#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(super) enum InjectMode {
    /// What the agent does is stopped for it.
    Immediate,
    /// The running tool call ends first; it is read before the next one.
    NextTurn,
}

#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct Intervention {
    /// At most 10,000 characters; control characters are dropped.
    message: String,
    /// Who speaks; the agent is told. Unsaid: user.
    #[serde(default = "user")]
    source: InterventionSource,
    /// Urgent ones are read before all others that wait.
    #[serde(default = "normal")]
    priority: Priority,
    /// Unsaid: immediate if it is urgent, next_turn otherwise.
    #[serde(default)]
    inject_mode: Option<InjectMode>,
}

fn user() -> InterventionSource {
    InterventionSource::User
}

impl From<Intervention> for StoredText {
    fn from(i: Intervention) -> StoredText {
        let mode = i.inject_mode.unwrap_or(match i.priority {
            Priority::Urgent => InjectMode::Immediate,
            Priority::Normal => InjectMode::NextTurn,
        });
        let kind = match (mode, i.source) {
            (InjectMode::Immediate, _) => MessageKind::Interrupt,
            (InjectMode::NextTurn, InterventionSource::Guardian) => MessageKind::GuardianNudge,
            (InjectMode::NextTurn, InterventionSource::User) => MessageKind::UserMessage,
            (InjectMode::NextTurn, InterventionSource::System) => MessageKind::System,
        };
        let (source, priority) = (Some(i.source.into()), i.priority.into());
        StoredText { kind, content: i.message, source, priority }
    }
}

/// How a message is meant, whichever way it was sent.
#[derive(Serialize, ToSchema)]
pub(super) struct Meant {
    #[serde(rename = "type")]
    kind: MessageType,
    source: InterventionSource,
    priority: Priority,
    inject_mode: InjectMode,
}

impl From<&StoredText> for Meant {
    fn from(text: &StoredText) -> Meant {
        let inject_mode = match text.kind {
            MessageKind::Interrupt => InjectMode::Immediate,
            MessageKind::UserMessage | MessageKind::GuardianNudge | MessageKind::System => {
                InjectMode::NextTurn
            }
        };
        let (kind, source) = (text.kind.into(), text.speaker().into());
        Meant { kind, source, priority: text.priority.into(), inject_mode }
    }
}

#[derive(Serialize, ToSchema)]
pub(super) struct Intervened {
    #[serde(flatten)]
    queued: Queued,
    #[serde(flatten)]
    meant: Meant,
}

/// Steers the agent in a sandbox.
#[utoipa::path(post, path = "/api/v1/sandboxes/{sandbox}/interventions", tag = "sandboxes",
    params(("sandbox" = String, Path), ("Idempotency-Key" = Option<String>, Header, description = "Makes the same request twice one message")),
    request_body = Intervention, security(("token" = ["steer"])), responses((status = 202, body = Intervened)))]
pub(super) async fn intervene(
    State(app): State<App>,
    Extension(by): Extension<Principal>,
    Path(sandbox): Path<String>,
    headers: HeaderMap,
    Json(i): Json<Intervention>,
) -> Result<(StatusCode, Json<Intervened>)> {
    let (run, fork) = app.fork_of(&sandbox).await?;
    let text = StoredText::from(i);
    let meant = Meant::from(&text);
    let key = Key::read(&headers, &by)?;
    let (status, Json(queued)) = say(&app, &by, &run, &fork, text, key).await?;
    Ok((status, Json(Intervened { queued, meant })))
}

#[derive(Serialize, ToSchema)]
pub(super) struct Interventions {
    interventions: Vec<PastIntervention>,
    /// For the next page; null at the end.
    next_cursor: Option<String>,
}

#[derive(Serialize, ToSchema)]
pub(super) struct PastIntervention {
    id: u64,
    /// Milliseconds since 1970.
    at: u64,
    /// Of the token that it was said with; `local`: at the machine itself.
    token_id: String,
    who: String,
    /// Its first 2,000 characters.
    message: String,
    #[serde(flatten)]
    meant: Meant,
}

/// What was said to the agent in a sandbox, by this API or on its machine, newest first: for as long as the audit trail is kept.
#[utoipa::path(get, path = "/api/v1/sandboxes/{sandbox}/interventions", tag = "sandboxes",
    params(("sandbox" = String, Path), ReadTrajectory), security(("token" = ["read"])),
    responses((status = 200, body = Interventions)))]
pub(super) async fn list_interventions(
    State(app): State<App>,
    Path(sandbox): Path<String>,
    Query(q): Query<ReadTrajectory>,
) -> Result<Json<Interventions>> {
    let (run, fork) = app.fork_of(&sandbox).await?;
    let limit = page::limit(q.limit)?;
    let before = q.cursor.as_deref().map(page::read_number_cursor).transpose()?;
    let target = Some(format!("{}/{}", run.id, fork.fork));
    let found = app.store().audit(&AuditQuery { before, target, limit }).await?;
    let next_cursor = found.last().filter(|_| found.len() == limit).map(|e| e.id.to_string());
    let said = found.into_iter().filter(|e| e.deed.action == "fork.message");
    let interventions = said
        .filter_map(|e| {
            let text: StoredText = serde_json::from_value(e.deed.detail).ok()?;
            let meant = Meant::from(&text);
            Some(PastIntervention {
                id: e.id,
                at: e.deed.at.0,
                token_id: e.deed.token,
                who: e.deed.who,
                message: text.content,
                meant,
            })
        })
        .collect();
    Ok(Json(Interventions { interventions, next_cursor }))
}
