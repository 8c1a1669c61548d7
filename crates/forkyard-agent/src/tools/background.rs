//! Commands that go on while the agent does: their output is kept in bounds, and a later attempt takes them over.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use forkyard_core::CallId;
use forkyard_sandbox::{Exec, ExecControl, ExecEvent, ExecEvents, ExecRequest, ExecResult, Sandbox, Signal};

use super::{Call, Failure, FileChange, MAX_RESULT_BYTES, Output, Tool, definition};
use crate::inference::ToolDef;
use crate::session::Session;
use crate::text::HeadTail;

/// Background commands of one agent.
const MAX_BACKGROUND: usize = 32;

#[derive(Default)]
pub(crate) struct Background {
    tasks: Mutex<BTreeMap<String, Arc<BackgroundTask>>>,
}

struct BackgroundTask {
    command: String,
    state: Arc<Mutex<State>>,
    control: Box<dyn ExecControl>,
    reader: tokio::task::AbortHandle,
}

struct State {
    /// Since it was last asked for.
    fresh: HeadTail,
    ended: Option<Result<ExecResult, String>>,
}

impl Drop for BackgroundTask {
    fn drop(&mut self) {
        self.reader.abort();
    }
}

fn name_of(call: &CallId) -> String {
    format!("bash_{call}")
}

impl Background {
    /// Follows a command. The same call twice is the same command.
    pub fn add(&self, call: CallId, command: &str, exec: Exec) -> String {
        let name = name_of(&call);
        let state = Arc::new(Mutex::new(State { fresh: HeadTail::new(MAX_RESULT_BYTES), ended: None }));
        let Exec { events, control } = exec;
        let reader = tokio::spawn(follow(events, state.clone())).abort_handle();
        let task = Arc::new(BackgroundTask { command: command.to_string(), state, control, reader });
        let mut tasks = lock(&self.tasks);
        if tasks.len() >= MAX_BACKGROUND {
            // The oldest that has ended makes room; its output was there to be read.
            let ended =
                tasks.iter().find(|(_, t)| lock(&t.state).ended.is_some()).map(|(name, _)| name.clone());
            if let Some(name) = ended {
                tasks.remove(&name);
            }
        }
        tasks.insert(name.clone(), task);
        name
    }

    pub fn is_full(&self) -> bool {
        let tasks = lock(&self.tasks);
        tasks.len() >= MAX_BACKGROUND && tasks.values().all(|t| lock(&t.state).ended.is_none())
    }

    /// Takes over a command of an earlier attempt. The guest has the command itself: only the id matters.
    pub async fn follow_again(&self, sandbox: &dyn Sandbox, call: CallId, command: &str) {
        match sandbox.exec(ExecRequest::new(["true"]).call(call.clone())).await {
            Ok(exec) => {
                self.add(call, command, exec);
            }
            Err(e) => tracing::warn!(%call, "a background command was not taken over: {e}"),
        }
    }

    /// Something may change files at any time.
    pub fn any_running(&self) -> bool {
        lock(&self.tasks).values().any(|t| lock(&t.state).ended.is_none())
    }

    fn find(&self, name: &str) -> Result<Arc<BackgroundTask>, Failure> {
        let tasks = lock(&self.tasks);
        tasks.get(name).cloned().ok_or_else(|| {
            let known: Vec<&str> = tasks.keys().map(String::as_str).collect();
            let known = if known.is_empty() { "none".to_string() } else { known.join(", ") };
            Failure::result(format!("no background command is called {name:?}; there are: {known}"))
        })
    }
}

/// Keeps reading, so that the command never waits for a reader.
async fn follow(mut events: ExecEvents, state: Arc<Mutex<State>>) {
    loop {
        let ended = match events.recv().await {
            Some(Ok(ExecEvent::Stdout(data) | ExecEvent::Stderr(data))) => {
                lock(&state).fresh.push(&data);
                continue;
            }
            Some(Ok(ExecEvent::Exit(result))) => Ok(result),
            Some(Err(e)) => Err(e.to_string()),
            None => Err("its output ended unexpectedly".to_string()),
        };
        lock(&state).ended = Some(ended);
        return;
    }
}

/// A poisoned lock only means that another task panicked between two plain assignments.
fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

pub(crate) struct BashOutput;

#[async_trait]
impl Tool for BashOutput {
    fn definition(&self, _: &Session) -> ToolDef {
        definition(
            "BashOutput",
            "Gives what a background command wrote since it was last asked for, and whether it has ended.",
            &[("bash_id", "string", true, "The name that Bash gave.")],
        )
    }

    async fn run(&self, call: &Call<'_>, _: Option<FileChange>) -> Result<Output, Failure> {
        let task = call.session.background.find(call.text("bash_id")?)?;
        let mut state = lock(&task.state);
        let fresh = std::mem::replace(&mut state.fresh, HeadTail::new(MAX_RESULT_BYTES));
        let text = fresh.text(0);
        let status = match &state.ended {
            None => "running".to_string(),
            Some(Ok(result)) => format!("ended with exit code {}", result.exit_code),
            Some(Err(e)) => format!("lost: {e}"),
        };
        let text = if fresh.total() == 0 { "(no new output)".to_string() } else { text };
        Ok(Output::text(format!("[{status}] {}\n{text}", crate::text::cut(&task.command, 200))))
    }
}

pub(crate) struct KillBash;

#[async_trait]
impl Tool for KillBash {
    fn definition(&self, _: &Session) -> ToolDef {
        definition(
            "KillBash",
            "Ends a background command and everything that it started.",
            &[("bash_id", "string", true, "The name that Bash gave.")],
        )
    }

    async fn run(&self, call: &Call<'_>, _: Option<FileChange>) -> Result<Output, Failure> {
        let name = call.text("bash_id")?;
        let task = call.session.background.find(name)?;
        if lock(&task.state).ended.is_some() {
            return Ok(Output::text(format!("{name} had ended already.")));
        }
        task.control.signal(Signal::Kill).await?;
        Ok(Output::text(format!("{name} was killed.")))
    }
}
