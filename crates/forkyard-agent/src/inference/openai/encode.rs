//! Requests. Thinking has no place in this format and stays out; an unknown block is another provider's and stays out too.

use forkyard_core::spec::Effort;
use serde::Serialize;
use serde_json::Value;

use super::super::backend::Call;
use super::super::{Block, Image, Message, ResultPart, Role, ToolDef, TurnRequest};
use super::MaxTokensField;

#[derive(Serialize)]
pub struct Body<'a> {
    model: &'a str,
    stream: bool,
    stream_options: StreamOptions,
    #[serde(skip_serializing_if = "Option::is_none")]
    max_tokens: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    max_completion_tokens: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_effort: Option<&'static str>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tools: Vec<Tool<'a>>,
    messages: Vec<WireMessage<'a>>,
}

#[derive(Serialize)]
struct StreamOptions {
    include_usage: bool,
}

#[derive(Serialize)]
struct Tool<'a> {
    r#type: &'static str,
    function: Function<'a>,
}

#[derive(Serialize)]
struct Function<'a> {
    name: &'a str,
    description: &'a str,
    parameters: &'a Value,
}

#[derive(Serialize)]
#[serde(tag = "role", rename_all = "lowercase")]
enum WireMessage<'a> {
    System {
        content: &'a str,
    },
    User {
        content: Vec<Part<'a>>,
    },
    Assistant {
        /// Null where there are only calls.
        content: Option<String>,
        #[serde(skip_serializing_if = "Vec::is_empty")]
        tool_calls: Vec<ToolCall<'a>>,
    },
    Tool {
        tool_call_id: &'a str,
        content: String,
    },
}

#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Part<'a> {
    Text { text: &'a str },
    ImageUrl { image_url: ImageUrl },
}

#[derive(Serialize)]
struct ImageUrl {
    url: String,
}

impl<'a> Part<'a> {
    fn image(image: &Image) -> Part<'a> {
        Part::ImageUrl {
            image_url: ImageUrl { url: format!("data:{};base64,{}", image.media_type, image.base64) },
        }
    }
}

#[derive(Serialize)]
struct ToolCall<'a> {
    id: &'a str,
    r#type: &'static str,
    function: Called<'a>,
}

#[derive(Serialize)]
struct Called<'a> {
    name: &'a str,
    /// A text that holds JSON: the model's own, also if it is malformed.
    arguments: &'a str,
}

pub fn turn<'a>(call: &Call<'a>, field: MaxTokensField) -> Body<'a> {
    let request = call.request;
    let only = |f: MaxTokensField| (f == field).then_some(call.max_tokens);
    let tool = |t: &'a ToolDef| Tool {
        r#type: "function",
        function: Function { name: &t.name, description: &t.description, parameters: &t.input_schema },
    };
    Body {
        model: call.model,
        stream: true,
        stream_options: StreamOptions { include_usage: true },
        max_tokens: only(MaxTokensField::MaxTokens),
        max_completion_tokens: only(MaxTokensField::MaxCompletionTokens),
        reasoning_effort: request.effort.map(|effort| match effort {
            Effort::Low | Effort::Medium | Effort::High => effort.as_str(),
            // The most that there is here.
            Effort::Max => Effort::High.as_str(),
        }),
        tools: request.tools.iter().map(tool).collect(),
        messages: messages(request),
    }
}

fn messages(request: &TurnRequest) -> Vec<WireMessage<'_>> {
    let mut out = Vec::with_capacity(request.messages.len() + 1);
    if !request.system.trim().is_empty() {
        out.push(WireMessage::System { content: &request.system });
    }
    for message in &request.messages {
        match message.role {
            Role::User => user(message, &mut out),
            Role::Assistant => out.extend(assistant(message)),
        }
    }
    out
}

/// Results are messages of their own and come first, right after the calls; images of results follow as the user's.
fn user<'a>(message: &'a Message, out: &mut Vec<WireMessage<'a>>) {
    let mut content = Vec::new();
    for block in &message.content {
        match block {
            Block::Text { text } if text.is_empty() => {}
            Block::Text { text } => content.push(Part::Text { text }),
            Block::Image(image) => content.push(Part::image(image)),
            Block::ToolResult { tool_use_id, content: parts, is_error } => {
                let mut text = String::from(if *is_error { "Error: " } else { "" });
                for part in parts {
                    match part {
                        ResultPart::Text { text: t } => text.push_str(t),
                        ResultPart::Image(image) => {
                            text.push_str("[the image follows]");
                            content.push(Part::image(image));
                        }
                    }
                }
                out.push(WireMessage::Tool { tool_call_id: tool_use_id, content: text });
            }
            Block::Thinking { .. }
            | Block::RedactedThinking { .. }
            | Block::ToolUse { .. }
            | Block::Other { .. } => {}
        }
    }
    if !content.is_empty() {
        out.push(WireMessage::User { content });
    }
}

fn assistant(message: &Message) -> Option<WireMessage<'_>> {
    let mut text = String::new();
    let mut tool_calls = Vec::new();
    for block in &message.content {
        match block {
            Block::Text { text: t } => text.push_str(t),
            Block::ToolUse { id, name, input } => {
                let arguments = if input.as_str().trim().is_empty() { "{}" } else { input.as_str() };
                tool_calls.push(ToolCall { id, r#type: "function", function: Called { name, arguments } });
            }
            Block::Thinking { .. }
            | Block::RedactedThinking { .. }
            | Block::ToolResult { .. }
            | Block::Image(_)
            | Block::Other { .. } => {}
        }
    }
    let content = (!text.is_empty()).then_some(text);
    (content.is_some() || !tool_calls.is_empty()).then_some(WireMessage::Assistant { content, tool_calls })
}
