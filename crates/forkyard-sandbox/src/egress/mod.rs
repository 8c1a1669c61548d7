//! Egress: the only way out of a sandbox.
//!
//! Inside there is loopback alone. A listener in there ([`crate::PROXY_ADDRESS`]) is accepted from on the host, by this proxy:
//! HTTP proxy requests, CONNECT and SOCKS5 on one port. Invariants:
//! - Nothing is resolved or connected to that the sandbox's rules do not allow ([`policy`]), and no name opens a closed
//!   address ([`address`]).
//! - What was resolved and judged is what is connected to.
//! - A read-only host gets nothing written, also by another spelling: TLS ends here, Host equals SNI equals the host that was
//!   asked for.
//! - A secret is put in here, over TLS, for the hosts, methods and paths it is bound to, and never enters a sandbox.
//! - Every decision is recorded.
//! - `forkyard.internal` leads to a service that is given to the proxy and to nothing else.

pub mod address;
mod ca;
mod connection;
mod decision;
mod dial;
pub mod host;
mod http;
pub mod inside;
mod internal;
mod log;
mod meter;
pub mod policy;
mod proxy;
mod record;
mod resolve;
mod socks;
mod stream;
mod tls;
mod traffic;
mod upstream;

pub use ca::CertAuthority;
pub use decision::{Decision, EgressDecision, Layer, Reason, Refusal};
pub use http::{EgressBody, egress_body};
pub use internal::{INTERNAL_HOST, InternalRoute, InternalService, SANDBOX_HEADER};
pub use log::{DecisionLog, Recorded};
pub use policy::default_hosts;
pub use proxy::{EgressConfig, EgressLimits, EgressListener, EgressProxy, Serving};
pub use record::DecisionSink;
pub use resolve::{Resolver, SystemResolver};
pub use tls::UpstreamTls;
pub use traffic::TrafficLog;
