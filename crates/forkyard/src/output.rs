//! Where a command writes: text for people, one JSON document or a line a record for programs.

use std::io::{self, Write};

use forkyard_core::RunId;
use serde::Serialize;

use crate::error::Result;
use crate::render::Style;
use crate::settings::ColorMode;

/// A command's standard output.
pub struct Output<'a> {
    out: &'a mut dyn Write,
    pub style: Style,
    pub json: bool,
    last: String,
}

impl<'a> Output<'a> {
    pub fn new(out: &'a mut dyn Write, style: Style, json: bool) -> Output<'a> {
        Output { out, style, json, last: String::new() }
    }

    pub fn stdout(out: &'a mut io::Stdout, color: ColorMode, json: bool) -> Output<'a> {
        Output { style: Style::stdout(color), out, json, last: String::new() }
    }

    /// Text that is ours, or that has passed through `plain()`.
    pub fn text(&mut self, text: &str) -> Result<()> {
        Ok(quiet_pipe(self.out.write_all(text.as_bytes()).and_then(|()| self.out.flush()))?)
    }

    /// For a program that reads on: not changed in any way.
    pub fn bytes(&mut self, bytes: &[u8]) -> Result<()> {
        Ok(quiet_pipe(self.out.write_all(bytes).and_then(|()| self.out.flush()))?)
    }

    /// What a command did to a run, for people or for programs.
    pub fn said(&mut self, schema: &str, command: &str, run: &RunId, text: &str) -> Result<()> {
        if self.json {
            // It may close a stream of records, so it is one.
            return self.json_line(&serde_json::json!({ "schema": schema, "command": command, "run": run }));
        }
        self.line(text)
    }

    /// What a command stored for a run that nobody hears of yet, and what it waits for.
    pub fn stored(&mut self, command: &str, run: &RunId, notice: &str) -> Result<()> {
        if self.json {
            let schema = "forkyard.command/1";
            return self.json(&serde_json::json!({
                "schema": schema, "command": command, "run": run, "notice": notice,
            }));
        }
        self.line(notice)
    }

    pub fn line(&mut self, line: &str) -> Result<()> {
        self.text(&format!("{line}\n"))
    }

    /// One document, as a whole.
    pub fn json(&mut self, value: &impl Serialize) -> Result<()> {
        let mut text = serde_json::to_string_pretty(value).map_err(io::Error::from)?;
        text.push('\n');
        self.text(&text)
    }

    /// A record that says the same as the one before it is left out.
    pub fn json_line_once(&mut self, value: &impl Serialize) -> Result<()> {
        let text = serde_json::to_string(value).map_err(io::Error::from)?;
        if text == self.last {
            return Ok(());
        }
        self.text(&format!("{text}\n"))?;
        self.last = text;
        Ok(())
    }

    /// One record of a stream.
    pub fn json_line(&mut self, value: &impl Serialize) -> Result<()> {
        let mut text = serde_json::to_string(value).map_err(io::Error::from)?;
        text.push('\n');
        self.text(&text)
    }
}

/// A reader that went away (`| head`) has all that it wanted.
fn quiet_pipe(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(e) if e.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        other => other,
    }
}
