//! Names to addresses, on the host. Only names that were allowed are ever asked for, so a lookup can't carry data out.

use std::io;
use std::net::{IpAddr, ToSocketAddrs};
use std::sync::Arc;

use async_trait::async_trait;
use tokio::sync::Semaphore;

/// Lookups under way for all sandboxes together: each holds a thread until the system's resolver gives up.
const MAX_LOOKUPS: usize = 32;
/// Addresses of one answer that are tried; more are dropped.
pub const MAX_ADDRESSES: usize = 16;

#[async_trait]
pub trait Resolver: Send + Sync {
    async fn resolve(&self, name: &str) -> io::Result<Vec<IpAddr>>;
}

/// The host's own resolver: /etc/hosts, nsswitch and all.
pub struct SystemResolver {
    lookups: Arc<Semaphore>,
}

impl Default for SystemResolver {
    fn default() -> Self {
        SystemResolver { lookups: Arc::new(Semaphore::new(MAX_LOOKUPS)) }
    }
}

#[async_trait]
impl Resolver for SystemResolver {
    async fn resolve(&self, name: &str) -> io::Result<Vec<IpAddr>> {
        let permit = self.lookups.clone().acquire_owned().await.map_err(io::Error::other)?;
        let name = name.to_string();
        tokio::task::spawn_blocking(move || {
            // Held here, not by the caller: a lookup that nobody waits for any more still holds its thread.
            let _permit = permit;
            let addresses = (name.as_str(), 0).to_socket_addrs()?;
            Ok(addresses.map(|a| a.ip()).take(MAX_ADDRESSES).collect())
        })
        .await
        .map_err(io::Error::other)?
    }
}
