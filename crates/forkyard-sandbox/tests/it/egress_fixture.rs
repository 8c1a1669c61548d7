//! Real servers on loopback, a resolver that says what a test wants, and a client of the proxy.

use std::collections::HashMap;
use std::convert::Infallible;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use forkyard_core::SandboxId;
use forkyard_sandbox::egress::{
    CertAuthority, EgressConfig, EgressDecision, EgressLimits, EgressListener, EgressProxy, InternalRoute,
    Reason, Resolver, Serving, UpstreamTls,
};
use forkyard_sandbox::{NetworkMode, NetworkSpec};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, ServerName};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::{TlsAcceptor, TlsConnector, client::TlsStream};

/// The authority of the outside world.
pub struct World {
    key: rcgen::KeyPair,
    params: rcgen::CertificateParams,
    pub root: CertificateDer<'static>,
    pub root_pem: String,
}

impl World {
    fn new() -> World {
        let mut params = rcgen::CertificateParams::default();
        params.distinguished_name.push(rcgen::DnType::CommonName, "The world");
        params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        let key = rcgen::KeyPair::generate().unwrap();
        let root = params.self_signed(&key).unwrap();
        World { key, params, root_pem: root.pem(), root: root.der().clone() }
    }

    pub fn acceptor(&self, name: &str) -> TlsAcceptor {
        let issuer = rcgen::Issuer::from_params(&self.params, &self.key);
        let key = rcgen::KeyPair::generate().unwrap();
        let leaf =
            rcgen::CertificateParams::new(vec![name.to_string()]).unwrap().signed_by(&key, &issuer).unwrap();
        let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(key.serialize_der()));
        let config = rustls::ServerConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(vec![leaf.der().clone()], key)
            .unwrap();
        TlsAcceptor::from(Arc::new(config))
    }
}

fn provider() -> Arc<rustls::crypto::CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

#[derive(Debug, Clone)]
pub struct Seen {
    pub method: String,
    pub path: String,
    pub headers: hyper::HeaderMap,
    pub body: Vec<u8>,
}

/// A web server that tells what it was asked.
pub struct Origin {
    pub address: SocketAddr,
    pub seen: Arc<Mutex<Vec<Seen>>>,
    _task: tokio_util::task::AbortOnDropHandle<()>,
}

impl Origin {
    pub fn port(&self) -> u16 {
        self.address.port()
    }
    pub fn requests(&self) -> Vec<Seen> {
        self.seen.lock().unwrap().clone()
    }
}

pub type Handler = Arc<
    dyn Fn(Request<Vec<u8>>) -> futures::future::BoxFuture<'static, Response<Full<bytes::Bytes>>>
        + Send
        + Sync,
>;

/// Answers `hello PATH`.
pub fn hello() -> Handler {
    Arc::new(|request| {
        let text = format!("hello {}", request.uri().path());
        Box::pin(async move { Response::new(Full::new(text.into())) })
    })
}

pub async fn origin(tls: Option<TlsAcceptor>, listener: TcpListener, handler: Handler) -> Origin {
    let address = listener.local_addr().unwrap();
    let seen = Arc::new(Mutex::new(Vec::new()));
    let log = seen.clone();
    let task = tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let (tls, log, handler) = (tls.clone(), log.clone(), handler.clone());
            tokio::spawn(async move {
                let service = service_fn(move |request: Request<Incoming>| {
                    let (log, handler) = (log.clone(), handler.clone());
                    async move {
                        let (head, body) = request.into_parts();
                        let body = body.collect().await.map(|b| b.to_bytes().to_vec()).unwrap_or_default();
                        log.lock().unwrap().push(Seen {
                            method: head.method.to_string(),
                            path: head.uri.to_string(),
                            headers: head.headers.clone(),
                            body: body.clone(),
                        });
                        Ok::<_, Infallible>(handler(Request::from_parts(head, body)).await)
                    }
                });
                let server = hyper::server::conn::http1::Builder::new();
                let _ = match tls {
                    None => server.serve_connection(TokioIo::new(stream), service).await,
                    Some(tls) => match tls.accept(stream).await {
                        Ok(stream) => server.serve_connection(TokioIo::new(stream), service).await,
                        Err(_) => return,
                    },
                };
            });
        }
    });
    Origin { address, seen, _task: tokio_util::task::AbortOnDropHandle::new(task) }
}

/// Answers in turn, the last one for ever.
#[derive(Default)]
pub struct Names {
    answers: Mutex<HashMap<String, Vec<Vec<IpAddr>>>>,
    pub asked: Mutex<Vec<String>>,
}

impl Names {
    pub fn set(&self, name: &str, answers: &[&[&str]]) {
        let answers = answers.iter().map(|a| a.iter().map(|ip| ip.parse().unwrap()).collect()).collect();
        self.answers.lock().unwrap().insert(name.to_string(), answers);
    }
}

#[async_trait]
impl Resolver for Names {
    async fn resolve(&self, name: &str) -> io::Result<Vec<IpAddr>> {
        self.asked.lock().unwrap().push(name.to_string());
        let mut answers = self.answers.lock().unwrap();
        let list = answers.get_mut(name).ok_or_else(|| io::Error::other("no such name"))?;
        Ok(if list.len() > 1 { list.remove(0) } else { list[0].clone() })
    }
}

pub struct Net {
    pub world: World,
    pub names: Arc<Names>,
    pub proxy: EgressProxy,
    pub decisions: Arc<Mutex<Vec<EgressDecision>>>,
    pub state: tempfile::TempDir,
    /// Sandboxes that were made: each has a name of its own, and counters of its own.
    made: std::sync::atomic::AtomicU32,
}

impl Net {
    pub fn new() -> Net {
        Net::with(|_| {})
    }

    pub fn with(change: impl FnOnce(&mut EgressConfig)) -> Net {
        let world = World::new();
        let state = tempfile::tempdir().unwrap();
        let names = Arc::new(Names::default());
        let decisions = Arc::new(Mutex::new(Vec::new()));
        let sink = decisions.clone();
        let mut config = EgressConfig {
            authority: Arc::new(CertAuthority::open(state.path()).unwrap()),
            upstream_tls: UpstreamTls::only(std::slice::from_ref(&world.root)).unwrap(),
            resolver: names.clone(),
            internal: None,
            secrets: Default::default(),
            on_decision: Arc::new(move |d| sink.lock().unwrap().push(d)),
            traffic: None,
            limits: EgressLimits::default(),
        };
        change(&mut config);
        Net { world, names, proxy: EgressProxy::new(config), decisions, state, made: Default::default() }
    }

    pub fn internal(route: InternalRoute) -> Net {
        Net::with(|config| config.internal = Some(route))
    }

    /// A TLS server with a certificate for `name`, which resolves to it.
    pub async fn https(&self, name: &str) -> Origin {
        self.https_with(name, hello()).await
    }
    pub async fn https_with(&self, name: &str, handler: Handler) -> Origin {
        self.names.set(name, &[&["127.0.0.1"]]);
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        origin(Some(self.world.acceptor(name)), listener, handler).await
    }
    pub async fn http(&self, name: &str) -> Origin {
        self.names.set(name, &[&["127.0.0.1"]]);
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        origin(None, listener, hello()).await
    }

    pub async fn sandbox(&self, spec: NetworkSpec) -> Inside {
        self.sandbox_limited(spec, None).await
    }

    pub async fn sandbox_limited(&self, spec: NetworkSpec, bytes_per_s: Option<u64>) -> Inside {
        let listener = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let proxy = listener.local_addr().unwrap();
        let number = self.made.fetch_add(1, std::sync::atomic::Ordering::Relaxed) + 1;
        let id = SandboxId::new(format!("s{number}")).unwrap();
        let serving = self.proxy.listen(&id, &spec, bytes_per_s, EgressListener::Tcp(listener)).unwrap();
        let ca = self.proxy.authority().certificate().clone();
        Inside { id, proxy, serving, trusted: vec![ca, self.world.root.clone()] }
    }

    /// `NAME:PORT` entries as given, and loopback opened for those ports.
    pub fn allow(&self, entries: &[(&str, &Origin)]) -> NetworkSpec {
        let mut allow = Vec::new();
        for (entry, origin) in entries {
            let (name, access) = entry.split_once(':').map_or((*entry, ""), |(n, a)| (n, a));
            let access = if access.is_empty() { String::new() } else { format!(":{access}") };
            allow.push(format!("{name}:{}{access}", origin.port()));
            allow.push(format!("127.0.0.1:{}:ro", origin.port()));
        }
        NetworkSpec { mode: NetworkMode::Isolated, allow, ..Default::default() }
    }

    /// What was recorded for a host.
    pub fn reasons(&self, host: &str) -> Vec<Reason> {
        self.decisions.lock().unwrap().iter().filter(|d| d.host == host).map(|d| d.reason).collect()
    }
}

/// What a program inside can do: reach the proxy, and trust what it is told to.
pub struct Inside {
    pub id: SandboxId,
    pub proxy: SocketAddr,
    pub serving: Serving,
    trusted: Vec<CertificateDer<'static>>,
}

impl Inside {
    pub async fn raw(&self) -> TcpStream {
        TcpStream::connect(self.proxy).await.unwrap()
    }

    /// Sends bytes as they are, and reads to the end.
    pub async fn say(&self, text: impl AsRef<[u8]>) -> String {
        say(self.raw().await, text).await
    }

    /// The status of a CONNECT, and the stream behind it.
    pub async fn connect(&self, authority: &str) -> (u16, TcpStream) {
        let mut stream = self.raw().await;
        let text = format!("CONNECT {authority} HTTP/1.1\r\nHost: {authority}\r\n\r\n");
        stream.write_all(text.as_bytes()).await.unwrap();
        let head = read_head(&mut stream).await;
        (status(&head), stream)
    }

    pub async fn connect_status(&self, authority: &str) -> u16 {
        self.connect(authority).await.0
    }

    /// TLS through CONNECT, naming `sni`.
    pub async fn tls(&self, authority: &str, sni: &str) -> io::Result<TlsStream<TcpStream>> {
        let (status, stream) = self.connect(authority).await;
        assert_eq!(status, 200, "CONNECT {authority}");
        self.tls_over(stream, sni).await
    }

    pub async fn tls_over(&self, stream: TcpStream, sni: &str) -> io::Result<TlsStream<TcpStream>> {
        let mut roots = rustls::RootCertStore::empty();
        for root in &self.trusted {
            roots.add(root.clone()).unwrap();
        }
        let config = rustls::ClientConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        let name = ServerName::try_from(sni.to_string()).unwrap();
        TlsConnector::from(Arc::new(config)).connect(name, stream).await
    }

    /// One HTTPS request; the whole answer as text.
    pub async fn https(&self, authority: &str, request: &str) -> String {
        let host = authority.rsplit_once(':').unwrap().0;
        let stream = self.tls(authority, host).await.unwrap();
        say(stream, request).await
    }

    /// A SOCKS5 request by name: the reply code, and the stream behind it.
    pub async fn socks(&self, host: &str, port: u16) -> (u8, TcpStream) {
        let mut request = vec![5, 1, 0, 3, host.len() as u8];
        request.extend_from_slice(host.as_bytes());
        request.extend_from_slice(&port.to_be_bytes());
        self.socks_raw(&request).await
    }

    pub async fn socks_raw(&self, request: &[u8]) -> (u8, TcpStream) {
        let mut stream = self.raw().await;
        stream.write_all(&[5, 1, 0]).await.unwrap();
        let mut method = [0; 2];
        stream.read_exact(&mut method).await.unwrap();
        assert_eq!(method, [5, 0]);
        stream.write_all(request).await.unwrap();
        let mut reply = [0; 10];
        stream.read_exact(&mut reply).await.unwrap();
        (reply[1], stream)
    }
}

pub async fn say(
    mut stream: impl tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin,
    text: impl AsRef<[u8]>,
) -> String {
    // The other side may refuse before it has read everything.
    let _ = stream.write_all(text.as_ref()).await;
    let _ = stream.flush().await;
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer).await;
    String::from_utf8_lossy(&answer).into_owned()
}

pub async fn read_head(stream: &mut TcpStream) -> String {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        match stream.read_u8().await {
            Ok(byte) => head.push(byte),
            Err(_) => break,
        }
    }
    String::from_utf8(head).unwrap()
}

pub fn status(answer: &str) -> u16 {
    answer.split(' ').nth(1).and_then(|s| s.parse().ok()).unwrap_or(0)
}
