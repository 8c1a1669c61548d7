//! The model, by way of the server.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use async_trait::async_trait;
use forkyard_agent::inference::{
    Anthropic, Backend, DeltaSink, Headers, HttpBackend, InferenceError, Model, Post, Reply, Session,
    Timeouts, Transport, TransportError, TurnRequest, TurnResponse,
};
use forkyard_core::Usd;
use futures::StreamExt;
use reqwest::{Method, StatusCode};

use super::client::{Client, first_pause, wait};

/// A paused run holds a request for as long as it is paused; a server that is gone breaks it off at once.
const TIMEOUTS: Timeouts = Timeouts {
    first_byte: Duration::from_secs(12 * 3600),
    idle: Duration::from_secs(600),
    total: Duration::from_secs(12 * 3600),
};
/// Says which rule of Forkyard refused; the provider's own answers have none.
const CODE_HEADER: &str = "x-forkyard-code";
/// The proxy's word for a service that is not there.
const PROXY_HEADER: &str = "x-forkyard-egress";

pub fn backend(client: Arc<Client>) -> Arc<dyn Backend> {
    let transport = ServedTransport { client };
    // The key is the token, which the transport puts in.
    Arc::new(HttpBackend::new(Anthropic::new(""), Arc::new(transport), TIMEOUTS))
}

struct ServedTransport {
    client: Arc<Client>,
}

#[async_trait]
impl Transport for ServedTransport {
    async fn post(&self, post: Post) -> Result<Reply, TransportError> {
        let mut pause = first_pause();
        loop {
            let token = self.client.token();
            let mut request = self.client.request(Method::POST, post.path, &token).body(post.body.clone());
            for (name, value) in post.headers.iter().filter(|(name, _)| *name != "x-api-key") {
                request = request.header(*name, value);
            }
            let response = match request.send().await {
                Ok(response) => response,
                // Nothing was sent: there is no server now.
                Err(e) if e.is_connect() => {
                    wait(&mut pause).await;
                    continue;
                }
                Err(e) => {
                    return Err(TransportError { message: e.to_string(), unsent: false, permanent: false });
                }
            };
            let code = response.headers().get(CODE_HEADER).and_then(|v| v.to_str().ok());
            match (response.status(), code) {
                (StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN, Some(_)) => {
                    if self.client.renewed(&token).await {
                        continue;
                    }
                }
                (StatusCode::PAYMENT_REQUIRED, Some("budget_exceeded")) => {
                    self.client.out_of_money.store(true, Ordering::Relaxed);
                }
                (StatusCode::BAD_GATEWAY, _) if response.headers().contains_key(PROXY_HEADER) => {
                    wait(&mut pause).await;
                    continue;
                }
                (StatusCode::SERVICE_UNAVAILABLE, Some(_)) => {
                    wait(&mut pause).await;
                    continue;
                }
                (_, _) => {}
            }
            let headers = response
                .headers()
                .iter()
                .filter_map(|(name, value)| {
                    Some((name.as_str().to_string(), value.to_str().ok()?.to_string()))
                })
                .collect();
            let status = response.status().as_u16();
            let body = response.bytes_stream().map(|part| {
                part.map_err(|e| TransportError { message: e.to_string(), unsent: false, permanent: false })
            });
            return Ok(Reply { status, headers: Headers(headers), body: body.boxed() });
        }
    }
}

/// Tells a budget that is used up from an account that is refused.
pub struct ServedModel {
    session: Session,
    client: Arc<Client>,
}

impl ServedModel {
    pub fn new(session: Session, client: Arc<Client>) -> ServedModel {
        ServedModel { session, client }
    }
}

#[async_trait]
impl Model for ServedModel {
    async fn turn(
        &self,
        request: &TurnRequest,
        deltas: &mut dyn DeltaSink,
    ) -> Result<TurnResponse, InferenceError> {
        match self.session.turn(request, deltas).await {
            Err(InferenceError::Account { .. }) if self.client.out_of_money.load(Ordering::Relaxed) => {
                Err(InferenceError::BudgetExceeded { needed: Usd::ZERO, available: Usd::ZERO })
            }
            answer => answer,
        }
    }

    fn total_cost(&self) -> Usd {
        self.session.total_cost()
    }
}
