//! What one run of an agent works with, shared by the fork's own conversation and its subagents'.

mod calls;
mod checkpoints;
mod compaction;
mod handover;
mod links;
mod prompt;
mod recorder;
pub(crate) mod subagent;
mod turns;

use std::future::Future;
use std::sync::{Arc, Mutex};

use forkyard_core::policy::PolicyConfig;
use forkyard_sandbox::{ErrorKind, Sandbox, SandboxError};
use tokio::sync::OnceCell;
use tokio_util::sync::CancellationToken;

pub(crate) use checkpoints::Held;
pub(crate) use handover::known_calls;
pub use prompt::check_template;
pub(crate) use prompt::opening;
pub(crate) use recorder::Recorder;

use crate::config::AgentConfig;
use crate::event::{AgentEvent, JournalEntry};
use crate::inference::Model;
use crate::intercept::{Interceptor, ReadCache};
use crate::outcome::{AgentError, Stop};
use crate::ports::{Checkpoints, EventSink, Inbox, JournalError, MessageKind};
use crate::tools::{Background, Failure, Skills};

/// Why the work stops here, whoever is at it.
#[derive(Debug)]
pub(crate) enum Halt {
    /// The agent ends with an outcome.
    Stop(Stop),
    /// This attempt ends without one.
    Error(AgentError),
}

impl From<AgentError> for Halt {
    fn from(e: AgentError) -> Halt {
        Halt::Error(e)
    }
}

impl From<JournalError> for Halt {
    fn from(e: JournalError) -> Halt {
        Halt::Error(e.into())
    }
}

/// Whose conversation it is.
#[derive(Debug, Clone)]
pub(crate) struct Who {
    /// None is the fork's own agent.
    pub subagent: Option<String>,
    pub max_turns: u32,
}

pub(crate) struct Session {
    pub model: Arc<dyn Model>,
    pub sandbox: Arc<dyn Sandbox>,
    pub inbox: Arc<dyn Inbox>,
    pub checkpoints: Option<Arc<dyn Checkpoints>>,
    pub held: tokio::sync::Mutex<Held>,
    pub sink: Arc<dyn EventSink>,
    pub policy: PolicyConfig,
    pub interceptors: Vec<Arc<dyn Interceptor>>,
    pub config: AgentConfig,
    pub recorder: Recorder,
    pub background: Background,
    pub cache: ReadCache,
    pub skills: Skills,
    pub cancel: CancellationToken,
    /// Entries of earlier attempts that still hold: unfinished subagents go on from them.
    pub earlier: Vec<JournalEntry>,
    /// Messages that a subagent was given: its parent hears of them, too.
    pub overheard: Mutex<Vec<AgentEvent>>,
    pub shell: OnceCell<&'static str>,
}

impl Session {
    /// Waits, but not beyond the deadline and the caller's patience. What is cut off must be safe to drop: an append to the
    /// journal is not.
    pub async fn bounded<T>(&self, work: impl Future<Output = T>) -> Result<T, Halt> {
        let deadline = async {
            match self.config.deadline {
                Some(deadline) => tokio::time::sleep_until(deadline).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            () = self.cancel.cancelled() => Err(Halt::Error(AgentError::Cancelled)),
            () = deadline => Err(Halt::Stop(Stop::Timeout)),
            value = work => Ok(value),
        }
    }

    /// Returns once somebody has interrupted. The message stays in the inbox until it is delivered.
    pub async fn interrupted(&self) -> Result<(), JournalError> {
        loop {
            self.inbox.wait().await;
            if self.inbox.pending().await?.iter().any(|m| m.kind == MessageKind::Interrupt) {
                return Ok(());
            }
        }
    }

    /// A path as the model writes it, made absolute.
    pub fn absolute(&self, path: &str) -> String {
        match path.strip_prefix('~') {
            Some(rest) if rest.is_empty() || rest.starts_with('/') => format!("{}{rest}", self.policy.home),
            _ if path.starts_with('/') => path.to_string(),
            _ => format!("{}/{path}", self.policy.workspace),
        }
    }

    /// bash where there is one, else sh. Looked up once.
    pub async fn shell(&self) -> Result<&'static str, Failure> {
        let look = async || {
            for shell in ["/bin/bash", "/usr/bin/bash"] {
                match self.sandbox.stat(shell).await.map_err(Failure::from) {
                    Ok(_) => return Ok(shell),
                    Err(Failure::Result(_)) => {}
                    Err(halt @ Failure::Halt(_)) => return Err(halt),
                }
            }
            Ok("/bin/sh")
        };
        self.shell.get_or_try_init(look).await.copied()
    }

    /// A call failed: by itself, or because there is no sandbox any more? Errors do not always tell: a file of a sandbox that is
    /// gone is not found, either.
    pub async fn check_alive(&self) -> Result<(), Halt> {
        let lost = match self.sandbox.health().await {
            Ok(health) if health.healthy => return Ok(()),
            Ok(health) => SandboxError::new(ErrorKind::Unavailable, health.detail),
            Err(e) if e.kind == ErrorKind::Stale => return Err(AgentError::Stale.into()),
            Err(e) => e,
        };
        Err(AgentError::SandboxLost(lost).into())
    }

    pub async fn record(&self, who: &Who, event: AgentEvent) {
        self.recorder.push(who.subagent.clone(), event, &[]).await;
    }
}
