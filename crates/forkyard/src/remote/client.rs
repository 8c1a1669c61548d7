//! Requests to a server, and its errors as users see them.

use std::fmt::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use forkyard_server::error::{Code, ErrorBody, ErrorDetail};
use reqwest::{Method, RequestBuilder, Response, StatusCode};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::error::{CliError, Result};
use crate::exit::Exit;
use crate::settings::Settings;
use crate::yard::random_text;

/// To connect, and for an answer to begin.
const CONNECT: Duration = Duration::from_secs(10);
/// How long a server that had answered is waited for.
const PATIENCE: Duration = Duration::from_secs(60);
const PAUSE: Duration = Duration::from_millis(500);

/// Clones share everything.
#[derive(Clone)]
pub struct Client {
    http: reqwest::Client,
    /// Without a slash at its end.
    pub base: String,
    pub token: String,
    met: Arc<AtomicBool>,
}

/// Why there is no answer that can be used.
pub enum Refused {
    /// The server said so.
    Said(ErrorDetail),
    /// Nobody answers, or somebody else does.
    Away(String),
}

impl Client {
    pub fn new(s: &Settings, url: &str) -> Result<Client> {
        let base = url.trim_end_matches('/').to_string();
        if !base.starts_with("http://") && !base.starts_with("https://") {
            return Err(CliError::usage(format!("--server {url:?} is not a URL"))
                .hint("write where `forkyard serve` is, such as https://yard.example.org:4610"));
        }
        let Some(token) = s.remote_token.as_ref() else {
            return Err(CliError::usage(format!("{base} wants a token")).hint(
                "set FORKYARD_TOKEN; `forkyard token create` on the server makes one, and its owner's is in `api-token`",
            ));
        };
        let http = builder().build().map_err(|e| CliError::failure(e.to_string()))?;
        let token = token.expose().trim().to_string();
        Ok(Client { http, base, token, met: Arc::default() })
    }

    pub fn request(&self, method: Method, path: &str) -> RequestBuilder {
        self.http.request(method, format!("{}/api/v1{path}", self.base)).bearer_auth(&self.token)
    }

    /// For a request that becomes a connection of another kind: HTTP/2 knows no such thing.
    pub fn upgradable(&self) -> Result<Client> {
        let http = builder().http1_only().build().map_err(|e| CliError::failure(e.to_string()))?;
        Ok(Client { http, ..self.clone() })
    }

    /// One try.
    pub async fn send(&self, request: RequestBuilder) -> Result<Response, Refused> {
        let response = request.send().await.map_err(|e| Refused::Away(reason(&e)))?;
        let status = response.status();
        if status.is_success() || status == StatusCode::SWITCHING_PROTOCOLS {
            self.met.store(true, Ordering::Relaxed);
            return Ok(response);
        }
        let text = response.text().await.unwrap_or_default();
        match serde_json::from_str::<ErrorBody>(&text) {
            Ok(body) => {
                self.met.store(true, Ordering::Relaxed);
                Err(Refused::Said(body.error))
            }
            Err(_) => Err(Refused::Away(format!("it answered with status {status}"))),
        }
    }

    /// A question: asked again while a server that had answered is away.
    async fn ask(&self, path: &str) -> Result<Response, Refused> {
        let since = Instant::now();
        loop {
            match self.send(self.request(Method::GET, path)).await {
                Err(Refused::Away(_)) if self.is_waited_for(since) => {}
                Err(Refused::Said(e)) if e.code == Code::Unavailable && self.is_waited_for(since) => {}
                answer => return answer,
            }
            tokio::time::sleep(PAUSE).await;
        }
    }

    fn is_waited_for(&self, since: Instant) -> bool {
        self.met.load(Ordering::Relaxed) && since.elapsed() < PATIENCE
    }

    pub fn error(&self, refused: Refused) -> CliError {
        match refused {
            Refused::Away(why) => CliError::failure(format!("{} does not answer: {why}", self.base))
                .hint("is `forkyard serve` running there? --server or FORKYARD_SERVER says where it is"),
            Refused::Said(e) => said(e),
        }
    }

    pub async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T> {
        let response = self.ask(path).await.map_err(|e| self.error(e))?;
        self.read(response).await
    }

    /// None for what is not there, by these codes.
    pub async fn find<T: DeserializeOwned>(&self, path: &str, missing: &[Code]) -> Result<Option<T>> {
        match self.ask(path).await {
            Ok(response) => self.read(response).await.map(Some),
            Err(Refused::Said(e)) if missing.contains(&e.code) => Ok(None),
            Err(e) => Err(self.error(e)),
        }
    }

    pub async fn bytes(&self, path: &str, missing: &[Code]) -> Result<Option<Bytes>> {
        match self.ask(path).await {
            Ok(response) => {
                let broken = |e: reqwest::Error| self.error(Refused::Away(reason(&e)));
                Ok(Some(response.bytes().await.map_err(broken)?))
            }
            Err(Refused::Said(e)) if missing.contains(&e.code) => Ok(None),
            Err(e) => Err(self.error(e)),
        }
    }

    /// Something to be done; with a key, so that a repeat would not do it twice.
    pub async fn post<T: DeserializeOwned>(&self, path: &str, body: &impl Serialize) -> Result<T> {
        let request = self.request(Method::POST, path).header("Idempotency-Key", random_text(20)).json(body);
        let response = self.send(request).await.map_err(|e| self.error(e))?;
        self.read(response).await
    }

    pub async fn read<T: DeserializeOwned>(&self, response: Response) -> Result<T> {
        if response.status() == StatusCode::NO_CONTENT {
            return serde_json::from_str("null").map_err(|e| CliError::failure(e.to_string()));
        }
        let broken = |e: reqwest::Error| self.error(Refused::Away(reason(&e)));
        let bytes = response.bytes().await.map_err(broken)?;
        serde_json::from_slice(&bytes).map_err(|e| {
            CliError::failure(format!("{} answered with something else: {e}", self.base))
                .hint("are both of the same version? see `forkyard --version`")
        })
    }
}

fn builder() -> reqwest::ClientBuilder {
    // A token goes to the server that it is for, and nowhere else.
    reqwest::Client::builder().connect_timeout(CONNECT).redirect(reqwest::redirect::Policy::none())
}

/// As the same mistake looks on this machine: what the user wrote is wrong, or it did not work.
fn said(e: ErrorDetail) -> CliError {
    let exit = match e.code {
        Code::BadRequest
        | Code::PathRefused
        | Code::NotFound
        | Code::RunNotFound
        | Code::ForkNotFound
        | Code::SandboxNotFound
        | Code::TokenNotFound
        | Code::MethodNotAllowed
        | Code::Ended
        | Code::Invalid => Exit::Usage,
        Code::Unauthenticated
        | Code::TokenExpired
        | Code::TokenRevoked
        | Code::WrongScope
        | Code::OtherSandbox
        | Code::StaleAttempt
        | Code::OriginRefused
        | Code::FileNotFound
        | Code::NoResult
        | Code::KeyReused
        | Code::Conflict
        | Code::TooLarge
        | Code::TooSlow
        | Code::UnsupportedMediaType
        | Code::HostRefused
        | Code::Unsupported
        | Code::TooMany
        | Code::RateLimited
        | Code::Internal
        | Code::Unavailable => Exit::Failure,
    };
    let hint = match e.code {
        Code::Unauthenticated | Code::TokenExpired | Code::TokenRevoked => {
            Some("FORKYARD_TOKEN is not, or no longer, a token of that server".to_string())
        }
        _ => e.hint,
    };
    CliError { exit, message: e.message, hint }
}

/// The innermost cause says most: "Connection refused".
fn reason(e: &reqwest::Error) -> String {
    let mut cause: &dyn std::error::Error = e;
    while let Some(inner) = cause.source() {
        cause = inner;
    }
    cause.to_string()
}

/// For a part of a path or a query.
pub fn coded(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for b in text.bytes() {
        match b {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' | b'/' => out.push(b as char),
            _ => {
                // Writing to a String does not fail.
                let _ = write!(out, "%{b:02X}");
            }
        }
    }
    out
}

/// For one part of a path, whatever it holds.
pub fn segment(text: &str) -> String {
    coded(text).replace('/', "%2F").replace('.', "%2E")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whatever_a_name_holds_stays_one_parameter() {
        assert_eq!(coded("src/a b&c=ü%.txt"), "src/a%20b%26c%3D%C3%BC%25.txt");
    }
}
