//! The journal's writer: entries are collected and made durable together, in order, before anything that depends on them.

use std::sync::Arc;

use tokio::sync::Mutex;

use crate::clock;
use crate::conversation::Totals;
use crate::event::{AgentEvent, JournalEntry};
use crate::log::ForkLog;
use crate::ports::{EventSink, Journal, JournalError, MessageId};

pub(crate) struct Recorder {
    journal: Arc<dyn Journal>,
    sink: Arc<dyn EventSink>,
    state: Mutex<State>,
}

struct State {
    waiting: Vec<JournalEntry>,
    delivered: Vec<MessageId>,
    totals: Totals,
    position: u64,
    log: Option<ForkLog>,
}

impl Recorder {
    pub fn new(
        journal: Arc<dyn Journal>,
        sink: Arc<dyn EventSink>,
        totals: Totals,
        position: u64,
        log: Option<ForkLog>,
    ) -> Recorder {
        let state = State { waiting: Vec::new(), delivered: Vec::new(), totals, position, log };
        Recorder { journal, sink, state: Mutex::new(state) }
    }

    /// Goes to the journal with the next flush. `delivered` is marked as delivered by the same append.
    pub async fn push(&self, subagent: Option<String>, event: AgentEvent, delivered: &[MessageId]) {
        let mut state = self.state.lock().await;
        state.totals.apply(&event);
        state.waiting.push(JournalEntry { at: clock::now(), subagent, event });
        state.delivered.extend_from_slice(delivered);
    }

    /// Everything pushed is durable after Ok. Answers with the journal's position. After an error nothing may be assumed about
    /// what was written: the attempt ends.
    pub async fn flush(&self) -> Result<u64, JournalError> {
        let mut state = self.state.lock().await;
        if !state.waiting.is_empty() {
            let entries = std::mem::take(&mut state.waiting);
            let delivered = std::mem::take(&mut state.delivered);
            state.position = self.journal.append(&entries, &delivered).await?;
            if let Some(log) = &mut state.log {
                entries.iter().for_each(|entry| log.entry(entry));
            }
            self.sink.recorded(&entries);
        }
        Ok(state.position)
    }

    pub async fn totals(&self) -> Totals {
        self.state.lock().await.totals.clone()
    }

    /// For a heartbeat that must not wait for an append.
    pub fn event_count(&self) -> Option<u64> {
        self.state.try_lock().ok().map(|state| state.totals.events)
    }
}
