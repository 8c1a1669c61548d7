//! A journal and an inbox in memory, a model that answers by script and holds every request to the API's rules, and the agent
//! put together from them.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use forkyard_agent::event::{EVENT_VERSION, JournalEntry};
use forkyard_agent::inference::{
    Block, DeltaSink, InferenceError, Message, Model, RawJson, ResultPart, Role, StopReason, TurnRequest,
    TurnResponse,
};
use forkyard_agent::ports::{
    CheckpointError, CheckpointInfo, CheckpointKind, Checkpoints, Inbox, InboxMessage, Journal, JournalError,
    MessageId, MessageKind, NoSink, Priority, Speaker,
};
use forkyard_agent::{Agent, AgentConfig, AgentError, AgentEvent, AgentOutcome, Continuity, Interceptor};
use forkyard_core::policy::PolicyConfig;
use forkyard_core::pricing::Usage;
use forkyard_core::{Attempt, RunId, SnapshotId, Timestamp, Usd};
use forkyard_sandbox::{ErrorKind, Sandbox};
use serde_json::{Value, json};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use crate::agent_world::World;

/// What a store would hold, as it would hold it.
#[derive(Default)]
pub struct Stored {
    entries: Mutex<Vec<(String, Timestamp, Value)>>,
    messages: Mutex<Vec<InboxMessage>>,
    new_message: Notify,
}

impl Stored {
    pub fn say(&self, kind: MessageKind, content: &str) -> MessageId {
        self.intervene(kind, None, Priority::Normal, content)
    }
    pub fn intervene(
        &self,
        kind: MessageKind,
        source: Option<Speaker>,
        priority: Priority,
        content: &str,
    ) -> MessageId {
        let mut messages = self.messages.lock().unwrap();
        let id = messages.len() as u64 + 100;
        messages.push(InboxMessage { id, kind, source, priority, content: content.into(), at: Timestamp(0) });
        drop(messages);
        self.new_message.notify_one();
        id
    }
    pub fn waiting(&self) -> usize {
        self.messages.lock().unwrap().len()
    }
    pub fn entries(&self) -> Vec<JournalEntry> {
        let read = |(kind, at, data): &(String, Timestamp, Value)| {
            JournalEntry::from_stored(kind, EVENT_VERSION, *at, data.clone()).unwrap()
        };
        self.entries.lock().unwrap().iter().map(read).collect()
    }
    pub fn events(&self) -> Vec<AgentEvent> {
        self.entries().into_iter().map(|e| e.event).collect()
    }
    pub fn kinds(&self) -> Vec<&'static str> {
        self.events().iter().map(AgentEvent::kind).collect()
    }
    /// Results of tool calls as texts, in order.
    pub fn results(&self) -> Vec<String> {
        self.events()
            .into_iter()
            .filter_map(|e| match e {
                AgentEvent::ToolCompleted(t) => Some(parts_text(&t.tool_response)),
                _ => None,
            })
            .collect()
    }
    /// What the store of a test takes in memory.
    pub fn bytes(&self) -> u64 {
        self.entries.lock().unwrap().iter().map(|(_, _, data)| data.to_string().len() as u64).sum()
    }
    pub fn len(&self) -> usize {
        self.entries.lock().unwrap().len()
    }
}

pub fn parts_text(parts: &[ResultPart]) -> String {
    let texts = parts.iter().map(|p| match p {
        ResultPart::Text { text } => text.clone(),
        ResultPart::Image(image) => format!("<{}>", image.media_type),
    });
    texts.collect::<Vec<_>>().join("|")
}

/// How an append fails: as seen from the agent both are the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Crash {
    BeforeWrite,
    AfterWrite,
}

/// One attempt's view of the store.
pub struct AttemptJournal {
    pub stored: Arc<Stored>,
    /// Appends that still work, and how the one after them fails.
    pub crash: Mutex<Option<(usize, Crash)>>,
}

#[async_trait]
impl Journal for AttemptJournal {
    async fn read(&self) -> Result<Vec<JournalEntry>, JournalError> {
        Ok(self.stored.entries())
    }
    async fn append(&self, entries: &[JournalEntry], delivered: &[MessageId]) -> Result<u64, JournalError> {
        let crash = {
            let mut crash = self.crash.lock().unwrap();
            match crash.as_mut() {
                Some((0, how)) => Some(*how),
                Some((left, _)) => {
                    *left -= 1;
                    None
                }
                None => None,
            }
        };
        if crash == Some(Crash::BeforeWrite) {
            return Err(JournalError::Unavailable("crashed".to_string()));
        }
        let mut all = self.stored.entries.lock().unwrap();
        for entry in entries {
            let (kind, data) = entry.to_stored();
            all.push((kind.to_string(), entry.at, data));
        }
        self.stored.messages.lock().unwrap().retain(|m| !delivered.contains(&m.id));
        match crash {
            Some(_) => Err(JournalError::Unavailable("crashed".to_string())),
            None => Ok(all.len() as u64),
        }
    }
}

pub struct StoredInbox(pub Arc<Stored>);

#[async_trait]
impl Inbox for StoredInbox {
    async fn pending(&self) -> Result<Vec<InboxMessage>, JournalError> {
        Ok(self.0.messages.lock().unwrap().clone())
    }
    async fn wait(&self) {
        self.0.new_message.notified().await;
    }
}

/// Snapshots of the sandbox; what was let go is only noted.
pub struct Snapshots {
    pub sandbox: Arc<dyn Sandbox>,
    pub removed: Arc<Mutex<Vec<String>>>,
}

#[async_trait]
impl Checkpoints for Snapshots {
    async fn make(&self, _: u32, position: u64) -> Result<CheckpointInfo, CheckpointError> {
        let id = SnapshotId::new(format!("cp{position}")).unwrap();
        let made = self.sandbox.snapshot(&id, &Default::default()).await;
        let made = made.map_err(|e| match e.kind {
            ErrorKind::Stale => CheckpointError::Stale,
            _ => CheckpointError::Failed(e.to_string()),
        })?;
        Ok(CheckpointInfo {
            id: id.to_string(),
            kind: CheckpointKind::Full,
            snapshot: Some(id),
            at: made.created_at,
        })
    }
    async fn remove(&self, checkpoint: &CheckpointInfo) -> Result<(), CheckpointError> {
        self.removed.lock().unwrap().push(checkpoint.id.clone());
        Ok(())
    }
}

/// One scripted answer.
#[derive(Clone)]
pub struct Answer {
    pub content: Vec<Block>,
    pub stop: StopReason,
    pub input_tokens: u64,
}

pub fn say(text: &str) -> Answer {
    Answer { content: vec![Block::text(text)], stop: StopReason::EndTurn, input_tokens: 10 }
}

/// An answer that makes calls: `(tool, input)`.
pub fn call(calls: &[(&str, Value)]) -> Answer {
    let mut content = vec![
        Block::Thinking { thinking: "hm".to_string(), signature: "sig".to_string() },
        Block::text("I will look."),
    ];
    for (i, (name, input)) in calls.iter().enumerate() {
        content.push(Block::ToolUse {
            id: format!("toolu_{i}"),
            name: (*name).to_string(),
            input: RawJson::from(input),
        });
    }
    Answer { content, stop: StopReason::ToolUse, input_tokens: 10 }
}

pub fn bash(command: &str) -> Answer {
    call(&[("Bash", json!({ "command": command }))])
}

type Script = dyn Fn(&TurnRequest, usize) -> Result<Answer, InferenceError> + Send + Sync;

/// Answers from the conversation alone, so that a resumed one gets the same answers.
pub struct ScriptModel {
    script: Box<Script>,
    pub requests: Mutex<Vec<TurnRequest>>,
    remembers: AtomicBool,
}

impl ScriptModel {
    /// The nth answer of the conversation is the nth of the list.
    pub fn list(answers: Vec<Answer>) -> Arc<ScriptModel> {
        ScriptModel::new(move |_, n| Ok(answers.get(n).cloned().unwrap_or_else(|| say("done"))))
    }
    pub fn new(
        script: impl Fn(&TurnRequest, usize) -> Result<Answer, InferenceError> + Send + Sync + 'static,
    ) -> Arc<ScriptModel> {
        Arc::new(ScriptModel {
            script: Box::new(script),
            requests: Mutex::default(),
            remembers: AtomicBool::new(true),
        })
    }
    /// Keeps no copies from now on.
    pub fn forget_requests(&self) {
        self.remembers.store(false, Ordering::Relaxed);
    }
    pub fn requests(&self) -> Vec<TurnRequest> {
        self.requests.lock().unwrap().clone()
    }
    pub fn last(&self) -> TurnRequest {
        self.requests().pop().unwrap()
    }
}

#[async_trait]
impl Model for ScriptModel {
    async fn turn(
        &self,
        request: &TurnRequest,
        _: &mut dyn DeltaSink,
    ) -> Result<TurnResponse, InferenceError> {
        check_rules(request);
        if self.remembers.load(Ordering::Relaxed) {
            self.requests.lock().unwrap().push(request.clone());
        }
        let n = request.messages.iter().filter(|m| m.role == Role::Assistant).count();
        let answer = (self.script)(request, n)?;
        Ok(TurnResponse {
            content: answer.content,
            stop_reason: answer.stop,
            usage: Usage { input: answer.input_tokens, output: 5, ..Usage::default() },
            cost: Usd::cents(1),
            request_id: None,
            model: request.model.clone(),
            tries: 1,
        })
    }
}

/// What the real API refuses.
fn check_rules(request: &TurnRequest) {
    let messages = &request.messages;
    assert_eq!(messages[0].role, Role::User, "the first message is the user's");
    for (i, message) in messages.iter().enumerate() {
        assert!(!message.content.is_empty(), "message {i} is empty");
        if i > 0 && message.role == Role::User {
            assert_eq!(messages[i - 1].role, Role::Assistant, "two user messages in a row");
        }
        if message.role == Role::Assistant {
            let asked: Vec<&str> = message.content.iter().filter_map(tool_use_id).collect();
            let next = messages.get(i + 1).map(|m| m.content.as_slice()).unwrap_or_default();
            let answered: Vec<&str> = next.iter().map_while(result_id).collect();
            assert_eq!(asked, answered, "every call has its result, first and in order");
            let rest = next.iter().skip(answered.len()).filter_map(result_id).count();
            assert_eq!(rest, 0, "results come first");
        }
    }
    let names: BTreeSet<&str> = request.tools.iter().map(|t| t.name.as_str()).collect();
    assert_eq!(names.len(), request.tools.len(), "a tool is listed once");
}

fn tool_use_id(block: &Block) -> Option<&str> {
    if let Block::ToolUse { id, .. } = block { Some(id) } else { None }
}
fn result_id(block: &Block) -> Option<&str> {
    if let Block::ToolResult { tool_use_id, .. } = block { Some(tool_use_id) } else { None }
}

/// All text that a request's last message carries, results included.
pub fn last_text(request: &TurnRequest) -> String {
    message_text(request.messages.last().unwrap())
}

pub fn message_text(message: &Message) -> String {
    let texts = message.content.iter().map(|b| match b {
        Block::Text { text } => text.clone(),
        Block::ToolResult { content, .. } => parts_text(content),
        _ => String::new(),
    });
    texts.collect::<Vec<_>>().join("\n")
}

/// A fork and those who worked on it.
pub struct Fork {
    pub world: World,
    pub stored: Arc<Stored>,
    pub model: Arc<ScriptModel>,
    pub policy: PolicyConfig,
    pub interceptors: Vec<Arc<dyn Interceptor>>,
    pub config: AgentConfig,
    pub cancel: CancellationToken,
    /// Checkpoints that were let go.
    pub removed: Arc<Mutex<Vec<String>>>,
}

impl Fork {
    pub fn new(model: Arc<ScriptModel>) -> Fork {
        let mut config =
            AgentConfig::new(RunId::new("run1").unwrap(), 0, Attempt(0), "test-model", "Do the task.");
        config.branch = "work".to_string();
        Fork {
            world: World::new(),
            stored: Arc::default(),
            model,
            policy: PolicyConfig::default(),
            interceptors: Vec::new(),
            config,
            cancel: CancellationToken::new(),
            removed: Arc::default(),
        }
    }

    pub fn list(answers: Vec<Answer>) -> Fork {
        Fork::new(ScriptModel::list(answers))
    }

    /// The next attempt.
    pub async fn run(&mut self) -> Result<AgentOutcome, AgentError> {
        self.attempt(None).await
    }

    pub async fn run_until(&mut self, appends: usize, how: Crash) -> Result<AgentOutcome, AgentError> {
        self.attempt(Some((appends, how))).await
    }

    /// The next attempt, as somebody else would run it.
    pub fn agent(&mut self, crash: Option<(usize, Crash)>) -> Agent {
        self.config.attempt = self.config.attempt.next();
        let sandbox = self.world.attach(self.config.attempt.0);
        let checkpoints: Arc<dyn Checkpoints> =
            Arc::new(Snapshots { sandbox: sandbox.clone(), removed: self.removed.clone() });
        let config = self.config.clone();
        self.config.continuity = Continuity::Same;
        Agent {
            model: self.model.clone(),
            sandbox,
            journal: Arc::new(AttemptJournal { stored: self.stored.clone(), crash: Mutex::new(crash) }),
            inbox: Arc::new(StoredInbox(self.stored.clone())),
            checkpoints: Some(checkpoints),
            events: Arc::new(NoSink),
            policy: self.policy.clone(),
            interceptors: self.interceptors.clone(),
            config,
        }
    }

    async fn attempt(&mut self, crash: Option<(usize, Crash)>) -> Result<AgentOutcome, AgentError> {
        let cancel = self.cancel.clone();
        self.agent(crash).run(cancel).await
    }
}
