//! One line of text that a user writes, with a cursor in it.

/// More than this belongs into a file of the repository.
const MAX_CHARS: usize = 10_000;

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Line {
    chars: Vec<char>,
    cursor: usize,
}

impl Line {
    pub fn new(text: &str) -> Line {
        let mut line = Line::default();
        line.insert(text);
        line
    }

    pub fn text(&self) -> String {
        self.chars.iter().collect()
    }

    /// What stands before the cursor, and what after it.
    pub fn halves(&self) -> (String, String) {
        let (before, after) = self.chars.split_at(self.cursor);
        (before.iter().collect(), after.iter().collect())
    }

    /// Typed or pasted. Of what steers a terminal only line breaks are kept, as part of the text.
    pub fn insert(&mut self, text: &str) {
        for c in text.replace("\r\n", "\n").chars() {
            let c = match c {
                '\r' => '\n',
                '\t' => ' ',
                c => c,
            };
            if (c != '\n' && c.is_control()) || self.chars.len() >= MAX_CHARS {
                continue;
            }
            self.chars.insert(self.cursor, c);
            self.cursor += 1;
        }
    }

    pub fn backspace(&mut self) {
        if self.cursor > 0 {
            self.cursor -= 1;
            self.chars.remove(self.cursor);
        }
    }

    pub fn delete(&mut self) {
        if self.cursor < self.chars.len() {
            self.chars.remove(self.cursor);
        }
    }

    /// The word before the cursor, as a shell does it.
    pub fn delete_word(&mut self) {
        let before = &self.chars[..self.cursor];
        let end = before.iter().rposition(|c| !c.is_whitespace()).map_or(0, |i| i + 1);
        let start = before[..end].iter().rposition(|c| c.is_whitespace()).map_or(0, |i| i + 1);
        self.chars.drain(start..self.cursor);
        self.cursor = start;
    }

    pub fn clear(&mut self) {
        *self = Line::default();
    }

    pub fn left(&mut self) {
        self.cursor = self.cursor.saturating_sub(1);
    }
    pub fn right(&mut self) {
        self.cursor = (self.cursor + 1).min(self.chars.len());
    }
    pub fn home(&mut self) {
        self.cursor = 0;
    }
    pub fn end(&mut self) {
        self.cursor = self.chars.len();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_edited_by_characters() {
        let mut l = Line::new("grün 日本");
        l.left();
        l.backspace();
        l.insert("x\x1b[2J");
        assert_eq!(l.text(), "grün x[2J本");
        l.end();
        l.delete_word();
        assert_eq!(l.text(), "grün ");
        l.home();
        l.delete();
        l.left();
        assert_eq!(l.halves(), (String::new(), "rün ".to_string()));
        l.clear();
        l.backspace();
        l.delete();
        l.delete_word();
        assert_eq!(l, Line::default());
    }

    #[test]
    fn what_is_pasted_keeps_its_lines_and_is_bounded() {
        let mut l = Line::new("a\r\nb\rc\td");
        assert_eq!(l.text(), "a\nb\nc d");
        l.insert(&"x".repeat(2 * MAX_CHARS));
        assert_eq!(l.text().chars().count(), MAX_CHARS);
    }
}
