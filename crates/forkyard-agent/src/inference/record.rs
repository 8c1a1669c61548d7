//! Real traffic, kept in a file and played from it: tests, demos and bug reports need no key.
//!
//! One JSON object a line, appended as things happen, so that a recording that was cut is good up to the cut:
//!
//! ```text
//! {"exchange":0,"path":"/v1/messages","request":{…}}
//! {"exchange":0,"status":200,"headers":[["request-id","…"]]}
//! {"exchange":0,"chunk":"event: message_start\ndata: …"}
//! {"exchange":0,"end":null}                                 or "end":"connection reset"
//! ```
//!
//! No request header is kept, of the answer's only those that the layer reads, and keys are cut out of everything.

use std::collections::{HashMap, VecDeque};
use std::io::Write;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use bytes::Bytes;
use futures::StreamExt;
use futures::stream::{self, BoxStream};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::transport::{Headers, Post, Reply, Transport, TransportError};

/// A recording is read as a whole.
const MAX_FILE_BYTES: u64 = 256 << 20;
const REDACTED: &str = "[redacted]";
/// Too short to be a key, and cutting it out would spoil the rest.
const MIN_SECRET_CHARS: usize = 8;

#[derive(Serialize, Deserialize)]
struct Line {
    exchange: u64,
    #[serde(flatten)]
    what: What,
}

#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum What {
    Request {
        path: String,
        request: Value,
    },
    Head {
        status: u16,
        headers: Vec<(String, String)>,
    },
    Chunk {
        chunk: String,
    },
    /// Null, or why it ended too early.
    End {
        end: Value,
    },
}

fn keep_header(name: &str) -> bool {
    matches!(name, "content-type" | "request-id" | "x-request-id" | "retry-after" | "retry-after-ms")
        || name.starts_with("anthropic-ratelimit-")
}

/// A transport that writes down what passes through it.
pub struct Recorder {
    inner: Arc<dyn Transport>,
    file: Arc<Mutex<std::fs::File>>,
    secrets: Arc<[String]>,
    exchanges: AtomicU64,
}

impl Recorder {
    /// Starts a new file; one that exists is an error, so that nothing is lost. `secrets` are the keys in use.
    pub fn create(inner: Arc<dyn Transport>, path: &Path, secrets: Vec<String>) -> std::io::Result<Recorder> {
        let mut options = std::fs::OpenOptions::new();
        options.write(true).create_new(true);
        #[cfg(unix)]
        // What a model was told is its owner's business.
        std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
        Ok(Recorder {
            inner,
            file: Arc::new(Mutex::new(options.open(path)?)),
            secrets: secrets.into_iter().filter(|s| s.len() >= MIN_SECRET_CHARS).collect(),
            exchanges: AtomicU64::new(0),
        })
    }

    fn pen(&self, exchange: u64) -> Pen {
        Pen { file: Arc::clone(&self.file), secrets: Arc::clone(&self.secrets), exchange, rest: Vec::new() }
    }
}

struct Pen {
    file: Arc<Mutex<std::fs::File>>,
    secrets: Arc<[String]>,
    exchange: u64,
    /// The beginning of a character whose end is in the next chunk.
    rest: Vec<u8>,
}

impl Pen {
    fn write(&self, what: What) {
        let line = Line { exchange: self.exchange, what };
        let mut text = serde_json::to_string(&line).expect("strings and numbers");
        for secret in self.secrets.iter() {
            text = text.replace(secret.as_str(), REDACTED);
        }
        text.push('\n');
        let mut file = self.file.lock().unwrap_or_else(|e| e.into_inner());
        if let Err(error) = file.write_all(text.as_bytes()) {
            tracing::warn!(%error, "the recording is incomplete");
        }
    }

    fn chunk(&mut self, bytes: &[u8]) {
        self.rest.extend_from_slice(bytes);
        let whole = match std::str::from_utf8(&self.rest) {
            Ok(text) => text.len(),
            Err(e) if e.error_len().is_none() => e.valid_up_to(),
            // Not text at all.
            Err(_) => self.rest.len(),
        };
        if whole > 0 {
            let part: Vec<u8> = self.rest.drain(..whole).collect();
            self.write(What::Chunk { chunk: String::from_utf8_lossy(&part).into_owned() });
        }
    }
}

#[async_trait]
impl Transport for Recorder {
    async fn post(&self, post: Post) -> Result<Reply, TransportError> {
        let pen = self.pen(self.exchanges.fetch_add(1, Ordering::Relaxed));
        let request = serde_json::from_slice(&post.body).unwrap_or(Value::Null);
        pen.write(What::Request { path: post.path.to_string(), request });
        let reply = match self.inner.post(post).await {
            Ok(reply) => reply,
            Err(error) => {
                pen.write(What::End { end: Value::from(error.message.clone()) });
                return Err(error);
            }
        };
        let headers = reply.headers.0.iter().filter(|(name, _)| keep_header(name)).cloned().collect();
        pen.write(What::Head { status: reply.status, headers });
        // Without an end line the exchange was given up by us.
        let body = stream::unfold((reply.body, Some(pen)), |(mut body, pen)| async move {
            let mut pen = pen?;
            match body.next().await {
                Some(Ok(bytes)) => {
                    pen.chunk(&bytes);
                    Some((Ok(bytes), (body, Some(pen))))
                }
                Some(Err(error)) => {
                    pen.write(What::End { end: Value::from(error.message.clone()) });
                    Some((Err(error), (body, None)))
                }
                None => {
                    pen.write(What::End { end: Value::Null });
                    None
                }
            }
        });
        Ok(Reply { status: reply.status, headers: reply.headers, body: body.boxed() })
    }
}

#[derive(Debug, thiserror::Error)]
pub enum BadRecording {
    #[error("{path}: {source}")]
    Io { path: String, source: std::io::Error },
    #[error("{path}: larger than {MAX_FILE_BYTES} bytes")]
    TooLarge { path: String },
    #[error("{path}, line {line}: {reason}")]
    Line { path: String, line: usize, reason: String },
}

/// A transport that answers from a recording. Requests are matched by their content; equal ones get their answers in order, the last
/// of them again and again.
pub struct Replay {
    exchanges: Mutex<HashMap<String, VecDeque<Arc<Exchange>>>>,
    name: String,
}

#[derive(Default)]
struct Exchange {
    status: Option<u16>,
    headers: Vec<(String, String)>,
    chunks: Vec<Bytes>,
    error: Option<String>,
}

/// Recorded keys are gone, so what is compared is the body alone, with its fields in order.
fn key(path: &str, request: &Value) -> String {
    format!("{path} {request}")
}

impl Replay {
    pub fn open(path: &Path) -> Result<Replay, BadRecording> {
        let name = path.display().to_string();
        let io = |source| BadRecording::Io { path: name.clone(), source };
        if std::fs::metadata(path).map_err(io)?.len() > MAX_FILE_BYTES {
            return Err(BadRecording::TooLarge { path: name });
        }
        Replay::parse(&std::fs::read_to_string(path).map_err(io)?, &name)
    }

    pub fn parse(text: &str, name: &str) -> Result<Replay, BadRecording> {
        let mut requests: Vec<(u64, String)> = Vec::new();
        let mut exchanges: HashMap<u64, Exchange> = HashMap::new();
        for (i, line) in text.lines().enumerate().filter(|(_, l)| !l.trim().is_empty()) {
            let bad = |reason: String| BadRecording::Line { path: name.to_string(), line: i + 1, reason };
            let Line { exchange: id, what } =
                serde_json::from_str(line).map_err(|e| bad(format!("not a line of a recording: {e}")))?;
            if let What::Request { path, request } = &what {
                requests.push((id, key(path, request)));
                exchanges.insert(id, Exchange::default());
                continue;
            }
            let exchange =
                exchanges.get_mut(&id).ok_or_else(|| bad(format!("exchange {id} has no request")))?;
            match what {
                What::Request { .. } => {}
                What::Head { status, headers } => {
                    exchange.status = Some(status);
                    exchange.headers = headers;
                }
                What::Chunk { chunk } => exchange.chunks.push(Bytes::from(chunk)),
                What::End { end } => exchange.error = end.as_str().map(str::to_string),
            }
        }
        let mut by_key: HashMap<String, VecDeque<Arc<Exchange>>> = HashMap::new();
        for (id, key) in requests {
            if let Some(exchange) = exchanges.remove(&id) {
                by_key.entry(key).or_default().push_back(Arc::new(exchange));
            }
        }
        Ok(Replay { exchanges: Mutex::new(by_key), name: name.to_string() })
    }

    fn next(&self, key: &str) -> Option<Arc<Exchange>> {
        let mut exchanges = self.exchanges.lock().unwrap_or_else(|e| e.into_inner());
        let queue = exchanges.get_mut(key)?;
        if queue.len() > 1 { queue.pop_front() } else { queue.front().cloned() }
    }
}

#[async_trait]
impl Transport for Replay {
    async fn post(&self, post: Post) -> Result<Reply, TransportError> {
        let request = serde_json::from_slice(&post.body).unwrap_or(Value::Null);
        let Some(exchange) = self.next(&key(post.path, &request)) else {
            return Err(TransportError::permanent(format!(
                "{} holds no answer to this request: the conversation went another way than the recorded one",
                self.name
            )));
        };
        let broken =
            |message: &str| TransportError { message: message.to_string(), unsent: false, permanent: false };
        let Some(status) = exchange.status else {
            return Err(broken(exchange.error.as_deref().unwrap_or("the recording ends here")));
        };
        let end: Option<Result<Bytes, TransportError>> = exchange.error.as_deref().map(|e| Err(broken(e)));
        let chunks: Vec<Result<Bytes, TransportError>> = exchange.chunks.iter().cloned().map(Ok).collect();
        let body: BoxStream<'static, _> = stream::iter(chunks).chain(stream::iter(end)).boxed();
        Ok(Reply { status, headers: Headers(exchange.headers.clone()), body })
    }
}
