//! Whoever steers, over the API or at this machine, is in the audit trail before it is done, so that nothing is done unrecorded.

use forkyard_core::run::Command;
use forkyard_core::spec::RunSpec;
use forkyard_core::{ForkNum, RunId, Timestamp};
use forkyard_store::{Deed, MessageId, Store, StoreError};
use serde_json::{Value, json};

use crate::git::shown_url;
use crate::ports::StoredText;
use crate::{Engine, EngineError};

/// Of what somebody said, this much is kept.
const MAX_DETAIL_CHARS: usize = 2000;

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
        let prompt = spec.forks.first().map(|f| &f.prompt);
        let detail = json!({ "repo": shown_url(&spec.repo.source), "prompt": prompt });
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
            let first = forks.first();
            json!({
                "count": forks.len(),
                "prompt": first.map(|f| &f.prompt),
                "model": first.map(|f| &f.model),
            })
        }
        Command::Pause | Command::Resume | Command::Detach | Command::Cancel => Value::Null,
    }
}

fn shortened(detail: Value) -> Value {
    match detail {
        Value::String(s) if s.chars().count() > MAX_DETAIL_CHARS => {
            let kept: String = s.chars().take(MAX_DETAIL_CHARS).collect();
            format!("{kept}…").into()
        }
        Value::Object(map) => map.into_iter().map(|(k, v)| (k, shortened(v))).collect(),
        other => other,
    }
}
