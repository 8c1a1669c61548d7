//! Forks: looked at, talked to, their results taken.

use axum::Extension;
use axum::extract::State;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use forkyard_core::ForkNum;
use forkyard_core::run::Command;
use forkyard_core::spec::ForkSpec;
use forkyard_core::view::{ForkView, RunView};
use forkyard_engine::activities::captured_key;
use forkyard_engine::git::{DiffSummary, MAX_OUTPUT_BYTES};
use forkyard_engine::ports::{MessageKind, StoredText};
use forkyard_engine::results::{self, Outcome};
use forkyard_engine::{EngineError, log};
use forkyard_store::EventQuery;
use serde_json::json;

use super::runs::command;
use crate::App;
use crate::access::Principal;
use crate::dto::Raw;
use crate::dto::event::{Event, EventPage};
use crate::dto::fork::{Checkpoint, Checkpoints, Commits, Fork, ForkList, Interrupt, Message, Queued};
use crate::dto::result::{
    Comparison, Diff, FileContent, Files, OneFile, PageOf, PatchOf, ResultFiles, Results, WhichForks,
};
use crate::dto::run::{Accepted, AddForks};
use crate::error::{ApiError, Code, Result};
use crate::extract::{Json, Path, Query};
use crate::once::Key;
use crate::page;

/// Bytes of a patch that is shown; the whole is at `/patch`.
const MAX_SHOWN_PATCH: usize = 1 << 20;
/// Bytes of one file of a result.
const MAX_FILE_BYTES: u64 = 32 << 20;
const MAX_MESSAGE_CHARS: usize = 10_000;
/// Commits of a result that are listed.
const MAX_COMMITS: usize = 100;

type At = (String, u32);

async fn found(app: &App, (run, fork): &At) -> Result<(RunView, ForkView)> {
    let run = app.run(run).await?;
    let fork = app.fork(&run, *fork).await?;
    Ok((run, fork))
}

/// A run's forks, in order of their numbers.
#[utoipa::path(get, path = "/api/v1/runs/{run}/forks", tag = "forks", params(("run" = String, Path)),
    security(("token" = ["read"])), responses((status = 200, body = ForkList)))]
pub(super) async fn list_forks(State(app): State<App>, Path(run): Path<String>) -> Result<Json<ForkList>> {
    let run = app.run(&run).await?;
    let forks = app.store().forks(&run.id).await?;
    Ok(Json(ForkList { forks: forks.iter().map(Into::into).collect() }))
}

/// Adds forks to a live run.
#[utoipa::path(post, path = "/api/v1/runs/{run}/forks", tag = "forks", request_body = AddForks,
    params(("run" = String, Path), ("Idempotency-Key" = Option<String>, Header, description = "Makes the same request twice one")),
    security(("token" = ["steer"])), responses((status = 202, body = Accepted)))]
pub(super) async fn add_forks(
    State(app): State<App>,
    Extension(by): Extension<Principal>,
    Path(run): Path<String>,
    headers: HeaderMap,
    Json(request): Json<AddForks>,
) -> Result<(StatusCode, Json<Accepted>)> {
    let (view, key) = (app.run(&run).await?, Key::read(&headers, &by)?);
    let act = add(&app, &by, &request, &run, key.as_ref());
    let done = app.once(key.as_ref(), "forks", Some(&view.id), &request, act).await?;
    Ok((StatusCode::ACCEPTED, Json(done.answer)))
}

async fn add(
    app: &App,
    by: &Principal,
    request: &AddForks,
    run: &str,
    key: Option<&Key>,
) -> Result<Accepted> {
    let view = app.live_run(run).await?;
    let missing = || ApiError::from(EngineError::NoSuchRun(view.id.clone()));
    let (state, _) = log::load_run(app.store(), &view.id).await?.ok_or_else(missing)?;
    let first = state.spec().forks.first().cloned().unwrap_or_default();
    let mut like = ForkSpec { name: None, ..first };
    if let Some(prompt) = &request.prompt {
        like.prompt = prompt.clone();
    }
    if let Some(model) = &request.model {
        app.check_model(model)?;
        like.model = model.clone();
    }
    let count = request.forks.unwrap_or(1);
    let forks = vec![like; count.min(forkyard_core::spec::MAX_FORKS + 1) as usize];
    state.spec().validate_added(state.fork_count(), &forks, |m| app.parts().models.known(m))?;
    let (_, Json(accepted)) = command(app, by, &view, Command::AddForks { forks }, key).await?;
    Ok(accepted)
}

/// What came of a run: its forks, ranked.
#[utoipa::path(get, path = "/api/v1/runs/{run}/results", tag = "runs", params(("run" = String, Path)),
    security(("token" = ["read"])), responses((status = 200, body = Results)))]
pub(super) async fn run_results(State(app): State<App>, Path(run): Path<String>) -> Result<Json<Results>> {
    let view = app.run(&run).await?;
    let forks = app.store().forks(&view.id).await?;
    let state = log::load_run(app.store(), &view.id).await?;
    Ok(Json(Results::new(&view, &forks, state.map(|(s, _)| s.ranking().clone()).unwrap_or_default())))
}

/// What the results agree and differ on, file by file.
#[utoipa::path(get, path = "/api/v1/runs/{run}/compare", tag = "runs", params(("run" = String, Path), WhichForks),
    security(("token" = ["read"])), responses((status = 200, body = Comparison)))]
pub(super) async fn compare_run(
    State(app): State<App>,
    Path(run): Path<String>,
    Query(which): Query<WhichForks>,
) -> Result<Json<Comparison>> {
    let view = app.run(&run).await?;
    let wanted = which.read()?;
    let forks = app.store().forks(&view.id).await?;
    for n in &wanted {
        app.fork(&view, *n).await?;
    }
    let chosen = forks.iter().filter(|f| wanted.is_empty() || wanted.contains(&f.fork));
    let ready: Vec<ForkNum> = chosen.filter(|f| f.diff.is_some()).map(|f| f.fork).collect();
    let compared = results::compare(&app.parts().git, app.store(), &view, &ready).await?;
    if compared.changes.is_empty() {
        return Err(ApiError::new(Code::NoResult, format!("no fork of {} has a result yet", view.id)));
    }
    Ok(Json(Comparison::new(&view, compared)))
}

/// One fork.
#[utoipa::path(get, path = "/api/v1/runs/{run}/forks/{fork}", tag = "forks", params(("run" = String, Path), ("fork" = u32, Path)),
    security(("token" = ["read"])), responses((status = 200, body = Fork)))]
pub(super) async fn get_fork(State(app): State<App>, Path(at): Path<At>) -> Result<Json<Fork>> {
    Ok(Json((&found(&app, &at).await?.1).into()))
}

async fn outcome(app: &App, at: &At) -> Result<(RunView, ForkView, Outcome)> {
    let (run, fork) = found(app, at).await?;
    let none = || {
        ApiError::new(
            Code::NoResult,
            format!("fork {} of {} has left no result, or not yet", fork.fork, run.id),
        )
    };
    // Before it is collected there is nothing to look for in a repository.
    if fork.diff.is_none() {
        return Err(none());
    }
    let outcome = results::outcome(&app.parts().git, app.store(), &run, fork.fork).await?.ok_or_else(none)?;
    Ok((run, fork, outcome))
}

/// What a fork changed, from objects alone; with `path`, of one file or folder.
#[utoipa::path(get, path = "/api/v1/runs/{run}/forks/{fork}/diff", tag = "forks",
    params(("run" = String, Path), ("fork" = u32, Path), OneFile),
    security(("token" = ["read"])), responses((status = 200, body = Diff)))]
pub(super) async fn fork_diff(
    State(app): State<App>,
    Path(at): Path<At>,
    Query(of): Query<OneFile>,
) -> Result<Json<Diff>> {
    let (run, fork, o) = outcome(&app, &at).await?;
    let git = &app.parts().git;
    let mut summary = git.diff(&o.repo, &o.base, &o.commit).await?;
    let mut paths = vec![];
    if let Some(path) = of.path {
        let path = path.trim_end_matches('/').to_string();
        only_below(&mut summary, &path);
        // Names of the result, not of the request: git takes some names for patterns.
        paths = summary.files.iter().map(|f| f.path.clone()).collect();
        if paths.is_empty() {
            return Err(ApiError::new(
                Code::FileNotFound,
                format!("fork {} did not change {path:?}", fork.fork),
            ));
        }
    }
    let patch = git.patch_of(&o.repo, &o.base, &o.commit, &paths, MAX_OUTPUT_BYTES).await?;
    Ok(Json(Diff::new(&run, &fork, &o, summary, &patch, MAX_SHOWN_PATCH)))
}

/// The result as a patch that `git apply` takes, binary files included.
#[utoipa::path(get, path = "/api/v1/runs/{run}/forks/{fork}/patch", tag = "forks",
    params(("run" = String, Path), ("fork" = u32, Path), PatchOf), security(("token" = ["read"])),
    responses((status = 200, content_type = "text/x-patch", body = String)))]
pub(super) async fn fork_patch(
    State(app): State<App>,
    Path(at): Path<At>,
    Query(of): Query<PatchOf>,
) -> Result<Response> {
    let (run, fork, o) = outcome(&app, &at).await?;
    let git = &app.parts().git;
    let patch = if of.text.unwrap_or(false) || of.path.is_some() {
        let mut summary = git.diff(&o.repo, &o.base, &o.commit).await?;
        let mut paths = vec![];
        if let Some(path) = &of.path {
            only_below(&mut summary, path);
            paths = summary.files.iter().map(|f| f.path.clone()).collect();
        }
        match of.path.is_some() && paths.is_empty() {
            true => vec![],
            false => git.patch_of(&o.repo, &o.base, &o.commit, &paths, MAX_OUTPUT_BYTES).await?,
        }
    } else {
        git.patch(&o.repo, &o.base, &o.commit, MAX_OUTPUT_BYTES).await?
    };
    let name = format!("attachment; filename=\"{}-{}.patch\"", run.id, fork.fork);
    let name = HeaderValue::from_str(&name).map_err(|e| ApiError::new(Code::Internal, e.to_string()))?;
    let kind = HeaderValue::from_static("text/x-patch");
    Ok(([(header::CONTENT_TYPE, kind), (header::CONTENT_DISPOSITION, name)], patch).into_response())
}

fn only_below(summary: &mut DiffSummary, path: &str) {
    let path = path.trim_end_matches('/');
    let below = |f: &str| f.strip_prefix(path).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'));
    summary.files.retain(|f| below(&f.path));
}

/// The result's commits and all that is new in them, as a git pack: `git index-pack --stdin` takes it where the base is.
#[utoipa::path(get, path = "/api/v1/runs/{run}/forks/{fork}/pack", tag = "forks",
    params(("run" = String, Path), ("fork" = u32, Path)), security(("token" = ["read"])),
    responses((status = 200, content_type = "application/octet-stream", body = inline(Raw))))]
pub(super) async fn fork_pack(State(app): State<App>, Path(at): Path<At>) -> Result<Response> {
    let (_, _, o) = outcome(&app, &at).await?;
    let pack = app.parts().git.pack(&o.repo, &o.base, &o.commit).await?;
    let kind = HeaderValue::from_static("application/octet-stream");
    Ok(([(header::CONTENT_TYPE, kind)], pack).into_response())
}

/// The commits of a result, newest first.
#[utoipa::path(get, path = "/api/v1/runs/{run}/forks/{fork}/commits", tag = "forks",
    params(("run" = String, Path), ("fork" = u32, Path)), security(("token" = ["read"])),
    responses((status = 200, body = Commits)))]
pub(super) async fn fork_commits(State(app): State<App>, Path(at): Path<At>) -> Result<Json<Commits>> {
    let (_, _, o) = outcome(&app, &at).await?;
    let found = app.parts().git.log(&o.repo, &o.base, &o.commit, MAX_COMMITS).await?;
    Ok(Json(Commits { commits: found.into_iter().map(Into::into).collect() }))
}

/// One file that was captured beside the diff, as it is.
#[utoipa::path(get, path = "/api/v1/runs/{run}/forks/{fork}/captured/content", tag = "forks",
    params(("run" = String, Path), ("fork" = u32, Path), FileContent), security(("token" = ["read"])),
    responses((status = 200, content_type = "application/octet-stream", body = inline(Raw))))]
pub(super) async fn captured_file(
    State(app): State<App>,
    Path(at): Path<At>,
    Query(of): Query<FileContent>,
) -> Result<Response> {
    let (run, fork) = found(&app, &at).await?;
    let missing = || ApiError::new(Code::FileNotFound, format!("no file {:?} was captured", of.path));
    let state = log::load_fork(app.store(), &run.id, fork.fork).await?.ok_or_else(missing)?.0;
    // Only what the fork itself names: a path from outside is no key of the store.
    let captured = state.result().collected.map(|c| c.captured).unwrap_or_default();
    let path = captured.into_iter().find(|p| *p == of.path).ok_or_else(missing)?;
    let data = app.store().blob(&captured_key(&run.id, fork.fork, &path)).await?.ok_or_else(missing)?;
    let kind = HeaderValue::from_static("application/octet-stream");
    Ok(([(header::CONTENT_TYPE, kind)], data).into_response())
}

/// The files of a result, and which of them it changed.
#[utoipa::path(get, path = "/api/v1/runs/{run}/forks/{fork}/files", tag = "forks",
    params(("run" = String, Path), ("fork" = u32, Path), Files), security(("token" = ["read"])),
    responses((status = 200, body = ResultFiles)))]
pub(super) async fn fork_files(
    State(app): State<App>,
    Path(at): Path<At>,
    Query(q): Query<Files>,
) -> Result<Json<ResultFiles>> {
    let limit = page::limit(q.limit)?;
    let (_, _, o) = outcome(&app, &at).await?;
    let git = &app.parts().git;
    let changed = git.diff(&o.repo, &o.base, &o.commit).await?;
    let tree = if q.changed.unwrap_or(false) { None } else { Some(git.tree(&o.repo, &o.commit).await?) };
    Ok(Json(ResultFiles::new(changed, tree, q.cursor.as_deref(), limit)))
}

/// One file of a result, as it is.
#[utoipa::path(get, path = "/api/v1/runs/{run}/forks/{fork}/files/content", tag = "forks",
    params(("run" = String, Path), ("fork" = u32, Path), FileContent), security(("token" = ["read"])),
    responses((status = 200, content_type = "application/octet-stream", body = inline(Raw))))]
pub(super) async fn fork_file(
    State(app): State<App>,
    Path(at): Path<At>,
    Query(of): Query<FileContent>,
) -> Result<Response> {
    let (_, _, o) = outcome(&app, &at).await?;
    let found = app.parts().git.file(&o.repo, &o.commit, &of.path, MAX_FILE_BYTES).await?;
    let data = found
        .ok_or_else(|| ApiError::new(Code::FileNotFound, format!("the result has no file {:?}", of.path)))?;
    let kind = HeaderValue::from_static("application/octet-stream");
    Ok(([(header::CONTENT_TYPE, kind)], data).into_response())
}

/// What a fork's agent said and did, oldest first.
#[utoipa::path(get, path = "/api/v1/runs/{run}/forks/{fork}/logs", tag = "forks",
    params(("run" = String, Path), ("fork" = u32, Path), PageOf), security(("token" = ["read"])),
    responses((status = 200, body = EventPage)))]
pub(super) async fn fork_logs(
    State(app): State<App>,
    Path(at): Path<At>,
    Query(q): Query<PageOf>,
) -> Result<Json<EventPage>> {
    let (run, fork) = found(&app, &at).await?;
    let query = EventQuery {
        after: q.after.unwrap_or(0),
        fork: Some(fork.fork),
        kinds: vec!["agent.".into()],
        limit: page::limit(q.limit)?,
        ..Default::default()
    };
    let events: Vec<Event> =
        app.store().read_run(&run.id, &query).await?.into_iter().map(Into::into).collect();
    let next_after = events.last().map(|e| e.position);
    Ok(Json(EventPage { events, next_after }))
}

/// The points that a fork could be resumed or forked from, oldest first.
#[utoipa::path(get, path = "/api/v1/runs/{run}/forks/{fork}/checkpoints", tag = "forks",
    params(("run" = String, Path), ("fork" = u32, Path), PageOf), security(("token" = ["read"])),
    responses((status = 200, body = Checkpoints)))]
pub(super) async fn fork_checkpoints(
    State(app): State<App>,
    Path(at): Path<At>,
    Query(q): Query<PageOf>,
) -> Result<Json<Checkpoints>> {
    let (run, fork) = found(&app, &at).await?;
    let query = EventQuery {
        after: q.after.unwrap_or(0),
        fork: Some(fork.fork),
        kinds: vec!["agent.checkpoint_created".into()],
        limit: page::limit(q.limit)?,
        ..Default::default()
    };
    let found = app.store().read_run(&run.id, &query).await?;
    let checkpoints: Vec<Checkpoint> = found.into_iter().map(Into::into).collect();
    let next_after = checkpoints.last().map(|c| c.position);
    Ok(Json(Checkpoints { checkpoints, next_after }))
}

/// Says something to a fork's agent; it reads it before its next tool call.
#[utoipa::path(post, path = "/api/v1/runs/{run}/forks/{fork}/messages", tag = "forks",
    params(("run" = String, Path), ("fork" = u32, Path), ("Idempotency-Key" = Option<String>, Header, description = "Makes the same request twice one message")),
    request_body = Message, security(("token" = ["steer"])), responses((status = 202, body = Queued)))]
pub(super) async fn send_message(
    State(app): State<App>,
    Extension(by): Extension<Principal>,
    Path(at): Path<At>,
    headers: HeaderMap,
    Json(message): Json<Message>,
) -> Result<(StatusCode, Json<Queued>)> {
    let (run, fork) = found(&app, &at).await?;
    let text = StoredText::new(message.kind.into(), message.content);
    say(&app, &by, &run, &fork, text, Key::read(&headers, &by)?).await
}

/// Stops what a fork's agent is doing, and says why.
#[utoipa::path(post, path = "/api/v1/runs/{run}/forks/{fork}/interrupt", tag = "forks",
    params(("run" = String, Path), ("fork" = u32, Path), ("Idempotency-Key" = Option<String>, Header, description = "Makes the same request twice one message")),
    request_body = Interrupt, security(("token" = ["steer"])), responses((status = 202, body = Queued)))]
pub(super) async fn interrupt_fork(
    State(app): State<App>,
    Extension(by): Extension<Principal>,
    Path(at): Path<At>,
    headers: HeaderMap,
    Json(message): Json<Interrupt>,
) -> Result<(StatusCode, Json<Queued>)> {
    let (run, fork) = found(&app, &at).await?;
    let text = StoredText::new(MessageKind::Interrupt, message.content);
    say(&app, &by, &run, &fork, text, Key::read(&headers, &by)?).await
}

pub(super) async fn say(
    app: &App,
    by: &Principal,
    run: &RunView,
    fork: &ForkView,
    mut text: StoredText,
    key: Option<Key>,
) -> Result<(StatusCode, Json<Queued>)> {
    // Line breaks and tabs are text; what else steers a terminal is not.
    text.content.retain(|c| !c.is_control() || matches!(c, '\n' | '\t'));
    let chars = text.content.chars().count();
    if text.content.trim().is_empty() || chars > MAX_MESSAGE_CHARS {
        let fix = format!("write 1 to {MAX_MESSAGE_CHARS} characters");
        return Err(ApiError::field("content", format!("{chars} characters"), "can't be sent", &fix));
    }
    let act = async {
        if fork.outcome.is_some() {
            return Err(ApiError::new(
                Code::Ended,
                format!("fork {} of {} has ended: nobody would read it", fork.fork, run.id),
            ));
        }
        let (by, own) = (by.by(), key.as_ref().map(|k| k.as_str().to_string()));
        let id = app.steering(&by).message(app.engine(), &run.id, fork.fork, &text, own).await?;
        Ok(Queued { status: "queued".into(), message_id: id })
    };
    let what = format!("messages/{}", fork.fork);
    let done = app.once(key.as_ref(), &what, Some(&run.id), &json!(text), act).await?;
    Ok((StatusCode::ACCEPTED, Json(done.answer)))
}

/// Ends one fork; the others go on.
#[utoipa::path(post, path = "/api/v1/runs/{run}/forks/{fork}/cancel", tag = "forks",
    params(("run" = String, Path), ("fork" = u32, Path)),
    security(("token" = ["steer"])), responses((status = 202, body = Accepted)))]
pub(super) async fn cancel_fork(
    State(app): State<App>,
    Extension(by): Extension<Principal>,
    Path(at): Path<At>,
) -> Result<(StatusCode, Json<Accepted>)> {
    let (run, number) = (app.run(&at.0).await?, at.1);
    match app.fork(&run, number).await {
        Ok(fork) if fork.outcome.is_some() => {
            return Err(ApiError::new(Code::Ended, format!("fork {number} of {} has ended", run.id)));
        }
        // It waits for its turn: of those, the run alone knows.
        Err(e) if e.code == Code::ForkNotFound && number < run.progress.total_forks => {}
        found => _ = found?,
    }
    command(&app, &by, &run, Command::CancelFork { fork: number }, None).await
}
