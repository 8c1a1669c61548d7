//! The layer itself: what happens around one request, whoever answers it.
//!
//! ```text
//! turn ─ warm prefix? ─ reserve worst case ─ limiter ─ mark sent ─ send ─ shrink at message_start ─ settle ─ answer
//!          ^                                                        |
//!          └───────────── delay (retry-after, backoff) ─────────────┴─ failed: settled at 0 or at its worst case
//! ```

use std::hash::RandomState;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use async_trait::async_trait;
use forkyard_core::pricing::{DEFAULT_CONTEXT_TOKENS, InputKind, ModelFacts, PriceBook, Usage};
use forkyard_core::{ForkNum, Usd};
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;
use tracing::field::Empty;
use tracing::{Instrument, Span};

use super::backend::{Answer, Backend, Billing, Call, Failure, RateLimits, Watch};
use super::estimate::{Conversations, shared_prefix, weigh};
use super::limiter::{Limiter, Pressure};
use super::model::Heard;
use super::purse::{Admitted, Bound, Counter, Purse, Wish};
use super::reserve::Reservation;
use super::retry::{Retries, RetrySettings};
use super::warm::{Leader, WarmPrefixes};
use super::{Delta, DeltaSink, InferenceError, Message, Model, Notice, TurnRequest, TurnResponse};
use crate::ports::Ledger;

/// Below this an answer can't hold a useful tool call: rather no request than a cut one.
pub const MIN_USEFUL_OUTPUT_TOKENS: u32 = 1024;

#[derive(Debug, Clone)]
pub struct InferenceSettings {
    pub retry: RetrySettings,
    pub min_output_tokens: u32,
}

impl Default for InferenceSettings {
    fn default() -> InferenceSettings {
        InferenceSettings { retry: RetrySettings::default(), min_output_tokens: MIN_USEFUL_OUTPUT_TOKENS }
    }
}

/// One provider with one account, shared by all forks of the process. Clones share everything.
#[derive(Clone)]
pub struct Inference {
    pub(super) backend: Arc<dyn Backend>,
    prices: Arc<PriceBook>,
    pub(super) settings: InferenceSettings,
    pub(super) limiter: Arc<Limiter>,
    warm: Arc<WarmPrefixes>,
    hasher: RandomState,
}

impl Inference {
    pub fn new(backend: Arc<dyn Backend>, prices: PriceBook, settings: InferenceSettings) -> Inference {
        Inference {
            backend,
            prices: Arc::new(prices),
            settings,
            limiter: Arc::default(),
            warm: Arc::default(),
            hasher: RandomState::new(),
        }
    }

    pub fn provider(&self) -> &'static str {
        self.backend.name()
    }

    pub fn pressure(&self) -> Pressure {
        self.limiter.pressure()
    }

    pub fn prices(&self) -> &PriceBook {
        &self.prices
    }

    /// Before a run with a budget starts: its model needs a price.
    pub fn check_price(&self, model: &str) -> Result<(), InferenceError> {
        self.facts(model).map(|_| ()).ok_or_else(|| InferenceError::NoPrice { model: model.to_string() })
    }

    /// What the model reads at most, prompt and answer together.
    pub fn context_tokens(&self, model: &str) -> u64 {
        self.facts(model).map_or(DEFAULT_CONTEXT_TOKENS, |f| f.context_tokens)
    }

    pub(super) fn facts(&self, model: &str) -> Option<&ModelFacts> {
        self.prices.get(self.backend.priced_as(self.prices.resolve(model)))
    }

    /// The model as one attempt of a fork uses it. `key` begins the name of each
    /// request's reservation.
    pub fn session(&self, session: SessionSpec) -> Session {
        Session {
            inference: self.clone(),
            purse: Purse::new(Arc::clone(&session.ledger), &session.key),
            spec: session,
            conversations: Conversations::default(),
        }
    }
}

pub struct SessionSpec {
    /// Such as `RUN/3/a2`.
    pub key: String,
    pub fork: Option<ForkNum>,
    pub ledger: Arc<dyn Ledger>,
    /// Ends every request at once.
    pub cancel: CancellationToken,
}

/// A [`Model`] whose requests are limited, retried, metered and paid for. Shared by an agent and its subagents.
pub struct Session {
    pub(super) inference: Inference,
    pub(super) spec: SessionSpec,
    pub(super) purse: Purse,
    conversations: Conversations,
}

#[async_trait]
impl Model for Session {
    async fn turn(
        &self,
        request: &TurnRequest,
        deltas: &mut dyn DeltaSink,
    ) -> Result<TurnResponse, InferenceError> {
        let span = self.span(request);
        let answered = AtomicBool::new(false);
        let mut deltas = Heard { deltas, answered: &answered };
        let result = async {
            if self.spec.cancel.is_cancelled() {
                return Err(InferenceError::Cancelled);
            }
            let mut asking = std::pin::pin!(self.run(request, &mut deltas));
            tokio::select! {
                biased;
                result = &mut asking => result,
                // It is being paid for.
                () = self.spec.cancel.cancelled() => match answered.load(Ordering::Relaxed) {
                    true => asking.await,
                    false => Err(InferenceError::Cancelled),
                },
            }
        }
        .instrument(span.clone())
        .await;
        record_outcome(&span, &result);
        result
    }

    fn total_cost(&self) -> Usd {
        self.purse.spent().0
    }
}

/// By OpenTelemetry's conventions for generative AI; contents are never in it.
fn record_outcome(span: &Span, result: &Result<TurnResponse, InferenceError>) {
    match result {
        Ok(response) => {
            span.record("gen_ai.response.model", &response.model);
            span.record("gen_ai.response.finish_reasons", response.stop_reason.as_str());
            span.record("gen_ai.usage.input_tokens", response.usage.prompt());
            span.record("gen_ai.usage.output_tokens", response.usage.output);
            span.record("gen_ai.usage.cache_read.input_tokens", response.usage.cache_read);
            span.record("forkyard.cost_usd", response.cost.as_dollars());
            span.record("forkyard.tries", response.tries);
        }
        Err(error) => {
            span.record("error.type", error.kind());
        }
    }
}

/// What stays the same over the tries of a turn.
struct Turn<'a> {
    request: &'a TurnRequest,
    model: &'a str,
    wish: Wish<'a>,
    prefix: Option<u64>,
}

/// How a try went that sent something.
struct Tried {
    result: Result<Answer, Failure>,
    cost: Usd,
}

impl Session {
    /// All that was spent through this session, lost answers and failed turns included.
    pub fn spent(&self) -> (Usd, Usage) {
        self.purse.spent()
    }

    fn span(&self, request: &TurnRequest) -> Span {
        let model = self.inference.prices.resolve(&request.model);
        tracing::info_span!(
            "chat",
            otel.name = format!("chat {model}"),
            gen_ai.operation.name = "chat",
            gen_ai.provider.name = self.inference.provider(),
            gen_ai.request.model = model,
            gen_ai.request.max_tokens = request.max_tokens,
            gen_ai.response.model = Empty,
            gen_ai.response.finish_reasons = Empty,
            gen_ai.usage.input_tokens = Empty,
            gen_ai.usage.output_tokens = Empty,
            gen_ai.usage.cache_read.input_tokens = Empty,
            forkyard.fork = self.spec.fork,
            forkyard.cost_usd = Empty,
            forkyard.tries = Empty,
            "error.type" = Empty,
        )
    }

    async fn run(
        &self,
        request: &TurnRequest,
        deltas: &mut dyn DeltaSink,
    ) -> Result<TurnResponse, InferenceError> {
        let mut turn = self.begin(request)?;
        let mut retries = Retries::default();
        let mut cost = Usd::ZERO;
        loop {
            let tries = retries.count() + 1;
            let tried = self.attempt(&mut turn, deltas).await?;
            cost += tried.cost;
            let failure = match tried.result {
                Ok(answer) => return Ok(self.response(&turn, answer, cost, tries)),
                Err(failure) => failure,
            };
            let again = retries.next(&failure, &self.inference.settings.retry)?;
            if let Some(delay) = again.pushback {
                self.inference.limiter.pushback(delay);
            }
            deltas.delta(Delta::Reset);
            deltas.delta(Delta::Notice(&Notice::Retrying {
                retry: retries.count(),
                delay_ms: u64::try_from(again.delay.as_millis()).unwrap_or(u64::MAX),
                error: failure.message,
            }));
            sleep(again.delay).await;
        }
    }

    fn begin<'a>(&'a self, request: &'a TurnRequest) -> Result<Turn<'a>, InferenceError> {
        let inference = &self.inference;
        let facts = inference.facts(&request.model);
        if facts.is_none() && self.purse.limited() {
            return Err(InferenceError::NoPrice { model: request.model.clone() });
        }
        let image_tokens = facts.map_or(0, |f| f.image_tokens);
        let (input, bound) = match self.conversations.bound(request, image_tokens) {
            Some(input) => (input, Bound::Reported),
            None => (weigh(request, image_tokens), Bound::Bytes),
        };
        let kind = inference.backend.input_kind();
        let prefix = match kind {
            InputKind::Plain => None,
            InputKind::Cached(_) => shared_prefix(request, &inference.hasher),
        };
        let model = inference.prices.resolve(&request.model);
        let most = request.max_tokens;
        let least = inference.settings.min_output_tokens.min(most);
        Ok(Turn { request, model, wish: Wish { facts, kind, input, bound, most, least }, prefix })
    }

    /// One request, sent once.
    async fn attempt(
        &self,
        turn: &mut Turn<'_>,
        deltas: &mut dyn DeltaSink,
    ) -> Result<Tried, InferenceError> {
        let inference = &self.inference;
        // Only a conversation's first request: later ones have a longer prefix of their own in the cache.
        let leader = match turn.prefix {
            Some(prefix) if turn.request.messages.len() == 1 => inference.warm.enter(prefix).await,
            Some(_) | None => None,
        };
        let (request, model, facts) = (turn.request, turn.model, turn.wish.facts);
        let counter = CountCall { backend: inference.backend.as_ref(), request, model, facts };
        let admitted = self.purse.admit(&mut turn.wish, &counter, &inference.limiter, deltas).await?;
        let Admitted { mut reservation, max_tokens, permit } = admitted;
        let call = self.call(turn, max_tokens);
        let mut watch = TryWatch {
            deltas,
            limiter: &inference.limiter,
            warm: &inference.warm,
            turn,
            max_tokens,
            leader,
            reservation: &mut reservation,
        };
        let result = inference.backend.once(&call, &mut watch).await;
        drop(watch);
        drop(permit);
        if result.is_ok() {
            deltas.answered();
        }
        let cost = match &result {
            Ok(Answer { usage: Some(usage), .. }) => reservation.settle(turn.wish.cost(usage), usage).await,
            Ok(Answer { usage: None, .. }) | Err(Failure { billing: Billing::Unknown, .. }) => {
                reservation.settle_at_worst().await
            }
            Err(Failure { billing: Billing::Nothing, .. }) => {
                reservation.settle(Usd::ZERO, &Usage::default()).await
            }
        };
        if result.is_ok() {
            inference.limiter.answered();
        }
        Ok(Tried { result, cost })
    }

    fn call<'a>(&self, turn: &Turn<'a>, max_tokens: u32) -> Call<'a> {
        Call {
            request: turn.request,
            model: turn.model,
            facts: turn.wish.facts,
            max_tokens,
            fork: self.spec.fork,
        }
    }

    fn response(&self, turn: &Turn<'_>, answer: Answer, cost: Usd, tries: u32) -> TurnResponse {
        let Answer { content, stop_reason, usage, request_id, model } = answer;
        let message = Message::assistant(content);
        if let Some(usage) = &usage {
            self.conversations.reported(turn.request, &message, usage);
        }
        TurnResponse {
            content: message.content,
            stop_reason,
            usage: usage.unwrap_or_default(),
            cost,
            request_id,
            model,
            tries,
        }
    }
}

struct CountCall<'a> {
    backend: &'a dyn Backend,
    request: &'a TurnRequest,
    model: &'a str,
    facts: Option<&'a ModelFacts>,
}

#[async_trait]
impl Counter for CountCall<'_> {
    async fn count(&self) -> Option<u64> {
        let CountCall { backend, request, model, facts } = *self;
        backend.count_tokens(&Call { request, model, facts, max_tokens: 0, fork: None }).await
    }
}

struct TryWatch<'a, 't> {
    deltas: &'a mut dyn DeltaSink,
    limiter: &'a Limiter,
    warm: &'a WarmPrefixes,
    turn: &'a Turn<'t>,
    max_tokens: u32,
    leader: Option<Leader>,
    reservation: &'a mut Reservation,
}

impl Watch for TryWatch<'_, '_> {
    fn delta(&mut self, delta: Delta<'_>) {
        self.deltas.delta(delta);
    }

    fn started(&mut self, usage: &Usage) {
        if let Some(prefix) = self.turn.prefix {
            self.warm.warmed(prefix);
        }
        self.leader = None;
        self.reservation.shrink(self.turn.wish.worst_after(usage, self.max_tokens));
    }

    fn rate_limits(&mut self, limits: &RateLimits) {
        if let Some(closed) = limits.exhausted_for {
            self.limiter.close_for(closed);
        }
    }
}
