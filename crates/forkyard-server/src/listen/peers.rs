//! How many connections come from where: nobody alone may take them all.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Arc, Mutex, PoisonError};

/// Connections at once from one address. A proxy in front of the server is one address, too.
const MAX_PER_PEER: usize = 1024;

#[derive(Clone, Default)]
pub(super) struct Peers(Arc<Mutex<HashMap<IpAddr, usize>>>);

/// Held by a connection.
pub(super) struct Place {
    peers: Peers,
    of: IpAddr,
}

impl Peers {
    /// None: it has enough.
    pub(super) fn take(&self, peer: IpAddr) -> Option<Place> {
        let of = one_owner(peer);
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let count = all.entry(of).or_default();
        if *count >= MAX_PER_PEER {
            return None;
        }
        *count += 1;
        Some(Place { peers: self.clone(), of })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut all = self.peers.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = all.get_mut(&self.of) {
            *count -= 1;
            if *count == 0 {
                all.remove(&self.of);
            }
        }
    }
}

/// Whoever has one address of IPv6 has all of its /64.
fn one_owner(peer: IpAddr) -> IpAddr {
    match peer.to_canonical() {
        IpAddr::V6(ip) => IpAddr::V6(Ipv6Addr::from_bits(ip.to_bits() & !u128::from(u64::MAX))),
        v4 => v4,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_address_has_its_own_count() {
        let peers = Peers::default();
        let ip = |text: &str| text.parse::<IpAddr>().unwrap();
        let mut held: Vec<_> = (0..MAX_PER_PEER).map(|_| peers.take(ip("10.0.0.1")).unwrap()).collect();
        assert!(peers.take(ip("10.0.0.1")).is_none() && peers.take(ip("::ffff:10.0.0.1")).is_none());
        assert!(peers.take(ip("10.0.0.2")).is_some());
        held.pop();
        assert!(peers.take(ip("10.0.0.1")).is_some());
        assert_eq!(one_owner(ip("2001:db8::1:2:3:4")), one_owner(ip("2001:db8::5")));
        drop(held);
        assert!(peers.0.lock().unwrap().is_empty());
    }
}
