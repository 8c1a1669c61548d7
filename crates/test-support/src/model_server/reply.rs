//! What the server should answer, as values.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::sync::Semaphore;

/// A block of an answer.
#[derive(Debug, Clone, PartialEq)]
pub enum Part {
    Text(String),
    Thinking(String),
    RedactedThinking(String),
    /// Input as text: it may be malformed or cut.
    Tool {
        id: Option<String>,
        name: String,
        input: String,
    },
    /// Any JSON as a block of its own.
    Raw(Value),
}

/// How the bytes are cut into chunks of the body.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Split {
    #[default]
    PerEvent,
    EveryByte,
    /// Chunks of this many bytes, events or not.
    Bytes(usize),
    Whole,
}

/// Where a stream ends before its time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cut {
    /// The connection is reset after this many events.
    DropAfter(usize),
    /// The body ends properly, but too early.
    EndAfter(usize),
    /// Nothing more comes, and the connection stays.
    HangAfter(usize),
}

/// Holds something back until the test opens it.
#[derive(Debug, Clone)]
pub struct Gate(Arc<Semaphore>);

impl Default for Gate {
    fn default() -> Gate {
        Gate(Arc::new(Semaphore::new(0)))
    }
}

impl Gate {
    /// Lets `n` pass.
    pub fn open(&self, n: usize) {
        self.0.add_permits(n);
    }
    async fn pass(&self) {
        self.0.acquire().await.expect("never closed").forget();
    }
}

#[derive(Debug, Clone)]
pub struct Reply {
    pub(super) status: u16,
    pub(super) headers: Vec<(String, String)>,
    pub(super) error_body: Option<String>,
    pub(super) parts: Vec<Part>,
    pub(super) stop_reason: Option<String>,
    pub(super) output_tokens: Option<u64>,
    pub(super) split: Split,
    pub(super) cut: Option<Cut>,
    pub(super) pings: bool,
    pub(super) unknown_events: bool,
    pub(super) huge_bytes: u64,
    pub(super) delay: Option<Duration>,
    pub(super) gate: Option<Gate>,
    pub(super) stream_error: Option<(usize, Value)>,
    pub(super) report_usage: bool,
}

impl Reply {
    pub fn message(parts: Vec<Part>) -> Reply {
        Reply {
            status: 200,
            headers: Vec::new(),
            error_body: None,
            parts,
            stop_reason: None,
            output_tokens: None,
            split: Split::default(),
            cut: None,
            pings: false,
            unknown_events: false,
            huge_bytes: 0,
            delay: None,
            gate: None,
            stream_error: None,
            report_usage: true,
        }
    }
    pub fn text(text: impl Into<String>) -> Reply {
        Reply::message(vec![Part::Text(text.into())])
    }
    pub fn tool(name: impl Into<String>, input: Value) -> Reply {
        Reply::message(vec![Part::Tool { id: None, name: name.into(), input: input.to_string() }])
    }
    /// The same call many times in one turn.
    pub fn tools(name: &str, input: &Value, count: usize) -> Reply {
        let part = |_| Part::Tool { id: None, name: name.into(), input: input.to_string() };
        Reply::message((0..count).map(part).collect())
    }
    pub fn refusal() -> Reply {
        Reply::message(Vec::new()).stop("refusal")
    }
    /// An error in the API's own shape.
    pub fn error(status: u16, kind: &str, message: &str) -> Reply {
        let body = json!({
            "type": "error",
            "error": {"type": kind, "message": message},
            "request_id": "req_error",
        });
        Reply::raw_error(status, body.to_string())
    }
    /// As a gateway answers.
    pub fn raw_error(status: u16, body: impl Into<String>) -> Reply {
        Reply { status, error_body: Some(body.into()), ..Reply::message(Vec::new()) }
    }
    pub fn header(mut self, name: &str, value: impl ToString) -> Reply {
        self.headers.push((name.to_string(), value.to_string()));
        self
    }
    pub fn and(mut self, part: Part) -> Reply {
        self.parts.push(part);
        self
    }
    pub fn stop(mut self, reason: &str) -> Reply {
        self.stop_reason = Some(reason.to_string());
        self
    }
    /// What is billed; else a quarter of the bytes.
    pub fn output(mut self, tokens: u64) -> Reply {
        self.output_tokens = Some(tokens);
        self
    }
    pub fn split(mut self, split: Split) -> Reply {
        self.split = split;
        self
    }
    pub fn cut(mut self, cut: Cut) -> Reply {
        self.cut = Some(cut);
        self
    }
    pub fn pings(mut self) -> Reply {
        self.pings = true;
        self
    }
    pub fn unknown_events(mut self) -> Reply {
        self.unknown_events = true;
        self
    }
    /// The first block, a text or a call's input, goes on for this many bytes.
    pub fn huge(mut self, bytes: u64) -> Reply {
        self.huge_bytes = bytes;
        self
    }
    /// Before the headers.
    pub fn delay(mut self, delay: Duration) -> Reply {
        self.delay = Some(delay);
        self
    }
    /// Before the headers, until the test lets it pass.
    pub fn gate(mut self, gate: &Gate) -> Reply {
        self.gate = Some(gate.clone());
        self
    }
    /// An `error` event after this many events, and the end.
    pub fn stream_error(mut self, after: usize, kind: &str, message: &str) -> Reply {
        self.stream_error =
            Some((after, json!({"type": "error", "error": {"type": kind, "message": message}})));
        self
    }
    pub fn without_usage(mut self) -> Reply {
        self.report_usage = false;
        self
    }

    pub(super) async fn before_headers(&mut self) {
        if let Some(delay) = self.delay.take() {
            tokio::time::sleep(delay).await;
        }
        if let Some(gate) = self.gate.take() {
            gate.pass().await;
        }
    }

    pub(super) fn output_tokens(&self) -> u64 {
        let bytes: usize = self
            .parts
            .iter()
            .map(|part| match part {
                Part::Text(t) | Part::Thinking(t) | Part::RedactedThinking(t) => t.len(),
                Part::Tool { name, input, .. } => name.len() + input.len(),
                Part::Raw(v) => v.to_string().len(),
            })
            .sum();
        self.output_tokens.unwrap_or((bytes as u64 + self.huge_bytes).div_ceil(4))
    }

    pub(super) fn stop_reason(&self) -> &str {
        let calls = self.parts.iter().any(|p| matches!(p, Part::Tool { .. }));
        self.stop_reason.as_deref().unwrap_or(if calls { "tool_use" } else { "end_turn" })
    }
}
