//! What an earlier attempt left in the sandbox, and how this one takes it over.

use std::collections::BTreeMap;

use forkyard_core::CallId;
use forkyard_sandbox::ErrorKind;
use serde_json::Value;

use super::calls::call_id;
use super::{Session, Who};
use crate::event::{AgentEvent, JournalEntry};
use crate::inference::Block;
use crate::outcome::AgentError;

impl Session {
    /// Background commands are followed again, results that the journal has are forgotten. Calls without a result wait until
    /// they are asked for.
    pub(crate) async fn take_over(&self, known: Vec<KnownCall>) -> Result<(), AgentError> {
        let there = match self.sandbox.calls().await {
            Ok(there) => there,
            Err(e) if e.kind == ErrorKind::Stale => return Err(AgentError::Stale),
            Err(e) => return Err(AgentError::SandboxLost(e)),
        };
        for call in known.into_iter().filter(|call| there.contains(&call.id)) {
            match call.background {
                Some(command) => self.background.follow_again(self.sandbox.as_ref(), call.id, &command).await,
                None if call.completed => self.forget(&mut vec![call.id]).await,
                None => {}
            }
        }
        Ok(())
    }
}

/// A call that a journal knows of.
pub(crate) struct KnownCall {
    pub id: CallId,
    pub completed: bool,
    /// The command, if it was started to go on by itself.
    pub background: Option<String>,
}

/// Every call that was begun, with the id that the sandbox has it under.
pub(crate) fn known_calls(entries: &[&JournalEntry]) -> Vec<KnownCall> {
    let mut found: Vec<KnownCall> = Vec::new();
    let mut asked: BTreeMap<Option<&str>, Vec<&str>> = BTreeMap::new();
    for entry in entries {
        let subagent = entry.subagent.as_deref();
        let id_of = |asked: &BTreeMap<Option<&str>, Vec<&str>>, turn, tool_use_id: &str| {
            let index = asked.get(&subagent)?.iter().position(|id| *id == tool_use_id)?;
            Some(call_id(&Who { subagent: entry.subagent.clone(), max_turns: 0 }, turn, index, tool_use_id))
        };
        if let AgentEvent::AssistantMessage(message) = &entry.event {
            let ids = message
                .content
                .iter()
                .filter_map(|b| if let Block::ToolUse { id, .. } = b { Some(id.as_str()) } else { None });
            asked.insert(subagent, ids.collect());
        } else if let AgentEvent::ToolUse(t) = &entry.event {
            let background = (t.input.get("run_in_background") == Some(&Value::Bool(true)))
                .then(|| t.input.get("command").and_then(Value::as_str).unwrap_or_default().to_string());
            let id = id_of(&asked, t.turn, &t.tool_use_id);
            found.extend(id.map(|id| KnownCall { id, completed: false, background }));
        } else if let AgentEvent::ToolCompleted(t) = &entry.event
            && let Some(id) = id_of(&asked, t.turn, &t.tool_use_id)
            && let Some(call) = found.iter_mut().rev().find(|c| c.id == id)
        {
            call.completed = true;
        }
    }
    found
}
