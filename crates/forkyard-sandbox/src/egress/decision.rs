//! What the proxy decided, as a recorded fact.

use forkyard_core::SandboxId;
use serde::{Deserialize, Serialize};

use super::address::Closed;

/// One judgement over one connection or request (or several equal ones, see `count`).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EgressDecision {
    pub sandbox: SandboxId,
    /// As the sandbox wrote it, at most [`MAX_HOST_SHOWN`] characters, control characters replaced.
    pub host: String,
    /// 0: what was asked for has none, or this stands for many.
    pub port: u16,
    pub decision: Decision,
    pub reason: Reason,
    pub layer: Layer,
    /// For people: what was refused and what would allow it. Carries no header, body, path or query.
    pub detail: String,
    /// How many equal decisions this record stands for. The first is reported at once, repeats together: a loop inside a
    /// sandbox can't flood the journal.
    pub count: u64,
}

/// Longer names are cut: they are hostile, and no DNS name is longer.
pub const MAX_HOST_SHOWN: usize = 256;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Decision {
    Allowed,
    Denied,
    /// Allowed, but the other side could not be reached or trusted.
    Failed,
}

/// Which part of the proxy made the decision.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Layer {
    /// The network mode alone.
    Mode,
    AllowList,
    /// Resolved or literal address.
    Address,
    /// Names in the TLS handshake.
    Tls,
    /// Method, path, Host header.
    Http,
    /// The proxy protocol itself.
    Protocol,
    /// The other side.
    Upstream,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reason {
    /// Forkyard's own name.
    Internal,
    DefaultList,
    UserList,
    Secret,
    Bridge,

    /// Mode `none`.
    NoNetwork,
    NotListed,
    Port,
    BadHost,
    OddAddress,
    ClosedAddress,
    /// The name in the TLS handshake is missing or another than the one asked for.
    SniMismatch,
    /// Neither TLS nor HTTP where only these can be judged.
    NotTls,
    HostMismatch,
    /// A method, or a body, that a read-only host does not get.
    ReadOnly,
    /// `git push` to a read-only host.
    Push,
    Malformed,

    Unresolved,
    Unreachable,
    /// The other side's certificate is not trusted or the handshake failed.
    UpstreamTls,
    UpstreamHttp,
    /// Forkyard's own name has no service behind it now.
    InternalUnavailable,
}

impl Reason {
    pub fn layer(self) -> Layer {
        match self {
            Reason::Internal | Reason::Bridge | Reason::NoNetwork => Layer::Mode,
            Reason::DefaultList
            | Reason::UserList
            | Reason::Secret
            | Reason::NotListed
            | Reason::Port
            | Reason::BadHost => Layer::AllowList,
            Reason::OddAddress | Reason::ClosedAddress => Layer::Address,
            Reason::SniMismatch | Reason::NotTls => Layer::Tls,
            Reason::HostMismatch | Reason::ReadOnly | Reason::Push => Layer::Http,
            Reason::Malformed => Layer::Protocol,
            Reason::Unresolved
            | Reason::Unreachable
            | Reason::UpstreamTls
            | Reason::UpstreamHttp
            | Reason::InternalUnavailable => Layer::Upstream,
        }
    }

    pub fn decision(self) -> Decision {
        match self {
            Reason::Internal | Reason::DefaultList | Reason::UserList | Reason::Secret | Reason::Bridge => {
                Decision::Allowed
            }
            Reason::NoNetwork
            | Reason::NotListed
            | Reason::Port
            | Reason::BadHost
            | Reason::OddAddress
            | Reason::ClosedAddress
            | Reason::SniMismatch
            | Reason::NotTls
            | Reason::HostMismatch
            | Reason::ReadOnly
            | Reason::Push
            | Reason::Malformed => Decision::Denied,
            Reason::Unresolved
            | Reason::Unreachable
            | Reason::UpstreamTls
            | Reason::UpstreamHttp
            | Reason::InternalUnavailable => Decision::Failed,
        }
    }

    /// As in the record: `closed_address`.
    pub fn as_str(self) -> &'static str {
        match self {
            Reason::Internal => "internal",
            Reason::DefaultList => "default_list",
            Reason::UserList => "user_list",
            Reason::Secret => "secret",
            Reason::Bridge => "bridge",
            Reason::NoNetwork => "no_network",
            Reason::NotListed => "not_listed",
            Reason::Port => "port",
            Reason::BadHost => "bad_host",
            Reason::OddAddress => "odd_address",
            Reason::ClosedAddress => "closed_address",
            Reason::SniMismatch => "sni_mismatch",
            Reason::NotTls => "not_tls",
            Reason::HostMismatch => "host_mismatch",
            Reason::ReadOnly => "read_only",
            Reason::Push => "push",
            Reason::Malformed => "malformed",
            Reason::Unresolved => "unresolved",
            Reason::Unreachable => "unreachable",
            Reason::UpstreamTls => "upstream_tls",
            Reason::UpstreamHttp => "upstream_http",
            Reason::InternalUnavailable => "internal_unavailable",
        }
    }
}

/// Why something does not go through, with words for whoever reads the answer inside.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    pub reason: Reason,
    pub detail: String,
}

impl Refusal {
    pub fn new(reason: Reason, detail: impl Into<String>) -> Refusal {
        Refusal { reason, detail: detail.into() }
    }

    pub fn closed(host: &impl std::fmt::Display, address: std::net::IpAddr, why: Closed) -> Refusal {
        Refusal::new(
            Reason::ClosedAddress,
            format!(
                "{host} is {address}, a {} address; only naming that address in the allow list opens it",
                why.as_str()
            ),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_of_a_reason_is_its_recorded_form() {
        for reason in [Reason::ClosedAddress, Reason::DefaultList, Reason::InternalUnavailable, Reason::Push]
        {
            assert_eq!(serde_json::to_value(reason).unwrap(), reason.as_str());
        }
    }
}
