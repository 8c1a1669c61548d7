//! HTTP as the providers need it: one POST, an answer whose body streams. Live, recorded or replayed.

use std::fmt;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use futures::StreamExt;
use futures::stream::BoxStream;

/// A connection that is not there after this long is not there.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(15);
/// Finds a peer that vanished without a word.
const TCP_KEEPALIVE: Duration = Duration::from_secs(30);

#[async_trait]
pub trait Transport: Send + Sync {
    async fn post(&self, post: Post) -> Result<Reply, TransportError>;
}

pub struct Post {
    /// Relative to the base URL, with a leading slash.
    pub path: &'static str,
    pub headers: Vec<(&'static str, String)>,
    pub body: Bytes,
}

pub struct Reply {
    pub status: u16,
    pub headers: Headers,
    pub body: BoxStream<'static, Result<Bytes, TransportError>>,
}

/// Names in lower case.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Headers(pub Vec<(String, String)>);

impl Headers {
    pub fn get(&self, name: &str) -> Option<&str> {
        self.0.iter().find(|(n, _)| n == name).map(|(_, v)| v.as_str())
    }
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct TransportError {
    pub message: String,
    /// Known for sure: no byte of the request left.
    pub unsent: bool,
    /// Another try can't help.
    pub permanent: bool,
}

impl TransportError {
    pub fn permanent(message: impl Into<String>) -> TransportError {
        TransportError { message: message.into(), unsent: true, permanent: true }
    }
}

/// The real thing.
pub struct Live {
    client: reqwest::Client,
    base_url: String,
}

impl fmt::Debug for Live {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Live").field("base_url", &self.base_url).finish_non_exhaustive()
    }
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BadEndpoint {
    #[error("{url:?} is not an http or https URL: {reason}")]
    Url { url: String, reason: String },
    #[error("no TLS client: {0}")]
    Tls(String),
}

impl Live {
    pub fn new(base_url: &str) -> Result<Live, BadEndpoint> {
        // Another part of the process may have installed it already: that is as good.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let bad = |reason: &str| BadEndpoint::Url { url: base_url.to_string(), reason: reason.to_string() };
        let url = reqwest::Url::parse(base_url).map_err(|e| bad(&e.to_string()))?;
        if !matches!(url.scheme(), "http" | "https") {
            return Err(bad("its scheme is another"));
        }
        if !url.username().is_empty() || url.password().is_some() {
            return Err(BadEndpoint::Url {
                url: "…".into(),
                reason: "it holds a password; give keys by their own setting".into(),
            });
        }
        let mut builder = reqwest::Client::builder()
            .connect_timeout(CONNECT_TIMEOUT)
            .tcp_keepalive(TCP_KEEPALIVE)
            .user_agent(concat!("forkyard/", env!("CARGO_PKG_VERSION")))
            // A redirect would carry the key to somebody else.
            .redirect(reqwest::redirect::Policy::none());
        if url.host_str().is_some_and(is_loopback) {
            builder = builder.no_proxy();
        }
        let client = builder.build().map_err(|e| BadEndpoint::Tls(chain(&e)))?;
        Ok(Live { client, base_url: base_url.trim_end_matches('/').to_string() })
    }
}

fn is_loopback(host: &str) -> bool {
    let host = host.trim_start_matches('[').trim_end_matches(']');
    host == "localhost" || host.parse::<std::net::IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

/// An error with its causes: the outermost of reqwest says little.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        source = cause.source();
    }
    text
}

#[async_trait]
impl Transport for Live {
    async fn post(&self, post: Post) -> Result<Reply, TransportError> {
        let mut request = self.client.post(format!("{}{}", self.base_url, post.path)).body(post.body);
        for (name, value) in post.headers {
            let mut value = reqwest::header::HeaderValue::from_str(&value).map_err(|_| {
                TransportError::permanent(format!(
                    "the value of {name} has characters that a header can't hold"
                ))
            })?;
            value.set_sensitive(true);
            request = request.header(name, value);
        }
        let response = request.send().await.map_err(|e| TransportError {
            unsent: e.is_connect() || e.is_builder(),
            permanent: e.is_builder(),
            message: chain(&e),
        })?;
        let headers = response
            .headers()
            .iter()
            .filter_map(|(name, value)| Some((name.as_str().to_string(), value.to_str().ok()?.to_string())))
            .collect();
        let status = response.status().as_u16();
        let body = response.bytes_stream().map(|part| {
            part.map_err(|e| TransportError { message: chain(&e), unsent: false, permanent: false })
        });
        Ok(Reply { status, headers: Headers(headers), body: body.boxed() })
    }
}
