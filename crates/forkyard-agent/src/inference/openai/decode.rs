//! Answers: chunks in, one message out.

use std::collections::BTreeMap;

use forkyard_core::pricing::Usage;
use serde::Deserialize;

use super::super::backend::{Answer, Billing, Failure, FailureKind, Watch};
use super::super::http::{Decoder, too_large};
use super::super::sse::SseEvent;
use super::super::{Block, Delta, RawJson, StopReason};
use super::ErrorBody;

/// What is kept of one answer; see the same bound of the other format.
const MAX_CONTENT_BYTES: usize = 8 << 20;
const MAX_CALLS: usize = 4096;

#[derive(Default)]
pub struct ChunkDecoder {
    request_id: Option<String>,
    id: String,
    model: String,
    started: bool,
    done: bool,
    text: String,
    calls: BTreeMap<usize, PartialCall>,
    finish: Option<String>,
    usage: Option<WireUsage>,
    content_bytes: usize,
}

#[derive(Default)]
struct PartialCall {
    id: String,
    name: String,
    arguments: String,
    announced: bool,
}

#[derive(Deserialize)]
struct Chunk {
    #[serde(default)]
    id: String,
    #[serde(default)]
    model: String,
    #[serde(default)]
    choices: Vec<Choice>,
    usage: Option<WireUsage>,
}

#[derive(Deserialize)]
struct Choice {
    #[serde(default)]
    delta: WireDelta,
    finish_reason: Option<String>,
}

#[derive(Deserialize, Default)]
struct WireDelta {
    content: Option<String>,
    /// Two names for the same; servers differ.
    reasoning_content: Option<String>,
    reasoning: Option<String>,
    tool_calls: Option<Vec<WireCall>>,
}

#[derive(Deserialize)]
struct WireCall {
    index: Option<usize>,
    id: Option<String>,
    function: Option<WireFunction>,
}

#[derive(Deserialize)]
struct WireFunction {
    name: Option<String>,
    arguments: Option<String>,
}

#[derive(Deserialize)]
struct WireUsage {
    prompt_tokens: u64,
    #[serde(default)]
    completion_tokens: u64,
    prompt_tokens_details: Option<PromptDetails>,
}

#[derive(Deserialize)]
struct PromptDetails {
    cached_tokens: Option<u64>,
}

impl ChunkDecoder {
    pub fn new(request_id: Option<String>) -> ChunkDecoder {
        ChunkDecoder { request_id, ..ChunkDecoder::default() }
    }

    fn grow(&mut self, bytes: usize) -> Result<(), Failure> {
        self.content_bytes += bytes;
        if self.content_bytes > MAX_CONTENT_BYTES {
            return Err(too_large(format!("the answer's content is larger than {MAX_CONTENT_BYTES} bytes")));
        }
        Ok(())
    }

    fn call(&mut self, call: WireCall, watch: &mut dyn Watch) -> Result<(), Failure> {
        // A server that numbers nothing sends each call whole.
        let index = call.index.unwrap_or(self.calls.len());
        let function = call.function.unwrap_or(WireFunction { name: None, arguments: None });
        self.grow(
            function.arguments.as_ref().map_or(0, String::len)
                + function.name.as_ref().map_or(0, String::len),
        )?;
        if self.calls.len() >= MAX_CALLS && !self.calls.contains_key(&index) {
            return Err(too_large(format!("the answer has more than {MAX_CALLS} calls")));
        }
        let made_up =
            || format!("call_{}_{index}", self.id.replace(|c: char| !c.is_ascii_alphanumeric(), "_"));
        let id = call.id.filter(|id| !id.is_empty());
        let fallback = if id.is_none() { made_up() } else { String::new() };
        let partial = self.calls.entry(index).or_default();
        if let Some(id) = id {
            partial.id = id;
        } else if partial.id.is_empty() {
            partial.id = fallback;
        }
        partial.name.push_str(function.name.as_deref().unwrap_or_default());
        // Block 0 is the text, whether there is one or not.
        let index = index + 1;
        if !partial.announced && !partial.name.is_empty() {
            partial.announced = true;
            watch.delta(Delta::ToolStart { index, id: &partial.id, name: &partial.name });
        }
        if let Some(json) = function.arguments.filter(|a| !a.is_empty()) {
            watch.delta(Delta::ToolInput { index, json: &json });
            partial.arguments.push_str(&json);
        }
        Ok(())
    }

    fn stop_reason(&self, finish: &str) -> StopReason {
        match finish {
            "length" => StopReason::MaxTokens,
            "content_filter" => StopReason::Refusal,
            // Some servers say "stop" after calls too.
            _ if !self.calls.is_empty() => StopReason::ToolUse,
            "stop" => StopReason::EndTurn,
            other => StopReason::Other(other.to_string()),
        }
    }
}

impl Decoder for ChunkDecoder {
    fn event(&mut self, event: &SseEvent, watch: &mut dyn Watch) -> Result<(), Failure> {
        if self.done {
            return Ok(());
        }
        if event.data == b"[DONE]" {
            self.done = true;
            return Ok(());
        }
        if let Some(error) = ErrorBody::parse(&event.data) {
            let billing = if self.started { Billing::Unknown } else { Billing::Nothing };
            return Err(Failure { kind: FailureKind::Transient, billing, ..Failure::lost(error.message) });
        }
        let chunk: Chunk = serde_json::from_slice(&event.data)
            .map_err(|e| Failure::lost(format!("a chunk of the stream is malformed: {e}")))?;
        self.started = true;
        if self.id.is_empty() {
            self.id = chunk.id;
        }
        if self.model.is_empty() {
            self.model = chunk.model;
        }
        self.usage = chunk.usage.or(self.usage.take());
        for choice in chunk.choices {
            let delta = choice.delta;
            if let Some(text) = delta.reasoning_content.or(delta.reasoning).filter(|t| !t.is_empty()) {
                // Shown, not kept: it can't be sent back.
                watch.delta(Delta::Thinking { index: 0, text: &text });
            }
            if let Some(text) = delta.content.filter(|t| !t.is_empty()) {
                self.grow(text.len())?;
                watch.delta(Delta::Text { index: 0, text: &text });
                self.text.push_str(&text);
            }
            for call in delta.tool_calls.into_iter().flatten() {
                self.call(call, watch)?;
            }
            self.finish = choice.finish_reason.or(self.finish.take());
        }
        Ok(())
    }

    fn is_done(&self) -> bool {
        self.done
    }

    fn finish(self: Box<Self>) -> Result<Answer, Failure> {
        // A server may close instead of saying [DONE]; without a finish reason the answer is cut.
        let Some(finish) = &self.finish else {
            return Err(Failure::lost("the stream ended before the answer did"));
        };
        let stop_reason = self.stop_reason(finish);
        let text = (!self.text.is_empty()).then_some(Block::Text { text: self.text });
        let calls = self.calls.into_values().map(|call| {
            let input = if call.arguments.trim().is_empty() { "{}".to_string() } else { call.arguments };
            Block::ToolUse { id: call.id, name: call.name, input: RawJson::new(input) }
        });
        let usage = self.usage.map(|u| {
            let cached =
                u.prompt_tokens_details.and_then(|d| d.cached_tokens).unwrap_or(0).min(u.prompt_tokens);
            Usage {
                input: u.prompt_tokens - cached,
                output: u.completion_tokens,
                cache_read: cached,
                ..Usage::default()
            }
        });
        Ok(Answer {
            content: text.into_iter().chain(calls).collect(),
            stop_reason,
            usage,
            request_id: self.request_id.or((!self.id.is_empty()).then_some(self.id)),
            model: self.model,
        })
    }
}
