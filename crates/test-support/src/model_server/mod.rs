//! A real HTTP server that streams like Anthropic's Messages API and like OpenAI's chat completions, checks requests as strictly, caches
//! prompts by prefix, bills every request, and misbehaves on cue.
//!
//! ```ignore
//! let server = ModelServer::start().await;
//! server.push(Reply::error(529, "overloaded_error", "busy"));
//! server.push(Reply::text("hello").split(Split::EveryByte).pings());
//! // … point a client at server.url() …
//! assert_eq!(server.bills().len(), 1);
//! ```

mod cache;
mod check;
mod openai;
mod reply;
mod stream;

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard};

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;
use axum::routing::post;
use axum::serve::ListenerExt;
use futures::StreamExt;
use serde_json::{Value, json};

pub use cache::{PromptCache, count_tokens};
pub use check::signature;
pub use reply::{Cut, Gate, Part, Reply, Split};

/// What a request was charged, by token kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Bill {
    pub input: u64,
    pub output: u64,
    pub cache_write_5m: u64,
    pub cache_write_1h: u64,
    pub cache_read: u64,
}

impl Bill {
    pub fn prompt(&self) -> u64 {
        self.input + self.cache_write_5m + self.cache_write_1h + self.cache_read
    }
}

/// A request as it arrived.
#[derive(Debug, Clone)]
pub struct Seen {
    pub path: String,
    pub headers: BTreeMap<String, String>,
    pub raw: String,
    pub body: Value,
}

impl Seen {
    pub fn messages(&self) -> &[Value] {
        self.body["messages"].as_array().map_or(&[], Vec::as_slice)
    }
    pub fn max_tokens(&self) -> u64 {
        self.body["max_tokens"].as_u64().unwrap_or(0)
    }
    /// The text of the last message's results and texts, joined.
    pub fn last_text(&self) -> String {
        fn collect(value: &Value, out: &mut String) {
            match value {
                Value::String(s) => out.push_str(s),
                Value::Array(all) => all.iter().for_each(|v| collect(v, out)),
                Value::Object(o) => {
                    ["text", "content"].iter().filter_map(|k| o.get(*k)).for_each(|v| collect(v, out))
                }
                Value::Null | Value::Bool(_) | Value::Number(_) => {}
            }
        }
        let mut out = String::new();
        if let Some(last) = self.messages().last() {
            collect(&last["content"], &mut out);
        }
        out
    }
}

type Brain = Arc<dyn Fn(&Seen) -> Reply + Send + Sync>;

#[derive(Default)]
struct Inner {
    queue: VecDeque<Reply>,
    brain: Option<Brain>,
    seen: Vec<Seen>,
    bills: Vec<Bill>,
    cache: PromptCache,
    issued: check::Issued,
    counts: bool,
    serial: u64,
    open: usize,
}

#[derive(Clone, Default)]
struct Shared(Arc<Mutex<Inner>>);

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(|e| e.into_inner())
    }
}

/// A request that somebody still waits for.
struct Open(Shared);

impl Open {
    fn new(shared: &Shared) -> Open {
        shared.lock().open += 1;
        Open(shared.clone())
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.0.lock().open -= 1;
    }
}

/// Runs until it is dropped.
pub struct ModelServer {
    url: String,
    shared: Shared,
    task: tokio::task::JoinHandle<()>,
}

impl Drop for ModelServer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl ModelServer {
    pub async fn start() -> ModelServer {
        let shared = Shared::default();
        shared.lock().counts = true;
        let app = Router::new()
            .route("/v1/messages", post(messages))
            .route("/v1/messages/count_tokens", post(count))
            .route("/v1/chat/completions", post(openai::completions))
            .layer(axum::extract::DefaultBodyLimit::max(64 << 20))
            .with_state(shared.clone());
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("loopback");
        let url = format!("http://{}", listener.local_addr().expect("a bound listener has an address"));
        let task = tokio::spawn(async move {
            // Without it each small write waits for the peer's delayed acknowledgement.
            let listener = listener.tap_io(|stream| stream.set_nodelay(true).expect("a TCP stream"));
            axum::serve(listener, app).await.expect("accepting does not end");
        });
        ModelServer { url, shared, task }
    }

    /// Without a trailing slash; `/v1/…` follows.
    pub fn url(&self) -> &str {
        &self.url
    }
    /// The next reply. Replies are given in order; after them comes the brain.
    pub fn push(&self, reply: Reply) {
        self.shared.lock().queue.push_back(reply);
    }
    /// Answers every request for which no reply was pushed.
    pub fn brain(&self, brain: impl Fn(&Seen) -> Reply + Send + Sync + 'static) {
        self.shared.lock().brain = Some(Arc::new(brain));
    }
    /// Whether the counting endpoint is there (it is).
    pub fn offer_counting(&self, counts: bool) {
        self.shared.lock().counts = counts;
    }
    /// All requests but those for counts, in the order of their arrival.
    pub fn seen(&self) -> Vec<Seen> {
        self.all_seen().into_iter().filter(|s| !s.path.ends_with("count_tokens")).collect()
    }
    pub fn all_seen(&self) -> Vec<Seen> {
        self.shared.lock().seen.clone()
    }
    /// Requests for messages whose client waits, for an answer or for its rest.
    pub fn open(&self) -> usize {
        self.shared.lock().open
    }
    /// What was charged: every answer that began, also those that were cut. In the order of their beginning.
    pub fn bills(&self) -> Vec<Bill> {
        self.shared.lock().bills.clone()
    }
}

fn record(path: &str, headers: &HeaderMap, body: &Bytes) -> Seen {
    let headers = headers.iter().filter_map(|(k, v)| Some((k.to_string(), v.to_str().ok()?.to_string())));
    Seen {
        path: path.to_string(),
        headers: headers.collect(),
        raw: String::from_utf8_lossy(body).into_owned(),
        body: serde_json::from_slice(body).unwrap_or(Value::Null),
    }
}

fn error(status: u16, kind: &str, message: &str) -> Reply {
    Reply::error(status, kind, message)
}

/// Takes the request in and decides on its reply.
fn arrive(shared: &Shared, seen: &Seen) -> Reply {
    let mut inner = shared.lock();
    inner.seen.push(seen.clone());
    if let Some(reply) = inner.queue.pop_front() {
        return reply;
    }
    let brain = inner.brain.clone();
    drop(inner);
    match brain {
        Some(brain) => brain(seen),
        None => error(500, "api_error", "the test gave no reply for this request"),
    }
}

async fn messages(State(shared): State<Shared>, headers: HeaderMap, body: Bytes) -> Response {
    let open = Open::new(&shared);
    let seen = record("/v1/messages", &headers, &body);
    let checked = check::anthropic(&seen, &shared.lock().issued);
    if let Err(problem) = checked {
        shared.lock().seen.push(seen);
        return plain(*problem).await;
    }
    let mut reply = arrive(&shared, &seen);
    reply.before_headers().await;
    if reply.status != 200 {
        return plain(reply).await;
    }
    let (bill, message_id) = {
        let mut inner = shared.lock();
        inner.serial += 1;
        let id = format!("msg_{:04}", inner.serial);
        let mut bill = inner.cache.charge(&seen.body);
        bill.output = reply.output_tokens().min(seen.max_tokens());
        (bill, id)
    };
    let frames = stream::anthropic(&mut reply, &seen, &bill, &message_id);
    {
        let mut inner = shared.lock();
        inner.issued.remember(&reply);
        inner.bills.push(bill);
    }
    let request_id = format!("req_{message_id}");
    let response = stream::respond(reply, frames, &request_id, move |begun| {
        if begun {
            shared.lock().cache.keep(&seen.body);
        }
    });
    // Goes with the body, whoever ends it.
    response.map(|body| {
        Body::from_stream(body.into_data_stream().inspect(move |_| {
            let _ = &open;
        }))
    })
}

async fn count(State(shared): State<Shared>, headers: HeaderMap, body: Bytes) -> Response {
    let seen = record("/v1/messages/count_tokens", &headers, &body);
    let offered = {
        let mut inner = shared.lock();
        inner.seen.push(seen.clone());
        inner.counts
    };
    if !offered {
        return plain(error(404, "not_found_error", "Not found")).await;
    }
    json_response(200, &json!({"input_tokens": count_tokens(&seen.body)}))
}

async fn plain(mut reply: Reply) -> Response {
    reply.before_headers().await;
    let mut response = json_response(reply.status, &Value::Null);
    for (name, value) in &reply.headers {
        let name: axum::http::HeaderName = name.parse().expect("a test's header name");
        response.headers_mut().insert(name, value.parse().expect("a test's header value"));
    }
    *response.body_mut() = Body::from(reply.error_body.unwrap_or_default());
    response
}

fn json_response(status: u16, body: &Value) -> Response {
    let mut response = Response::new(Body::from(body.to_string()));
    *response.status_mut() = StatusCode::from_u16(status).expect("a test's status");
    response.headers_mut().insert("content-type", "application/json".parse().expect("a constant"));
    response
}
