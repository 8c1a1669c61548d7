//! Where a provider meets the egress proxy.
//!
//! A sandbox has loopback only. The guest listens on [`PROXY_ADDRESS`] inside; the local provider gets that very listening
//! socket out of the sandbox and hands it to an [`EgressFactory`], whose proxy accepts on it on the host. A provider that
//! can't pass descriptors gives the factory a listener of its own and forwards to it.

use std::collections::BTreeMap;
use std::net::TcpListener;
use std::path::PathBuf;

use bytes::Bytes;
use forkyard_core::{SandboxId, Timestamp};
use serde::{Deserialize, Serialize};

use crate::{NetworkSpec, Result};

/// Where commands find the proxy, inside every sandbox whose network mode is not `none`: HTTP CONNECT, plain HTTP and SOCKS5.
pub const PROXY_ADDRESS: std::net::SocketAddrV4 =
    std::net::SocketAddrV4::new(std::net::Ipv4Addr::LOCALHOST, 3128);

/// Makes one proxy per sandbox.
pub trait EgressFactory: Send + Sync {
    /// Read-only files that every sandbox of this provider sees (CA bundle, tool settings). Asked once, when a provider starts.
    fn files(&self) -> Vec<InsideFile>;

    /// Variables that commands of this sandbox get (`HTTPS_PROXY`, `SSL_CERT_FILE` …); the sandbox's own `env` wins over them.
    fn env(&self, sandbox: &SandboxId, spec: &NetworkSpec) -> BTreeMap<String, String>;

    /// Before a sandbox is made: a secret that nobody here has is [`crate::ErrorKind::Invalid`]. Once it is there it is served
    /// without, or nobody could get at its files any more.
    fn check(&self, _spec: &NetworkSpec) -> Result<()> {
        Ok(())
    }

    /// Serves until the handle is dropped. Called once per create or attach, inside a tokio runtime, with a listener that is
    /// set to non-blocking. A wrong allow-list is [`crate::ErrorKind::Invalid`].
    fn serve(
        &self,
        sandbox: &SandboxId,
        spec: &NetworkSpec,
        bytes_per_s: Option<u64>,
        listener: TcpListener,
    ) -> Result<Box<dyn EgressHandle>>;

    /// What has passed the proxies of a sandbox that was made at that time; None if that is not known here.
    fn counters(&self, _sandbox: &SandboxId, _since: Timestamp) -> Option<EgressCounters> {
        None
    }
}

/// A running proxy. Dropping it ends its connections; the listener inside stays, for the next owner.
pub trait EgressHandle: Send + Sync {
    fn counters(&self) -> EgressCounters;
}

/// Bytes that passed the proxy, seen from the sandbox.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EgressCounters {
    pub rx_bytes: u64,
    pub tx_bytes: u64,
}

/// A file for the skeleton, by its absolute path inside.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InsideFile {
    pub path: String,
    /// A file of the host that it begins with. It is large, so that it is read only when the skeleton is made.
    pub begins_with: Option<PathBuf>,
    pub data: Bytes,
    pub mode: u32,
}

impl InsideFile {
    /// All of it.
    pub fn content(&self) -> std::io::Result<Bytes> {
        let Some(host) = &self.begins_with else { return Ok(self.data.clone()) };
        let mut content = std::fs::read(host)?;
        if content.last().is_some_and(|last| *last != b'\n') {
            content.push(b'\n');
        }
        content.extend_from_slice(&self.data);
        Ok(content.into())
    }
}
