//! One request, sent once. What a provider has to offer; everything that all of them share is in the layer above.

use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use forkyard_core::pricing::{InputKind, ModelFacts, Usage};

use super::transport::Reply;
use super::{Block, Delta, StopReason, TurnRequest};

/// A provider of answers. Dropping the future of a method ends the request at once.
#[async_trait]
pub trait Backend: Send + Sync {
    /// As telemetry names it: `anthropic`, `openai`, `script`.
    fn name(&self) -> &'static str;

    /// The kinds of input tokens that its requests can cause.
    fn input_kind(&self) -> InputKind;

    /// The model whose price counts.
    fn priced_as<'a>(&'a self, model: &'a str) -> &'a str {
        model
    }

    /// How many input tokens the request has; None where the provider can't say, or did not.
    async fn count_tokens(&self, call: &Call<'_>) -> Option<u64>;

    async fn once(&self, call: &Call<'_>, watch: &mut dyn Watch) -> Result<Answer, Failure>;

    /// Sends a request that is in the provider's own format already. Only a provider that speaks Anthropic's can.
    async fn relay(&self, _: Relay) -> Result<Passed, Failure> {
        Err(Failure::rejected(format!("requests can't be passed on to {}", self.name())))
    }

    async fn count_raw(&self, _: Relay) -> Option<u64> {
        None
    }
}

/// A request to `/v1/messages` in the API's own format.
#[derive(Debug, Clone, Default)]
pub struct Relay {
    pub body: Bytes,
    /// Of the request's headers these two are passed on: `anthropic-version` and `anthropic-beta`.
    pub version: Option<String>,
    pub beta: Option<String>,
}

/// What came back.
pub struct Passed {
    pub reply: Reply,
    /// What it means, if it is an error.
    pub failure: Option<Failure>,
}

/// What one try sends.
#[derive(Debug, Clone, Copy)]
pub struct Call<'a> {
    pub request: &'a TurnRequest,
    /// The full name.
    pub model: &'a str,
    pub facts: Option<&'a ModelFacts>,
    pub max_tokens: u32,
    /// The fork that asks, for a model that answers by it.
    pub fork: Option<u32>,
}

/// Sees a try while it runs.
pub trait Watch: Send {
    fn delta(&mut self, delta: Delta<'_>);
    /// The provider has begun to answer and said how much it read: from now on its cache has the prefix.
    fn started(&mut self, usage: &Usage);
    fn rate_limits(&mut self, limits: &RateLimits);
}

#[derive(Debug, Clone, PartialEq)]
pub struct Answer {
    pub content: Vec<Block>,
    pub stop_reason: StopReason,
    /// None if the provider did not report it: then the worst case is what it cost.
    pub usage: Option<Usage>,
    pub request_id: Option<String>,
    pub model: String,
}

/// A try that has no answer.
#[derive(Debug, Clone, PartialEq)]
pub struct Failure {
    pub kind: FailureKind,
    pub billing: Billing,
    pub retry_after: Option<Duration>,
    pub status: Option<u16>,
    pub message: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FailureKind {
    /// The provider asks everybody to slow down: 429, 529.
    Pushback,
    /// Worth another try.
    Transient,
    /// Compacting may help.
    ContextTooLong,
    /// Key, permission or money of the account.
    Account,
    Rejected,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Billing {
    /// The provider said no, or was never reached.
    Nothing,
    /// The answer was lost: it may have cost up to the worst case.
    Unknown,
}

impl Failure {
    /// The answer was lost on its way.
    pub fn lost(message: impl Into<String>) -> Failure {
        Failure {
            kind: FailureKind::Transient,
            billing: Billing::Unknown,
            retry_after: None,
            status: None,
            message: message.into(),
        }
    }
    /// Nothing was sent, and nothing would come of it.
    pub fn rejected(message: impl Into<String>) -> Failure {
        Failure { kind: FailureKind::Rejected, billing: Billing::Nothing, ..Failure::lost(message) }
    }
}

/// What the provider's headers say of the account's limits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RateLimits {
    /// A limit is used up; it opens again after this.
    pub exhausted_for: Option<Duration>,
}
