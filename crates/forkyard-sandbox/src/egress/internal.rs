//! `forkyard.internal`: the one name that every sandbox reaches in every network mode.

use std::path::PathBuf;
use std::sync::Arc;

use async_trait::async_trait;
use forkyard_core::SandboxId;
use hyper::header::HeaderName;
use hyper::{Request, Response};

use super::host::Host;
use super::http::EgressBody;

/// Answered by Forkyard itself; no resolver is ever asked for it.
pub const INTERNAL_HOST: &str = "forkyard.internal";

/// Says on whose listener a request came in. The proxy sets it on requests to a socket and drops what the sandbox sent
/// under that name, so the other side may believe it.
pub const SANDBOX_HEADER: HeaderName = HeaderName::from_static("x-forkyard-sandbox");

/// What answers there. It must have only routes that are meant for sandboxes.
#[async_trait]
pub trait InternalService: Send + Sync {
    async fn call(&self, sandbox: &SandboxId, request: Request<EgressBody>) -> Response<EgressBody>;
}

#[derive(Clone)]
pub enum InternalRoute {
    Service(Arc<dyn InternalService>),
    /// HTTP/1.1 over a Unix socket, with [`SANDBOX_HEADER`] set.
    UnixSocket(PathBuf),
}

pub(super) fn is_internal(host: &Host) -> bool {
    matches!(host, Host::Name(name) if name == INTERNAL_HOST)
}
