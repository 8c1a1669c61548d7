//! The layer for requests of somebody else: an agent that works inside a sandbox and speaks the API itself. Its requests are passed on
//! as they came, with the key, the limiter, the budget and the meter of the layer; it retries by itself.

use bytes::Bytes;
use forkyard_core::Usd;
use forkyard_core::pricing::{CacheTtl, InputKind, ModelFacts, Usage};
use futures::StreamExt;
use futures::stream::{self, BoxStream};
use tokio_util::sync::CancellationToken;

use async_trait::async_trait;

use super::anthropic::{Meter, RawRequest};
use super::backend::{Backend, Billing, Failure, FailureKind, Passed, Relay};
use super::estimate::{MAX_CONTEXT_TOKENS, weigh_raw};
use super::layer::Session;
use super::limiter::Permit;
use super::purse::{Admitted, Bound, Counter, Wish};
use super::reserve::Reservation;
use super::transport::{Headers, Reply, TransportError};
use super::{InferenceError, Silent};

/// Largest request that is passed on: what the API takes.
pub const MAX_RELAY_BYTES: usize = 32 << 20;

/// The provider's answer, errors of the API included. Its body settles what it cost as it is read; dropped early, it is settled at
/// its worst case.
pub struct Relayed {
    pub status: u16,
    pub headers: Headers,
    pub body: BoxStream<'static, Result<Bytes, TransportError>>,
}

struct CountRaw<'a> {
    backend: &'a dyn Backend,
    body: Bytes,
    relay: &'a Relay,
}

#[async_trait]
impl Counter for CountRaw<'_> {
    async fn count(&self) -> Option<u64> {
        self.backend.count_raw(Relay { body: self.body.clone(), ..self.relay.clone() }).await
    }
}

fn rejected(message: impl Into<String>) -> InferenceError {
    InferenceError::Rejected { status: Some(400), message: message.into() }
}

impl Session {
    /// Passes a request on. [`InferenceError::Rejected`] is the asker's mistake.
    pub async fn relay(&self, relay: Relay) -> Result<Relayed, InferenceError> {
        tokio::select! {
            biased;
            () = self.spec.cancel.cancelled() => Err(InferenceError::Cancelled),
            result = self.pass_on(relay) => result,
        }
    }

    /// How many tokens a request has, by the provider's word; it costs nothing.
    pub async fn count(&self, relay: Relay) -> Result<Option<u64>, InferenceError> {
        if relay.body.len() > MAX_RELAY_BYTES {
            return Err(rejected(format!("the body is larger than {MAX_RELAY_BYTES} bytes")));
        }
        let raw = RawRequest::parse_count(&relay.body).map_err(rejected)?;
        let model = self.inference.prices().resolve(&raw.model).to_string();
        let body = raw.count_body(&model);
        Ok(self.inference.backend.count_raw(Relay { body, ..relay }).await)
    }

    async fn pass_on(&self, relay: Relay) -> Result<Relayed, InferenceError> {
        if relay.body.len() > MAX_RELAY_BYTES {
            return Err(rejected(format!("the body is larger than {MAX_RELAY_BYTES} bytes")));
        }
        let inference = &self.inference;
        let mut raw = RawRequest::parse(&relay.body).map_err(rejected)?;
        let facts = inference.facts(&raw.model).cloned();
        if facts.is_none() && self.purse.limited() {
            return Err(InferenceError::NoPrice { model: raw.model });
        }
        let model = inference.prices().resolve(&raw.model).to_string();
        let image_tokens = facts.as_ref().map_or(0, |f| f.image_tokens);
        let ttl = if raw.one_hour_cache { CacheTtl::OneHour } else { CacheTtl::FiveMinutes };
        let mut wish = Wish {
            facts: facts.as_ref(),
            kind: InputKind::Cached(ttl),
            input: if raw.unbounded {
                MAX_CONTEXT_TOKENS
            } else {
                weigh_raw(raw.text_bytes, raw.images, image_tokens)
            },
            bound: Bound::Bytes,
            most: raw.max_tokens,
            least: inference.settings.min_output_tokens.min(raw.max_tokens),
        };
        let counter =
            CountRaw { backend: inference.backend.as_ref(), body: raw.count_body(&model), relay: &relay };
        let admitted = self.purse.admit(&mut wish, &counter, &inference.limiter, &mut Silent).await?;
        let Admitted { reservation, max_tokens, permit } = admitted;
        let body = raw.body(&model, max_tokens);
        match inference.backend.relay(Relay { body, ..relay }).await {
            Ok(Passed { reply: Reply { status, headers, body }, failure: None }) => {
                inference.limiter.answered();
                let metered = Metered {
                    body,
                    meter: Meter::new(raw.streams),
                    money: Some((reservation, permit)),
                    facts,
                    max_tokens,
                    cancel: self.spec.cancel.clone(),
                };
                Ok(Relayed { status, headers, body: metered.stream() })
            }
            Ok(Passed { reply: Reply { status, headers, body }, failure: Some(failure) }) => {
                if failure.kind == FailureKind::Pushback {
                    let delay = failure.retry_after.unwrap_or(inference.settings.retry.first_delay);
                    inference.limiter.pushback(delay);
                }
                close(reservation, failure.billing).await;
                Ok(Relayed { status, headers, body })
            }
            Err(failure) => {
                close(reservation, failure.billing).await;
                Err(unanswered(failure))
            }
        }
    }
}

/// The provider was not reached, or was lost: the asker may try again.
fn unanswered(failure: Failure) -> InferenceError {
    match failure.kind {
        FailureKind::Rejected => rejected(failure.message),
        FailureKind::Transient
        | FailureKind::Pushback
        | FailureKind::Account
        | FailureKind::ContextTooLong => InferenceError::Exhausted { tries: 1, message: failure.message },
    }
}

async fn close(reservation: Reservation, billing: Billing) {
    match billing {
        Billing::Nothing => reservation.settle(Usd::ZERO, &Usage::default()).await,
        Billing::Unknown => reservation.settle_at_worst().await,
    };
}

/// A passing body. Whoever stops reading leaves a reservation that closes itself.
struct Metered {
    body: BoxStream<'static, Result<Bytes, TransportError>>,
    meter: Meter,
    money: Option<(Reservation, Permit)>,
    facts: Option<ModelFacts>,
    max_tokens: u32,
    cancel: CancellationToken,
}

impl Metered {
    fn stream(self) -> BoxStream<'static, Result<Bytes, TransportError>> {
        stream::unfold(Some(self), |state| async move {
            let mut state = state?;
            let chunk = state.next().await?;
            // Dropping the state settles what is left at its worst case.
            let rest = chunk.is_ok().then_some(state);
            Some((chunk, rest))
        })
        .boxed()
    }

    async fn next(&mut self) -> Option<Result<Bytes, TransportError>> {
        let broken = |message: String| TransportError { message, unsent: false, permanent: false };
        let chunk = tokio::select! {
            biased;
            () = self.cancel.cancelled() => return Some(Err(broken("cancelled".into()))),
            chunk = self.body.next() => chunk,
        };
        match chunk {
            None => {
                self.settle().await;
                None
            }
            Some(Err(error)) => Some(Err(error)),
            Some(Ok(bytes)) => {
                match self.meter.read(&bytes) {
                    Ok(Some(usage)) => self.shrink(&usage),
                    Ok(None) => {}
                    Err(e) => return Some(Err(broken(e.to_string()))),
                }
                if self.meter.is_done() {
                    // Before the last chunk is handed on: whoever has read it finds it paid for.
                    self.settle().await;
                }
                Some(Ok(bytes))
            }
        }
    }

    fn cost(&self, usage: &Usage) -> Usd {
        self.facts.as_ref().map_or(Usd::ZERO, |f| f.cost(usage))
    }

    fn shrink(&mut self, usage: &Usage) {
        let worst = self.cost(&Usage { output: u64::from(self.max_tokens).max(usage.output), ..*usage });
        if let Some((reservation, _)) = &mut self.money {
            reservation.shrink(worst);
        }
    }

    /// At what the answer said, if it is whole.
    async fn settle(&mut self) {
        if let Some(usage) = self.meter.finish()
            && let Some((reservation, permit)) = self.money.take()
        {
            drop(permit);
            let cost = self.cost(&usage);
            reservation.settle(cost, &usage).await;
        }
    }
}
