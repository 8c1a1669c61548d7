//! Commands and shells in a sandbox behind the API: output as server-sent events, a terminal over a WebSocket.

use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use forkyard_sandbox::{
    ErrorKind, Exec, ExecControl, ExecEvent, ExecRequest, ExecResult, PtySize, Result, SandboxError, Signal,
};
use forkyard_server::dto::sandbox as dto;
use futures::{SinkExt, StreamExt};
use reqwest::{Method, Response};
use serde::Deserialize;
use serde_json::json;
use tokio::sync::mpsc;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::handshake::client::generate_key;
use tokio_tungstenite::tungstenite::protocol::{Message, Role};
use tokio_util::sync::CancellationToken;

use super::client::{Client, coded};
use super::sandbox::{RemoteSandbox, error};
use super::sse::Frames;

/// Pieces on their way: a reader that stops stops the command.
const QUEUE: usize = 64;
/// What the API takes at most; a command of this machine has no limit unless one is named.
const LONGEST: Duration = Duration::from_secs(24 * 3600);
/// As of a program that ctrl-C ended.
const INTERRUPTED: i32 = 130;

fn away(why: impl std::fmt::Display) -> SandboxError {
    SandboxError::new(ErrorKind::Unavailable, format!("the server went away during the command: {why}"))
}

pub async fn exec(s: &RemoteSandbox, r: ExecRequest) -> Result<Exec> {
    let timeout = r.timeout.unwrap_or(LONGEST).min(LONGEST);
    let body = dto::ExecRequest {
        command: r.argv,
        cwd: r.cwd,
        env: r.env,
        timeout_ms: Some(timeout.as_millis() as u64),
        stdin: None,
    };
    let request = s.client.request(Method::POST, &format!("/sandboxes/{}/exec/stream", s.id)).json(&body);
    let response = s.client.send(request).await.map_err(|e| error(s.client.error(e)))?;
    let (tell, events) = mpsc::channel(QUEUE);
    let stop = CancellationToken::new();
    let stopped = stop.clone();
    tokio::spawn(async move {
        let last = tokio::select! {
            last = read(response, &tell) => last,
            // The command ends with its connection.
            () = stopped.cancelled() => Ok(ExecEvent::Exit(ended(INTERRUPTED))),
        };
        // Whoever asked may be gone.
        let _ = tell.send(last).await;
    });
    Ok(Exec { events: events.into(), control: Box::new(Stop(stop)) })
}

fn ended(exit_code: i32) -> ExecResult {
    ExecResult {
        exit_code,
        signal: None,
        timed_out: false,
        oom_killed: false,
        duration: Duration::ZERO,
        stdout_bytes: 0,
        stderr_bytes: 0,
        truncated: false,
    }
}

fn exit(r: &dto::ExecResult) -> ExecResult {
    ExecResult {
        timed_out: r.timed_out,
        oom_killed: r.oom_killed,
        duration: Duration::from_millis(r.duration_ms),
        truncated: r.truncated,
        ..ended(r.exit_code)
    }
}

#[derive(Deserialize)]
struct Piece {
    text: Option<String>,
    base64: Option<String>,
}

/// Passes output on until the command's end, which it returns.
async fn read(response: Response, tell: &mpsc::Sender<Result<ExecEvent>>) -> Result<ExecEvent> {
    let mut pieces = response.bytes_stream();
    let mut frames = Frames::default();
    while let Some(piece) = pieces.next().await {
        let mut ready = vec![];
        frames.take(&piece.map_err(away)?, |frame| ready.push(frame)).map_err(away)?;
        for e in ready {
            let event = match e.name.as_str() {
                "stdout" => ExecEvent::Stdout(bytes(&e.data)?),
                "stderr" => ExecEvent::Stderr(bytes(&e.data)?),
                "exit" => {
                    let result: dto::ExecResult = serde_json::from_slice(&e.data).map_err(away)?;
                    return Ok(ExecEvent::Exit(exit(&result)));
                }
                _ => return Err(away(String::from_utf8_lossy(&e.data))),
            };
            if tell.send(Ok(event)).await.is_err() {
                return Err(away("nobody reads"));
            }
        }
    }
    Err(away("the stream ended"))
}

fn bytes(data: &[u8]) -> Result<Bytes> {
    let piece: Piece = serde_json::from_slice(data).map_err(away)?;
    match (piece.text, piece.base64) {
        (Some(text), _) => Ok(text.into()),
        (None, Some(coded)) => unbase64(&coded).map(Bytes::from).ok_or_else(|| away("not base64")),
        (None, None) => Err(away("an empty piece")),
    }
}

fn unbase64(text: &str) -> Option<Vec<u8>> {
    let digit = |b: u8| -> Option<u32> {
        Some(match b {
            b'A'..=b'Z' => u32::from(b - b'A'),
            b'a'..=b'z' => u32::from(b - b'a') + 26,
            b'0'..=b'9' => u32::from(b - b'0') + 52,
            b'+' => 62,
            b'/' => 63,
            _ => return None,
        })
    };
    let text = text.trim_end_matches('=').as_bytes();
    let mut out = Vec::with_capacity(text.len() * 3 / 4);
    for chunk in text.chunks(4) {
        let n = chunk.iter().try_fold(0, |n, b| Some(n << 6 | digit(*b)?))? << (6 * (4 - chunk.len()));
        out.extend_from_slice(&n.to_be_bytes()[1..chunk.len()]);
    }
    Some(out)
}

/// A command that can only be ended.
struct Stop(CancellationToken);

#[async_trait]
impl ExecControl for Stop {
    async fn write_stdin(&self, _: Bytes) -> Result<()> {
        Err(SandboxError::new(ErrorKind::Unsupported, "a server's commands are not written to"))
    }
    async fn close_stdin(&self) -> Result<()> {
        Ok(())
    }
    async fn signal(&self, signal: Signal) -> Result<()> {
        match signal {
            Signal::Int | Signal::Term | Signal::Kill | Signal::Hup => self.0.cancel(),
            Signal::Stop | Signal::Cont => {}
        }
        Ok(())
    }
    async fn resize(&self, _: PtySize) -> Result<()> {
        Ok(())
    }
}

/// What the terminal's user does.
enum Typed {
    Keys(Bytes),
    Size(PtySize),
}

struct Terminal(mpsc::Sender<Typed>);

#[async_trait]
impl ExecControl for Terminal {
    async fn write_stdin(&self, data: Bytes) -> Result<()> {
        self.0.send(Typed::Keys(data)).await.map_err(|_| away("the connection is closed"))
    }
    async fn close_stdin(&self) -> Result<()> {
        Ok(())
    }
    /// Keys do it.
    async fn signal(&self, _: Signal) -> Result<()> {
        Ok(())
    }
    async fn resize(&self, size: PtySize) -> Result<()> {
        self.0.send(Typed::Size(size)).await.map_err(|_| away("the connection is closed"))
    }
}

pub async fn open(s: &RemoteSandbox, r: ExecRequest, size: PtySize) -> Result<Exec> {
    let command = serde_json::to_string(&r.argv).map_err(away)?;
    let path =
        format!("/sandboxes/{}/pty?cols={}&rows={}&command={}", s.id, size.cols, size.rows, coded(&command));
    let mut socket = socket(&s.client, &path).await?;
    let (tell, events) = mpsc::channel(QUEUE);
    let (type_, mut typed) = mpsc::channel(QUEUE);
    tokio::spawn(async move {
        loop {
            tokio::select! {
                message = socket.next() => {
                    let event = match message {
                        Some(Ok(Message::Binary(b))) => Ok(ExecEvent::Stdout(b)),
                        Some(Ok(Message::Text(text))) => last(&text),
                        Some(Ok(Message::Ping(_) | Message::Pong(_) | Message::Frame(_))) => continue,
                        Some(Ok(Message::Close(_))) | None => Err(away("the connection is closed")),
                        Some(Err(e)) => Err(away(e)),
                    };
                    let over = !matches!(event, Ok(ExecEvent::Stdout(_)));
                    if tell.send(event).await.is_err() || over {
                        return;
                    }
                }
                typed = typed.recv() => {
                    let message = match typed {
                        Some(Typed::Keys(keys)) => Message::Binary(keys),
                        Some(Typed::Size(s)) => {
                            Message::text(json!({ "resize": { "cols": s.cols, "rows": s.rows } }).to_string())
                        }
                        None => return,
                    };
                    if socket.send(message).await.is_err() {
                        return;
                    }
                }
            }
        }
    });
    Ok(Exec { events: events.into(), control: Box::new(Terminal(type_)) })
}

#[derive(Deserialize)]
struct Last {
    exit: Option<dto::ExecResult>,
    error: Option<String>,
}

fn last(text: &str) -> Result<ExecEvent> {
    let last: Last = serde_json::from_str(text).map_err(away)?;
    match last.exit {
        Some(r) => Ok(ExecEvent::Exit(exit(&r))),
        None => Err(away(last.error.unwrap_or_default())),
    }
}

/// Through the same client as everything else: the same certificates, the same token in a header.
async fn socket(client: &Client, path: &str) -> Result<WebSocketStream<reqwest::Upgraded>> {
    let request = client
        .upgradable()
        .map_err(error)?
        .request(Method::GET, path)
        .header("Connection", "Upgrade")
        .header("Upgrade", "websocket")
        .header("Sec-WebSocket-Version", "13")
        .header("Sec-WebSocket-Key", generate_key());
    let response = client.send(request).await.map_err(|e| error(client.error(e)))?;
    let upgraded = response.upgrade().await.map_err(away)?;
    Ok(WebSocketStream::from_raw_socket(upgraded, Role::Client, None).await)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_come_back_out_of_base64() {
        for (bytes, text) in [
            (&b""[..], ""),
            (b"f", "Zg=="),
            (b"fo", "Zm8="),
            (b"foo", "Zm9v"),
            (b"\xff\xfe\xfd\xfc", "//79/A=="),
        ] {
            assert_eq!(unbase64(text).as_deref(), Some(bytes));
        }
        assert_eq!(unbase64("a b"), None);
    }
}
