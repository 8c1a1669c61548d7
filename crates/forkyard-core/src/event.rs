//! Events as they are stored: a kind, a version and data. Kinds are never renamed; a change of meaning is a new version with
//! an upcast here, so that the logs of every release replay for ever.

use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::fork::ForkEvent;
use crate::run::RunEvent;

/// The version that this release writes.
pub const VERSION: u16 = 1;

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    #[error("event {kind} has version {version}; this release knows up to {VERSION}: update Forkyard")]
    TooNew { kind: String, version: u16 },
    #[error("event {kind} can't be read: {reason}")]
    Malformed { kind: String, reason: String },
}

/// Kind and data of a machine's event. What happens to a task has a kind for each case: `fork.task_started` …
pub fn encode<E: serde::Serialize>(event: &E) -> (String, Value) {
    let mut value = serde_json::to_value(event).unwrap_or_default();
    let kind = value.get("kind").and_then(Value::as_str).unwrap_or_default().to_string();
    let mut data = value.get_mut("data").map(Value::take).unwrap_or(Value::Null);
    if kind.ends_with(TASK)
        && let Some((case, inner)) = data.as_object_mut().and_then(|o| o.iter_mut().next())
    {
        return (format!("{kind}_{case}"), inner.take());
    }
    (kind, data)
}

const TASK: &str = ".task";

pub fn decode_run(kind: &str, version: u16, data: Value) -> Result<RunEvent, DecodeError> {
    decode(kind, version, data)
}

pub fn decode_fork(kind: &str, version: u16, data: Value) -> Result<ForkEvent, DecodeError> {
    decode(kind, version, data)
}

fn decode<E: DeserializeOwned>(kind: &str, version: u16, data: Value) -> Result<E, DecodeError> {
    if version > VERSION {
        return Err(DecodeError::TooNew { kind: kind.into(), version });
    }
    let (name, data) = match kind.split_once(".task_") {
        Some((category, case)) => (format!("{category}{TASK}"), serde_json::json!({ case: data })),
        None => (kind.to_string(), data),
    };
    let mut tagged = serde_json::Map::new();
    tagged.insert("kind".into(), name.into());
    if !data.is_null() {
        tagged.insert("data".into(), data);
    }
    serde_json::from_value(Value::Object(tagged))
        .map_err(|e| DecodeError::Malformed { kind: kind.into(), reason: e.to_string() })
}
