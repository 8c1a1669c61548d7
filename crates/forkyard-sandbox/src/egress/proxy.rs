//! The proxy of one process: any number of sandboxes' listeners, each with its own rules, meter and records.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use forkyard_core::{SandboxId, Timestamp};
use rustls::{ClientConfig, ServerConfig};
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio_util::task::AbortOnDropHandle;

use super::ca::CertAuthority;
use super::connection::Connection;
use super::decision::Refusal;
use super::dial::{self, HostAddresses, Pinned, Target};
use super::host::Host;
use super::inside;
use super::internal::InternalRoute;
use super::meter::{Activity, Counters, Meter, Metered};
use super::policy::Policy;
use super::record::{DecisionSink, Recorder, WINDOW};
use super::resolve::{Resolver, SystemResolver};
use super::tls::UpstreamTls;
use super::traffic::TrafficLog;
use crate::{
    EgressCounters, EgressFactory, EgressHandle, ErrorKind, InsideFile, NetworkSpec, SandboxError, Secret,
};

/// After an accept failed (no descriptors left), before the next try.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Lookups of one sandbox under way: a slow name must not hold every resolver thread.
const LOOKUPS_PER_SANDBOX: usize = 4;

/// Bounds of what one sandbox can make the proxy do.
#[derive(Debug, Clone)]
pub struct EgressLimits {
    /// Open at once; further ones wait in the listener's backlog. A parallel package manager opens about 50.
    pub connections_per_sandbox: usize,
    /// Of all sandboxes: two descriptors each.
    pub connections: usize,
    /// For a request's head, a SOCKS5 or a TLS handshake.
    pub head_timeout: Duration,
    pub max_head_bytes: usize,
    /// To resolve, and to connect.
    pub connect_timeout: Duration,
    /// Without a byte in either direction.
    pub idle_timeout: Duration,
    /// The same for Forkyard's own name, where an answer may think for long.
    pub internal_idle_timeout: Duration,
}

impl Default for EgressLimits {
    fn default() -> Self {
        EgressLimits {
            connections_per_sandbox: 128,
            connections: 8192,
            head_timeout: Duration::from_secs(15),
            max_head_bytes: 64 * 1024,
            connect_timeout: Duration::from_secs(10),
            idle_timeout: Duration::from_secs(300),
            internal_idle_timeout: Duration::from_secs(1800),
        }
    }
}

/// What a proxy is made of.
pub struct EgressConfig {
    pub authority: Arc<CertAuthority>,
    pub upstream_tls: UpstreamTls,
    pub resolver: Arc<dyn Resolver>,
    pub internal: Option<InternalRoute>,
    /// By name: those that a sandbox's specification may name.
    pub secrets: BTreeMap<String, Secret>,
    pub on_decision: DecisionSink,
    /// Without one, a proxy counts for itself alone.
    pub traffic: Option<TrafficLog>,
    pub limits: EgressLimits,
}

impl EgressConfig {
    /// The host's resolver and roots, and the authority kept in `state_dir`.
    pub fn for_host(state_dir: &Path, on_decision: DecisionSink) -> Result<EgressConfig, SandboxError> {
        Ok(EgressConfig {
            authority: Arc::new(CertAuthority::open(state_dir)?),
            upstream_tls: UpstreamTls::from_host(&[])?,
            resolver: Arc::new(SystemResolver::default()),
            internal: None,
            secrets: BTreeMap::new(),
            on_decision,
            traffic: None,
            limits: EgressLimits::default(),
        })
    }
}

struct Shared {
    config: EgressConfig,
    connections: Arc<Semaphore>,
    host_addresses: HostAddresses,
    /// Of the sandboxes that are served: all proxies of one count together.
    counters: Mutex<BTreeMap<SandboxId, Weak<Counters>>>,
}

impl Shared {
    fn counted(&self) -> MutexGuard<'_, BTreeMap<SandboxId, Weak<Counters>>> {
        // A panic while it was held leaves a whole map.
        self.counters.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn unknown_secret<'a>(&self, spec: &'a NetworkSpec) -> Option<&'a String> {
        spec.secrets.iter().find(|name| !self.config.secrets.contains_key(*name))
    }

    fn counters(&self, sandbox: &SandboxId) -> Arc<Counters> {
        let mut counted = self.counted();
        if let Some(counters) = counted.get(sandbox).and_then(Weak::upgrade) {
            return counters;
        }
        counted.retain(|_, counters| counters.strong_count() > 0);
        let counters = Arc::default();
        counted.insert(sandbox.clone(), Arc::downgrade(&counters));
        counters
    }
}

#[derive(Clone)]
pub struct EgressProxy {
    shared: Arc<Shared>,
}

/// A sandbox's listening socket, made inside (or mounted there) and accepted from on the host.
pub enum EgressListener {
    Tcp(std::net::TcpListener),
    Unix(std::os::unix::net::UnixListener),
}

/// One sandbox's share of the proxy. Dropping it closes our end of the listener and every connection.
pub struct Serving {
    site: Arc<Site>,
    _accepting: AbortOnDropHandle<()>,
}

impl EgressHandle for Serving {
    fn counters(&self) -> EgressCounters {
        self.site.meter.counters.all()
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        self.site.note_traffic();
    }
}

impl EgressFactory for EgressProxy {
    fn files(&self) -> Vec<InsideFile> {
        inside::files(inside::host_bundle(), self.authority().certificate_pem())
    }

    fn env(&self, _sandbox: &SandboxId, _spec: &NetworkSpec) -> BTreeMap<String, String> {
        inside::environment().into_iter().map(|(name, value)| (name.to_string(), value)).collect()
    }

    fn check(&self, spec: &NetworkSpec) -> Result<(), SandboxError> {
        self.shared.unknown_secret(spec).map_or(Ok(()), |name| {
            let message = format!("there is no secret {name:?} here");
            Err(SandboxError::new(ErrorKind::Invalid, message)
                .hint(format!("write a table [secrets.{name}] into config.toml")))
        })
    }

    fn serve(
        &self,
        sandbox: &SandboxId,
        spec: &NetworkSpec,
        bytes_per_s: Option<u64>,
        listener: std::net::TcpListener,
    ) -> Result<Box<dyn EgressHandle>, SandboxError> {
        Ok(Box::new(self.listen(sandbox, spec, bytes_per_s, EgressListener::Tcp(listener))?))
    }

    fn counters(&self, sandbox: &SandboxId, since: Timestamp) -> Option<EgressCounters> {
        let here = self.shared.counted().get(sandbox).and_then(Weak::upgrade);
        let Some(traffic) = &self.shared.config.traffic else { return here.map(|here| here.all()) };
        let (mut all, fresh) = (traffic.since(sandbox, since), here.map(|here| here.fresh()));
        all.rx_bytes += fresh.unwrap_or_default().rx_bytes;
        all.tx_bytes += fresh.unwrap_or_default().tx_bytes;
        Some(all)
    }
}

/// What the connections of one sandbox share.
pub(super) struct Site {
    pub id: SandboxId,
    pub policy: Policy,
    pub recorder: Recorder,
    meter: Arc<Meter>,
    lookups: Arc<Semaphore>,
    shared: Arc<Shared>,
}

impl Site {
    fn note_traffic(&self) {
        if let Some(traffic) = &self.shared.config.traffic {
            self.meter.counters.note(|fresh| traffic.add(&self.id, fresh));
        }
    }

    pub fn limits(&self) -> &EgressLimits {
        &self.shared.config.limits
    }
    pub fn internal(&self) -> Option<&InternalRoute> {
        self.shared.config.internal.as_ref()
    }
    pub fn upstream_tls(&self) -> Arc<ClientConfig> {
        self.shared.config.upstream_tls.config()
    }
    pub fn server_config(&self, host: &Host) -> Result<Arc<ServerConfig>, SandboxError> {
        self.shared.config.authority.server_config(host)
    }
    pub async fn pin(&self, target: &Target) -> Result<Pinned, Refusal> {
        let config = &self.shared.config;
        let timeout = config.limits.connect_timeout;
        let named = self.policy.named_ranges(target.port);
        let addresses = &self.shared.host_addresses;
        dial::pin(target, &named, addresses, &config.resolver, &self.lookups, timeout).await
    }
}

enum Listener {
    Tcp(TcpListener),
    Unix(UnixListener),
}

impl EgressProxy {
    pub fn new(config: EgressConfig) -> EgressProxy {
        let connections = Arc::new(Semaphore::new(config.limits.connections));
        EgressProxy {
            shared: Arc::new(Shared {
                config,
                connections,
                host_addresses: HostAddresses::default(),
                counters: Mutex::default(),
            }),
        }
    }

    pub fn authority(&self) -> &CertAuthority {
        &self.shared.config.authority
    }

    /// Serves a sandbox's listener by its rules until the answer is dropped. Must be called within a Tokio runtime.
    pub fn listen(
        &self,
        sandbox: &SandboxId,
        spec: &NetworkSpec,
        bytes_per_s: Option<u64>,
        listener: EgressListener,
    ) -> Result<Serving, SandboxError> {
        let policy = Policy::new(spec, &self.shared.config.secrets)?;
        if let Some(name) = self.shared.unknown_secret(spec) {
            tracing::warn!(sandbox = %sandbox, "there is no secret {name:?} here: its requests go without");
        }
        let broken =
            |e: io::Error| SandboxError::new(ErrorKind::Unavailable, format!("egress listener: {e}"));
        let listener = match listener {
            EgressListener::Tcp(listener) => {
                listener.set_nonblocking(true).map_err(broken)?;
                Listener::Tcp(TcpListener::from_std(listener).map_err(broken)?)
            }
            EgressListener::Unix(listener) => {
                listener.set_nonblocking(true).map_err(broken)?;
                Listener::Unix(UnixListener::from_std(listener).map_err(broken)?)
            }
        };
        let meter = Arc::new(Meter::new(bytes_per_s, self.shared.counters(sandbox)));
        let site = Arc::new(Site {
            policy,
            recorder: Recorder::new(sandbox.clone(), self.shared.config.on_decision.clone()),
            id: sandbox.clone(),
            meter,
            lookups: Arc::new(Semaphore::new(LOOKUPS_PER_SANDBOX)),
            shared: self.shared.clone(),
        });
        let accepting = tokio::spawn(accept_all(Arc::clone(&site), listener));
        Ok(Serving { site, _accepting: AbortOnDropHandle::new(accepting) })
    }
}

async fn accept_all(site: Arc<Site>, listener: Listener) {
    let own = Arc::new(Semaphore::new(site.limits().connections_per_sandbox));
    // Dropped with this task: a stopped sandbox leaves no connection behind.
    let mut connections = JoinSet::new();
    let mut window = tokio::time::interval(WINDOW);
    loop {
        let accepted = async {
            // Before accepting: a sandbox at its bound waits in its own backlog.
            let own = own.clone().acquire_owned().await;
            let stream = match &listener {
                Listener::Tcp(listener) => listener.accept().await.map(|(stream, _)| {
                    // Only a hint to the kernel.
                    let _ = stream.set_nodelay(true);
                    Accepted::Tcp(stream)
                }),
                Listener::Unix(listener) => listener.accept().await.map(|(stream, _)| Accepted::Unix(stream)),
            };
            (stream, own)
        };
        tokio::select! {
            _ = window.tick() => {
                site.recorder.flush();
                site.note_traffic();
            }
            Some(_) = connections.join_next() => {}
            (stream, own) = accepted => match stream {
                Ok(stream) => {
                    let site = site.clone();
                    connections.spawn(async move {
                        let _own = own;
                        // Of all sandboxes together; an idle listener holds none.
                        let Ok(_all) = site.shared.connections.clone().acquire_owned().await else { return };
                        match stream {
                            Accepted::Tcp(stream) => serve_one(site, stream).await,
                            Accepted::Unix(stream) => serve_one(site, stream).await,
                        }
                    });
                }
                Err(e) => {
                    tracing::warn!(sandbox = %site.id, error = %e, "egress accept");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    }
}

enum Accepted {
    Tcp(tokio::net::TcpStream),
    Unix(tokio::net::UnixStream),
}

async fn serve_one<S: super::connection::Stream>(site: Arc<Site>, stream: S) {
    let activity = Arc::new(Activity::new(site.limits().idle_timeout));
    let stream = Metered::new(stream, site.meter.clone(), activity.clone());
    let id = site.id.clone();
    let connection = Connection { site, activity: activity.clone() };
    tokio::select! {
        served = connection.serve(stream) => if let Err(e) = served {
            // Whatever mattered was recorded; a reset connection is nobody's concern.
            tracing::trace!(sandbox = %id, error = %e, "egress connection");
        },
        () = activity.idled() => tracing::debug!(sandbox = %id, "idle egress connection closed"),
    }
}
