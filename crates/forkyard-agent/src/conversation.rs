//! A conversation, rebuilt from the journal alone.

use forkyard_core::Usd;
use forkyard_core::pricing::Usage;

use crate::event::{AgentEvent, AssistantMessage, Completed, JournalEntry, ToolCompleted, ToolUse};
use crate::inference::{Block, Message, RawJson, Role, StopReason};
use crate::ports::{CheckpointInfo, MessageKind, Speaker};

/// Times in a row that a model whose answer was cut is asked to go on.
pub(crate) const MAX_CUTS: u32 = 2;

/// One call of the last answer.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct OpenCall {
    pub id: String,
    pub name: String,
    pub input: RawJson,
    /// Recorded as about to run, by this attempt or an earlier one.
    pub begun: Option<ToolUse>,
    pub result: Option<Block>,
}

/// What is said so far. `messages` are complete; the calls of the last answer, and what was said since, are apart until
/// [`Conversation::close_turn`] puts them into a message of their own.
#[derive(Debug, Clone, Default)]
pub(crate) struct Conversation {
    pub system: Option<String>,
    pub messages: Vec<Message>,
    pub shared_blocks: usize,
    /// Answers so far.
    pub turn: u32,
    pub calls: Vec<OpenCall>,
    /// Texts that the model has not seen yet.
    pub said: Vec<String>,
    /// A message came that the model should see before any call that has not begun.
    pub held: bool,
    pub last_stop: Option<StopReason>,
    /// Answers in a row that were cut without a call.
    pub cuts: u32,
    /// Tokens of the last request and its answer.
    pub context_tokens: u64,
    pub final_text: String,
    pub ended: Option<(Completed, bool)>,
}

/// The entries that still hold: what a lost sandbox took with it is left out.
pub(crate) fn live(entries: &[JournalEntry]) -> Vec<&JournalEntry> {
    live_positions(entries).into_iter().map(|(_, entry)| entry).collect()
}

/// With their place in the journal, from 0.
pub(crate) fn live_positions(entries: &[JournalEntry]) -> Vec<(u64, &JournalEntry)> {
    let mut live: Vec<(u64, &JournalEntry)> = Vec::with_capacity(entries.len());
    for (position, entry) in (0_u64..).zip(entries) {
        if let AgentEvent::Resumed(resumed) = &entry.event
            && let Some(rewound_to) = resumed.rewound_to
        {
            // A checkpoint is recorded after the position that it stands for: going back to it keeps it.
            live.retain(|(p, entry)| {
                let kept = matches!(&entry.event, AgentEvent::CheckpointCreated { position, .. } if *position <= rewound_to);
                *p < rewound_to || kept
            });
        }
        live.push((position, entry));
    }
    live
}

/// The checkpoints that still hold, oldest first, with the journal position that each one's conversation ends at. What came
/// after a point that the fork went back to is not among them, nor is what was dropped.
pub fn checkpoints(entries: &[JournalEntry]) -> Vec<(u64, &CheckpointInfo)> {
    let mut held: Vec<(u64, &CheckpointInfo)> = Vec::new();
    for entry in live(entries) {
        if let AgentEvent::CheckpointCreated { position, checkpoint, dropped, .. } = &entry.event {
            held.retain(|(_, older)| !dropped.contains(&older.id));
            held.push((*position, checkpoint));
        }
    }
    held
}

/// The conversation of the fork's agent (None) or of one subagent.
pub(crate) fn replay(live: &[&JournalEntry], subagent: Option<&str>) -> Conversation {
    let mut conversation = Conversation::default();
    for entry in live.iter().filter(|e| e.subagent.as_deref() == subagent) {
        conversation.apply(&entry.event);
    }
    conversation
}

impl Conversation {
    /// Takes in one recorded event. The running agent calls it for what it appends, so that the two can't differ.
    pub fn apply(&mut self, event: &AgentEvent) {
        match event {
            AgentEvent::SystemMessage { text } => self.system = Some(text.clone()),
            AgentEvent::UserMessage { content, shared_blocks } => {
                self.messages = vec![Message { role: Role::User, content: content.clone() }];
                self.shared_blocks = *shared_blocks;
            }
            AgentEvent::AssistantMessage(message) => self.answer(message),
            AgentEvent::ToolUse(tool_use) => {
                let call = self.calls.iter_mut().find(|c| c.id == tool_use.tool_use_id && c.begun.is_none());
                if let Some(call) = call {
                    call.begun = Some(tool_use.clone());
                }
            }
            AgentEvent::ToolCompleted(completed) => self.completed(completed),
            AgentEvent::MessageInjected { kind, source, content, .. } => {
                self.ended = None;
                self.held |= kind.holds_calls();
                self.said.push(injected_text(*kind, *source, content));
            }
            AgentEvent::Compacted { summary, .. } => {
                self.messages.truncate(1);
                let note = format!(
                    "The conversation so far was summarised to save space. The files are as they were left.\n\n{summary}"
                );
                if let Some(first) = self.messages.first_mut() {
                    // A second summary replaces the first, which it was made from.
                    first.content.retain(|b| !is_summary(b));
                    first.content.push(Block::text(note));
                }
                self.calls.clear();
                self.context_tokens = 0;
                self.last_stop = None;
                self.cuts = 0;
            }
            AgentEvent::Resumed(resumed) => {
                if let Some(message) = &resumed.message {
                    self.said.push(injected_text(MessageKind::System, None, message));
                }
                if resumed.rewound_to.is_some() {
                    self.ended = None;
                }
            }
            AgentEvent::Completed(completed) => self.ended = Some((completed.clone(), true)),
            AgentEvent::Failed(completed) => self.ended = Some((completed.clone(), false)),
            AgentEvent::Started(_)
            | AgentEvent::FileEdited(_)
            | AgentEvent::Interrupted { .. }
            | AgentEvent::CheckpointCreated { .. }
            | AgentEvent::SubagentInvoked { .. }
            | AgentEvent::SubagentCompleted { .. }
            | AgentEvent::SkillInvoked { .. }
            | AgentEvent::Error { .. }
            | AgentEvent::StreamError { .. }
            | AgentEvent::Waiting { .. }
            | AgentEvent::Shutdown { .. } => {}
        }
    }

    fn answer(&mut self, message: &AssistantMessage) {
        self.close_turn();
        self.ended = None;
        self.held = false;
        self.turn = message.turn;
        self.last_stop = Some(message.stop_reason.clone());
        self.context_tokens = message.usage.total();
        let text = text_of(&message.content);
        if !text.is_empty() {
            self.final_text = text;
        }
        self.calls = message
            .content
            .iter()
            .filter_map(|block| match block {
                Block::ToolUse { id, name, input } => Some(OpenCall {
                    id: id.clone(),
                    name: name.clone(),
                    input: input.clone(),
                    begun: None,
                    result: None,
                }),
                Block::Text { .. }
                | Block::Thinking { .. }
                | Block::RedactedThinking { .. }
                | Block::ToolResult { .. }
                | Block::Image(_)
                | Block::Other { .. } => None,
            })
            .collect();
        let cut = message.stop_reason == StopReason::MaxTokens && self.calls.is_empty();
        self.cuts = if cut { self.cuts + 1 } else { 0 };
        if cut && self.cuts <= MAX_CUTS {
            let note = "Your last answer was cut at its length limit. Go on where it ends, in smaller steps.";
            self.said.push(injected_text(MessageKind::System, None, note));
        }
        // The API takes no empty message back.
        if !message.content.is_empty() {
            self.messages.push(Message::assistant(message.content.clone()));
        }
    }

    fn completed(&mut self, completed: &ToolCompleted) {
        let call = self.calls.iter_mut().find(|c| c.id == completed.tool_use_id && c.result.is_none());
        if let Some(call) = call {
            call.result = Some(Block::ToolResult {
                tool_use_id: completed.tool_use_id.clone(),
                content: completed.tool_response.clone(),
                is_error: completed.is_error,
            });
        }
    }

    /// Puts results and what was said since into the user message that the model gets next. Every call has its result by now.
    pub fn close_turn(&mut self) {
        let mut content: Vec<Block> = self.calls.drain(..).filter_map(|call| call.result).collect();
        content.extend(self.said.drain(..).map(Block::text));
        if content.is_empty() {
            return;
        }
        match self.messages.last_mut() {
            Some(last) if last.role == Role::User => last.content.extend(content),
            Some(_) | None => self.messages.push(Message { role: Role::User, content }),
        }
    }
}

fn is_summary(block: &Block) -> bool {
    matches!(block, Block::Text { text } if text.starts_with("The conversation so far was summarised"))
}

pub(crate) fn text_of(content: &[Block]) -> String {
    let texts =
        content.iter().filter_map(|b| if let Block::Text { text } = b { Some(text.as_str()) } else { None });
    texts.collect::<Vec<_>>().join("\n")
}

/// Who speaks is said in words: a model can't see a message's source otherwise.
fn injected_text(kind: MessageKind, source: Option<Speaker>, content: &str) -> String {
    let who = match kind {
        MessageKind::UserMessage => "Message from the user",
        MessageKind::Interrupt => match source {
            Some(Speaker::User) | None => "The user interrupted the work",
            Some(Speaker::Guardian) => "The supervisor of this task interrupted the work",
            Some(Speaker::System) => "The system interrupted the work",
        },
        MessageKind::GuardianNudge => "Guidance from the supervisor of this task",
        MessageKind::System => "Note from the system",
    };
    format!("[{who}]\n{content}")
}

/// What was paid and counted, over all attempts and subagents: also for work that was lost.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Totals {
    pub usage: Usage,
    pub cost: Usd,
    pub tool_calls: u32,
    pub denied: u32,
    pub errors: Vec<String>,
    pub events: u64,
}

/// Errors that are kept for the outcome; the journal has all of them.
const MAX_ERRORS: usize = 50;
const MAX_ERROR_CHARS: usize = 500;

impl Totals {
    pub fn apply(&mut self, event: &AgentEvent) {
        self.events += 1;
        match event {
            AgentEvent::AssistantMessage(message) => {
                self.usage += message.usage;
                self.cost += message.cost;
            }
            AgentEvent::Compacted { usage, cost, .. } => {
                self.usage += *usage;
                self.cost += *cost;
            }
            AgentEvent::ToolCompleted(completed) => {
                self.tool_calls += 1;
                self.denied += u32::from(completed.denied_by.is_some());
                if completed.is_error {
                    let text = completed.tool_response.iter().find_map(|part| match part {
                        crate::inference::ResultPart::Text { text } => Some(text.as_str()),
                        crate::inference::ResultPart::Image(_) => None,
                    });
                    self.error(format!("{}: {}", completed.tool, text.unwrap_or_default()));
                }
            }
            AgentEvent::Error { error, .. } => self.error(error.clone()),
            AgentEvent::StreamError { error, cost, .. } => {
                self.cost += *cost;
                self.error(error.clone());
            }
            AgentEvent::Interrupted { cost, .. } => self.cost += *cost,
            AgentEvent::Started(_)
            | AgentEvent::Resumed(_)
            | AgentEvent::SystemMessage { .. }
            | AgentEvent::UserMessage { .. }
            | AgentEvent::ToolUse(_)
            | AgentEvent::FileEdited(_)
            | AgentEvent::MessageInjected { .. }
            | AgentEvent::CheckpointCreated { .. }
            | AgentEvent::SubagentInvoked { .. }
            | AgentEvent::SubagentCompleted { .. }
            | AgentEvent::SkillInvoked { .. }
            | AgentEvent::Waiting { .. }
            | AgentEvent::Completed(_)
            | AgentEvent::Failed(_)
            | AgentEvent::Shutdown { .. } => {}
        }
    }

    fn error(&mut self, text: String) {
        if self.errors.len() == MAX_ERRORS {
            self.errors.remove(0);
        }
        self.errors.push(crate::text::cut(&text, MAX_ERROR_CHARS));
    }
}
