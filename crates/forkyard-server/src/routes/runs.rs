//! Runs: submitted, listed, steered.

use axum::Extension;
use axum::extract::State;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use forkyard_core::run::Command;
use forkyard_core::view::RunView;
use forkyard_engine::activities::is_url;
use forkyard_engine::log;
use forkyard_store::RunQuery;

use crate::App;
use crate::access::Principal;
use crate::dto::event::SseMessage;
use crate::dto::run::{Accepted, CreateRun, FollowRuns, ListRuns, Run, RunDetail, RunPage, wanted};
use crate::error::{ApiError, Code, Result};
use crate::extract::{Json, Path, Query};
use crate::once::Key;
use crate::page;
use crate::requests::new_run_id;
use crate::stream;

/// Runs, newest first. With a search, an outcome or `live` only those; pages go on as before.
#[utoipa::path(get, path = "/api/v1/runs", tag = "runs", params(ListRuns), security(("token" = ["read"])),
    responses((status = 200, body = RunPage)))]
pub(super) async fn list_runs(State(app): State<App>, Query(q): Query<ListRuns>) -> Result<Json<RunPage>> {
    let limit = page::limit(q.limit)?;
    let before = q.cursor.as_deref().map(page::read_run_cursor).transpose()?;
    let wanted = wanted(q.live, q.outcome.as_deref(), q.search.as_deref())?;
    let query = RunQuery { before, limit: limit + 1, ..wanted };
    let mut found = app.store().runs(&query).await?;
    let more = found.len() > limit;
    found.truncate(limit);
    let next_cursor = found.last().filter(|_| more).map(|v| page::run_cursor(v.created_at, &v.id));
    let mut runs: Vec<Run> = Vec::with_capacity(found.len());
    for view in &found {
        let spent = app.store().balance(&view.id).await?.spent;
        runs.push(Run { cost_usd: Some(spent.as_dollars()), ..view.into() });
    }
    let counts = match q.counts {
        Some(true) => Some(app.store().count_runs(&query.words).await?.into()),
        Some(false) | None => None,
    };
    Ok(Json(RunPage { runs, next_cursor, counts }))
}

/// Runs as they change: `{"run": …}` for each that is asked for, as the list has it, and `{"gone": "ID"}` for each that is
/// none of them any more.
///
/// `again` says that the list should be read (again): at the start, and whenever it is not known which runs have changed.
/// Whoever reads it then, and takes what follows, misses nothing.
#[utoipa::path(get, path = "/api/v1/runs/stream", tag = "runs", params(FollowRuns), security(("token" = ["read"])),
    responses((status = 200, content_type = "text/event-stream", body = SseMessage)))]
pub(super) async fn stream_runs(
    State(app): State<App>,
    Extension(by): Extension<Principal>,
    Query(q): Query<FollowRuns>,
) -> Result<Response> {
    let wanted = wanted(q.live, q.outcome.as_deref(), q.search.as_deref())?;
    let runs = app.feeds().follow_runs(wanted);
    Ok(stream::response(&app, by, runs))
}

/// Submits a run. With an `Idempotency-Key` that was used before, the run that it made is the answer, with status 200.
#[utoipa::path(post, path = "/api/v1/runs", tag = "runs", request_body = CreateRun, security(("token" = ["steer"])),
    params(("Idempotency-Key" = Option<String>, Header, description = "Makes the same request twice one run")),
    responses((status = 201, body = Run), (status = 200, body = Run)))]
pub(super) async fn create_run(
    State(app): State<App>,
    Extension(by): Extension<Principal>,
    headers: HeaderMap,
    Json(request): Json<CreateRun>,
) -> Result<Response> {
    let key = Key::read(&headers, &by)?;
    let act = submit(&app, &by, &request, key.as_ref());
    let done = app.once(key.as_ref(), "runs", None, &request, act).await?;
    let (id, made) = done.answer;
    let view = app.run(&id).await?;
    let status = if done.new && made { StatusCode::CREATED } else { StatusCode::OK };
    let mut response = (status, Json(Run::from(&view))).into_response();
    if let Ok(at) = HeaderValue::from_str(&format!("/api/v1/runs/{}", view.id)) {
        response.headers_mut().insert(header::LOCATION, at);
    }
    Ok(response)
}

/// The run's id, and whether it was made now.
async fn submit(app: &App, by: &Principal, request: &CreateRun, key: Option<&Key>) -> Result<(String, bool)> {
    let spec = app.run_spec(request.clone())?;
    let parts = app.parts();
    if !is_url(&spec.repo.source) {
        let repo = parts.git.open(std::path::Path::new(&spec.repo.source)).await?;
        parts.git.resolve(&repo, spec.repo.branch.as_deref()).await?;
    }
    app.check_starts(&spec).await?;
    let id = new_run_id();
    let (by, own) = (by.by(), key.map(|k| k.as_str().to_string()));
    let made = app.steering(&by).submit(app.engine(), id.clone(), spec.clone(), own).await?;
    // What was known of the key can have made room for others; the store has the key of a run for as long as the run.
    if made != id {
        let same = log::load_run(app.store(), &made).await?.is_some_and(|(run, _)| *run.spec() == spec);
        if !same {
            return Err(ApiError::new(
                Code::KeyReused,
                format!("the key was used for run {made}, which asked for something else"),
            )
            .hint("use a new key for a new request"));
        }
    }
    Ok((made.to_string(), made == id))
}

/// A run with its forks and its money.
#[utoipa::path(get, path = "/api/v1/runs/{run}", tag = "runs", params(("run" = String, Path)),
    security(("token" = ["read"])), responses((status = 200, body = RunDetail)))]
pub(super) async fn get_run(State(app): State<App>, Path(run): Path<String>) -> Result<Json<RunDetail>> {
    let view = app.run(&run).await?;
    let forks = app.store().forks(&view.id).await?;
    let balance = app.store().balance(&view.id).await?;
    let position = app.store().last_position(&view.id).await?;
    Ok(Json(RunDetail::new(&view, &forks, &balance, position)))
}

/// No fork starts and no model is asked until it is resumed; running tools finish.
#[utoipa::path(post, path = "/api/v1/runs/{run}/pause", tag = "runs", params(("run" = String, Path)),
    security(("token" = ["steer"])), responses((status = 202, body = Accepted)))]
pub(super) async fn pause_run(
    State(app): State<App>,
    Extension(by): Extension<Principal>,
    Path(run): Path<String>,
) -> Result<(StatusCode, Json<Accepted>)> {
    let view = app.live_run(&run).await?;
    command(&app, &by, &view, Command::Pause, None).await
}

/// Goes on with a run that is paused, detached or lost its driver.
#[utoipa::path(post, path = "/api/v1/runs/{run}/resume", tag = "runs", params(("run" = String, Path)),
    security(("token" = ["steer"])), responses((status = 202, body = Accepted)))]
pub(super) async fn resume_run(
    State(app): State<App>,
    Extension(by): Extension<Principal>,
    Path(run): Path<String>,
) -> Result<(StatusCode, Json<Accepted>)> {
    let view = app.live_run(&run).await?;
    command(&app, &by, &view, Command::Resume, None).await
}

/// Ends a run: what was done is collected, then everything is cleaned up.
#[utoipa::path(post, path = "/api/v1/runs/{run}/cancel", tag = "runs", params(("run" = String, Path)),
    security(("token" = ["steer"])), responses((status = 202, body = Accepted)))]
pub(super) async fn cancel_run(
    State(app): State<App>,
    Extension(by): Extension<Principal>,
    Path(run): Path<String>,
) -> Result<(StatusCode, Json<Accepted>)> {
    let view = app.live_run(&run).await?;
    command(&app, &by, &view, Command::Cancel, None).await
}

/// Recorded, then passed on to whoever drives the run.
pub(super) async fn command(
    app: &App,
    by: &Principal,
    view: &RunView,
    command: Command,
    key: Option<&Key>,
) -> Result<(StatusCode, Json<Accepted>)> {
    let name = command.name();
    let (by, own) = (by.by(), key.map(|k| k.as_str().to_string()));
    app.steering(&by).command(app.engine(), &view.id, command, own).await?;
    Ok((StatusCode::ACCEPTED, Json(Accepted::new(view, name))))
}
