//! The publishing side.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::records::{self, RANGES_MAX, Records};
use super::watcher::Watcher;
use crate::mover::greeting::{Greeting, Purpose};
use crate::mover::reactor::{Accepts, Listener, Pool, ReactorSlot};
use crate::mover::{Fault, PeerId, RemoteSegment};

/// Settings of [`Publisher`].
#[derive(Clone, Debug)]
pub struct PublisherConfig {
    /// Where to listen; port 0 takes a free one.
    pub listen: SocketAddr,
    /// Connections at once; each peer that has asked keeps one.
    pub watchers_max: usize,
    /// How long a peer may take to ask, and to take its answer.
    pub time_limit: Duration,
}

impl PublisherConfig {
    /// The usual ones.
    pub fn new(listen: SocketAddr) -> Self {
        Self { listen, watchers_max: 1_024, time_limit: Duration::from_secs(2) }
    }
}

/// The published ranges, and the connections that have received them.
#[derive(Default)]
struct State {
    records: Records,
    /// Made when first asked for after a change.
    body: Option<Arc<Vec<u8>>>,
    watchers: Vec<ReactorSlot>,
}

pub(super) struct Shared {
    pub(super) config: PublisherConfig,
    peer: PeerId,
    pub(super) pool: Arc<Pool>,
    pub(super) watching: AtomicUsize,
    state: Mutex<State>,
}

/// Publishes which ranges of this process peers may reach.
pub struct Publisher {
    shared: Arc<Shared>,
    port: u16,
}

impl Publisher {
    /// Listens, on a thread of its own; `peer` is who the transports of this process are.
    ///
    /// # Errors
    /// When the address cannot be had or the system gives no thread.
    pub fn start(config: PublisherConfig, peer: PeerId) -> io::Result<Self> {
        let socket = TcpListener::bind(config.listen)?;
        socket.set_nonblocking(true)?;
        let port = socket.local_addr()?.port();
        let pool = Pool::start("published", 1)?;
        let (watching, state) = (AtomicUsize::new(0), Mutex::default());
        let shared = Arc::new(Shared { config, peer, pool, watching, state });
        let door = Listener::new(Door { socket, shared: shared.clone() });
        shared.pool.adopt(shared.pool.slot(), Box::new(door));
        Ok(Self { shared, port })
    }

    /// Where it listens.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Publishes a window over memory that is at `address` in this process. Connected peers ask anew.
    ///
    /// # Errors
    /// [`Fault::Invalid`] when the range overlaps one that is published, or there are too many.
    pub fn publish(&self, address: u64, segment: RemoteSegment) -> Result<(), Fault> {
        let invalid = |text: String| Err(Fault::Invalid(text));
        let end = address.checked_add(segment.bytes).filter(|end| *end > address);
        let Some(end) = end.filter(|_| records::is_encodable(&segment)) else {
            return invalid(format!("{} bytes at {address:#x} cannot be published", segment.bytes));
        };
        let mut state = self.shared.state();
        if state.records.len() >= RANGES_MAX {
            return invalid(format!(
                "{RANGES_MAX} ranges are published already; register fewer, larger ones"
            ));
        }
        let before = state.records.range(..end).next_back();
        if let Some((other, known)) = before.filter(|(other, known)| *other + known.bytes > address) {
            let text =
                format!("{address:#x} overlaps the {} bytes at {other:#x}; unregister them", known.bytes);
            return invalid(text);
        }
        state.records.insert(address, segment);
        self.shared.changed(state);
        Ok(())
    }

    /// Withdraws the range that starts at `address`. The owner of the window itself must revoke it.
    pub fn withdraw(&self, address: u64) -> Option<RemoteSegment> {
        let mut state = self.shared.state();
        let withdrawn = state.records.remove(&address)?;
        self.shared.changed(state);
        Some(withdrawn)
    }

    /// How many ranges are published.
    pub fn ranges(&self) -> usize {
        self.shared.state().records.len()
    }

    /// Ends every connection and the thread. A second call does nothing.
    pub fn shutdown(&self) {
        self.shared.pool.stop();
    }
}

impl Drop for Publisher {
    fn drop(&mut self) {
        self.shutdown();
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Cuts every connection whose answer is out of date.
    fn changed(&self, mut state: MutexGuard<'_, State>) {
        state.body = None;
        for slot in state.watchers.drain(..) {
            self.pool.cut(slot);
        }
    }

    /// The whole answer. When it is out of date, the publisher cuts the connection at `slot`.
    pub(super) fn answer(&self, slot: ReactorSlot) -> Vec<u8> {
        let mut state = self.state();
        let body = state.body.take().unwrap_or_else(|| Arc::new(records::encode(&state.records)));
        state.body = Some(body.clone());
        state.watchers.push(slot);
        drop(state);
        let mut answer = self.greeting(Purpose::Welcome, body.len() as u64, self.peer.address.clone());
        answer.extend_from_slice(&body);
        answer
    }

    /// One that has gone is not to be cut.
    pub(super) fn gone(&self, slot: ReactorSlot) {
        self.watching.fetch_sub(1, Ordering::AcqRel);
        self.state().watchers.retain(|known| *known != slot);
    }

    pub(super) fn greeting(&self, purpose: Purpose, body_bytes: u64, text: String) -> Vec<u8> {
        let epoch = self.peer.epoch;
        let greeting = Greeting {
            purpose,
            to_epoch: 0,
            from_epoch: epoch,
            session: 0,
            slice_bytes_max: 0,
            outstanding_max: 0,
            credit_bytes: body_bytes,
            text,
        };
        greeting.encode().to_vec()
    }
}

/// The socket that peers ask at.
struct Door {
    socket: TcpListener,
    shared: Arc<Shared>,
}

impl Accepts for Door {
    fn file(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    fn accept(&mut self) -> io::Result<()> {
        let (socket, _) = self.socket.accept()?;
        let shared = &self.shared;
        let busy = shared.watching.fetch_add(1, Ordering::AcqRel) >= shared.config.watchers_max;
        let slot = shared.pool.slot();
        // One that cannot be served is none of the others' business.
        match Watcher::new(shared.clone(), socket, slot, busy) {
            Ok(watcher) => shared.pool.adopt(slot, Box::new(watcher)),
            Err(_) => shared.gone(slot),
        }
        Ok(())
    }
}
