//! A model that answers from a file: offline, free, the same every time. For demos and tests.
//!
//! Which turn comes next is a function of the file, the fork's number and the conversation alone, so an agent that was killed
//! and goes on from its journal gets the answers that it would have got. A summary carries on which turn is next, since it
//! replaces the conversation that said so. The format is described in docs/script-model.md.

mod file;

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use async_trait::async_trait;
use forkyard_core::pricing::{InputKind, Usage};

pub use file::{BadScript, Script};
use file::{Scene, ScriptTurn};

use super::backend::{Answer, Backend, Call, Failure, Watch};
use super::estimate::weigh;
use super::{Block, Delta, Message, RawJson, Role, StopReason, TurnRequest};

/// The name that the model has in price lists: it costs nothing there.
const NAME: &str = "script";
const BYTES_PER_TOKEN: u64 = 4;
const OVER: &str = "The script has no further turn for this conversation.";

/// Stands in a summary, before the number of the next turn.
const NEXT_TURN_MARK: &str = "[script: next turn ";
/// Conversations whose place is remembered for their summaries.
const MAX_PLACES: usize = 4096;

pub struct ScriptBackend {
    script: Script,
    /// By fork and conversation: the turn after the one that was played last.
    places: Mutex<HashMap<(u32, String), usize>>,
}

impl ScriptBackend {
    pub fn new(script: Script) -> ScriptBackend {
        ScriptBackend { script, places: Mutex::default() }
    }

    fn places(&self) -> MutexGuard<'_, HashMap<(u32, String), usize>> {
        self.places.lock().unwrap_or_else(|e| e.into_inner())
    }

    fn remember(&self, fork: u32, conversation: &str, next: usize) {
        let mut places = self.places();
        if places.len() >= MAX_PLACES {
            places.clear();
        }
        places.insert((fork, conversation.to_string()), next);
    }

    /// Of the conversation with the longest name that the summary's begins with.
    fn summary(&self, fork: u32, conversation: &str) -> ScriptTurn {
        let places = self.places();
        let summed_up =
            places.iter().filter(|((f, name), _)| *f == fork && conversation.starts_with(name.as_str()));
        let next = summed_up.max_by_key(|((_, name), _)| name.len()).map_or(0, |(_, next)| *next);
        let text = format!("The task is under way by the script. {NEXT_TURN_MARK}{next}]");
        ScriptTurn { text: Some(text), ..ScriptTurn::default() }
    }

    fn turns(&self, request: &TurnRequest) -> &[ScriptTurn] {
        if request.is_main() { &self.script.turn } else { &self.script.subagent }
    }

    /// The next turn and its number. Calls carry their turn's number in their id; where an answer has none, or was compacted
    /// away, the turns are gone through as they were then.
    fn next<'a>(
        &'a self,
        turns: &'a [ScriptTurn],
        request: &TurnRequest,
        fork: u32,
    ) -> Option<(usize, &'a ScriptTurn)> {
        let after = |turn: usize| after(turns, turn);
        let find = |from: usize, before: &[Message]| {
            let scene = Scene { fork, last: before.last() };
            (from..turns.len()).find(|i| turns[*i].applies(&scene))
        };
        let mut at = request.messages.first().and_then(marked_turn).unwrap_or(0);
        for (i, message) in request.messages.iter().enumerate().filter(|(_, m)| m.role == Role::Assistant) {
            let played = played_turn(message).or_else(|| find(at, &request.messages[..i]));
            at = played.map_or(at, after);
        }
        find(at, &request.messages).map(|i| (i, &turns[i]))
    }
}

fn after(turns: &[ScriptTurn], turn: usize) -> usize {
    if turns.get(turn).is_some_and(|t| t.repeat) { turn } else { turn + 1 }
}

/// What the last summary said is next.
fn marked_turn(message: &Message) -> Option<usize> {
    message.content.iter().rev().find_map(|block| match block {
        Block::Text { text } => {
            let (_, rest) = text.rsplit_once(NEXT_TURN_MARK)?;
            rest.split(']').next()?.parse().ok()
        }
        Block::Thinking { .. }
        | Block::RedactedThinking { .. }
        | Block::ToolUse { .. }
        | Block::ToolResult { .. }
        | Block::Image(_)
        | Block::Other { .. } => None,
    })
}

/// `script_TURN_ANSWER_CALL`
fn call_id(turn: usize, answer: usize, call: usize) -> String {
    format!("script_{turn}_{answer}_{call}")
}

fn played_turn(message: &Message) -> Option<usize> {
    message.content.iter().find_map(|block| match block {
        Block::ToolUse { id, .. } => id.strip_prefix("script_")?.split('_').next()?.parse().ok(),
        Block::Text { .. }
        | Block::Thinking { .. }
        | Block::RedactedThinking { .. }
        | Block::ToolResult { .. }
        | Block::Image(_)
        | Block::Other { .. } => None,
    })
}

/// What may stand in texts and inputs of a script.
struct Fill {
    fork: u32,
    answer: usize,
}

impl Fill {
    fn text(&self, text: &str) -> String {
        text.replace("{{fork}}", &self.fork.to_string()).replace("{{turn}}", &self.answer.to_string())
    }
}

#[async_trait]
impl Backend for ScriptBackend {
    fn name(&self) -> &'static str {
        NAME
    }

    fn input_kind(&self) -> InputKind {
        InputKind::Plain
    }

    fn priced_as<'a>(&'a self, _: &'a str) -> &'a str {
        self.script.price_as.as_deref().unwrap_or(NAME)
    }

    async fn count_tokens(&self, call: &Call<'_>) -> Option<u64> {
        Some(weigh(call.request, 0) / BYTES_PER_TOKEN)
    }

    async fn once(&self, call: &Call<'_>, watch: &mut dyn Watch) -> Result<Answer, Failure> {
        let request = call.request;
        let fork = call.fork.unwrap_or(0);
        let answers = request.messages.iter().filter(|m| m.role == Role::Assistant).count();
        let fill = Fill { fork, answer: answers + 1 };
        let turns = self.turns(request);
        let spare;
        // An agent always offers tools; without them it asks for a summary.
        let is_summary = !request.is_main() && request.tools.is_empty();
        let (number, turn) = match self.next(turns, request, fork).filter(|_| !is_summary) {
            Some(found) => found,
            None if is_summary => {
                spare = self.summary(fork, &request.conversation);
                (turns.len(), &spare)
            }
            None => {
                spare = ScriptTurn { text: Some(OVER.to_string()), ..ScriptTurn::default() };
                (turns.len(), &spare)
            }
        };
        if !is_summary {
            self.remember(fork, &request.conversation, after(turns, number));
        }

        let input = turn.usage.and_then(|u| u.input).unwrap_or(weigh(request, 0) / BYTES_PER_TOKEN);
        let mut usage = Usage { input, ..Usage::default() };
        sleep_ms(turn.delay_ms).await;
        watch.started(&usage);

        let content = content(turn, number, answers, &fill);
        play(&content, turn.word_ms, watch).await;
        let bytes: usize = content.iter().map(|b| said(b).iter().map(|s| s.len()).sum::<usize>()).sum();
        let output = turn.usage.and_then(|u| u.output).unwrap_or((bytes as u64).div_ceil(BYTES_PER_TOKEN));
        usage.output = output.min(u64::from(call.max_tokens));
        usage.cache_read = turn.usage.and_then(|u| u.cache_read).unwrap_or(0).min(usage.input);
        usage.input -= usage.cache_read;
        let stop_reason = match &turn.stop {
            Some(stop) => StopReason::from(stop.clone()),
            None if turn.tools.is_empty() => StopReason::EndTurn,
            None => StopReason::ToolUse,
        };
        Ok(Answer { content, stop_reason, usage: Some(usage), request_id: None, model: NAME.to_string() })
    }
}

async fn sleep_ms(ms: u64) {
    if ms > 0 {
        tokio::time::sleep(Duration::from_millis(ms)).await;
    }
}

fn content(turn: &ScriptTurn, number: usize, answers: usize, fill: &Fill) -> Vec<Block> {
    let thinking =
        turn.thinking.iter().map(|t| Block::Thinking { thinking: fill.text(t), signature: NAME.into() });
    let text = turn.text.iter().map(|t| Block::text(fill.text(t)));
    let tools = turn.tools.iter().enumerate().map(|(i, tool)| {
        let input = match &tool.raw_input {
            Some(raw) => fill.text(raw),
            // Filled within the JSON text: a number needs no escape.
            None => fill.text(&serde_json::Value::Object(tool.input.clone()).to_string()),
        };
        Block::ToolUse {
            id: call_id(number, answers, i),
            name: tool.name.clone(),
            input: RawJson::new(input),
        }
    });
    thinking.chain(text).chain(tools).collect()
}

/// The strings that a model would have had to write.
fn said(block: &Block) -> Vec<&str> {
    match block {
        Block::Text { text } => vec![text],
        Block::Thinking { thinking, .. } => vec![thinking],
        Block::ToolUse { name, input, .. } => vec![name, input.as_str()],
        Block::RedactedThinking { .. } | Block::ToolResult { .. } | Block::Image(_) | Block::Other { .. } => {
            Vec::new()
        }
    }
}

/// Streams word by word, as people expect of a model.
async fn play(content: &[Block], word_ms: u64, watch: &mut dyn Watch) {
    for (index, block) in content.iter().enumerate() {
        match block {
            Block::Text { text } => {
                for text in text.split_inclusive(' ') {
                    sleep_ms(word_ms).await;
                    watch.delta(Delta::Text { index, text });
                }
            }
            Block::Thinking { thinking, .. } => {
                for text in thinking.split_inclusive(' ') {
                    sleep_ms(word_ms).await;
                    watch.delta(Delta::Thinking { index, text });
                }
            }
            Block::ToolUse { id, name, input } => {
                watch.delta(Delta::ToolStart { index, id, name });
                watch.delta(Delta::ToolInput { index, json: input.as_str() });
            }
            Block::RedactedThinking { .. }
            | Block::ToolResult { .. }
            | Block::Image(_)
            | Block::Other { .. } => {}
        }
    }
}
