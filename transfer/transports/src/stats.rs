//! Counters of the wire.

use std::sync::atomic::{AtomicU64, Ordering};

/// KV of flights and fetches.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KvStats {
    /// Bytes received and verified.
    pub received_bytes: u64,
}

/// Bytes that left for other processes, by the way that they went.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SentBytes {
    /// By RDMA.
    pub rdma: u64,
    /// Through shared memory.
    pub shared_memory: u64,
    /// Over TCP.
    pub tcp: u64,
}

/// Counters of an endpoint and its dialer since their creation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TransportStats {
    /// KV moved, over all transports.
    pub kv: KvStats,
    /// Bytes sent, by transport.
    pub sent: SentBytes,
    /// Flights on their way out.
    pub sending_flights: u64,
    /// Flights on their way in.
    pub receiving_flights: u64,
    /// Fetches being served.
    pub serving_fetches: u64,
    /// Connections accepted and open.
    pub open_connections: u64,
    /// Connections refused because their peers did not prove that they have the cluster's key.
    pub refused_peers: u64,
}

/// The counters behind [`TransportStats`], shared by all connections.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) received_bytes: AtomicU64,
    pub(crate) sending_flights: AtomicU64,
    pub(crate) receiving_flights: AtomicU64,
    pub(crate) serving_fetches: AtomicU64,
    pub(crate) open_connections: AtomicU64,
    pub(crate) refused_peers: AtomicU64,
}

impl Counters {
    /// With what the transfer engine has moved, by transport.
    pub(crate) fn snapshot(&self, moved: &[(&'static str, u64)]) -> TransportStats {
        let way =
            |name: &str| moved.iter().filter(|(of, _)| *of == name).map(|(_, bytes)| bytes).sum::<u64>();
        TransportStats {
            kv: KvStats { received_bytes: read(&self.received_bytes) },
            sent: SentBytes { rdma: way("rdma"), shared_memory: way("shm"), tcp: way("tcp") },
            sending_flights: read(&self.sending_flights),
            receiving_flights: read(&self.receiving_flights),
            serving_fetches: read(&self.serving_fetches),
            open_connections: read(&self.open_connections),
            refused_peers: read(&self.refused_peers),
        }
    }
}

pub(crate) fn add(counter: &AtomicU64, by: u64) {
    counter.fetch_add(by, Ordering::Relaxed);
}

fn read(counter: &AtomicU64) -> u64 {
    counter.load(Ordering::Relaxed)
}

/// Counts one more of `count`, up to a bound, until dropped.
#[derive(Debug)]
pub(crate) struct Place {
    counters: std::sync::Arc<Counters>,
    count: fn(&Counters) -> &AtomicU64,
}

impl Place {
    /// `None` where `most` are counted already.
    pub(crate) fn take(
        counters: &std::sync::Arc<Counters>,
        count: fn(&Counters) -> &AtomicU64,
        most: usize,
    ) -> Option<Self> {
        let most = u64::try_from(most).unwrap_or(u64::MAX);
        let one_more = |now: u64| (now < most).then_some(now + 1);
        let order = Ordering::Relaxed;
        count(counters).fetch_update(order, order, one_more).ok()?;
        Some(Self { counters: counters.clone(), count })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        (self.count)(&self.counters).fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[test]
    fn each_count_lands_in_its_field() {
        let counters = Counters::default();
        add(&counters.received_bytes, 20);
        let stats = counters.snapshot(&[("tcp", 4), ("shm", 1), ("tcp", 3)]);
        assert_eq!(stats.kv, KvStats { received_bytes: 20 });
        assert_eq!(stats.sent, SentBytes { rdma: 0, shared_memory: 1, tcp: 7 });
    }

    #[test]
    fn places_are_bounded_and_come_back() {
        let counters = Arc::new(Counters::default());
        let take = || Place::take(&counters, |all| &all.receiving_flights, 2);
        let (one, two) = (take(), take());
        assert!(one.is_some() && two.is_some() && take().is_none());
        drop(one);
        assert!(take().is_some());
        drop(two);
        assert_eq!(counters.snapshot(&[]).receiving_flights, 0);
    }
}
