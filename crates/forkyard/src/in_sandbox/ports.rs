//! The agent's ports over the server: its journal, its inbox, and signs of life.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use forkyard_agent::event::EVENT_VERSION;
use forkyard_agent::ports::{EventSink, Inbox, InboxMessage, Journal, JournalError, LiveEvent, MessageId};
use forkyard_agent::{AgentOutcome, JournalEntry};
use forkyard_core::Timestamp;
use forkyard_engine::clock::Clock;
use forkyard_engine::inside::HEARTBEAT;
use forkyard_server::inside::wire;
use reqwest::Method;
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio_util::task::AbortOnDropHandle;

use super::client::{ANSWER_WITHIN, Client, Refused};

/// How long a question for messages waits before it is asked again.
const POLL_MS: u64 = 25_000;
const MAX_REPORT_CHARS: usize = wire::MAX_OUTPUT_CHARS;

fn journal_error(e: Refused) -> JournalError {
    match e {
        Refused::Gone(_) | Refused::Conflict(_) => JournalError::Stale,
        Refused::Invalid(why) => JournalError::Unavailable(why),
    }
}

pub struct ServedJournal {
    client: Arc<Client>,
    inbox: Arc<ServedInbox>,
    /// Entries of the fork's journals.
    position: tokio::sync::Mutex<u64>,
}

impl ServedJournal {
    pub fn new(client: Arc<Client>, inbox: Arc<ServedInbox>) -> ServedJournal {
        ServedJournal { client, inbox, position: tokio::sync::Mutex::new(0) }
    }
}

#[async_trait]
impl Journal for ServedJournal {
    async fn read(&self) -> Result<Vec<JournalEntry>, JournalError> {
        let mut position = self.position.lock().await;
        let mut all = Vec::new();
        loop {
            let path = format!("journal?after={}&limit=500", all.len());
            let page: wire::JournalPage = self
                .client
                .patiently(Method::GET, &path, None::<&()>, ANSWER_WITHIN)
                .await
                .map_err(journal_error)?;
            for e in page.entries {
                let entry =
                    JournalEntry::from_stored(&e.event_type, e.version, Timestamp(e.at), e.event_data)
                        .map_err(|e| JournalError::Unreadable(e.to_string()))?;
                all.push(entry);
            }
            if page.next_after.is_none() {
                *position = all.len() as u64;
                return Ok(all);
            }
        }
    }

    async fn append(&self, entries: &[JournalEntry], delivered: &[MessageId]) -> Result<u64, JournalError> {
        let mut position = self.position.lock().await;
        let parts: Vec<&[JournalEntry]> = entries.chunks(wire::MAX_ENTRIES).collect();
        for (i, part) in parts.iter().enumerate() {
            let entries = part
                .iter()
                .map(|e| {
                    let (kind, event_data) = e.to_stored();
                    wire::JournalEntry {
                        event_type: kind.into(),
                        version: EVENT_VERSION,
                        at: e.at.0,
                        event_data,
                    }
                })
                .collect();
            // With the last ones: a message that was taken in is never said again.
            let delivered = if i + 1 == parts.len() { delivered.to_vec() } else { vec![] };
            let append = wire::AppendJournal { position: *position, entries, delivered };
            let answer: wire::Appended = self
                .client
                .patiently(Method::POST, "journal", Some(&append), ANSWER_WITHIN)
                .await
                .map_err(journal_error)?;
            *position = answer.position;
        }
        self.inbox.delivered(delivered);
        Ok(*position)
    }
}

/// Asks for messages all the time, and has them at hand.
pub struct ServedInbox {
    shared: Arc<Waiting>,
    /// The version that the last look saw.
    seen: AtomicU64,
    _asking: AbortOnDropHandle<()>,
}

struct Waiting {
    messages: Mutex<Vec<InboxMessage>>,
    version: watch::Sender<u64>,
}

impl Waiting {
    fn messages(&self) -> MutexGuard<'_, Vec<InboxMessage>> {
        self.messages.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

async fn ask(client: &Client, after: u64, wait_ms: u64) -> Result<Vec<InboxMessage>, Refused> {
    let path = format!("messages?after={after}&wait_ms={wait_ms}");
    let within = ANSWER_WITHIN + Duration::from_millis(wait_ms);
    let page: wire::InboxPage = client.patiently(Method::GET, &path, None::<&()>, within).await?;
    let message = |m: wire::InboxMessage| InboxMessage {
        id: m.id,
        kind: m.kind.into(),
        source: m.source.map(Into::into),
        priority: m.priority.into(),
        content: m.content,
        at: Timestamp(m.at),
    };
    Ok(page.messages.into_iter().map(message).collect())
}

impl ServedInbox {
    /// Knows of all that waits now.
    pub async fn open(client: Arc<Client>) -> Result<Arc<ServedInbox>, Refused> {
        let first = ask(&client, 0, 0).await?;
        let mut last = first.last().map_or(0, |m| m.id);
        let shared = Arc::new(Waiting { messages: Mutex::new(first), version: watch::Sender::new(1) });
        let (to, asking) = (shared.clone(), client);
        let asking = tokio::spawn(async move {
            loop {
                match ask(&asking, last, POLL_MS).await {
                    Ok(new) if new.is_empty() => {}
                    Ok(new) => {
                        last = new.last().map_or(last, |m| m.id);
                        to.messages().extend(new);
                        to.version.send_modify(|v| *v += 1);
                    }
                    // The journal finds out too, and ends the work.
                    Err(e) => {
                        tracing::warn!("no more messages: {e}");
                        return;
                    }
                }
            }
        });
        Ok(Arc::new(ServedInbox { shared, seen: AtomicU64::new(0), _asking: AbortOnDropHandle::new(asking) }))
    }

    fn delivered(&self, ids: &[MessageId]) {
        self.shared.messages().retain(|m| !ids.contains(&m.id));
    }
}

#[async_trait]
impl Inbox for ServedInbox {
    async fn pending(&self) -> Result<Vec<InboxMessage>, JournalError> {
        // Before the look: what comes in between is news again.
        self.seen.store(*self.shared.version.borrow(), Ordering::SeqCst);
        Ok(self.shared.messages().clone())
    }

    async fn wait(&self) {
        let mut version = self.shared.version.subscribe();
        let seen = self.seen.load(Ordering::SeqCst);
        // Fails only without a sender, which lives as long as this.
        let _ = version.wait_for(|v| *v != seen).await;
    }
}

/// Counts what is recorded, for heartbeats.
pub struct CountingSink(pub Arc<AtomicU64>);

impl EventSink for CountingSink {
    fn live(&self, _: LiveEvent) {}
    fn recorded(&self, entries: &[JournalEntry]) {
        self.0.fetch_add(entries.len() as u64, Ordering::Relaxed);
    }
}

fn heartbeat(clock: Clock, events: u64) -> Value {
    let data = json!({ "timestamp": clock.now().0, "status": "running", "event_count": events });
    json!({ "event_type": HEARTBEAT, "event_data": data, "source": "worker" })
}

/// The first sign of life, until it has been heard: whoever started this worker waits for it.
pub async fn announce(client: &Client) -> Result<(), Refused> {
    let beat = heartbeat(Clock::system(), 0);
    let _: wire::Received = client.patiently(Method::POST, "events", Some(&beat), ANSWER_WITHIN).await?;
    Ok(())
}

/// Says that this worker is there. One that is lost is made up for by the next.
pub async fn beat(client: Arc<Client>, every: Duration, events: Arc<AtomicU64>) {
    let clock = Clock::system();
    loop {
        tokio::select! {
            () = tokio::time::sleep(every) => {}
            // Whoever took the fork over wants to know that this one is there.
            () = client.taken_up.notified() => {}
        }
        if let Err(e) = client.once("events", &heartbeat(clock, events.load(Ordering::Relaxed))).await {
            tracing::debug!("a heartbeat was lost: {e}");
        }
    }
}

/// Tells how the work ended, until it has been heard.
pub async fn report(client: &Client, outcome: &AgentOutcome) -> Result<(), Refused> {
    let report = json!({
        "success": outcome.success,
        "stop_reason": outcome.stop,
        "final_output": outcome.final_response.chars().take(MAX_REPORT_CHARS).collect::<String>(),
        "turns": outcome.turns,
        "tool_calls": outcome.tool_calls,
    });
    let _: wire::Reported =
        client.patiently(Method::POST, "task-complete", Some(&report), ANSWER_WITHIN).await?;
    Ok(())
}
