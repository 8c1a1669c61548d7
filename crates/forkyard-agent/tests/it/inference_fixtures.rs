//! Streams as the real servers send them, decoded whole and cut at every byte.

use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use forkyard_agent::inference::{Answer, Billing};
use forkyard_agent::inference::{
    Anthropic, Backend, Block, Call, Delta, Failure, FailureKind, Headers, HttpBackend, OpenAi, Post,
    RateLimits, RawJson, Reply, StopReason, Transport, TransportError, TurnRequest, Watch,
};
use forkyard_core::pricing::Usage;
use futures::StreamExt;

use crate::inference_support::{ask, timeouts};

/// Answers everything with the same chunks.
struct Canned(Vec<Bytes>);

#[async_trait]
impl Transport for Canned {
    async fn post(&self, _: Post) -> Result<Reply, TransportError> {
        let chunks: Vec<Result<Bytes, TransportError>> = self.0.iter().cloned().map(Ok).collect();
        Ok(Reply { status: 200, headers: Headers::default(), body: futures::stream::iter(chunks).boxed() })
    }
}

#[derive(Default)]
struct Seen {
    deltas: String,
    started: Option<Usage>,
}

impl Watch for Seen {
    fn delta(&mut self, delta: Delta<'_>) {
        match delta {
            Delta::Text { text, .. } | Delta::Thinking { text, .. } => self.deltas.push_str(text),
            Delta::ToolStart { name, .. } => self.deltas.push_str(name),
            Delta::ToolInput { json, .. } => self.deltas.push_str(json),
            Delta::Reset | Delta::Notice(_) => {}
        }
    }
    fn started(&mut self, usage: &Usage) {
        self.started = Some(*usage);
    }
    fn rate_limits(&mut self, _: &RateLimits) {}
}

type Decoded = (Result<Answer, Failure>, String, Option<Usage>);

async fn decode(anthropic: bool, chunks: Vec<Bytes>) -> Decoded {
    let transport = Arc::new(Canned(chunks));
    let backend: Box<dyn Backend> = if anthropic {
        Box::new(HttpBackend::new(Anthropic::new("k"), transport, timeouts()))
    } else {
        Box::new(HttpBackend::new(OpenAi::new(None, "http://localhost/v1"), transport, timeouts()))
    };
    let request: TurnRequest = ask("go");
    let call = Call { request: &request, model: "m", facts: None, max_tokens: 100, fork: None };
    let mut seen = Seen::default();
    let result = backend.once(&call, &mut seen).await;
    (result, seen.deltas, seen.started)
}

/// The same however it is cut: whole, in single bytes, in two at every place, and with other line ends.
async fn fixture(name: &str) -> Decoded {
    let path = format!("{}/tests/fixtures/{name}", env!("CARGO_MANIFEST_DIR"));
    let bytes = Bytes::from(std::fs::read(path).unwrap());
    let anthropic = name.starts_with("anthropic");
    let whole = decode(anthropic, vec![bytes.clone()]).await;
    let single = (0..bytes.len()).map(|i| bytes.slice(i..=i)).collect();
    assert_eq!(decode(anthropic, single).await, whole);
    for at in 0..bytes.len() {
        let two = vec![bytes.slice(..at), bytes.slice(at..)];
        assert_eq!(decode(anthropic, two).await, whole, "cut at {at}");
    }
    let crlf = String::from_utf8(bytes.to_vec()).unwrap().replace('\n', "\r\n");
    assert_eq!(decode(anthropic, vec![Bytes::from(crlf)]).await, whole);
    whole
}

#[tokio::test]
async fn a_tool_call() {
    let (answer, deltas, started) = fixture("anthropic/tool_use.sse").await;
    let answer = answer.unwrap();
    assert_eq!(
        answer.content,
        vec![
            Block::text("Let me look at the files in the répertoire 🗂."),
            Block::ToolUse {
                id: "toolu_01T1x".into(),
                name: "Bash".into(),
                input: RawJson::new(r#"{"command": "ls -la", "timeout_ms": 1.0e3}"#)
            },
        ]
    );
    assert_eq!(answer.stop_reason, StopReason::ToolUse);
    assert_eq!(answer.usage, Some(Usage { input: 472, output: 89, ..Usage::default() }));
    assert!(deltas.starts_with("Let me look") && deltas.ends_with("1.0e3}"));
    assert_eq!(started.unwrap().input, 472);
}

#[tokio::test]
async fn thinking_and_what_is_new() {
    let answer = fixture("anthropic/thinking.sse").await.0.unwrap();
    assert_eq!(
        answer.content,
        vec![
            Block::Thinking {
                thinking: "The bug is in\nthe parser: it drops “quotes”.".into(),
                signature: "EqQBCkYIBRgC+/aBcD3fGh==".into()
            },
            Block::RedactedThinking { data: "EmwKAhgBEgy3va3pzix/LafPsn4a".into() },
            Block::text("Fixed."),
            Block::Other { json: RawJson::new(r#"{"type":"server_note","note":{"z":1,"a":[]}}"#) },
        ]
    );
    let usage =
        Usage { input: 12, output: 503, cache_write_5m: 600, cache_write_1h: 300, cache_read: 20_000 };
    assert_eq!(answer.usage, Some(usage));
    assert_eq!(answer.model, "claude-opus-5-5");
}

#[tokio::test]
async fn an_error_within_a_stream() {
    let (answer, deltas, _) = fixture("anthropic/error_in_stream.sse").await;
    let failure = answer.unwrap_err();
    assert_eq!((failure.kind, failure.billing), (FailureKind::Pushback, Billing::Unknown));
    assert_eq!(deltas, "Hel");
}

#[tokio::test]
async fn a_refusal_and_a_call_that_was_cut() {
    let refusal = fixture("anthropic/refusal.sse").await.0.unwrap();
    assert_eq!((refusal.stop_reason, refusal.content), (StopReason::Refusal, vec![]));
    let cut = fixture("anthropic/max_tokens_in_call.sse").await.0.unwrap();
    assert_eq!(cut.stop_reason, StopReason::MaxTokens);
    assert!(matches!(&cut.content[0], Block::ToolUse { input, .. } if input.object().is_err()));
}

#[tokio::test]
async fn chat_completions_with_calls() {
    let (answer, deltas, _) = fixture("openai/tool_calls.sse").await;
    let answer = answer.unwrap();
    let call = |id: &str, name: &str, input: &str| Block::ToolUse {
        id: id.into(),
        name: name.into(),
        input: RawJson::new(input),
    };
    assert_eq!(
        answer.content,
        vec![
            Block::text("Un momento 🕐"),
            call("call_a1", "Bash", r#"{"command":"ls"}"#),
            call("call_b2", "Read", r#"{"file_path":"x"}"#),
        ]
    );
    assert_eq!(answer.stop_reason, StopReason::ToolUse);
    assert_eq!(answer.usage, Some(Usage { input: 56, output: 31, cache_read: 64, ..Usage::default() }));
    assert!(deltas.contains("momento"));
}

#[tokio::test]
async fn chat_completions_of_a_server_with_habits_of_its_own() {
    let answer = fixture("openai/whole_calls_without_index.sse").await.0.unwrap();
    assert!(
        matches!(&answer.content[..], [Block::ToolUse { id, name, .. }] if id == "call_chatcmpl_77_0" && name == "Bash")
    );
    assert_eq!(answer.stop_reason, StopReason::ToolUse);
}

/// Cut short anywhere, an answer is lost and never a wrong one.
#[tokio::test]
async fn a_stream_that_ends_early_is_never_an_answer() {
    for (name, anthropic) in [("anthropic/thinking.sse", true), ("openai/tool_calls.sse", false)] {
        let path = format!("{}/tests/fixtures/{name}", env!("CARGO_MANIFEST_DIR"));
        let bytes = Bytes::from(std::fs::read(path).unwrap());
        let whole = decode(anthropic, vec![bytes.clone()]).await.0.unwrap();
        for end in 0..bytes.len() {
            match decode(anthropic, vec![bytes.slice(..end)]).await.0 {
                // Nothing but the usage or the last line end was missing.
                Ok(answer) => {
                    assert_eq!((&answer.content, &answer.stop_reason), (&whole.content, &whole.stop_reason))
                }
                Err(failure) => {
                    assert_eq!((failure.kind, failure.billing), (FailureKind::Transient, Billing::Unknown))
                }
            }
        }
    }
}
