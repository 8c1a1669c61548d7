//! Chat completions with tools, as OpenAI, Ollama, vLLM, llama.cpp and OpenRouter serve them.

mod decode;
mod encode;

use std::time::Duration;

use forkyard_core::pricing::InputKind;
use serde::Deserialize;

use super::backend::{Billing, Call, Failure, FailureKind, RateLimits};
use super::http::{Decoder, Wire, json_body, retry_after};
use super::transport::{Headers, Post};

/// Base URLs of this kind end in `/v1`, by everybody's custom.
pub const DEFAULT_BASE_URL: &str = "https://api.openai.com/v1";

/// How the bound on the output is called: OpenAI's newer models refuse the old name, other servers do not know the new one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MaxTokensField {
    MaxTokens,
    MaxCompletionTokens,
}

pub struct OpenAi {
    /// None for a server of one's own that asks for none.
    key: Option<String>,
    max_tokens: MaxTokensField,
}

impl OpenAi {
    /// `base_url` decides which dialect is spoken.
    pub fn new(key: Option<String>, base_url: &str) -> OpenAi {
        let official = base_url.starts_with("https://api.openai.com");
        let max_tokens =
            if official { MaxTokensField::MaxCompletionTokens } else { MaxTokensField::MaxTokens };
        OpenAi { key, max_tokens }
    }
}

impl Wire for OpenAi {
    fn name(&self) -> &'static str {
        "openai"
    }

    /// Its caches are written for free.
    fn input_kind(&self) -> InputKind {
        InputKind::Plain
    }

    fn turn(&self, call: &Call<'_>) -> Post {
        let mut headers = vec![("content-type", "application/json".to_string())];
        headers.extend(self.key.as_ref().map(|key| ("authorization", format!("Bearer {key}"))));
        let body = json_body(&encode::turn(call, self.max_tokens));
        Post { path: "/chat/completions", headers, body }
    }

    fn count(&self, _: &Call<'_>) -> Option<Post> {
        None
    }

    fn counted(&self, _: &[u8]) -> Option<u64> {
        None
    }

    fn decoder(&self, headers: &Headers) -> Box<dyn Decoder> {
        Box::new(decode::ChunkDecoder::new(headers.get("x-request-id").map(str::to_string)))
    }

    fn failure(&self, status: u16, headers: &Headers, body: &[u8]) -> Failure {
        let error = ErrorBody::parse(body);
        let message = match &error {
            Some(e) => e.message.clone(),
            None => {
                format!("HTTP {status}: {}", String::from_utf8_lossy(&body[..body.len().min(500)]).trim())
            }
        };
        let kind = match (status, &error) {
            (400 | 413, Some(e)) if e.is_too_long() => FailureKind::ContextTooLong,
            // Out of credit is a 429 here, but no matter of time.
            (429, Some(e)) if e.code.as_deref() == Some("insufficient_quota") => FailureKind::Account,
            (401..=403, _) => FailureKind::Account,
            (429 | 503 | 529, _) => FailureKind::Pushback,
            (408 | 409 | 500.., _) => FailureKind::Transient,
            _ => FailureKind::Rejected,
        };
        let billing = if status < 500 || error.is_some() { Billing::Nothing } else { Billing::Unknown };
        Failure { kind, billing, retry_after: retry_after(headers), status: Some(status), message }
    }

    /// As OpenAI and most of those who follow it say it; a server without these headers says enough by its pushbacks.
    fn rate_limits(&self, headers: &Headers) -> RateLimits {
        let exhausted_for = ["requests", "tokens"]
            .into_iter()
            .filter_map(|what| {
                let header = |part| headers.get(&format!("x-ratelimit-{part}-{what}"));
                let exhausted = header("remaining")?.trim().parse::<i64>().ok()? <= 0;
                exhausted.then(|| span(header("reset")?)).flatten()
            })
            .max();
        RateLimits { exhausted_for }
    }
}

/// `6m0s`, `1.5s`, `20ms`: what stands before each unit is a number. A number without a unit is a time or a date, by each
/// server's own taste, and is not guessed at.
fn span(text: &str) -> Option<Duration> {
    let mut rest = text.trim();
    let mut seconds = 0.0;
    if rest.is_empty() {
        return None;
    }
    while !rest.is_empty() {
        let (number, after) =
            rest.split_at(rest.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(rest.len()));
        let (unit, after) = after.split_at(after.find(|c: char| c.is_ascii_digit()).unwrap_or(after.len()));
        let scale = match unit {
            "ms" => 0.001,
            "s" => 1.0,
            "m" => 60.0,
            "h" => 3600.0,
            _ => return None,
        };
        seconds += number.parse::<f64>().ok()? * scale;
        rest = after;
    }
    Duration::try_from_secs_f64(seconds).ok()
}

struct ErrorBody {
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
        #[serde(untagged)]
        enum Inner {
            Full { message: String, code: Option<serde_json::Value> },
            // Ollama's.
            Text(String),
        }
        let Outer { error } = serde_json::from_slice(body).ok()?;
        Some(match error {
            Inner::Full { message, code } => {
                let code = code.and_then(|c| c.as_str().map(str::to_string));
                ErrorBody { message, code }
            }
            Inner::Text(message) => ErrorBody { message, code: None },
        })
    }

    fn is_too_long(&self) -> bool {
        self.code.as_deref() == Some("context_length_exceeded")
            || ["context length", "context window", "maximum context"]
                .iter()
                .any(|part| self.message.to_lowercase().contains(part))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kind(status: u16, body: &str) -> FailureKind {
        OpenAi::new(None, "http://localhost").failure(status, &Headers::default(), body.as_bytes()).kind
    }

    #[test]
    fn a_limit_that_is_used_up_closes_for_as_long_as_it_says() {
        let limits = |pairs: &[(&str, &str)]| {
            let headers = pairs.iter().map(|(n, v)| (format!("x-ratelimit-{n}"), v.to_string())).collect();
            OpenAi::new(None, "http://localhost").rate_limits(&Headers(headers)).exhausted_for
        };
        let ms = Duration::from_millis;
        for (reset, expected) in [
            ("6m0s", Some(ms(360_000))),
            ("1.5s", Some(ms(1500))),
            ("20ms", Some(ms(20))),
            ("1h2m3s", Some(ms(3_723_000))),
            ("12", None),
            ("soon", None),
            ("", None),
            ("s", None),
            ("1s2", None),
            ("99999999999999999999999h", None),
        ] {
            let found = limits(&[("remaining-requests", "0"), ("reset-requests", reset)]);
            assert_eq!(found, expected, "{reset}");
        }
        assert_eq!(limits(&[("remaining-requests", "1"), ("reset-requests", "9s")]), None);
        let both = [
            ("remaining-requests", "0"),
            ("reset-requests", "1s"),
            ("remaining-tokens", "0"),
            ("reset-tokens", "3s"),
        ];
        assert_eq!(limits(&both), Some(ms(3000)), "the later one");
    }

    #[test]
    fn errors_of_several_servers_say_what_to_do() {
        use FailureKind::*;
        let table = [
            (400, r#"{"error":{"message":"bad","code":null}}"#, Rejected),
            (400, r#"{"error":{"message":"x","code":"context_length_exceeded"}}"#, ContextTooLong),
            (
                400,
                r#"{"error":{"message":"This model's maximum context length is 8192","code":400}}"#,
                ContextTooLong,
            ),
            (401, r#"{"error":{"message":"key"}}"#, Account),
            (404, r#"{"error":"model 'x' not found"}"#, Rejected),
            (429, r#"{"error":{"message":"m","code":"insufficient_quota"}}"#, Account),
            (429, r#"{"error":{"message":"m","code":"rate_limit_exceeded"}}"#, Pushback),
            (503, "", Pushback),
            (500, "", Transient),
        ];
        for (status, body, expected) in table {
            assert_eq!(kind(status, body), expected, "{status} {body}");
        }
    }
}
