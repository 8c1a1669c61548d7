//! Words: quoting, expansions, substitutions.

use super::super::glob::expand_braces;
use super::{Ch, MAX_DEPTH, MAX_EXPANSION, MAX_EXPANSIONS, Parser, UNKNOWN, Word, constant_output};

impl Parser {
    /// One word as written; expansion may make none or several of it.
    pub(super) fn word(&mut self) -> Vec<Word> {
        let mut chars: Vec<Ch> = Vec::new();
        let mut quoted = false;
        while let Some(c) = self.peek() {
            match c {
                ' ' | '\t' | '\n' | '\r' | ';' | '&' | '|' | '(' | ')' => {
                    // `name=(` and `+(`: arrays and extended globs belong to the word.
                    let array =
                        c == '(' && chars.last().is_some_and(|l| matches!(l.c, '=' | '@' | '+' | '!'));
                    if !array || chars.len() < 2 {
                        break;
                    }
                    self.pos += 1;
                    self.nested(')');
                    chars.push(Ch { c: UNKNOWN, quoted: true });
                }
                '<' | '>' if self.is_process_substitution() && chars.is_empty() => {
                    self.pos += 2;
                    self.nested(')');
                    chars.push(Ch { c: UNKNOWN, quoted: true });
                }
                '<' | '>' => break,
                '\\' => {
                    self.pos += 1;
                    match self.peek() {
                        Some('\n') => self.pos += 1,
                        Some(c) => {
                            quoted = true;
                            chars.push(Ch { c, quoted: true });
                            self.pos += 1;
                        }
                        None => chars.push(Ch { c: '\\', quoted: true }),
                    }
                }
                '\'' => {
                    quoted = true;
                    self.pos += 1;
                    while let Some(c) = self.peek() {
                        self.pos += 1;
                        if c == '\'' {
                            break;
                        }
                        chars.push(Ch { c, quoted: true });
                    }
                }
                '"' => {
                    quoted = true;
                    self.pos += 1;
                    self.double_quoted(Some('"'), &mut chars);
                }
                '$' if self.peek_at(1) == Some('\'') => {
                    quoted = true;
                    self.pos += 2;
                    self.ansi_c(&mut chars);
                }
                '$' if self.peek_at(1) == Some('"') => self.pos += 1,
                '$' => self.dollar(false, &mut chars),
                '`' => self.backticks(false, &mut chars),
                '~' if chars.is_empty() => {
                    self.pos += 1;
                    let alone = self
                        .peek()
                        .is_none_or(|c| matches!(c, '/' | ' ' | '\t' | '\n' | ';' | '&' | '|' | ')'));
                    if alone {
                        chars.extend(self.home.chars().map(|c| Ch { c, quoted: true }));
                    } else if self.take("root") {
                        chars.extend("/root".chars().map(|c| Ch { c, quoted: true }));
                    } else {
                        chars.push(Ch { c: '~', quoted: true });
                    }
                }
                c => {
                    chars.push(Ch { c, quoted: false });
                    self.pos += 1;
                }
            }
        }
        let mut words = Vec::new();
        for field in chars.split(|ch| ch.c == ' ' && !ch.quoted) {
            if field.is_empty() && !(quoted && chars.is_empty()) {
                continue;
            }
            for chars in expand_braces(field, MAX_EXPANSION) {
                words.push(Word {
                    glob: chars.iter().any(|ch| !ch.quoted && matches!(ch.c, '*' | '?' | '[')),
                    text: chars.into_iter().map(|ch| ch.c).collect(),
                    quoted,
                });
            }
        }
        words
    }

    /// Up to `end` (consumed), or the end of the text for a here-document's body.
    pub(super) fn double_quoted(&mut self, end: Option<char>, out: &mut Vec<Ch>) {
        while let Some(c) = self.peek() {
            match c {
                c if Some(c) == end => {
                    self.pos += 1;
                    return;
                }
                '\\' => {
                    self.pos += 1;
                    match self.peek() {
                        Some('\n') => self.pos += 1,
                        Some(c @ ('$' | '`' | '"' | '\\')) => {
                            out.push(Ch { c, quoted: true });
                            self.pos += 1;
                        }
                        _ => out.push(Ch { c: '\\', quoted: true }),
                    }
                }
                '$' => self.dollar(true, out),
                '`' => self.backticks(true, out),
                c => {
                    out.push(Ch { c, quoted: true });
                    self.pos += 1;
                }
            }
        }
    }

    /// `$'…'`, after the opening quote.
    fn ansi_c(&mut self, out: &mut Vec<Ch>) {
        while let Some(c) = self.peek() {
            self.pos += 1;
            let c = match c {
                '\'' => return,
                '\\' => {
                    let escape = self.peek();
                    self.pos += 1;
                    match escape {
                        Some('n') => '\n',
                        Some('t') => '\t',
                        Some('r') => '\r',
                        Some('e' | 'E') => '\u{1b}',
                        Some('x') => self.number(16, 2),
                        Some('u') => self.number(16, 4),
                        Some('U') => self.number(16, 8),
                        Some('0'..='7') => {
                            self.pos -= 1;
                            self.number(8, 3)
                        }
                        Some(c) => c,
                        None => return,
                    }
                }
                c => c,
            };
            out.push(Ch { c, quoted: true });
        }
    }

    fn number(&mut self, radix: u32, digits: usize) -> char {
        let mut value = 0_u32;
        for _ in 0..digits {
            let Some(digit) = self.peek().and_then(|c| c.to_digit(radix)) else { break };
            value = value.saturating_mul(radix).saturating_add(digit);
            self.pos += 1;
        }
        char::from_u32(value).filter(|c| *c != UNKNOWN).unwrap_or(char::REPLACEMENT_CHARACTER)
    }

    pub(super) fn backticks(&mut self, quoted: bool, out: &mut Vec<Ch>) {
        self.pos += 1;
        let mut inner = Vec::new();
        while let Some(c) = self.peek() {
            self.pos += 1;
            match c {
                '`' => break,
                '\\' if matches!(self.peek(), Some('`' | '\\' | '$')) => {
                    inner.extend(self.peek());
                    self.pos += 1;
                }
                c => inner.push(c),
            }
        }
        let before = self.script.commands.len();
        self.within(inner, |p| p.list(None));
        self.substituted(before, quoted, out);
    }

    /// Puts a substitution's output, where the command only repeats its words.
    fn substituted(&mut self, before: usize, quoted: bool, out: &mut Vec<Ch>) {
        let text = match self.script.commands.get(before..) {
            Some([command]) if command.redirects.is_empty() => constant_output(command),
            _ => None,
        };
        match text {
            Some(text) => out.extend(text.trim_end_matches('\n').chars().map(|c| Ch { c, quoted })),
            None => out.push(Ch { c: UNKNOWN, quoted: true }),
        }
    }

    pub(super) fn dollar(&mut self, quoted: bool, out: &mut Vec<Ch>) {
        self.pos += 1;
        self.expansions += 1;
        if self.depth > MAX_DEPTH || self.expansions > MAX_EXPANSIONS {
            return self.give_up();
        }
        self.depth += 1;
        self.expansion(quoted, out);
        self.depth -= 1;
    }

    fn expansion(&mut self, quoted: bool, out: &mut Vec<Ch>) {
        match self.peek() {
            Some('(') if self.is_arithmetic() => out.push(Ch { c: UNKNOWN, quoted: true }),
            Some('(') => {
                self.pos += 1;
                let before = self.script.commands.len();
                let (vars, cwd) = (self.vars.clone(), self.cwd.clone());
                self.nested(')');
                (self.vars, self.cwd) = (vars, cwd);
                self.substituted(before, quoted, out);
            }
            Some('{') => {
                self.pos += 1;
                self.braced(quoted, out);
            }
            Some(c) if c.is_ascii_alphabetic() || c == '_' => {
                let name = self.name();
                self.value(&name, quoted, out);
            }
            Some('@' | '*' | '#' | '?' | '-' | '$' | '!' | '0'..='9') => {
                self.pos += 1;
                out.push(Ch { c: UNKNOWN, quoted: true });
            }
            Some(_) | None => out.push(Ch { c: '$', quoted }),
        }
    }

    /// Consumes `((…))`, if it is that.
    fn is_arithmetic(&mut self) -> bool {
        let here = self.pos;
        let is_arithmetic = self.take("((") && self.arithmetic();
        if !is_arithmetic {
            self.pos = here;
        }
        is_arithmetic
    }

    fn name(&mut self) -> String {
        let mut name = String::new();
        while let Some(c) = self.peek().filter(|c| c.is_ascii_alphanumeric() || *c == '_') {
            name.push(c);
            self.pos += 1;
        }
        name
    }

    fn value(&mut self, name: &str, quoted: bool, out: &mut Vec<Ch>) {
        match self.vars.get(name).map(Vec::as_slice) {
            Some([one]) => out.extend(one.chars().map(|c| Ch { c, quoted })),
            // One of several, whichever the loop is at: all of them, as words.
            Some(many) => {
                for value in many {
                    out.extend(value.chars().map(|c| Ch { c, quoted: true }));
                    out.push(Ch { c: ' ', quoted: false });
                }
            }
            None => out.push(Ch { c: UNKNOWN, quoted: true }),
        }
    }

    /// `${…}`, after the brace.
    fn braced(&mut self, quoted: bool, out: &mut Vec<Ch>) {
        let name = self.name();
        if self.take("}") {
            return self.value(&name, quoted, out);
        }
        let with_default = self.take(":-") || self.take(":=") || self.take("-") || self.take("=");
        let mut rest = Vec::new();
        self.double_quoted(Some('}'), &mut rest);
        if !with_default {
            out.push(Ch { c: UNKNOWN, quoted: true });
        } else if self.vars.contains_key(&name) {
            self.value(&name, quoted, out);
        } else {
            out.extend(rest.into_iter().map(|ch| Ch { quoted: quoted || ch.c == UNKNOWN, ..ch }));
        }
    }
}
