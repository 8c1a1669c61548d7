//! The public entry: one attempt of one agent.

use std::sync::Arc;
use std::time::Instant;

use forkyard_core::Millis;
use forkyard_core::policy::PolicyConfig;
use forkyard_sandbox::Sandbox;
use tokio::sync::OnceCell;
use tokio_util::sync::CancellationToken;
use tracing::Instrument;

use crate::clock;
use crate::config::{AgentConfig, Continuity};
use crate::conversation::{Conversation, Totals, live, live_positions, replay};
use crate::event::{AgentEvent, Completed, JournalEntry, Resumed, Started};
use crate::inference::Model;
use crate::intercept::{Hook, Interceptor, ReadCache};
use crate::log::ForkLog;
use crate::outcome::{AgentError, AgentOutcome, Stop};
use crate::ports::{Checkpoints, EventSink, Inbox, Journal, LiveEvent};
use crate::session::{Halt, Held, Recorder, Session, Who, known_calls, opening};
use crate::tools::{Background, Skills};

/// One agent of one fork, under one attempt. Everything it needs from outside is here; everything it does is in the journal.
pub struct Agent {
    pub model: Arc<dyn Model>,
    pub sandbox: Arc<dyn Sandbox>,
    pub journal: Arc<dyn Journal>,
    pub inbox: Arc<dyn Inbox>,
    pub checkpoints: Option<Arc<dyn Checkpoints>>,
    pub events: Arc<dyn EventSink>,
    /// From the user, never from the repository.
    pub policy: PolicyConfig,
    /// After the user's hooks, in this order.
    pub interceptors: Vec<Arc<dyn Interceptor>>,
    pub config: AgentConfig,
}

impl Agent {
    /// Starts the task, or goes on with it if the journal has it. Returns when the agent has ended; a journal that says so
    /// already gives the same outcome again, unless there is a new message. `cancel` ends this attempt, not the commands that
    /// run in the sandbox: the next attempt takes them over.
    pub async fn run(self, cancel: CancellationToken) -> Result<AgentOutcome, AgentError> {
        let started = Instant::now();
        let entries = self.journal.read().await?;
        let mut totals = Totals::default();
        entries.iter().for_each(|entry| totals.apply(&entry.event));
        let log = self.open_log();
        let recorder =
            Recorder::new(self.journal.clone(), self.events.clone(), totals, entries.len() as u64, log);
        let hooks = self.config.hooks.iter().map(|hook| -> Arc<dyn Interceptor> {
            Arc::new(Hook {
                config: hook.clone(),
                session_id: format!("{}/{}", self.config.run, self.config.fork),
                cwd: self.policy.workspace.clone(),
            })
        });
        let interceptors = hooks.chain(self.interceptors.iter().cloned()).collect();
        let session = Session {
            model: self.model,
            sandbox: self.sandbox,
            inbox: self.inbox,
            checkpoints: self.checkpoints,
            held: tokio::sync::Mutex::default(),
            sink: self.events,
            policy: self.policy,
            interceptors,
            recorder,
            background: Background::default(),
            cache: ReadCache::default(),
            skills: Skills::load(self.config.skills_dir.clone()).map_err(AgentError::Config)?,
            config: self.config,
            cancel,
            earlier: Vec::new(),
            overheard: std::sync::Mutex::default(),
            shell: OnceCell::new(),
        };
        let span = tracing::info_span!(
            "invoke_agent",
            otel.name = "invoke_agent forkyard",
            gen_ai.operation.name = "invoke_agent",
            gen_ai.agent.name = "forkyard",
            gen_ai.request.model = %session.config.model,
            gen_ai.conversation.id = %format!("{}/{}", session.config.run, session.config.fork),
        );
        let run = Run { session, started };
        run.drive(entries).instrument(span).await
    }

    /// No log is no reason not to work.
    fn open_log(&self) -> Option<ForkLog> {
        let dir = self.config.log_dir.as_ref()?;
        match ForkLog::open(dir, self.config.fork, clock::now()) {
            Ok((log, _)) => Some(log),
            Err(e) => {
                tracing::warn!("no log file in {}: {e}", dir.display());
                None
            }
        }
    }
}

struct Run {
    session: Session,
    started: Instant,
}

impl Run {
    async fn drive(mut self, entries: Vec<JournalEntry>) -> Result<AgentOutcome, AgentError> {
        let who = Who { subagent: None, max_turns: self.session.config.max_turns };
        let mut conversation = self.begin(&who, entries).await?;
        let heart = async {
            let mut beat = tokio::time::interval(self.session.config.heartbeat);
            let mut events = 0;
            loop {
                beat.tick().await;
                events = self.session.recorder.event_count().unwrap_or(events);
                self.session.sink.live(LiveEvent::Heartbeat {
                    timestamp: clock::now(),
                    status: "running".to_string(),
                    event_count: events,
                });
            }
        };
        tokio::select! {
            result = self.work(&who, &mut conversation) => result,
            () = heart => Err(AgentError::Cancelled),
        }
    }

    /// The conversation so far; records that this attempt has it.
    async fn begin(&mut self, who: &Who, entries: Vec<JournalEntry>) -> Result<Conversation, AgentError> {
        let session = &mut self.session;
        let mut entries = entries;
        let config = &session.config;
        if entries.is_empty() {
            let tools: Vec<&str> = session.offered(who).collect();
            let [system, first] =
                opening(config, session.sandbox.id().as_str(), &session.policy.workspace, &tools)?;
            let started = AgentEvent::Started(Started {
                sandbox_id: session.sandbox.id().clone(),
                fork_num: config.fork,
                attempt: config.attempt,
                model: config.model.clone(),
                repo_url: config.repo.clone(),
                branch: config.branch.clone(),
                max_turns: config.max_turns,
                tools: tools.iter().map(|t| (*t).to_string()).collect(),
            });
            let mut conversation = Conversation::default();
            for event in [started, system, first] {
                conversation.apply(&event);
                session.record(who, event).await;
            }
            session.recorder.flush().await?;
            return Ok(conversation);
        }
        let resumed = resumed(config, session.sandbox.id().clone(), &entries);
        // The opening stays, also if nothing of the work does: it was not the sandbox's to lose.
        let event = AgentEvent::Resumed(resumed);
        entries.push(JournalEntry { at: clock::now(), subagent: None, event: event.clone() });
        *session.held.get_mut() = Held::of(&entries);
        let held = live(&entries);
        let conversation = replay(&held, None);
        if matches!(config.continuity, Continuity::Same) {
            session.take_over(known_calls(&held)).await?;
        }
        let earlier = held.into_iter().filter(|e| e.subagent.is_some()).cloned().collect();
        session.earlier = earlier;
        if conversation.ended.is_none() {
            session.record(who, event).await;
            session.recorder.flush().await?;
        }
        Ok(conversation)
    }

    async fn work(&self, who: &Who, conversation: &mut Conversation) -> Result<AgentOutcome, AgentError> {
        let session = &self.session;
        if let Some((completed, _)) = conversation.ended.clone() {
            session.deliver(who, conversation).await.map_err(error_of)?;
            if conversation.said.is_empty() {
                return Ok(self.outcome(&completed).await);
            }
        }
        let stop = match session.converse(who, conversation).await {
            Ok(stop) | Err(Halt::Stop(stop)) => stop,
            Err(Halt::Error(e)) => return Err(self.ended_by(who, conversation.turn, e).await),
        };
        let completed = self.complete(who, conversation, stop).await?;
        Ok(self.outcome(&completed).await)
    }

    /// A stop in order is recorded; whoever lost the fork or the journal says nothing.
    async fn ended_by(&self, who: &Who, turn: u32, e: AgentError) -> AgentError {
        match &e {
            AgentError::Cancelled => {
                let event = AgentEvent::Shutdown { turn, reason: e.to_string() };
                self.session.record(who, event).await;
                if let Err(e) = self.session.recorder.flush().await {
                    tracing::debug!("the shutdown was not recorded: {e}");
                }
            }
            AgentError::SandboxLost(lost) => {
                let event = AgentEvent::Error { turn, error: format!("the sandbox is lost: {lost}") };
                self.session.record(who, event).await;
                if let Err(e) = self.session.recorder.flush().await {
                    tracing::debug!("the loss was not recorded: {e}");
                }
            }
            AgentError::Stale | AgentError::Journal(_) | AgentError::Model(_) | AgentError::Config(_) => {}
        }
        e
    }

    async fn complete(
        &self,
        who: &Who,
        conversation: &mut Conversation,
        stop: Stop,
    ) -> Result<Completed, AgentError> {
        let totals = self.session.recorder.totals().await;
        let completed = Completed {
            success: stop.is_success(),
            stop_reason: stop,
            turns: conversation.turn,
            tool_calls: totals.tool_calls,
            errors: totals.errors,
            cost_usd: totals.cost.as_dollars(),
            usage: totals.usage,
            final_output: conversation.final_text.clone(),
            branch_name: self.session.config.branch.clone(),
            duration_ms: u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX),
        };
        let event = if completed.success {
            AgentEvent::Completed(completed.clone())
        } else {
            AgentEvent::Failed(completed.clone())
        };
        conversation.apply(&event);
        self.session.record(who, event).await;
        if self.session.config.lingers && stop.is_success() {
            self.session.record(who, AgentEvent::Waiting { turn: conversation.turn }).await;
        }
        self.session.recorder.flush().await?;
        Ok(completed)
    }

    async fn outcome(&self, completed: &Completed) -> AgentOutcome {
        let totals = self.session.recorder.totals().await;
        AgentOutcome {
            success: completed.success,
            stop: completed.stop_reason,
            final_response: completed.final_output.clone(),
            turns: completed.turns,
            tool_calls: totals.tool_calls,
            errors: totals.errors,
            denied: totals.denied,
            usage: totals.usage,
            cost: totals.cost,
            duration: Millis(u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX)),
        }
    }
}

/// Taking in messages is never stopped by a limit.
fn error_of(halt: Halt) -> AgentError {
    match halt {
        Halt::Error(e) => e,
        Halt::Stop(_) => AgentError::Cancelled,
    }
}

/// What another attempt says when it goes on.
fn resumed(config: &AgentConfig, sandbox_id: forkyard_core::SandboxId, entries: &[JournalEntry]) -> Resumed {
    let attempt = config.attempt;
    match &config.continuity {
        Continuity::Same => Resumed { sandbox_id, attempt, rewound_to: None, message: None },
        Continuity::Replaced { position, reason } => {
            // The opening is not the sandbox's to lose.
            let opening = entries
                .iter()
                .position(|e| matches!(e.event, AgentEvent::UserMessage { .. }) && e.subagent.is_none())
                .map_or(0, |at| at as u64 + 1);
            let position = (*position).max(opening);
            let message = loss(entries, position, reason);
            Resumed { sandbox_id, attempt, rewound_to: Some(position), message: Some(message) }
        }
    }
}

/// Calls whose effects are named after a loss.
const MAX_NAMED_LOSSES: usize = 30;

/// Names what was lost with a sandbox: the model has to know that it did things which are not there any more.
fn loss(entries: &[JournalEntry], position: u64, reason: &str) -> String {
    let after = live_positions(entries).into_iter().filter(|(p, _)| *p >= position).map(|(_, entry)| entry);
    let mut lines: Vec<String> = after
        .filter_map(|e| {
            if let AgentEvent::FileEdited(f) = &e.event {
                return Some(format!("- changes of {}", f.file_path));
            }
            let AgentEvent::ToolUse(t) = &e.event else { return None };
            let command = t.input.get("command").and_then(|c| c.as_str()).filter(|_| t.tool == "Bash")?;
            Some(format!("- the command `{}`", crate::text::cut(command, 200)))
        })
        .collect();
    let total = lines.len();
    lines.truncate(MAX_NAMED_LOSSES);
    if total > MAX_NAMED_LOSSES {
        lines.push(format!("- and {} more", total - MAX_NAMED_LOSSES));
    }
    let what = if lines.is_empty() {
        "No finished work was lost.".to_string()
    } else {
        format!("What was done after the last checkpoint is not in its files:\n{}", lines.join("\n"))
    };
    format!(
        "The sandbox was lost ({reason}). You go on in a new one, made from the last checkpoint; background commands do not run \
         any more. {what}\nLook at the files before you go on."
    )
}
