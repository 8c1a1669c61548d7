//! Resolve, judge, connect: in that order, once per connection, to the very addresses that were judged.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tokio::net::TcpStream;
use tokio::sync::Semaphore;

use super::address::{self, Range};
use super::decision::{Reason, Refusal};
use super::host::Host;
use super::resolve::{MAX_ADDRESSES, Resolver};

/// The host's interfaces change rarely; a new address is closed after at most this long.
const HOST_ADDRESSES_TTL: Duration = Duration::from_secs(5);

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Target {
    pub host: Host,
    pub port: u16,
}

impl std::fmt::Display for Target {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}:{}", self.host.in_uri(), self.port)
    }
}

/// The addresses that a name stood for when it was judged. Never empty; a reconnect uses these and asks no resolver again.
#[derive(Debug, Clone)]
pub struct Pinned(Vec<SocketAddr>);

/// The host's own addresses, remembered for a moment.
#[derive(Default)]
pub struct HostAddresses(Mutex<Option<(Instant, Vec<IpAddr>)>>);

impl HostAddresses {
    fn get(&self) -> Result<Vec<IpAddr>, Refusal> {
        // A panic while it was held leaves a whole list.
        let mut known = self.0.lock().unwrap_or_else(|e| e.into_inner());
        match &*known {
            Some((at, addresses)) if at.elapsed() < HOST_ADDRESSES_TTL => Ok(addresses.clone()),
            Some(_) | None => {
                // Without knowing the host's addresses nothing can be called foreign.
                let fresh = address::host_addresses().map_err(|e| {
                    Refusal::new(Reason::Unreachable, format!("can't read the host's own addresses: {e}"))
                })?;
                *known = Some((Instant::now(), fresh.clone()));
                Ok(fresh)
            }
        }
    }
}

/// Resolves and judges. Of several addresses the closed ones are left out; if none is left, that is the refusal.
pub async fn pin(
    target: &Target,
    named: &[Range],
    host_addresses: &HostAddresses,
    resolver: &Arc<dyn Resolver>,
    turns: &Arc<Semaphore>,
    timeout: Duration,
) -> Result<Pinned, Refusal> {
    let addresses = match &target.host {
        Host::Address(address) => vec![*address],
        Host::Name(name) => {
            let unresolved = |why: String| Refusal::new(Reason::Unresolved, format!("{name}: {why}"));
            let answer = tokio::time::timeout(timeout, look_up(name, resolver, turns))
                .await
                .map_err(|_| unresolved("the host's resolver did not answer in time".into()))?;
            let mut addresses = answer.map_err(|e| unresolved(e.to_string()))?;
            addresses.truncate(MAX_ADDRESSES);
            if addresses.is_empty() {
                return Err(unresolved("the name has no address".into()));
            }
            addresses
        }
    };
    let own = host_addresses.get()?;
    let mut open = Vec::new();
    let mut refusal = None;
    for address in addresses {
        match address::judge(address, named, &own) {
            Ok(()) => open.push(SocketAddr::new(address, target.port)),
            Err(why) => refusal = Some(Refusal::closed(&target.host, address, why)),
        }
    }
    match refusal {
        Some(refusal) if open.is_empty() => Err(refusal),
        Some(_) | None => Ok(Pinned(open)),
    }
}

/// A lookup keeps its turn until its end, which may come long after anybody waits for it: it holds a thread until then.
async fn look_up(
    name: &str,
    resolver: &Arc<dyn Resolver>,
    turns: &Arc<Semaphore>,
) -> io::Result<Vec<IpAddr>> {
    let turn = turns.clone().acquire_owned().await.map_err(io::Error::other)?;
    let (resolver, name) = (resolver.clone(), name.to_string());
    let lookup = tokio::spawn(async move {
        let _turn = turn;
        resolver.resolve(&name).await
    });
    lookup.await.map_err(io::Error::other)?
}

/// The first of the pinned addresses that answers.
pub async fn connect(target: &Target, pinned: &Pinned, timeout: Duration) -> Result<TcpStream, Refusal> {
    let attempt = async {
        let mut last = None;
        for (i, address) in pinned.0.iter().enumerate() {
            // A silent address must not use up the time of those after it.
            let share = timeout / u32::try_from(pinned.0.len() - i).unwrap_or(u32::MAX).min(4);
            match tokio::time::timeout(share, TcpStream::connect(address)).await {
                Ok(Ok(stream)) => return Ok(stream),
                Ok(Err(e)) => last = Some(e.to_string()),
                Err(_) => last = Some("no answer".to_string()),
            }
        }
        Err(last.unwrap_or_default())
    };
    let stream = tokio::time::timeout(timeout, attempt)
        .await
        .unwrap_or_else(|_| Err("no answer in time".into()))
        .map_err(|why| Refusal::new(Reason::Unreachable, format!("can't connect to {target}: {why}")))?;
    // Only a hint to the kernel.
    let _ = stream.set_nodelay(true);
    Ok(stream)
}
