use std::io::Write;
use std::time::Duration;

use clap::Args;
use forkyard_core::{Millis, SandboxId};
use forkyard_sandbox::{ExecEvent, ExecRequest, ExecResult, Sandbox, Signal};
use serde_json::json;
use tokio::signal::unix::{SignalKind, signal};

use super::attach;
use crate::commands::cleanup::duration;
use crate::error::{CliError, Result};
use crate::exit::Exit;
use crate::output::Output;
use crate::place::Place;

#[derive(Debug, Clone, Args)]
pub struct ExecArgs {
    /// The sandbox.
    #[arg(value_name = "SANDBOX")]
    pub sandbox: SandboxId,
    /// Folder inside [default: /workspace].
    #[arg(long, value_name = "DIR")]
    pub cwd: Option<String>,
    /// Time that it may take.
    #[arg(short, long, value_name = "DURATION")]
    pub timeout: Option<String>,
    /// The command and its arguments.
    #[arg(value_name = "COMMAND", required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    pub command: Vec<String>,
}

impl ExecArgs {
    pub async fn run(&self, place: &dyn Place, out: &mut Output<'_>) -> Result<Exit> {
        let timeout = self.timeout.as_deref().map(|t| duration("--timeout", t)).transpose()?;
        let sandbox = attach(place, &self.sandbox).await?;
        let said = json!({ "command": self.command.join(" ") });
        place.record("sandbox.exec", self.sandbox.as_str(), said).await?;
        let timeout = timeout.map(Millis::as_duration);
        let result = run_inside(&*sandbox, &self.command, self.cwd.clone(), timeout, out).await?;
        Ok(status(&result))
    }
}

/// The command's bytes go on as they are: who runs it asked for them. With `--json`, one document at its end.
pub async fn run_inside(
    sandbox: &dyn Sandbox,
    command: &[String],
    cwd: Option<String>,
    timeout: Option<Duration>,
    out: &mut Output<'_>,
) -> Result<ExecResult> {
    let request = ExecRequest { cwd, timeout, ..ExecRequest::new(command.iter().cloned()) };
    let mut exec = sandbox.exec(request).await?;
    // One for all of it: it remembers a ctrl-C that comes while somebody does not take the output.
    let mut interrupted = signal(SignalKind::interrupt())?;
    let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
    loop {
        let event = tokio::select! {
            event = exec.events.recv() => event,
            _ = interrupted.recv() => {
                // A command that has ended meanwhile takes none: its events say how it ended.
                let _ = exec.control.signal(Signal::Int).await;
                continue;
            }
        };
        match event {
            Some(Ok(ExecEvent::Stdout(b))) if out.json => stdout.extend_from_slice(&b),
            Some(Ok(ExecEvent::Stderr(b))) if out.json => stderr.extend_from_slice(&b),
            Some(Ok(ExecEvent::Stdout(b))) => out.bytes(&b)?,
            Some(Ok(ExecEvent::Stderr(b))) => std::io::stderr().write_all(&b)?,
            Some(Ok(ExecEvent::Exit(result))) => {
                if out.json {
                    out.json(&json!({
                        "schema": "forkyard.exec/1", "sandbox_id": sandbox.id(), "exit_code": result.exit_code,
                        "timed_out": result.timed_out, "oom_killed": result.oom_killed,
                        "truncated": result.truncated, "duration_ms": result.duration.as_millis() as u64,
                        "stdout": String::from_utf8_lossy(&stdout), "stderr": String::from_utf8_lossy(&stderr),
                    }))?;
                } else if result.oom_killed {
                    eprintln!("killed: it used more memory than the sandbox has");
                } else if result.timed_out {
                    eprintln!("killed: it took longer than --timeout");
                }
                return Ok(result);
            }
            Some(Err(e)) => return Err(e.into()),
            None => return Err(CliError::failure("the sandbox went away during the command")),
        }
    }
}

/// The command's own exit status.
pub fn status(result: &ExecResult) -> Exit {
    match u8::try_from(result.exit_code) {
        Ok(0) => Exit::Success,
        Ok(code) => Exit::Command(code),
        Err(_) => Exit::Failure,
    }
}
