//! A request of somebody else's, in the API's own format. It is passed on as it came, so only what is known not to change prices or to
//! reach further than the model is let through.

use std::fmt;

use bytes::Bytes;
use serde::de::{MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::Value;
use serde_json::value::RawValue;

/// Fields that only shape the answer. Others may change what a token costs (tiers, speed, regions) or make the provider's servers act.
const FIELDS: [&str; 15] = [
    "model",
    "messages",
    "system",
    "tools",
    "tool_choice",
    "max_tokens",
    "stream",
    "stop_sequences",
    "metadata",
    "thinking",
    "output_config",
    "context_management",
    "temperature",
    "top_p",
    "top_k",
];
/// Kinds of tools that run where the request comes from; the provider's own are billed apart.
const CLIENT_TOOLS: [&str; 5] = ["custom", "bash_", "text_editor_", "computer_", "memory_"];
/// Blocks of fewer bytes than tokens.
const UNBOUNDED_BLOCKS: [&str; 2] = ["document", "container_upload"];

#[derive(Debug)]
pub struct RawRequest {
    fields: Fields,
    pub model: String,
    pub max_tokens: u32,
    pub streams: bool,
    pub text_bytes: u64,
    pub images: u64,
    /// Its tokens are not bounded by its bytes: only a count helps.
    pub unbounded: bool,
    pub one_hour_cache: bool,
}

/// The fields in their order, with their own text.
#[derive(Debug)]
struct Fields(Vec<(String, Box<RawValue>)>);

impl<'de> Deserialize<'de> for Fields {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Fields, D::Error> {
        struct FieldsVisitor;
        impl<'de> Visitor<'de> for FieldsVisitor {
            type Value = Fields;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Fields, A::Error> {
                let mut fields = Vec::new();
                while let Some(field) = map.next_entry()? {
                    fields.push(field);
                }
                Ok(Fields(fields))
            }
        }
        deserializer.deserialize_map(FieldsVisitor)
    }
}

impl Serialize for Fields {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(name, value)| (name, value)))
    }
}

impl RawRequest {
    /// The error is for the one who asks.
    pub fn parse(body: &[u8]) -> Result<RawRequest, String> {
        RawRequest::read(body, None)
    }

    /// A request for a count, which names no output.
    pub fn parse_count(body: &[u8]) -> Result<RawRequest, String> {
        RawRequest::read(body, Some(1))
    }

    fn read(body: &[u8], usual_output: Option<u32>) -> Result<RawRequest, String> {
        let fields: Fields =
            serde_json::from_slice(body).map_err(|e| format!("the body is not a JSON object: {e}"))?;
        let mut seen = Vec::new();
        for (name, _) in &fields.0 {
            if !FIELDS.contains(&name.as_str()) {
                return Err(format!("{name}: this field is not passed on"));
            }
            // Two readers could take different ones.
            if seen.contains(&name) {
                return Err(format!("{name}: stands twice"));
            }
            seen.push(name);
        }
        let value: Value = serde_json::from_slice(body).map_err(|e| e.to_string())?;
        let model = value["model"].as_str().ok_or("model: has to be a text")?.to_string();
        let max_tokens = value["max_tokens"]
            .as_u64()
            .and_then(|n| u32::try_from(n).ok())
            .filter(|n| *n > 0)
            .or(usual_output);
        let mut raw = RawRequest {
            model,
            max_tokens: max_tokens.ok_or("max_tokens: has to be a positive number")?,
            streams: value["stream"] == true,
            text_bytes: body.len() as u64,
            images: 0,
            unbounded: false,
            one_hour_cache: false,
            fields,
        };
        check_tools(&value["tools"])?;
        raw.weigh(&value);
        Ok(raw)
    }

    fn weigh(&mut self, value: &Value) {
        match value {
            Value::Array(all) => all.iter().for_each(|v| self.weigh(v)),
            Value::Object(object) => {
                let kind = object.get("type").and_then(Value::as_str).unwrap_or_default();
                // The bytes of its data stay counted: what looks like an image may stand where it is read as text.
                self.images += u64::from(kind == "image");
                self.unbounded |= UNBOUNDED_BLOCKS.contains(&kind);
                self.one_hour_cache |= object.get("ttl").is_some_and(|t| t == "1h");
                object.values().for_each(|v| self.weigh(v));
            }
            Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
        }
    }

    /// As it came but for the model's full name and the bound on the output.
    pub fn body(&mut self, model: &str, max_tokens: u32) -> Bytes {
        self.set("model", &Value::from(model));
        self.set("max_tokens", &Value::from(max_tokens));
        super::super::http::json_body(&self.fields)
    }

    /// What the counting endpoint takes.
    pub fn count_body(&self, model: &str) -> Bytes {
        const COUNTED: [&str; 6] =
            ["messages", "system", "tools", "tool_choice", "thinking", "context_management"];
        let kept = self.fields.0.iter().filter(|(name, _)| COUNTED.contains(&name.as_str())).cloned();
        let model = ("model".to_string(), raw(&Value::from(model)));
        super::super::http::json_body(&Fields(std::iter::once(model).chain(kept).collect()))
    }

    fn set(&mut self, name: &str, value: &Value) {
        if let Some((_, old)) = self.fields.0.iter_mut().find(|(n, _)| n == name) {
            *old = raw(value);
        }
    }
}

fn raw(value: &Value) -> Box<RawValue> {
    RawValue::from_string(value.to_string()).expect("a value's text is JSON")
}

fn check_tools(tools: &Value) -> Result<(), String> {
    for tool in tools.as_array().into_iter().flatten() {
        if let Some(kind) = tool.get("type").filter(|k| !k.is_null()) {
            let known = kind.as_str().is_some_and(|k| CLIENT_TOOLS.iter().any(|c| k.starts_with(c)));
            if !known {
                return Err(format!("tools: {kind} runs at the provider and is not passed on"));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_passed_on_keeps_its_text() {
        let body =
            r#"{"system":"s","messages": [ {"content":"z", "a":1.50} ],"max_tokens":100,"model":"sonnet"}"#;
        let mut raw = RawRequest::parse(body.as_bytes()).unwrap();
        assert_eq!((raw.model.as_str(), raw.max_tokens, raw.streams), ("sonnet", 100, false));
        let sent = raw.body("claude-sonnet-5-5", 50);
        let expected = r#"{"system":"s","messages":[ {"content":"z", "a":1.50} ],"max_tokens":50,"model":"claude-sonnet-5-5"}"#;
        assert_eq!(sent, expected.as_bytes());
        let counted = raw.count_body("m");
        assert_eq!(
            counted,
            br#"{"model":"m","system":"s","messages":[ {"content":"z", "a":1.50} ]}"#.as_slice()
        );
    }

    #[test]
    fn what_could_cost_more_than_tokens_is_refused() {
        let bad = |body: &str| RawRequest::parse(body.as_bytes()).unwrap_err();
        assert!(bad(r#"{"model":"m","max_tokens":1,"speed":"fast"}"#).contains("speed"));
        assert!(bad(r#"{"model":"m","max_tokens":1,"max_tokens":9}"#).contains("twice"));
        assert!(
            bad(r#"{"model":"m","max_tokens":1,"tools":[{"type":"web_search_20250305"}]}"#)
                .contains("web_search")
        );
        assert!(bad(r#"{"model":"m","max_tokens":0}"#).contains("max_tokens"));
        assert!(bad(r#"{"max_tokens":1}"#).contains("model"));
        assert!(bad("[]").contains("object"));
    }

    #[test]
    fn images_and_documents_are_seen() {
        let body = r#"{"model":"m","max_tokens":1,"messages":[{"content":[{"type":"tool_result","content":[
            {"type":"image","source":{"data":"AAAAAAAAAA"}}]},{"type":"document","cache_control":{"ttl":"1h"}}]}]}"#;
        let raw = RawRequest::parse(body.as_bytes()).unwrap();
        assert_eq!((raw.images, raw.unbounded, raw.one_hour_cache), (1, true, true));
        assert_eq!(raw.text_bytes, body.len() as u64);
    }
}
