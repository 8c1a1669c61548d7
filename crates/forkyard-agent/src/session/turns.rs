//! The turn loop.
//!
//! | the last answer | what follows |
//! |---|---|
//! | has calls | they run, and their results are the next question |
//! | end_turn, stop_sequence, anything new | done, unless a message came in |
//! | max_tokens without a call | the model is asked to go on, twice in a row at most; then done |
//! | pause_turn | the same conversation is sent again |
//! | refusal | ends without success |
//! | context window exceeded, or nearly | compaction, then on |

use std::sync::atomic::{AtomicBool, Ordering};

use forkyard_core::Usd;

use super::{Halt, Session, Who};
use crate::conversation::{Conversation, MAX_CUTS};
use crate::event::{AgentEvent, AssistantMessage};
use crate::inference::{
    Delta, DeltaSink, Heard, InferenceError, StopReason, ToolDef, TurnRequest, TurnResponse,
};
use crate::outcome::Stop;
use crate::ports::{EventSink, LiveEvent};
use crate::tools;

/// What became of a request. `cost` is that of the tries that gave no answer.
pub(super) enum Asked {
    Answered(TurnResponse),
    Failed { error: InferenceError, cost: Usd },
    Interrupted { cost: Usd },
}

impl Session {
    /// Goes on until the model is done or may not go on.
    pub(crate) async fn converse(&self, who: &Who, conversation: &mut Conversation) -> Result<Stop, Halt> {
        loop {
            if conversation.calls.iter().any(|c| c.result.is_none()) {
                let changed = self.run_calls(who, conversation).await?;
                if changed && who.subagent.is_none() {
                    self.checkpoint(conversation.turn).await?;
                }
            }
            self.deliver(who, conversation).await?;
            if conversation.calls.is_empty()
                && conversation.said.is_empty()
                && let Some(stop) =
                    conversation.last_stop.as_ref().and_then(|s| finishes(s, conversation.cuts))
            {
                return Ok(stop);
            }
            if conversation.turn >= who.max_turns {
                return Ok(Stop::MaxTurns);
            }
            let exceeded = conversation.last_stop == Some(StopReason::ContextWindowExceeded);
            if exceeded || self.is_full(conversation) {
                self.compact(who, conversation).await?;
            }
            self.ask(who, conversation).await?;
        }
    }

    async fn ask(&self, who: &Who, conversation: &mut Conversation) -> Result<(), Halt> {
        let mut compacted = false;
        loop {
            conversation.close_turn();
            let response = match self.request(who, conversation).await? {
                Asked::Answered(response) => response,
                Asked::Interrupted { cost } => {
                    self.sink.live(LiveEvent::Reset { subagent: who.subagent.clone() });
                    return self.deliver_after(who, conversation, cost).await;
                }
                Asked::Failed { error: InferenceError::ContextTooLong { .. }, .. } if !compacted => {
                    compacted = true;
                    self.compact(who, conversation).await?;
                    continue;
                }
                Asked::Failed { error, cost } => {
                    return Err(self.model_failed(who, conversation.turn, error, cost).await?);
                }
            };
            let TurnResponse { content, stop_reason, usage, cost, request_id, model, tries } = response;
            let turn = conversation.turn + 1;
            let message =
                AssistantMessage { turn, content, stop_reason, usage, cost, model, request_id, tries };
            let event = AgentEvent::AssistantMessage(message);
            conversation.apply(&event);
            self.record(who, event).await;
            // Without hooks the first call is judged at once and flushed together with the answer that asks for it.
            if conversation.calls.is_empty() || !self.interceptors.is_empty() {
                self.recorder.flush().await?;
            }
            return Ok(());
        }
    }

    async fn request(&self, who: &Who, conversation: &mut Conversation) -> Result<Asked, Halt> {
        // The messages are lent to the request: copying a long conversation every turn would cost more than the rest.
        let request = TurnRequest {
            model: self.config.model.clone(),
            system: conversation.system.clone().unwrap_or_default(),
            tools: self.definitions(who),
            messages: std::mem::take(&mut conversation.messages),
            shared_blocks: conversation.shared_blocks,
            max_tokens: self.config.max_tokens,
            effort: self.config.effort,
            conversation: who.subagent.clone().unwrap_or_else(|| "main".to_string()),
        };
        let mut live = Live { sink: self.sink.as_ref(), subagent: &who.subagent };
        let asked = self.turn(&request, &mut live).await;
        conversation.messages = request.messages;
        asked
    }

    /// One answer of the model, unless somebody interrupts: then the request is broken off at once, and counts for what it
    /// may have cost.
    pub(super) async fn turn(
        &self,
        request: &TurnRequest,
        deltas: &mut dyn DeltaSink,
    ) -> Result<Asked, Halt> {
        let before = self.model.total_cost();
        let answered = AtomicBool::new(false);
        let result = {
            let mut deltas = Heard { deltas, answered: &answered };
            let mut asking = std::pin::pin!(self.model.turn(request, &mut deltas));
            tokio::select! {
                // An answer that is there counts.
                biased;
                result = &mut asking => Some(result),
                cut = self.bounded(self.interrupted()) => if answered.load(Ordering::Relaxed) {
                    // Whoever cancels may have been told by its payment that it is there.
                    Some(asking.await)
                } else {
                    cut??;
                    None
                }
            }
        };
        let cost = self.model.total_cost().saturating_sub(before);
        Ok(match result {
            Some(Ok(response)) => Asked::Answered(response),
            Some(Err(error)) => Asked::Failed { error, cost },
            None => Asked::Interrupted { cost },
        })
    }

    /// Names of the tools that this conversation has.
    pub(crate) fn offered(&self, who: &Who) -> impl Iterator<Item = &'static str> {
        let is_subagent = who.subagent.is_some();
        tools::names()
            .filter(move |name| !is_subagent || !tools::SUBAGENT_TOOLS_EXCEPT.contains(name))
            .filter(|name| self.policy.offers(name))
    }

    fn definitions(&self, who: &Who) -> Vec<ToolDef> {
        self.offered(who).filter_map(tools::find).map(|tool| tool.definition(self)).collect()
    }
}

/// Whether an answer without calls is the end, and which.
fn finishes(reason: &StopReason, cuts: u32) -> Option<Stop> {
    match reason {
        StopReason::EndTurn | StopReason::StopSequence | StopReason::ToolUse | StopReason::Other(_) => {
            Some(Stop::EndTurn)
        }
        StopReason::MaxTokens => (cuts > MAX_CUTS).then_some(Stop::MaxTokens),
        StopReason::Refusal => Some(Stop::Refusal),
        StopReason::PauseTurn | StopReason::ContextWindowExceeded => None,
    }
}

/// Shows an answer while it streams.
struct Live<'a> {
    sink: &'a dyn EventSink,
    subagent: &'a Option<String>,
}

impl DeltaSink for Live<'_> {
    fn delta(&mut self, delta: Delta<'_>) {
        let subagent = self.subagent.clone();
        self.sink.live(match delta {
            Delta::Text { text, .. } => LiveEvent::Text { subagent, text: text.to_string() },
            Delta::Thinking { text, .. } => LiveEvent::Thinking { subagent, text: text.to_string() },
            Delta::ToolStart { id, name, .. } => {
                LiveEvent::ToolStart { subagent, tool_use_id: id.to_string(), tool: name.to_string() }
            }
            Delta::ToolInput { json, .. } => LiveEvent::ToolInput { subagent, json: json.to_string() },
            Delta::Reset => LiveEvent::Reset { subagent },
            Delta::Notice(notice) => LiveEvent::Notice { notice: notice.clone() },
        });
    }
}
