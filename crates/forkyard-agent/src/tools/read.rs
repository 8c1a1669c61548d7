//! Read: lines of a text file, or an image.

use async_trait::async_trait;
use forkyard_sandbox::{ErrorKind, FileKind};

use super::{Call, Failure, FileChange, Output, Tool, definition};
use crate::inference::{Image, ResultPart, ToolDef};
use crate::session::Session;
use crate::text::{base64, cut};

const DEFAULT_LINES: u64 = 2000;
const MAX_LINE_BYTES: usize = 2000;
/// Of one answer; a longer file is read in parts.
const MAX_READ_BYTES: usize = 100_000;
const CHUNK_BYTES: u64 = 1 << 20;
/// What the providers take.
const MAX_IMAGE_BYTES: u64 = 5 << 20;
/// Looked at to tell text from binary.
const PROBE_BYTES: usize = 8192;

pub(crate) struct Read;

#[async_trait]
impl Tool for Read {
    fn definition(&self, _: &Session) -> ToolDef {
        definition(
            "Read",
            "Reads a text file with line numbers, or an image. Up to 2000 lines from the start; use offset and limit for other \
             parts of a long file.",
            &[
                ("file_path", "string", true, "Absolute, or relative to the workspace."),
                ("offset", "integer", false, "The first line, from 1."),
                ("limit", "integer", false, "How many lines."),
            ],
        )
    }

    fn only_reads(&self) -> bool {
        true
    }

    async fn run(&self, call: &Call<'_>, _: Option<FileChange>) -> Result<Output, Failure> {
        let path = call.path("file_path")?;
        let first = call.number("offset")?.unwrap_or(1).max(1);
        let limit = call.number("limit")?.unwrap_or(DEFAULT_LINES);
        if limit == 0 {
            return Err(Failure::result("`limit` must be at least 1"));
        }
        let sandbox = call.session.sandbox.as_ref();
        let start = match sandbox.read_file(&path, 0, CHUNK_BYTES).await {
            Ok(start) => start,
            Err(e) if e.kind == ErrorKind::NotFound => {
                return Err(Failure::result(format!("{path} does not exist")));
            }
            Err(e) if e.kind == ErrorKind::Invalid => {
                let is_dir = sandbox.stat(&path).await.is_ok_and(|info| info.kind == FileKind::Dir);
                let what =
                    if is_dir { format!("{path} is a directory; use Glob or `ls`") } else { e.to_string() };
                return Err(Failure::result(what));
            }
            Err(e) => return Err(e.into()),
        };
        if start.is_empty() {
            return Ok(Output::text(format!("{path} is empty.")));
        }
        if let Some(media_type) = image_type(&start) {
            let data = sandbox.read_file(&path, 0, MAX_IMAGE_BYTES + 1).await?;
            if data.len() as u64 > MAX_IMAGE_BYTES {
                return Err(Failure::result(format!(
                    "{path} is an image of more than {MAX_IMAGE_BYTES} bytes"
                )));
            }
            let image = Image { media_type: media_type.to_string(), base64: base64(&data) };
            return Ok(Output { parts: vec![ResultPart::Image(image)], ..Output::text("") });
        }
        if start[..start.len().min(PROBE_BYTES)].contains(&0) {
            let size = sandbox.stat(&path).await.map(|i| i.size).unwrap_or(start.len() as u64);
            return Err(Failure::result(format!(
                "{path} is a binary file of {size} bytes; look at it with a command such as `file` or `xxd | head`"
            )));
        }
        let mut lines = Lines::new(first, limit);
        let mut offset = 0;
        let mut chunk = start;
        loop {
            offset += chunk.len() as u64;
            let last = (chunk.len() as u64) < CHUNK_BYTES;
            if lines.feed(&chunk) || last {
                break;
            }
            chunk = sandbox.read_file(&path, offset, CHUNK_BYTES).await?;
        }
        lines.end();
        Ok(lines.output(&path))
    }
}

/// By what the file starts with, not by its name.
fn image_type(data: &[u8]) -> Option<&'static str> {
    match data {
        [0x89, b'P', b'N', b'G', ..] => Some("image/png"),
        [0xff, 0xd8, 0xff, ..] => Some("image/jpeg"),
        [b'G', b'I', b'F', b'8', ..] => Some("image/gif"),
        [b'R', b'I', b'F', b'F', _, _, _, _, b'W', b'E', b'B', b'P', ..] => Some("image/webp"),
        _ => None,
    }
}

/// Picks lines out of a stream, in constant memory.
struct Lines {
    first: u64,
    limit: u64,
    /// The line being read, from 1; only its start is kept.
    number: u64,
    line: Vec<u8>,
    line_bytes: usize,
    taken: u64,
    out: String,
    full: bool,
}

impl Lines {
    fn new(first: u64, limit: u64) -> Lines {
        Lines {
            first,
            limit,
            number: 1,
            line: Vec::new(),
            line_bytes: 0,
            taken: 0,
            out: String::new(),
            full: false,
        }
    }

    /// True once nothing more is wanted.
    fn feed(&mut self, data: &[u8]) -> bool {
        for piece in data.split_inclusive(|b| *b == b'\n') {
            let (text, ends) = match piece.split_last() {
                Some((b'\n', text)) => (text, true),
                Some(_) | None => (piece, false),
            };
            let room = (MAX_LINE_BYTES + 4).saturating_sub(self.line.len()).min(text.len());
            self.line.extend_from_slice(&text[..room]);
            self.line_bytes += text.len();
            if ends {
                self.finish_line();
            }
            if self.full {
                return true;
            }
        }
        false
    }

    fn finish_line(&mut self) {
        if self.number >= self.first {
            if self.taken == self.limit || self.out.len() >= MAX_READ_BYTES {
                self.full = true;
                return;
            }
            let text = String::from_utf8_lossy(&self.line);
            let mut shown = cut(text.trim_end_matches('\r'), MAX_LINE_BYTES);
            if self.line_bytes > self.line.len() {
                shown = format!(
                    "{}… [{} more bytes]",
                    crate::text::head(&text, MAX_LINE_BYTES),
                    self.line_bytes - MAX_LINE_BYTES
                );
            }
            self.out.push_str(&format!("{:>6}\t{shown}\n", self.number));
            self.taken += 1;
        }
        self.number += 1;
        self.line.clear();
        self.line_bytes = 0;
    }

    /// The last line need not end in a line feed.
    fn end(&mut self) {
        if !self.full && self.line_bytes > 0 {
            self.finish_line();
        }
    }

    fn output(mut self, path: &str) -> Output {
        if self.taken == 0 {
            let lines = self.number - 1;
            return Output::error(format!("{path} has only {lines} lines; there is no line {}", self.first));
        }
        if self.full {
            let next = self.first + self.taken;
            self.out.push_str(&format!("[the file goes on; read it from offset {next}]"));
        }
        Output::text(self.out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inference::ResultPart;

    fn read(data: &str, first: u64, limit: u64) -> String {
        let mut lines = Lines::new(first, limit);
        // Pieces of every size give the same lines.
        for piece in data.as_bytes().chunks(3) {
            if lines.feed(piece) {
                break;
            }
        }
        lines.end();
        match lines.output("f").parts.remove(0) {
            ResultPart::Text { text } => text,
            ResultPart::Image(_) => unreachable!("text was read"),
        }
    }

    #[test]
    fn lines_have_numbers_and_ranges() {
        assert_eq!(read("a\nb\r\nc", 1, 10), "     1\ta\n     2\tb\n     3\tc\n");
        assert_eq!(read("a\nb\nc\n", 2, 1), "     2\tb\n[the file goes on; read it from offset 3]");
        assert_eq!(read("a\nb\n", 2, 5), "     2\tb\n");
        assert!(read("a\n", 5, 1).contains("only 1 lines"));
    }

    #[test]
    fn long_lines_and_long_files_are_cut_with_a_note() {
        let text = read(&"x".repeat(5000), 1, 1);
        assert!(text.contains("[3000 more bytes]"), "{}", &text[text.len() - 60..]);
        let text = read(&format!("{}\n", "y".repeat(100)).repeat(3000), 1, 3000);
        assert!(text.len() < MAX_READ_BYTES + 400 && text.contains("read it from offset"));
    }
}
