//! Anthropic's Messages API over server-sent events.

mod decode;
mod encode;
mod meter;
mod raw;

use std::time::Duration;

use forkyard_core::pricing::{CacheTtl, InputKind};
use serde::Deserialize;

pub use meter::Meter;
pub use raw::RawRequest;

use super::backend::{Billing, Call, Failure, FailureKind, RateLimits, Relay};
use super::http::{Decoder, Wire, json_body, retry_after, until};
use super::transport::{Headers, Post};

/// Chosen explicitly: served since the API began, and sampling parameters are never sent, which newer versions refuse.
const VERSION: &str = "2023-06-01";
pub const DEFAULT_BASE_URL: &str = "https://api.anthropic.com";

pub struct Anthropic {
    key: String,
    /// For the part that all forks share; what only one conversation reads again lives 5 minutes.
    shared_ttl: CacheTtl,
}

impl Anthropic {
    pub fn new(key: impl Into<String>) -> Anthropic {
        Anthropic { key: key.into(), shared_ttl: CacheTtl::FiveMinutes }
    }
    pub fn shared_ttl(self, shared_ttl: CacheTtl) -> Anthropic {
        Anthropic { shared_ttl, ..self }
    }

    fn headers(&self) -> Vec<(&'static str, String)> {
        vec![
            ("x-api-key", self.key.clone()),
            ("anthropic-version", VERSION.to_string()),
            ("content-type", "application/json".to_string()),
        ]
    }
}

impl Anthropic {
    /// Under our key, with what the asker says of the protocol.
    fn relayed(&self, path: &'static str, relay: Relay) -> Post {
        let mut headers = vec![
            ("x-api-key", self.key.clone()),
            ("anthropic-version", relay.version.unwrap_or_else(|| VERSION.to_string())),
            ("content-type", "application/json".to_string()),
        ];
        headers.extend(relay.beta.map(|beta| ("anthropic-beta", beta)));
        Post { path, headers, body: relay.body }
    }
}

impl Wire for Anthropic {
    fn relay(&self, relay: Relay) -> Option<Post> {
        Some(self.relayed("/v1/messages", relay))
    }

    fn relay_count(&self, relay: Relay) -> Option<Post> {
        Some(self.relayed("/v1/messages/count_tokens", relay))
    }

    fn name(&self) -> &'static str {
        "anthropic"
    }

    fn input_kind(&self) -> InputKind {
        InputKind::Cached(self.shared_ttl)
    }

    fn turn(&self, call: &Call<'_>) -> Post {
        let body = json_body(&encode::turn(call, self.shared_ttl));
        Post { path: "/v1/messages", headers: self.headers(), body }
    }

    fn count(&self, call: &Call<'_>) -> Option<Post> {
        let body = json_body(&encode::count(call, self.shared_ttl));
        Some(Post { path: "/v1/messages/count_tokens", headers: self.headers(), body })
    }

    fn counted(&self, body: &[u8]) -> Option<u64> {
        #[derive(Deserialize)]
        struct Counted {
            input_tokens: u64,
        }
        serde_json::from_slice::<Counted>(body).ok().map(|c| c.input_tokens)
    }

    fn decoder(&self, headers: &Headers) -> Box<dyn Decoder> {
        Box::new(decode::MessageDecoder::new(headers.get("request-id").map(str::to_string)))
    }

    fn failure(&self, status: u16, headers: &Headers, body: &[u8]) -> Failure {
        let error = ErrorBody::parse(body);
        let message = match &error {
            Some(e) => format!("{}: {}", e.kind, e.message),
            None => {
                format!("HTTP {status}: {}", String::from_utf8_lossy(&body[..body.len().min(500)]).trim())
            }
        };
        let kind = match (status, &error) {
            (_, Some(e)) if e.is_spend_limit() => FailureKind::Account,
            (400 | 413, Some(e)) if e.is_too_long() => FailureKind::ContextTooLong,
            (401..=403, _) => FailureKind::Account,
            (429 | 529, _) => FailureKind::Pushback,
            (408 | 409 | 500.., _) => FailureKind::Transient,
            _ => FailureKind::Rejected,
        };
        // The API's own errors are not billed. A gateway's 5xx says nothing of what happened behind it.
        let billing = if status < 500 || error.is_some() { Billing::Nothing } else { Billing::Unknown };
        Failure { kind, billing, retry_after: retry_after(headers), status: Some(status), message }
    }

    fn rate_limits(&self, headers: &Headers) -> RateLimits {
        let exhausted_for = ["requests", "tokens", "input-tokens", "output-tokens"]
            .into_iter()
            .filter_map(|what| {
                let header = |part| headers.get(&format!("anthropic-ratelimit-{what}-{part}"));
                let used_up = header("remaining")?.trim().parse::<u64>().ok()? == 0;
                let reset: jiff::Timestamp = header("reset")?.trim().parse().ok()?;
                used_up.then(|| until(reset))
            })
            .max()
            .filter(|d| *d > Duration::ZERO);
        RateLimits { exhausted_for }
    }
}

/// The API's error, in a body or in an `error` event.
struct ErrorBody {
    kind: String,
    message: String,
    code: Option<String>,
}

impl ErrorBody {
    fn parse(body: &[u8]) -> Option<ErrorBody> {
        #[derive(Deserialize)]
        struct Outer {
            error: Inner,
        }
        #[derive(Deserialize)]
        struct Inner {
            #[serde(rename = "type")]
            kind: String,
            #[serde(default)]
            message: String,
            error_code: Option<String>,
            details: Option<serde_json::Value>,
        }
        let Outer { error } = serde_json::from_slice(body).ok()?;
        let detail = error.details.as_ref().and_then(|d| d.get("error_code")?.as_str()).map(str::to_string);
        Some(ErrorBody { kind: error.kind, message: error.message, code: error.error_code.or(detail) })
    }

    /// The account's own limit: no retry-after, and no retry until its owner acts.
    fn is_spend_limit(&self) -> bool {
        self.code.as_deref() == Some("enforced_spend_limit_reached")
    }

    fn is_too_long(&self) -> bool {
        self.kind == "request_too_large"
            || ["prompt is too long", "exceed context limit", "context window"]
                .iter()
                .any(|part| self.message.contains(part))
    }

    /// What an `error` event within a stream means.
    fn kind(&self) -> FailureKind {
        match self.kind.as_str() {
            _ if self.is_spend_limit() => FailureKind::Account,
            "overloaded_error" | "rate_limit_error" => FailureKind::Pushback,
            "authentication_error" | "permission_error" | "billing_error" => FailureKind::Account,
            "invalid_request_error" if self.is_too_long() => FailureKind::ContextTooLong,
            "invalid_request_error" | "not_found_error" => FailureKind::Rejected,
            _ => FailureKind::Transient,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failure(status: u16, body: &str) -> Failure {
        Anthropic::new("k").failure(status, &Headers::default(), body.as_bytes())
    }
    fn api(status: u16, kind: &str, message: &str) -> Failure {
        failure(status, &format!(r#"{{"type":"error","error":{{"type":"{kind}","message":"{message}"}}}}"#))
    }

    #[test]
    fn statuses_say_what_to_do() {
        use FailureKind::*;
        let table = [
            (400, "invalid_request_error", "bad", Rejected),
            (400, "invalid_request_error", "prompt is too long: 9 > 8", ContextTooLong),
            (401, "authentication_error", "", Account),
            (402, "billing_error", "", Account),
            (403, "permission_error", "", Account),
            (404, "not_found_error", "", Rejected),
            (408, "timeout_error", "", Transient),
            (409, "conflict_error", "", Transient),
            (413, "request_too_large", "", ContextTooLong),
            (429, "rate_limit_error", "", Pushback),
            (500, "api_error", "", Transient),
            (504, "timeout_error", "", Transient),
            (529, "overloaded_error", "", Pushback),
        ];
        for (status, kind, message, expected) in table {
            let failure = api(status, kind, message);
            assert_eq!((failure.kind, failure.billing), (expected, Billing::Nothing), "{status} {kind}");
        }
    }

    #[test]
    fn a_spend_limit_is_never_retried() {
        for body in [
            r#"{"error":{"type":"rate_limit_error","message":"m","details":{"error_code":"enforced_spend_limit_reached"}}}"#,
            r#"{"error":{"type":"rate_limit_error","message":"m","error_code":"enforced_spend_limit_reached"}}"#,
        ] {
            assert_eq!(failure(429, body).kind, FailureKind::Account);
        }
    }

    #[test]
    fn a_gateways_error_may_have_been_billed() {
        let failure = failure(502, "<html>Bad gateway</html>");
        assert_eq!((failure.kind, failure.billing), (FailureKind::Transient, Billing::Unknown));
    }

    #[test]
    fn a_used_up_limit_closes_until_its_reset() {
        let wire = Anthropic::new("k");
        let limits = |remaining: &str, reset: &str| {
            wire.rate_limits(&Headers(vec![
                ("anthropic-ratelimit-input-tokens-remaining".into(), remaining.into()),
                ("anthropic-ratelimit-input-tokens-reset".into(), reset.into()),
            ]))
            .exhausted_for
        };
        assert!(limits("0", "2999-01-01T00:00:00Z").is_some());
        assert_eq!(limits("1", "2999-01-01T00:00:00Z"), None);
        assert_eq!(limits("0", "2001-01-01T00:00:00Z"), None);
        assert_eq!(limits("0", "later"), None);
    }
}
