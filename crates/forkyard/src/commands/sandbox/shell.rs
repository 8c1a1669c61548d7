use std::io::{IsTerminal, Read, Write};

use bytes::Bytes;
use clap::Args;
use forkyard_core::SandboxId;
use forkyard_sandbox::{ExecEvent, ExecRequest, PtySize};
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr};
use serde_json::json;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;

use super::attach;
use super::exec::status;
use crate::error::{CliError, Result};
use crate::exit::Exit;
use crate::place::Place;

#[derive(Debug, Clone, Args)]
pub struct ShellArgs {
    /// The sandbox.
    #[arg(value_name = "SANDBOX")]
    pub sandbox: SandboxId,
    /// Another program than the shell.
    #[arg(value_name = "COMMAND", trailing_var_arg = true, allow_hyphen_values = true)]
    pub command: Vec<String>,
}

/// Keys that wait to be sent.
const KEYS: usize = 64;

impl ShellArgs {
    pub async fn run(&self, place: &dyn Place) -> Result<Exit> {
        if !std::io::stdin().is_terminal() || !std::io::stdout().is_terminal() {
            return Err(CliError::usage("a shell needs a terminal")
                .hint("`forkyard sandbox exec` runs commands without one"));
        }
        let sandbox = attach(place, &self.sandbox).await?;
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
        let term =
            crate::settings::environment().get("TERM").cloned().unwrap_or_else(|| "xterm-256color".into());
        let request = ExecRequest {
            pty: Some(size()),
            stdin: true,
            // A shell is not an answer that somebody keeps.
            max_output: Some(u64::MAX),
            ..ExecRequest::new(command).env("TERM", term)
        };
        let said = json!({ "command": request.argv.join(" ") });
        place.record("sandbox.pty", self.sandbox.as_str(), said).await?;
        let mut exec = sandbox.exec(request).await?;
        let mut resized = signal(SignalKind::window_change())?;
        let raw = Raw::enter()?;
        let mut keys = keys();
        let result = loop {
            tokio::select! {
                event = exec.events.recv() => match event {
                    Some(Ok(ExecEvent::Stdout(b) | ExecEvent::Stderr(b))) => {
                        let mut out = std::io::stdout().lock();
                        out.write_all(&b)?;
                        out.flush()?;
                    }
                    Some(Ok(ExecEvent::Exit(result))) => break Ok(status(&result)),
                    Some(Err(e)) => break Err(e.into()),
                    None => break Err(CliError::failure("the sandbox went away")),
                },
                // A shell that has ended meanwhile takes neither: its events say how it ended.
                Some(typed) = keys.recv() => drop(exec.control.write_stdin(typed).await),
                _ = resized.recv() => drop(exec.control.resize(size()).await),
            }
        };
        drop(raw);
        result
    }
}

fn size() -> PtySize {
    let (cols, rows) = tcgetwinsize(std::io::stdout()).map_or((80, 24), |s| (s.ws_col, s.ws_row));
    PtySize { cols: cols.max(1), rows: rows.max(1) }
}

/// A thread of its own reads the terminal: such a read can't be taken back, and the program's end must not wait for it.
fn keys() -> mpsc::Receiver<Bytes> {
    let (tx, rx) = mpsc::channel(KEYS);
    std::thread::spawn(move || {
        let mut buffer = [0; 4096];
        while let Ok(n) = std::io::stdin().lock().read(&mut buffer) {
            if n == 0 || tx.blocking_send(Bytes::copy_from_slice(&buffer[..n])).is_err() {
                return;
            }
        }
    });
    rx
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
