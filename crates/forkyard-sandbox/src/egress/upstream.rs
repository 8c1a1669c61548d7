//! The outside half of a judged HTTP connection: one at a time, kept alive, made again at the same addresses when it closed.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper::client::conn::http1::{self, SendRequest};
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};
use tokio_util::task::AbortOnDropHandle;

use super::decision::{Reason, Refusal};
use super::dial::{self, Pinned, Target};
use super::host::Host;
use super::http::EgressBody;

/// Where requests go.
pub enum Peer {
    Site {
        target: Target,
        pinned: Pinned,
        /// None: plain HTTP.
        tls: Option<Arc<ClientConfig>>,
        timeout: Duration,
    },
    Socket(PathBuf),
}

pub struct Upstream {
    peer: Peer,
    /// Connected when the sandbox asked for the tunnel, so that it heard of a failure then.
    first: Option<TcpStream>,
    live: Option<Live>,
}

struct Live {
    sender: SendRequest<EgressBody>,
    _driver: AbortOnDropHandle<()>,
}

impl Upstream {
    pub fn new(peer: Peer, first: Option<TcpStream>) -> Upstream {
        Upstream { peer, first, live: None }
    }

    pub fn is_for(&self, wanted: &Target) -> bool {
        matches!(&self.peer, Peer::Site { target, tls: None, .. } if target == wanted)
    }

    /// Sends one request. A kept connection that the other side closed meanwhile is replaced once, if nothing was sent.
    pub async fn send(&mut self, request: Request<EgressBody>) -> Result<Response<Incoming>, Refusal> {
        let failed = |e: hyper::Error| Refusal::new(Reason::UpstreamHttp, format!("no answer: {e}"));
        let mut request = request;
        if let Some(mut live) = self.live.take()
            && live.sender.ready().await.is_ok()
        {
            match live.sender.try_send_request(request).await {
                Ok(response) => {
                    self.live = Some(live);
                    return Ok(response);
                }
                Err(mut e) => match e.take_message() {
                    Some(unsent) => request = unsent,
                    None => return Err(failed(e.into_error())),
                },
            }
        }
        let mut live = self.open().await?;
        let response = live.sender.send_request(request).await.map_err(failed)?;
        self.live = Some(live);
        Ok(response)
    }

    /// For a connection that serves one request: it ends with the answer's body.
    pub fn keep_with(self, response: Response<EgressBody>) -> Response<EgressBody> {
        response.map(|body| {
            body.map_frame(move |frame| {
                let _alive = &self;
                frame
            })
            .boxed()
        })
    }

    async fn open(&mut self) -> Result<Live, Refusal> {
        match &self.peer {
            Peer::Socket(path) => {
                let stream = UnixStream::connect(path).await.map_err(|e| {
                    tracing::warn!(path = %path.display(), error = %e, "internal service");
                    Refusal::new(Reason::InternalUnavailable, "Forkyard's own service does not answer now")
                })?;
                handshake(stream).await
            }
            Peer::Site { target, pinned, tls, timeout } => {
                let stream = match self.first.take() {
                    Some(stream) => stream,
                    None => dial::connect(target, pinned, *timeout).await?,
                };
                match tls {
                    None => handshake(stream).await,
                    Some(config) => {
                        let untrusted = |why: String| {
                            Refusal::new(Reason::UpstreamTls, format!("TLS with {target}: {why}"))
                        };
                        let name = match &target.host {
                            Host::Address(address) => ServerName::IpAddress((*address).into()),
                            Host::Name(name) => ServerName::try_from(name.clone())
                                .map_err(|_| untrusted("not a name that TLS knows".into()))?,
                        };
                        let connecting =
                            tokio_rustls::TlsConnector::from(config.clone()).connect(name, stream);
                        let stream = tokio::time::timeout(*timeout, connecting)
                            .await
                            .map_err(|_| untrusted("no answer in time".into()))?
                            .map_err(|e| untrusted(e.to_string()))?;
                        handshake(stream).await
                    }
                }
            }
        }
    }
}

async fn handshake<S>(stream: S) -> Result<Live, Refusal>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let (sender, connection) = http1::handshake(TokioIo::new(stream))
        .await
        .map_err(|e| Refusal::new(Reason::UpstreamHttp, e.to_string()))?;
    let driver = tokio::spawn(async move {
        // What went wrong shows in the request that it went wrong for.
        let _ = connection.await;
    });
    Ok(Live { sender, _driver: AbortOnDropHandle::new(driver) })
}
