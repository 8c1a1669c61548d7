//! `forkyard.internal`: in every mode, by every protocol, and nothing but what was given to it.

use std::convert::Infallible;
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use forkyard_core::SandboxId;
use forkyard_sandbox::egress::{EgressBody, InternalRoute, InternalService, Reason, egress_body};
use forkyard_sandbox::{NetworkMode, NetworkSpec};
use http_body_util::{BodyExt, Full};
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;

use crate::egress_fixture::{Net, say, status};

/// Answers with who asked for what.
struct Echo;

#[async_trait]
impl InternalService for Echo {
    async fn call(&self, sandbox: &SandboxId, request: Request<EgressBody>) -> Response<EgressBody> {
        let (head, body) = request.into_parts();
        let body = body.collect().await.unwrap().to_bytes();
        let spoofed = head.headers.contains_key("x-forkyard-sandbox");
        let text =
            format!("{sandbox} {} {} {} {spoofed}", head.method, head.uri, String::from_utf8_lossy(&body));
        Response::new(egress_body(Full::new(text.into())))
    }
}

const POST: &str = "HTTP/1.1\r\nHost: forkyard.internal\r\nX-Forkyard-Sandbox: victim\r\nContent-Length: 2\r\nConnection: close\r\n\r\nhi";

#[tokio::test]
async fn every_mode_and_protocol_reaches_it() {
    let net = Net::internal(InternalRoute::Service(Arc::new(Echo)));
    let modes = [("s1", NetworkMode::None), ("s2", NetworkMode::Isolated), ("s3", NetworkMode::Bridge)];
    for (id, mode) in modes {
        let inside = net.sandbox(NetworkSpec { mode, ..Default::default() }).await;
        let expected = format!("{id} POST /v1/x hi false");
        let expected = expected.as_str();
        let answer = inside.say(format!("POST http://forkyard.internal/v1/x {POST}")).await;
        assert!(answer.ends_with(expected), "{answer}");
        // As to a server, for tools that know no proxy.
        let answer = inside.say(format!("POST /v1/x {POST}")).await;
        assert!(answer.ends_with(expected), "{answer}");
        let (_, stream) = inside.connect("forkyard.internal:80").await;
        assert!(say(stream, format!("POST /v1/x {POST}")).await.ends_with(expected));
        let stream = inside.tls("forkyard.internal:443", "forkyard.internal").await.unwrap();
        assert!(say(stream, format!("POST /v1/x {POST}")).await.ends_with(expected));
        let (reply, stream) = inside.socks("forkyard.internal", 80).await;
        assert_eq!(reply, 0);
        assert!(say(stream, format!("POST /v1/x {POST}")).await.ends_with(expected));
    }
    assert!(net.names.asked.lock().unwrap().is_empty(), "no resolver is ever asked for it");
    assert_eq!(net.reasons("forkyard.internal")[0], Reason::Internal);
}

#[tokio::test]
async fn names_beside_it_are_not_it() {
    let net = Net::internal(InternalRoute::Service(Arc::new(Echo)));
    let inside = net.sandbox(NetworkSpec::default()).await;
    for host in ["x.forkyard.internal", "forkyard.internal.evil.test", "forkyardinternal"] {
        assert_eq!(inside.connect_status(&format!("{host}:80")).await, 403, "{host}");
    }
    let answer = inside.say("GET / HTTP/1.1\r\nHost: 127.0.0.1:3128\r\nConnection: close\r\n\r\n").await;
    assert_eq!(status(&answer), 400, "{answer}");
}

#[tokio::test]
async fn a_unix_socket_learns_who_asks_and_streams() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("internal.sock");
    let net = Net::internal(InternalRoute::UnixSocket(path.clone()));
    let inside = net.sandbox(NetworkSpec { mode: NetworkMode::None, ..Default::default() }).await;

    // Nobody listens yet.
    let answer = inside.say(format!("POST http://forkyard.internal/ {POST}")).await;
    assert_eq!(status(&answer), 502, "{answer}");
    assert!(!answer.contains("internal.sock"), "the host's paths stay outside: {answer}");
    assert_eq!(net.reasons("forkyard.internal"), [Reason::InternalUnavailable]);

    let seen = Arc::new(Mutex::new(Vec::new()));
    let log = seen.clone();
    let listener = tokio::net::UnixListener::bind(&path).unwrap();
    let server = tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let log = log.clone();
            let service = service_fn(move |request: Request<hyper::body::Incoming>| {
                let who: Vec<_> = request.headers().get_all("x-forkyard-sandbox").iter().cloned().collect();
                log.lock().unwrap().push(who);
                let big = vec![b'x'; 4 << 20];
                async move { Ok::<_, Infallible>(Response::new(Full::new(bytes::Bytes::from(big)))) }
            });
            tokio::spawn(
                hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), service),
            );
        }
    });
    let answer = inside.say(format!("POST http://forkyard.internal/ {POST}")).await;
    assert_eq!(status(&answer), 200);
    assert_eq!(answer.split_once("\r\n\r\n").unwrap().1.len(), 4 << 20, "the whole body came");
    let seen = seen.lock().unwrap();
    assert_eq!(seen[0].len(), 1);
    assert_eq!(seen[0][0], "s1");
    server.abort();
}

#[tokio::test]
async fn without_a_service_it_says_so() {
    let net = Net::new();
    let inside = net.sandbox(NetworkSpec::default()).await;
    let answer = inside.say(format!("POST http://forkyard.internal/ {POST}")).await;
    assert_eq!(status(&answer), 502);
    assert!(answer.contains("internal_unavailable"), "{answer}");
}
