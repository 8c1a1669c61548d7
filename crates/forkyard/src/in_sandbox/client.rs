//! The way to the server: patient with one that is away, and with its own token when a newer attempt has begun.

use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use forkyard_core::SandboxId;
use forkyard_sandbox::PROXY_ADDRESS;
use forkyard_sandbox::egress::INTERNAL_HOST;
use reqwest::{Method, RequestBuilder, Response, StatusCode, Url, header};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::error::{CliError, Result};

const CONNECT_WITHIN: Duration = Duration::from_secs(10);
/// For an answer that nothing is waited for with.
pub const ANSWER_WITHIN: Duration = Duration::from_secs(30);
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(3);
/// Whoever takes the fork over writes a new token at once; without one for this long, nobody wants this worker any more.
const TOKEN_PATIENCE: Duration = Duration::from_secs(120);
const TOKEN_LOOK: Duration = Duration::from_millis(100);
/// A token is far shorter.
const MAX_TOKEN_BYTES: u64 = 4096;

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TokenSource {
    /// Read anew each time: a newer attempt replaces it.
    File(PathBuf),
    Fixed(String),
}

impl TokenSource {
    fn read(&self) -> String {
        match self {
            TokenSource::File(path) => {
                let small = std::fs::metadata(path).is_ok_and(|m| m.len() <= MAX_TOKEN_BYTES);
                let text = if small { std::fs::read_to_string(path) } else { Ok(String::new()) };
                text.unwrap_or_default().trim().to_string()
            }
            TokenSource::Fixed(token) => token.clone(),
        }
    }
}

/// Why the server will not do it, now or later.
#[derive(Debug, thiserror::Error)]
pub enum Refused {
    /// The token is not good any more, and no newer one came.
    #[error("the server does not let this worker go on: {0}")]
    Gone(String),
    #[error("{0}")]
    Conflict(String),
    #[error("the server refused: {0}")]
    Invalid(String),
}

pub struct Client {
    http: reqwest::Client,
    base: String,
    sandbox: SandboxId,
    token: TokenSource,
    /// Rung when a newer token was taken up.
    pub taken_up: Notify,
    /// The budget is used up: set by the model's transport, read by the model.
    pub out_of_money: AtomicBool,
}

impl Client {
    pub fn new(base: &str, sandbox: SandboxId, token: TokenSource) -> Result<Client> {
        let bad =
            |why: String| CliError::usage(format!("CALLBACK_URL {base:?}: {why}")).hint("give an http URL");
        let url = Url::parse(base).map_err(|e| bad(e.to_string()))?;
        let mut http = reqwest::Client::builder()
            .connect_timeout(CONNECT_WITHIN)
            .user_agent(concat!("forkyard-worker/", env!("CARGO_PKG_VERSION")))
            .redirect(reqwest::redirect::Policy::none());
        if url.host_str() == Some(INTERNAL_HOST) {
            let proxy = reqwest::Proxy::all(format!("http://{PROXY_ADDRESS}"));
            http = http.proxy(proxy.map_err(|e| bad(e.to_string()))?);
        }
        let http = http.build().map_err(|e| CliError::failure(e.to_string()))?;
        let base = base.trim_end_matches('/').to_string();
        Ok(Client {
            http,
            base,
            sandbox,
            token,
            taken_up: Notify::new(),
            out_of_money: AtomicBool::new(false),
        })
    }

    pub fn token(&self) -> String {
        self.token.read()
    }

    /// A request to any path of the server, with the token that holds now.
    pub fn request(&self, method: Method, path: &str, token: &str) -> RequestBuilder {
        self.http.request(method, format!("{}{path}", self.base)).bearer_auth(token)
    }

    fn of_sandbox(&self, path: &str) -> String {
        format!("/api/v1/sandboxes/{}/{path}", self.sandbox)
    }

    /// Asks until there is an answer. Everything that is asked this way may be asked twice.
    pub async fn patiently<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: Option<&impl Serialize>,
        within: Duration,
    ) -> std::result::Result<T, Refused> {
        let mut pause = FIRST_PAUSE;
        loop {
            let token = self.token();
            let mut request = self.request(method.clone(), &self.of_sandbox(path), &token).timeout(within);
            if let Some(body) = body {
                request = request.json(body);
            }
            let response = match request.send().await {
                Ok(response) => response,
                Err(e) => {
                    tracing::debug!("{path}: {e}");
                    wait(&mut pause).await;
                    continue;
                }
            };
            match response.status() {
                status if status.is_success() => match response.json().await {
                    Ok(answer) => return Ok(answer),
                    Err(e) => tracing::debug!("{path}: an answer broke off: {e}"),
                },
                StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => {
                    let why = words(response).await;
                    if !self.renewed(&token).await {
                        return Err(Refused::Gone(why));
                    }
                    continue;
                }
                StatusCode::TOO_MANY_REQUESTS => {
                    tokio::time::sleep(retry_after(&response)).await;
                    continue;
                }
                StatusCode::CONFLICT => return Err(Refused::Conflict(words(response).await)),
                status if status.is_client_error() => return Err(Refused::Invalid(words(response).await)),
                status => tracing::debug!("{path}: {status}"),
            }
            wait(&mut pause).await;
        }
    }

    /// Once, for what the next one makes up for.
    pub async fn once(&self, path: &str, body: &impl Serialize) -> std::result::Result<(), String> {
        let token = self.token();
        let request = self.request(Method::POST, &self.of_sandbox(path), &token).timeout(ANSWER_WITHIN);
        let response = request.json(body).send().await.map_err(|e| e.to_string())?;
        match response.status() {
            status if status.is_success() => Ok(()),
            status => Err(format!("{status}: {}", words(response).await)),
        }
    }

    /// Waits until there is another token than this one; false if none comes.
    pub async fn renewed(&self, used: &str) -> bool {
        let TokenSource::File(_) = self.token else { return false };
        let until = Instant::now() + TOKEN_PATIENCE;
        while Instant::now() < until {
            let now = self.token();
            if !now.is_empty() && now != used {
                self.taken_up.notify_waiters();
                return true;
            }
            tokio::time::sleep(TOKEN_LOOK).await;
        }
        false
    }
}

/// Longer each time.
pub async fn wait(pause: &mut Duration) {
    tokio::time::sleep(*pause).await;
    *pause = (*pause * 2).min(LONGEST_PAUSE);
}

pub fn first_pause() -> Duration {
    FIRST_PAUSE
}

fn retry_after(response: &Response) -> Duration {
    let header = response.headers().get(header::RETRY_AFTER).and_then(|v| v.to_str().ok());
    Duration::from_secs(header.and_then(|s| s.trim().parse().ok()).unwrap_or(1)).min(Duration::from_secs(60))
}

async fn words(response: Response) -> String {
    let text = response.text().await.unwrap_or_default();
    text.chars().take(500).collect()
}
