//! Whoever steers, over the API or at this machine, is in the audit trail before it is done, so that nothing is done unrecorded.

use std::collections::BTreeSet;

use forkyard_core::run::Command;
use forkyard_core::spec::{ForkSpec, RunSpec};
use forkyard_core::{ForkNum, RunId, Timestamp};
use forkyard_store::{Deed, MessageId, Store, StoreError};
use serde_json::{Value, json};

use crate::git::shown_url;
use crate::ports::StoredText;
use crate::{Engine, EngineError};

/// Of what somebody said, this much is kept: of its beginning, and of its end.
const HEAD_CHARS: usize = 1500;
const TAIL_CHARS: usize = 500;
/// So many different prompts of one run are kept.
const MAX_PROMPTS: usize = 20;

/// Who steers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct By {
    /// The token that allows it.
    pub token: String,
    pub who: String,
}

impl By {
    /// Somebody at this machine, whose right is that the store is theirs: no token has this name.
    pub fn local(user: &str) -> By {
        By { token: "local".into(), who: format!("local:{user}") }
    }
}

/// One who steers, at a time.
pub struct Steering<'a> {
    pub store: &'a dyn Store,
    pub now: Timestamp,
    pub by: &'a By,
}

impl Steering<'_> {
    /// For what is done elsewhere, before it is done.
    pub async fn record(&self, action: &str, target: &str, detail: Value) -> Result<(), StoreError> {
        let deed = Deed {
            at: self.now,
            token: self.by.token.clone(),
            who: self.by.who.clone(),
            action: action.to_string(),
            target: target.to_string(),
            detail: shortened(detail),
        };
        self.store.put_audit(deed).await.map(drop)
    }

    pub async fn submit(
        &self,
        engine: &dyn Engine,
        id: RunId,
        spec: RunSpec,
        key: Option<String>,
    ) -> Result<RunId, EngineError> {
        let detail = json!({
            "repo": shown_url(&spec.repo.source),
            "count": spec.forks.len(),
            "prompts": prompts(&spec.forks),
        });
        self.record("run.create", id.as_str(), detail).await?;
        engine.submit(id, spec, key).await
    }

    pub async fn command(
        &self,
        engine: &dyn Engine,
        run: &RunId,
        command: Command,
        key: Option<String>,
    ) -> Result<(), EngineError> {
        self.record(&format!("run.{}", command.name()), run.as_str(), detail(&command)).await?;
        engine.command(run, command, key).await
    }

    pub async fn message(
        &self,
        engine: &dyn Engine,
        run: &RunId,
        fork: ForkNum,
        text: &StoredText,
        key: Option<String>,
    ) -> Result<MessageId, EngineError> {
        self.record("fork.message", &format!("{run}/{fork}"), json!(text)).await?;
        engine.message(run, fork, json!(text), key).await
    }
}

/// What the audit trail has of a command besides its name.
fn detail(command: &Command) -> Value {
    match command {
        Command::CancelFork { fork } => json!({ "fork": fork }),
        Command::AddForks { forks } => {
            let models: BTreeSet<&str> = forks.iter().map(|f| f.model.as_str()).collect();
            json!({ "count": forks.len(), "prompts": prompts(forks), "models": models })
        }
        Command::Pause | Command::Resume | Command::Detach | Command::Cancel => Value::Null,
    }
}

/// Each different one, in order.
fn prompts(forks: &[ForkSpec]) -> Vec<&str> {
    let mut seen = BTreeSet::new();
    forks.iter().map(|f| f.prompt.as_str()).filter(|p| seen.insert(*p)).take(MAX_PROMPTS).collect()
}

/// Nobody hides what matters behind a long beginning.
fn shortened(detail: Value) -> Value {
    match detail {
        Value::String(s) => {
            let left_out = s.chars().count().saturating_sub(HEAD_CHARS + TAIL_CHARS);
            if left_out == 0 {
                return s.into();
            }
            let head: String = s.chars().take(HEAD_CHARS).collect();
            let tail: String = s.chars().skip(HEAD_CHARS + left_out).collect();
            format!("{head}… ({left_out} characters) …{tail}").into()
        }
        Value::Array(all) => all.into_iter().map(shortened).collect(),
        Value::Object(map) => map.into_iter().map(|(k, v)| (k, shortened(v))).collect(),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_what_is_long_the_end_is_kept_too() {
        let text = |n: usize| format!("{}rm -rf /", " ".repeat(n));
        assert_eq!(shortened(json!(text(100))), json!(text(100)));
        let kept = shortened(json!({ "command": ["sh", "-c", text(9_000)] }));
        let said = kept["command"][2].as_str().unwrap();
        assert!(said.ends_with("rm -rf /") && said.contains("(7008 characters)"), "{said}");
        assert!(said.chars().count() < HEAD_CHARS + TAIL_CHARS + 40);
    }
}
