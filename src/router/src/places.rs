//! Limits the number of connections: in total, and to half of that for one peer.

use std::collections::HashMap;
use std::fs::File;
use std::future::poll_fn;
use std::io;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::net::TcpListener;
use tokio::time::Instant;

/// How long to wait when the kernel has no connection to give, such as for want of descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Connections that are closed at a time when none can be accepted: as many as wait at most.
const WAITING_MAX: usize = 1_024;
/// Failures to accept are logged at most this often.
const LOG_EVERY: Duration = Duration::from_secs(10);

/// A bound on the connections that are open at once. A proxy is one peer for all of its clients, so a peer may have
/// many; it just cannot have all.
#[derive(Debug)]
pub struct Places {
    total: usize,
    taken: Mutex<PlaceCounts>,
}

#[derive(Debug, Default)]
struct PlaceCounts {
    total: usize,
    by_peer: HashMap<IpAddr, usize>,
}

/// A place that a connection has. It is free again when this is dropped.
#[derive(Debug)]
pub struct Place {
    places: Arc<Places>,
    peer: IpAddr,
}

impl Places {
    /// So many places, at least one.
    #[must_use]
    pub fn new(total: usize) -> Arc<Self> {
        Arc::new(Self { total: total.max(1), taken: Mutex::default() })
    }

    /// A place for a connection from `peer`; `None` when all are taken, or as many as one peer may have.
    #[must_use]
    pub fn take(self: &Arc<Self>, peer: IpAddr) -> Option<Place> {
        let peer = network(peer);
        let mut taken = self.taken.lock();
        let of_peer = taken.by_peer.get(&peer).copied().unwrap_or(0);
        if taken.total >= self.total || of_peer >= self.total.div_ceil(2) {
            return None;
        }
        taken.total += 1;
        taken.by_peer.insert(peer, of_peer + 1);
        Some(Place { places: Arc::clone(self), peer })
    }

    /// Places that are taken.
    #[must_use]
    pub fn taken(&self) -> usize {
        self.taken.lock().total
    }
}

impl Drop for Place {
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

/// Handles connections that could not be accepted: it pauses, and logs now and then.
#[derive(Debug)]
pub struct AcceptFailures {
    logged: Option<Instant>,
    unlogged: u64,
    /// A descriptor that is given up for a moment when there are no others: who waits is closed then, and not left to wait.
    spare: Option<File>,
}

impl Default for AcceptFailures {
    fn default() -> Self {
        Self { logged: None, unlogged: 0, spare: spare() }
    }
}

impl AcceptFailures {
    /// Pauses, for an error that stays would be met again at once. Where it is want of descriptors, the connections that
    /// wait at `listener` are closed before: so many.
    pub async fn pause(&mut self, port: &str, listener: &TcpListener, error: &io::Error) -> usize {
        self.unlogged += 1;
        if self.logged.is_none_or(|logged| logged.elapsed() >= LOG_EVERY) {
            let times = std::mem::take(&mut self.unlogged);
            self.logged = Some(Instant::now());
            tracing::warn!(
                times,
                "{port}: connections cannot be accepted: {error}; raise the limit of open files if it says too many"
            );
        }
        let mut closed = 0;
        if lacks_descriptors(error) {
            drop(self.spare.take());
            closed = close_waiting(listener).await;
            self.spare = spare();
        }
        tokio::time::sleep(ACCEPT_PAUSE).await;
        closed
    }
}

fn spare() -> Option<File> {
    File::open("/dev/null").ok()
}

fn lacks_descriptors(error: &io::Error) -> bool {
    let codes = [rustix::io::Errno::MFILE, rustix::io::Errno::NFILE];
    codes.iter().any(|code| error.raw_os_error() == Some(code.raw_os_error()))
}

/// Accepts and closes what waits now, and waits for nobody.
async fn close_waiting(listener: &TcpListener) -> usize {
    let mut closed = 0;
    let next = || poll_fn(|cx| Poll::Ready(matches!(listener.poll_accept(cx), Poll::Ready(Ok(_)))));
    while closed < WAITING_MAX && next().await {
        closed += 1;
    }
    closed
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peer(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    fn one_peer_cannot_take_all_places() {
        let places = Places::new(4);
        let held: Vec<Place> = (0..4).filter_map(|_| places.take(peer("10.0.0.1"))).collect();
        assert_eq!(held.len(), 2, "half");
        let others: Vec<Place> = ["10.0.0.2", "10.0.0.3", "10.0.0.4"]
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
        let places = Places::new(2);
        let _held = places.take(peer("2001:db8:1:2::1")).unwrap();
        assert!(places.take(peer("2001:db8:1:2:ffff::9")).is_none());
        let _other = places.take(peer("2001:db8:1:3::1")).unwrap();
        let places = Places::new(2);
        let _held = places.take(peer("::ffff:10.0.0.1")).unwrap();
        assert!(places.take(peer("10.0.0.1")).is_none(), "the same address, written for IPv6");
    }

    #[test]
    fn there_is_a_place_for_somebody() {
        let places = Places::new(0);
        assert!(places.take(peer("::1")).is_some());
    }

    #[tokio::test]
    async fn who_cannot_be_accepted_is_closed_and_not_left_to_wait() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let mut failures = AcceptFailures::default();
        let other = io::Error::from_raw_os_error(rustix::io::Errno::CONNABORTED.raw_os_error());
        assert_eq!(failures.pause("a port", &listener, &other).await, 0);
        let mut waiting = Vec::new();
        for _ in 0..3 {
            waiting.push(tokio::net::TcpStream::connect(address).await.unwrap());
        }
        let none = io::Error::from_raw_os_error(rustix::io::Errno::MFILE.raw_os_error());
        assert_eq!(failures.pause("a port", &listener, &other).await, 0, "another error closes nobody");
        assert_eq!(failures.pause("a port", &listener, &none).await, 3);
        for mut stream in waiting {
            let read = tokio::io::AsyncReadExt::read(&mut stream, &mut [0]).await;
            assert!(matches!(read, Ok(0) | Err(_)), "{read:?}");
        }
        assert!(failures.spare.is_some(), "there is one for the next time");
        assert_eq!(failures.pause("a port", &listener, &none).await, 0, "nobody waits");
    }
}
