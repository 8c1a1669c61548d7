use std::collections::BTreeMap;
use std::io::IsTerminal;
use std::pin::pin;
use std::time::Duration;

use clap::Args;
use forkyard_core::{Millis, SandboxId};
use forkyard_sandbox::{Exec, ExecEvent, ExecRequest, ExecResult, Sandbox};
use futures::FutureExt;
use futures::future::Fuse;
use serde_json::json;

use super::shell::{PTY_OUTPUT, on_terminal, pty};
use super::stream::{
    ENDS_WITHIN, Ended, Signals, Stream, Told, Writer, feed, has_input, is_foreground, kill,
};
use super::way;
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
    /// A variable for the command.
    #[arg(long, value_name = "NAME=VALUE")]
    pub env: Vec<String>,
    #[command(flatten)]
    pub how: HowArgs,
    /// The command and its arguments; one that begins with a dash comes after `--`.
    #[arg(value_name = "COMMAND", required = true, trailing_var_arg = true)]
    pub command: Vec<String>,
}

// Not a doc comment, which would become the text of the command that it is a part of.
// How a command runs, in a new sandbox or in one that is there.
#[derive(Debug, Clone, Args)]
pub struct HowArgs {
    /// Time that the command may take, more than none [default: no limit].
    #[arg(short, long, value_name = "DURATION")]
    pub timeout: Option<String>,
    /// No terminal for the command. Without this it has one where input and output are a terminal; else its standard input is
    /// ours, and `</dev/null` keeps that.
    #[arg(short = 'T', long)]
    pub no_tty: bool,
}

impl HowArgs {
    pub fn timeout(&self) -> Result<Option<Duration>> {
        let Some(text) = &self.timeout else { return Ok(None) };
        match duration("--timeout", text)? {
            Millis(0) => Err(CliError::usage(format!("--timeout {text:?} leaves the command no time"))
                .hint("leave it out for a command that may take any time")),
            timeout => Ok(Some(timeout.as_duration())),
        }
    }
}

impl ExecArgs {
    pub async fn run(&self, place: &dyn Place, out: &mut Output<'_>) -> Result<Exit> {
        let asked = Asked {
            command: &self.command,
            cwd: self.cwd.clone(),
            env: variables(&self.env)?,
            timeout: self.how.timeout()?,
            tty: !self.how.no_tty,
        };
        let mut signals = Signals::take()?;
        let (sandbox, _way) = way::attach(place, &self.sandbox).await?;
        let said = json!({ "command": self.command.join(" ") });
        place.record("sandbox.exec", self.sandbox.as_str(), said).await?;
        let ended = run_inside(&*sandbox, asked, &mut signals, out).await;
        Ok(ended.map_err(|e| not_started(e, &self.command))?.exit())
    }
}

fn variables(env: &[String]) -> Result<BTreeMap<String, String>> {
    let pair = |text: &String| match text.split_once('=') {
        Some((name, value)) if !name.is_empty() => Ok((name.to_string(), value.to_string())),
        Some(_) | None => {
            Err(CliError::usage(format!("--env {text:?} can't be used")).hint("write NAME=VALUE"))
        }
    };
    env.iter().map(pair).collect()
}

/// What is to run inside.
pub struct Asked<'a> {
    pub command: &'a [String],
    pub cwd: Option<String>,
    pub env: BTreeMap<String, String>,
    pub timeout: Option<Duration>,
    /// On a terminal of its own, if we have one.
    pub tty: bool,
}

/// The command's bytes go on as they are: who runs it asked for them. With `--json`, one document at its end.
pub async fn run_inside(
    sandbox: &dyn Sandbox,
    asked: Asked<'_>,
    signals: &mut Signals,
    out: &mut Output<'_>,
) -> Result<Ended> {
    let Asked { command, cwd, env, timeout, tty } = asked;
    let request = ExecRequest { cwd, env, timeout, ..ExecRequest::new(command.iter().cloned()) };
    let terminal = std::io::stdin().is_terminal() && std::io::stdout().is_terminal() && is_foreground();
    if tty && terminal && !out.json {
        let ended = on_terminal(sandbox, pty(request), signals).await?;
        if let Ended::Exited(result) = &ended {
            tell(result, false);
        }
        return Ok(ended);
    }
    let json = out.json;
    let request = ExecRequest {
        stdin: has_input(),
        // A document has a bound; a stream has none.
        max_output: (!json).then_some(PTY_OUTPUT),
        ..request
    };
    let has_stdin = request.stdin;
    let Exec { mut events, control } = sandbox.exec(request).await?;
    let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
    let mut killed_for = false;
    let ended = {
        let mut reading = pin!(async {
            let mut writer = None;
            loop {
                let (stream, bytes) = match events.recv().await {
                    Some(Ok(ExecEvent::Stdout(b))) => (Stream::Out, b),
                    Some(Ok(ExecEvent::Stderr(b))) => (Stream::Err, b),
                    Some(Ok(ExecEvent::Exit(result))) => {
                        let written = match writer {
                            Some(writer) => Writer::finish(writer).await,
                            None => Ok(()),
                        };
                        return read_by(written, Ended::Exited(result));
                    }
                    Some(Err(e)) => return Err(e.into()),
                    None => return Err(CliError::failure("the sandbox went away during the command")),
                };
                match stream {
                    Stream::Out if json => stdout.extend_from_slice(&bytes),
                    Stream::Err if json => stderr.extend_from_slice(&bytes),
                    Stream::Out | Stream::Err => {
                        if matches!(stream, Stream::Err) {
                            killed_for = says_why(&bytes);
                        }
                        let passed = writer.get_or_insert_with(Writer::start).pass(stream, bytes).await;
                        if passed.is_err() {
                            return read_by(passed, Ended::Unread);
                        }
                    }
                }
            }
        });
        let mut feeding = pin!(feed(&*control));
        let mut fed = !has_stdin;
        // Beside the rest: a guest that hangs takes no signal, and the next one to us ends this all the same.
        let mut passing = pin!(Fuse::terminated());
        let mut told: Option<Told> = None;
        let mut late = pin!(tokio::time::sleep(Duration::MAX));
        loop {
            tokio::select! {
                done = &mut reading => break match (done, told) {
                    (Ok(Ended::Exited(_)), Some(word @ (Told::Term | Told::Hup))) => Ok(Ended::Told(word)),
                    (done, _) => done,
                },
                () = &mut feeding, if !fed => fed = true,
                word = signals.recv() => match told {
                    // What a ctrl-C means is the command's own business, once; it may have ended meanwhile.
                    None => {
                        passing.set(control.signal(word.signal()).fuse());
                        if word != Told::Int {
                            late.as_mut().reset(tokio::time::Instant::now() + ENDS_WITHIN);
                        }
                        told = Some(word);
                    }
                    Some(_) => break Ok(Ended::Told(word)),
                },
                _ = &mut passing => {}
                () = &mut late => break Ok(Ended::Told(told.unwrap_or(Told::Term))),
            }
        }
    };
    let ended = ended?;
    let Ended::Exited(result) = &ended else {
        kill(&*control).await;
        return Ok(ended);
    };
    if json {
        out.json(&json!({
            "schema": "forkyard.exec/1", "sandbox_id": sandbox.id(), "exit_code": result.exit_code,
            "timed_out": result.timed_out, "oom_killed": result.oom_killed,
            "truncated": result.truncated, "duration_ms": result.duration.as_millis() as u64,
            "stdout": String::from_utf8_lossy(&stdout), "stderr": String::from_utf8_lossy(&stderr),
        }))?;
    } else {
        tell(result, killed_for);
    }
    if result.truncated {
        let bound = ExecRequest::DEFAULT_MAX_OUTPUT >> 20;
        eprintln!("the output is cut: of each stream, the first {bound} MiB are passed on");
    }
    Ok(ended)
}

/// Whoever went away has all that it wanted.
fn read_by(written: std::io::Result<()>, ended: Ended) -> Result<Ended> {
    match written {
        Ok(()) => Ok(ended),
        Err(e) if e.kind() == std::io::ErrorKind::BrokenPipe => Ok(Ended::Unread),
        Err(e) => Err(e.into()),
    }
}

/// Where the guest itself killed the command, it has said so.
fn says_why(stderr: &[u8]) -> bool {
    String::from_utf8_lossy(stderr).contains("forkyard: killed, because")
}

fn tell(result: &ExecResult, told: bool) {
    if result.oom_killed && !told {
        eprintln!("killed: it used more memory than the sandbox has");
    } else if result.timed_out {
        eprintln!("killed: it took longer than --timeout");
    }
}

/// A command that could not begin ends as it does in a shell. The guest says so of the command by its name, and every API hands
/// that on as it is.
pub fn not_started(e: CliError, command: &[String]) -> CliError {
    let program = command.first().map_or("", String::as_str);
    let exit = match e.message.strip_prefix(program).and_then(|said| said.strip_prefix(": ")) {
        Some("command not found") => Exit::Command(127),
        Some(errno) if errno.contains("(os error ") => Exit::Command(126),
        Some(_) | None => e.exit,
    };
    CliError { exit, ..e }
}

/// The command's own exit status.
pub fn status(result: &ExecResult) -> Exit {
    match u8::try_from(result.exit_code) {
        Ok(0) => Exit::Success,
        Ok(code) => Exit::Command(code),
        Err(_) => Exit::Failure,
    }
}
