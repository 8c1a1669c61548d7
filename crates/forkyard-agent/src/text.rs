//! Text within bounds, always saying what was left out.

use serde_json::Value;

/// Texts of a call's input longer than this are shortened where only readers see them.
const MAX_SHOWN_CHARS: usize = 1000;

/// The start of a text, cut at a character.
pub(crate) fn head(text: &str, max_bytes: usize) -> &str {
    let mut end = max_bytes.min(text.len());
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

/// At most `max_bytes` of the text, and a note of how much more there was.
pub(crate) fn cut(text: &str, max_bytes: usize) -> String {
    if text.len() <= max_bytes {
        return text.to_string();
    }
    format!("{}… [{} more bytes]", head(text, max_bytes), text.len() - head(text, max_bytes).len())
}

/// A call's input as readers see it.
pub(crate) fn shorten(input: &Value) -> Value {
    match input {
        Value::String(text) if text.len() > MAX_SHOWN_CHARS => Value::String(cut(text, MAX_SHOWN_CHARS)),
        Value::Array(items) => Value::Array(items.iter().map(shorten).collect()),
        Value::Object(map) => Value::Object(map.iter().map(|(k, v)| (k.clone(), shorten(v))).collect()),
        Value::String(_) | Value::Null | Value::Bool(_) | Value::Number(_) => input.clone(),
    }
}

/// Control characters that a terminal would act on, made visible.
pub(crate) fn plain(text: &str) -> String {
    text.chars()
        .map(|c| match c {
            '\n' | '\t' => c,
            c if c.is_control()
                || ('\u{202a}'..='\u{202e}').contains(&c)
                || ('\u{2066}'..='\u{2069}').contains(&c) =>
            {
                '\u{fffd}'
            }
            c => c,
        })
        .collect()
}

/// The first and the last part of a stream, in constant memory.
#[derive(Debug)]
pub(crate) struct HeadTail {
    head: Vec<u8>,
    tail: std::collections::VecDeque<u8>,
    max_head: usize,
    max_tail: usize,
    total: u64,
}

impl HeadTail {
    pub fn new(max: usize) -> HeadTail {
        let max_head = max * 2 / 3;
        HeadTail {
            head: Vec::new(),
            tail: std::collections::VecDeque::new(),
            max_head,
            max_tail: max - max_head,
            total: 0,
        }
    }

    pub fn push(&mut self, data: &[u8]) {
        self.total += data.len() as u64;
        let room = (self.max_head - self.head.len()).min(data.len());
        self.head.extend_from_slice(&data[..room]);
        let rest = &data[room..];
        let rest = &rest[rest.len().saturating_sub(self.max_tail)..];
        let over = (self.tail.len() + rest.len()).saturating_sub(self.max_tail);
        self.tail.drain(..over);
        self.tail.extend(rest);
    }

    pub fn total(&self) -> u64 {
        self.total
    }

    /// Everything, or both ends with a line between them that says how much is missing. `written` is what the source wrote,
    /// where more of it was dropped before it came here.
    pub fn text(&self, written: u64) -> String {
        let kept = (self.head.len() + self.tail.len()) as u64;
        let missing = written.max(self.total) - kept;
        let (front, back) = self.tail.as_slices();
        let tail = [front, back].concat();
        if missing == 0 {
            return String::from_utf8_lossy(&[self.head.as_slice(), &tail].concat()).into_owned();
        }
        format!(
            "{}\n… [{missing} bytes left out] …\n{}",
            String::from_utf8_lossy(&self.head),
            String::from_utf8_lossy(&tail)
        )
    }
}

const BASE64: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

pub(crate) fn base64(data: &[u8]) -> String {
    let mut out = String::with_capacity(data.len().div_ceil(3) * 4);
    for chunk in data.chunks(3) {
        let bits = chunk.iter().fold(0_u32, |n, b| n << 8 | u32::from(*b)) << (8 * (3 - chunk.len()));
        for i in 0..4 {
            let sextet = (bits >> (18 - 6 * i)) & 63;
            out.push(if i <= chunk.len() { char::from(BASE64[sextet as usize]) } else { '=' });
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_ends_are_kept_and_the_gap_is_told() {
        let mut text = HeadTail::new(9);
        for piece in ["abc", "def", "ghijklm", "", "nop"] {
            text.push(piece.as_bytes());
        }
        assert_eq!(text.text(0), "abcdef\n… [7 bytes left out] …\nnop");
        assert_eq!(text.total(), 16);
        let mut small = HeadTail::new(9);
        small.push(b"12345678");
        assert_eq!(small.text(0), "12345678");
        assert!(small.text(100).contains("92 bytes left out"));
    }

    #[test]
    fn cutting_respects_characters() {
        assert_eq!(head("aé", 2), "a");
        assert_eq!(cut("aéé", 3), "aé… [2 more bytes]");
        assert_eq!(cut("short", 10), "short");
    }

    #[test]
    fn base64_as_everybody_writes_it() {
        for (data, text) in [("", ""), ("f", "Zg=="), ("fo", "Zm8="), ("foo", "Zm9v"), ("foob", "Zm9vYg==")] {
            assert_eq!(base64(data.as_bytes()), text);
        }
    }

    #[test]
    fn terminals_are_safe_from_text() {
        assert_eq!(plain("a\u{1b}[31mb\r\n\u{202e}"), "a\u{fffd}[31mb\u{fffd}\n\u{fffd}");
    }
}
