//! What agents of this process say while they say it. Kept by nobody: whole messages are recorded, these are for eyes.
//!
//! Words come one by one; watchers get them a few times a second, joined.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use forkyard_core::ForkNum;
use forkyard_engine::ports::LiveEvent;
use serde::Serialize;
use tokio::sync::{Notify, broadcast};

/// How long words wait for more.
const EVERY: Duration = Duration::from_millis(100);
/// Characters of one kind that wait, per fork; more are dropped, and the recorded message has them.
const MAX_WAITING: usize = 16 << 10;
/// Batches that a watcher may be behind before it misses some.
const BEHIND: usize = 32;

/// What one fork said since the last batch.
#[derive(Debug, Clone, Default, Serialize)]
struct Delta {
    /// What was shown of the answer before is void: it starts over.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    reset: bool,
    #[serde(skip_serializing_if = "String::is_empty")]
    text: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    thinking: String,
    /// The tool that the answer begins to call.
    #[serde(skip_serializing_if = "Option::is_none")]
    tool: Option<String>,
    #[serde(skip_serializing_if = "String::is_empty")]
    output: String,
}

impl Delta {
    /// False: nothing to show.
    fn add(&mut self, event: &LiveEvent) -> bool {
        match event {
            LiveEvent::Text { text, subagent: None } => push(&mut self.text, text),
            LiveEvent::Thinking { text, subagent: None } => push(&mut self.thinking, text),
            LiveEvent::ToolOutput { text, .. } => push(&mut self.output, text),
            LiveEvent::ToolStart { tool, subagent: None, .. } => self.tool = Some(tool.clone()),
            LiveEvent::Reset { subagent: None } => *self = Delta { reset: true, ..Delta::default() },
            LiveEvent::Text { .. }
            | LiveEvent::Thinking { .. }
            | LiveEvent::ToolStart { .. }
            | LiveEvent::Reset { .. }
            | LiveEvent::ToolInput { .. }
            | LiveEvent::Notice { .. }
            | LiveEvent::Heartbeat { .. } => return false,
        }
        true
    }
}

fn push(to: &mut String, text: &str) {
    if to.len() + text.len() <= MAX_WAITING {
        to.push_str(text);
    }
}

/// One run's.
pub(super) struct Live {
    waiting: Mutex<BTreeMap<ForkNum, Delta>>,
    some: Notify,
    batches: broadcast::Sender<(ForkNum, Bytes)>,
}

impl Live {
    pub(super) fn new() -> Arc<Live> {
        Arc::new(Live {
            waiting: Mutex::default(),
            some: Notify::new(),
            batches: broadcast::channel(BEHIND).0,
        })
    }

    pub(super) fn subscribe(&self) -> broadcast::Receiver<(ForkNum, Bytes)> {
        self.batches.subscribe()
    }

    /// Never waits: it is called where an agent works.
    pub(super) fn say(&self, fork: ForkNum, event: &LiveEvent) {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        if waiting.entry(fork).or_default().add(event) {
            self.some.notify_one();
        }
    }

    pub(super) async fn pass_on(self: Arc<Live>) {
        loop {
            self.some.notified().await;
            tokio::time::sleep(EVERY).await;
            let waiting = std::mem::take(&mut *self.waiting.lock().unwrap_or_else(PoisonError::into_inner));
            for (fork, delta) in waiting {
                let json = serde_json::json!({ "fork": fork, "delta": delta }).to_string();
                // Fails only if nobody looks.
                let _ = self.batches.send((fork, Bytes::from(json)));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(text: &str) -> LiveEvent {
        LiveEvent::Text { subagent: None, text: text.into() }
    }

    #[tokio::test]
    async fn words_are_joined_and_a_flood_is_cut() {
        let live = Live::new();
        let mut heard = live.subscribe();
        let task = tokio::spawn(live.clone().pass_on());
        for word in ["a ", "b ", "c"] {
            live.say(0, &text(word));
        }
        live.say(1, &LiveEvent::ToolStart { subagent: None, tool_use_id: "t".into(), tool: "Bash".into() });
        assert_eq!(heard.recv().await.unwrap(), (0, Bytes::from(r#"{"delta":{"text":"a b c"},"fork":0}"#)));
        assert_eq!(heard.recv().await.unwrap(), (1, Bytes::from(r#"{"delta":{"tool":"Bash"},"fork":1}"#)));
        live.say(0, &text("gone"));
        live.say(0, &LiveEvent::Reset { subagent: None });
        live.say(0, &text("new"));
        assert_eq!(
            heard.recv().await.unwrap().1,
            Bytes::from(r#"{"delta":{"reset":true,"text":"new"},"fork":0}"#)
        );
        for _ in 0..100 {
            live.say(0, &text(&"x".repeat(1000)));
        }
        assert!(heard.recv().await.unwrap().1.len() < MAX_WAITING + 100);
        task.abort();
    }
}
