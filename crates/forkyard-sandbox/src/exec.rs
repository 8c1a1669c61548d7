//! Commands in a sandbox: what is asked for, what streams back, how it is steered.

use std::collections::BTreeMap;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use forkyard_core::CallId;
use tokio::sync::mpsc;

use crate::Result;
use crate::guest_client::Output;

/// A command to run. `argv` is never joined into a shell string.
#[derive(Debug, Clone, Default)]
pub struct ExecRequest {
    /// With an id the guest keeps the result until it is forgotten: asking again with the same id hands over the running or
    /// finished call instead of running it twice. Without one, a lost owner ends the command.
    pub call: Option<CallId>,
    pub argv: Vec<String>,
    /// Added to the sandbox's own environment.
    pub env: BTreeMap<String, String>,
    /// Inside the sandbox; `/workspace` if None.
    pub cwd: Option<String>,
    /// Exit code 124 and `timed_out` when it passes; it is killed with all that it started.
    pub timeout: Option<Duration>,
    /// Keep stdin open for [`ExecControl::write_stdin`]; else it is empty.
    pub stdin: bool,
    pub pty: Option<PtySize>,
    /// Bytes of stdout and of stderr that are passed on, each; what comes after is read, counted and dropped.
    /// None: [`ExecRequest::DEFAULT_MAX_OUTPUT`].
    pub max_output: Option<u64>,
}

impl ExecRequest {
    /// Per stream. Enough for any log that somebody reads; a flood costs nothing beyond it.
    pub const DEFAULT_MAX_OUTPUT: u64 = 16 << 20;

    pub fn new<S: Into<String>>(argv: impl IntoIterator<Item = S>) -> Self {
        ExecRequest { argv: argv.into_iter().map(Into::into).collect(), ..Default::default() }
    }
    /// `sh -c SCRIPT`.
    pub fn shell(script: impl Into<String>) -> Self {
        ExecRequest::new(["/bin/sh".to_string(), "-c".to_string(), script.into()])
    }
    pub fn call(mut self, call: CallId) -> Self {
        self.call = Some(call);
        self
    }
    pub fn cwd(mut self, cwd: impl Into<String>) -> Self {
        self.cwd = Some(cwd.into());
        self
    }
    pub fn env(mut self, key: impl Into<String>, value: impl Into<String>) -> Self {
        self.env.insert(key.into(), value.into());
        self
    }
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PtySize {
    pub cols: u16,
    pub rows: u16,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Signal {
    Int,
    Term,
    Kill,
    Hup,
    Stop,
    Cont,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ExecEvent {
    Stdout(Bytes),
    /// Never comes from a pty, where both are one.
    Stderr(Bytes),
    /// Always the last one.
    Exit(ExecResult),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExecResult {
    /// 128 + n for a signal, 124 for our timeout.
    pub exit_code: i32,
    pub signal: Option<i32>,
    pub timed_out: bool,
    /// The kernel or the watchdog killed it for memory.
    pub oom_killed: bool,
    pub duration: Duration,
    /// Bytes that the command wrote, passed on or not.
    pub stdout_bytes: u64,
    pub stderr_bytes: u64,
    /// Output was dropped because it passed `max_output` or the spool's bound.
    pub truncated: bool,
}

/// A command under way. Dropping it does not kill a command that has a call id; one without is killed.
pub struct Exec {
    pub events: ExecEvents,
    pub control: Box<dyn ExecControl>,
}

/// What a command writes, and its end. Bounded: a reader that stops reading stops the command's output, not the orchestrator's
/// memory.
pub struct ExecEvents(Source);

enum Source {
    Guest(Box<Output>),
    Queue(mpsc::Receiver<Result<ExecEvent>>),
}

impl ExecEvents {
    /// None after the end. Nothing is lost if this is not waited for.
    pub async fn recv(&mut self) -> Option<Result<ExecEvent>> {
        match &mut self.0 {
            Source::Guest(output) => output.next().await,
            Source::Queue(queue) => queue.recv().await,
        }
    }
}

impl From<Output> for ExecEvents {
    fn from(output: Output) -> ExecEvents {
        ExecEvents(Source::Guest(Box::new(output)))
    }
}

impl From<mpsc::Receiver<Result<ExecEvent>>> for ExecEvents {
    fn from(queue: mpsc::Receiver<Result<ExecEvent>>) -> ExecEvents {
        ExecEvents(Source::Queue(queue))
    }
}

/// Steers a running command.
#[async_trait]
pub trait ExecControl: Send + Sync {
    async fn write_stdin(&self, data: Bytes) -> Result<()>;
    async fn close_stdin(&self) -> Result<()>;
    /// To the whole process group.
    async fn signal(&self, signal: Signal) -> Result<()>;
    async fn resize(&self, size: PtySize) -> Result<()>;
}

impl Exec {
    /// Reads to the end: result, stdout, stderr.
    pub async fn output(mut self) -> Result<(ExecResult, Vec<u8>, Vec<u8>)> {
        let (mut out, mut err) = (Vec::new(), Vec::new());
        while let Some(event) = self.events.recv().await {
            match event? {
                ExecEvent::Stdout(b) => out.extend_from_slice(&b),
                ExecEvent::Stderr(b) => err.extend_from_slice(&b),
                ExecEvent::Exit(r) => return Ok((r, out, err)),
            }
        }
        Err(crate::SandboxError::new(crate::ErrorKind::Unavailable, "the sandbox went away during a command"))
    }
}
