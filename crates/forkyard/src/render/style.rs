//! Colour and shape of output: what the other end can show.

use std::io::IsTerminal;

use crate::settings::ColorMode;

/// Narrower than this nothing can be laid out; wider lines are hard to read.
const MIN_WIDTH: usize = 20;
const MAX_WIDTH: usize = 200;
/// Of a pipe: lines are not cut there.
const PIPE_WIDTH: usize = usize::MAX;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Color {
    Green,
    Red,
    Yellow,
    Cyan,
    Dim,
    Bold,
}

impl Color {
    fn code(self) -> &'static str {
        match self {
            Color::Green => "32",
            Color::Red => "31",
            Color::Yellow => "33",
            Color::Cyan => "36",
            Color::Dim => "2",
            Color::Bold => "1",
        }
    }
}

/// How to write to one stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Style {
    pub color: bool,
    /// Columns; without end in a pipe.
    pub width: usize,
    /// Lines; None: not a terminal.
    pub height: Option<usize>,
}

impl Style {
    /// Plain text for a pipe or a file.
    pub const PIPE: Style = Style { color: false, width: PIPE_WIDTH, height: None };

    pub fn stdout(mode: ColorMode) -> Style {
        Style::of(&std::io::stdout(), mode)
    }
    pub fn stderr(mode: ColorMode) -> Style {
        Style::of(&std::io::stderr(), mode)
    }

    fn of(stream: &(impl IsTerminal + std::os::fd::AsFd), mode: ColorMode) -> Style {
        let terminal = stream.is_terminal();
        let color = match mode {
            ColorMode::Auto => terminal,
            ColorMode::Always => true,
            ColorMode::Never => false,
        };
        if !terminal {
            return Style { color, ..Style::PIPE };
        }
        let size = rustix::termios::tcgetwinsize(stream).ok();
        // Some terminals say zero.
        let columns = size.map_or(0, |s| usize::from(s.ws_col));
        let rows = size.map_or(0, |s| usize::from(s.ws_row));
        Style {
            color,
            width: if columns == 0 { 80 } else { columns.clamp(MIN_WIDTH, MAX_WIDTH) },
            height: Some(if rows == 0 { 24 } else { rows }),
        }
    }

    pub fn is_terminal(&self) -> bool {
        self.height.is_some()
    }

    pub fn paint(&self, color: Color, text: &str) -> String {
        if self.color && !text.is_empty() {
            format!("\x1b[{}m{text}\x1b[0m", color.code())
        } else {
            text.to_string()
        }
    }
}
