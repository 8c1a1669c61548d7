//! A run while it works: one line a fork, totals below. The same board is a live picture on a terminal, and lines that
//! say what changed in a pipe.

use std::collections::BTreeMap;

use forkyard_core::view::{DiffStat, ForkOutcome, ForkView, Lifecycle, RunView};
use forkyard_core::{ForkNum, Timestamp, Usd};

use super::closing::models_differ;
use super::plain::{fit, plain, width};
use super::style::{Color, Style};

/// Columns of a bar.
const BAR: usize = 20;
/// Lines of a terminal that are not for forks: the run's own, the totals, and some for the prompt.
const OTHER_LINES: usize = 6;
/// A lower terminal is left to the forks.
const MIN_HEIGHT_FOR_HEAD: usize = 10;
/// Fewer forks than this are never shown, however low the terminal.
const MIN_FORK_LINES: usize = 1;

/// What there is to show at one moment.
#[derive(Debug, Clone, PartialEq)]
pub struct Board {
    pub run: RunView,
    /// By number.
    pub forks: Vec<ForkView>,
    /// What a fork does right now: a tool and its argument.
    pub doing: BTreeMap<ForkNum, String>,
    pub spent: Usd,
    pub now: Timestamp,
}

/// One fork in one line: a mark and its number in the colour of its state, and the rest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ForkText {
    pub head: String,
    pub color: Color,
    pub rest: String,
}

/// A fork's state in one word, and its colour.
pub fn state(f: &ForkView) -> (&'static str, Color) {
    match (f.outcome, f.lifecycle) {
        (Some(ForkOutcome::Success), _) if f.verified == Some(true) => ("verified", Color::Green),
        (Some(ForkOutcome::Success), _) if f.verified == Some(false) => ("unverified", Color::Yellow),
        (Some(ForkOutcome::Success), _) => ("success", Color::Green),
        (Some(ForkOutcome::Failed), _) => ("failed", Color::Red),
        (Some(ForkOutcome::Timeout), _) => ("timeout", Color::Red),
        (Some(ForkOutcome::Cancelled), _) => ("cancelled", Color::Yellow),
        (Some(ForkOutcome::BudgetExceeded), _) => ("budget_exceeded", Color::Red),
        (None, Lifecycle::Pending) => ("pending", Color::Dim),
        (None, Lifecycle::Creating) => ("creating", Color::Cyan),
        (None, Lifecycle::Running) => ("running", Color::Cyan),
        (None, Lifecycle::Completing) => ("completing", Color::Cyan),
        (None, Lifecycle::Completed | Lifecycle::Failed) => ("ending", Color::Dim),
    }
}

fn glyph(f: &ForkView) -> &'static str {
    match (f.outcome, f.lifecycle) {
        (Some(ForkOutcome::Success), _) => "✓",
        (Some(ForkOutcome::Cancelled), _) => "–",
        (Some(ForkOutcome::Failed | ForkOutcome::Timeout | ForkOutcome::BudgetExceeded), _) => "✗",
        (None, Lifecycle::Pending) => "·",
        (None, Lifecycle::Creating | Lifecycle::Running | Lifecycle::Completing) => "●",
        (None, Lifecycle::Completed | Lifecycle::Failed) => "○",
    }
}

/// Of an answer that is being written, what was written last.
fn last_line(text: &str) -> String {
    text.lines().rev().find(|l| !l.trim().is_empty()).unwrap_or_default().trim().to_string()
}

/// `2 files +10 -3`.
pub fn diff_text(d: DiffStat) -> String {
    if d.is_empty() {
        return "no change".into();
    }
    let files = if d.files == 1 { "file" } else { "files" };
    format!("{} {files} +{} -{}", d.files, d.added, d.removed)
}

/// Those that work come first, then what has ended, then what waits.
fn urgency(f: &ForkView) -> u8 {
    match (f.outcome, f.lifecycle) {
        (None, Lifecycle::Creating | Lifecycle::Running | Lifecycle::Completing) => 0,
        (Some(_), _) | (None, Lifecycle::Completed | Lifecycle::Failed) => 1,
        (None, Lifecycle::Pending) => 2,
    }
}

impl Board {
    /// The picture, no line wider than the terminal and not more lines than it has.
    pub fn lines(&self, style: &Style) -> Vec<String> {
        let room = style.height.map_or(usize::MAX, |h| h.saturating_sub(OTHER_LINES).max(MIN_FORK_LINES));
        let mut shown: Vec<&ForkView> = self.forks.iter().collect();
        let mut hidden = Vec::new();
        if shown.len() > room {
            shown.sort_by_key(|f| (urgency(f), f.fork));
            hidden = shown.split_off(room);
            shown.sort_by_key(|f| f.fork);
        }
        let digits = self.digits();
        let mut lines = Vec::new();
        if style.height.is_none_or(|h| h >= MIN_HEIGHT_FOR_HEAD) {
            let head = format!("{0} · forkyard watch {0}", self.run.id);
            lines.push(style.paint(Color::Dim, &fit(&head, style.width)));
        }
        lines.extend(shown.iter().map(|f| self.fork_line(f, digits, style)));
        if !hidden.is_empty() {
            let count = |u: u8| hidden.iter().filter(|f| urgency(f) == u).count();
            let parts: Vec<String> = [(count(0), "working"), (count(1), "ended"), (count(2), "pending")]
                .iter()
                .filter(|(n, _)| *n > 0)
                .map(|(n, what)| format!("{n} {what}"))
                .collect();
            lines.push(style.paint(Color::Dim, &fit(&format!("… {}", parts.join(", ")), style.width)));
        }
        lines.extend(self.totals(style));
        lines
    }

    fn fork_line(&self, f: &ForkView, digits: usize, style: &Style) -> String {
        let ForkText { head, color, rest } = self.fork_text(f, digits);
        let line = fit(&rest, style.width.saturating_sub(width(&head)));
        format!("{}{line}", style.paint(color, &head))
    }

    /// A fork's line before it is cut and painted; harmless for a terminal.
    pub fn fork_text(&self, f: &ForkView, digits: usize) -> ForkText {
        let (word, color) = state(f);
        let time =
            f.started_at.map_or(String::new(), |s| f.ended_at.unwrap_or(self.now).since(s).to_string());
        // What a working fork does right now; why a fork failed.
        let tail = match f.outcome {
            None if f.lifecycle == Lifecycle::Completing => f.phase.clone(),
            None => self.doing.get(&f.fork).map(|text| last_line(text)).unwrap_or_default(),
            Some(_) => f.error.clone().unwrap_or_else(|| f.diff.map_or(String::new(), diff_text)),
        };
        let mark = if self.run.winner == Some(f.fork) { "★" } else { glyph(f) };
        let mut rest = format!("{word:<10}");
        if f.turns > 0 {
            rest.push_str(&format!(" turn {:<3}", f.turns));
        }
        if f.lifecycle > Lifecycle::Creating {
            if f.turns == 0 {
                rest.push_str("         ");
            }
            rest.push_str(&format!(" {:>8} {:>6}", f.cost.to_string(), time));
        }
        rest.push_str("  ");
        if let Some(label) = self.label(f) {
            rest.push_str(&format!("{label}: "));
        }
        rest.push_str(&plain(&tail));
        rest.truncate(rest.trim_end().len());
        ForkText { head: format!("{mark} {:>digits$} ", f.fork), color, rest }
    }

    /// What tells a fork from the others: its name, and its model where they differ.
    fn label(&self, f: &ForkView) -> Option<String> {
        let model = models_differ(&self.forks).then_some(f.model.as_str());
        let parts: Vec<String> = f.name.as_deref().into_iter().chain(model).map(plain).collect();
        (!parts.is_empty()).then(|| parts.join(" "))
    }

    /// Columns of the largest fork number.
    pub fn digits(&self) -> usize {
        self.forks.iter().map(|f| f.fork).max().unwrap_or(0).to_string().len()
    }

    fn totals(&self, style: &Style) -> Vec<String> {
        let ended = self.forks.iter().filter(|f| f.outcome.is_some()).count();
        let (forks, money) = self.total_texts();
        let mut forks = format!("{} {forks}", bar(ended as f64, self.forks.len() as f64));
        for (on, word) in [(self.run.paused, "paused"), (self.run.cancelling, "cancelling")] {
            if on {
                forks.push_str(&format!("  {word}"));
            }
        }
        let money = match self.run.limits.run {
            Some(limit) => format!("{} {money}", bar(self.spent.as_dollars(), limit.as_dollars())),
            None => money,
        };
        vec![fit(&forks, style.width), fit(&money, style.width)]
    }

    /// How far the forks are, and the money.
    pub fn total_texts(&self) -> (String, String) {
        let ended = self.forks.iter().filter(|f| f.outcome.is_some()).count();
        let total = self.forks.len();
        let time = self.run.ended_at.unwrap_or(self.now).since(self.run.created_at);
        let line = format!("{ended}/{total} forks  {time}");
        let money = match self.run.limits.run {
            Some(limit) => format!("{} of {limit}", self.spent),
            None => format!("{} spent", self.spent),
        };
        (line, money)
    }

    /// For a pipe: a line for everything that differs from an earlier board, oldest fork first.
    pub fn changes(&self, before: Option<&Board>) -> Vec<String> {
        let mut lines = Vec::new();
        let run = &self.run.id;
        for f in &self.forks {
            let old = before.and_then(|b| b.forks.iter().find(|o| o.fork == f.fork));
            let word = state(f).0;
            if old.map(|o| state(o).0) != Some(word) {
                let mut line = format!("{run}/{} {word}", f.fork);
                if let Some(label) = self.label(f).filter(|_| old.is_none()) {
                    line.push_str(&format!(" ({label})"));
                }
                if let Some(error) = &f.error {
                    // The reason may begin with the same word.
                    let why = error.strip_prefix(&format!("{word}: ")).unwrap_or(error);
                    line.push_str(&format!(": {}", plain(why)));
                }
                lines.push(line);
            }
            if f.turns > old.map_or(0, |o| o.turns) && f.outcome.is_none() {
                let doing =
                    self.doing.get(&f.fork).map_or(String::new(), |d| format!("  {}", plain(&last_line(d))));
                lines.push(
                    format!("{run}/{} turn {} {}{doing}", f.fork, f.turns, f.cost).trim_end().to_string(),
                );
            }
        }
        if before.is_some_and(|b| b.run.paused != self.run.paused) {
            lines.push(format!("{run} {}", if self.run.paused { "paused" } else { "resumed" }));
        }
        lines
    }
}

/// `[####      ]`, never fuller than full, whatever the numbers.
fn bar(part: f64, whole: f64) -> String {
    let share = if whole > 0.0 { (part / whole).clamp(0.0, 1.0) } else { 0.0 };
    let full = (share * BAR as f64).floor() as usize;
    format!("[{}{}]", "#".repeat(full), " ".repeat(BAR - full))
}

#[cfg(test)]
mod tests {
    use super::super::fixture::{board, fork};
    use super::*;

    const TERMINAL: Style = Style { color: false, width: 60, height: Some(24) };

    #[test]
    fn one_line_a_fork_and_totals() {
        let mut b = board(vec![
            fork(0, Lifecycle::Completed, Some(ForkOutcome::Success)),
            fork(1, Lifecycle::Running, None),
            fork(2, Lifecycle::Pending, None),
            fork(3, Lifecycle::Failed, Some(ForkOutcome::Failed)),
        ]);
        b.doing.insert(1, "Bash cargo test\x1b[2J --all".into());
        b.forks[3].error = Some("the model said\nno".into());
        b.forks[0].verified = Some(true);
        assert_eq!(
            b.lines(&TERMINAL).join("\n"),
            "r1 · forkyard watch r1\n\
             ✓ 0 verified   turn 7      $1.25  1m02s  2 files +10 -3\n\
             ● 1 running    turn 7      $1.25  1m30s  Bash cargo test\\x1…\n\
             · 2 pending\n\
             ✗ 3 failed     turn 7      $1.25  1m02s  the model said\\nno\n\
             [##########          ] 2/4 forks  1m40s\n\
             [##########          ] $2.50 of $5.00"
        );
    }

    #[test]
    fn a_hundred_forks_fit_a_low_and_narrow_terminal() {
        let forks: Vec<ForkView> = (0..100)
            .map(|n| match n {
                0..40 => fork(n, Lifecycle::Completed, Some(ForkOutcome::Success)),
                40..60 => fork(n, Lifecycle::Running, None),
                _ => fork(n, Lifecycle::Pending, None),
            })
            .collect();
        let mut b = board(forks);
        for n in 0..100 {
            b.doing.insert(n, "日本語 ".repeat(50));
        }
        for (columns, rows) in [(20, 1), (20, 24), (40, 10), (80, 24), (200, 300)] {
            let style = Style { color: false, width: columns, height: Some(rows) };
            let lines = b.lines(&style);
            assert!(lines.len() <= rows.max(4), "{} lines of {rows}", lines.len());
            assert!(lines.iter().all(|l| width(l) <= columns), "{columns}: {lines:#?}");
        }
        let style = Style { color: false, width: 80, height: Some(24) };
        let lines = b.lines(&style);
        assert!(lines[1].starts_with("● 40"), "{}", lines[1]);
        assert_eq!(lines[19], "… 2 working, 40 ended, 40 pending");
    }

    #[test]
    fn a_pipe_gets_what_changed() {
        let mut before = board(vec![fork(0, Lifecycle::Running, None), fork(1, Lifecycle::Pending, None)]);
        before.forks[0].turns = 6;
        let mut after = before.clone();
        assert_eq!(after.changes(Some(&before)), Vec::<String>::new());
        after.forks[0].turns = 7;
        after.doing.insert(0, "Edit src/lib.rs".into());
        after.forks[1] = fork(1, Lifecycle::Failed, Some(ForkOutcome::BudgetExceeded));
        after.forks[1].error = Some("budget_exceeded: out of\x1b money".into());
        after.run.paused = true;
        assert_eq!(
            after.changes(Some(&before)),
            ["r1/0 turn 7 $1.25  Edit src/lib.rs", "r1/1 budget_exceeded: out of\\x1b money", "r1 paused"]
        );
        assert_eq!(before.changes(None).len(), 3);
    }

    #[test]
    fn forks_that_differ_say_what_they_are() {
        let mut b = board(vec![fork(0, Lifecycle::Running, None), fork(1, Lifecycle::Running, None)]);
        b.forks[1].model = "opus".into();
        b.forks[1].name = Some("careful".into());
        b.doing.insert(1, "Bash make".into());
        let lines = b.lines(&Style { width: 100, ..TERMINAL });
        assert!(
            lines[1].ends_with("  sonnet:") && lines[2].ends_with("  careful opus: Bash make"),
            "{lines:#?}"
        );
        assert_eq!(b.changes(None)[0], "r1/0 running (sonnet)");
    }

    #[test]
    fn bars_take_any_numbers() {
        for (part, whole) in [(0.0, 0.0), (5.0, 0.0), (10.0, 5.0), (f64::NAN, 1.0), (-1.0, 5.0)] {
            assert_eq!(bar(part, whole).len(), BAR + 2, "{part}/{whole}");
        }
    }
}
