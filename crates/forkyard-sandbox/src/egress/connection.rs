//! One connection from a sandbox: which protocol it speaks, what it asks for, and how that is served.
//!
//! ```text
//! first byte 5 -> SOCKS5 ------------+
//! CONNECT host:port ---------------- +-> open(target) -> stream: terminated | tunnelled | internal
//! GET http://host/path -> one request, judged
//! GET /path, Host: forkyard.internal -> internal
//! ```

use std::convert::Infallible;
use std::io;
use std::sync::{Arc, Mutex as StdMutex};

use hyper::body::Incoming;
use hyper::header;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::upgrade::OnUpgrade;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite};
use tokio::net::TcpStream;
use tokio::sync::Mutex;

use super::decision::{Reason, Refusal};
use super::dial::{self, Pinned, Target};
use super::host::Host;
use super::http::{self, EgressBody};
use super::internal::{InternalRoute, SANDBOX_HEADER, is_internal};
use super::meter::{Activity, Prefixed};
use super::policy::Grant;
use super::proxy::Site;
use super::upstream::{Peer, Upstream};
use super::{socks, stream};

/// A byte stream from inside.
pub(super) trait Stream: AsyncRead + AsyncWrite + Unpin + Send + 'static {}
impl<S: AsyncRead + AsyncWrite + Unpin + Send + 'static> Stream for S {}

/// What a sandbox may now talk to.
pub(super) enum Opened {
    Internal,
    Site { grant: Grant, pinned: Pinned, first: TcpStream },
}

#[derive(Clone)]
pub(super) struct Connection {
    pub site: Arc<Site>,
    pub activity: Arc<Activity>,
}

impl Connection {
    /// Serves one accepted connection to its end.
    pub async fn serve<S: Stream>(self, mut io: S) -> io::Result<()> {
        let first = io.read_u8().await?;
        if first == socks::VERSION {
            return self.serve_socks(io).await;
        }
        self.serve_proxy(Prefixed::new(vec![first], io)).await
    }

    async fn serve_socks<S: Stream>(self, mut io: S) -> io::Result<()> {
        let asked = tokio::time::timeout(self.site.limits().head_timeout, socks::accept(&mut io))
            .await
            .map_err(|_| io::Error::from(io::ErrorKind::TimedOut))??;
        let target = match asked {
            Ok(target) => target,
            Err((host, refusal)) => {
                self.refuse(&host, 0, &refusal);
                return Ok(());
            }
        };
        match self.open(&target).await {
            Err(refusal) => {
                self.refuse_target(&target, &refusal);
                socks::refused(&mut io, &refusal).await
            }
            Ok(opened) => {
                socks::granted(&mut io).await?;
                stream::serve(self, target, opened, io).await
            }
        }
    }

    async fn serve_proxy<S: Stream>(self, io: S) -> io::Result<()> {
        let front = Arc::new(Front {
            connection: self.clone(),
            upstream: Mutex::new(None),
            tunnel: StdMutex::new(None),
        });
        let service = service_fn({
            let front = front.clone();
            move |request| {
                let front = front.clone();
                async move { Ok::<_, Infallible>(front.handle(request).await) }
            }
        });
        self.http_server()
            .serve_connection(TokioIo::new(io), service)
            .with_upgrades()
            .await
            .map_err(io::Error::other)?;
        let tunnel = front.tunnel.lock().unwrap_or_else(|e| e.into_inner()).take();
        if let Some((target, opened, upgrade)) = tunnel {
            let upgraded = upgrade.await.map_err(io::Error::other)?;
            stream::serve(self, target, opened, TokioIo::new(upgraded)).await?;
        }
        Ok(())
    }

    /// The same bounds wherever a sandbox speaks HTTP.
    pub fn http_server(&self) -> http1::Builder {
        let limits = self.site.limits();
        let mut builder = http1::Builder::new();
        builder
            .timer(TokioTimer::new())
            .header_read_timeout(limits.head_timeout)
            .max_buf_size(limits.max_head_bytes)
            .half_close(true);
        builder
    }

    /// Judges, resolves and connects. What is refused here was not even looked up.
    pub async fn open(&self, target: &Target) -> Result<Opened, Refusal> {
        if is_internal(&target.host) {
            return Ok(Opened::Internal);
        }
        let (grant, pinned) = self.admit(target).await?;
        let first = dial::connect(target, &pinned, self.site.limits().connect_timeout).await?;
        Ok(Opened::Site { grant, pinned, first })
    }

    async fn admit(&self, target: &Target) -> Result<(Grant, Pinned), Refusal> {
        let grant = self.site.policy.judge(&target.host, target.port)?;
        let pinned = self.site.pin(target).await?;
        Ok((grant, pinned))
    }

    pub fn record(&self, target: &Target, reason: Reason) {
        self.site.recorder.record(&target.host.to_string(), target.port, reason, "");
    }

    pub fn refuse_target(&self, target: &Target, refusal: &Refusal) {
        self.refuse(&target.host.to_string(), target.port, refusal);
    }

    pub fn refuse(&self, host: &str, port: u16, refusal: &Refusal) {
        self.site.recorder.record(host, port, refusal.reason, &refusal.detail);
    }

    /// A request to Forkyard itself.
    pub async fn call_internal(
        &self,
        target: &Target,
        mut request: Request<Incoming>,
    ) -> Response<EgressBody> {
        // An inference answer may think for minutes before its first byte.
        self.activity.allow_idle(self.site.limits().internal_idle_timeout);
        let answer = async {
            http::strip(&mut request)?;
            match self.site.internal() {
                None => Err(Refusal::new(
                    Reason::InternalUnavailable,
                    "Forkyard's own service is not offered to this sandbox",
                )),
                Some(InternalRoute::Service(service)) => {
                    Ok(service.call(&self.site.id, request.map(http::egress_body)).await)
                }
                Some(InternalRoute::UnixSocket(path)) => {
                    let id = header::HeaderValue::from_str(self.site.id.as_str())
                        .map_err(|e| Refusal::new(Reason::Malformed, e.to_string()))?;
                    request.headers_mut().insert(SANDBOX_HEADER, id);
                    let mut upstream = Upstream::new(Peer::Socket(path.clone()), None);
                    http::exchange(&mut upstream, request).await.map(|response| upstream.keep_with(response))
                }
            }
        };
        match answer.await {
            Ok(response) => {
                self.record(target, Reason::Internal);
                response
            }
            Err(refusal) => {
                self.refuse_target(target, &refusal);
                http::refused(&refusal)
            }
        }
    }
}

/// The HTTP proxy proper.
struct Front {
    connection: Connection,
    /// Kept for the next request to the same host.
    upstream: Mutex<Option<Upstream>>,
    tunnel: StdMutex<Option<(Target, Opened, OnUpgrade)>>,
}

impl Front {
    async fn handle(&self, request: Request<Incoming>) -> Response<EgressBody> {
        if request.method() == Method::CONNECT {
            return self.connect(request).await;
        }
        let Some(authority) = request.uri().authority().map(ToString::to_string) else {
            return self.origin_form(request).await;
        };
        if request.uri().scheme_str() != Some("http") {
            let refusal = Refusal::new(Reason::Malformed, "https goes through CONNECT");
            self.connection.refuse(&authority, 0, &refusal);
            return http::refused(&refusal);
        }
        let target = match Host::parse_with_port(&authority) {
            Ok((host, port)) => Target { host, port: port.unwrap_or(80) },
            Err(bad) => {
                let refusal = socks::bad_host(bad);
                self.connection.refuse(&authority, 0, &refusal);
                return http::refused(&refusal);
            }
        };
        if is_internal(&target.host) {
            return self.connection.call_internal(&target, request).await;
        }
        match self.forward(&target, request).await {
            Ok(response) => response,
            Err(refusal) => {
                self.connection.refuse_target(&target, &refusal);
                http::refused(&refusal)
            }
        }
    }

    async fn connect(&self, mut request: Request<Incoming>) -> Response<EgressBody> {
        let authority = request.uri().authority().map(ToString::to_string).unwrap_or_default();
        let target = match Host::parse_with_port(&authority) {
            Ok((host, Some(port))) => Ok(Target { host, port }),
            Ok((_, None)) => Err(Refusal::new(Reason::Malformed, "CONNECT needs host:port")),
            Err(bad) => Err(socks::bad_host(bad)),
        };
        let target = match target {
            Ok(target) => target,
            Err(refusal) => {
                self.connection.refuse(&authority, 0, &refusal);
                return http::refused(&refusal);
            }
        };
        match self.connection.open(&target).await {
            Err(refusal) => {
                self.connection.refuse_target(&target, &refusal);
                http::refused(&refusal)
            }
            Ok(opened) => {
                let upgrade = hyper::upgrade::on(&mut request);
                *self.tunnel.lock().unwrap_or_else(|e| e.into_inner()) = Some((target, opened, upgrade));
                Response::new(http::egress_body(http_body_util::Empty::new()))
            }
        }
    }

    /// A request as to a server: only for tools that know no proxy and ask `http://forkyard.internal:3128`.
    async fn origin_form(&self, request: Request<Incoming>) -> Response<EgressBody> {
        match http::host_header(request.headers()) {
            Ok((host, port)) if is_internal(&host) => {
                let target = Target { host, port: port.unwrap_or(80) };
                self.connection.call_internal(&target, request).await
            }
            Ok(_) | Err(_) => {
                let detail = "this is a proxy: set HTTP_PROXY and HTTPS_PROXY, or use SOCKS5";
                let refusal = Refusal::new(Reason::Malformed, detail);
                self.connection.refuse("", 0, &refusal);
                http::refused(&refusal)
            }
        }
    }

    async fn forward(
        &self,
        target: &Target,
        mut request: Request<Incoming>,
    ) -> Result<Response<EgressBody>, Refusal> {
        if request.headers().contains_key(header::HOST) {
            http::check_host(request.headers(), target, 80)?;
        }
        // Judged for every request; a kept connection saves only the connecting.
        let grant = self.connection.site.policy.judge(&target.host, target.port)?;
        http::prepare(&mut request, target, &grant, false)?;
        let mut slot = self.upstream.lock().await;
        let mut upstream = match slot.take().filter(|u| u.is_for(target)) {
            Some(upstream) => upstream,
            None => {
                let pinned = self.connection.site.pin(target).await?;
                let timeout = self.connection.site.limits().connect_timeout;
                Upstream::new(Peer::Site { target: target.clone(), pinned, tls: None, timeout }, None)
            }
        };
        let response = http::exchange(&mut upstream, request).await?;
        *slot = Some(upstream);
        self.connection.record(target, grant.reason);
        Ok(response)
    }
}

/// Serves the requests of a stream whose host is settled, over TLS or not.
pub(super) async fn serve_requests<S: Stream>(
    connection: Connection,
    target: Target,
    opened: Opened,
    tls: bool,
    io: S,
) -> io::Result<()> {
    let (grant, upstream) = match opened {
        Opened::Internal => (None, None),
        Opened::Site { grant, pinned, first } => {
            let limits = connection.site.limits();
            let peer = Peer::Site {
                target: target.clone(),
                pinned,
                tls: tls.then(|| connection.site.upstream_tls()),
                timeout: limits.connect_timeout,
            };
            (Some(grant), Some(Upstream::new(peer, Some(first))))
        }
    };
    let server = connection.http_server();
    let scope = Arc::new(Scope { connection, target, grant, tls, upstream: Mutex::new(upstream) });
    let service = service_fn(move |request| {
        let scope = scope.clone();
        async move { Ok::<_, Infallible>(scope.handle(request).await) }
    });
    server.serve_connection(TokioIo::new(io), service).await.map_err(io::Error::other)
}

/// A stream to one host.
struct Scope {
    connection: Connection,
    target: Target,
    /// None: Forkyard's own name.
    grant: Option<Grant>,
    tls: bool,
    upstream: Mutex<Option<Upstream>>,
}

impl Scope {
    async fn handle(&self, mut request: Request<Incoming>) -> Response<EgressBody> {
        let default_port = if self.tls { 443 } else { 80 };
        let (Some(grant), Some(upstream)) = (&self.grant, &mut *self.upstream.lock().await) else {
            return self.connection.call_internal(&self.target, request).await;
        };
        let answer = async {
            if request.uri().authority().is_some() {
                return Err(Refusal::new(Reason::Malformed, "a path is asked for here, not a URL"));
            }
            http::check_host(request.headers(), &self.target, default_port)?;
            http::prepare(&mut request, &self.target, grant, self.tls)?;
            http::exchange(upstream, request).await
        };
        match answer.await {
            Ok(response) => {
                self.connection.record(&self.target, grant.reason);
                response
            }
            Err(refusal) => {
                self.connection.refuse_target(&self.target, &refusal);
                let mut response = http::refused(&refusal);
                if refusal.reason == Reason::HostMismatch {
                    *response.status_mut() = StatusCode::MISDIRECTED_REQUEST;
                }
                response
            }
        }
    }
}
