use std::io::{IsTerminal, Write};
use std::pin::pin;

use clap::Args;
use forkyard_core::SandboxId;
use forkyard_sandbox::{Exec, ExecEvent, ExecRequest, PtySize, Sandbox};
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr};
use serde_json::json;
use tokio::signal::unix::{SignalKind, signal};

use super::exec::not_started;
use super::stream::{Ended, Signals, input, kill};
use super::way;
use crate::error::{CliError, Result};
use crate::exit::Exit;
use crate::output::Output;
use crate::place::Place;

#[derive(Debug, Clone, Args)]
pub struct ShellArgs {
    /// The sandbox.
    #[arg(value_name = "SANDBOX")]
    pub sandbox: SandboxId,
    /// Another program than the shell.
    #[arg(value_name = "COMMAND", trailing_var_arg = true)]
    pub command: Vec<String>,
}

/// A stream is not an answer that somebody keeps.
pub const PTY_OUTPUT: u64 = u64::MAX;

impl ShellArgs {
    pub async fn run(&self, place: &dyn Place, out: &Output<'_>) -> Result<Exit> {
        if out.json {
            return Err(CliError::usage("a shell has no document: what it writes is for its terminal")
                .hint("`forkyard --json sandbox exec` runs a command and gives one, or leave --json out"));
        }
        if !std::io::stdin().is_terminal() || !std::io::stdout().is_terminal() {
            return Err(CliError::usage("a shell needs a terminal")
                .hint("`forkyard sandbox exec` runs commands without one"));
        }
        let mut signals = Signals::take()?;
        let (sandbox, _way) = way::attach(place, &self.sandbox).await?;
        let command = if self.command.is_empty() {
            // Bash where the sandbox has one.
            vec![
                "/bin/sh".into(),
                "-c".into(),
                "command -v bash >/dev/null && exec bash -l; exec sh -l".into(),
            ]
        } else {
            self.command.clone()
        };
        let said = json!({ "command": command.join(" ") });
        place.record("sandbox.pty", self.sandbox.as_str(), said).await?;
        let request = pty(ExecRequest::new(command.iter().cloned()));
        let ended = on_terminal(&*sandbox, request, &mut signals).await;
        Ok(ended.map_err(|e| not_started(e, &command))?.exit())
    }
}

/// The same command, on a terminal like ours.
pub fn pty(request: ExecRequest) -> ExecRequest {
    let term = crate::settings::environment().get("TERM").cloned().unwrap_or_else(|| "xterm-256color".into());
    let given = request.env.get("TERM").cloned();
    ExecRequest { pty: Some(size()), stdin: true, max_output: Some(PTY_OUTPUT), ..request }
        .env("TERM", given.unwrap_or(term))
}

/// Our terminal is the command's, until it ends.
pub async fn on_terminal(
    sandbox: &dyn Sandbox,
    request: ExecRequest,
    signals: &mut Signals,
) -> Result<Ended> {
    let Exec { mut events, control } = sandbox.exec(request).await?;
    let mut resized = signal(SignalKind::window_change())?;
    let raw = Raw::enter()?;
    let mut keys = input();
    // Beside the rest: a guest that hangs takes no key, and we end all the same when we are told to.
    let mut typing = pin!(async {
        loop {
            tokio::select! {
                // A shell that has ended meanwhile takes neither: its events say how it ended.
                Some(Ok(typed)) = keys.recv() => drop(control.write_stdin(typed).await),
                _ = resized.recv() => drop(control.resize(size()).await),
            }
        }
    });
    let result = loop {
        tokio::select! {
            event = events.recv() => match event {
                Some(Ok(ExecEvent::Stdout(b) | ExecEvent::Stderr(b))) => {
                    let mut out = std::io::stdout().lock();
                    out.write_all(&b)?;
                    out.flush()?;
                }
                Some(Ok(ExecEvent::Exit(result))) => break Ok(Ended::Exited(result)),
                Some(Err(e)) => break Err(e.into()),
                None => break Err(CliError::failure("the sandbox went away")),
            },
            () = &mut typing => {}
            word = signals.recv() => {
                kill(&*control).await;
                break Ok(Ended::Told(word));
            }
        }
    };
    drop(raw);
    result
}

fn size() -> PtySize {
    let (cols, rows) = tcgetwinsize(std::io::stdout()).map_or((80, 24), |s| (s.ws_col, s.ws_row));
    PtySize { cols: cols.max(1), rows: rows.max(1) }
}

/// Every key goes to the shell inside, until this is dropped.
struct Raw(Termios);

impl Raw {
    fn enter() -> Result<Raw> {
        let before = tcgetattr(std::io::stdin()).map_err(std::io::Error::from)?;
        let mut raw = before.clone();
        raw.make_raw();
        tcsetattr(std::io::stdin(), OptionalActions::Now, &raw).map_err(std::io::Error::from)?;
        Ok(Raw(before))
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        // If the terminal is gone there is nothing to give back.
        let _ = tcsetattr(std::io::stdin(), OptionalActions::Now, &self.0);
    }
}
