//! Files of a sandbox. Paths are resolved inside it; what is the worker's own is kept out.

use axum::Extension;
use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::json;
use tokio_util::io::StreamReader;

use super::private;
use crate::access::Principal;
use crate::dto::Raw;
use crate::dto::sandbox::{Folder, ListFiles, ReadFile, RemoveFile, WriteFile};
use crate::error::{ApiError, Code, Result};
use crate::extract::{Json, Path, Query};
use crate::page;
use crate::{App, bodies};

pub(super) const WORKSPACE: &str = "/workspace";
/// Bytes of one answer; more by `offset`.
const MAX_READ: u64 = 32 << 20;
/// Bytes of an uploaded file.
const MAX_WRITE: usize = 1 << 30;

/// The files of a folder, in order of their names.
#[utoipa::path(get, path = "/api/v1/sandboxes/{sandbox}/files", tag = "sandboxes", params(("sandbox" = String, Path), ListFiles),
    security(("token" = ["read"])), responses((status = 200, body = Folder)))]
pub(super) async fn list_files(
    State(app): State<App>,
    Extension(by): Extension<Principal>,
    Path(id): Path<String>,
    Query(q): Query<ListFiles>,
) -> Result<Json<Folder>> {
    let limit = page::limit(q.limit)?;
    let path = q.path.unwrap_or_else(|| WORKSPACE.into());
    let sandbox = app.observe(&id).await?;
    private::check(&*sandbox, &by, &path).await?;
    let mut files = sandbox.list_files(&path).await?;
    files.sort_by(|a, b| a.name.cmp(&b.name));
    files.retain(|f| q.cursor.as_ref().is_none_or(|after| f.name > *after));
    let more = files.len() > limit;
    files.truncate(limit);
    let next_cursor = files.last().filter(|_| more).map(|f| f.name.clone());
    Ok(Json(Folder { path, files: files.into_iter().map(Into::into).collect(), next_cursor }))
}

/// A file's bytes, or a part of them.
#[utoipa::path(get, path = "/api/v1/sandboxes/{sandbox}/files/content", tag = "sandboxes", params(("sandbox" = String, Path), ReadFile),
    security(("token" = ["read"])), responses((status = 200, content_type = "application/octet-stream", body = inline(Raw))))]
pub(super) async fn read_file(
    State(app): State<App>,
    Extension(by): Extension<Principal>,
    Path(id): Path<String>,
    Query(q): Query<ReadFile>,
) -> Result<Response> {
    let length = q.length.unwrap_or(MAX_READ);
    if !(1..=MAX_READ).contains(&length) {
        return Err(ApiError::field("length", length.to_string(), "is out of range", "give 1 to 33554432"));
    }
    let sandbox = app.observe(&id).await?;
    private::check(&*sandbox, &by, &q.path).await?;
    let data = sandbox.read_file(&q.path, q.offset.unwrap_or(0), length).await?;
    Ok(([(header::CONTENT_TYPE, HeaderValue::from_static("application/octet-stream"))], data).into_response())
}

/// Replaces a file as a whole; folders on its way are made.
#[utoipa::path(put, path = "/api/v1/sandboxes/{sandbox}/files/content", tag = "sandboxes", params(("sandbox" = String, Path), WriteFile),
    request_body(content = inline(Raw), content_type = "application/octet-stream"),
    security(("token" = ["steer"])), responses((status = 204)))]
pub(super) async fn write_file(
    State(app): State<App>,
    Extension(by): Extension<Principal>,
    Path(id): Path<String>,
    Query(q): Query<WriteFile>,
    body: Body,
) -> Result<StatusCode> {
    let mode = match &q.mode {
        None => None,
        Some(text) => Some(u32::from_str_radix(text, 8).ok().filter(|m| *m <= 0o7777).ok_or_else(|| {
            ApiError::field("mode", text, "is not a file's mode", "write it in octal, such as 755")
        })?),
    };
    let (data, fate) = bodies::upload(body, MAX_WRITE)?;
    let sandbox = app.attach(&id).await?;
    private::check(&*sandbox, &by, &q.path).await?;
    app.record(&by, "sandbox.write_file", &id, json!({ "path": q.path })).await?;
    let mut reader = StreamReader::new(Box::pin(data));
    tokio::select! {
        written = sandbox.write_file_from(&q.path, &mut reader, mode) => {
            written.map_err(|e| fate.or(e))?;
            Ok(StatusCode::NO_CONTENT)
        }
        // What was written of it goes with the write.
        () = by.until_void(app.clone()) => {
            Err(ApiError::new(Code::TokenRevoked, "the token was revoked while the file was written"))
        }
    }
}

/// Removes a file or a folder.
#[utoipa::path(delete, path = "/api/v1/sandboxes/{sandbox}/files", tag = "sandboxes", params(("sandbox" = String, Path), RemoveFile),
    security(("token" = ["steer"])), responses((status = 204)))]
pub(super) async fn remove_file(
    State(app): State<App>,
    Extension(by): Extension<Principal>,
    Path(id): Path<String>,
    Query(q): Query<RemoveFile>,
) -> Result<StatusCode> {
    if q.path.is_empty() {
        return Err(ApiError::new(Code::BadRequest, "path is empty"));
    }
    let sandbox = app.attach(&id).await?;
    private::check(&*sandbox, &by, &q.path).await?;
    app.record(&by, "sandbox.remove_file", &id, json!({ "path": q.path })).await?;
    sandbox.remove(&q.path, q.recursive.unwrap_or(false)).await?;
    Ok(StatusCode::NO_CONTENT)
}
