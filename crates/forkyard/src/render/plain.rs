//! Text from a repository, an agent or a remote, made harmless for a terminal. Everything of that kind passes through here.

use std::fmt::Write;

use unicode_segmentation::UnicodeSegmentation;
use unicode_width::UnicodeWidthStr;

/// What a tab is shown as.
const TAB: &str = "    ";

/// One line: every character that moves a cursor, hides text or turns its direction is spelt out.
pub fn plain(text: &str) -> String {
    escape(text, |_| false)
}

/// Several lines: line breaks and tabs stay.
pub fn plain_block(text: &str) -> String {
    escape(text, |c| c == '\n' || c == '\t')
}

fn escape(text: &str, keep: impl Fn(char) -> bool) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            c if keep(c) => out.push(c),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c if c.is_control() => write!(out, "\\x{:02x}", u32::from(c)).expect("a string takes all"),
            c if is_invisible(c) => write!(out, "\\u{{{:x}}}", u32::from(c)).expect("a string takes all"),
            c => out.push(c),
        }
    }
    out
}

/// Marks that change how other characters are shown, or that are not shown at all.
fn is_invisible(c: char) -> bool {
    matches!(c,
        '\u{061c}' | '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}'
        | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}')
}

/// Columns that a text takes on a terminal.
pub fn width(text: &str) -> usize {
    UnicodeWidthStr::width(text)
}

/// At most `max` columns of a text; what is cut off ends in `…`.
pub fn fit(text: &str, max: usize) -> String {
    if width(text) <= max {
        return text.to_string();
    }
    let mut out = String::new();
    // What is seen as one character takes the columns of the whole, not of its parts.
    for seen in text.graphemes(true) {
        let before = out.len();
        out.push_str(seen);
        if width(&out) + 1 > max {
            out.truncate(before);
            break;
        }
    }
    if max > 0 {
        out.push('…');
    }
    out
}

/// Lines of at most `max` columns, broken at a space where there is one.
pub fn wrap(text: &str, max: usize) -> Vec<String> {
    let text = text.replace('\t', TAB);
    if width(&text) <= max {
        return vec![text];
    }
    let mut lines = Vec::new();
    let mut line = String::new();
    // Where the line could be broken: up to and with the last space that is not of an indent.
    let mut space = None;
    for seen in text.graphemes(true) {
        let before = line.len();
        line.push_str(seen);
        if width(&line) > max && before > 0 {
            let at = if seen == " " { line.len() } else { space.unwrap_or(before) };
            let rest = line.split_off(at);
            line.truncate(line.trim_end().len());
            lines.push(std::mem::replace(&mut line, rest));
            space = None;
        }
        if seen == " " && !line.trim().is_empty() {
            space = Some(line.len());
        }
    }
    if !line.is_empty() || lines.is_empty() {
        lines.push(line);
    }
    lines
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn nothing_that_steers_a_terminal_is_left() {
        let hostile = "a\x1b[2J\x1b]0;title\x07b\rc\u{9b}31md\u{202e}evil\u{200b}\u{e0041}\u{2066}\x7f\0";
        let shown = plain(hostile);
        assert!(!shown.chars().any(|c| c.is_control() || is_invisible(c)), "{shown:?}");
        assert!(shown.starts_with("a\\x1b[2J\\x1b]0;title\\x07b\\rc\\x9b31md\\u{202e}evil"), "{shown}");
        assert_eq!(plain("a\nb\tc"), "a\\nb\\tc");
        assert_eq!(plain_block("a\nb\tc\x1b"), "a\nb\tc\\x1b");
        assert_eq!(plain("grün 日本 🦀"), "grün 日本 🦀");
    }

    #[test]
    fn texts_fit_their_columns() {
        assert_eq!(fit("hello", 5), "hello");
        assert_eq!(fit("hello", 4), "hel…");
        assert_eq!(fit("日本語", 5), "日本…");
        assert_eq!(fit("日本語", 4), "日…");
        assert_eq!(fit("hello", 0), "");
        for max in 0..10 {
            assert!(width(&fit("日a本b語🦀", max)) <= max);
            assert!(width(&fit("error ⚠️ tests ❤️ failed 👍🏽", max)) <= max);
        }
    }

    #[test]
    fn lines_break_at_spaces_and_inside_long_words() {
        assert_eq!(wrap("the quick brown fox", 10), ["the quick", "brown fox"]);
        assert_eq!(wrap("abcdefghijkl", 5), ["abcde", "fghij", "kl"]);
        assert_eq!(wrap("日本語です", 4), ["日本", "語で", "す"]);
        assert_eq!(wrap("", 4), [""]);
        assert_eq!(wrap("ab", 0), ["a", "b"]);
        assert_eq!(wrap("aa bbb cc", 6), ["aa bbb", "cc"]);
        assert_eq!(wrap("done 👍🏽", 7), ["done 👍🏽"]);
        assert_eq!(wrap("⚠️⚠️⚠️", 4), ["⚠️⚠️", "⚠️"]);
        assert_eq!(wrap("a\tbc", 5), ["a", "bc"]);
    }

    proptest! {
        #[test]
        fn nothing_but_spaces_is_lost_and_no_line_is_too_wide(text in "([a-z日本 \t]|⚠️|👍🏽|e\u{301}){0,80}", columns in 2_usize..30) {
            let lines = wrap(&text, columns);
            prop_assert!(lines.iter().all(|l| width(l) <= columns), "{lines:?}");
            let letters = |s: &str| s.chars().filter(|c| !c.is_whitespace()).collect::<String>();
            prop_assert_eq!(letters(&lines.concat()), letters(&text));
            prop_assert!(width(&fit(&text, columns)) <= columns);
        }
    }
}
