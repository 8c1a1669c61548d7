//! Who is reached and who is not: allow-lists, addresses, rebinding, names that do not fit.

use forkyard_sandbox::egress::{Decision, Reason};
use forkyard_sandbox::{NetworkMode, NetworkSpec, Secret};

use crate::docker_fixture::skipped;
use crate::egress_fixture::{Net, hello, origin, say, status};

fn get(host: &str, path: &str) -> String {
    format!("GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n")
}

#[tokio::test]
async fn plain_http_goes_where_it_is_allowed() {
    let net = Net::new();
    let site = net.http("site.test").await;
    let inside = net.sandbox(net.allow(&[("site.test", &site)])).await;
    let port = site.port();
    let answer = inside
        .say(format!("GET http://site.test:{port}/x?y HTTP/1.1\r\nHost: site.test:{port}\r\nProxy-Connection: close\r\nConnection: close\r\n\r\n"))
        .await;
    assert!(answer.starts_with("HTTP/1.1 200") && answer.ends_with("hello /x"), "{answer}");
    let seen = site.requests();
    assert_eq!(seen[0].path, "/x?y");
    assert_eq!(seen[0].headers["host"], format!("site.test:{port}"));
    assert!(!seen[0].headers.contains_key("proxy-connection"));
    assert_eq!(net.reasons("site.test"), [Reason::UserList]);

    let answer =
        inside.say("GET http://other.test/ HTTP/1.1\r\nHost: other.test\r\nConnection: close\r\n\r\n").await;
    assert_eq!(status(&answer), 403);
    assert!(answer.contains("--allow other.test"), "{answer}");
    assert!(
        !net.names.asked.lock().unwrap().contains(&"other.test".to_string()),
        "a refused name is not looked up"
    );
    assert_eq!(net.decisions.lock().unwrap().last().unwrap().decision, Decision::Denied);
}

#[tokio::test]
async fn refused_targets_by_every_protocol() {
    let net = Net::new();
    let site = net.https("site.test").await;
    net.names.set("meta.test", &[&["169.254.169.254"]]);
    net.names.set("lan.test", &[&["10.0.0.1", "::ffff:192.168.0.1", "fe80::1"]]);
    net.names.set("nat.test", &[&["64:ff9b::a9fe:a9fe"]]);
    let mut spec = net.allow(&[("site.test", &site)]);
    spec.allow.extend(["meta.test", "lan.test", "nat.test", "nowhere.test", "8.8.8.8"].map(String::from));
    let inside = net.sandbox(spec).await;
    let port = site.port();
    let table = [
        ("other.test:443".to_string(), Reason::NotListed, 403),
        (format!("other.test:{port}"), Reason::NotListed, 403),
        ("site.test:443".into(), Reason::Port, 403),
        ("site.test:22".into(), Reason::Port, 403),
        ("github.com:22".into(), Reason::Port, 403),
        ("meta.test:80".into(), Reason::ClosedAddress, 403),
        ("lan.test:443".into(), Reason::ClosedAddress, 403),
        ("nat.test:443".into(), Reason::ClosedAddress, 403),
        ("169.254.169.254:80".into(), Reason::NotListed, 403),
        ("127.0.0.1:22".into(), Reason::Port, 403),
        ("[::1]:443".into(), Reason::NotListed, 403),
        ("[::ffff:169.254.169.254]:80".into(), Reason::NotListed, 403),
        ("localhost:80".into(), Reason::NotListed, 403),
        ("2130706433:80".into(), Reason::OddAddress, 403),
        ("0x7f000001:80".into(), Reason::OddAddress, 403),
        ("0177.0.0.1:80".into(), Reason::OddAddress, 403),
        ("127.1:80".into(), Reason::OddAddress, 403),
        ("nowhere.test:443".into(), Reason::Unresolved, 502),
    ];
    for (authority, reason, code) in &table {
        assert_eq!(inside.connect_status(authority).await, *code, "{authority}");
        let last = net.decisions.lock().unwrap().last().cloned().unwrap();
        assert_eq!(last.reason, *reason, "{authority}: {last:?}");
        assert_eq!(last.layer, reason.layer());
    }
    for (authority, reason, code) in &table {
        let (host, port) = authority.rsplit_once(':').unwrap();
        let (reply, _) = inside.socks(host.trim_matches(['[', ']']), port.parse().unwrap()).await;
        let expected = if *code == 502 { 4 } else { 2 };
        assert_eq!(reply, expected, "{authority} {reason:?}");
    }
    // The same addresses as SOCKS5's own kinds.
    assert_eq!(inside.socks_raw(&[5, 1, 0, 1, 169, 254, 169, 254, 0, 80]).await.0, 2);
    let mut v6 = vec![5, 1, 0, 4];
    v6.extend_from_slice(&"::ffff:127.0.0.1".parse::<std::net::Ipv6Addr>().unwrap().octets());
    v6.extend_from_slice(&[0, 80]);
    assert_eq!(inside.socks_raw(&v6).await.0, 2);
    // UDP (DNS, QUIC) and BIND are not served.
    assert_eq!(inside.socks_raw(&[5, 3, 0, 1, 8, 8, 8, 8, 0, 53]).await.0, 7);
    assert_eq!(inside.socks_raw(&[5, 2, 0, 1, 8, 8, 8, 8, 0, 53]).await.0, 7);
    assert!(site.requests().is_empty());
}

#[tokio::test]
async fn bridge_reaches_public_addresses_only() {
    let net = Net::new();
    net.names.set("meta.test", &[&["169.254.169.254"]]);
    let inside = net.sandbox(NetworkSpec { mode: NetworkMode::Bridge, ..Default::default() }).await;
    for closed in
        ["meta.test:80", "169.254.169.254:80", "127.0.0.1:80", "10.0.0.1:443", "[fd00::1]:443", "0.0.0.0:80"]
    {
        assert_eq!(inside.connect_status(closed).await, 403, "{closed}");
        assert_eq!(net.decisions.lock().unwrap().last().unwrap().reason, Reason::ClosedAddress, "{closed}");
    }
    // The host's own addresses, public or not.
    for own in forkyard_sandbox::egress::address::host_addresses().unwrap() {
        let authority = if own.is_ipv6() { format!("[{own}]:80") } else { format!("{own}:80") };
        assert_eq!(inside.connect_status(&authority).await, 403, "{own}");
    }
}

#[tokio::test]
async fn mode_none_reaches_nothing() {
    let net = Net::new();
    let site = net.https("site.test").await;
    let spec = NetworkSpec { mode: NetworkMode::None, ..net.allow(&[("site.test", &site)]) };
    let inside = net.sandbox(spec).await;
    assert_eq!(inside.connect_status(&format!("site.test:{}", site.port())).await, 403);
    assert_eq!(net.reasons("site.test"), [Reason::NoNetwork]);
    assert!(net.names.asked.lock().unwrap().is_empty());
}

#[tokio::test]
async fn a_rebound_name_gains_nothing() {
    let net = Net::new();
    let site = net.http("site.test").await;
    let port = site.port();
    // Public first, then the metadata service; and a mixed answer, of which only the open address is used.
    net.names.set("rebind.test", &[&["127.0.0.1"], &["169.254.169.254"]]);
    net.names.set("mixed.test", &[&["169.254.169.254", "10.0.0.1", "127.0.0.1"]]);
    let inside = net.sandbox(net.allow(&[("rebind.test", &site), ("mixed.test", &site)])).await;
    let authority = format!("rebind.test:{port}");
    let (code, stream) = inside.connect(&authority).await;
    assert_eq!(code, 200);
    let answer = say(stream, get(&authority, "/first")).await;
    assert!(answer.ends_with("hello /first"), "{answer}");
    assert_eq!(inside.connect_status(&authority).await, 403);
    assert_eq!(net.reasons("rebind.test").last(), Some(&Reason::ClosedAddress));
    assert_eq!(net.names.asked.lock().unwrap().len(), 2, "one lookup per connection");

    let (code, stream) = inside.connect(&format!("mixed.test:{port}")).await;
    assert_eq!(code, 200);
    assert!(say(stream, get(&format!("mixed.test:{port}"), "/m")).await.ends_with("hello /m"));
}

#[tokio::test]
async fn user_hosts_are_tunnelled_with_the_name_checked() {
    let net = Net::new();
    let site = net.https("site.test").await;
    let inside = net.sandbox(net.allow(&[("site.test", &site)])).await;
    let authority = format!("site.test:{}", site.port());
    // End to end: the certificate is the site's own, and any method passes.
    let stream = inside.tls(&authority, "site.test").await.unwrap();
    let (_, session) = stream.get_ref();
    let certificate = session.peer_certificates().unwrap()[0].clone();
    assert_eq!(
        session.peer_certificates().unwrap().len(),
        1,
        "not one of ours, which come with their authority"
    );
    assert!(!certificate.is_empty());
    let text = format!("DELETE /d HTTP/1.1\r\nHost: {authority}\r\nConnection: close\r\n\r\n");
    assert!(say(stream, text).await.ends_with("hello /d"));
    assert_eq!(net.reasons("site.test"), [Reason::UserList]);

    // Another name in the handshake: nothing reaches the site.
    assert!(inside.tls(&authority, "other.test").await.is_err());
    assert_eq!(net.reasons("site.test").last(), Some(&Reason::SniMismatch));
    assert_eq!(site.requests().len(), 1);

    // The same over SOCKS5.
    let (reply, stream) = inside.socks("site.test", site.port()).await;
    assert_eq!(reply, 0);
    let stream = inside.tls_over(stream, "site.test").await.unwrap();
    assert!(say(stream, get(&authority, "/s")).await.ends_with("hello /s"));
    let (_, stream) = inside.socks("site.test", site.port()).await;
    assert!(inside.tls_over(stream, "evil.test").await.is_err());
}

#[tokio::test]
async fn read_only_hosts_are_terminated_and_read_only() {
    let net = Net::new();
    let site = net.https("site.test").await;
    let inside = net.sandbox(net.allow(&[("site.test:ro", &site)])).await;
    let authority = format!("site.test:{}", site.port());
    let stream = inside.tls(&authority, "site.test").await.unwrap();
    assert_eq!(stream.get_ref().1.peer_certificates().unwrap()[1], *net.proxy.authority().certificate());
    assert!(say(stream, get(&authority, "/ok")).await.ends_with("hello /ok"));

    let deny = [
        ("POST /x", "Content-Length: 1\r\n", "x", Reason::ReadOnly, 403),
        ("PUT /pkg", "Content-Length: 0\r\n", "", Reason::ReadOnly, 403),
        ("GET /x", "Content-Length: 3\r\n", "abc", Reason::ReadOnly, 403),
        ("GET /x", "Transfer-Encoding: chunked\r\n", "3\r\nabc\r\n0\r\n\r\n", Reason::ReadOnly, 403),
        ("POST /r/git-receive-pack", "Content-Length: 1\r\n", "x", Reason::Push, 403),
        ("GET /r/info/refs?service=git-receive-pack", "", "", Reason::Push, 403),
        ("TRACE /x", "", "", Reason::ReadOnly, 403),
        ("OPTIONS *", "", "", Reason::ReadOnly, 403),
    ];
    for (line, headers, body, reason, code) in deny {
        let text =
            format!("{line} HTTP/1.1\r\nHost: {authority}\r\n{headers}Connection: close\r\n\r\n{body}");
        let answer = inside.https(&authority, &text).await;
        assert_eq!(status(&answer), code, "{line}: {answer}");
        assert!(answer.contains(reason.as_str()), "{line}: {answer}");
    }
    // The Host header decides at a shared server: it must be the judged host.
    for host in ["other.test", "site.test", "site.test:1", "site.test@other.test", ""] {
        let answer = inside.https(&authority, &get(host, "/h")).await;
        assert_eq!(status(&answer), 421, "{host}: {answer}");
    }
    let two = format!("GET / HTTP/1.1\r\nHost: {authority}\r\nHost: other.test\r\nConnection: close\r\n\r\n");
    assert_eq!(status(&inside.https(&authority, &two).await), 421);
    let absolute =
        format!("GET https://other.test/ HTTP/1.1\r\nHost: {authority}\r\nConnection: close\r\n\r\n");
    assert_eq!(status(&inside.https(&authority, &absolute).await), 400);
    // Another name in the handshake gets no certificate at all.
    assert!(inside.tls(&authority, "other.test").await.is_err());

    // Not TLS at all: the same judgement in the clear.
    let (_, stream) = inside.connect(&authority).await;
    let text = format!(
        "POST /clear HTTP/1.1\r\nHost: {authority}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    );
    assert_eq!(status(&say(stream, text).await), 403);

    // A fetch passes, with its body.
    let text = format!(
        "POST /r/git-upload-pack HTTP/1.1\r\nHost: {authority}\r\nContent-Type: application/x-git-upload-pack-request\r\nContent-Length: 4\r\nX-HTTP-Method-Override: DELETE\r\nUpgrade: websocket\r\nConnection: close, upgrade\r\n\r\n0000"
    );
    assert_eq!(status(&inside.https(&authority, &text).await), 200);
    let seen = site.requests();
    assert_eq!(seen.iter().map(|s| s.path.as_str()).collect::<Vec<_>>(), ["/ok", "/r/git-upload-pack"]);
    assert_eq!(seen[1].body, b"0000");
    assert!(!seen[1].headers.contains_key("x-http-method-override"));
    assert!(!seen[1].headers.contains_key("upgrade"));
}

#[tokio::test]
async fn an_untrusted_site_is_not_reached_on_the_sandboxes_behalf() {
    let net = Net::new();
    // A certificate for another name than the one that resolves to it.
    let site = net.https("elsewhere.test").await;
    net.names.set("site.test", &[&["127.0.0.1"]]);
    let inside = net.sandbox(net.allow(&[("site.test:ro", &site)])).await;
    let authority = format!("site.test:{}", site.port());
    let answer = inside.https(&authority, &get(&authority, "/")).await;
    assert_eq!(status(&answer), 502, "{answer}");
    assert_eq!(net.reasons("site.test"), [Reason::UpstreamTls]);
    assert!(site.requests().is_empty());
}

#[tokio::test]
async fn secrets_are_put_in_only_where_they_are_bound() {
    // The site's port is a part of what is known before there is a proxy.
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let secret = Secret {
        header: "Authorization".into(),
        value: "Bearer s3cret".into(),
        hosts: vec![format!("api.test:{port}")],
        methods: vec!["GET".into(), "POST".into()],
        path_prefixes: vec!["/v1".into()],
    };
    let net = Net::with(|config| config.secrets = [("api".to_string(), secret)].into());
    net.names.set("api.test", &[&["127.0.0.1"]]);
    let api = origin(Some(net.world.acceptor("api.test")), listener, hello()).await;
    let other = net.https("other.test").await;
    let mut spec = net.allow(&[("other.test:ro", &other)]);
    spec.allow.push(format!("127.0.0.1:{port}:ro"));
    spec.secrets.push("api".into());
    let inside = net.sandbox(spec).await;
    let authority = format!("api.test:{}", api.port());
    let send = |method: &str, path: &str| {
        let text = format!(
            "{method} {path} HTTP/1.1\r\nHost: {authority}\r\nAuthorization: fake\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
        );
        let inside = &inside;
        let authority = authority.clone();
        async move { inside.https(&authority, &text).await }
    };
    for (method, path, code) in [
        ("GET", "/v1/x", 200),
        ("POST", "/v1", 200),
        ("GET", "/v2", 200),
        ("GET", "/v1/../v2", 200),
        ("GET", "/v11", 200),
        ("POST", "/v2", 403),
        ("DELETE", "/v1", 403),
    ] {
        let answer = send(method, path).await;
        assert_eq!(status(&answer), code, "{method} {path}: {answer}");
        assert!(!answer.contains("s3cret"), "{answer}");
    }
    let got: Vec<_> = api
        .requests()
        .iter()
        .map(|s| (s.path.clone(), s.headers["authorization"].to_str().unwrap().to_string()))
        .collect();
    let expected = [
        ("/v1/x", "Bearer s3cret"),
        ("/v1", "Bearer s3cret"),
        ("/v2", "fake"),
        ("/v1/../v2", "fake"),
        ("/v11", "fake"),
    ];
    assert_eq!(got, expected.map(|(p, v)| (p.to_string(), v.to_string())));

    // Not to others, and not in the clear.
    let there = format!("other.test:{}", other.port());
    inside.https(&there, &get(&there, "/v1/x")).await;
    assert!(!other.requests()[0].headers.contains_key("authorization"));
    let (_, stream) = inside.connect(&authority).await;
    say(stream, get(&authority, "/v1/x")).await;
    assert!(!api.requests().iter().skip(5).any(|s| s.headers.contains_key("authorization")));
    assert!(!format!("{:?}", net.decisions.lock().unwrap()).contains("s3cret"));
}

#[tokio::test]
async fn a_host_name_in_many_spellings_is_one_host() {
    let net = Net::new();
    let site = net.https("site.test").await;
    let inside = net.sandbox(net.allow(&[("site.test:ro", &site)])).await;
    let authority = format!("SITE.Test.:{}", site.port());
    let stream = inside.tls(&authority, "site.test").await.unwrap();
    let answer = say(stream, get(&format!("Site.TEST:{}", site.port()), "/c")).await;
    assert!(answer.ends_with("hello /c"), "{answer}");
}

/// On the web's own ports nothing but the web's protocols passes a tunnel. Needs the right to listen on low ports.
#[tokio::test]
async fn web_ports_carry_only_the_web() {
    let net = Net::new();
    let bind = |port| tokio::net::TcpListener::bind(("127.9.9.9", port));
    let (Ok(http), Ok(https)) = (bind(80).await, bind(443).await) else {
        return skipped("low ports are not for this user");
    };
    let clear = origin(None, http, hello()).await;
    let secure = origin(Some(net.world.acceptor("site.test")), https, hello()).await;
    net.names.set("site.test", &[&["127.9.9.9"]]);
    net.names.set("github.com", &[&["127.9.9.9"]]);
    let allow = vec!["site.test".into(), "127.9.9.9:443".into(), "127.9.9.9:80".into()];
    let inside = net.sandbox(NetworkSpec { allow, ..Default::default() }).await;

    let (_, stream) = inside.connect("site.test:443").await;
    assert_eq!(say(stream, "SSH-2.0-x\r\n").await, "");
    assert_eq!(net.reasons("site.test"), [Reason::NotTls]);
    assert!(inside.https("site.test:443", &get("site.test", "/s")).await.ends_with("hello /s"));

    let (_, stream) = inside.connect("site.test:80").await;
    assert!(say(stream, get("site.test", "/c")).await.ends_with("hello /c"));
    let (_, stream) = inside.connect("site.test:80").await;
    assert_eq!(status(&say(stream, get("other.test", "/fronted")).await), 421);
    assert_eq!((clear.requests().len(), secure.requests().len()), (1, 1));

    // The default list: read-only without the user having said a word.
    let answer = inside.say("POST http://github.com/x HTTP/1.1\r\nHost: github.com\r\nContent-Length: 0\r\nConnection: close\r\n\r\n").await;
    assert_eq!(status(&answer), 403);
    let answer =
        inside.say("GET http://github.com/x HTTP/1.1\r\nHost: github.com\r\nConnection: close\r\n\r\n").await;
    assert!(answer.ends_with("hello /x"), "{answer}");
    assert_eq!(net.reasons("github.com"), [Reason::ReadOnly, Reason::DefaultList]);
}

/// A server that speaks first, on a port that the user named.
#[tokio::test]
async fn other_protocols_pass_on_named_ports() {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let net = Net::new();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            stream.write_all(b"220 ready").await.unwrap();
            let mut said = [0; 4];
            stream.read_exact(&mut said).await.unwrap();
            stream.write_all(&said).await.unwrap();
        }
    });
    net.names.set("mail.test", &[&["127.0.0.1"]]);
    let allow = vec![format!("mail.test:{port}"), format!("127.0.0.1:{port}")];
    let inside = net.sandbox(NetworkSpec { allow, ..Default::default() }).await;
    let (code, mut stream) = inside.connect(&format!("mail.test:{port}")).await;
    assert_eq!(code, 200);
    let mut banner = [0; 9];
    stream.read_exact(&mut banner).await.unwrap();
    assert_eq!(&banner, b"220 ready");
    assert_eq!(say(stream, "EHLO").await, "EHLO");
}
