//! What was found, for people: a mark, a name and what it is like; the fix below, where there is one. Nothing is cut.

use super::{Check, Health};
use crate::render::{Color, Style, plain, width, wrap};

/// Between names and what was found.
const GAP: usize = 2;
/// What was found has at least this much room beside its name; else it stands below.
const MIN_BESIDE: usize = 30;
/// Of what stands below a name.
const BELOW: usize = 4;

fn mark(health: Health) -> (&'static str, Color) {
    match health {
        Health::Good => ("✓", Color::Green),
        Health::Missing => ("–", Color::Yellow),
        Health::Open => ("!", Color::Yellow),
        Health::Bad => ("✗", Color::Red),
    }
}

pub fn list(checks: &[Check], style: &Style) -> String {
    let names = checks.iter().map(|c| width(&c.name)).max().unwrap_or(0);
    let beside = 2 + names + GAP;
    let is_beside = style.width >= beside + MIN_BESIDE;
    let indent = if is_beside { beside } else { BELOW };
    let room = style.width.saturating_sub(indent);
    let mut out = String::new();
    for c in checks {
        let (sign, color) = mark(c.health);
        let name = plain(&c.name);
        let head = format!("{} {}", style.paint(color, sign), style.paint(Color::Bold, &name));
        let mut found = lines(&c.found, room);
        if is_beside {
            let first = if found.is_empty() { String::new() } else { found.remove(0) };
            let pad = " ".repeat(beside - 2 - width(&name));
            out.push_str(format!("{head}{pad}{first}").trim_end());
        } else {
            out.push_str(&head);
        }
        out.push('\n');
        for line in found {
            out.push_str(&format!("{}{line}\n", " ".repeat(indent)));
        }
        let word = "fix: ";
        for (n, line) in c.fix.iter().flat_map(|fix| lines(fix, room.saturating_sub(word.len()))).enumerate()
        {
            let before = if n == 0 { style.paint(Color::Cyan, word) } else { " ".repeat(word.len()) };
            out.push_str(&format!("{}{before}{line}\n", " ".repeat(indent)));
        }
    }
    out
}

fn lines(text: &str, room: usize) -> Vec<String> {
    // What a space was broken at is no indent.
    let wrapped = wrap(&plain(text), room).into_iter().map(|line| line.trim_start().to_string());
    wrapped.filter(|line| !line.is_empty()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checks() -> Vec<Check> {
        vec![
            Check::good("home", "/home/somebody/.forkyard"),
            Check::missing("memory limit", "watchdog", "run as root, or in a delegated cgroup: systemd-run"),
            Check::bad("isolation", "refused\x1b[2J by the kernel", "sysctl x=1"),
        ]
    }

    #[test]
    fn the_mark_stands_beside_the_name_and_the_fix_below() {
        let style = Style { color: false, width: 46, height: Some(24) };
        assert_eq!(
            list(&checks(), &style),
            "✓ home          /home/somebody/.forkyard
– memory limit  watchdog
                fix: run as root, or in a
                     delegated cgroup:
                     systemd-run
✗ isolation     refused\\x1b[2J by the kernel
                fix: sysctl x=1
"
        );
        let style = Style { color: false, width: 30, height: Some(24) };
        assert_eq!(
            list(&checks()[1..], &style),
            "– memory limit
    watchdog
    fix: run as root, or in a
         delegated cgroup:
         systemd-run
✗ isolation
    refused\\x1b[2J by the
    kernel
    fix: sysctl x=1
"
        );
    }

    #[test]
    fn nothing_is_cut_at_any_width() {
        let letters = |s: &str| s.chars().filter(|c| !c.is_whitespace()).collect::<String>();
        for columns in 20..200 {
            let style = Style { color: false, width: columns, height: Some(24) };
            let text = list(&checks(), &style);
            assert!(text.lines().all(|l| width(l) <= columns), "{columns}: {text}");
            for c in checks() {
                for part in [Some(c.found), c.fix].into_iter().flatten() {
                    assert!(letters(&text).contains(&letters(&plain(&part))), "{columns}: {part}: {text}");
                }
            }
        }
    }
}
