//! What the real API refuses is refused here too, so that a client can't pass its tests with requests that would fail.

use std::collections::{BTreeMap, HashSet};

use serde_json::Value;

use super::{Part, Reply, Seen, cache};

const MAX_MARKS: usize = 4;

/// A signature that only this text has.
pub fn signature(thinking: &str) -> String {
    let sum = thinking.bytes().fold(7_u64, |h, b| h.wrapping_mul(31).wrapping_add(u64::from(b)));
    format!("sig+/{sum:016x}==")
}

/// What the server has said: a conversation must hold it unchanged.
#[derive(Debug, Default)]
pub struct Issued {
    /// Tool inputs by call.
    inputs: BTreeMap<String, String>,
}

impl Issued {
    pub fn remember(&mut self, reply: &Reply) {
        for part in &reply.parts {
            if let Part::Tool { id: Some(id), input, .. } = part {
                self.inputs.insert(id.clone(), input.clone());
            }
        }
    }
}

fn bad(message: impl AsRef<str>) -> Result<(), Box<Reply>> {
    Err(Box::new(Reply::error(400, "invalid_request_error", message.as_ref())))
}

pub fn anthropic(seen: &Seen, issued: &Issued) -> Result<(), Box<Reply>> {
    if seen.headers.get("x-api-key").is_none_or(|k| k.is_empty() || k == "wrong") {
        return Err(Box::new(Reply::error(401, "authentication_error", "invalid x-api-key")));
    }
    if !seen.headers.contains_key("anthropic-version") {
        return bad("anthropic-version: header is required");
    }
    let body = &seen.body;
    if !body.is_object() {
        return bad("The request body is not valid JSON");
    }
    for field in ["temperature", "top_p", "top_k"] {
        if !body[field].is_null() {
            return bad(format!("{field}: sampling parameters are not accepted"));
        }
    }
    if body["max_tokens"].as_u64().is_none_or(|n| n == 0) {
        return bad("max_tokens: must be greater than or equal to 1");
    }
    if body["stream"] != true {
        return bad("stream: this server only streams");
    }
    if cache::marks(body) > MAX_MARKS {
        return bad("A maximum of 4 blocks with cache_control may be provided");
    }
    let messages = seen.messages();
    if messages.first().is_none_or(|m| m["role"] != "user") {
        return bad("messages: first message must use the \"user\" role");
    }
    let mut asked: HashSet<&str> = HashSet::new();
    for (i, message) in messages.iter().enumerate() {
        let content = message["content"].as_array().map_or(&[][..], Vec::as_slice);
        if content.is_empty() {
            return bad(format!("messages.{i}: all messages must have non-empty content"));
        }
        let answered: HashSet<&str> = content.iter().filter_map(|b| b["tool_use_id"].as_str()).collect();
        if let Some(missing) = asked.iter().find(|id| !answered.contains(*id)) {
            return bad(format!(
                "messages.{i}: `tool_use` {missing} has no `tool_result` in the next message"
            ));
        }
        if let Some(extra) = answered.iter().find(|id| !asked.contains(*id)) {
            return bad(format!("messages.{i}: unexpected `tool_use_id` {extra}"));
        }
        asked.clear();
        for block in content {
            check_block(i, block, seen, issued)?;
            if let (Some("tool_use"), Some(id)) = (block["type"].as_str(), block["id"].as_str())
                && !asked.insert(id)
            {
                return bad(format!("messages.{i}: `tool_use` ids must be unique"));
            }
        }
    }
    if let Some(id) = asked.iter().next() {
        return bad(format!("messages: `tool_use` {id} has no `tool_result`"));
    }
    Ok(())
}

fn check_block(i: usize, block: &Value, seen: &Seen, issued: &Issued) -> Result<(), Box<Reply>> {
    match block["type"].as_str() {
        Some("text") if block["text"].as_str().is_none_or(|t| t.trim().is_empty()) => {
            bad(format!("messages.{i}: text content blocks must be non-empty"))
        }
        Some("thinking") => {
            let text = block["thinking"].as_str().unwrap_or_default();
            if block["signature"].as_str() != Some(&signature(text)) {
                return bad(format!("messages.{i}: Invalid `signature` in `thinking` block"));
            }
            if !block["cache_control"].is_null() {
                return bad(format!("messages.{i}: cache_control cannot be set for thinking blocks"));
            }
            Ok(())
        }
        Some("tool_use") => {
            if !block["input"].is_object() {
                return bad(format!("messages.{i}: tool_use.input: Input should be a valid dictionary"));
            }
            let said = block["id"].as_str().and_then(|id| issued.inputs.get(id));
            match said {
                // The client's text has to hold the model's own, in its order and spacing.
                Some(input) if serde_json::from_str::<Value>(input).is_ok_and(|v| v.is_object()) => {
                    if seen.raw.contains(input.as_str()) {
                        Ok(())
                    } else {
                        bad(format!("messages.{i}: the input of a tool call was changed"))
                    }
                }
                Some(_) | None => Ok(()),
            }
        }
        Some(_) => Ok(()),
        None => bad(format!("messages.{i}: a block has no type")),
    }
}
