//! The file.

use std::path::Path;

use serde::Deserialize;
use serde_json::{Map, Value};

use super::super::{Block, Message, ResultPart};

/// A script is written by hand.
const MAX_FILE_BYTES: u64 = 4 << 20;

#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Script {
    /// For people.
    #[serde(default)]
    pub name: Option<String>,
    /// The model whose prices count. Without it everything is free.
    #[serde(default)]
    pub price_as: Option<String>,
    #[serde(default)]
    pub(super) turn: Vec<ScriptTurn>,
    /// What subagents answer.
    #[serde(default)]
    pub(super) subagent: Vec<ScriptTurn>,
}

#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct ScriptTurn {
    pub when: When,
    /// Answers again as long as its conditions hold.
    pub repeat: bool,
    pub thinking: Option<String>,
    pub text: Option<String>,
    pub tools: Vec<ScriptCall>,
    pub stop: Option<String>,
    pub delay_ms: u64,
    pub word_ms: u64,
    pub usage: Option<ScriptUsage>,
}

#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ScriptCall {
    pub name: String,
    #[serde(default)]
    pub input: Map<String, Value>,
    /// Instead of `input`: a text that need not be JSON.
    #[serde(default)]
    pub raw_input: Option<String>,
}

/// All that is given has to hold.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct When {
    fork: Option<Forks>,
    result: Option<String>,
    no_result: Option<String>,
    error: Option<bool>,
    message: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(untagged)]
enum Forks {
    One(u32),
    Any(Vec<u32>),
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct ScriptUsage {
    pub input: Option<u64>,
    pub output: Option<u64>,
    pub cache_read: Option<u64>,
}

#[derive(Debug, thiserror::Error)]
pub enum BadScript {
    #[error("{path}: {source}")]
    Io { path: String, source: std::io::Error },
    #[error("{path}: larger than {MAX_FILE_BYTES} bytes")]
    TooLarge { path: String },
    #[error("{path}: {reason}")]
    Format { path: String, reason: String },
}

impl Script {
    pub fn open(path: &Path) -> Result<Script, BadScript> {
        let name = path.display().to_string();
        let io = |source| BadScript::Io { path: name.clone(), source };
        if std::fs::metadata(path).map_err(io)?.len() > MAX_FILE_BYTES {
            return Err(BadScript::TooLarge { path: name });
        }
        Script::parse(&std::fs::read_to_string(path).map_err(io)?, &name)
    }

    /// `name` is for errors.
    pub fn parse(text: &str, name: &str) -> Result<Script, BadScript> {
        let bad = |reason: String| BadScript::Format { path: name.to_string(), reason };
        let script: Script = toml::from_str(text).map_err(|e| bad(e.to_string()))?;
        if script.turn.is_empty() {
            return Err(bad("it has no [[turn]]".into()));
        }
        for (list, turns) in [("turn", &script.turn), ("subagent", &script.subagent)] {
            for (i, turn) in turns.iter().enumerate() {
                let says_nothing = turn.text.is_none() && turn.tools.is_empty() && turn.stop.is_none();
                if says_nothing {
                    return Err(bad(format!("[[{list}]] number {} has neither text, tools nor stop", i + 1)));
                }
            }
        }
        Ok(script)
    }
}

/// What a turn's conditions look at.
pub(super) struct Scene<'a> {
    pub fork: u32,
    /// The message that is answered.
    pub last: Option<&'a Message>,
}

impl Scene<'_> {
    fn blocks(&self) -> &[Block] {
        self.last.map_or(&[], |m| &m.content)
    }

    fn result_holds(&self, wanted: &str) -> bool {
        self.blocks().iter().any(|block| match block {
            Block::ToolResult { content, .. } => content.iter().any(|part| match part {
                ResultPart::Text { text } => text.contains(wanted),
                ResultPart::Image(_) => false,
            }),
            Block::Text { .. }
            | Block::Thinking { .. }
            | Block::RedactedThinking { .. }
            | Block::ToolUse { .. }
            | Block::Image(_)
            | Block::Other { .. } => false,
        })
    }

    fn has_error(&self) -> bool {
        self.blocks().iter().any(|b| matches!(b, Block::ToolResult { is_error: true, .. }))
    }

    fn message_holds(&self, wanted: &str) -> bool {
        self.blocks().iter().any(|b| matches!(b, Block::Text { text } if text.contains(wanted)))
    }
}

impl ScriptTurn {
    pub fn applies(&self, scene: &Scene<'_>) -> bool {
        let When { fork, result, no_result, error, message } = &self.when;
        let fork_fits = fork.as_ref().is_none_or(|f| match f {
            Forks::One(n) => *n == scene.fork,
            Forks::Any(all) => all.contains(&scene.fork),
        });
        fork_fits
            && result.as_ref().is_none_or(|t| scene.result_holds(t))
            && no_result.as_ref().is_none_or(|t| !scene.result_holds(t))
            && error.is_none_or(|e| e == scene.has_error())
            && message.as_ref().is_none_or(|t| scene.message_holds(t))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mistakes_are_named() {
        let bad = |text: &str| Script::parse(text, "demo.toml").unwrap_err().to_string();
        assert!(bad("").contains("no [[turn]]"));
        assert!(bad("[[turn]]\nwhen = { fork = 1 }").contains("number 1 has neither"));
        let unknown = bad("[[turn]]\ntext = \"x\"\nwhem = {}\n");
        assert!(
            unknown.contains("demo.toml") && unknown.contains("whem") && unknown.contains("line 3"),
            "{unknown}"
        );
        assert!(bad("[[turn]]\ntext = \"x\"\nwhen = { forks = 1 }").contains("forks"));
    }
}
