//! Connections: accepted, bounded, over TLS or not, and let go of in peace at the end.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto::Builder;
use hyper_util::server::graceful::{GracefulShutdown, Watcher};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;

/// Connections at once; more wait in the kernel's queue.
const MAX_CONNECTIONS: usize = 4096;
/// For a TLS handshake, and for the head of a request.
const HANDSHAKE: Duration = Duration::from_secs(10);
const HEAD: Duration = Duration::from_secs(30);
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
    let graceful = GracefulShutdown::new();
    let slots = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    loop {
        let Ok(slot) = slots.clone().acquire_owned().await else { break };
        let stream = tokio::select! {
            biased;
            () = stop.cancelled() => break,
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => stream,
                Err(e) => {
                    tracing::warn!("a connection could not be accepted: {e}");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                    continue;
                }
            },
        };
        // Events are small and should not wait for more.
        let _ = stream.set_nodelay(true);
        let (router, tls, watcher) = (router.clone(), tls.clone(), graceful.watcher());
        tokio::spawn(async move {
            match tls {
                None => one(stream, router, watcher).await,
                Some(Tls(acceptor)) => match tokio::time::timeout(HANDSHAKE, acceptor.accept(stream)).await {
                    Ok(Ok(stream)) => one(stream, router, watcher).await,
                    Ok(Err(e)) => tracing::debug!("a TLS handshake failed: {e}"),
                    Err(_) => tracing::debug!("a TLS handshake took too long"),
                },
            }
            drop(slot);
        });
    }
    drop(listener);
    let _ = tokio::time::timeout(GRACE, graceful.shutdown()).await;
}

async fn one<S: AsyncRead + AsyncWrite + Unpin + Send + 'static>(
    stream: S,
    router: Router,
    watcher: Watcher,
) {
    let mut builder = Builder::new(TokioExecutor::new());
    builder.http1().timer(TokioTimer::new()).header_read_timeout(HEAD).max_buf_size(MAX_HEAD_BYTES);
    builder.http2().timer(TokioTimer::new()).max_header_list_size(MAX_HEAD_BYTES as u32);
    let service = TowerToHyperService::new(router);
    let connection = builder.serve_connection_with_upgrades(TokioIo::new(stream), service).into_owned();
    if let Err(e) = watcher.watch(connection).await {
        tracing::debug!("a connection ended: {e}");
    }
}
