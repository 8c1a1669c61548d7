//! Commands over the guest's protocol.

use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use forkyard_core::CallId;
use forkyard_guest::protocol::{Answer, ExecOp, ExitInfo, MAX_CHUNK, OUTPUT_WINDOW, Op};
use tokio::sync::mpsc;

use super::{Answers, GuestClient, unexpected};
use crate::{
    ErrorKind, Exec, ExecControl, ExecEvent, ExecRequest, ExecResult, PtySize, Result, SandboxError, Signal,
};

/// Events that wait for the reader on our side; the rest waits in the guest.
const EVENT_QUEUE: usize = 16;
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
        let mut answers = self.send(Op::Exec(op), &[]).await?;
        let mut unstarted = DropUnstarted { client: self, exec: answers.seq, armed: true };
        let first = answers.next().await;
        unstarted.armed = false;
        match first.map_err(of_exec)? {
            (Answer::Started { .. }, _) => {}
            (other, _) => return Err(unexpected(&other)),
        }
        let control = Box::new(Control { client: self.clone(), exec: answers.seq });
        let (sender, events) = mpsc::channel(EVENT_QUEUE);
        tokio::spawn(forward(self.clone(), answers, sender));
        Ok(Exec { events, control })
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

/// A command that nobody waits for any more before it is said to have started.
struct DropUnstarted<'a> {
    client: &'a GuestClient,
    exec: u32,
    armed: bool,
}

impl Drop for DropUnstarted<'_> {
    fn drop(&mut self) {
        if self.armed {
            self.client.tell_later(Op::Drop { exec: self.exec });
        }
    }
}

/// From the guest to the reader, until the command ends or the reader is gone.
async fn forward(client: GuestClient, mut answers: Answers, events: mpsc::Sender<Result<ExecEvent>>) {
    let exec = answers.seq;
    let mut taken = 0;
    loop {
        let frame = tokio::select! {
            frame = answers.next() => frame,
            () = events.closed() => break,
        };
        let event = match frame {
            Ok((Answer::Output { stderr: false }, data)) => Ok(ExecEvent::Stdout(data)),
            Ok((Answer::Output { stderr: true }, data)) => Ok(ExecEvent::Stderr(data)),
            Ok((Answer::Exit(exit), _)) => {
                let _ = events.send(Ok(ExecEvent::Exit(to_result(exit)))).await;
                return;
            }
            Ok((other, _)) => Err(unexpected(&other)),
            Err(e) => Err(e),
        };
        let failed = event.is_err();
        if events.send(event).await.is_err() {
            break;
        }
        if failed {
            return;
        }
        taken += 1;
        if taken == ACK_EVERY {
            let _ = client.tell(Op::Ack { exec, frames: taken }, &[]).await;
            taken = 0;
        }
    }
    let _ = client.tell(Op::Drop { exec }, &[]).await;
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
