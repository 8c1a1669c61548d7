//! Which addresses a sandbox may ever reach.
//!
//! Invariant: a name never opens an address. An address is reachable if it is public, or if the user wrote that very address
//! or a range that holds it. So a name that suddenly resolves to the metadata service or to the host itself gains nothing.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::str::FromStr;

/// An address range, `10.0.0.0/8` or a single address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Range {
    network: u128,
    prefix: u8,
    v4: bool,
}

impl Range {
    /// None if the prefix is longer than the address.
    pub const fn new(address: IpAddr, prefix: u8) -> Option<Range> {
        match address {
            IpAddr::V4(a) if prefix <= 32 => Some(Range::v4(a, prefix)),
            IpAddr::V6(a) if prefix <= 128 => Some(Range::v6(a, prefix)),
            IpAddr::V4(_) | IpAddr::V6(_) => None,
        }
    }

    const fn v4(address: Ipv4Addr, prefix: u8) -> Range {
        let bits = address.to_bits();
        let network = if prefix == 0 { 0 } else { bits & (u32::MAX << (32 - prefix)) };
        Range { network: network as u128, prefix, v4: true }
    }

    const fn v6(address: Ipv6Addr, prefix: u8) -> Range {
        let bits = address.to_bits();
        let network = if prefix == 0 { 0 } else { bits & (u128::MAX << (128 - prefix)) };
        Range { network, prefix, v4: false }
    }

    pub fn single(address: IpAddr) -> Range {
        match address {
            IpAddr::V4(a) => Range::v4(a, 32),
            IpAddr::V6(a) => Range::v6(a, 128),
        }
    }

    pub fn contains(&self, address: IpAddr) -> bool {
        match address {
            IpAddr::V4(a) => self.v4 && Range::v4(a, self.prefix).network == self.network,
            IpAddr::V6(a) => !self.v4 && Range::v6(a, self.prefix).network == self.network,
        }
    }
}

impl fmt::Display for Range {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let address: IpAddr = if self.v4 {
            // A v4 network fits 32 bits by construction.
            Ipv4Addr::from_bits(self.network as u32).into()
        } else {
            Ipv6Addr::from_bits(self.network).into()
        };
        write!(f, "{address}/{}", self.prefix)
    }
}

impl FromStr for Range {
    type Err = ();
    fn from_str(s: &str) -> Result<Range, ()> {
        let (address, prefix) = match s.split_once('/') {
            Some((a, p)) => (a, Some(p.parse().map_err(|_| ())?)),
            None => (s, None),
        };
        let address: IpAddr = address.parse().map_err(|_| ())?;
        prefix.map_or_else(|| Some(Range::single(address)), |p| Range::new(address, p)).ok_or(())
    }
}

/// Why an address is closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Closed {
    Unspecified,
    Loopback,
    Private,
    /// Carrier-grade NAT, 100.64/10.
    Shared,
    LinkLocal,
    /// A cloud's metadata or control address outside of the link-local range.
    Metadata,
    /// 192.0.0/24, 198.18/15, 240/4 and their IPv6 likes.
    Reserved,
    Multicast,
    /// One of the host's own addresses.
    Host,
}

impl Closed {
    pub fn as_str(self) -> &'static str {
        match self {
            Closed::Unspecified => "unspecified",
            Closed::Loopback => "loopback",
            Closed::Private => "private",
            Closed::Shared => "shared",
            Closed::LinkLocal => "link-local",
            Closed::Metadata => "cloud metadata",
            Closed::Reserved => "reserved",
            Closed::Multicast => "multicast",
            Closed::Host => "the host's own",
        }
    }
}

const V4_CLOSED: &[(Range, Closed)] = &[
    (Range::v4(Ipv4Addr::new(0, 0, 0, 0), 8), Closed::Unspecified),
    (Range::v4(Ipv4Addr::new(127, 0, 0, 0), 8), Closed::Loopback),
    (Range::v4(Ipv4Addr::new(10, 0, 0, 0), 8), Closed::Private),
    (Range::v4(Ipv4Addr::new(172, 16, 0, 0), 12), Closed::Private),
    (Range::v4(Ipv4Addr::new(192, 168, 0, 0), 16), Closed::Private),
    (Range::v4(Ipv4Addr::new(100, 64, 0, 0), 10), Closed::Shared),
    (Range::v4(Ipv4Addr::new(169, 254, 0, 0), 16), Closed::LinkLocal),
    (Range::v4(Ipv4Addr::new(168, 63, 129, 16), 32), Closed::Metadata),
    (Range::v4(Ipv4Addr::new(192, 0, 0, 0), 24), Closed::Reserved),
    (Range::v4(Ipv4Addr::new(198, 18, 0, 0), 15), Closed::Reserved),
    (Range::v4(Ipv4Addr::new(224, 0, 0, 0), 4), Closed::Multicast),
    (Range::v4(Ipv4Addr::new(240, 0, 0, 0), 4), Closed::Reserved),
];

const V6_CLOSED: &[(Range, Closed)] = &[
    (Range::v6(Ipv6Addr::UNSPECIFIED, 128), Closed::Unspecified),
    (Range::v6(Ipv6Addr::LOCALHOST, 128), Closed::Loopback),
    (Range::v6(Ipv6Addr::new(0xfc00, 0, 0, 0, 0, 0, 0, 0), 7), Closed::Private),
    // Site-local: withdrawn, but some networks still route it as private.
    (Range::v6(Ipv6Addr::new(0xfec0, 0, 0, 0, 0, 0, 0, 0), 10), Closed::Private),
    (Range::v6(Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 0), 10), Closed::LinkLocal),
    (Range::v6(Ipv6Addr::new(0xff00, 0, 0, 0, 0, 0, 0, 0), 8), Closed::Multicast),
    // NAT64 for local use: where the IPv4 address sits in it is each network's own choice, so it can't be judged.
    (Range::v6(Ipv6Addr::new(0x64, 0xff9b, 1, 0, 0, 0, 0, 0), 48), Closed::Reserved),
    // Teredo relays to an IPv4 address behind somebody's NAT.
    (Range::v6(Ipv6Addr::new(0x2001, 0, 0, 0, 0, 0, 0, 0), 32), Closed::Reserved),
    // Discard-only.
    (Range::v6(Ipv6Addr::new(0x100, 0, 0, 0, 0, 0, 0, 0), 64), Closed::Reserved),
];

/// The IPv4 address that an IPv6 address stands for: mapped, compatible, translated (SIIT), NAT64 or 6to4.
fn embedded_v4(address: Ipv6Addr) -> Option<Ipv4Addr> {
    let s = address.segments();
    let low = Ipv4Addr::from_bits((u32::from(s[6]) << 16) | u32::from(s[7]));
    match s {
        // `::` and `::1` are their own, not 0.0.0.0 and 0.0.0.1.
        [0, 0, 0, 0, 0, 0, 0, 0 | 1] => None,
        [0, 0, 0, 0, 0, 0 | 0xffff, _, _] => Some(low),
        [0, 0, 0, 0, 0xffff, 0, _, _] => Some(low),
        [0x64, 0xff9b, 0, 0, 0, 0, _, _] => Some(low),
        [0x2002, high, mid, ..] => Some(Ipv4Addr::from_bits((u32::from(high) << 16) | u32::from(mid))),
        _ => None,
    }
}

/// An address as it will be used: IPv6 forms of an IPv4 address are that IPv4 address.
pub fn canonical(address: IpAddr) -> IpAddr {
    match address {
        IpAddr::V4(_) => address,
        IpAddr::V6(a) => embedded_v4(a).map_or(address, IpAddr::V4),
    }
}

/// Why an address is closed to everybody who did not name it; None for a public one. Documentation ranges stay open: some
/// resolvers answer with them.
pub fn closed(address: IpAddr) -> Option<Closed> {
    let address = canonical(address);
    let table = if address.is_ipv4() { V4_CLOSED } else { V6_CLOSED };
    table.iter().find(|(range, _)| range.contains(address)).map(|(_, why)| *why)
}

/// The judgement of one sandbox: public addresses, minus the host's own, plus what the user named.
pub fn judge(address: IpAddr, named: &[Range], host: &[IpAddr]) -> Result<(), Closed> {
    let address = canonical(address);
    if named.iter().any(|range| range.contains(address)) {
        return Ok(());
    }
    match closed(address) {
        Some(why) => Err(why),
        None if host.iter().any(|own| canonical(*own) == address) => Err(Closed::Host),
        None => Ok(()),
    }
}

/// The addresses of this host's interfaces, read afresh.
pub fn host_addresses() -> std::io::Result<Vec<IpAddr>> {
    let mut list: *mut libc::ifaddrs = std::ptr::null_mut();
    // SAFETY: `list` is a valid place for the pointer that getifaddrs writes.
    if unsafe { libc::getifaddrs(&mut list) } != 0 {
        return Err(std::io::Error::last_os_error());
    }
    let mut addresses = Vec::new();
    let mut next = list;
    while !next.is_null() {
        // SAFETY: `next` is a node of the list that getifaddrs made and that is freed only below.
        let node = unsafe { &*next };
        next = node.ifa_next;
        if node.ifa_addr.is_null() {
            continue;
        }
        // SAFETY: ifa_addr points to a sockaddr, whose family says how long it really is.
        let family = i32::from(unsafe { (*node.ifa_addr).sa_family });
        if family == libc::AF_INET {
            // SAFETY: AF_INET, so this is a sockaddr_in; read unaligned since a sockaddr need not be aligned for it.
            let a = unsafe { node.ifa_addr.cast::<libc::sockaddr_in>().read_unaligned() };
            addresses.push(Ipv4Addr::from_bits(u32::from_be(a.sin_addr.s_addr)).into());
        } else if family == libc::AF_INET6 {
            // SAFETY: AF_INET6, so this is a sockaddr_in6.
            let a = unsafe { node.ifa_addr.cast::<libc::sockaddr_in6>().read_unaligned() };
            addresses.push(Ipv6Addr::from(a.sin6_addr.s6_addr).into());
        }
    }
    // SAFETY: the list came from getifaddrs and nothing points into it any more.
    unsafe { libc::freeifaddrs(list) };
    Ok(addresses)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn ip(s: &str) -> IpAddr {
        s.parse().unwrap()
    }

    #[test]
    fn closed_ranges_are_those_of_the_design() {
        let table = [
            ("0.0.0.0", Closed::Unspecified),
            ("0.1.2.3", Closed::Unspecified),
            ("127.0.0.1", Closed::Loopback),
            ("127.255.255.254", Closed::Loopback),
            ("10.0.0.1", Closed::Private),
            ("172.16.0.1", Closed::Private),
            ("172.31.255.255", Closed::Private),
            ("192.168.1.1", Closed::Private),
            ("100.64.0.1", Closed::Shared),
            ("100.127.255.255", Closed::Shared),
            ("169.254.169.254", Closed::LinkLocal),
            ("168.63.129.16", Closed::Metadata),
            ("192.0.0.192", Closed::Reserved),
            ("198.18.0.1", Closed::Reserved),
            ("198.19.255.255", Closed::Reserved),
            ("224.0.0.1", Closed::Multicast),
            ("240.0.0.1", Closed::Reserved),
            ("255.255.255.255", Closed::Reserved),
            ("::", Closed::Unspecified),
            ("::1", Closed::Loopback),
            ("fc00::1", Closed::Private),
            ("fd00:ec2::254", Closed::Private),
            ("fec0::1", Closed::Private),
            ("fe80::1", Closed::LinkLocal),
            ("ff02::1", Closed::Multicast),
            ("64:ff9b:1::a9fe:a9fe", Closed::Reserved),
            ("2001:0:1::1", Closed::Reserved),
        ];
        for (address, why) in table {
            assert_eq!(closed(ip(address)), Some(why), "{address}");
        }
    }

    #[test]
    fn neighbours_of_closed_ranges_are_open() {
        for address in [
            "1.0.0.0",
            "9.255.255.255",
            "11.0.0.0",
            "100.63.255.255",
            "100.128.0.0",
            "126.255.255.255",
            "128.0.0.0",
            "168.63.129.15",
            "168.63.129.17",
            "169.253.255.255",
            "169.255.0.0",
            "172.15.255.255",
            "172.32.0.0",
            "192.0.1.0",
            "192.0.2.1",
            "192.167.255.255",
            "192.169.0.0",
            "198.17.255.255",
            "198.20.0.0",
            "198.51.100.7",
            "203.0.113.7",
            "223.255.255.255",
            "2001:db8::1",
            "2606:4700::1111",
            "64:ff9b::8.8.8.8",
            "2002:0808:0808::1",
        ] {
            assert_eq!(closed(ip(address)), None, "{address}");
        }
    }

    #[test]
    fn a_named_address_opens_itself_and_nothing_else() {
        let named = ["10.1.2.0/24".parse().unwrap(), "fd00::1".parse().unwrap()];
        assert_eq!(judge(ip("10.1.2.3"), &named, &[]), Ok(()));
        assert_eq!(judge(ip("::ffff:10.1.2.3"), &named, &[]), Ok(()));
        assert_eq!(judge(ip("fd00::1"), &named, &[]), Ok(()));
        assert_eq!(judge(ip("10.1.3.3"), &named, &[]), Err(Closed::Private));
        assert_eq!(judge(ip("fd00::2"), &named, &[]), Err(Closed::Private));
        assert_eq!(judge(ip("203.0.113.9"), &named, &[ip("203.0.113.9")]), Err(Closed::Host));
        assert_eq!(judge(ip("::ffff:203.0.113.9"), &named, &[ip("203.0.113.9")]), Err(Closed::Host));
    }

    #[test]
    fn ranges_parse_and_print() {
        for s in ["10.0.0.0/8", "10.1.2.3/32", "fd00::/8", "0.0.0.0/0", "::/0"] {
            assert_eq!(s.parse::<Range>().unwrap().to_string(), s);
        }
        for bad in ["10.0.0.0/33", "::/129", "10.0.0/8", "x", "1.2.3.4/", "1.2.3.4/-1"] {
            assert!(bad.parse::<Range>().is_err(), "{bad}");
        }
    }

    #[test]
    fn the_host_knows_its_own_loopback() {
        assert!(host_addresses().unwrap().contains(&ip("127.0.0.1")));
    }

    fn wrapped(v4: Ipv4Addr) -> Vec<Ipv6Addr> {
        let [a, b, c, d] = v4.octets().map(u16::from);
        let (high, low) = (a << 8 | b, c << 8 | d);
        let mut forms = vec![
            v4.to_ipv6_mapped(),
            Ipv6Addr::new(0x64, 0xff9b, 0, 0, 0, 0, high, low),
            Ipv6Addr::new(0, 0, 0, 0, 0xffff, 0, high, low),
            Ipv6Addr::new(0x2002, high, low, 0, 0, 0, 0, 1),
        ];
        if v4.to_bits() > 1 {
            forms.push(Ipv6Addr::new(0, 0, 0, 0, 0, 0, high, low));
        }
        forms
    }

    proptest! {
        /// No IPv6 spelling of an IPv4 address is judged other than the address itself.
        #[test]
        fn every_form_is_judged_alike(bits: u32, host: u32) {
            let v4 = Ipv4Addr::from_bits(bits);
            let host = [IpAddr::V4(Ipv4Addr::from_bits(host)), IpAddr::V4(v4)];
            for form in wrapped(v4) {
                prop_assert_eq!(closed(form.into()), closed(v4.into()));
                prop_assert_eq!(judge(form.into(), &[], &host), judge(v4.into(), &[], &host));
            }
        }

        /// What the standard library calls local is never open.
        #[test]
        fn never_more_open_than_the_standard_library(bits: u32, wide: u128) {
            let v4 = Ipv4Addr::from_bits(bits);
            if v4.is_private() || v4.is_loopback() || v4.is_link_local() || v4.is_multicast()
                || v4.is_broadcast() || v4.is_unspecified() {
                prop_assert!(closed(v4.into()).is_some());
            }
            let v6 = Ipv6Addr::from_bits(wide);
            if v6.is_loopback() || v6.is_multicast() || v6.is_unspecified() || v6.is_unique_local()
                || v6.is_unicast_link_local() {
                prop_assert!(closed(v6.into()).is_some());
            }
        }

        /// A range holds exactly the addresses that share its prefix.
        #[test]
        fn ranges_hold_their_prefix(a: u32, b: u32, prefix in 0u8..=32) {
            let (a, b) = (Ipv4Addr::from_bits(a), Ipv4Addr::from_bits(b));
            let range = Range::new(a.into(), prefix).unwrap();
            let same = (a.to_bits() ^ b.to_bits()).leading_zeros() >= u32::from(prefix);
            prop_assert!(range.contains(a.into()));
            prop_assert_eq!(range.contains(b.into()), same);
        }
    }
}
