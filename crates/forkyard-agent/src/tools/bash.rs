//! Bash: a command in the sandbox.

use std::time::Duration;

use async_trait::async_trait;
use forkyard_core::Usd;
use forkyard_sandbox::{ErrorKind, ExecEvent, ExecRequest, ExecResult, Signal};

use super::{Call, Failure, FileChange, MAX_RESULT_BYTES, Output, Tool, definition, diagnosis};
use crate::event::AgentEvent;
use crate::inference::ToolDef;
use crate::ports::{LiveEvent, MessageKind, OutputStream};
use crate::session::Session;
use crate::text::HeadTail;

pub(crate) const DEFAULT_TIMEOUT: Duration = Duration::from_secs(120);
/// What a model may ask for.
pub(crate) const MAX_TIMEOUT: Duration = Duration::from_secs(600);
/// A background command may serve for as long as the fork works.
const BACKGROUND_TIMEOUT: Duration = Duration::from_secs(2 * 3600);

pub(crate) struct Bash;

#[async_trait]
impl Tool for Bash {
    fn definition(&self, _: &Session) -> ToolDef {
        definition(
            "Bash",
            "Runs a command in a shell, in the workspace. Each call starts a new shell: use `cd` within the command, or \
             absolute paths. Gives stdout, then stderr, then the exit code if it is not 0. Long output is cut in the middle. \
             With run_in_background the call returns at once; read its output with BashOutput and end it with KillBash.",
            &[
                ("command", "string", true, "The command."),
                (
                    "timeout",
                    "integer",
                    false,
                    "Milliseconds until it is stopped; 120000 if not given, at most 600000.",
                ),
                ("description", "string", false, "What it does, in a few words."),
                ("run_in_background", "boolean", false, "Do not wait for its end."),
            ],
        )
    }

    async fn run(&self, call: &Call<'_>, _: Option<FileChange>) -> Result<Output, Failure> {
        let command = call.text("command")?;
        let timeout = call.number("timeout")?.map_or(DEFAULT_TIMEOUT, Duration::from_millis);
        if timeout.is_zero() || timeout > MAX_TIMEOUT {
            let max = MAX_TIMEOUT.as_millis();
            return Err(Failure::result(format!("`timeout` must be between 1 and {max} milliseconds")));
        }
        if call.flag("run_in_background")? {
            if call.session.background.is_full() {
                return Err(Failure::result(
                    "too many background commands run already; end one with KillBash",
                ));
            }
            let request = request(call.session, command, BACKGROUND_TIMEOUT).await?.call(call.id.clone());
            let exec = call.session.sandbox.exec(request).await?;
            let id = call.session.background.add(call.id.clone(), command, exec);
            return Ok(Output::text(format!(
                "Runs in the background as {id}. Read its output with BashOutput, end it with KillBash."
            )));
        }
        let request = request(call.session, command, timeout).await?.call(call.id.clone());
        let ended = run_to_end(call, request).await?;
        let mut output = ended.output(timeout);
        if let Some((error_type, text)) = ended.result.as_ref().and_then(diagnosis) {
            output.events.push(AgentEvent::StreamError {
                turn: call.turn,
                error: text.to_string(),
                error_type,
                cost: Usd::ZERO,
            });
        }
        output.forget = true;
        Ok(output)
    }
}

/// The command in the best shell that the sandbox has.
async fn request(session: &Session, command: &str, timeout: Duration) -> Result<ExecRequest, Failure> {
    let shell = session.shell().await?;
    let mut request = ExecRequest::new([shell, "-c", command]).timeout(timeout);
    request.cwd = Some(session.policy.workspace.clone());
    Ok(request)
}

/// How a command ended.
struct Ended {
    stdout: HeadTail,
    stderr: HeadTail,
    /// None if it was interrupted.
    result: Option<ExecResult>,
}

impl Ended {
    fn output(&self, timeout: Duration) -> Output {
        let (written_out, written_err) =
            self.result.as_ref().map_or((0, 0), |r| (r.stdout_bytes, r.stderr_bytes));
        let mut text = self.stdout.text(written_out);
        let stderr = self.stderr.text(written_err);
        if !stderr.is_empty() {
            if !text.is_empty() && !text.ends_with('\n') {
                text.push('\n');
            }
            text.push_str(&stderr);
        }
        let Some(result) = &self.result else {
            return Output::error(format!("{text}\n[interrupted: the command was stopped before it ended]"));
        };
        if text.trim().is_empty() {
            text = "(no output)".to_string();
        }
        let mut is_error = false;
        let mut note = |line: String| {
            is_error = true;
            if !text.ends_with('\n') {
                text.push('\n');
            }
            text.push_str(&line);
        };
        if result.timed_out {
            note(format!("[timed out after {} ms and was stopped]", timeout.as_millis()));
        } else if result.exit_code != 0 {
            note(format!("[exit code {}]", result.exit_code));
        }
        if let Some((_, diagnosis)) = diagnosis(result) {
            note(format!("[{diagnosis}]"));
        }
        Output { is_error, ..Output::text(text) }
    }
}

/// Reads a command to its end, or until somebody interrupts it. Asking again for a call that an earlier attempt began takes
/// over its output from the start.
async fn run_to_end(call: &Call<'_>, request: ExecRequest) -> Result<Ended, Failure> {
    let session = call.session;
    let mut exec = session.bounded(session.sandbox.exec(request)).await??;
    let mut ended = Ended {
        stdout: HeadTail::new(MAX_RESULT_BYTES * 3 / 4),
        stderr: HeadTail::new(MAX_RESULT_BYTES / 4),
        result: None,
    };
    let mut interrupted = false;
    loop {
        let event = tokio::select! {
            event = session.bounded(exec.events.recv()) => event?,
            () = session.inbox.wait(), if !interrupted => {
                let pending = session.inbox.pending().await.map_err(|e| Failure::Halt(e.into()))?;
                if pending.iter().any(|m| m.kind == MessageKind::Interrupt) {
                    interrupted = true;
                    exec.control.signal(Signal::Kill).await?;
                }
                continue;
            }
        };
        let live = |stream, data: &[u8]| {
            session.sink.live(LiveEvent::ToolOutput {
                tool_use_id: call.tool_use_id.to_string(),
                stream,
                text: String::from_utf8_lossy(data).into_owned(),
            });
        };
        match event {
            Some(Ok(ExecEvent::Stdout(data))) => {
                live(OutputStream::Stdout, &data);
                ended.stdout.push(&data);
            }
            Some(Ok(ExecEvent::Stderr(data))) => {
                live(OutputStream::Stderr, &data);
                ended.stderr.push(&data);
            }
            Some(Ok(ExecEvent::Exit(result))) => {
                ended.result = (!interrupted).then_some(result);
                return Ok(ended);
            }
            Some(Err(e)) => return Err(e.into()),
            None => {
                let e = forkyard_sandbox::SandboxError::new(
                    ErrorKind::Unavailable,
                    "it went away during a command",
                );
                return Err(e.into());
            }
        }
    }
}
