//! Keeps a picture of a run in place on a terminal, with lines that scroll above it.

use std::io::{self, Write};

use super::board::Board;
use super::plain::width;
use super::style::Style;

const HIDE_CURSOR: &str = "\x1b[?25l";
const SHOW_CURSOR: &str = "\x1b[?25h";

/// On a terminal, draws a board over the one before; in a pipe, writes what changed.
pub struct Live<W: Write> {
    out: W,
    style: Style,
    /// Columns of each line that stands there.
    drawn: Vec<usize>,
    last: Option<Board>,
}

impl<W: Write> Live<W> {
    pub fn new(out: W, style: Style) -> Live<W> {
        Live { out, style, drawn: Vec::new(), last: None }
    }

    /// The terminal has another size now.
    pub fn resize(&mut self, style: Style) {
        self.style = style;
    }

    pub fn show(&mut self, board: Board) -> io::Result<()> {
        if self.style.is_terminal() {
            // In one write: half a picture would flicker.
            let mut text = self.back();
            text.push_str(HIDE_CURSOR);
            let lines = board.lines(&self.style);
            for line in &lines {
                text.push_str(&format!("\x1b[2K{line}\n"));
            }
            // What is left of a longer picture.
            text.push_str("\x1b[J");
            self.out.write_all(text.as_bytes())?;
            self.drawn =
                board.lines(&Style { color: false, ..self.style }).iter().map(|l| width(l)).collect();
        } else {
            for line in board.changes(self.last.as_ref()) {
                writeln!(self.out, "{line}")?;
            }
        }
        self.last = Some(board);
        self.out.flush()
    }

    /// A line that stays, above the picture.
    pub fn note(&mut self, line: &str) -> io::Result<()> {
        if !self.style.is_terminal() {
            writeln!(self.out, "{line}")?;
            return self.out.flush();
        }
        let text = format!("{}\x1b[J{line}\n", self.back());
        self.out.write_all(text.as_bytes())?;
        self.drawn.clear();
        match self.last.take() {
            Some(board) => self.show(board),
            None => self.out.flush(),
        }
    }

    /// Takes the picture away and gives the cursor back.
    pub fn finish(&mut self) -> io::Result<()> {
        if self.style.is_terminal() {
            let text = format!("{}\x1b[J{SHOW_CURSOR}", self.back());
            self.out.write_all(text.as_bytes())?;
            self.drawn.clear();
        }
        self.out.flush()
    }

    /// To the picture's first line. A terminal that was made narrower has broken the lines that were too long for it.
    fn back(&self) -> String {
        let rows: usize = self.drawn.iter().map(|w| w.div_ceil(self.style.width).max(1)).sum();
        if rows > 0 { format!("\r\x1b[{rows}A") } else { String::new() }
    }
}

impl<W: Write> Drop for Live<W> {
    fn drop(&mut self) {
        // An error on the way must not leave a terminal without a cursor; there is nobody left to tell if that fails.
        if self.style.is_terminal() {
            let _ = self.out.write_all(SHOW_CURSOR.as_bytes());
            let _ = self.out.flush();
        }
    }
}

#[cfg(test)]
mod tests {
    use forkyard_core::view::Lifecycle;

    use super::super::fixture::{board, fork};
    use super::*;

    /// What a terminal shows after these bytes: lines, and whether the cursor is visible.
    fn terminal(bytes: &[u8]) -> (Vec<String>, bool) {
        let text = String::from_utf8(bytes.to_vec()).unwrap();
        let (mut lines, mut row, mut cursor) = (vec![String::new()], 0_usize, true);
        let mut rest = text.as_str();
        while let Some(c) = rest.chars().next() {
            if let Some(code) = rest.strip_prefix("\x1b[") {
                let end = code.find(|c: char| c.is_ascii_alphabetic()).unwrap();
                match &code[..=end] {
                    "?25l" => cursor = false,
                    "?25h" => cursor = true,
                    "2K" => lines[row].clear(),
                    "J" => {
                        lines.truncate(row + 1);
                        lines[row].clear();
                    }
                    up if up.ends_with('A') => row -= up[..up.len() - 1].parse::<usize>().unwrap(),
                    other => panic!("unexpected {other:?}"),
                }
                rest = &code[end + 1..];
                continue;
            }
            rest = &rest[c.len_utf8()..];
            match c {
                '\n' => {
                    row += 1;
                    if row == lines.len() {
                        lines.push(String::new());
                    }
                }
                '\r' => {}
                c => lines[row].push(c),
            }
        }
        (lines, cursor)
    }

    const TERMINAL: Style = Style { color: false, width: 60, height: Some(24) };

    #[test]
    fn pictures_replace_each_other_and_notes_stay() {
        let mut bytes = Vec::new();
        let mut live = Live::new(&mut bytes, TERMINAL);
        let three = board((0..3).map(|n| fork(n, Lifecycle::Running, None)).collect());
        let one = board(vec![fork(0, Lifecycle::Running, None)]);
        live.show(three.clone()).unwrap();
        live.show(three.clone()).unwrap();
        live.note("a note").unwrap();
        live.show(one.clone()).unwrap();
        drop(live);
        let (lines, cursor) = terminal(&bytes);
        let mut expected = vec!["a note".to_string()];
        expected.extend(one.lines(&TERMINAL));
        expected.push(String::new());
        assert_eq!(lines, expected);
        assert!(cursor);
    }

    #[test]
    fn a_narrower_terminal_shows_no_part_of_the_old_picture() {
        let mut bytes = Vec::new();
        let mut live = Live::new(&mut bytes, TERMINAL);
        let mut b = board(vec![fork(0, Lifecycle::Running, None)]);
        b.doing.insert(0, "x".repeat(200));
        live.show(b.clone()).unwrap();
        live.resize(Style { width: 30, ..TERMINAL });
        live.show(b.clone()).unwrap();
        drop(live);
        let text = String::from_utf8(bytes).unwrap();
        // 22 columns, then 60, 40 and 38, of which a terminal of 30 makes two lines each.
        assert!(text.contains("\x1b[7A"), "{text:?}");
    }

    #[test]
    fn nothing_of_it_is_left_after_the_end() {
        let mut bytes = Vec::new();
        let mut live = Live::new(&mut bytes, TERMINAL);
        live.show(board(vec![fork(0, Lifecycle::Running, None)])).unwrap();
        live.finish().unwrap();
        drop(live);
        assert_eq!(terminal(&bytes), (vec![String::new()], true));
    }

    #[test]
    fn a_pipe_gets_no_escape() {
        let mut bytes = Vec::new();
        let mut live = Live::new(&mut bytes, Style::PIPE);
        let b = board(vec![fork(0, Lifecycle::Running, None)]);
        live.show(b.clone()).unwrap();
        live.show(b).unwrap();
        live.note("note").unwrap();
        live.finish().unwrap();
        drop(live);
        assert_eq!(String::from_utf8(bytes).unwrap(), "r1/0 running\nr1/0 turn 7 $1.25\nnote\n");
    }
}
