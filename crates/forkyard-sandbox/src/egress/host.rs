//! The host part of a request, in one spelling only.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// The longest DNS name, without the trailing dot.
const MAX_NAME_LEN: usize = 253;
const MAX_LABEL_LEN: usize = 63;

/// A name in lower case without a trailing dot, or an address. Two spellings of one host are equal.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Host {
    Name(String),
    Address(IpAddr),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BadHost {
    /// Not a name: empty, too long, odd characters.
    Syntax,
    /// An address in a decimal, octal, hexadecimal or shortened spelling (`2130706433`, `0177.0.0.1`, `127.1`).
    OddAddress,
}

impl Host {
    /// As it stands in a URI, a Host header, an SNI or a SOCKS request; IPv6 in brackets.
    pub fn parse(text: &str) -> Result<Host, BadHost> {
        if let Some(inner) = text.strip_prefix('[') {
            let inner = inner.strip_suffix(']').ok_or(BadHost::Syntax)?;
            return inner.parse::<Ipv6Addr>().map(|a| Host::Address(a.into())).map_err(|_| BadHost::Syntax);
        }
        let name = text.strip_suffix('.').unwrap_or(text).to_ascii_lowercase();
        let well_formed = (1..=MAX_NAME_LEN).contains(&name.len())
            && name.split('.').all(|label| {
                (1..=MAX_LABEL_LEN).contains(&label.len())
                    && label.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_')
            });
        if !well_formed {
            return Err(BadHost::Syntax);
        }
        // Resolvers and URL parsers read a name whose last label is a number as an address, in many spellings.
        let last = name.rsplit('.').next().unwrap_or(&name);
        let numeric = last.bytes().all(|b| b.is_ascii_digit())
            || last.strip_prefix("0x").is_some_and(|hex| hex.bytes().all(|b| b.is_ascii_hexdigit()));
        if !numeric {
            return Ok(Host::Name(name));
        }
        // The standard library takes four plain decimal numbers and nothing else.
        name.parse::<Ipv4Addr>().map(|a| Host::Address(a.into())).map_err(|_| BadHost::OddAddress)
    }

    /// `host` or `host:port`, as in a Host header or a CONNECT line.
    pub fn parse_with_port(text: &str) -> Result<(Host, Option<u16>), BadHost> {
        let (host, port) = match text.rsplit_once(':') {
            Some((host, port)) if !port.ends_with(']') => (host, Some(port)),
            Some(_) | None => (text, None),
        };
        let port = match port {
            // `u16::from_str` also takes `+80`.
            Some(p) if !p.bytes().all(|b| b.is_ascii_digit()) => return Err(BadHost::Syntax),
            Some(p) => Some(p.parse().map_err(|_| BadHost::Syntax)?),
            None => None,
        };
        Ok((Host::parse(host)?, port))
    }

    /// In a URI or a Host header: IPv6 in brackets.
    pub fn in_uri(&self) -> String {
        match self {
            Host::Address(IpAddr::V6(a)) => format!("[{a}]"),
            Host::Address(_) | Host::Name(_) => self.to_string(),
        }
    }
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Host::Name(name) => f.write_str(name),
            Host::Address(address) => address.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    unsafe extern "C" {
        fn inet_aton(text: *const libc::c_char, out: *mut libc::in_addr) -> libc::c_int;
    }

    #[test]
    fn one_spelling_per_host() {
        let name = |s: &str| Host::Name(s.to_string());
        assert_eq!(Host::parse("GitHub.COM."), Ok(name("github.com")));
        assert_eq!(Host::parse("a_b-c.example"), Ok(name("a_b-c.example")));
        assert_eq!(Host::parse("1.2.3.4"), Ok(Host::Address("1.2.3.4".parse().unwrap())));
        assert_eq!(Host::parse("[::1]"), Ok(Host::Address("::1".parse().unwrap())));
        assert_eq!(Host::parse_with_port("[::1]:80"), Ok((Host::parse("[::1]").unwrap(), Some(80))));
        assert_eq!(Host::parse_with_port("[::1]"), Ok((Host::parse("[::1]").unwrap(), None)));
        assert_eq!(Host::parse_with_port("x.y:443"), Ok((name("x.y"), Some(443))));
        // A name that merely starts with digits is a name.
        assert_eq!(Host::parse("1.example"), Ok(name("1.example")));
        assert_eq!(Host::parse("0xab.example"), Ok(name("0xab.example")));
    }

    #[test]
    fn odd_addresses_are_refused() {
        for odd in [
            "2130706433",
            "0x7f000001",
            "0x7f.0.0.1",
            "127.0.0.0x1",
            "0177.0.0.1",
            "127.1",
            "127.0.1",
            "0",
            "1.2.3.4.5",
            "256.1.1.1",
            "01.2.3.4",
            "0x",
            "127.0.0.1..",
            "1.2.3.0x",
        ] {
            assert!(Host::parse(odd).is_err(), "{odd}");
        }
    }

    #[test]
    fn what_is_no_host_is_refused() {
        for bad in [
            "",
            ".",
            "..",
            "a..b",
            "a b",
            "a/b",
            "a@b",
            "a\0b",
            "é.fr",
            "[::1",
            "::1",
            "[1.2.3.4]",
            "[fe80::1%eth0]",
            "a%2eb",
            "a\\b",
            "*.x",
        ] {
            assert_eq!(Host::parse(bad), Err(BadHost::Syntax), "{bad:?}");
        }
        assert!(Host::parse(&"a".repeat(64)).is_err());
        assert!(Host::parse(&"a.".repeat(127)).is_ok());
        assert!(Host::parse(&"a.".repeat(128)).is_err());
        for bad in ["x:", "x:+80", "x:65536", "x:-1", "x:80:80", ":80"] {
            assert!(Host::parse_with_port(bad).is_err(), "{bad}");
        }
    }

    proptest! {
        /// Whatever is accepted as a name is never an address to the system's own parser.
        #[test]
        fn names_are_never_addresses(text in "[0-9a-fx.]{1,20}") {
            if let Ok(Host::Name(name)) = Host::parse(&text) {
                let c = std::ffi::CString::new(name).unwrap();
                // SAFETY: `c` is a terminated string and `out` a valid place for the answer.
                let taken = unsafe {
                    let mut out = std::mem::zeroed::<libc::in_addr>();
                    inet_aton(c.as_ptr(), &mut out)
                };
                prop_assert_eq!(taken, 0);
            }
        }

        /// Parsing what was printed gives the same host.
        #[test]
        fn hosts_round_trip(text in "[A-Za-z0-9.:\\[\\]_-]{1,30}") {
            if let Ok(host) = Host::parse(&text) {
                prop_assert_eq!(Host::parse(&host.in_uri()), Ok(host));
            }
        }
    }
}
