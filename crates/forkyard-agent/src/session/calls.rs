//! The calls of one answer: judged one by one, in order; run one after the other, or together where they only read.

use std::time::Instant;

use forkyard_core::policy::{self, Decision, Rule};
use forkyard_core::{CallId, Usd};
use futures::StreamExt;
use serde_json::{Map, Value};
use tracing::Instrument;

use super::{Halt, Session, Who, links};
use crate::conversation::{Conversation, OpenCall};
use crate::event::{AgentEvent, ToolCompleted, ToolUse};
use crate::inference::RawJson;
use crate::intercept::{ToolRequest, ToolResponse, Verdict};
use crate::outcome::AgentError;
use crate::ports::{InboxMessage, MAX_MESSAGE_CHARS, MessageKind};
use crate::text::shorten;
use crate::tools::{self, Call, Failure, FileChange, Output, Tool};

/// Reads of one answer that run at the same time.
const MAX_PARALLEL: usize = 8;

/// A call that is judged.
enum Judged {
    Run(Ready),
    /// It has its answer already.
    Answered {
        response: ToolResponse,
        denied_by: Option<Rule>,
        cached: bool,
        input: Value,
    },
}

struct Ready {
    index: usize,
    tool: &'static dyn Tool,
    request: ToolRequest,
    id: CallId,
    change: Option<FileChange>,
    rewritten: bool,
    /// By an earlier attempt.
    begun: bool,
}

struct Ran {
    output: Output,
    duration_ms: u64,
}

impl Session {
    /// Runs every call that has no result yet. True if files may have changed.
    pub(super) async fn run_calls(&self, who: &Who, conversation: &mut Conversation) -> Result<bool, Halt> {
        let mut changed = false;
        let mut forget: Vec<CallId> = Vec::new();
        let mut next = 0;
        while next < conversation.calls.len() {
            let batch = batch(&conversation.calls, next);
            let mut ready = Vec::new();
            let mut answered = Vec::new();
            for index in batch.clone() {
                if conversation.calls[index].result.is_some() {
                    continue;
                }
                match self.judge(who, conversation, index).await? {
                    Judged::Run(call) => ready.push(call),
                    Judged::Answered { response, denied_by, cached, input } => {
                        let call = &conversation.calls[index];
                        let output =
                            Output { parts: response.parts, is_error: response.is_error, ..Output::text("") };
                        let done = completed(conversation.turn, call, input, &output, 0, denied_by, cached);
                        answered.push((index, done));
                    }
                }
            }
            for call in ready.iter().filter(|c| !c.begun) {
                let event = AgentEvent::ToolUse(ToolUse {
                    turn: conversation.turn,
                    tool: call.request.tool.clone(),
                    tool_use_id: call.request.tool_use_id.clone(),
                    input: shorten(&Value::Object(call.request.input.clone())),
                    rewritten: call
                        .rewritten
                        .then(|| RawJson::from(&Value::Object(call.request.input.clone()))),
                    plan: call.change.as_ref().map(|c| c.plan.clone()),
                });
                conversation.apply(&event);
                self.record(who, event).await;
            }
            if !ready.is_empty() {
                // From here on it may have happened.
                self.recorder.flush().await?;
                self.forget(&mut forget).await;
            }
            let turn = conversation.turn;
            let ran: Vec<(Ready, Result<Ran, Halt>)> = futures::stream::iter(ready)
                .map(|call| async move {
                    let ran = self.execute(who, turn, &call).await;
                    (call, ran)
                })
                .buffered(MAX_PARALLEL)
                .collect()
                .await;
            let mut events: Vec<(usize, AgentEvent)> =
                answered.into_iter().map(|(i, done)| (i, AgentEvent::ToolCompleted(done))).collect();
            let mut halt = None;
            for (call, ran) in ran {
                let ran = match ran {
                    Ok(ran) => ran,
                    Err(e) => {
                        halt = halt.or(Some(e));
                        continue;
                    }
                };
                changed |= !call.tool.only_reads();
                if ran.output.forget {
                    forget.push(call.id.clone());
                }
                let input = shorten(&Value::Object(call.request.input.clone()));
                let open = &conversation.calls[call.index];
                let done = completed(turn, open, input, &ran.output, ran.duration_ms, None, false);
                events.extend(ran.output.events.into_iter().map(|e| (call.index, e)));
                events.push((call.index, AgentEvent::ToolCompleted(done)));
            }
            events.sort_by_key(|(index, _)| *index);
            let overheard = std::mem::take(&mut *self.overheard());
            overheard.iter().for_each(|event| conversation.apply(event));
            for (_, event) in events {
                conversation.apply(&event);
                self.record(who, event).await;
            }
            if let Some(halt) = halt {
                self.recorder.flush().await?;
                return Err(halt);
            }
            next = batch.end;
        }
        self.recorder.flush().await?;
        self.forget(&mut forget).await;
        Ok(changed)
    }

    fn overheard(&self) -> std::sync::MutexGuard<'_, Vec<AgentEvent>> {
        self.overheard.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// The journal has the results: the guest may let go of them. If it can't be told, it only keeps them longer.
    pub(super) async fn forget(&self, calls: &mut Vec<CallId>) {
        for call in calls.drain(..) {
            if let Err(e) = self.sandbox.forget(&call).await {
                tracing::debug!(%call, "a finished call was not forgotten: {e}");
            }
        }
    }

    async fn judge(&self, who: &Who, conversation: &mut Conversation, index: usize) -> Result<Judged, Halt> {
        let turn = conversation.turn;
        let open = conversation.calls[index].clone();
        let id = call_id(who, turn, index, &open.id);
        let error = |text: String, input: Value| Judged::Answered {
            response: ToolResponse { is_error: true, ..ToolResponse::text(text) },
            denied_by: None,
            cached: false,
            input,
        };
        let raw = open.begun.as_ref().and_then(|b| b.rewritten.as_ref()).unwrap_or(&open.input);
        let input = match raw.object() {
            Ok(input) => input,
            Err(e) => {
                let text = format!(
                    "the input is not valid JSON ({e}); the answer may have been cut. Nothing was run."
                );
                return Ok(error(text, Value::String(crate::text::cut(open.input.as_str(), 1000))));
            }
        };
        let shown = || shorten(&Value::Object(input.clone()));
        let offered: Vec<&str> = self.offered(who).collect();
        let Some(tool) = tools::find(&open.name).filter(|_| offered.contains(&open.name.as_str())) else {
            // Policy's word comes first for a tool that exists and is not offered.
            let denial = self.judge_by_policy(&open.name, &input, index).await?;
            return Ok(match (tools::find(&open.name), denial) {
                (Some(_), Some((rule, reason))) => denied(rule, &reason, shown()),
                _ => error(
                    format!("there is no tool {:?}; there are: {}", open.name, offered.join(", ")),
                    shown(),
                ),
            });
        };
        let mut request = ToolRequest {
            tool: open.name.clone(),
            input,
            tool_use_id: open.id.clone(),
            turn,
            subagent: who.subagent.clone(),
        };
        if let Some(begun) = &open.begun {
            // It was judged when it began; now only its result is asked for.
            return self.take_over_call(who, tool, request, id, index, turn, begun).await;
        }
        if let Some((rule, reason)) = self.judge_by_policy(&request.tool, &request.input, index).await? {
            return Ok(denied(rule, &reason, shorten(&Value::Object(request.input))));
        }
        let mut rewritten = false;
        for interceptor in &self.interceptors {
            match self.bounded(interceptor.before(&request)).await? {
                Verdict::Allow => {}
                Verdict::Deny(reason) => {
                    return Ok(denied(Rule::Interceptor, &reason, shorten(&Value::Object(request.input))));
                }
                Verdict::Rewrite(input) => {
                    request.input = input;
                    rewritten = true;
                    if let Some((rule, reason)) =
                        self.judge_by_policy(&request.tool, &request.input, index).await?
                    {
                        return Ok(denied(rule, &reason, shorten(&Value::Object(request.input))));
                    }
                }
                Verdict::Respond(response) => {
                    let input = shorten(&Value::Object(request.input));
                    return Ok(Judged::Answered { response, denied_by: None, cached: false, input });
                }
            }
        }
        self.deliver(who, conversation).await?;
        if conversation.held {
            let text = "not run: a message arrived before this call began; it follows. Decide again.";
            return Ok(error(text.to_string(), shorten(&Value::Object(request.input))));
        }
        if tool.only_reads()
            && !self.background.any_running()
            && let Some(response) = self.cache.get(&request.tool, &request.input)
        {
            let input = shorten(&Value::Object(request.input));
            return Ok(Judged::Answered { response, denied_by: None, cached: true, input });
        }
        let call = call(self, who, turn, &request, &id);
        let change = match self.bounded(tool.prepare(&call)).await? {
            Ok(change) => change,
            Err(Failure::Result(text)) => {
                self.check_alive().await?;
                return Ok(error(text, shorten(&Value::Object(request.input))));
            }
            Err(Failure::Halt(halt)) => return Err(halt),
        };
        Ok(Judged::Run(Ready { index, tool, request, id, change, rewritten, begun: false }))
    }

    /// A call that an earlier attempt had begun: the sandbox knows a command by its id; a file tells by its content whether it
    /// was written.
    #[allow(clippy::too_many_arguments, reason = "one call in all its parts")]
    async fn take_over_call(
        &self,
        who: &Who,
        tool: &'static dyn Tool,
        request: ToolRequest,
        id: CallId,
        index: usize,
        turn: u32,
        begun: &ToolUse,
    ) -> Result<Judged, Halt> {
        let answered = |text: String, is_error: bool, input: &Map<String, Value>| Judged::Answered {
            response: ToolResponse { is_error, ..ToolResponse::text(text) },
            denied_by: None,
            cached: false,
            input: shorten(&Value::Object(input.clone())),
        };
        let mut change = None;
        if let Some(plan) = &begun.plan {
            let call = call(self, who, turn, &request, &id);
            let looked = async {
                let path = call.path("file_path")?;
                let now = tools::look_hash(&call, &path).await?;
                let change = if now == plan.before { tool.prepare(&call).await? } else { None };
                Ok((path, now, change))
            };
            match looked.await {
                Ok((path, now, _)) if now.as_ref() == Some(&plan.after) => {
                    return Ok(answered(format!("{path} was written."), false, &request.input));
                }
                Ok((path, now, _)) if now != plan.before => {
                    let text = format!(
                        "{path} was changed by something else while it was to be written; read it again"
                    );
                    return Ok(answered(text, true, &request.input));
                }
                Ok((_, _, found)) => change = found,
                Err(Failure::Result(text)) => {
                    self.check_alive().await?;
                    return Ok(answered(text, true, &request.input));
                }
                Err(Failure::Halt(halt)) => return Err(halt),
            }
        }
        Ok(Judged::Run(Ready { index, tool, request, id, change, rewritten: false, begun: true }))
    }

    async fn judge_by_policy(
        &self,
        tool: &str,
        input: &Map<String, Value>,
        index: usize,
    ) -> Result<Option<(Rule, String)>, Halt> {
        let number_in_turn = u32::try_from(index + 1).unwrap_or(u32::MAX);
        // What is refused by its number need not be looked at.
        let resolved = match number_in_turn > self.policy.max_calls_per_turn {
            true => None,
            false => links::resolve(self, tool, input).await?,
        };
        let input = Value::Object(input.clone());
        let call =
            policy::ToolCall { tool, input: &input, number_in_turn, resolved_path: resolved.as_deref() };
        Ok(match policy::evaluate(&self.policy, &call) {
            Decision::Allow => None,
            Decision::Deny { rule, reason } => Some((rule, reason)),
        })
    }

    async fn execute(&self, who: &Who, turn: u32, ready: &Ready) -> Result<Ran, Halt> {
        let started = Instant::now();
        let call = call(self, who, turn, &ready.request, &ready.id);
        if !ready.tool.only_reads() {
            self.cache.clear();
        }
        // Contents stay out: an input may hold secrets.
        let span = tracing::info_span!(
            "execute_tool",
            otel.name = %format!("execute_tool {}", ready.request.tool),
            gen_ai.operation.name = "execute_tool",
            gen_ai.tool.name = %ready.request.tool,
            gen_ai.tool.call.id = %ready.request.tool_use_id,
        );
        let output = match ready.tool.run(&call, ready.change.clone()).instrument(span).await {
            Ok(output) => output,
            Err(Failure::Result(text)) => {
                self.check_alive().await?;
                Output::error(text)
            }
            Err(Failure::Halt(halt)) => return Err(halt),
        };
        let mut response = ToolResponse { parts: output.parts, is_error: output.is_error };
        if !ready.tool.only_reads() {
            self.cache.clear();
        } else if !self.background.any_running() {
            self.cache.put(&ready.request.tool, &ready.request.input, &response);
        }
        for interceptor in &self.interceptors {
            self.bounded(interceptor.after(&ready.request, &mut response)).await?;
        }
        let duration_ms = u64::try_from(started.elapsed().as_millis()).unwrap_or(u64::MAX);
        let output = Output { parts: response.parts, is_error: response.is_error, ..output };
        Ok(Ran { output, duration_ms })
    }

    /// Takes in what waits in the inbox, durably: a message that was given once must not be given again.
    pub(crate) async fn deliver(&self, who: &Who, conversation: &mut Conversation) -> Result<(), Halt> {
        self.deliver_after(who, conversation, Usd::ZERO).await
    }

    /// The same after a request that was broken off: the interrupt says what it cost.
    pub(super) async fn deliver_after(
        &self,
        who: &Who,
        conversation: &mut Conversation,
        mut cost: Usd,
    ) -> Result<(), Halt> {
        let pending = self.inbox.pending().await?;
        if pending.is_empty() {
            return Ok(());
        }
        for InboxMessage { id, kind, source, priority, content, .. } in InboxMessage::in_order(pending) {
            let content = clean(&content);
            if kind == MessageKind::Interrupt {
                let cost = std::mem::take(&mut cost);
                let event = AgentEvent::Interrupted { turn: conversation.turn, tool_use_id: None, cost };
                self.record(who, event).await;
            }
            let turn = conversation.turn;
            let event = AgentEvent::MessageInjected { message_id: id, kind, source, priority, content, turn };
            conversation.apply(&event);
            self.recorder.push(who.subagent.clone(), event.clone(), &[id]).await;
            if who.subagent.is_some() {
                // The parent hears of it when it goes on.
                self.recorder.push(None, event.clone(), &[]).await;
                self.overheard().push(event);
            }
        }
        self.recorder.flush().await?;
        Ok(())
    }
}

/// Control characters could forge the frame around a message.
fn clean(content: &str) -> String {
    content.chars().filter(|c| !c.is_control() || matches!(c, '\n' | '\t')).take(MAX_MESSAGE_CHARS).collect()
}

/// From `start`: neighbours that only read, or one call.
fn batch(calls: &[OpenCall], start: usize) -> std::ops::Range<usize> {
    let reads = |call: &OpenCall| tools::find(&call.name).is_some_and(|t| t.only_reads());
    let length = calls[start..].iter().take_while(|c| reads(c)).count();
    start..start + length.max(1)
}

/// The same for every attempt, and unique in the sandbox also where a provider repeats the ids of its calls.
pub(super) fn call_id(who: &Who, turn: u32, index: usize, id: &str) -> CallId {
    CallId::from_text(&format!("{}.{turn}.{index}.{id}", who.subagent.as_deref().unwrap_or("main")))
}

fn call<'a>(
    session: &'a Session,
    who: &'a Who,
    turn: u32,
    request: &'a ToolRequest,
    id: &CallId,
) -> Call<'a> {
    Call { session, who, turn, tool_use_id: &request.tool_use_id, id: id.clone(), input: &request.input }
}

fn denied(rule: Rule, reason: &str, input: Value) -> Judged {
    let text = match rule {
        Rule::Interceptor => format!("Denied: {reason}"),
        rule => format!("Denied by policy ({}): {reason}", rule.as_str()),
    };
    Judged::Answered {
        response: ToolResponse { is_error: true, ..ToolResponse::text(text) },
        denied_by: Some(rule),
        cached: false,
        input,
    }
}

fn completed(
    turn: u32,
    call: &OpenCall,
    tool_input: Value,
    output: &Output,
    duration_ms: u64,
    denied_by: Option<Rule>,
    cached: bool,
) -> ToolCompleted {
    ToolCompleted {
        turn,
        tool: call.name.clone(),
        tool_use_id: call.id.clone(),
        tool_input,
        tool_response: output.parts.clone(),
        is_error: output.is_error,
        denied_by,
        cached,
        duration_ms,
    }
}

impl From<AgentError> for Failure {
    fn from(e: AgentError) -> Failure {
        Failure::Halt(e.into())
    }
}
