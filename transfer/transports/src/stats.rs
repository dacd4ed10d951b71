//! Counters of the wire.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::error::{Kind, TransportError};

/// By which way bytes went.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Medium {
    /// A file ring in shared memory: same host.
    SharedMemory,
    /// TCP.
    Tcp,
    /// A pipe inside this process.
    Memory,
    /// The transfer engine, over whichever of its transports.
    Engine,
}

/// Traffic over one medium.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MediumStats {
    /// Slices and blocks sent.
    pub sent_slices: u64,
    /// Bytes of them.
    pub sent_bytes: u64,
    /// Slices and blocks received and verified.
    pub received_slices: u64,
    /// Bytes of them.
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

/// Failed operations, by remedy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FailureStats {
    /// [`Kind::Retry`].
    pub retry: u64,
    /// [`Kind::Invalid`].
    pub invalid: u64,
    /// [`Kind::Unavailable`].
    pub unavailable: u64,
    /// [`Kind::Corrupt`].
    pub corrupt: u64,
    /// [`Kind::Closed`].
    pub closed: u64,
    /// [`Kind::Bug`].
    pub bug: u64,
}

/// What an endpoint and its dialer have done since they were made.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TransportStats {
    /// Through shared memory.
    pub shared_memory: MediumStats,
    /// Over TCP.
    pub tcp: MediumStats,
    /// Inside this process.
    pub memory: MediumStats,
    /// By the transfer engine.
    pub engine: MediumStats,
    /// What was sent in all of these but inside this process, by the way that it went.
    pub sent: SentBytes,
    /// Flights, fetches, connections and handshakes that failed, on either side.
    pub failures: FailureStats,
    /// Flights on their way out.
    pub sending_flights: u64,
    /// Flights on their way in.
    pub receiving_flights: u64,
    /// Flights sent and confirmed.
    pub sent_flights: u64,
    /// Flights received and completed.
    pub received_flights: u64,
    /// Flights that the receiver aborted after accepting them.
    pub aborted_flights: u64,
    /// Offers refused by the receiver, those repeated later included.
    pub refused_offers: u64,
    /// Fetches being served.
    pub serving_fetches: u64,
    /// Fetches from here that brought blocks, all of them by the transfer engine.
    pub engine_fetches: u64,
    /// Fetches from here that brought blocks, some of them over the connection.
    pub stream_fetches: u64,
    /// Connections accepted and open.
    pub open_connections: u64,
    /// Connections turned away for lack of room.
    pub turned_away_connections: u64,
    /// Connections refused because their peers did not prove that they have the cluster's key.
    pub refused_peers: u64,
    /// Times that a connection, a slice or a fetch went by a slower way than was there: not by shared memory, not by
    /// the engine.
    pub fallbacks: u64,
    /// Why, the last time.
    pub last_fallback: Option<String>,
}

#[derive(Debug, Default)]
struct MediumCounters {
    sent_slices: AtomicU64,
    sent_bytes: AtomicU64,
    received_slices: AtomicU64,
    received_bytes: AtomicU64,
}

impl MediumCounters {
    fn read(&self) -> MediumStats {
        MediumStats {
            sent_slices: read(&self.sent_slices),
            sent_bytes: read(&self.sent_bytes),
            received_slices: read(&self.received_slices),
            received_bytes: read(&self.received_bytes),
        }
    }
}

/// The counters behind [`TransportStats`], shared by all connections.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    media: [MediumCounters; 4],
    failures: [AtomicU64; 6],
    pub(crate) sending_flights: AtomicU64,
    pub(crate) receiving_flights: AtomicU64,
    pub(crate) sent_flights: AtomicU64,
    pub(crate) received_flights: AtomicU64,
    pub(crate) aborted_flights: AtomicU64,
    pub(crate) refused_offers: AtomicU64,
    pub(crate) serving_fetches: AtomicU64,
    pub(crate) engine_fetches: AtomicU64,
    pub(crate) stream_fetches: AtomicU64,
    pub(crate) open_connections: AtomicU64,
    pub(crate) turned_away_connections: AtomicU64,
    pub(crate) refused_peers: AtomicU64,
    fallbacks: AtomicU64,
    last_fallback: std::sync::Mutex<Option<String>>,
}

impl Counters {
    pub(crate) fn sent(&self, medium: Medium, bytes: u64) {
        let counters = &self.media[medium as usize];
        add(&counters.sent_slices, 1);
        add(&counters.sent_bytes, bytes);
    }

    pub(crate) fn received(&self, medium: Medium, bytes: u64) {
        let counters = &self.media[medium as usize];
        add(&counters.received_slices, 1);
        add(&counters.received_bytes, bytes);
    }

    pub(crate) fn failed(&self, error: &TransportError) {
        add(&self.failures[usize::from(error.kind.number())], 1);
    }

    pub(crate) fn fell_back(&self, why: &str) {
        add(&self.fallbacks, 1);
        *self.last_fallback.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = Some(why.to_owned());
    }

    /// With what the transfer engine has moved, by transport.
    pub(crate) fn snapshot(&self, moved: &[(&'static str, u64)]) -> TransportStats {
        let medium = |medium: Medium| self.media[medium as usize].read();
        let failed = |kind: Kind| read(&self.failures[usize::from(kind.number())]);
        let last = self.last_fallback.lock().unwrap_or_else(std::sync::PoisonError::into_inner).clone();
        let engine =
            |name: &str| moved.iter().filter(|(of, _)| *of == name).map(|(_, bytes)| bytes).sum::<u64>();
        let sent = SentBytes {
            rdma: engine("rdma"),
            shared_memory: engine("shm") + medium(Medium::SharedMemory).sent_bytes,
            tcp: engine("tcp") + medium(Medium::Tcp).sent_bytes,
        };
        TransportStats {
            sent,
            shared_memory: medium(Medium::SharedMemory),
            tcp: medium(Medium::Tcp),
            memory: medium(Medium::Memory),
            engine: medium(Medium::Engine),
            failures: FailureStats {
                retry: failed(Kind::Retry),
                invalid: failed(Kind::Invalid),
                unavailable: failed(Kind::Unavailable),
                corrupt: failed(Kind::Corrupt),
                closed: failed(Kind::Closed),
                bug: failed(Kind::Bug),
            },
            sending_flights: read(&self.sending_flights),
            receiving_flights: read(&self.receiving_flights),
            sent_flights: read(&self.sent_flights),
            received_flights: read(&self.received_flights),
            aborted_flights: read(&self.aborted_flights),
            refused_offers: read(&self.refused_offers),
            serving_fetches: read(&self.serving_fetches),
            engine_fetches: read(&self.engine_fetches),
            stream_fetches: read(&self.stream_fetches),
            open_connections: read(&self.open_connections),
            turned_away_connections: read(&self.turned_away_connections),
            refused_peers: read(&self.refused_peers),
            fallbacks: read(&self.fallbacks),
            last_fallback: last,
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
    use crate::error::Stage;
    use std::sync::Arc;

    #[test]
    fn each_count_lands_in_its_field() {
        let counters = Counters::default();
        counters.sent(Medium::SharedMemory, 10);
        counters.received(Medium::Tcp, 20);
        counters.failed(&TransportError::new(Kind::Corrupt, Stage::Send, ""));
        counters.fell_back("no /dev/shm");
        let stats = counters.snapshot(&[]);
        assert_eq!((stats.shared_memory.sent_slices, stats.shared_memory.sent_bytes), (1, 10));
        assert_eq!((stats.tcp.received_slices, stats.tcp.received_bytes), (1, 20));
        assert_eq!(stats.failures, FailureStats { corrupt: 1, ..FailureStats::default() });
        assert_eq!((stats.fallbacks, stats.last_fallback.as_deref()), (1, Some("no /dev/shm")));
        assert_eq!(stats.memory, MediumStats::default());
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
