//! The tools, one per file. Each acts through the sandbox, inside of it: no path is ever resolved on the host. What goes wrong
//! with a call is a result that the model can act on, never an exception.

mod background;
mod bash;
mod edit;
mod file_change;
mod glob;
mod grep;
mod read;
mod skill;
mod task;
mod write;

use async_trait::async_trait;
use forkyard_core::CallId;
use forkyard_sandbox::{ErrorKind, SandboxError};
use serde_json::{Map, Value};

pub(crate) use background::Background;
pub(crate) use file_change::{FileChange, look_hash};
pub(crate) use skill::Skills;
pub(crate) use task::{MAX_SUBAGENT_TURNS, SUBAGENT_TOOLS_EXCEPT};

use crate::event::{AgentEvent, ChangeType, StreamErrorType};
use crate::inference::{ResultPart, ToolDef};
use crate::outcome::AgentError;
use crate::session::{Halt, Session, Who};

/// Text of one result; more is cut in the middle, with a note. About 8 000 tokens.
pub(crate) const MAX_RESULT_BYTES: usize = 30_000;

/// One call as a tool sees it.
pub(crate) struct Call<'a> {
    pub session: &'a Session,
    pub who: &'a Who,
    pub turn: u32,
    pub tool_use_id: &'a str,
    /// Unique in the sandbox, and the same for every attempt that asks for this call.
    pub id: CallId,
    pub input: &'a Map<String, Value>,
}

impl Call<'_> {
    pub fn text(&self, field: &str) -> Result<&str, Failure> {
        match self.input.get(field) {
            Some(Value::String(text)) => Ok(text),
            Some(other) => Err(Failure::result(format!("`{field}` must be a text, not {other}"))),
            None => Err(Failure::result(format!("`{field}` is missing"))),
        }
    }
    pub fn optional_text(&self, field: &str) -> Result<Option<&str>, Failure> {
        match self.input.get(field) {
            None | Some(Value::Null) => Ok(None),
            Some(_) => self.text(field).map(Some),
        }
    }
    /// Models also write numbers as texts.
    pub fn number(&self, field: &str) -> Result<Option<u64>, Failure> {
        let value = match self.input.get(field) {
            None | Some(Value::Null) => return Ok(None),
            Some(Value::String(text)) => text.trim().parse().ok(),
            Some(value) => value.as_u64(),
        };
        value
            .map(Some)
            .ok_or_else(|| Failure::result(format!("`{field}` must be a whole number, not negative")))
    }
    pub fn flag(&self, field: &str) -> Result<bool, Failure> {
        match self.input.get(field) {
            None | Some(Value::Null) => Ok(false),
            Some(Value::Bool(flag)) => Ok(*flag),
            Some(Value::String(text)) if text == "true" || text == "false" => Ok(text == "true"),
            Some(other) => Err(Failure::result(format!("`{field}` must be true or false, not {other}"))),
        }
    }
    /// Absolute, against the workspace.
    pub fn path(&self, field: &str) -> Result<String, Failure> {
        let path = self.text(field)?;
        if path.is_empty() {
            return Err(Failure::result(format!("`{field}` is empty")));
        }
        Ok(self.session.absolute(path))
    }
}

/// What a call gave.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Output {
    pub parts: Vec<ResultPart>,
    pub is_error: bool,
    /// Facts beyond the result, recorded before it.
    pub events: Vec<AgentEvent>,
    /// The guest keeps something under the call's id that may go once the result is recorded.
    pub forget: bool,
}

impl Output {
    pub fn text(text: impl Into<String>) -> Output {
        Output {
            parts: vec![ResultPart::Text { text: text.into() }],
            is_error: false,
            events: Vec::new(),
            forget: false,
        }
    }
    pub fn error(text: impl Into<String>) -> Output {
        Output { is_error: true, ..Output::text(text) }
    }
}

/// Why a call has no output.
#[derive(Debug)]
pub(crate) enum Failure {
    /// An error result.
    Result(String),
    /// The agent can't go on.
    Halt(Halt),
}

impl Failure {
    pub fn result(text: impl Into<String>) -> Failure {
        Failure::Result(text.into())
    }
}

impl From<Halt> for Failure {
    fn from(halt: Halt) -> Failure {
        Failure::Halt(halt)
    }
}

impl From<SandboxError> for Failure {
    fn from(e: SandboxError) -> Failure {
        match e.kind {
            ErrorKind::Stale => Failure::Halt(AgentError::Stale.into()),
            ErrorKind::Unavailable => Failure::Halt(AgentError::SandboxLost(e).into()),
            ErrorKind::Invalid
            | ErrorKind::NotFound
            | ErrorKind::Denied
            | ErrorKind::Auth
            | ErrorKind::Unsupported
            | ErrorKind::TooLarge
            | ErrorKind::Timeout => Failure::Result(e.to_string()),
        }
    }
}

#[async_trait]
pub(crate) trait Tool: Send + Sync {
    fn definition(&self, session: &Session) -> ToolDef;

    /// Changes nothing: calls of one answer may run at the same time, and be answered from the cache.
    fn only_reads(&self) -> bool {
        false
    }

    /// For tools that replace a file: what it will be, computed before anything is recorded or written.
    async fn prepare(&self, _call: &Call<'_>) -> Result<Option<FileChange>, Failure> {
        Ok(None)
    }

    async fn run(&self, call: &Call<'_>, change: Option<FileChange>) -> Result<Output, Failure>;
}

/// In the order that requests list them: part of the prefix that forks share.
const TOOLS: &[(&str, &dyn Tool)] = &[
    ("Bash", &bash::Bash),
    ("BashOutput", &background::BashOutput),
    ("KillBash", &background::KillBash),
    ("Read", &read::Read),
    ("Write", &write::Write),
    ("Edit", &edit::Edit),
    ("Glob", &glob::Glob),
    ("Grep", &grep::Grep),
    ("Task", &task::Task),
    ("Skill", &skill::Skill),
];

pub(crate) fn find(name: &str) -> Option<&'static dyn Tool> {
    TOOLS.iter().find(|(n, _)| *n == name).map(|(_, tool)| *tool)
}

/// Every tool that an agent can have.
pub fn names() -> impl Iterator<Item = &'static str> {
    TOOLS.iter().map(|(name, _)| *name)
}

/// An object schema from `(name, type, required, description)` rows.
fn schema(fields: &[(&str, &str, bool, &str)]) -> Value {
    let properties: Map<String, Value> = fields
        .iter()
        .map(|(name, kind, _, description)| {
            ((*name).to_string(), serde_json::json!({ "type": kind, "description": description }))
        })
        .collect();
    let required: Vec<&str> = fields.iter().filter(|f| f.2).map(|f| f.0).collect();
    serde_json::json!({ "type": "object", "properties": properties, "required": required })
}

fn definition(name: &str, description: impl Into<String>, fields: &[(&str, &str, bool, &str)]) -> ToolDef {
    ToolDef { name: name.to_string(), description: description.into(), input_schema: schema(fields) }
}

/// `agent.file_edited` of a finished change.
fn edited(call: &Call<'_>, change: &FileChange) -> AgentEvent {
    let kind = if change.existed { ChangeType::Modified } else { ChangeType::Created };
    AgentEvent::FileEdited(crate::diff::file_edited(
        call.turn,
        call.tool_use_id,
        &change.path,
        kind,
        change.before.as_deref(),
        Some(&change.after),
    ))
}

/// What a command's end means, where the exit code alone does not say it.
fn diagnosis(result: &forkyard_sandbox::ExecResult) -> Option<(StreamErrorType, &'static str)> {
    if result.oom_killed {
        return Some((
            StreamErrorType::Sigkill,
            "the command was killed because the sandbox ran out of memory; use less memory at a time, for example fewer parallel jobs",
        ));
    }
    (result.signal == Some(9) && !result.timed_out).then_some((
        StreamErrorType::Sigkill,
        "the command was killed (SIGKILL); often that means that it ran out of memory",
    ))
}
