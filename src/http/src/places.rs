//! Limits the number of connections: in total, and to half of that for one peer.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;

use parking_lot::Mutex;

/// A bound on the connections that are open at once. A proxy is one peer for all of its clients, so a peer may have
/// many; it just cannot have all.
#[derive(Debug)]
pub struct ConnectionSlots {
    total: usize,
    taken: Mutex<SlotCounts>,
}

#[derive(Debug, Default)]
struct SlotCounts {
    total: usize,
    by_peer: HashMap<IpAddr, usize>,
}

/// A place that a connection has. It is free again when this is dropped.
#[derive(Debug)]
pub struct ConnectionSlot {
    places: Arc<ConnectionSlots>,
    peer: IpAddr,
}

impl ConnectionSlots {
    /// So many places, at least one.
    #[must_use]
    pub fn new(total: usize) -> Arc<Self> {
        Arc::new(Self { total: total.max(1), taken: Mutex::default() })
    }

    /// A place for a connection from `peer`; `None` when all are taken, or as many as one peer may have.
    #[must_use]
    pub fn take(self: &Arc<Self>, peer: IpAddr) -> Option<ConnectionSlot> {
        let peer = network(peer);
        let mut taken = self.taken.lock();
        let of_peer = taken.by_peer.get(&peer).copied().unwrap_or(0);
        if taken.total >= self.total || of_peer >= self.total.div_ceil(2) {
            return None;
        }
        taken.total += 1;
        taken.by_peer.insert(peer, of_peer + 1);
        Some(ConnectionSlot { places: Arc::clone(self), peer })
    }

    /// Places that are taken.
    #[must_use]
    pub fn taken(&self) -> usize {
        self.taken.lock().total
    }
}

impl Drop for ConnectionSlot {
    fn drop(&mut self) {
        let mut taken = self.places.taken.lock();
        taken.total -= 1;
        if let Some(of_peer) = taken.by_peer.get_mut(&self.peer) {
            *of_peer -= 1;
            if *of_peer == 0 {
                taken.by_peer.remove(&self.peer);
            }
        }
    }
}

/// The network that counts as one peer: an address of IPv4, or the 64 bits of an IPv6 address that one subscriber gets.
fn network(peer: IpAddr) -> IpAddr {
    match peer.to_canonical() {
        IpAddr::V6(address) => IpAddr::V6(Ipv6Addr::from_bits(address.to_bits() >> 64 << 64)),
        address @ IpAddr::V4(_) => address,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peer(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    fn one_peer_cannot_take_all_places() {
        let places = ConnectionSlots::new(4);
        let held: Vec<ConnectionSlot> = (0..4).filter_map(|_| places.take(peer("10.0.0.1"))).collect();
        assert_eq!(held.len(), 2, "half");
        let others: Vec<ConnectionSlot> = ["10.0.0.2", "10.0.0.3", "10.0.0.4"]
            .iter()
            .filter_map(|other| places.take(peer(other)))
            .collect();
        assert_eq!((others.len(), places.taken()), (2, 4), "as many as there are");
        drop(held);
        assert_eq!(places.taken(), 2);
        assert!(places.take(peer("10.0.0.1")).is_some());
        drop(others);
        assert!(places.taken.lock().by_peer.is_empty(), "peers that left are forgotten");
    }

    #[test]
    fn a_peer_is_an_address_or_a_network_of_one_subscriber() {
        let places = ConnectionSlots::new(2);
        let _held = places.take(peer("2001:db8:1:2::1")).unwrap();
        assert!(places.take(peer("2001:db8:1:2:ffff::9")).is_none());
        let _other = places.take(peer("2001:db8:1:3::1")).unwrap();
        let places = ConnectionSlots::new(2);
        let _held = places.take(peer("::ffff:10.0.0.1")).unwrap();
        assert!(places.take(peer("10.0.0.1")).is_none(), "the same address, written for IPv6");
    }

    #[test]
    fn there_is_a_place_for_somebody() {
        let places = ConnectionSlots::new(0);
        assert!(places.take(peer("::1")).is_some());
    }
}
