//! Answers: events in, one message out. Unknown events, block types and deltas are passed over.

use std::collections::BTreeMap;

use forkyard_core::pricing::Usage;
use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Map, Value};

use super::super::backend::{Answer, Billing, Failure, Watch};
use super::super::http::{Decoder, too_large};
use super::super::sse::SseEvent;
use super::super::{Block, Delta, RawJson, StopReason};
use super::ErrorBody;

/// What is kept of one answer. The longest that models can write is below 2 MB.
pub const MAX_CONTENT_BYTES: usize = 8 << 20;
/// Blocks of one answer; far more than any turn is allowed to call tools.
const MAX_BLOCKS: usize = 4096;

#[derive(Default)]
pub struct MessageDecoder {
    request_id: Option<String>,
    model: String,
    started: bool,
    done: bool,
    stop_reason: Option<StopReason>,
    usage: WireUsage,
    blocks: BTreeMap<usize, Partial>,
    content_bytes: usize,
}

/// Every number may be missing, in any event; the last one that was said counts.
#[derive(Default, Deserialize)]
pub struct WireUsage {
    input_tokens: Option<u64>,
    output_tokens: Option<u64>,
    cache_creation_input_tokens: Option<u64>,
    cache_read_input_tokens: Option<u64>,
    cache_creation: Option<WireCacheCreation>,
}

#[derive(Default, Deserialize, Clone, Copy)]
struct WireCacheCreation {
    #[serde(default)]
    ephemeral_1h_input_tokens: u64,
}

impl WireUsage {
    pub fn update(&mut self, new: WireUsage) {
        let WireUsage {
            input_tokens,
            output_tokens,
            cache_creation_input_tokens,
            cache_read_input_tokens,
            cache_creation,
        } = new;
        self.input_tokens = input_tokens.or(self.input_tokens);
        self.output_tokens = output_tokens.or(self.output_tokens);
        self.cache_creation_input_tokens = cache_creation_input_tokens.or(self.cache_creation_input_tokens);
        self.cache_read_input_tokens = cache_read_input_tokens.or(self.cache_read_input_tokens);
        self.cache_creation = cache_creation.or(self.cache_creation);
    }

    /// None if the input was never reported.
    pub fn usage(&self) -> Option<Usage> {
        let written = self.cache_creation_input_tokens.unwrap_or(0);
        let one_hour = self.cache_creation.map_or(0, |c| c.ephemeral_1h_input_tokens).min(written);
        Some(Usage {
            input: self.input_tokens?,
            output: self.output_tokens.unwrap_or(0),
            cache_write_5m: written - one_hour,
            cache_write_1h: one_hour,
            cache_read: self.cache_read_input_tokens.unwrap_or(0),
        })
    }
}

#[derive(Debug)]
enum Partial {
    Text(String),
    Thinking {
        thinking: String,
        signature: String,
    },
    Redacted(String),
    /// `given` is the input of the start event, for a provider that does not stream it.
    ToolUse {
        id: String,
        name: String,
        given: String,
        streamed: String,
    },
    Other {
        start: String,
        streamed: String,
    },
}

#[derive(Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Start {
    Text {
        #[serde(default)]
        text: String,
    },
    Thinking {
        #[serde(default)]
        thinking: String,
        #[serde(default)]
        signature: String,
    },
    RedactedThinking {
        data: String,
    },
    ToolUse {
        id: String,
        name: String,
        #[serde(default)]
        input: Map<String, Value>,
    },
    #[serde(other)]
    Unknown,
}

#[derive(Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum WireDelta {
    TextDelta {
        text: String,
    },
    InputJsonDelta {
        partial_json: String,
    },
    ThinkingDelta {
        thinking: String,
    },
    SignatureDelta {
        signature: String,
    },
    #[serde(other)]
    Unknown,
}

#[derive(Deserialize)]
struct Typed {
    r#type: String,
}

fn parse<'a, T: Deserialize<'a>>(data: &'a [u8]) -> Result<T, Failure> {
    serde_json::from_slice(data)
        .map_err(|e| Failure::lost(format!("an event of the stream is malformed: {e}")))
}

impl MessageDecoder {
    pub fn new(request_id: Option<String>) -> MessageDecoder {
        MessageDecoder { request_id, ..MessageDecoder::default() }
    }

    fn message_start(&mut self, data: &[u8], watch: &mut dyn Watch) -> Result<(), Failure> {
        #[derive(Deserialize)]
        struct Event {
            message: Start,
        }
        #[derive(Deserialize)]
        struct Start {
            #[serde(default)]
            model: String,
            #[serde(default)]
            usage: WireUsage,
        }
        let Event { message } = parse(data)?;
        self.started = true;
        self.model = message.model;
        self.usage.update(message.usage);
        if let Some(usage) = self.usage.usage() {
            watch.started(&usage);
        }
        Ok(())
    }

    fn block_start(&mut self, data: &[u8], watch: &mut dyn Watch) -> Result<(), Failure> {
        #[derive(Deserialize)]
        struct Event<'a> {
            index: usize,
            #[serde(borrow)]
            content_block: &'a RawValue,
        }
        let Event { index, content_block } = parse(data)?;
        let raw = content_block.get();
        self.grow(raw.len())?;
        let partial = match parse::<Start>(raw.as_bytes())? {
            Start::Text { text } => {
                watch.delta(Delta::Text { index, text: &text });
                Partial::Text(text)
            }
            Start::Thinking { thinking, signature } => Partial::Thinking { thinking, signature },
            Start::RedactedThinking { data } => Partial::Redacted(data),
            Start::ToolUse { id, name, input } => {
                watch.delta(Delta::ToolStart { index, id: &id, name: &name });
                // Only a provider that streams no input gives it here; its own text is in the event.
                let given = if input.is_empty() { String::new() } else { raw_field(raw, "input") };
                Partial::ToolUse { id, name, given, streamed: String::new() }
            }
            Start::Unknown => Partial::Other { start: raw.to_string(), streamed: String::new() },
        };
        if self.blocks.len() >= MAX_BLOCKS {
            return Err(too_large(format!("the answer has more than {MAX_BLOCKS} blocks")));
        }
        match self.blocks.insert(index, partial) {
            None => Ok(()),
            Some(_) => Err(Failure::lost(format!("block {index} of the answer starts twice"))),
        }
    }

    fn block_delta(&mut self, data: &[u8], watch: &mut dyn Watch) -> Result<(), Failure> {
        #[derive(Deserialize)]
        struct Event {
            index: usize,
            delta: WireDelta,
        }
        let Event { index, delta } = parse(data)?;
        self.grow(match &delta {
            WireDelta::TextDelta { text } => text.len(),
            WireDelta::InputJsonDelta { partial_json } => partial_json.len(),
            WireDelta::ThinkingDelta { thinking } => thinking.len(),
            WireDelta::SignatureDelta { signature } => signature.len(),
            WireDelta::Unknown => 0,
        })?;
        let Some(block) = self.blocks.get_mut(&index) else {
            return Err(Failure::lost(format!("the stream goes on with block {index}, which never began")));
        };
        match (block, delta) {
            (Partial::Text(all), WireDelta::TextDelta { text }) => {
                watch.delta(Delta::Text { index, text: &text });
                all.push_str(&text);
            }
            (Partial::Thinking { thinking: all, .. }, WireDelta::ThinkingDelta { thinking }) => {
                watch.delta(Delta::Thinking { index, text: &thinking });
                all.push_str(&thinking);
            }
            (Partial::Thinking { signature: all, .. }, WireDelta::SignatureDelta { signature }) => {
                all.push_str(&signature);
            }
            (Partial::ToolUse { streamed, .. }, WireDelta::InputJsonDelta { partial_json }) => {
                watch.delta(Delta::ToolInput { index, json: &partial_json });
                streamed.push_str(&partial_json);
            }
            (Partial::Other { streamed, .. }, WireDelta::InputJsonDelta { partial_json }) => {
                streamed.push_str(&partial_json);
            }
            (_, WireDelta::Unknown) | (Partial::Other { .. }, _) => {}
            (block, _) => {
                return Err(Failure::lost(format!(
                    "the stream goes on with block {index} as another kind than it began: {block:.40?}"
                )));
            }
        }
        Ok(())
    }

    fn message_delta(&mut self, data: &[u8]) -> Result<(), Failure> {
        #[derive(Deserialize)]
        struct Event {
            delta: End,
            #[serde(default)]
            usage: WireUsage,
        }
        #[derive(Deserialize)]
        struct End {
            stop_reason: Option<StopReason>,
        }
        let Event { delta, usage } = parse(data)?;
        self.stop_reason = delta.stop_reason.or(self.stop_reason.take());
        self.usage.update(usage);
        Ok(())
    }

    fn error(&self, data: &[u8]) -> Failure {
        let Some(error) = ErrorBody::parse(data) else {
            return Failure::lost("the stream ends with an error that can't be read");
        };
        // An error instead of an answer is a refusal; one within an answer says nothing of what that costs.
        let billing = if self.started { Billing::Unknown } else { Billing::Nothing };
        Failure { kind: error.kind(), billing, ..Failure::lost(format!("{}: {}", error.kind, error.message)) }
    }

    fn grow(&mut self, bytes: usize) -> Result<(), Failure> {
        self.content_bytes += bytes;
        if self.content_bytes > MAX_CONTENT_BYTES {
            return Err(too_large(format!("the answer's content is larger than {MAX_CONTENT_BYTES} bytes")));
        }
        Ok(())
    }
}

/// A field's own text; empty if there is none.
fn raw_field(json: &str, field: &str) -> String {
    let fields: Option<BTreeMap<String, &RawValue>> = serde_json::from_str(json).ok();
    fields.and_then(|f| f.get(field).map(|v| v.get().to_string())).unwrap_or_default()
}

impl Partial {
    /// None for what says nothing: the API would refuse to take it back.
    fn finish(self) -> Option<Block> {
        Some(match self {
            Partial::Text(text) if text.is_empty() => return None,
            Partial::Text(text) => Block::Text { text },
            Partial::Thinking { thinking, signature } => Block::Thinking { thinking, signature },
            Partial::Redacted(data) => Block::RedactedThinking { data },
            Partial::ToolUse { id, name, given, streamed } => {
                let input = match (streamed.is_empty(), given.is_empty()) {
                    (false, _) => streamed,
                    (true, false) => given,
                    (true, true) => "{}".to_string(),
                };
                Block::ToolUse { id, name, input: RawJson::new(input) }
            }
            Partial::Other { start, streamed } => {
                Block::Other { json: RawJson::new(with_input(start, &streamed)) }
            }
        })
    }
}

/// An unknown block that calls something streams its input like a tool call does.
fn with_input(start: String, streamed: &str) -> String {
    let fields: Option<Map<String, Value>> = serde_json::from_str(&start).ok();
    match (fields, serde_json::from_str::<Value>(streamed)) {
        (Some(mut fields), Ok(input)) => {
            fields.insert("input".to_string(), input);
            Value::Object(fields).to_string()
        }
        (_, _) => start,
    }
}

impl Decoder for MessageDecoder {
    fn event(&mut self, event: &SseEvent, watch: &mut dyn Watch) -> Result<(), Failure> {
        if self.done {
            return Ok(());
        }
        let Typed { r#type } = parse(&event.data)?;
        if !self.started && r#type.starts_with("content_block") {
            return Err(Failure::lost("the stream does not begin with message_start"));
        }
        match r#type.as_str() {
            "message_start" => self.message_start(&event.data, watch),
            "content_block_start" => self.block_start(&event.data, watch),
            "content_block_delta" => self.block_delta(&event.data, watch),
            "message_delta" => self.message_delta(&event.data),
            "message_stop" => {
                self.done = true;
                Ok(())
            }
            "error" => Err(self.error(&event.data)),
            // content_block_stop, ping, and whatever is new.
            _ => Ok(()),
        }
    }

    fn is_done(&self) -> bool {
        self.done
    }

    fn finish(self: Box<Self>) -> Result<Answer, Failure> {
        let Some(stop_reason) = self.stop_reason.filter(|_| self.done) else {
            return Err(Failure::lost("the stream ended before the answer did"));
        };
        Ok(Answer {
            content: self.blocks.into_values().filter_map(Partial::finish).collect(),
            stop_reason,
            usage: self.usage.usage(),
            request_id: self.request_id,
            model: self.model,
        })
    }
}
