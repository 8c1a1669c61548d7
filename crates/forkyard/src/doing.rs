//! What the agents of this process do right now, for whoever shows it.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use forkyard_agent::ports::LiveEvent;
use forkyard_agent::{AgentEvent, JournalEntry};
use forkyard_core::view::ForkView;
use forkyard_core::{ForkNum, RunId, Usd};
use forkyard_engine::ports::Onlooker;

#[derive(Debug, Clone, Default)]
pub struct Now {
    /// A tool and its argument, or the last words.
    pub text: String,
    pub turn: u32,
    pub tool_calls: u32,
    pub cost: Usd,
    /// The text is an answer that is still being written.
    speaking: bool,
}

/// What is shown between a call's end and the model's first word.
const THINKING: &str = "thinks …";

impl Now {
    /// Something else than speaking.
    fn does(&mut self, text: &str) {
        self.text = text.to_string();
        self.speaking = false;
    }
}

/// Words of an answer that are kept to be shown.
const MAX_TEXT: usize = 200;

#[derive(Default)]
pub struct Doing {
    now: Mutex<BTreeMap<(RunId, ForkNum), Now>>,
    /// Who else looks on.
    next: OnceLock<Arc<dyn Onlooker>>,
}

impl Doing {
    /// Passes everything on, from now on; the first to ask gets it.
    pub fn pass_on_to(&self, next: Arc<dyn Onlooker>) {
        // The one who was first stays.
        let _ = self.next.set(next);
    }
    pub fn now(&self, run: &RunId, fork: ForkNum) -> Option<Now> {
        self.now.lock().unwrap_or_else(PoisonError::into_inner).get(&(run.clone(), fork)).cloned()
    }
    /// Puts what is known into the rows of forks at work, and says what each does.
    pub fn fill(&self, forks: &mut [ForkView]) -> BTreeMap<ForkNum, String> {
        let mut texts = BTreeMap::new();
        for f in forks.iter_mut().filter(|f| f.outcome.is_none()) {
            if let Some(now) = self.now(&f.run, f.fork) {
                f.turns = f.turns.max(now.turn);
                f.tool_calls = f.tool_calls.max(now.tool_calls);
                f.cost = f.cost.max(now.cost);
                texts.insert(f.fork, now.text);
            }
        }
        texts
    }
    fn with(&self, run: &RunId, fork: ForkNum, f: impl FnOnce(&mut Now)) {
        let mut all = self.now.lock().unwrap_or_else(PoisonError::into_inner);
        f(all.entry((run.clone(), fork)).or_default());
    }
}

impl Onlooker for Doing {
    fn live(&self, run: &RunId, fork: ForkNum, event: &LiveEvent) {
        if let Some(next) = self.next.get() {
            next.live(run, fork, event);
        }
        match event {
            LiveEvent::Text { text, .. } => self.with(run, fork, |n| {
                if !n.speaking {
                    n.text.clear();
                    n.speaking = true;
                }
                n.text.push_str(text);
                if n.text.len() > MAX_TEXT {
                    let from = n.text.char_indices().map(|(i, _)| i).find(|i| n.text.len() - i <= MAX_TEXT);
                    n.text.drain(..from.unwrap_or(0));
                }
            }),
            LiveEvent::ToolStart { tool, .. } => self.with(run, fork, |n| n.does(tool)),
            LiveEvent::Reset { .. } => self.with(run, fork, |n| n.does("")),
            LiveEvent::Thinking { .. }
            | LiveEvent::ToolInput { .. }
            | LiveEvent::Notice { .. }
            | LiveEvent::ToolOutput { .. }
            | LiveEvent::Heartbeat { .. } => {}
        }
    }

    fn recorded(&self, run: &RunId, fork: ForkNum, entries: &[JournalEntry]) {
        if let Some(next) = self.next.get() {
            next.recorded(run, fork, entries);
        }
        for e in entries {
            match &e.event {
                AgentEvent::AssistantMessage(m) => self.with(run, fork, |n| {
                    n.turn = n.turn.max(m.turn);
                    n.cost += m.cost;
                    n.speaking = false;
                }),
                AgentEvent::ToolUse(t) => self.with(run, fork, |n| {
                    n.tool_calls += 1;
                    n.does(&describe(&t.tool, &t.input));
                }),
                AgentEvent::ToolCompleted(_) => self.with(run, fork, |n| n.does(THINKING)),
                AgentEvent::Waiting { .. } => self.with(run, fork, |n| n.does("waits for messages")),
                AgentEvent::Completed(_) | AgentEvent::Failed(_) | AgentEvent::Shutdown { .. } => {
                    self.with(run, fork, |n| n.does(""));
                }
                AgentEvent::Started(_)
                | AgentEvent::Resumed(_)
                | AgentEvent::SystemMessage { .. }
                | AgentEvent::UserMessage { .. }
                | AgentEvent::FileEdited(_)
                | AgentEvent::MessageInjected { .. }
                | AgentEvent::Interrupted { .. }
                | AgentEvent::Compacted { .. }
                | AgentEvent::CheckpointCreated { .. }
                | AgentEvent::SubagentInvoked { .. }
                | AgentEvent::SubagentCompleted { .. }
                | AgentEvent::SkillInvoked { .. }
                | AgentEvent::Error { .. }
                | AgentEvent::StreamError { .. } => {}
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
