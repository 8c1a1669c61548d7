//! What the agents of this process do right now, for whoever shows it.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use forkyard_agent::ports::LiveEvent;
use forkyard_agent::{AgentEvent, JournalEntry};
use forkyard_core::{ForkNum, RunId, Usd};
use forkyard_engine::ports::Onlooker;

#[derive(Debug, Clone, Default)]
pub struct Now {
    /// A tool and its argument, or the last words.
    pub text: String,
    pub turn: u32,
    pub tool_calls: u32,
    pub cost: Usd,
}

/// Words of an answer that are kept to be shown.
const MAX_TEXT: usize = 200;

#[derive(Default)]
pub struct Doing(Mutex<BTreeMap<(RunId, ForkNum), Now>>);

impl Doing {
    pub fn now(&self, run: &RunId, fork: ForkNum) -> Option<Now> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).get(&(run.clone(), fork)).cloned()
    }
    fn with(&self, run: &RunId, fork: ForkNum, f: impl FnOnce(&mut Now)) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        f(all.entry((run.clone(), fork)).or_default());
    }
}

impl Onlooker for Doing {
    fn live(&self, run: &RunId, fork: ForkNum, event: &LiveEvent) {
        match event {
            LiveEvent::Text { text, .. } => self.with(run, fork, |n| {
                n.text.push_str(text);
                if n.text.len() > MAX_TEXT {
                    let from = n.text.char_indices().map(|(i, _)| i).find(|i| n.text.len() - i <= MAX_TEXT);
                    n.text.drain(..from.unwrap_or(0));
                }
            }),
            LiveEvent::ToolStart { tool, .. } => self.with(run, fork, |n| n.text = tool.clone()),
            LiveEvent::Reset { .. } => self.with(run, fork, |n| n.text.clear()),
            LiveEvent::Thinking { .. }
            | LiveEvent::ToolInput { .. }
            | LiveEvent::Notice { .. }
            | LiveEvent::ToolOutput { .. }
            | LiveEvent::Heartbeat { .. } => {}
        }
    }

    fn recorded(&self, run: &RunId, fork: ForkNum, entries: &[JournalEntry]) {
        for e in entries {
            match &e.event {
                AgentEvent::AssistantMessage(m) => self.with(run, fork, |n| {
                    n.turn = n.turn.max(m.turn);
                    n.cost += m.cost;
                }),
                AgentEvent::ToolUse(t) => self.with(run, fork, |n| {
                    n.tool_calls += 1;
                    n.text = describe(&t.tool, &t.input);
                }),
                AgentEvent::ToolCompleted(_) => self.with(run, fork, |n| n.text.clear()),
                _ => {}
            }
        }
    }
}

/// `Bash cargo test`, `Edit src/main.rs`.
pub fn describe(tool: &str, input: &serde_json::Value) -> String {
    let of = ["command", "file_path", "pattern", "description", "skill"];
    match of.iter().find_map(|k| input.get(k).and_then(|v| v.as_str())) {
        Some(text) => format!("{tool} {text}"),
        None => tool.to_string(),
    }
}
