//! A layer against the stand-in server, with delays short enough for tests.

use std::sync::Arc;
use std::time::Duration;

use forkyard_agent::inference::{
    Anthropic, Backend, Delta, DeltaSink, HttpBackend, Inference, InferenceSettings, Live, Message, Notice,
    RetrySettings, Session, SessionSpec, Timeouts, ToolDef, TurnRequest,
};
use forkyard_agent::ports::MemoryBudget;
use forkyard_core::pricing::{PriceBook, Usage};
use forkyard_core::{Attempt, Usd};
use serde_json::json;
use test_support::model_server::{Bill, ModelServer};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio_util::sync::CancellationToken;

pub const MODEL: &str = "sonnet";

pub fn settings() -> InferenceSettings {
    let retry = RetrySettings {
        first_delay: Duration::from_millis(1),
        max_delay: Duration::from_millis(4),
        jitter: Arc::new(|| 0.5),
        ..RetrySettings::default()
    };
    InferenceSettings { retry, ..InferenceSettings::default() }
}

/// Long enough for a slow machine, short enough for a test of what never comes.
pub fn timeouts() -> Timeouts {
    Timeouts {
        first_byte: Duration::from_secs(20),
        idle: Duration::from_secs(20),
        total: Duration::from_secs(60),
    }
}

pub fn backend(server: &ModelServer, timeouts: Timeouts) -> Arc<dyn Backend> {
    let live = Live::new(server.url()).unwrap();
    Arc::new(HttpBackend::new(Anthropic::new("test-key"), Arc::new(live), timeouts))
}

pub fn layer(server: &ModelServer) -> Inference {
    Inference::new(backend(server, timeouts()), PriceBook::default(), settings())
}

pub fn session(inference: &Inference, budget: &MemoryBudget, fork: u32) -> Session {
    session_with(inference, budget, fork, CancellationToken::new())
}

pub fn session_with(
    inference: &Inference,
    budget: &MemoryBudget,
    fork: u32,
    cancel: CancellationToken,
) -> Session {
    inference.session(SessionSpec {
        key: format!("run/{fork}/a1"),
        fork: Some(fork),
        ledger: Arc::new(budget.ledger(fork, Attempt(1))),
        cancel,
    })
}

pub fn ask(text: &str) -> TurnRequest {
    TurnRequest {
        system: "You write code.".into(),
        ..TurnRequest::new(MODEL, vec![Message::user(text)], 4096)
    }
}

pub fn bash() -> ToolDef {
    ToolDef {
        name: "Bash".into(),
        description: "Runs a command.".into(),
        input_schema: json!({"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}),
    }
}

pub fn usage(bill: &Bill) -> Usage {
    Usage {
        input: bill.input,
        output: bill.output,
        cache_write_5m: bill.cache_write_5m,
        cache_write_1h: bill.cache_write_1h,
        cache_read: bill.cache_read,
    }
}

/// What the server charged, in money.
pub fn billed(server: &ModelServer) -> Usd {
    let book = PriceBook::default();
    let facts = book.get(MODEL).unwrap();
    server.bills().iter().map(|b| facts.cost(&usage(b))).sum()
}

/// Passes notices on to the test as they come.
pub struct Tell(UnboundedSender<Notice>);

impl Tell {
    pub fn new() -> (Tell, UnboundedReceiver<Notice>) {
        let (sender, receiver) = unbounded_channel();
        (Tell(sender), receiver)
    }
}

impl DeltaSink for Tell {
    fn delta(&mut self, delta: Delta<'_>) {
        if let Delta::Notice(notice) = delta {
            // The test may have heard enough.
            let _ = self.0.send(notice.clone());
        }
    }
}
