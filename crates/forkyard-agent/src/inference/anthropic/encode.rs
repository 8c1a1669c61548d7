//! Requests. The order is what prompt caching lives on: tools, system and the shared part of the task come first and are the
//! same bytes in every fork; then the fork's own part; then the conversation, only ever appended to.

use std::borrow::Cow;

use forkyard_core::pricing::CacheTtl;
use serde::Serialize;
use serde_json::value::RawValue;

use super::super::backend::Call;
use super::super::{Block, Image, ResultPart, Role, TurnRequest};

#[derive(Serialize)]
pub struct Body<'a> {
    model: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    max_tokens: Option<u32>,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    stream: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    thinking: Option<Thinking>,
    #[serde(skip_serializing_if = "Option::is_none")]
    output_config: Option<OutputConfig>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tools: Vec<Tool<'a>>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    system: Vec<Wire<'a>>,
    messages: Vec<WireMessage<'a>>,
}

#[derive(Serialize)]
struct Thinking {
    r#type: &'static str,
    display: &'static str,
}

#[derive(Serialize)]
struct OutputConfig {
    effort: &'static str,
}

#[derive(Serialize)]
struct Tool<'a> {
    name: &'a str,
    description: &'a str,
    input_schema: &'a serde_json::Value,
    #[serde(skip_serializing_if = "Option::is_none")]
    cache_control: Option<CacheControl>,
}

#[derive(Serialize)]
struct WireMessage<'a> {
    role: Role,
    content: Vec<Wire<'a>>,
}

#[derive(Serialize, Clone, Copy)]
struct CacheControl {
    r#type: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    ttl: Option<&'static str>,
}

impl CacheControl {
    fn new(ttl: CacheTtl) -> CacheControl {
        let ttl = match ttl {
            CacheTtl::FiveMinutes => None,
            CacheTtl::OneHour => Some("1h"),
        };
        CacheControl { r#type: "ephemeral", ttl }
    }
}

#[derive(Serialize)]
#[serde(untagged)]
enum Wire<'a> {
    Known(Known<'a>),
    Raw(Cow<'a, RawValue>),
}

#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Known<'a> {
    Text {
        text: &'a str,
        #[serde(skip_serializing_if = "Option::is_none")]
        cache_control: Option<CacheControl>,
    },
    Thinking {
        thinking: &'a str,
        signature: &'a str,
    },
    RedactedThinking {
        data: &'a str,
    },
    ToolUse {
        id: &'a str,
        name: &'a str,
        input: Cow<'a, RawValue>,
        #[serde(skip_serializing_if = "Option::is_none")]
        cache_control: Option<CacheControl>,
    },
    ToolResult {
        tool_use_id: &'a str,
        content: Vec<Part<'a>>,
        #[serde(skip_serializing_if = "std::ops::Not::not")]
        is_error: bool,
        #[serde(skip_serializing_if = "Option::is_none")]
        cache_control: Option<CacheControl>,
    },
    Image {
        source: Source<'a>,
        #[serde(skip_serializing_if = "Option::is_none")]
        cache_control: Option<CacheControl>,
    },
}

#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Part<'a> {
    Text { text: &'a str },
    Image { source: Source<'a> },
}

#[derive(Serialize)]
struct Source<'a> {
    r#type: &'static str,
    media_type: &'a str,
    data: &'a str,
}

impl<'a> Source<'a> {
    fn new(image: &'a Image) -> Source<'a> {
        Source { r#type: "base64", media_type: &image.media_type, data: &image.base64 }
    }
}

pub fn turn<'a>(call: &Call<'a>, shared_ttl: CacheTtl) -> Body<'a> {
    let adaptive = call.facts.is_some_and(|f| f.adaptive_thinking);
    Body {
        max_tokens: Some(call.max_tokens),
        stream: true,
        output_config: call.request.effort.filter(|_| adaptive).map(|e| OutputConfig { effort: e.as_str() }),
        ..count(call, shared_ttl)
    }
}

/// What both endpoints take.
pub fn count<'a>(call: &Call<'a>, shared_ttl: CacheTtl) -> Body<'a> {
    let request = call.request;
    let adaptive = call.facts.is_some_and(|f| f.adaptive_thinking);
    Body {
        model: call.model,
        max_tokens: None,
        stream: false,
        // Without `display` what the model says between two tool calls would come empty.
        thinking: adaptive.then_some(Thinking { r#type: "adaptive", display: "summarized" }),
        output_config: None,
        tools: tools(request, shared_ttl),
        system: system(request, shared_ttl),
        messages: messages(request, shared_ttl),
    }
}

/// Breakpoint 1 of the API's 4 stands after the system prompt; without one, after the tools.
fn system(request: &TurnRequest, ttl: CacheTtl) -> Vec<Wire<'_>> {
    if is_blank(&request.system) {
        return Vec::new();
    }
    vec![Wire::Known(Known::Text { text: &request.system, cache_control: Some(CacheControl::new(ttl)) })]
}

fn tools(request: &TurnRequest, ttl: CacheTtl) -> Vec<Tool<'_>> {
    let mark_last = is_blank(&request.system);
    let last = request.tools.len().saturating_sub(1);
    request
        .tools
        .iter()
        .enumerate()
        .map(|(i, t)| Tool {
            name: &t.name,
            description: &t.description,
            input_schema: &t.input_schema,
            cache_control: (i == last && mark_last).then(|| CacheControl::new(ttl)),
        })
        .collect()
}

/// Breakpoint 2: after what the forks share of the first message. 3 and 4: the ends of the last two user messages. The last one
/// is where the next request will read from; the one before is where this one reads from, also if more blocks lie between
/// them than the API looks back.
fn messages(request: &TurnRequest, shared_ttl: CacheTtl) -> Vec<WireMessage<'_>> {
    let user_ends = request.messages.iter().enumerate().rev().filter(|(_, m)| m.role == Role::User);
    let moving: Vec<usize> = user_ends.take(2).map(|(i, _)| i).collect();
    let mut out = Vec::with_capacity(request.messages.len());
    for (i, message) in request.messages.iter().enumerate() {
        let mut content: Vec<Wire<'_>> = message.content.iter().filter_map(block).collect();
        // The API refuses a message without content.
        if content.is_empty() {
            continue;
        }
        if i == 0 && request.shared_blocks > 0 {
            let shared = message.content.iter().take(request.shared_blocks).filter_map(block).count();
            mark(&mut content[..shared], shared_ttl);
        }
        if moving.contains(&i) {
            mark(&mut content, CacheTtl::FiveMinutes);
        }
        out.push(WireMessage { role: message.role, content });
    }
    out
}

/// On the last block that can carry it and has none.
fn mark(blocks: &mut [Wire<'_>], ttl: CacheTtl) {
    let slot = blocks.iter_mut().rev().find_map(|block| match block {
        Wire::Known(
            Known::Text { cache_control, .. }
            | Known::ToolUse { cache_control, .. }
            | Known::ToolResult { cache_control, .. }
            | Known::Image { cache_control, .. },
        ) => Some(cache_control),
        Wire::Known(Known::Thinking { .. } | Known::RedactedThinking { .. }) | Wire::Raw(_) => None,
    });
    if let Some(slot) = slot {
        slot.get_or_insert(CacheControl::new(ttl));
    }
}

fn is_blank(text: &str) -> bool {
    text.trim().is_empty()
}

fn raw(text: &str) -> Option<Cow<'_, RawValue>> {
    serde_json::from_str::<&RawValue>(text).ok().map(Cow::Borrowed)
}

/// None for a text that the API would refuse as empty.
fn block(block: &Block) -> Option<Wire<'_>> {
    Some(Wire::Known(match block {
        Block::Text { text } if is_blank(text) => return None,
        Block::Text { text } => Known::Text { text, cache_control: None },
        Block::Thinking { thinking, signature } => Known::Thinking { thinking, signature },
        Block::RedactedThinking { data } => Known::RedactedThinking { data },
        Block::ToolUse { id, name, input } => {
            // What a cut answer left is no object: its result says so, and the call goes back without input.
            let input = raw(input.as_str()).filter(|r| r.get().starts_with('{')).unwrap_or_else(|| {
                Cow::Owned(RawValue::from_string("{}".into()).expect("an empty object is JSON"))
            });
            Known::ToolUse { id, name, input, cache_control: None }
        }
        Block::ToolResult { tool_use_id, content, is_error } => {
            let content = content.iter().filter_map(part).collect();
            Known::ToolResult { tool_use_id, content, is_error: *is_error, cache_control: None }
        }
        Block::Image(image) => Known::Image { source: Source::new(image), cache_control: None },
        Block::Other { json } => return raw(json.as_str()).map(Wire::Raw),
    }))
}

fn part(part: &ResultPart) -> Option<Part<'_>> {
    match part {
        ResultPart::Text { text } if is_blank(text) => None,
        ResultPart::Text { text } => Some(Part::Text { text }),
        ResultPart::Image(image) => Some(Part::Image { source: Source::new(image) }),
    }
}
