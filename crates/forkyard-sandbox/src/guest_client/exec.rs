//! Commands over the guest's protocol.

use std::time::Duration;

use super::{Answers, GuestClient, unexpected};
use crate::{
    ErrorKind, Exec, ExecControl, ExecEvent, ExecRequest, ExecResult, PtySize, Result, SandboxError, Signal,
};
use async_trait::async_trait;
use bytes::Bytes;
use forkyard_core::CallId;
use forkyard_guest::protocol::{Answer, ExecOp, ExitInfo, MAX_CHUNK, OUTPUT_WINDOW, Op};

/// Output is acknowledged in halves of the window, so that it never runs dry while the reader keeps up.
const ACK_EVERY: u32 = OUTPUT_WINDOW / 2;

fn to_result(exit: ExitInfo) -> ExecResult {
    ExecResult {
        exit_code: exit.exit_code,
        signal: exit.signal,
        timed_out: exit.timed_out,
        oom_killed: exit.oom_killed,
        duration: Duration::from_micros(exit.duration_us),
        stdout_bytes: exit.stdout_bytes,
        stderr_bytes: exit.stderr_bytes,
        truncated: exit.truncated,
    }
}

/// What a caller can do about a command that did not start.
fn of_exec(e: SandboxError) -> SandboxError {
    match e.kind {
        ErrorKind::NotFound | ErrorKind::Invalid => e.or_hint(
            "the command and the folder it runs in must exist inside: install it, or write its whole path",
        ),
        ErrorKind::Denied => e.or_hint("it must be executable by the user inside: chmod +x"),
        _ => e,
    }
}

impl GuestClient {
    pub async fn exec(&self, request: ExecRequest) -> Result<Exec> {
        let op = ExecOp {
            call: request.call.map(String::from),
            argv: request.argv,
            env: request.env,
            cwd: request.cwd,
            timeout_ms: request.timeout.map(|t| u64::try_from(t.as_millis()).unwrap_or(u64::MAX)),
            stdin: request.stdin,
            pty: request.pty.map(|size| (size.cols, size.rows)),
            max_output: request.max_output.unwrap_or(ExecRequest::DEFAULT_MAX_OUTPUT),
        };
        if let Some(bad) = op.env.keys().find(|key| key.is_empty() || key.contains(['=', '\0'])) {
            return Err(SandboxError::new(
                ErrorKind::Invalid,
                format!("{bad:?} is not the name of a variable"),
            ));
        }
        let answers = self.send(Op::Exec(op), &[]).await?;
        let mut output = Output { client: self.clone(), answers, taken: 0, over: false };
        match output.answers.next().await {
            Ok((Answer::Started { .. }, _)) => {}
            Ok((other, _)) => return Err(unexpected(&other)),
            Err(e) => {
                output.over = true; // there is none
                return Err(of_exec(e));
            }
        }
        let control = Box::new(Control { client: self.clone(), exec: output.answers.seq });
        Ok(Exec { events: output.into(), control })
    }

    pub async fn forget(&self, call: &CallId) -> Result<()> {
        self.ask_done(Op::Forget { call: call.to_string() }, &[]).await
    }

    pub async fn calls(&self) -> Result<Vec<CallId>> {
        match self.ask(Op::Calls, &[]).await? {
            (Answer::Calls { calls }, _) => {
                Ok(calls.into_iter().filter_map(|c| CallId::new(c).ok()).collect())
            }
            (other, _) => Err(unexpected(&other)),
        }
    }
}

/// What comes from a command. Whoever drops it before the end has no more interest in it.
pub struct Output {
    client: GuestClient,
    answers: Answers,
    /// Frames since the last acknowledgement.
    taken: u32,
    over: bool,
}

impl Output {
    /// None after the end, or after an error. Nothing is lost if this is not waited for.
    pub async fn next(&mut self) -> Option<Result<ExecEvent>> {
        if self.over {
            return None;
        }
        let event = match self.answers.next().await {
            Ok((Answer::Output { stderr: false }, data)) => Ok(ExecEvent::Stdout(data)),
            Ok((Answer::Output { stderr: true }, data)) => Ok(ExecEvent::Stderr(data)),
            Ok((Answer::Exit(exit), _)) => Ok(ExecEvent::Exit(to_result(exit))),
            Ok((other, _)) => Err(unexpected(&other)),
            Err(e) => Err(e),
        };
        self.over = matches!(event, Ok(ExecEvent::Exit(_)) | Err(_));
        self.taken += 1;
        if self.taken == ACK_EVERY && !self.over {
            self.client.tell(Op::Ack { exec: self.answers.seq, frames: self.taken });
            self.taken = 0;
        }
        Some(event)
    }
}

impl Drop for Output {
    fn drop(&mut self) {
        if !self.over {
            self.client.tell(Op::Drop { exec: self.answers.seq });
        }
    }
}

struct Control {
    client: GuestClient,
    exec: u32,
}

#[async_trait]
impl ExecControl for Control {
    async fn write_stdin(&self, data: Bytes) -> Result<()> {
        for part in data.chunks(MAX_CHUNK) {
            self.client.ask_done(Op::Stdin { exec: self.exec }, part).await?;
        }
        Ok(())
    }
    async fn close_stdin(&self) -> Result<()> {
        self.client.ask_done(Op::CloseStdin { exec: self.exec }, &[]).await
    }
    async fn signal(&self, signal: Signal) -> Result<()> {
        let signal = match signal {
            Signal::Int => libc::SIGINT,
            Signal::Term => libc::SIGTERM,
            Signal::Kill => libc::SIGKILL,
            Signal::Hup => libc::SIGHUP,
            Signal::Stop => libc::SIGSTOP,
            Signal::Cont => libc::SIGCONT,
        };
        self.client.ask_done(Op::Signal { exec: self.exec, signal }, &[]).await
    }
    async fn resize(&self, size: PtySize) -> Result<()> {
        self.client.ask_done(Op::Resize { exec: self.exec, cols: size.cols, rows: size.rows }, &[]).await
    }
}
