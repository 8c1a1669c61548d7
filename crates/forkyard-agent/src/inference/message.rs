//! What a conversation is made of, whoever the provider is. Serialised like this in the journal.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    User,
    Assistant,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Message {
    pub role: Role,
    pub content: Vec<Block>,
}

impl Message {
    pub fn user(text: impl Into<String>) -> Message {
        Message { role: Role::User, content: vec![Block::text(text)] }
    }
    pub fn assistant(content: Vec<Block>) -> Message {
        Message { role: Role::Assistant, content }
    }
    pub fn results(results: Vec<Block>) -> Message {
        Message { role: Role::User, content: results }
    }
}

/// JSON text exactly as it came: key order, spacing and numbers are part of a conversation's prefix, and a parsed value would
/// lose them. May be malformed where a model wrote it.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct RawJson(String);

impl RawJson {
    pub fn new(text: impl Into<String>) -> RawJson {
        RawJson(text.into())
    }
    pub fn as_str(&self) -> &str {
        &self.0
    }
    pub fn value(&self) -> Result<Value, serde_json::Error> {
        serde_json::from_str(&self.0)
    }
    /// The object that a tool's input has to be. An empty text is the empty object: a call without parameters streams nothing.
    pub fn object(&self) -> Result<Map<String, Value>, serde_json::Error> {
        if self.0.trim().is_empty() { Ok(Map::new()) } else { serde_json::from_str(&self.0) }
    }
}

impl From<&Value> for RawJson {
    fn from(value: &Value) -> RawJson {
        RawJson(value.to_string())
    }
}

/// One part of a message. What an assistant said is sent back as it came.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Block {
    Text {
        text: String,
    },
    /// Bound by its signature to the model and the conversation before it: never edited, never dropped alone.
    Thinking {
        thinking: String,
        signature: String,
    },
    RedactedThinking {
        data: String,
    },
    /// `input` is the model's own text; see [`RawJson::object`]. It is malformed if the answer was cut within it.
    ToolUse {
        id: String,
        name: String,
        input: RawJson,
    },
    ToolResult {
        tool_use_id: String,
        content: Vec<ResultPart>,
        #[serde(default)]
        is_error: bool,
    },
    Image(Image),
    /// A kind that this version does not know, whole.
    Other {
        json: RawJson,
    },
}

impl Block {
    pub fn text(text: impl Into<String>) -> Block {
        Block::Text { text: text.into() }
    }
    pub fn result(tool_use_id: impl Into<String>, text: impl Into<String>, is_error: bool) -> Block {
        Block::ToolResult {
            tool_use_id: tool_use_id.into(),
            content: vec![ResultPart::Text { text: text.into() }],
            is_error,
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum ResultPart {
    Text { text: String },
    Image(Image),
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Image {
    /// `image/png`, `image/jpeg`, `image/gif` or `image/webp`.
    pub media_type: String,
    pub base64: String,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ToolDef {
    pub name: String,
    pub description: String,
    /// JSON Schema of an object.
    pub input_schema: Value,
}

/// Why the model stopped.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "String", into = "String")]
pub enum StopReason {
    EndTurn,
    MaxTokens,
    StopSequence,
    ToolUse,
    /// A long server-side turn was cut: send the conversation again as it is.
    PauseTurn,
    Refusal,
    ContextWindowExceeded,
    Other(String),
}

impl From<String> for StopReason {
    fn from(s: String) -> StopReason {
        match s.as_str() {
            "end_turn" => StopReason::EndTurn,
            "max_tokens" => StopReason::MaxTokens,
            "stop_sequence" => StopReason::StopSequence,
            "tool_use" => StopReason::ToolUse,
            "pause_turn" => StopReason::PauseTurn,
            "refusal" => StopReason::Refusal,
            "model_context_window_exceeded" => StopReason::ContextWindowExceeded,
            _ => StopReason::Other(s),
        }
    }
}

impl StopReason {
    pub fn as_str(&self) -> &str {
        match self {
            StopReason::EndTurn => "end_turn",
            StopReason::MaxTokens => "max_tokens",
            StopReason::StopSequence => "stop_sequence",
            StopReason::ToolUse => "tool_use",
            StopReason::PauseTurn => "pause_turn",
            StopReason::Refusal => "refusal",
            StopReason::ContextWindowExceeded => "model_context_window_exceeded",
            StopReason::Other(s) => s,
        }
    }
}

impl From<StopReason> for String {
    fn from(r: StopReason) -> String {
        match r {
            StopReason::Other(s) => s,
            known => known.as_str().to_string(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_conversation_survives_the_journal_byte_for_byte() {
        let message = Message::assistant(vec![
            Block::Thinking { thinking: "héllo\u{2028}".into(), signature: "a+/=".into() },
            Block::RedactedThinking { data: "xx".into() },
            Block::ToolUse { id: "t".into(), name: "Bash".into(), input: RawJson::new(r#"{"b": 1.0,"a":2"#) },
            Block::Other { json: RawJson::new(r#"{"type":"new","z":1,"a":[1e2]}"#) },
            Block::Image(Image { media_type: "image/png".into(), base64: "QUJD".into() }),
        ]);
        let text = serde_json::to_string(&message).unwrap();
        assert_eq!(serde_json::from_str::<Message>(&text).unwrap(), message);
    }

    #[test]
    fn stop_reasons_round_trip_also_when_unknown() {
        for s in ["end_turn", "tool_use", "model_context_window_exceeded", "something_new"] {
            assert_eq!(StopReason::from(s.to_string()).as_str(), s);
        }
    }

    #[test]
    fn an_empty_input_is_the_empty_object_and_a_cut_one_is_an_error() {
        assert!(RawJson::new("").object().unwrap().is_empty());
        assert!(RawJson::new("{\"a\":").object().is_err());
        assert!(RawJson::new("[1]").object().is_err());
    }
}
