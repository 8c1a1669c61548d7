//! Server-sent events out of bytes that may be cut anywhere: within a character, a line end, a field.

use std::collections::VecDeque;

/// Longest line or event. A token's event is some hundred bytes; a redacted thinking block can be a few hundred kilobytes.
pub const MAX_EVENT_BYTES: usize = 4 << 20;

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SseEvent {
    /// Empty if the event has no name.
    pub name: String,
    /// Bytes: JSON parsing checks the encoding.
    pub data: Vec<u8>,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("an event of the stream is longer than {MAX_EVENT_BYTES} bytes")]
pub struct EventTooLong;

/// Feed bytes, take events. Holds at most one event and one line beside the finished events of the last chunk.
#[derive(Debug, Default)]
pub struct SseParser {
    line: Vec<u8>,
    /// The last byte was a CR: a LF after it belongs to the same line end.
    after_cr: bool,
    started: bool,
    current: SseEvent,
    has_data: bool,
    ready: VecDeque<SseEvent>,
}

impl SseParser {
    pub fn push(&mut self, mut chunk: &[u8]) -> Result<(), EventTooLong> {
        while !chunk.is_empty() {
            if std::mem::take(&mut self.after_cr) && chunk[0] == b'\n' {
                chunk = &chunk[1..];
                continue;
            }
            let end = chunk.iter().position(|b| matches!(b, b'\n' | b'\r'));
            let part = &chunk[..end.unwrap_or(chunk.len())];
            if self.line.len() + self.current.data.len() + part.len() > MAX_EVENT_BYTES {
                return Err(EventTooLong);
            }
            self.line.extend_from_slice(part);
            let Some(end) = end else { break };
            self.after_cr = chunk[end] == b'\r';
            chunk = &chunk[end + 1..];
            self.end_line();
        }
        Ok(())
    }

    pub fn next_event(&mut self) -> Option<SseEvent> {
        self.ready.pop_front()
    }

    fn end_line(&mut self) {
        let line = std::mem::take(&mut self.line);
        let mut text = line.as_slice();
        if !std::mem::replace(&mut self.started, true) {
            text = text.strip_prefix(b"\xef\xbb\xbf").unwrap_or(text);
        }
        if text.is_empty() {
            let event = std::mem::take(&mut self.current);
            if std::mem::take(&mut self.has_data) {
                self.ready.push_back(event);
            }
        } else {
            let (field, value) = match text.iter().position(|b| *b == b':') {
                Some(at) => (&text[..at], text[at + 1..].strip_prefix(b" ").unwrap_or(&text[at + 1..])),
                None => (text, &b""[..]),
            };
            match field {
                b"event" => self.current.name = String::from_utf8_lossy(value).into_owned(),
                b"data" => {
                    if std::mem::replace(&mut self.has_data, true) {
                        self.current.data.push(b'\n');
                    }
                    self.current.data.extend_from_slice(value);
                }
                // A comment (no field name), `id`, `retry`, or something new: not needed.
                _ => {}
            }
        }
        // Keep the allocation for the next line.
        self.line = line;
        self.line.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn parse(chunks: &[&[u8]]) -> Vec<SseEvent> {
        let mut parser = SseParser::default();
        let mut events = Vec::new();
        for chunk in chunks {
            parser.push(chunk).unwrap();
            events.extend(std::iter::from_fn(|| parser.next_event()));
        }
        events
    }

    fn event(name: &str, data: &str) -> SseEvent {
        SseEvent { name: name.into(), data: data.as_bytes().to_vec() }
    }

    #[test]
    fn fields_comments_and_all_line_ends() {
        let text = "\u{feff}event: a\ndata: 1\ndata:2\n\n: ping\r\ndata: x\r\n\r\nid: 7\revent: b\rdata\r\rdata: unfinished\n";
        assert_eq!(parse(&[text.as_bytes()]), vec![event("a", "1\n2"), event("", "x"), event("b", "")]);
    }

    #[test]
    fn an_event_without_data_is_none() {
        assert_eq!(parse(&[b"event: a\n\ndata: 1\n\n"]), vec![event("", "1")]);
    }

    #[test]
    fn an_endless_line_and_an_endless_event_are_refused() {
        let mut parser = SseParser::default();
        let chunk = vec![b'x'; 1 << 20];
        assert!((0..10).any(|_| parser.push(&chunk).is_err()));
        let mut parser = SseParser::default();
        let line = format!("data: {}\n", "y".repeat(1 << 20));
        assert!((0..10).any(|_| parser.push(line.as_bytes()).is_err()));
    }

    proptest! {
        #[test]
        fn any_cut_gives_the_same_events(text in "(event: [a-zé]{0,3}(\n|\r\n|\r)|data:[ a-z漢:]{0,6}(\n|\r\n|\r)|(\n|\r\n|\r)|:[a-z]{0,3}\n){0,20}", cuts in prop::collection::vec(0usize..200, 0..8)) {
            let bytes = text.as_bytes();
            let mut cuts: Vec<usize> = cuts.into_iter().map(|c| c.min(bytes.len())).collect();
            cuts.extend([0, bytes.len()]);
            cuts.sort_unstable();
            let pieces: Vec<&[u8]> = cuts.windows(2).map(|w| &bytes[w[0]..w[1]]).collect();
            prop_assert_eq!(parse(&pieces), parse(&[bytes]));
            let single: Vec<&[u8]> = bytes.chunks(1).collect();
            prop_assert_eq!(parse(&single), parse(&[bytes]));
        }
    }
}
