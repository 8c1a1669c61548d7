//! What an agent said and did, as lines for people. Shared by `logs` and `replay`.

use forkyard_agent::inference::{Block, ResultPart};
use forkyard_agent::{AgentEvent, JournalEntry};
use forkyard_core::Timestamp;

use super::plain::plain_block;
use super::style::{Color, Style};
use crate::doing::describe;

/// Lines of one text that are shown; the events have the whole.
const MAX_LINES: usize = 20;

/// Time of day in UTC.
pub fn clock(at: Timestamp) -> String {
    jiff::Timestamp::from_millisecond(i64::try_from(at.0).unwrap_or(i64::MAX))
        .unwrap_or_default()
        .strftime("%H:%M:%S")
        .to_string()
}

/// Day and time in UTC.
pub fn day(at: Timestamp) -> String {
    jiff::Timestamp::from_millisecond(i64::try_from(at.0).unwrap_or(i64::MAX))
        .unwrap_or_default()
        .strftime("%Y-%m-%d %H:%M:%S")
        .to_string()
}

/// What to show of an entry: a mark and its colour, and text that may have several lines.
fn said(event: &AgentEvent) -> Vec<(&'static str, Color, String)> {
    match event {
        AgentEvent::Started(s) => {
            vec![("▶", Color::Bold, format!("{} in {} on {}", s.model, s.sandbox_id, s.branch))]
        }
        AgentEvent::Resumed(r) => vec![("▶", Color::Bold, format!("goes on, attempt {}", r.attempt))],
        AgentEvent::AssistantMessage(m) => m
            .content
            .iter()
            .filter_map(|block| match block {
                Block::Text { text } if !text.trim().is_empty() => Some((" ", Color::Bold, text.clone())),
                Block::Thinking { thinking, .. } if !thinking.is_empty() => {
                    Some(("~", Color::Dim, thinking.clone()))
                }
                Block::Text { .. }
                | Block::Thinking { .. }
                | Block::RedactedThinking { .. }
                | Block::ToolUse { .. }
                | Block::ToolResult { .. }
                | Block::Image(_)
                | Block::Other { .. } => None,
            })
            .collect(),
        AgentEvent::ToolUse(t) => vec![("$", Color::Cyan, describe(&t.tool, &t.input))],
        AgentEvent::ToolCompleted(t) => {
            let text: Vec<&str> = t
                .tool_response
                .iter()
                .map(|part| match part {
                    ResultPart::Text { text } => text.trim_end(),
                    ResultPart::Image(_) => "(image)",
                })
                .collect();
            let (mark, color) = match (t.denied_by, t.is_error) {
                (Some(_), _) => ("⛔", Color::Red),
                (None, true) => ("!", Color::Red),
                (None, false) => ("│", Color::Dim),
            };
            vec![(mark, color, text.join("\n"))]
        }
        AgentEvent::FileEdited(e) => {
            vec![(
                "±",
                Color::Green,
                format!("{} +{} -{}\n{}", e.file_path, e.lines_added, e.lines_removed, e.diff_preview),
            )]
        }
        AgentEvent::MessageInjected { content, .. } => vec![(">", Color::Yellow, content.clone())],
        AgentEvent::Interrupted { .. } => vec![(">", Color::Yellow, "interrupted".into())],
        AgentEvent::Compacted { .. } => {
            vec![("~", Color::Dim, "the conversation was summarised".into())]
        }
        AgentEvent::SubagentInvoked { description, .. } => {
            vec![("▷", Color::Cyan, format!("subagent: {description}"))]
        }
        AgentEvent::SubagentCompleted { success, turns, .. } => {
            let how = if *success { "done" } else { "failed" };
            vec![("◁", Color::Cyan, format!("subagent {how} after {turns} turns"))]
        }
        AgentEvent::SkillInvoked { skill, .. } => vec![("▷", Color::Cyan, format!("skill {skill}"))],
        AgentEvent::Error { error, .. } | AgentEvent::StreamError { error, .. } => {
            vec![("!", Color::Red, error.clone())]
        }
        AgentEvent::Waiting { .. } => vec![("…", Color::Dim, "waits for messages".into())],
        AgentEvent::Completed(c) => {
            vec![(
                "■",
                Color::Green,
                format!("{} turns, {} calls, ${:.4}", c.turns, c.tool_calls, c.cost_usd),
            )]
        }
        AgentEvent::Failed(c) => {
            vec![("■", Color::Red, format!("{} after {} turns", c.stop_reason.as_str(), c.turns))]
        }
        AgentEvent::Shutdown { reason, .. } => vec![("■", Color::Yellow, format!("stopped: {reason}"))],
        // What it was told is the run's prompt, and checkpoints are Forkyard's own business.
        AgentEvent::SystemMessage { .. }
        | AgentEvent::UserMessage { .. }
        | AgentEvent::CheckpointCreated { .. } => vec![],
    }
}

/// One line of what is shown of an entry, harmless for a terminal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Line {
    pub at: Timestamp,
    /// Said or done by a subagent.
    pub nested: bool,
    pub mark: &'static str,
    pub color: Color,
    pub text: String,
    /// Colour of the text itself, where it has one.
    pub text_color: Option<Color>,
}

/// What is shown of one entry.
pub fn parts(entry: &JournalEntry) -> Vec<Line> {
    let mut out = Vec::new();
    for (mark, color, text) in said(&entry.event) {
        let line = |text: String, text_color| {
            let nested = entry.subagent.is_some();
            Line { at: entry.at, nested, mark, color, text, text_color }
        };
        let is_diff = matches!(entry.event, AgentEvent::FileEdited(_));
        let all: Vec<&str> = text.trim_end().trim_start_matches('\n').lines().collect();
        for (i, text) in all.iter().take(MAX_LINES).enumerate() {
            let text_color = if is_diff && i > 0 { diff_color(text) } else { None };
            out.push(line(plain_block(text), text_color));
        }
        if all.len() > MAX_LINES {
            out.push(line(format!("({} more lines)", all.len() - MAX_LINES), Some(Color::Dim)));
        }
    }
    out
}

/// The same as text.
pub fn lines(entry: &JournalEntry, style: &Style) -> Vec<String> {
    let time = style.paint(Color::Dim, &clock(entry.at));
    let text = |l: &Line| l.text_color.map_or_else(|| l.text.clone(), |c| style.paint(c, &l.text));
    let indent = |l: &Line| if l.nested { "  " } else { "" };
    parts(entry)
        .iter()
        .map(|l| format!("{time} {}{} {}", indent(l), style.paint(l.color, l.mark), text(l)))
        .collect()
}

/// The colour of a line of a unified diff.
pub fn diff_color(line: &str) -> Option<Color> {
    match line.as_bytes() {
        [b'+', b'+', b'+', ..] | [b'-', b'-', b'-', ..] | [b'd', b'i', b'f', b'f', ..] => Some(Color::Bold),
        [b'+', ..] => Some(Color::Green),
        [b'-', ..] => Some(Color::Red),
        [b'@', ..] => Some(Color::Cyan),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_of_an_agent_steer_no_terminal_and_are_bounded() {
        let event = AgentEvent::Error { turn: 1, error: format!("a\x1b[2J\n{}", "b\n".repeat(30)) };
        let entry = JournalEntry { at: Timestamp(3_661_000), subagent: None, event };
        let lines = lines(&entry, &Style::PIPE);
        assert_eq!(lines[0], "01:01:01 ! a\\x1b[2J");
        assert_eq!((lines.len(), lines[20].as_str()), (21, "01:01:01 ! (11 more lines)"));
    }
}
