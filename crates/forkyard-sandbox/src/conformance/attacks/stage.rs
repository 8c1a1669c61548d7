//! Where attacks on the network are played: the real egress proxy over names that say what an attack wants, servers on the
//! host's loopback that tell what reached them, and sockets that are opened inside a sandbox and held out here.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use forkyard_core::SandboxId;
use http_body_util::{BodyExt, Full};
use hyper::{Request, Response};
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, DuplexStream};
use tokio_rustls::TlsAcceptor;
use tokio_util::task::AbortOnDropHandle;

use crate::conformance::{Failed, run};
use crate::egress::host::Host;
use crate::egress::{
    CertAuthority, EgressBody, EgressConfig, EgressDecision, EgressLimits, EgressProxy, InternalRoute,
    InternalService, Reason, Resolver, TrafficLog, UpstreamTls, egress_body,
};
use crate::local::GUEST;
use crate::{
    EgressFactory, Exec, ExecEvent, ExecRequest, NetworkMode, NetworkSpec, PROXY_ADDRESS, Result, Sandbox,
    Secret,
};

/// Where the probe lies inside.
pub const PROBE: &str = "/tmp/forkyard-probe";
/// An answer from inside takes far less, on any machine.
pub const PATIENCE: Duration = Duration::from_secs(20);
/// What a server on loopback says to whoever asks.
const HELLO: &str = "HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: close\r\n\r\nhello";

/// The name of a stage's secret.
pub const SECRET: &str = "vault";
/// The host that it is for.
const VAULT: &str = "vault.test";

/// What it is: nothing else has these letters.
pub fn secret_value() -> String {
    format!("s3cret{}", std::process::id())
}

/// The network of an attack: give its [`Stage::egress`] to the providers that are attacked.
pub struct Stage {
    proxy: EgressProxy,
    decisions: Arc<Mutex<Vec<EgressDecision>>>,
    names: Arc<Names>,
    internal: Arc<Internal>,
    vault: std::net::TcpListener,
    _state: tempfile::TempDir,
}

/// A panic while it was held leaves lists whole.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Answers in turn, the last one for ever; and who was asked for.
#[derive(Default)]
struct Names {
    answers: Mutex<HashMap<String, Vec<Vec<IpAddr>>>>,
    asked: Mutex<Vec<String>>,
}

#[async_trait]
impl Resolver for Names {
    async fn resolve(&self, name: &str) -> io::Result<Vec<IpAddr>> {
        lock(&self.asked).push(name.to_string());
        let mut answers = lock(&self.answers);
        let list = answers.get_mut(name).ok_or_else(|| io::Error::other("no such name"))?;
        Ok(if list.len() > 1 { list.remove(0) } else { list.first().cloned().unwrap_or_default() })
    }
}

/// Forkyard's own name: remembers who asked, by the proxy's word and by the request's.
#[derive(Default)]
struct Internal {
    seen: Mutex<Vec<(SandboxId, bool)>>,
}

#[async_trait]
impl InternalService for Internal {
    async fn call(&self, sandbox: &SandboxId, request: Request<EgressBody>) -> Response<EgressBody> {
        let (head, body) = request.into_parts();
        let _ = body.collect().await;
        let claimed = head.headers.contains_key(crate::egress::SANDBOX_HEADER);
        lock(&self.seen).push((sandbox.clone(), claimed));
        Response::new(egress_body(Full::new(Bytes::from(format!("you are {sandbox}")))))
    }
}

impl Stage {
    pub fn new() -> Result<Stage> {
        let state = tempfile::tempdir()
            .map_err(|e| crate::SandboxError::new(crate::ErrorKind::Unavailable, e.to_string()))?;
        let decisions = Arc::new(Mutex::new(Vec::new()));
        let (names, internal) = (Arc::new(Names::default()), Arc::new(Internal::default()));
        let sink = Arc::clone(&decisions);
        let authority = Arc::new(CertAuthority::open(state.path())?);
        let failed = |e: io::Error| crate::SandboxError::new(crate::ErrorKind::Unavailable, e.to_string());
        let vault = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).map_err(failed)?;
        let port = vault.local_addr().map_err(failed)?.port();
        let secret = Secret {
            header: "Authorization".into(),
            value: secret_value(),
            hosts: vec![format!("{VAULT}:{port}")],
            methods: vec![],
            path_prefixes: vec![],
        };
        let proxy = EgressProxy::new(EgressConfig {
            // The one that it believes in itself: of [`Stage::vault`].
            upstream_tls: UpstreamTls::only(&[authority.certificate().clone()])?,
            authority,
            resolver: names.clone(),
            internal: Some(InternalRoute::Service(internal.clone())),
            secrets: [(SECRET.to_string(), secret)].into(),
            on_decision: Arc::new(move |decision| lock(&sink).push(decision)),
            traffic: Some(TrafficLog::new(&state.path().join("traffic"))),
            limits: EgressLimits::default(),
        });
        Ok(Stage { proxy, decisions, names, internal, vault, _state: state })
    }

    /// For [`crate::local::LocalOptions`] and [`crate::docker::DockerOptions`].
    pub fn egress(&self) -> Arc<dyn EgressFactory> {
        Arc::new(self.proxy.clone())
    }

    /// What a name resolves to, time after time.
    pub fn name(&self, name: &str, answers: &[&[&str]]) {
        let parse = |list: &&[&str]| list.iter().filter_map(|ip| ip.parse().ok()).collect();
        lock(&self.names.answers).insert(name.to_string(), answers.iter().map(parse).collect());
    }

    pub fn was_looked_up(&self, part: &str) -> bool {
        lock(&self.names.asked).iter().any(|name| name.contains(part))
    }

    /// Why the proxy decided as it did about a host, for one sandbox.
    pub fn reasons(&self, sandbox: &Arc<dyn Sandbox>, host: &str) -> Vec<Reason> {
        let decisions = lock(&self.decisions);
        let host = host.to_ascii_lowercase();
        // A host that can't be understood is recorded as it was written, with its port.
        let is =
            |d: &&EgressDecision| d.host == host || d.host.rsplit_once(':').is_some_and(|(h, _)| h == host);
        decisions.iter().filter(|d| d.sandbox == *sandbox.id()).filter(is).map(|d| d.reason).collect()
    }

    /// Who asked Forkyard's own name, and whether the request said so itself.
    pub fn internal_callers(&self) -> Vec<(SandboxId, bool)> {
        lock(&self.internal.seen).clone()
    }

    /// A server of the host's loopback that `name` resolves to.
    pub async fn origin(&self, name: &str) -> Result<Origin, Failed> {
        self.serve(name, tokio::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?, None)
    }

    /// The same on every address of the host.
    pub async fn origin_everywhere(&self, name: &str) -> Result<Origin, Failed> {
        // One socket for both families, where there are two.
        let listener = match tokio::net::TcpListener::bind((Ipv6Addr::UNSPECIFIED, 0)).await {
            Ok(listener) => listener,
            Err(_) => tokio::net::TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0)).await?,
        };
        self.serve(name, listener, None)
    }

    /// The server that [`SECRET`] is for. It speaks TLS.
    pub fn vault(&self) -> Result<Origin, Failed> {
        let host = Host::parse(VAULT).map_err(|e| Failed::new(format!("{e:?}")))?;
        let tls = TlsAcceptor::from(self.proxy.authority().server_config(&host)?);
        let listener = self.vault.try_clone()?;
        listener.set_nonblocking(true)?;
        self.serve(VAULT, tokio::net::TcpListener::from_std(listener)?, Some(tls))
    }

    fn serve(
        &self,
        name: &str,
        listener: tokio::net::TcpListener,
        tls: Option<TlsAcceptor>,
    ) -> Result<Origin, Failed> {
        self.name(name, &[&["127.0.0.1"]]);
        let port = listener.local_addr()?.port();
        let received = Arc::new(Mutex::new(Vec::new()));
        let log = Arc::clone(&received);
        let task = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (log, tls) = (Arc::clone(&log), tls.clone());
                tokio::spawn(async move {
                    match tls {
                        None => hello(stream, &log).await,
                        Some(tls) => match tls.accept(stream).await {
                            Ok(stream) => hello(stream, &log).await,
                            Err(e) => tracing::debug!("a stage's client: {e}"),
                        },
                    }
                });
            }
        });
        Ok(Origin { name: name.to_string(), port, received, _task: AbortOnDropHandle::new(task) })
    }

    /// TLS with whoever answers for the proxy, by a client inside that believes it.
    pub async fn tls(
        &self,
        stream: DuplexStream,
        name: &str,
    ) -> io::Result<tokio_rustls::client::TlsStream<DuplexStream>> {
        let mut roots = rustls::RootCertStore::empty();
        roots.add(self.proxy.authority().certificate().clone()).map_err(io::Error::other)?;
        let config =
            rustls::ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
                .with_safe_default_protocol_versions()
                .map_err(io::Error::other)?
                .with_root_certificates(roots)
                .with_no_client_auth();
        let name = ServerName::try_from(name.to_string()).map_err(io::Error::other)?;
        tokio_rustls::TlsConnector::from(Arc::new(config)).connect(name, stream).await
    }
}

/// Remembers what comes, and answers a request.
async fn hello(mut stream: impl AsyncRead + AsyncWrite + Unpin, log: &Mutex<Vec<u8>>) {
    let mut buffer = vec![0; 64 << 10];
    while let Ok(n @ 1..) = stream.read(&mut buffer).await {
        lock(log).extend_from_slice(&buffer[..n]);
        if lock(log).ends_with(b"\r\n\r\n") {
            let _ = stream.write_all(HELLO.as_bytes()).await;
            let _ = stream.shutdown().await;
            break;
        }
    }
}

/// A server that tells what reached it.
pub struct Origin {
    pub name: String,
    pub port: u16,
    received: Arc<Mutex<Vec<u8>>>,
    _task: AbortOnDropHandle<()>,
}

impl Origin {
    pub fn received(&self) -> String {
        String::from_utf8_lossy(&lock(&self.received)).into_owned()
    }
    pub fn authority(&self) -> String {
        format!("{}:{}", self.name, self.port)
    }
    /// Entries that open it, and nothing else, as the user would; `access` is "" or ":ro".
    pub fn allowed(&self, access: &str) -> NetworkSpec {
        let allow = vec![
            format!("{}{access}", self.authority()),
            // A name never opens a closed address; naming the address does.
            format!("127.0.0.1:{}:ro", self.port),
        ];
        NetworkSpec { mode: NetworkMode::Isolated, allow, ..Default::default() }
    }
}

/// Puts the probe inside.
pub async fn bring_probe(sandbox: &Arc<dyn Sandbox>) -> Result<(), Failed> {
    sandbox.write_file(PROBE, Bytes::from_static(GUEST), Some(0o755)).await.map_err(Failed::before)
}

/// What the probe printed.
pub async fn probe(sandbox: &Arc<dyn Sandbox>, args: &[&str]) -> Result<String, Failed> {
    let argv = [PROBE, "probe"].iter().chain(args).copied();
    Ok(run(sandbox, ExecRequest::new(argv).timeout(PATIENCE)).await?.out)
}

/// A socket that the probe opens inside; the error is why it did not.
pub async fn dial(
    sandbox: &Arc<dyn Sandbox>,
    args: &[&str],
) -> Result<std::result::Result<DuplexStream, String>, Failed> {
    let argv = [PROBE, "probe"].iter().chain(args).copied();
    let mut exec = sandbox.exec(ExecRequest { stdin: true, ..ExecRequest::new(argv) }).await?;
    let mut said = Vec::new();
    while !said.contains(&b'\n') {
        match tokio::time::timeout(PATIENCE, exec.events.recv()).await {
            Ok(Some(Ok(ExecEvent::Stdout(data)))) => said.extend_from_slice(&data),
            Ok(Some(Ok(ExecEvent::Stderr(_)))) => {}
            Ok(Some(Ok(ExecEvent::Exit(_))) | None) => break,
            Ok(Some(Err(e))) => return Err(e.into()),
            Err(_) => return Err(Failed::new(format!("the probe {args:?} says nothing"))),
        }
    }
    let end = said.iter().position(|b| *b == b'\n').unwrap_or(said.len());
    let word = String::from_utf8_lossy(&said[..end]).into_owned();
    if word != "connected" {
        return Ok(Err(word));
    }
    let (ours, theirs) = tokio::io::duplex(64 << 10);
    let rest = said.split_off((end + 1).min(said.len()));
    tokio::spawn(carry(exec, theirs, rest));
    Ok(Ok(ours))
}

/// Between a socket's two halves: the probe's standard streams, and our end.
async fn carry(mut exec: Exec, stream: DuplexStream, first: Vec<u8>) {
    let (mut read, mut write) = tokio::io::split(stream);
    if write.write_all(&first).await.is_err() {
        return;
    }
    let (mut buffer, mut open) = (vec![0; 16 << 10], true);
    loop {
        tokio::select! {
            event = exec.events.recv() => match event {
                Some(Ok(ExecEvent::Stdout(data))) => if write.write_all(&data).await.is_err() { return },
                Some(Ok(ExecEvent::Stderr(_))) => {}
                Some(Ok(ExecEvent::Exit(_)) | Err(_)) | None => return,
            },
            n = read.read(&mut buffer), if open => {
                let n = n.unwrap_or(0);
                open = n > 0;
                let sent = if open {
                    exec.control.write_stdin(Bytes::copy_from_slice(&buffer[..n])).await
                } else {
                    exec.control.close_stdin().await
                };
                open &= sent.is_ok();
            }
        }
    }
}

/// A connection to the proxy.
pub async fn to_proxy(sandbox: &Arc<dyn Sandbox>) -> Result<DuplexStream, Failed> {
    let (address, port) = (PROXY_ADDRESS.ip().to_string(), PROXY_ADDRESS.port().to_string());
    dial(sandbox, &["tcp", &address, &port]).await?.map_err(|e| Failed::new(format!("no proxy inside: {e}")))
}

/// Says something over it and reads what is answered, to the end.
pub async fn say(mut stream: impl AsyncRead + AsyncWrite + Unpin, text: impl AsRef<[u8]>) -> String {
    let mut answer = Vec::new();
    let talk = async {
        // The other side may refuse before it has read everything.
        let _ = stream.write_all(text.as_ref()).await;
        let _ = stream.flush().await;
        let _ = stream.read_to_end(&mut answer).await;
    };
    let _ = tokio::time::timeout(PATIENCE, talk).await;
    String::from_utf8_lossy(&answer).into_owned()
}

/// A tunnel through the proxy, or the proxy's refusal.
pub async fn connect(
    sandbox: &Arc<dyn Sandbox>,
    authority: &str,
) -> Result<std::result::Result<DuplexStream, String>, Failed> {
    let mut stream = to_proxy(sandbox).await?;
    let text = format!("CONNECT {authority} HTTP/1.1\r\nHost: {authority}\r\n\r\n");
    stream.write_all(text.as_bytes()).await?;
    let mut head = Vec::new();
    let read = async {
        while !head.ends_with(b"\r\n\r\n") {
            match stream.read_u8().await {
                Ok(byte) => head.push(byte),
                Err(_) => break,
            }
        }
    };
    let _ = tokio::time::timeout(PATIENCE, read).await;
    let head = String::from_utf8_lossy(&head).into_owned();
    Ok(if head.starts_with("HTTP/1.1 200") { Ok(stream) } else { Err(head) })
}
