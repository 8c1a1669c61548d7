//! Replies as event streams, and their way onto the wire.

use axum::body::{Body, Bytes};
use axum::response::Response;
use futures::StreamExt;
use futures::stream::{self, BoxStream};
use serde_json::{Value, json};

use super::check::signature;
use super::{Bill, Cut, Part, Reply, Seen, Split};

/// Text is streamed in pieces of about this many characters.
const PIECE_CHARS: usize = 7;

pub fn sse(event: &str, data: &Value) -> Bytes {
    Bytes::from(format!("event: {event}\ndata: {data}\n\n"))
}

fn pieces(text: &str) -> Vec<String> {
    let chars: Vec<char> = text.chars().collect();
    chars.chunks(PIECE_CHARS).map(|c| c.iter().collect()).collect()
}

/// The events of an answer; also gives its tool calls their ids.
pub fn anthropic(reply: &mut Reply, seen: &Seen, bill: &Bill, message_id: &str) -> Vec<Bytes> {
    let mut events = vec![sse(
        "message_start",
        &json!({"type": "message_start", "message": {
            "id": message_id, "type": "message", "role": "assistant", "model": seen.body["model"],
            "content": [], "stop_reason": null, "stop_sequence": null,
            "usage": {
                "input_tokens": bill.input,
                "cache_creation_input_tokens": bill.cache_write_5m + bill.cache_write_1h,
                "cache_read_input_tokens": bill.cache_read,
                "cache_creation": {
                    "ephemeral_5m_input_tokens": bill.cache_write_5m,
                    "ephemeral_1h_input_tokens": bill.cache_write_1h,
                },
                "output_tokens": 1,
            },
        }}),
    )];
    if reply.pings {
        events.push(sse("ping", &json!({"type": "ping"})));
    }
    for (index, part) in reply.parts.iter_mut().enumerate() {
        let start = |block: Value| {
            sse(
                "content_block_start",
                &json!({"type": "content_block_start", "index": index, "content_block": block}),
            )
        };
        let delta = |delta: Value| {
            sse(
                "content_block_delta",
                &json!({"type": "content_block_delta", "index": index, "delta": delta}),
            )
        };
        match part {
            Part::Text(text) => {
                events.push(start(json!({"type": "text", "text": ""})));
                events.extend(pieces(text).iter().map(|p| delta(json!({"type": "text_delta", "text": p}))));
            }
            Part::Thinking(text) => {
                events.push(start(json!({"type": "thinking", "thinking": "", "signature": ""})));
                events.extend(
                    pieces(text).iter().map(|p| delta(json!({"type": "thinking_delta", "thinking": p}))),
                );
                events.push(delta(json!({"type": "signature_delta", "signature": signature(text)})));
            }
            Part::RedactedThinking(data) => {
                events.push(start(json!({"type": "redacted_thinking", "data": data})));
            }
            Part::Tool { id, name, input } => {
                let id = id.get_or_insert_with(|| format!("toolu_{}_{index}", &message_id[4..]));
                events.push(start(json!({"type": "tool_use", "id": id, "name": name, "input": {}})));
                events.push(delta(json!({"type": "input_json_delta", "partial_json": ""})));
                events.extend(
                    pieces(input)
                        .iter()
                        .map(|p| delta(json!({"type": "input_json_delta", "partial_json": p}))),
                );
            }
            Part::Raw(block) => events.push(start(block.clone())),
        }
        if reply.pings {
            events.push(sse("ping", &json!({"type": "ping"})));
        }
        if reply.unknown_events {
            events.push(sse("news", &json!({"type": "news", "index": index, "delta": {"type": "x"}})));
            events.push(Bytes::from_static(b": a comment\n\n"));
            events.push(delta(json!({"type": "citations_delta", "citation": {}})));
        }
        events.push(sse("content_block_stop", &json!({"type": "content_block_stop", "index": index})));
    }
    events.push(sse(
        "message_delta",
        &json!({"type": "message_delta", "delta": {"stop_reason": reply.stop_reason(), "stop_sequence": null},
                "usage": {"output_tokens": bill.output}}),
    ));
    events.push(sse("message_stop", &json!({"type": "message_stop"})));
    if !reply.report_usage {
        for event in &mut events {
            *event = Bytes::from(String::from_utf8_lossy(event).replace("\"usage\"", "\"unusual\""));
        }
    }
    events
}

type Chunks = BoxStream<'static, Result<Bytes, std::io::Error>>;

fn split(events: Vec<Bytes>, how: Split) -> Vec<Bytes> {
    let whole = || Bytes::from(events.concat());
    let by = |n: usize| {
        let all = whole();
        (0..all.len()).step_by(n).map(|at| all.slice(at..all.len().min(at + n))).collect()
    };
    match how {
        Split::PerEvent => events,
        Split::EveryByte => by(1),
        Split::Bytes(n) => by(n),
        Split::Whole => vec![whole()],
    }
}

/// A text or a call's input that never seems to end, made while it is sent.
fn endless(bytes: u64, first: Option<&Part>) -> Chunks {
    let more = "x".repeat(16 << 10);
    let delta = match first {
        Some(Part::Tool { .. }) => json!({"type": "input_json_delta", "partial_json": more}),
        _ => json!({"type": "text_delta", "text": more}),
    };
    let event =
        sse("content_block_delta", &json!({"type": "content_block_delta", "index": 0, "delta": delta}));
    let count = usize::try_from(bytes / (16 << 10)).expect("fits") + 1;
    stream::iter((0..count).map(move |_| Ok(event.clone()))).boxed()
}

/// `begun` is told when the first bytes of the answer leave.
pub fn respond(
    reply: Reply,
    mut events: Vec<Bytes>,
    request_id: &str,
    begun: impl FnOnce(bool) + Send + 'static,
) -> Response {
    if let Some((after, error)) = &reply.stream_error {
        events.truncate(*after);
        events.push(sse("error", error));
    }
    let end: Chunks = match reply.cut {
        None => stream::empty().boxed(),
        Some(Cut::EndAfter(n)) => {
            events.truncate(n);
            stream::empty().boxed()
        }
        Some(Cut::DropAfter(n)) => {
            events.truncate(n);
            stream::iter([Err(std::io::Error::other("cut by the test"))]).boxed()
        }
        Some(Cut::HangAfter(n)) => {
            events.truncate(n);
            stream::pending().boxed()
        }
    };
    let mut begun = Some(begun);
    let head: Chunks = if reply.huge_bytes > 0 {
        // message_start and the start of the first block, the flood, the rest.
        let rest = events.split_off(events.len().min(2));
        let all =
            stream::iter(events.into_iter().map(Ok)).chain(endless(reply.huge_bytes, reply.parts.first()));
        all.chain(stream::iter(rest.into_iter().map(Ok))).boxed()
    } else {
        // Yielding lets each chunk leave on its own.
        let chunks = stream::iter(split(events, reply.split)).then(|chunk| async {
            tokio::task::yield_now().await;
            Ok(chunk)
        });
        chunks.boxed()
    };
    let body = head.chain(end).inspect(move |_| {
        if let Some(begun) = begun.take() {
            begun(true);
        }
    });
    let mut response = Response::new(Body::from_stream(body));
    let headers = response.headers_mut();
    headers.insert("content-type", "text/event-stream; charset=utf-8".parse().expect("a constant"));
    headers.insert("request-id", request_id.parse().expect("ours"));
    for (name, value) in &reply.headers {
        let name: axum::http::HeaderName = name.parse().expect("a test's header name");
        headers.insert(name, value.parse().expect("a test's header value"));
    }
    response
}
