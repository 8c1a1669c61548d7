//! The same replies in the shape of chat completions.

use axum::body::Bytes;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::Response;
use serde_json::{Value, json};

use super::{Bill, Part, Reply, Seen, Shared, arrive, count_tokens, plain, record, stream};

fn data(value: &Value) -> Bytes {
    Bytes::from(format!("data: {value}\n\n"))
}

pub async fn completions(State(shared): State<Shared>, headers: HeaderMap, body: Bytes) -> Response {
    let seen = record("/v1/chat/completions", &headers, &body);
    if !seen.body["temperature"].is_null() {
        return plain(Reply::error(400, "invalid_request_error", "temperature is not supported")).await;
    }
    let mut reply = arrive(&shared, &seen);
    reply.before_headers().await;
    if reply.status != 200 {
        return plain(reply).await;
    }
    let limit = seen.body["max_completion_tokens"].as_u64().unwrap_or(seen.max_tokens());
    let bill =
        Bill { input: count_tokens(&seen.body), output: reply.output_tokens().min(limit), ..Bill::default() };
    let id = {
        let mut inner = shared.lock();
        inner.bills.push(bill);
        inner.serial += 1;
        format!("chatcmpl-{:04}", inner.serial)
    };
    let chunks = chunks(&reply, &seen, &bill, &id);
    stream::respond(reply, chunks, &id, |_| ())
}

fn chunks(reply: &Reply, seen: &Seen, bill: &Bill, id: &str) -> Vec<Bytes> {
    let chunk = |delta: Value, finish: Value| {
        data(&json!({"id": id, "object": "chat.completion.chunk", "model": seen.body["model"],
                     "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}))
    };
    let mut out = vec![chunk(json!({"role": "assistant", "content": ""}), Value::Null)];
    let mut calls = 0;
    let pieces = |text: &str| {
        let chars: Vec<char> = text.chars().collect();
        chars.chunks(5).map(|c| c.iter().collect::<String>()).collect::<Vec<_>>()
    };
    for part in &reply.parts {
        match part {
            Part::Text(text) => {
                out.extend(pieces(text).iter().map(|p| chunk(json!({"content": p}), Value::Null)));
            }
            Part::Thinking(text) => {
                out.extend(pieces(text).iter().map(|p| chunk(json!({"reasoning_content": p}), Value::Null)));
            }
            Part::Tool { id: call, name, input } => {
                let call = call.clone().unwrap_or_else(|| format!("call_{}_{calls}", &id[9..]));
                let head = json!({"tool_calls": [{"index": calls, "id": call, "type": "function",
                                                  "function": {"name": name, "arguments": ""}}]});
                out.push(chunk(head, Value::Null));
                out.extend(pieces(input).iter().map(|p| {
                    chunk(
                        json!({"tool_calls": [{"index": calls, "function": {"arguments": p}}]}),
                        Value::Null,
                    )
                }));
                calls += 1;
            }
            Part::RedactedThinking(_) | Part::Raw(_) => {}
        }
    }
    let finish = match reply.stop_reason() {
        "end_turn" => "stop",
        "tool_use" => "tool_calls",
        "max_tokens" => "length",
        "refusal" => "content_filter",
        other => other,
    };
    out.push(chunk(json!({}), json!(finish)));
    if reply.report_usage && seen.body["stream_options"]["include_usage"] == true {
        out.push(data(
            &json!({"id": id, "object": "chat.completion.chunk", "model": seen.body["model"], "choices": [],
            "usage": {"prompt_tokens": bill.prompt(), "completion_tokens": bill.output,
                      "prompt_tokens_details": {"cached_tokens": bill.cache_read}}}),
        ));
    }
    out.push(Bytes::from_static(b"data: [DONE]\n\n"));
    out
}
