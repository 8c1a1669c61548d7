//! A sandbox that misbehaves hurts itself: slow, huge, many, silent.

use std::time::Duration;

use forkyard_core::Timestamp;
use forkyard_sandbox::egress::{EgressLimits, TrafficLog};
use forkyard_sandbox::{EgressCounters, EgressFactory, EgressHandle, NetworkSpec};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::egress_fixture::{Net, hello, say, status};

/// For tests that wait for a bound to strike; never asserted on.
const SHORT: Duration = Duration::from_millis(200);

fn net(change: impl FnOnce(&mut EgressLimits)) -> Net {
    Net::with(|config| change(&mut config.limits))
}

#[tokio::test]
async fn slow_heads_are_cut_off() {
    let net = net(|l| l.head_timeout = SHORT);
    let inside = net.sandbox(NetworkSpec::default()).await;
    // A head that never ends; a SOCKS5 greeting that never ends; a TLS handshake that never ends.
    for start in [&b"GET http://x.test/ HTTP/1.1\r\nX-A: "[..], &[5, 200, 0]] {
        let mut stream = inside.raw().await;
        stream.write_all(start).await.unwrap();
        let mut rest = Vec::new();
        let _ = stream.read_to_end(&mut rest).await;
    }
    let site = net.https("site.test").await;
    for access in ["site.test", "site.test:ro"] {
        let inside = net.sandbox(net.allow(&[(access, &site)])).await;
        let (code, mut stream) = inside.connect(&format!("site.test:{}", site.port())).await;
        assert_eq!(code, 200);
        stream.write_all(&[0x16, 3, 1, 2, 0, 1]).await.unwrap();
        let mut rest = Vec::new();
        let _ = stream.read_to_end(&mut rest).await;
    }
}

#[tokio::test]
async fn idle_connections_are_closed() {
    let net = net(|l| l.idle_timeout = SHORT);
    let site = net.http("site.test").await;
    let inside = net.sandbox(net.allow(&[("site.test", &site)])).await;
    for talk in [false, true] {
        let mut stream = inside.raw().await;
        if talk {
            stream = inside.connect(&format!("site.test:{}", site.port())).await.1;
        }
        let mut rest = Vec::new();
        let _ = stream.read_to_end(&mut rest).await;
        assert!(rest.is_empty());
    }
}

#[tokio::test]
async fn huge_heads_are_refused() {
    let net = Net::new();
    let site = net.https("site.test").await;
    let inside = net.sandbox(net.allow(&[("site.test:ro", &site)])).await;
    let long = "x".repeat(200 * 1024);
    let many: String = (0..5000).map(|i| format!("X-{i}: y\r\n")).collect();
    let authority = format!("site.test:{}", site.port());
    for headers in [format!("X-Long: {long}\r\n"), many] {
        let answer =
            inside.say(format!("GET http://site.test/ HTTP/1.1\r\nHost: site.test\r\n{headers}\r\n")).await;
        assert!([0, 431].contains(&status(&answer)), "{answer}");
        let text = format!("GET / HTTP/1.1\r\nHost: {authority}\r\n{headers}\r\n");
        let answer = inside.https(&authority, &text).await;
        assert!([0, 431].contains(&status(&answer)), "{answer}");
    }
    let answer = inside.say(format!("GET http://site.test/{long} HTTP/1.1\r\n\r\n")).await;
    assert!([0, 414, 431].contains(&status(&answer)), "{answer}");
    assert!(site.requests().is_empty());
}

#[tokio::test]
async fn nonsense_is_answered_or_closed() {
    let net = Net::new();
    let inside = net.sandbox(NetworkSpec::default()).await;
    for bytes in [
        &b"\x16\x03\x01\x00\x05hello"[..],
        b"\x04\x01\x00\x50\x7f\x00\x00\x01\x00",
        b"\x00\x00\x00\x00",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"CONNECT  HTTP/1.1\r\n\r\n",
        b"CONNECT /path HTTP/1.1\r\n\r\n",
        b"CONNECT site.test HTTP/1.1\r\nHost: site.test\r\nConnection: close\r\n\r\n",
        b"GET https://github.com/ HTTP/1.1\r\nHost: github.com\r\nConnection: close\r\n\r\n",
        b"GET ftp://github.com/ HTTP/1.1\r\nHost: github.com\r\nConnection: close\r\n\r\n",
        b"GET http://user:pass@github.com/ HTTP/1.1\r\nHost: github.com\r\nConnection: close\r\n\r\n",
        b"GET http:/// HTTP/1.1\r\n\r\n",
    ] {
        let mut stream = inside.raw().await;
        let _ = stream.write_all(bytes).await;
        let _ = stream.shutdown().await;
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer).await;
        let answer = String::from_utf8_lossy(&answer);
        assert!([0, 400, 403].contains(&status(&answer)), "{bytes:?}: {answer}");
    }
    assert!(net.names.asked.lock().unwrap().is_empty());
}

#[tokio::test]
async fn connections_over_the_bound_wait_for_their_turn() {
    let net = net(|l| l.connections_per_sandbox = 2);
    let site = net.http("site.test").await;
    let inside = net.sandbox(net.allow(&[("site.test", &site)])).await;
    let authority = format!("site.test:{}", site.port());
    let (_, first) = inside.connect(&authority).await;
    let (_, second) = inside.connect(&authority).await;
    let mut third = inside.raw().await;
    let text = format!("GET http://{authority}/3 HTTP/1.1\r\nHost: {authority}\r\nConnection: close\r\n\r\n");
    third.write_all(text.as_bytes()).await.unwrap();
    // A sandbox of its own is not held up by its neighbour.
    let neighbour = net.sandbox(net.allow(&[("site.test", &site)])).await;
    assert_eq!(neighbour.connect_status(&authority).await, 200);
    assert!(site.requests().is_empty(), "the third waits");
    drop(first);
    let mut answer = String::new();
    third.read_to_string(&mut answer).await.unwrap();
    assert!(answer.ends_with("hello /3"), "{answer}");
    drop(second);
}

#[tokio::test]
async fn bytes_are_counted_and_limited() {
    let kept = tempfile::tempdir().unwrap();
    let log = || Some(TrafficLog::new(kept.path()));
    let net = Net::with(|config| config.traffic = log());
    let another = Net::with(|config| config.traffic = log());
    let big = bytes::Bytes::from(vec![7u8; 1 << 20]);
    let site = net
        .https_with("site.test", {
            let big = big.clone();
            std::sync::Arc::new(move |_| {
                let big = big.clone();
                Box::pin(async move { hyper::Response::new(http_body_util::Full::new(big)) })
            })
        })
        .await;
    let authority = format!("site.test:{}", site.port());
    let text = format!("GET / HTTP/1.1\r\nHost: {authority}\r\nConnection: close\r\n\r\n");
    for access in ["site.test", "site.test:ro"] {
        let inside = net.sandbox(net.allow(&[(access, &site)])).await;
        inside.https(&authority, &text).await;
        let counters = inside.serving.counters();
        assert!(counters.rx_bytes > 1 << 20 && counters.rx_bytes < 2 << 20, "{counters:?}");
        assert!(counters.tx_bytes > 100 && counters.tx_bytes < 64 << 10, "{counters:?}");
        // Whoever asks later or elsewhere is told the same, with the last few bytes of the connection.
        let id = inside.id.clone();
        let told = |net: &Net, since| net.proxy.counters(&id, Timestamp(since)).unwrap();
        assert!((counters.rx_bytes..2 << 20).contains(&told(&net, 0).rx_bytes));
        drop(inside);
        assert!((counters.rx_bytes..2 << 20).contains(&told(&another, 0).rx_bytes));
        assert_eq!(told(&another, u64::MAX), EgressCounters::default());
    }
    // 1 MiB at 2 MiB/s, of which half a second's worth at most is a burst: it can't be there at once.
    let inside = net.sandbox_limited(net.allow(&[("site.test", &site)]), Some(2 << 20)).await;
    let begin = std::time::Instant::now();
    inside.https(&authority, &text).await;
    assert!(begin.elapsed() >= Duration::from_millis(200), "a bound from below: the limit held");
}

#[tokio::test]
async fn dropping_the_handle_ends_every_connection() {
    let net = Net::new();
    let site = net.http("site.test").await;
    let inside = net.sandbox(net.allow(&[("site.test", &site)])).await;
    let (_, mut stream) = inside.connect(&format!("site.test:{}", site.port())).await;
    let proxy = inside.proxy;
    drop(inside);
    let mut rest = Vec::new();
    let _ = stream.read_to_end(&mut rest).await;
    // Our end of the listener goes with the aborted task.
    while tokio::net::TcpStream::connect(proxy).await.is_ok() {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn a_flood_of_refusals_makes_few_records() {
    let net = Net::new();
    let inside = net.sandbox(NetworkSpec::default()).await;
    let one = "GET http://evil.test/ HTTP/1.1\r\nHost: evil.test\r\n\r\n";
    let last = "GET http://evil.test/ HTTP/1.1\r\nHost: evil.test\r\nConnection: close\r\n\r\n";
    let answer = inside.say(format!("{}{last}", one.repeat(999))).await;
    assert_eq!(answer.matches("HTTP/1.1 403").count(), 1000);
    drop(inside);
    // The rest is reported when the sandbox's last task is gone.
    loop {
        let decisions = net.decisions.lock().unwrap().clone();
        if decisions.iter().map(|d| d.count).sum::<u64>() == 1000 {
            assert!(decisions.len() < 10, "{}", decisions.len());
            break;
        }
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn an_upstream_that_closes_between_requests_is_reopened() {
    let net = Net::new();
    let site = net
        .https_with(
            "site.test",
            std::sync::Arc::new(|request| {
                let answer = hello()(request);
                Box::pin(async move {
                    let mut answer = answer.await;
                    answer.headers_mut().insert("connection", "close".parse().unwrap());
                    answer
                })
            }),
        )
        .await;
    let inside = net.sandbox(net.allow(&[("site.test:ro", &site)])).await;
    let authority = format!("site.test:{}", site.port());
    let one = |n, close: &str| format!("GET /{n} HTTP/1.1\r\nHost: {authority}\r\n{close}\r\n");
    let stream = inside.tls(&authority, "site.test").await.unwrap();
    let answer =
        say(stream, format!("{}{}{}", one(1, ""), one(2, ""), one(3, "Connection: close\r\n"))).await;
    for n in 1..=3 {
        assert!(answer.contains(&format!("hello /{n}")), "{answer}");
    }
}
