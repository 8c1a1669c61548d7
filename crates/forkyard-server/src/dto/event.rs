//! Recorded facts, in the order of their positions.

use forkyard_engine::git::shown_url;
use forkyard_store::{Recorded, Source as Stored};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::{IntoParams, ToSchema};

use super::mirror;
use crate::error::{ApiError, Result};

mirror!(Source of Stored, "snake_case" { System, Agent, Worker });

/// Kinds in one filter.
pub(crate) const MAX_TYPES: usize = 50;

/// A fact. `position` counts from 1 in its run, without a gap; kinds are `category.action` and never renamed.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Event {
    pub run: String,
    /// Null: of the run itself.
    pub fork: Option<u32>,
    pub position: u64,
    /// Counts from 1 in its own stream: the run's, the fork's, or that of one attempt of its agent.
    pub seq: u64,
    #[serde(rename = "type")]
    pub kind: String,
    pub version: u16,
    /// Milliseconds since 1970.
    pub at: u64,
    pub source: Source,
    pub sandbox_id: Option<String>,
    /// By type; see docs/events.
    pub data: Value,
}

impl From<Recorded> for Event {
    fn from(r: Recorded) -> Event {
        let (run, fork) = (r.stream.run().to_string(), r.stream.fork());
        let mut data = r.event.data;
        hide_secrets(&r.event.kind, &mut data);
        Event {
            run,
            fork,
            position: r.position,
            seq: r.seq,
            kind: r.event.kind,
            version: r.event.version,
            at: r.event.at.0,
            source: r.event.source.into(),
            sandbox_id: r.event.sandbox.map(Into::into),
            data,
        }
    }
}

/// A run's own specification may hold a URL with a password, and variables whose values are nobody's business.
fn hide_secrets(kind: &str, data: &mut Value) {
    if kind != "run.submitted" {
        return;
    }
    if let Some(source) = data.pointer_mut("/spec/repo/source")
        && let Some(text) = source.as_str()
    {
        *source = shown_url(text).into();
    }
    if let Some(env) = data.pointer_mut("/spec/sandbox/env").and_then(Value::as_object_mut) {
        env.values_mut().for_each(|v| *v = "***".into());
    }
}

#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct EventPage {
    pub events: Vec<Event>,
    /// For the next page, as `after`; null when there is nothing more now.
    pub next_after: Option<u64>,
}

/// One message of a stream of server-sent events. `data` is JSON.
#[derive(Debug, Serialize, ToSchema)]
pub struct SseMessage {
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub event: Option<String>,
    pub data: String,
}

#[derive(Debug, Default, Clone, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct ReadEvents {
    /// Only events after this position.
    pub after: Option<u64>,
    /// Only of this fork.
    pub fork: Option<u32>,
    /// Only these kinds, with commas between them; `agent.*` takes a category.
    pub types: Option<String>,
    #[param(minimum = 1, maximum = 500)]
    pub limit: Option<u32>,
}

#[derive(Debug, Default, Clone, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct StreamEvents {
    /// Begin after this position. A `Last-Event-ID` header wins over it.
    pub after: Option<u64>,
    /// Only of this fork.
    pub fork: Option<u32>,
    /// Only these kinds, with commas between them; `agent.*` takes a category.
    pub types: Option<String>,
    /// Also what agents say while they say it, as far as this server drives them; recorded nowhere.
    pub live: Option<bool>,
}

/// As the store wants them: exact, or a category with a dot at its end.
pub fn kinds(types: Option<&str>) -> Result<Vec<String>> {
    let Some(types) = types else { return Ok(vec![]) };
    let kinds: Vec<String> = types.split(',').map(|t| t.trim().trim_end_matches('*').to_string()).collect();
    let ok = |k: &String| {
        !k.is_empty()
            && k.len() <= 100
            && k.chars().all(|c| c.is_ascii_alphanumeric() || c == '.' || c == '_')
    };
    if kinds.len() > MAX_TYPES || !kinds.iter().all(ok) {
        return Err(ApiError::field(
            "types",
            types,
            "is not a list of event types",
            "write agent.tool_use,fork.* and the like, at most 50",
        ));
    }
    Ok(kinds)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_specification_is_shown_without_its_secrets() {
        let mut data = serde_json::json!({ "spec": {
            "repo": { "source": "https://me:hunter2@example.org/r" }, "sandbox": { "env": { "KEY": "s3cret" } } } });
        hide_secrets("run.submitted", &mut data);
        let text = data.to_string();
        assert!(
            !text.contains("hunter2") && !text.contains("s3cret") && text.contains("example.org"),
            "{text}"
        );
    }

    #[test]
    fn types_are_checked() {
        assert_eq!(kinds(Some("agent.*, fork.started")).unwrap(), ["agent.", "fork.started"]);
        for bad in ["", "a,,b", "a b", "x'--"] {
            assert!(kinds(Some(bad)).is_err(), "{bad}");
        }
    }
}
