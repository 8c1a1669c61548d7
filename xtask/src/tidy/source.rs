//! Reading Rust source without a parser: comments and literals blanked out, so that rules look at code alone.

/// The code of a file, line by line, of the same shape: what was in a comment, string or character is blank.
/// A module of tests that stands at a file's end is left out; so is everything after its `#[cfg(test)]`.
pub fn code(text: &str) -> Vec<String> {
    let lines: Vec<String> = blank(text).lines().map(str::to_string).collect();
    let tests =
        lines.windows(2).position(|w| w[0].starts_with("#[cfg(test)]") && w[1].trim_end().ends_with('{'));
    lines.into_iter().take(tests.unwrap_or(usize::MAX)).collect()
}

/// Comments and literals replaced by spaces; line breaks stay.
pub fn blank(text: &str) -> String {
    let b = text.as_bytes();
    let mut out = Vec::with_capacity(b.len());
    let mut i = 0;
    let keep = |out: &mut Vec<u8>, from: usize, to: usize, code: bool| {
        out.extend(b[from..to.min(b.len())].iter().map(|&c| if code || c == b'\n' { c } else { b' ' }));
    };
    while i < b.len() {
        let end = literal_end(b, i);
        match end {
            Some(end) => {
                keep(&mut out, i, end, false);
                i = end;
            }
            None => {
                keep(&mut out, i, i + 1, true);
                i += 1;
            }
        }
    }
    String::from_utf8_lossy(&out).into_owned()
}

/// Where the comment or literal that starts at `i` ends; None if none starts there.
fn literal_end(b: &[u8], i: usize) -> Option<usize> {
    let rest = &b[i..];
    if rest.starts_with(b"//") {
        return Some(i + rest.iter().position(|&c| c == b'\n').unwrap_or(rest.len()));
    }
    if rest.starts_with(b"/*") {
        let mut depth = 0;
        let mut j = i;
        while j < b.len() {
            if b[j..].starts_with(b"/*") {
                depth += 1;
                j += 2;
            } else if b[j..].starts_with(b"*/") {
                depth -= 1;
                j += 2;
                if depth == 0 {
                    return Some(j);
                }
            } else {
                j += 1;
            }
        }
        return Some(b.len());
    }
    let after_word = i > 0 && (b[i - 1].is_ascii_alphanumeric() || b[i - 1] == b'_');
    if rest[0] == b'r' && (!after_word || b[i - 1] == b'b') {
        let hashes = rest[1..].iter().take_while(|&&c| c == b'#').count();
        if rest.get(1 + hashes) == Some(&b'"') {
            let close: Vec<u8> = std::iter::once(b'"').chain(std::iter::repeat_n(b'#', hashes)).collect();
            let body = i + 2 + hashes;
            let at = b[body..].windows(close.len()).position(|w| w == close);
            return Some(at.map_or(b.len(), |p| body + p + close.len()));
        }
    }
    if rest[0] == b'"' {
        let mut j = i + 1;
        while j < b.len() {
            match b[j] {
                b'\\' => j += 2,
                b'"' => return Some(j + 1),
                _ => j += 1,
            }
        }
        return Some(b.len());
    }
    if rest[0] == b'\'' {
        // 'x', '\n', '\u{..}', 'ä'; a lifetime has no closing quote near by.
        if rest.get(1) == Some(&b'\\') {
            let close = rest.iter().skip(3).position(|&c| c == b'\'')?;
            return Some(i + 3 + close + 1);
        }
        let width = std::str::from_utf8(&rest[1..rest.len().min(5)])
            .ok()
            .or_else(|| (1..5).rev().find_map(|n| std::str::from_utf8(rest.get(1..1 + n)?).ok()))
            .and_then(|s| s.chars().next())?
            .len_utf8();
        return (rest.get(1 + width) == Some(&b'\'')).then_some(i + 2 + width);
    }
    None
}

/// Whether `word` (a path or a name) stands in `line` on its own.
pub fn has_word(line: &str, word: &str) -> bool {
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    line.match_indices(word).any(|(at, _)| {
        let before = line[..at].chars().next_back();
        let after = line[at + word.len()..].chars().next();
        let longer = word.ends_with(is_word) && after.is_some_and(is_word);
        !(longer || before.is_some_and(is_word))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_code_is_left() {
        let text = "let a = \"HashMap\"; // HashMap\n/* x /* y */ HashMap */ use b; let c = '\"'; r#\"a\"HashMap\"#; 'a: loop {}\nlet d = '\\'';e()";
        let code = blank(text);
        assert!(!code.contains("HashMap"), "{code}");
        assert_eq!(code.lines().count(), text.lines().count());
        for kept in ["let a =", "use b;", "'a: loop {}", "e()"] {
            assert!(code.contains(kept), "{kept}: {code}");
        }
    }

    #[test]
    fn words_stand_alone() {
        assert!(has_word("x: HashMap<u8>", "HashMap"));
        assert!(!has_word("x: MyHashMap<u8>", "HashMap"));
        assert!(!has_word("HashMapper", "HashMap"));
        assert!(has_word("std::env::var(\"X\")", "env::var"));
    }

    #[test]
    fn tests_at_the_end_are_left_out() {
        assert_eq!(code("fn a() {}\n#[cfg(test)]\nmod tests {\n use HashMap; }").len(), 1);
        assert_eq!(code("#[cfg(test)]\nmod tests;\nfn a() {}").len(), 3);
    }
}
