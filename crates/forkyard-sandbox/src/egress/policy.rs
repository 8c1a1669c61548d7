//! Who may be talked to and how: a pure judgement over one sandbox's network specification.
//!
//! | host is named by | access | over TLS |
//! |---|---|---|
//! | the default list | read-only | terminated |
//! | the user, `host:ro` | read-only | terminated |
//! | the user, `host` | open | tunnelled with an SNI check; terminated if a secret is bound to it |
//! | a secret alone | read-only, plus what the secret's methods and paths match | terminated |
//! | nobody, mode `bridge` | open | tunnelled |
//! | nobody else | refused | |
//!
//! Where several name a host, the user's widest word wins over a narrower one, and any word of the user's over the default.

use std::collections::BTreeMap;
use std::sync::Arc;

use hyper::header::{HeaderName, HeaderValue};

use super::address::Range;
use super::decision::{Reason, Refusal};
use super::host::{BadHost, Host};
use crate::{ErrorKind, NetworkMode, NetworkSpec, SandboxError, Secret};

/// Ports of an allow-list entry that names none.
pub const DEFAULT_PORTS: [u16; 2] = [80, 443];
const HTTPS_PORT: u16 = 443;
/// Entries and secrets per sandbox; judged linearly for every request.
pub const MAX_RULES: usize = 1024;

/// The default list, as entries; `config` shows it.
pub fn default_hosts() -> impl Iterator<Item = &'static str> {
    include_str!("default_hosts.txt").lines().map(str::trim).filter(|l| !l.is_empty() && !l.starts_with('#'))
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Pattern {
    Exact(Host),
    /// Every name below, with its leading dot: `.example.com`.
    Below(String),
    Range(Range),
}

/// One entry of an allow list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rule {
    pattern: Pattern,
    port: Option<u16>,
    read_only: bool,
}

impl Rule {
    /// `host`, `*.host`, an address or `address/prefix`; then `:port` and `:ro` if wanted.
    pub fn parse(entry: &str) -> Result<Rule, SandboxError> {
        let bad = |why: &str| {
            let shown: String = entry.chars().take(80).collect();
            SandboxError::new(ErrorKind::Invalid, format!("allow-list entry {shown:?}: {why}"))
                .hint("write host, *.host, host:port, host:ro, 10.0.0.1 or 10.0.0.0/24")
        };
        let (rest, read_only) = match entry.strip_suffix(":ro") {
            Some(rest) => (rest, true),
            None => (entry, false),
        };
        if rest.contains("://") {
            return Err(bad("only the host, without a scheme and a path"));
        }
        if rest == "*" {
            return Err(bad("everything is what network mode bridge is for"));
        }
        if let Some(below) = rest.strip_prefix("*.") {
            let (host, port) =
                Host::parse_with_port(below).map_err(|_| bad("what follows `*.` is not a name"))?;
            return match host {
                Host::Name(name) if name.contains('.') => {
                    Ok(Rule { pattern: Pattern::Below(format!(".{name}")), port, read_only })
                }
                Host::Name(_) => Err(bad("a wildcard below a top-level name is too wide")),
                Host::Address(_) => Err(bad("a wildcard needs a name; write a range as 10.0.0.0/24")),
            };
        }
        // Bare IPv6 has colons of its own, so addresses come before ports.
        if let Ok(range) = rest.parse::<Range>() {
            return Ok(Rule { pattern: Pattern::Range(range), port: None, read_only });
        }
        if let Some((range, port)) = rest.rsplit_once(':')
            && range.contains('/')
        {
            let range = range.parse().map_err(|()| bad("not an address range"))?;
            let port = port.parse().map_err(|_| bad("not a port"))?;
            return Ok(Rule { pattern: Pattern::Range(range), port: Some(port), read_only });
        }
        let (host, port) = Host::parse_with_port(rest).map_err(|e| match e {
            BadHost::Syntax => bad("not a host name"),
            BadHost::OddAddress => bad("write the address as four decimal numbers"),
        })?;
        let pattern = match host {
            Host::Address(address) => Pattern::Range(Range::single(address)),
            Host::Name(_) => Pattern::Exact(host),
        };
        Ok(Rule { pattern, port, read_only })
    }

    fn names(&self, host: &Host) -> bool {
        match (&self.pattern, host) {
            (Pattern::Exact(named), _) => named == host,
            (Pattern::Below(suffix), Host::Name(name)) => {
                name.len() > suffix.len() && name.ends_with(suffix.as_str())
            }
            (Pattern::Range(range), Host::Address(address)) => {
                range.contains(super::address::canonical(*address))
            }
            (Pattern::Below(_), Host::Address(_)) | (Pattern::Range(_), Host::Name(_)) => false,
        }
    }

    fn opens_port(&self, port: u16, default: &[u16]) -> bool {
        self.port.map_or_else(|| default.contains(&port), |p| p == port)
    }
}

/// A secret with its bounds checked and parsed.
pub struct BoundSecret {
    header: HeaderName,
    value: HeaderValue,
    rules: Vec<Rule>,
    methods: Vec<String>,
    path_prefixes: Vec<String>,
}

impl BoundSecret {
    fn parse(secret: &Secret) -> Result<BoundSecret, SandboxError> {
        let bad = |what: String| SandboxError::new(ErrorKind::Invalid, what);
        let header: HeaderName = secret
            .header
            .parse()
            .map_err(|_| bad(format!("secret: {:?} is not a header name", secret.header)))?;
        let mut value = HeaderValue::from_str(&secret.value).map_err(|_| {
            bad(format!("secret for header {header}: its value has characters that no header can hold"))
        })?;
        value.set_sensitive(true);
        if secret.hosts.is_empty() {
            return Err(bad(format!("secret for header {header}: it names no host"))
                .hint("a secret is put in only for the hosts it names"));
        }
        let rules = secret.hosts.iter().map(|h| Rule::parse(h)).collect::<Result<_, _>>()?;
        if let Some(prefix) = secret.path_prefixes.iter().find(|p| !p.starts_with('/')) {
            return Err(bad(format!(
                "secret for header {header}: path prefix {prefix:?} does not start with /"
            )));
        }
        let methods = secret.methods.iter().map(|m| m.to_ascii_uppercase()).collect();
        Ok(BoundSecret { header, value, rules, methods, path_prefixes: secret.path_prefixes.clone() })
    }

    fn bound_to(&self, host: &Host, port: u16) -> bool {
        self.rules.iter().any(|r| r.names(host) && r.opens_port(port, &[HTTPS_PORT]))
    }

    /// An empty list of methods or prefixes means all.
    fn matches(&self, method: &hyper::Method, path: &str) -> bool {
        let method_fits = self.methods.is_empty() || self.methods.iter().any(|m| m == method.as_str());
        let path_fits = self.path_prefixes.is_empty()
            || is_plain_path(path) && self.path_prefixes.iter().any(|p| path_below(path, p));
        method_fits && path_fits
    }

    /// Replaces whatever the sandbox sent under that name.
    pub fn put_in(&self, headers: &mut hyper::HeaderMap) {
        headers.insert(self.header.clone(), self.value.clone());
    }
}

/// Whole segments: `/a/b` is below `/a`, `/ab` is not.
fn path_below(path: &str, prefix: &str) -> bool {
    path.strip_prefix(prefix)
        .is_some_and(|rest| rest.is_empty() || prefix.ends_with('/') || rest.starts_with('/'))
}

/// A path that every server reads the same way: no dot segments, no encoded dots, slashes or percent signs, no backslash.
fn is_plain_path(path: &str) -> bool {
    let lower = path.to_ascii_lowercase();
    !["%2e", "%2f", "%5c", "%25", "%00", "\\", "//"].iter().any(|odd| lower.contains(odd))
        && !lower.split(['/', ';']).any(|segment| segment == "." || segment == "..")
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    Open,
    ReadOnly,
}

/// Leave to talk to one host and port, and on which terms.
#[derive(Clone)]
pub struct Grant {
    pub access: Access,
    /// Which list gave it.
    pub reason: Reason,
    pub secrets: Vec<Arc<BoundSecret>>,
}

impl Grant {
    /// TLS ends at the proxy: requests have to be seen to be judged or completed.
    pub fn terminated(&self) -> bool {
        self.access == Access::ReadOnly || !self.secrets.is_empty()
    }

    /// Judges one request and answers with the secrets to put in. A secret never goes over plain HTTP.
    pub fn judge(&self, request: &RequestFacts<'_>) -> Result<Vec<Arc<BoundSecret>>, Refusal> {
        if request.method == hyper::Method::TRACE || request.method == hyper::Method::CONNECT {
            // TRACE would hand a secret back; CONNECT would leave the judged host.
            return Err(Refusal::new(Reason::ReadOnly, format!("{} is never passed on", request.method)));
        }
        let secrets: Vec<_> = self
            .secrets
            .iter()
            .filter(|s| request.tls && s.matches(request.method, request.path))
            .cloned()
            .collect();
        if self.access == Access::Open || !secrets.is_empty() {
            return Ok(secrets);
        }
        read_only(request).map(|()| secrets)
    }
}

/// What of a request counts.
pub struct RequestFacts<'a> {
    pub method: &'a hyper::Method,
    pub path: &'a str,
    pub query: Option<&'a str>,
    pub content_type: Option<&'a [u8]>,
    pub has_body: bool,
    pub tls: bool,
}

/// Reading is GET and HEAD without a body, and git's fetch.
fn read_only(request: &RequestFacts<'_>) -> Result<(), Refusal> {
    let pushes = |text: &str| text.contains("git-receive-pack");
    if pushes(request.path) || request.query.is_some_and(pushes) {
        return Err(Refusal::new(
            Reason::Push,
            "git push is not allowed: the host is read-only; add it to the allow list without :ro to open it",
        ));
    }
    if request.method == hyper::Method::GET || request.method == hyper::Method::HEAD {
        if request.has_body {
            return Err(Refusal::new(
                Reason::ReadOnly,
                format!("{} with a body: the host is read-only", request.method),
            ));
        }
        return Ok(());
    }
    let fetch = request.method == hyper::Method::POST
        && request.path.ends_with("/git-upload-pack")
        && request.query.is_none()
        && is_plain_path(request.path)
        && request.content_type == Some(b"application/x-git-upload-pack-request");
    if fetch {
        return Ok(());
    }
    Err(Refusal::new(
        Reason::ReadOnly,
        format!(
            "{}: the host is read-only (GET, HEAD and git fetch); add it to the allow list without :ro to open it",
            request.method
        ),
    ))
}

/// One sandbox's rules.
pub struct Policy {
    mode: NetworkMode,
    user: Vec<Rule>,
    default: Vec<Rule>,
    secrets: Vec<Arc<BoundSecret>>,
}

impl Policy {
    /// `secrets` are those that are known here, by name.
    pub fn new(spec: &NetworkSpec, secrets: &BTreeMap<String, Secret>) -> Result<Policy, SandboxError> {
        if spec.allow.len() + spec.secrets.len() > MAX_RULES {
            return Err(SandboxError::new(
                ErrorKind::Invalid,
                format!("more than {MAX_RULES} allow-list entries and secrets"),
            ));
        }
        let default = if spec.no_default_allow {
            Vec::new()
        } else {
            default_hosts()
                .map(|host| {
                    let mut rule = Rule::parse(host)?;
                    rule.read_only = true;
                    Ok(rule)
                })
                .collect::<Result<_, SandboxError>>()?
        };
        Ok(Policy {
            mode: spec.mode,
            user: spec.allow.iter().map(|e| Rule::parse(e)).collect::<Result<_, _>>()?,
            default,
            secrets: spec
                .secrets
                .iter()
                .filter_map(|name| secrets.get(name))
                .map(|s| BoundSecret::parse(s).map(Arc::new))
                .collect::<Result<_, _>>()?,
        })
    }

    /// Address ranges that the user opened for a port by naming them; an entry without a port opens all of them.
    pub fn named_ranges(&self, port: u16) -> Vec<Range> {
        self.user
            .iter()
            .filter(|rule| rule.port.is_none_or(|p| p == port))
            .filter_map(|rule| match rule.pattern {
                Pattern::Range(range) => Some(range),
                Pattern::Exact(_) | Pattern::Below(_) => None,
            })
            .collect()
    }

    pub fn judge(&self, host: &Host, port: u16) -> Result<Grant, Refusal> {
        let bridge = match self.mode {
            NetworkMode::None => {
                return Err(Refusal::new(
                    Reason::NoNetwork,
                    format!("{host}: this sandbox has no network (mode none)"),
                ));
            }
            NetworkMode::Isolated => false,
            NetworkMode::Bridge => true,
        };
        let secrets: Vec<_> = self.secrets.iter().filter(|s| s.bound_to(host, port)).cloned().collect();
        let grant = |access, reason| Grant { access, reason, secrets: secrets.clone() };

        let mut named = self.user.iter().filter(|r| r.names(host)).peekable();
        let mut seen = named.peek().is_some();
        let mut matching = named.filter(|r| r.opens_port(port, &DEFAULT_PORTS)).peekable();
        if matching.peek().is_some() {
            let access = if matching.all(|r| r.read_only) { Access::ReadOnly } else { Access::Open };
            return Ok(grant(access, Reason::UserList));
        }
        if !secrets.is_empty() {
            return Ok(grant(if bridge { Access::Open } else { Access::ReadOnly }, Reason::Secret));
        }
        // Under bridge anything can leave anyway: read-only defaults would only be in the way.
        if bridge {
            return Ok(grant(Access::Open, Reason::Bridge));
        }
        for rule in self.default.iter().filter(|r| r.names(host)) {
            seen = true;
            if rule.opens_port(port, &DEFAULT_PORTS) {
                return Ok(grant(Access::ReadOnly, Reason::DefaultList));
            }
        }
        if seen {
            return Err(Refusal::new(
                Reason::Port,
                format!(
                    "port {port} of {host} is not allowed; add {}:{port} to the allow list",
                    host.in_uri()
                ),
            ));
        }
        Err(Refusal::new(
            Reason::NotListed,
            format!("{host} is not on the allow list; add it with --allow {}", host.in_uri()),
        ))
    }
}

#[cfg(test)]
#[path = "policy_tests.rs"]
mod tests;
