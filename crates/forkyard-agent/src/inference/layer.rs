//! The layer itself: what happens around one request, whoever answers it.
//!
//! ```text
//! turn ─ warm prefix? ─ reserve worst case ─ limiter ─ mark sent ─ send ─ shrink at message_start ─ settle ─ answer
//!          ^                                                        |
//!          └───────────── delay (retry-after, backoff) ─────────────┴─ failed: settled at 0 or at its worst case
//! ```

use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use async_trait::async_trait;
use forkyard_core::pricing::{InputKind, ModelFacts, PriceBook, Usage};
use forkyard_core::{ForkNum, Usd};
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;
use tracing::field::Empty;
use tracing::{Instrument, Span};

use super::backend::{Answer, Backend, Billing, Call, Failure, RateLimits, Watch};
use super::estimate::{Conversations, bound_of_count, shared_prefix, weigh};
use super::limiter::Limiter;
use super::reserve::{Reservation, Spent, ask};
use super::retry::{Retries, RetrySettings};
use super::warm::{Leader, WarmPrefixes};
use super::{Delta, DeltaSink, InferenceError, Message, Model, Notice, TurnRequest, TurnResponse};
use crate::ports::{Ask, Grant, Ledger, Sent};

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
    backend: Arc<dyn Backend>,
    prices: Arc<PriceBook>,
    settings: InferenceSettings,
    limiter: Arc<Limiter>,
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

    pub fn prices(&self) -> &PriceBook {
        &self.prices
    }

    /// Before a run with a budget starts: its model needs a price.
    pub fn check_price(&self, model: &str) -> Result<(), InferenceError> {
        self.facts(model).map(|_| ()).ok_or_else(|| InferenceError::NoPrice { model: model.to_string() })
    }

    fn facts(&self, model: &str) -> Option<&ModelFacts> {
        self.prices.get(self.backend.priced_as(self.prices.resolve(model)))
    }

    /// The model as one attempt of a fork uses it. `key` begins the name of each
    /// request's reservation.
    pub fn session(&self, session: SessionSpec) -> Session {
        Session {
            inference: self.clone(),
            nonce: RandomState::new().hash_one(&session.key),
            spec: session,
            requests: AtomicU64::new(0),
            conversations: Conversations::default(),
            spent: Spent::default(),
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
    inference: Inference,
    spec: SessionSpec,
    /// Keeps the requests of two sessions apart, also if they were given the same key.
    nonce: u64,
    /// Numbers reservations: one that was released is never asked for again.
    requests: AtomicU64,
    conversations: Conversations,
    spent: Spent,
}

#[async_trait]
impl Model for Session {
    async fn turn(
        &self,
        request: &TurnRequest,
        deltas: &mut dyn DeltaSink,
    ) -> Result<TurnResponse, InferenceError> {
        let span = self.span(request);
        let result = async {
            tokio::select! {
                biased;
                () = self.spec.cancel.cancelled() => Err(InferenceError::Cancelled),
                result = self.run(request, deltas) => result,
            }
        }
        .instrument(span.clone())
        .await;
        record_outcome(&span, &result);
        result
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
    facts: Option<&'a ModelFacts>,
    kind: InputKind,
    /// The bound on the input, and how it came to be.
    input: u64,
    bound: Bound,
    prefix: Option<u64>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Bound {
    Bytes,
    /// Of the conversation's last answer, plus bytes.
    Reported,
    Counted,
}

impl Turn<'_> {
    fn worst(&self, input: u64, output: u32) -> Usd {
        self.facts.map_or(Usd::ZERO, |f| f.worst_case(self.kind, input, u64::from(output)))
    }
}

/// How a try went that sent something.
struct Tried {
    result: Result<Answer, Failure>,
    cost: Usd,
}

impl Session {
    /// All that was spent through this session, lost answers and failed turns included.
    pub fn spent(&self) -> (Usd, Usage) {
        self.spent.get()
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
        if facts.is_none() && self.spec.ledger.limited() {
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
        Ok(Turn { request, model, facts, kind, input, bound, prefix })
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
        let (mut reservation, max_tokens, permit) = loop {
            let changed = self.spec.ledger.changed();
            let (mut reservation, max_tokens) = self.reserve(turn, deltas).await?;
            if let Some(closed) = inference.limiter.closed_for() {
                let delay_ms = u64::try_from(closed.as_millis()).unwrap_or(u64::MAX);
                deltas.delta(Delta::Notice(&Notice::RateLimited { delay_ms }));
            }
            let permit = inference.limiter.acquire().await;
            match reservation.mark_sent().await? {
                Sent::Go => break (reservation, max_tokens, permit),
                Sent::Stale => return Err(InferenceError::Stale),
                Sent::Cancelled => return Err(InferenceError::Cancelled),
                Sent::Paused => {
                    drop(permit);
                    reservation.release().await;
                    deltas.delta(Delta::Notice(&Notice::WaitingWhilePaused));
                    changed.await;
                }
            }
        };
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
        let cost = match &result {
            Ok(Answer { usage: Some(usage), .. }) => {
                reservation.settle(turn.facts.map_or(Usd::ZERO, |f| f.cost(usage)), usage).await
            }
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
        Call { request: turn.request, model: turn.model, facts: turn.facts, max_tokens, fork: self.spec.fork }
    }

    /// Sets the worst case aside; waits while others hold the money, then asks for less output, and gives up only when the
    /// smallest useful request does not fit with nothing outstanding.
    async fn reserve(
        &self,
        turn: &mut Turn<'_>,
        deltas: &mut dyn DeltaSink,
    ) -> Result<(Reservation, u32), InferenceError> {
        let ledger = &self.spec.ledger;
        let number = self.requests.fetch_add(1, Ordering::Relaxed);
        let key = format!("{}/{:016x}/{number}", self.spec.key, self.nonce);
        let full = turn.request.max_tokens;
        let least = self.inference.settings.min_output_tokens.min(full);
        let mut max_tokens = full;
        let mut told = None;
        loop {
            let changed = ledger.changed();
            let wish = Ask {
                request: key.clone(),
                worst: turn.worst(turn.input, max_tokens),
                smallest: turn.worst(turn.input, least),
            };
            match ask(ledger, &wish).await? {
                Grant::Granted { id } => {
                    let mut reservation =
                        Reservation::new(Arc::clone(ledger), id, wish.worst, self.spent.clone());
                    // Counted only once money is granted: while a run is paused nothing is sent at all.
                    if turn.bound == Bound::Bytes && ledger.limited() {
                        self.count(turn, max_tokens).await;
                        reservation.shrink(turn.worst(turn.input, max_tokens));
                    }
                    return Ok((reservation, max_tokens));
                }
                Grant::Stale => return Err(InferenceError::Stale),
                Grant::Cancelled => return Err(InferenceError::Cancelled),
                Grant::Paused => {
                    tell(deltas, &mut told, Notice::WaitingWhilePaused);
                    changed.await;
                }
                // A closer bound may be all that is missing.
                Grant::Short { .. } if turn.bound != Bound::Counted => self.count(turn, max_tokens).await,
                Grant::Short { available, outstanding: true } => {
                    max_tokens = full;
                    let needed = turn.worst(turn.input, full);
                    tell(deltas, &mut told, Notice::WaitingForBudget { needed, available });
                    changed.await;
                }
                Grant::Short { available, outstanding: false } => {
                    let affordable = turn
                        .facts
                        .map_or(0, |f| f.affordable_output(turn.kind, turn.input, available))
                        .min(u64::from(full));
                    let affordable = u32::try_from(affordable).expect("at most the u32 that was asked for");
                    if affordable < least {
                        return Err(InferenceError::BudgetExceeded { needed: wish.smallest, available });
                    }
                    tell(deltas, &mut told, Notice::LoweredMaxTokens { from: full, to: affordable });
                    max_tokens = affordable;
                }
            }
        }
    }

    async fn count(&self, turn: &mut Turn<'_>, max_tokens: u32) {
        if let Some(counted) = self.inference.backend.count_tokens(&self.call(turn, max_tokens)).await {
            // What the layer knows bounds the input too: the smaller one holds.
            turn.input = turn.input.min(bound_of_count(counted));
        }
        turn.bound = Bound::Counted;
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

/// Once per kind of wait.
fn tell(deltas: &mut dyn DeltaSink, told: &mut Option<Notice>, notice: Notice) {
    if told.as_ref().map(std::mem::discriminant) != Some(std::mem::discriminant(&notice)) {
        deltas.delta(Delta::Notice(&notice));
        *told = Some(notice);
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
        // The kinds are known now, so each is counted at its own price.
        let most = Usage { output: u64::from(self.max_tokens).max(usage.output), ..*usage };
        self.reservation.shrink(self.turn.facts.map_or(Usd::ZERO, |f| f.cost(&most)));
    }

    fn rate_limits(&mut self, limits: &RateLimits) {
        if let Some(closed) = limits.exhausted_for {
            self.limiter.close_for(closed);
        }
    }
}
