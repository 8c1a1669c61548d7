//! The log file of a fork, for people: turns, calls with their parameters, results, violations, a closing summary.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use forkyard_core::{ForkNum, Timestamp};

use crate::event::{AgentEvent, JournalEntry};
use crate::inference::{Block, ResultPart};
use crate::text::{cut, plain};

/// Of one text; the journal has the whole.
const MAX_LOGGED_BYTES: usize = 4000;

pub(crate) struct ForkLog {
    file: File,
    failed: bool,
}

/// `fork_{n}_{YYYYmmdd_HHMMSS}.log`, in UTC.
pub(crate) fn file_name(fork: ForkNum, at: Timestamp) -> String {
    let t = jiff::Timestamp::from_millisecond(i64::try_from(at.0).unwrap_or(i64::MAX)).unwrap_or_default();
    format!("fork_{fork}_{}.log", t.strftime("%Y%m%d_%H%M%S"))
}

impl ForkLog {
    pub fn open(dir: &Path, fork: ForkNum, at: Timestamp) -> std::io::Result<(ForkLog, PathBuf)> {
        std::fs::create_dir_all(dir)?;
        let path = dir.join(file_name(fork, at));
        let file = File::options().create(true).append(true).open(&path)?;
        Ok((ForkLog { file, failed: false }, path))
    }

    /// A log that can't be written stops nothing: the journal is the record.
    pub fn entry(&mut self, entry: &JournalEntry) {
        let who = entry.subagent.as_ref().map(|s| format!(" [subagent {s}]")).unwrap_or_default();
        let time = jiff::Timestamp::from_millisecond(i64::try_from(entry.at.0).unwrap_or_default())
            .unwrap_or_default();
        let mut text = String::new();
        for line in lines(&entry.event) {
            text.push_str(&format!("{}{who} {}\n", time.strftime("%H:%M:%S"), plain(&line)));
        }
        if let Err(e) = self.file.write_all(text.as_bytes())
            && !self.failed
        {
            self.failed = true;
            tracing::warn!("the log file can't be written: {e}");
        }
    }
}

fn lines(event: &AgentEvent) -> Vec<String> {
    let short = |text: &str| cut(text, MAX_LOGGED_BYTES);
    match event {
        AgentEvent::Started(s) => vec![format!(
            "START fork {} attempt {} sandbox {} model {} repo {} branch {}",
            s.fork_num, s.attempt, s.sandbox_id, s.model, s.repo_url, s.branch
        )],
        AgentEvent::Resumed(r) => {
            vec![format!("RESUME attempt {} {}", r.attempt, r.message.as_deref().unwrap_or_default())]
        }
        AgentEvent::SystemMessage { text } => vec![format!("SYSTEM {}", short(text))],
        AgentEvent::UserMessage { content, .. } => {
            vec![format!("TASK {}", short(&crate::conversation::text_of(content)))]
        }
        AgentEvent::AssistantMessage(m) => {
            let mut out = vec![format!("TURN {} stop {} cost {}", m.turn, m.stop_reason.as_str(), m.cost)];
            out.extend(m.content.iter().filter_map(|block| match block {
                Block::Text { text } => Some(format!("ASSISTANT {}", short(text))),
                Block::Thinking { thinking, .. } if !thinking.is_empty() => {
                    Some(format!("THINKING {}", short(thinking)))
                }
                Block::Thinking { .. }
                | Block::RedactedThinking { .. }
                | Block::ToolUse { .. }
                | Block::ToolResult { .. }
                | Block::Image(_)
                | Block::Other { .. } => None,
            }));
            out
        }
        AgentEvent::ToolUse(t) => {
            vec![format!("CALL {} {} {}", t.tool, t.tool_use_id, short(&t.input.to_string()))]
        }
        AgentEvent::ToolCompleted(t) => {
            let text: Vec<&str> = t
                .tool_response
                .iter()
                .map(|part| match part {
                    ResultPart::Text { text } => text.as_str(),
                    ResultPart::Image(_) => "(image)",
                })
                .collect();
            let word = match (t.denied_by, t.is_error) {
                (Some(_), _) => "VIOLATION",
                (None, true) => "ERROR",
                (None, false) => "RESULT",
            };
            vec![format!(
                "{word} {} {} ({} ms) {}",
                t.tool,
                t.tool_use_id,
                t.duration_ms,
                short(&text.join("\n"))
            )]
        }
        AgentEvent::FileEdited(e) => {
            vec![format!("EDITED {} +{} -{}", e.file_path, e.lines_added, e.lines_removed)]
        }
        AgentEvent::MessageInjected { kind, content, .. } => {
            vec![format!("MESSAGE {kind:?} {}", short(content))]
        }
        AgentEvent::Interrupted { .. } => vec!["INTERRUPTED".to_string()],
        AgentEvent::Compacted { summary, .. } => vec![format!("COMPACTED {}", short(summary))],
        AgentEvent::CheckpointCreated { checkpoint, .. } => vec![format!("CHECKPOINT {}", checkpoint.id)],
        AgentEvent::SubagentInvoked { description, .. } => vec![format!("SUBAGENT {description}")],
        AgentEvent::SubagentCompleted { success, turns, .. } => {
            vec![format!("SUBAGENT ENDED success {success} turns {turns}")]
        }
        AgentEvent::SkillInvoked { skill, .. } => vec![format!("SKILL {skill}")],
        AgentEvent::Error { error, .. } | AgentEvent::StreamError { error, .. } => {
            vec![format!("ERROR {}", short(error))]
        }
        AgentEvent::Waiting { .. } => vec!["WAITING for messages".to_string()],
        AgentEvent::Completed(c) | AgentEvent::Failed(c) => vec![
            format!(
                "SUMMARY success {} stop {} turns {} tool calls {} tokens {} cost ${:.4} time {} ms",
                c.success,
                c.stop_reason.as_str(),
                c.turns,
                c.tool_calls,
                c.usage.total(),
                c.cost_usd,
                c.duration_ms
            ),
            format!("FINAL {}", short(&c.final_output)),
        ],
        AgentEvent::Shutdown { reason, .. } => vec![format!("SHUTDOWN {reason}")],
    }
}
