//! The conversation of a subagent, within one call of its parent.

use forkyard_core::Usd;

use super::{Halt, Who, prompt};
use crate::conversation::replay;
use crate::event::AgentEvent;
use crate::outcome::Stop;
use crate::tools::{Call, Failure, MAX_SUBAGENT_TURNS, Output};

pub(crate) async fn run(call: &Call<'_>, description: &str, task: &str) -> Result<Output, Failure> {
    let session = call.session;
    // The call's own id: also where a provider repeats the ids of its calls.
    let who = Who { subagent: Some(call.id.to_string()), max_turns: MAX_SUBAGENT_TURNS };
    let mut conversation = replay(&session.earlier.iter().collect::<Vec<_>>(), who.subagent.as_deref());
    if conversation.messages.is_empty() {
        let invoked = AgentEvent::SubagentInvoked {
            turn: call.turn,
            tool_use_id: call.tool_use_id.to_string(),
            description: description.to_string(),
            prompt: task.to_string(),
        };
        session.record(call.who, invoked).await;
        for event in prompt::subagent_opening(&session.policy.workspace, task) {
            conversation.apply(&event);
            session.record(&who, event).await;
        }
        session.recorder.flush().await.map_err(Halt::from)?;
    }
    let cost_before = session.recorder.totals().await.cost;
    // The loop of a subagent is the loop of its parent: the future has to be on the heap to contain itself.
    let stop = Box::pin(session.converse(&who, &mut conversation)).await?;
    let cost: Usd = session.recorder.totals().await.cost.saturating_sub(cost_before);
    let mut output = match stop {
        Stop::EndTurn | Stop::MaxTokens => Output::text(if conversation.final_text.is_empty() {
            "(the subagent ended without a report)".to_string()
        } else {
            conversation.final_text.clone()
        }),
        Stop::MaxTurns | Stop::Refusal | Stop::ContextTooLong | Stop::BudgetExceeded | Stop::Timeout => {
            Output::error(format!(
                "the subagent stopped ({}). Its last words: {}",
                stop.as_str(),
                conversation.final_text
            ))
        }
    };
    output.events.push(AgentEvent::SubagentCompleted {
        turn: call.turn,
        tool_use_id: call.tool_use_id.to_string(),
        success: !output.is_error,
        turns: conversation.turn,
        cost,
    });
    Ok(output)
}
