//! A backend over HTTP: timeouts, bounds and failures are the same for every wire format.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use forkyard_core::pricing::InputKind;
use futures::StreamExt;
use futures::stream::{self, BoxStream};
use tokio::time::{Instant, timeout, timeout_at};

use super::backend::{
    Answer, Backend, Billing, Call, Failure, FailureKind, Passed, RateLimits, Relay, Watch,
};
use super::sse::{SseEvent, SseParser};
use super::transport::{Headers, Post, Reply, Transport, TransportError};

/// Longest stream. The largest answer of today's models is some 20 MB of events; none of it is kept as it came.
pub const MAX_STREAM_BYTES: u64 = 64 << 20;
/// An error's body is cut here: it is for people.
const MAX_ERROR_BYTES: usize = 64 << 10;
/// Counting is a help, not worth a wait.
const COUNT_TIMEOUT: Duration = Duration::from_secs(10);

/// How long to wait for what.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timeouts {
    /// From sending to the first byte of the answer's body.
    pub first_byte: Duration,
    /// Between two reads; providers send pings while a model thinks.
    pub idle: Duration,
    /// One try as a whole.
    pub total: Duration,
}

impl Default for Timeouts {
    fn default() -> Timeouts {
        Timeouts {
            first_byte: Duration::from_secs(180),
            idle: Duration::from_secs(120),
            total: Duration::from_secs(1800),
        }
    }
}

/// What makes one provider's HTTP differ from another's.
pub trait Wire: Send + Sync {
    fn name(&self) -> &'static str;
    fn input_kind(&self) -> InputKind;
    fn turn(&self, call: &Call<'_>) -> Post;
    /// None where there is no such endpoint.
    fn count(&self, call: &Call<'_>) -> Option<Post>;
    fn counted(&self, body: &[u8]) -> Option<u64>;
    fn decoder(&self, headers: &Headers) -> Box<dyn Decoder>;
    fn failure(&self, status: u16, headers: &Headers, body: &[u8]) -> Failure;
    fn rate_limits(&self, headers: &Headers) -> RateLimits;
    /// None where requests of others can't be passed on.
    fn relay(&self, _: Relay) -> Option<Post> {
        None
    }
    fn relay_count(&self, _: Relay) -> Option<Post> {
        None
    }
}

/// Puts one answer together from its events.
pub trait Decoder: Send {
    fn event(&mut self, event: &SseEvent, watch: &mut dyn Watch) -> Result<(), Failure>;
    /// The answer is whole: nothing more needs to be read.
    fn is_done(&self) -> bool;
    /// At the end of the stream. An answer that is not whole is lost.
    fn finish(self: Box<Self>) -> Result<Answer, Failure>;
}

pub struct HttpBackend<W> {
    wire: W,
    transport: Arc<dyn Transport>,
    timeouts: Timeouts,
}

impl<W: Wire> HttpBackend<W> {
    pub fn new(wire: W, transport: Arc<dyn Transport>, timeouts: Timeouts) -> HttpBackend<W> {
        HttpBackend { wire, transport, timeouts }
    }

    async fn stream(&self, post: Post, watch: &mut dyn Watch) -> Result<Answer, Failure> {
        let first_by = Instant::now() + self.timeouts.first_byte;
        let slow = || Failure::lost(format!("no answer within {} s", self.timeouts.first_byte.as_secs_f32()));
        let reply = timeout_at(first_by, self.transport.post(post)).await.map_err(|_| slow())?;
        let mut reply = reply.map_err(broken)?;
        watch.rate_limits(&self.wire.rate_limits(&reply.headers));
        if !(200..300).contains(&reply.status) {
            let body = self.error_body(&mut reply).await;
            return Err(self.wire.failure(reply.status, &reply.headers, &body));
        }
        let mut decoder = self.wire.decoder(&reply.headers);
        let mut parser = SseParser::default();
        let mut bytes = 0_u64;
        while !decoder.is_done() {
            let next = if bytes == 0 {
                timeout_at(first_by, reply.body.next()).await.map_err(|_| slow())?
            } else {
                timeout(self.timeouts.idle, reply.body.next()).await.map_err(|_| {
                    Failure::lost(format!("the stream was silent for {} s", self.timeouts.idle.as_secs_f32()))
                })?
            };
            let Some(chunk) = next else { break };
            let chunk = chunk.map_err(broken)?;
            bytes += chunk.len() as u64;
            if bytes > MAX_STREAM_BYTES {
                return Err(too_large(format!("the answer is larger than {MAX_STREAM_BYTES} bytes")));
            }
            parser.push(&chunk).map_err(|e| too_large(e.to_string()))?;
            while let Some(event) = parser.next_event() {
                decoder.event(&event, watch)?;
            }
        }
        decoder.finish()
    }

    async fn post_count(&self, post: Post) -> Option<u64> {
        let counted = timeout(COUNT_TIMEOUT, async {
            let mut reply = self.transport.post(post).await.ok()?;
            let body = self.error_body(&mut reply).await;
            (reply.status == 200).then(|| self.wire.counted(&body)).flatten()
        });
        counted.await.ok().flatten()
    }

    async fn error_body(&self, reply: &mut Reply) -> Vec<u8> {
        let mut body = Vec::new();
        // What could be read in time has to do.
        let _ = timeout(self.timeouts.idle, async {
            while let Some(Ok(part)) = reply.body.next().await {
                let room = MAX_ERROR_BYTES - body.len();
                body.extend_from_slice(&part[..part.len().min(room)]);
                if body.len() == MAX_ERROR_BYTES {
                    break;
                }
            }
        })
        .await;
        body
    }
}

fn broken(error: TransportError) -> Failure {
    Failure {
        kind: if error.permanent { FailureKind::Rejected } else { FailureKind::Transient },
        billing: if error.unsent { Billing::Nothing } else { Billing::Unknown },
        ..Failure::lost(error.message)
    }
}

/// The same request would get the same again.
pub fn too_large(message: String) -> Failure {
    Failure { kind: FailureKind::Rejected, ..Failure::lost(message) }
}

#[async_trait]
impl<W: Wire> Backend for HttpBackend<W> {
    fn name(&self) -> &'static str {
        self.wire.name()
    }

    fn input_kind(&self) -> InputKind {
        self.wire.input_kind()
    }

    async fn count_tokens(&self, call: &Call<'_>) -> Option<u64> {
        self.post_count(self.wire.count(call)?).await
    }

    async fn once(&self, call: &Call<'_>, watch: &mut dyn Watch) -> Result<Answer, Failure> {
        let stream = self.stream(self.wire.turn(call), watch);
        timeout(self.timeouts.total, stream).await.unwrap_or_else(|_| {
            Err(Failure::lost(format!("no whole answer within {} s", self.timeouts.total.as_secs_f32())))
        })
    }

    async fn relay(&self, relay: Relay) -> Result<Passed, Failure> {
        let Some(post) = self.wire.relay(relay) else {
            return Err(Failure::rejected(format!("requests can't be passed on to {}", self.name())));
        };
        let deadline = Instant::now() + self.timeouts.total;
        let slow =
            |_| Failure::lost(format!("no answer within {} s", self.timeouts.first_byte.as_secs_f32()));
        let reply = timeout(self.timeouts.first_byte, self.transport.post(post)).await.map_err(slow)?;
        let mut reply = reply.map_err(broken)?;
        if (200..300).contains(&reply.status) {
            let body = bounded(reply.body, self.timeouts.idle, deadline);
            return Ok(Passed { reply: Reply { body, ..reply }, failure: None });
        }
        let body = self.error_body(&mut reply).await;
        let failure = self.wire.failure(reply.status, &reply.headers, &body);
        let body = stream::iter([Ok(Bytes::from(body))]).boxed();
        Ok(Passed { reply: Reply { body, ..reply }, failure: Some(failure) })
    }

    async fn count_raw(&self, relay: Relay) -> Option<u64> {
        self.post_count(self.wire.relay_count(relay)?).await
    }
}

type Body = BoxStream<'static, Result<Bytes, TransportError>>;

/// A body that ends with an error if it is silent for too long, lasts too long or grows too large.
fn bounded(body: Body, idle: Duration, deadline: Instant) -> Body {
    let end = |message: String| TransportError { message, unsent: false, permanent: false };
    stream::unfold(Some((body, 0_u64)), move |state| async move {
        let (mut body, mut bytes) = state?;
        let patience = deadline.min(Instant::now() + idle);
        let chunk = match timeout_at(patience, body.next()).await {
            Ok(None) => return None,
            Ok(Some(chunk)) => chunk,
            Err(_) => Err(end("the stream was silent for too long".into())),
        };
        bytes += chunk.as_ref().map_or(0, |c| c.len() as u64);
        if bytes > MAX_STREAM_BYTES {
            return Some((Err(end(format!("the answer is larger than {MAX_STREAM_BYTES} bytes"))), None));
        }
        let rest = chunk.is_ok().then_some((body, bytes));
        Some((chunk, rest))
    })
    .boxed()
}

/// `retry-after-ms`, else `retry-after` in seconds or as a date.
pub fn retry_after(headers: &Headers) -> Option<Duration> {
    if let Some(ms) = headers.get("retry-after-ms").and_then(|v| v.trim().parse::<f64>().ok()) {
        return Duration::try_from_secs_f64(ms / 1000.0).ok();
    }
    let value = headers.get("retry-after")?.trim();
    if let Ok(seconds) = value.parse::<f64>() {
        return Duration::try_from_secs_f64(seconds).ok();
    }
    let at = jiff::fmt::rfc2822::parse(value).ok()?.timestamp();
    Some(until(at))
}

/// Zero for what is past.
pub fn until(at: jiff::Timestamp) -> Duration {
    Duration::try_from(at.duration_since(jiff::Timestamp::now())).unwrap_or_default()
}

pub fn json_body<T: serde::Serialize>(body: &T) -> Bytes {
    Bytes::from(serde_json::to_vec(body).expect("only strings, numbers and valid JSON text are in it"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(name: &str, value: &str) -> Option<Duration> {
        retry_after(&Headers(vec![(name.into(), value.into())]))
    }

    #[test]
    fn retry_after_is_read_in_all_its_forms() {
        assert_eq!(after("retry-after-ms", "250"), Some(Duration::from_millis(250)));
        assert_eq!(after("retry-after", "2"), Some(Duration::from_secs(2)));
        assert_eq!(after("retry-after", "0.5"), Some(Duration::from_millis(500)));
        assert_eq!(after("retry-after", "Wed, 21 Oct 2015 07:28:00 GMT"), Some(Duration::ZERO));
        for bad in ["-1", "soon", "NaN", "inf", ""] {
            assert_eq!(after("retry-after", bad), None, "{bad}");
        }
    }
}
