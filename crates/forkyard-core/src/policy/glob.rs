//! Wildcards and braces, as far as judging needs them.

use super::shell::Ch;

/// Whether `pattern` (`*` any run, `?` any one) matches all of `text`. A class `[…]` counts as any one character: when it is
/// in doubt, a judgement should see a match.
pub fn matches(pattern: &str, text: &str) -> bool {
    let pattern: Vec<char> = simplify(pattern);
    let text: Vec<char> = text.chars().collect();
    let (mut p, mut t) = (0, 0);
    let mut star: Option<(usize, usize)> = None;
    while t < text.len() {
        match pattern.get(p) {
            Some('*') => {
                star = Some((p, t));
                p += 1;
            }
            Some(c) if *c == '?' || *c == text[t] => {
                p += 1;
                t += 1;
            }
            Some(_) | None => match star {
                Some((star_p, star_t)) => {
                    p = star_p + 1;
                    t = star_t + 1;
                    star = Some((star_p, t));
                }
                None => return false,
            },
        }
    }
    pattern[p..].iter().all(|c| *c == '*')
}

/// Classes become `?`, runs of stars one.
fn simplify(pattern: &str) -> Vec<char> {
    let chars: Vec<char> = pattern.chars().collect();
    let mut out = Vec::with_capacity(chars.len());
    let mut i = 0;
    while i < chars.len() {
        match chars[i] {
            '[' => {
                let end = chars[i + 1..].iter().skip(1).position(|c| *c == ']').map(|n| i + n + 2);
                out.push(if end.is_some() { '?' } else { '[' });
                i = end.unwrap_or(i);
            }
            '*' if out.last() == Some(&'*') => {}
            c => out.push(c),
        }
        i += 1;
    }
    out
}

/// Longest word whose braces are unfolded; finding them takes the square of it.
const MAX_BRACED_CHARS: usize = 512;

/// `a{b,c}d` gives `abd` and `acd`. More than `max` words are left as written.
pub(super) fn expand_braces(word: &[Ch], max: usize) -> Vec<Vec<Ch>> {
    if word.len() > MAX_BRACED_CHARS {
        return vec![word.to_vec()];
    }
    let mut done: Vec<Vec<Ch>> = Vec::new();
    let mut todo: Vec<Vec<Ch>> = vec![word.to_vec()];
    while let Some(next) = todo.pop() {
        if done.len() + todo.len() >= max {
            return vec![word.to_vec()];
        }
        match first_brace(&next) {
            None => done.push(next),
            Some((open, commas, close)) => {
                let mut start = open + 1;
                let mut unfolded = Vec::new();
                for end in commas.into_iter().chain([close]) {
                    unfolded.push([&next[..open], &next[start..end], &next[close + 1..]].concat());
                    start = end + 1;
                }
                todo.extend(unfolded.into_iter().rev());
            }
        }
    }
    done
}

/// Positions of the first `{`, its own commas and its `}`; none without a comma.
fn first_brace(word: &[Ch]) -> Option<(usize, Vec<usize>, usize)> {
    for (open, _) in word.iter().enumerate().filter(|(_, ch)| ch.c == '{' && !ch.quoted) {
        let (mut depth, mut commas) = (0_usize, Vec::new());
        for (i, ch) in word.iter().enumerate().skip(open).filter(|(_, ch)| !ch.quoted) {
            match ch.c {
                '{' => depth += 1,
                ',' if depth == 1 => commas.push(i),
                '}' => {
                    depth = depth.saturating_sub(1);
                    if depth == 0 {
                        if commas.is_empty() {
                            break;
                        }
                        return Some((open, commas, i));
                    }
                }
                _ => {}
            }
        }
    }
    None
}
