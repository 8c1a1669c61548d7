//! Commands in a sandbox: their result, their output as it comes, or a terminal.

use std::collections::BTreeMap;
use std::pin::pin;
use std::time::Duration;

use axum::Extension;
use axum::extract::State;
use axum::extract::ws::{Message, WebSocket, WebSocketUpgrade};
use axum::response::Response;
use bytes::Bytes;
use forkyard_engine::sandboxes::types::{self, Exec, ExecEvent, PtySize};
use serde::Deserialize;
use serde_json::json;
use utoipa::IntoParams;

use crate::App;
use crate::access::Principal;
use crate::dto::event::SseMessage;
use crate::dto::sandbox::{ExecRequest, ExecResult};
use crate::error::{ApiError, Code, Result};
use crate::extract::{Json, Path, Query};
use crate::stream;

const DEFAULT_TIMEOUT: Duration = Duration::from_secs(300);
const MAX_TIMEOUT_MS: u64 = 24 * 3_600_000;
const MAX_ARGUMENTS: usize = 4096;
/// Of each stream of output, where the answer is one document.
const MAX_OUTPUT: u64 = 4 << 20;
const MAX_COLUMNS: u16 = 1000;

fn request(r: &ExecRequest) -> Result<types::ExecRequest> {
    let wrong = |field, value: String, problem, fix| Err(ApiError::field(field, value, problem, fix));
    if r.command.is_empty() || r.command.len() > MAX_ARGUMENTS || r.command[0].is_empty() {
        return wrong(
            "command",
            format!("{} words", r.command.len()),
            "can't be run",
            "give a program and its arguments",
        );
    }
    let texts = r.command.iter().chain(r.env.keys()).chain(r.env.values()).chain(&r.cwd);
    if texts.into_iter().any(|t| t.contains('\0')) {
        return wrong(
            "command",
            "a text with a NUL byte".into(),
            "can't be passed on",
            "remove the NUL byte",
        );
    }
    let timeout = match r.timeout_ms {
        None => DEFAULT_TIMEOUT,
        Some(ms) if (1..=MAX_TIMEOUT_MS).contains(&ms) => Duration::from_millis(ms),
        Some(ms) => return wrong("timeout_ms", ms.to_string(), "is out of range", "give 1 to 86400000"),
    };
    Ok(types::ExecRequest {
        cwd: r.cwd.clone(),
        env: r.env.clone(),
        timeout: Some(timeout),
        stdin: r.stdin.is_some(),
        ..types::ExecRequest::new(r.command.iter().cloned())
    })
}

async fn begin(
    app: &App,
    by: &Principal,
    id: &str,
    r: &ExecRequest,
    max_output: Option<u64>,
) -> Result<Exec> {
    let request = types::ExecRequest { max_output, ..request(r)? };
    let sandbox = app.attach(id).await?;
    app.record(by, "sandbox.exec", id, json!({ "command": r.command.join(" ") })).await?;
    let exec = sandbox.exec(request).await?;
    if let Some(text) = &r.stdin {
        exec.control.write_stdin(Bytes::from(text.clone())).await?;
        exec.control.close_stdin().await?;
    }
    Ok(exec)
}

/// Runs a command and answers with its result. If the client goes away, the command ends.
#[utoipa::path(post, path = "/api/v1/sandboxes/{sandbox}/exec", tag = "sandboxes", params(("sandbox" = String, Path)),
    request_body = ExecRequest, security(("token" = ["steer"])), responses((status = 200, body = ExecResult)))]
pub(super) async fn exec(
    State(app): State<App>,
    Extension(by): Extension<Principal>,
    Path(id): Path<String>,
    Json(r): Json<ExecRequest>,
) -> Result<Json<ExecResult>> {
    let exec = begin(&app, &by, &id, &r, Some(MAX_OUTPUT)).await?;
    let (result, stdout, stderr) = tokio::select! {
        output = exec.output() => output?,
        () = by.until_void(app.clone()) => {
            return Err(ApiError::new(Code::TokenRevoked, "the token was revoked while the command ran"));
        }
    };
    let text = |b: Vec<u8>| Some(String::from_utf8_lossy(&b).into_owned());
    Ok(Json(ExecResult { stdout: text(stdout), stderr: text(stderr), ..result.into() }))
}

/// Runs a command and streams its output: events `stdout` and `stderr` with `{"text"}` or, where it is not UTF-8,
/// `{"base64"}`; then `exit` with the result, or `error`. A client that reads slowly slows the command.
#[utoipa::path(post, path = "/api/v1/sandboxes/{sandbox}/exec/stream", tag = "sandboxes", params(("sandbox" = String, Path)),
    request_body = ExecRequest, security(("token" = ["steer"])),
    responses((status = 200, content_type = "text/event-stream", body = SseMessage)))]
pub(super) async fn exec_stream(
    State(app): State<App>,
    Extension(by): Extension<Principal>,
    Path(id): Path<String>,
    Json(r): Json<ExecRequest>,
) -> Result<Response> {
    let exec = begin(&app, &by, &id, &r, None).await?;
    let output = futures::stream::unfold(Some(exec), |exec| async move {
        let mut exec = exec?;
        let (name, data, more) = match exec.events.recv().await {
            Some(Ok(ExecEvent::Stdout(b))) => ("stdout", piece(&b), true),
            Some(Ok(ExecEvent::Stderr(b))) => ("stderr", piece(&b), true),
            Some(Ok(ExecEvent::Exit(r))) => ("exit", json!(ExecResult::from(r)), false),
            Some(Err(e)) => ("error", json!({ "message": e.message }), false),
            None => ("error", json!({ "message": "the sandbox went away" }), false),
        };
        let frame = Bytes::from(format!("event: {name}\ndata: {data}\n\n"));
        Some((frame, more.then_some(exec)))
    });
    Ok(stream::response(&app, by, output))
}

fn piece(bytes: &[u8]) -> serde_json::Value {
    match std::str::from_utf8(bytes) {
        Ok(text) => json!({ "text": text }),
        Err(_) => json!({ "base64": base64(bytes) }),
    }
}

fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut out = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for chunk in bytes.chunks(3) {
        let n = chunk.iter().fold(0u32, |n, b| n << 8 | u32::from(*b)) << (8 * (3 - chunk.len()));
        for i in 0..4 {
            let digit = DIGITS[(n >> (18 - 6 * i)) as usize & 63] as char;
            out.push(if i <= chunk.len() { digit } else { '=' });
        }
    }
    out
}

#[derive(Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct Pty {
    #[param(minimum = 1, maximum = 1000)]
    cols: Option<u16>,
    #[param(minimum = 1, maximum = 1000)]
    rows: Option<u16>,
    /// For browsers, which can't set a header on a WebSocket.
    token: Option<String>,
    /// Another program than the shell, and its arguments: a JSON list of texts.
    command: Option<String>,
}

/// A shell on a terminal of its own, over a WebSocket: binary messages are keys and what the terminal shows, text messages
/// are `{"resize": {"cols", "rows"}}` from the client and `{"exit": {…}}` at the end.
#[utoipa::path(get, path = "/api/v1/sandboxes/{sandbox}/pty", tag = "sandboxes", params(("sandbox" = String, Path), Pty),
    security(("token" = ["steer"])), responses((status = 101, description = "On to WebSocket")))]
pub(super) async fn pty(
    State(app): State<App>,
    Extension(by): Extension<Principal>,
    Path(id): Path<String>,
    Query(q): Query<Pty>,
    upgrade: std::result::Result<WebSocketUpgrade, axum::extract::ws::rejection::WebSocketUpgradeRejection>,
) -> Result<Response> {
    let _ = q.token;
    let size = PtySize { cols: within(q.cols, 80)?, rows: within(q.rows, 24)? };
    let shell = ["/bin/sh", "-c", "command -v bash >/dev/null && exec bash -l; exec sh -l"];
    let command = match &q.command {
        None => shell.map(String::from).to_vec(),
        Some(text) => {
            serde_json::from_str(text).ok().filter(|c: &Vec<String>| !c.is_empty()).ok_or_else(|| {
                ApiError::field(
                    "command",
                    text,
                    "is not a command",
                    "write a JSON list of texts, such as [\"top\"]",
                )
            })?
        }
    };
    let upgrade = upgrade.map_err(|e| ApiError::new(Code::BadRequest, e.body_text()))?;
    let sandbox = app.attach(&id).await?;
    app.record(&by, "sandbox.pty", &id, json!({ "command": command.join(" ") })).await?;
    let env = BTreeMap::from([("TERM".to_string(), "xterm-256color".to_string())]);
    let request = types::ExecRequest {
        pty: Some(size),
        stdin: true,
        env,
        // A shell is not an answer that somebody keeps.
        max_output: Some(u64::MAX),
        ..types::ExecRequest::new(command)
    };
    let exec = sandbox.exec(request).await?;
    Ok(upgrade.max_message_size(MAX_KEYS).on_upgrade(move |socket| terminal(app, by, socket, exec)))
}

/// Keys of one message: a paste.
const MAX_KEYS: usize = 1 << 20;
const PING: Duration = Duration::from_secs(15);

fn within(given: Option<u16>, usual: u16) -> Result<u16> {
    match given.unwrap_or(usual) {
        n @ 1..=MAX_COLUMNS => Ok(n),
        n => Err(ApiError::field("cols, rows", n.to_string(), "is out of range", "give 1 to 1000")),
    }
}

#[derive(Deserialize)]
struct Resize {
    resize: Size,
}

#[derive(Deserialize)]
struct Size {
    cols: u16,
    rows: u16,
}

/// The shell ends with the connection: its exec is dropped.
async fn terminal(app: App, by: Principal, mut socket: WebSocket, mut exec: Exec) {
    let mut ping = tokio::time::interval(PING);
    let mut void = pin!(by.until_void(app.clone()));
    loop {
        tokio::select! {
            biased;
            () = app.parts().stop.cancelled() => return,
            () = &mut void => return,
            event = exec.events.recv() => {
                let (message, last) = match event {
                    Some(Ok(ExecEvent::Stdout(b) | ExecEvent::Stderr(b))) => (Message::Binary(b), false),
                    Some(Ok(ExecEvent::Exit(r))) => (Message::Text(json!({ "exit": ExecResult::from(r) }).to_string().into()), true),
                    Some(Err(e)) => (Message::Text(json!({ "error": e.message }).to_string().into()), true),
                    None => (Message::Text(json!({ "error": "the sandbox went away" }).to_string().into()), true),
                };
                if socket.send(message).await.is_err() || last {
                    return;
                }
            }
            message = socket.recv() => {
                let done = match message {
                    Some(Ok(Message::Binary(keys))) => exec.control.write_stdin(keys).await,
                    Some(Ok(Message::Text(text))) => match serde_json::from_str::<Resize>(&text) {
                        Ok(Resize { resize: s }) => {
                            let size = PtySize { cols: s.cols.clamp(1, MAX_COLUMNS), rows: s.rows.clamp(1, MAX_COLUMNS) };
                            exec.control.resize(size).await
                        }
                        Err(_) => Ok(()),
                    },
                    Some(Ok(Message::Ping(_) | Message::Pong(_))) => Ok(()),
                    Some(Ok(Message::Close(_)) | Err(_)) | None => return,
                };
                if done.is_err() {
                    return;
                }
            }
            _ = ping.tick() => {
                if socket.send(Message::Ping(Bytes::new())).await.is_err() {
                    return;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_that_are_not_text_are_written_in_base64() {
        for (bytes, text) in [
            (&b""[..], ""),
            (b"f", "Zg=="),
            (b"fo", "Zm8="),
            (b"foo", "Zm9v"),
            (b"\xff\xfe\xfd\xfc", "//79/A=="),
        ] {
            assert_eq!(base64(bytes), text);
        }
        assert_eq!(piece(b"ok"), json!({ "text": "ok" }));
    }
}
