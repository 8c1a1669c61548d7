//! A conversation that grows too long goes on from a summary of itself.
//!
//! Thinking blocks are bound to everything before them, and calls to their results, so history is never edited: it is replaced
//! as a whole by the first message and a summary. The summary is asked for in a request of its own, over a plain transcript
//! that is cut to fit, so that it works even when the conversation itself is already too long to send.

use forkyard_core::Usd;

use super::turns::Asked;
use super::{Halt, Session, Who};
use crate::conversation::{Conversation, text_of};
use crate::event::AgentEvent;
use crate::inference::{Block, InferenceError, Message, ResultPart, Role, Silent, TurnRequest};
use crate::outcome::{AgentError, Stop};
use crate::text::{cut, head};

/// Of the context, beyond which the next request might not fit any more.
const FULL_PERCENT: u64 = 80;
const SUMMARY_MAX_TOKENS: u32 = 8_000;
/// Bytes of a text in the transcript that is summarised.
const MAX_TEXT_BYTES: usize = 6_000;
const MAX_RESULT_BYTES: usize = 2_000;
/// Bytes that stand for a token, on the safe side.
const BYTES_PER_TOKEN: u64 = 2;
/// Each try with half of the transcript.
const MAX_TRIES: u32 = 4;

const INSTRUCTION: &str = "Above is the transcript of your work so far on a task; it has to be shortened so that the work can go \
on. Write a summary for yourself that keeps everything needed to finish: the task and every wish of the user that came later; \
what was found out (files, functions, commands that work, errors and their causes); what was changed, with paths; what is left \
to do, and the very next step. Do not continue the work; only write the summary.";

impl Session {
    pub(super) fn is_full(&self, conversation: &Conversation) -> bool {
        conversation
            .context_tokens
            .saturating_add(u64::from(self.config.max_tokens).min(self.config.context_tokens / 10))
            > self.config.context_tokens / 100 * FULL_PERCENT
    }

    pub(super) async fn compact(&self, who: &Who, conversation: &mut Conversation) -> Result<(), Halt> {
        let mut max_bytes =
            usize::try_from(self.config.context_tokens * BYTES_PER_TOKEN / 2).unwrap_or(usize::MAX);
        let mut attempt = 1;
        while attempt <= MAX_TRIES {
            let transcript = transcript(conversation);
            let text =
                format!("<transcript>\n{}\n</transcript>\n\n{INSTRUCTION}", ends(&transcript, max_bytes));
            let mut request =
                TurnRequest::new(self.config.model.clone(), vec![Message::user(text)], SUMMARY_MAX_TOKENS);
            request.conversation = format!(
                "{}summary{}t{attempt}",
                who.subagent.as_deref().unwrap_or("main"),
                conversation.turn
            );
            match self.turn(&request, &mut Silent).await? {
                Asked::Answered(response) => {
                    let event = AgentEvent::Compacted {
                        turn: conversation.turn,
                        summary: text_of(&response.content),
                        usage: response.usage,
                        cost: response.cost,
                    };
                    conversation.apply(&event);
                    self.record(who, event).await;
                    self.recorder.flush().await?;
                    return Ok(());
                }
                // What was said is part of the transcript from now on.
                Asked::Interrupted { cost } => self.deliver_after(who, conversation, cost).await?,
                Asked::Failed { error: InferenceError::ContextTooLong { .. }, .. } => {
                    max_bytes /= 2;
                    attempt += 1;
                }
                Asked::Failed { error, cost } => {
                    return Err(self.model_failed(who, conversation.turn, error, cost).await?);
                }
            }
        }
        Err(Halt::Stop(Stop::ContextTooLong))
    }

    /// What a failed request means for the agent.
    pub(super) async fn model_failed(
        &self,
        who: &Who,
        turn: u32,
        e: InferenceError,
        cost: Usd,
    ) -> Result<Halt, Halt> {
        Ok(match e {
            InferenceError::BudgetExceeded { .. } => {
                self.record(who, AgentEvent::Error { turn, error: e.to_string() }).await;
                Halt::Stop(Stop::BudgetExceeded)
            }
            InferenceError::ContextTooLong { .. } => Halt::Stop(Stop::ContextTooLong),
            InferenceError::Cancelled => AgentError::Cancelled.into(),
            InferenceError::Stale => AgentError::Stale.into(),
            InferenceError::NoPrice { .. }
            | InferenceError::Exhausted { .. }
            | InferenceError::Account { .. }
            | InferenceError::Rejected { .. }
            | InferenceError::Ledger { .. } => {
                let error_type = crate::event::StreamErrorType::StreamInit;
                self.record(who, AgentEvent::StreamError { turn, error: e.to_string(), error_type, cost })
                    .await;
                self.recorder.flush().await?;
                AgentError::Model(e).into()
            }
        })
    }
}

/// The conversation as text: who said what, which call gave what.
fn transcript(conversation: &Conversation) -> String {
    let mut out = String::new();
    let results = conversation.calls.iter().filter_map(|c| c.result.as_ref());
    let messages = conversation.messages.iter().flat_map(|m| m.content.iter().map(move |b| (m.role, b)));
    for (role, block) in messages.chain(results.map(|b| (Role::User, b))) {
        let who = match role {
            Role::User => "User",
            Role::Assistant => "You",
        };
        match block {
            Block::Text { text } => out.push_str(&format!("{who}: {}\n", cut(text, MAX_TEXT_BYTES))),
            Block::ToolUse { name, input, .. } => {
                out.push_str(&format!("You called {name}: {}\n", cut(input.as_str(), MAX_RESULT_BYTES)));
            }
            Block::ToolResult { content, is_error, .. } => {
                let word = if *is_error { "Error" } else { "Result" };
                for part in content {
                    match part {
                        ResultPart::Text { text } => {
                            out.push_str(&format!("{word}: {}\n", cut(text, MAX_RESULT_BYTES)))
                        }
                        ResultPart::Image(_) => out.push_str(&format!("{word}: (image)\n")),
                    }
                }
            }
            Block::Image(_) => out.push_str(&format!("{who}: (image)\n")),
            Block::Thinking { .. } | Block::RedactedThinking { .. } | Block::Other { .. } => {}
        }
    }
    for said in &conversation.said {
        out.push_str(&format!("User: {}\n", cut(said, MAX_TEXT_BYTES)));
    }
    out
}

/// Both ends: the task stands at the start, the newest at the end.
fn ends(text: &str, max_bytes: usize) -> String {
    if text.len() <= max_bytes {
        return text.to_string();
    }
    let first = head(text, max_bytes / 4);
    let mut from = text.len() - (max_bytes - first.len());
    while !text.is_char_boundary(from) {
        from += 1;
    }
    format!("{first}\n… [{} bytes left out] …\n{}", from - first.len(), &text[from..])
}
