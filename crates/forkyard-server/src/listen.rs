//! Connections: accepted, bounded, over TLS or not, and let go of in peace at the end.

mod patience;
mod peers;

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use http_body_util::BodyExt;
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto::Builder;
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use patience::Patient;
use peers::Peers;

/// Connections at once; more wait in the kernel's queue.
const MAX_CONNECTIONS: usize = 4096;
/// For a TLS handshake, and for the head of a request, also of the next one on a connection that stays open.
const HANDSHAKE: Duration = Duration::from_secs(10);
const HEAD: Duration = Duration::from_secs(30);
/// A connection of HTTP/2 without a request is closed at the second look; one whose peer does not answer a ping, before.
const IDLE: Duration = Duration::from_secs(60);
const PING: Duration = Duration::from_secs(20);
/// Requests at once on one connection of HTTP/2.
const MAX_STREAMS: u32 = 200;
/// What is under way when the server stops gets this long.
const GRACE: Duration = Duration::from_secs(5);
/// After a failed accept (too many open files, say).
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Heads of requests.
const MAX_HEAD_BYTES: usize = 64 << 10;

/// Certificate and key, read once.
#[derive(Clone)]
pub struct Tls(TlsAcceptor);

impl Tls {
    pub fn new(config: rustls::ServerConfig) -> Tls {
        Tls(TlsAcceptor::from(Arc::new(config)))
    }
}

/// Serves until `stop`, and a moment longer for what is under way.
pub async fn serve(listener: TcpListener, router: Router, tls: Option<Tls>, stop: CancellationToken) {
    let (under_way, peers) = (TaskTracker::new(), Peers::default());
    let slots = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    loop {
        let accepted = async {
            let slot = slots.clone().acquire_owned().await;
            (slot, listener.accept().await)
        };
        let (slot, accepted) = tokio::select! {
            biased;
            () = stop.cancelled() => break,
            accepted = accepted => accepted,
        };
        let (stream, peer) = match accepted {
            Ok(accepted) => accepted,
            Err(e) => {
                tracing::warn!("a connection could not be accepted: {e}");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let Some(place) = peers.take(peer.ip()) else {
            tracing::debug!("{} has too many connections", peer.ip());
            continue;
        };
        // Events are small and should not wait for more.
        let _ = stream.set_nodelay(true);
        let (router, tls, stop) = (router.clone(), tls.clone(), stop.clone());
        under_way.spawn(async move {
            match tls {
                None => one(stream, router, stop).await,
                Some(Tls(acceptor)) => match tokio::time::timeout(HANDSHAKE, acceptor.accept(stream)).await {
                    Ok(Ok(stream)) => one(stream, router, stop).await,
                    Ok(Err(e)) => tracing::debug!("a TLS handshake failed: {e}"),
                    Err(_) => tracing::debug!("a TLS handshake took too long"),
                },
            }
            drop((slot, place));
        });
    }
    drop(listener);
    under_way.close();
    let _ = tokio::time::timeout(GRACE, under_way.wait()).await;
}

async fn one<S: AsyncRead + AsyncWrite + Unpin + Send + 'static>(
    stream: S,
    router: Router,
    stop: CancellationToken,
) {
    let mut builder = Builder::new(TokioExecutor::new());
    builder.http1().timer(TokioTimer::new()).header_read_timeout(HEAD).max_buf_size(MAX_HEAD_BYTES);
    builder
        .http2()
        .timer(TokioTimer::new())
        .keep_alive_interval(PING)
        .keep_alive_timeout(PING)
        .max_concurrent_streams(MAX_STREAMS)
        .max_header_list_size(MAX_HEAD_BYTES as u32);
    let work = Arc::new(Work::default());
    let router = TowerToHyperService::new(router);
    let service = service_fn(|request| {
        let (held, answer) = (Held::new(&work), router.call(request));
        async move {
            // Counted until all of it has gone out.
            let body = |body: Body| Body::new(body.map_frame(move |frame| (&held, frame).1));
            answer.await.map(|answer| answer.map(body))
        }
    });
    let stream = TokioIo::new(Patient::new(stream));
    let mut connection = pin!(builder.serve_connection_with_upgrades(stream, service));
    let mut looks = tokio::time::interval(IDLE);
    let (mut leaving, mut done_before) = (false, None);
    loop {
        tokio::select! {
            ended = connection.as_mut() => {
                if let Err(e) = ended {
                    tracing::debug!("a connection ended: {e}");
                }
                return;
            }
            () = stop.cancelled(), if !leaving => leaving = true,
            _ = looks.tick(), if !leaving => {
                let done = work.done.load(Ordering::Relaxed);
                leaving = work.open.load(Ordering::Relaxed) == 0 && done_before == Some(done);
                done_before = Some(done);
            }
        }
        if leaving {
            connection.as_mut().graceful_shutdown();
        }
    }
}

/// Of one connection: requests whose answers are not over, and those that are.
#[derive(Default)]
struct Work {
    open: AtomicUsize,
    done: AtomicUsize,
}

struct Held(Arc<Work>);

impl Held {
    fn new(work: &Arc<Work>) -> Held {
        work.open.fetch_add(1, Ordering::Relaxed);
        Held(work.clone())
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.0.done.fetch_add(1, Ordering::Relaxed);
        self.0.open.fetch_sub(1, Ordering::Relaxed);
    }
}
