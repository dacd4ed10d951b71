//! Shared memory, for peers of one host: each maps the memory of the other, and bytes are copied once.
//!
//! Only the owner of memory writes into it. A write is a request in a shared ring: the peer's I/O thread copies from
//! our memory into its own, with a permit for each chunk. A read is copied by its opener, after the peer has admitted
//! the window. The peer keeps a page that lists its open windows, and a copy counts only when the window was open
//! before and after it. So closing a window needs nobody's help. The posting thread copies small reads at once.
//!
//! Threads sleep on the path's local socket and an eventfd, callers on the eventfd of their queue; each side wakes
//! the other's sleeper. A write thus costs two wake-ups: the server's, which copies, and the caller's. The socket
//! also reveals the peer's end, because the kernel closes it when the peer dies. To fence a path, we end our half,
//! and the peer closes its own once it has stopped copying.

mod bells;
mod channel;
mod codes;
mod lane;
mod rings;
mod route;
mod serving;
mod site;
mod sleep_state;
mod windows;

use std::io;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};

use self::channel::Channel;
use self::lane::Lane;
use self::rings::Rings;
use self::route::{Parts, Route, ShmPath};
use self::serving::Door;
use self::site::Site;
use self::windows::{Table, Windows};
use super::completions::Source;
use super::damage::Damage;
use super::gate::{Gate, PathCapacity};
use super::greeting::{Greeting, Purpose};
use super::reactor::{Listener, Pool};
use super::registry::Registry;
use super::{
    Capabilities, Completions, Exposure, Fault, Memory, NoticeReceiver, Path, PathEnd, PathId, PeerId,
    Transport, WindowId,
};

/// Settings of [`ShmTransport`].
#[derive(Clone, Debug)]
pub struct ShmConfig {
    /// The address that this node has among its peers, `host:port`, as for the other transports. Peers of this
    /// host and network namespace find it by that.
    pub address: String,
    /// The machine's name. Peers with another name do not find each other.
    pub machine: String,
    /// The number of this life.
    pub epoch: u64,
    /// I/O threads, 1 to 64.
    pub io_threads: usize,
    /// Slices that a path takes, at most 65,536.
    pub outstanding_max: u32,
    /// Bytes that a path takes.
    pub credit_bytes: u64,
    /// The largest slice.
    pub slice_bytes_max: u32,
    /// Paths that peers may open.
    pub paths_max: usize,
    /// Whether to spin: I/O threads that serve never sleep, and callers call [`Path::poll`].
    pub poll: bool,
    /// Limit for opening a path.
    pub open_timeout_ms: u64,
    /// How long a peer may move nothing while something is outstanding.
    pub progress_timeout_ms: u64,
    /// Limit for the peer's word that it has cut a path.
    pub fence_timeout_ms: u64,
    /// For tests: damages what lands.
    pub damage: Arc<Damage>,
}

impl ShmConfig {
    /// The usual ones.
    pub fn new(address: impl Into<String>, epoch: u64) -> Self {
        Self {
            address: address.into(),
            machine: String::new(),
            epoch,
            io_threads: 1,
            outstanding_max: 4_096,
            credit_bytes: 1 << 30,
            slice_bytes_max: 16 << 20,
            paths_max: 256,
            poll: false,
            open_timeout_ms: 2_000,
            progress_timeout_ms: 1_500,
            fence_timeout_ms: 1_000,
            damage: Arc::default(),
        }
    }
}

/// The shared-memory transport of this node.
pub struct ShmTransport {
    site: Arc<Site>,
    routes: Mutex<Vec<Weak<Route>>>,
    closing: AtomicBool,
}

impl ShmTransport {
    /// Listens and starts the I/O threads.
    ///
    /// # Errors
    /// When another process of this host has the address, or the system gives no threads or memory.
    pub fn start(
        config: ShmConfig,
        exposure: Arc<Exposure>,
        inbound: Arc<dyn NoticeReceiver>,
    ) -> io::Result<Arc<Self>> {
        let socket = channel::listen(&config.machine, &config.address)?;
        let windows = Windows::create()?;
        let pool = Pool::start("shm", config.io_threads)?;
        let site = Arc::new(Site {
            config,
            pool,
            exposure,
            inbound,
            registry: Registry::default(),
            windows,
            served: AtomicUsize::new(0),
            channels: Mutex::default(),
        });
        let door = Listener::new(Door { socket, site: site.clone() });
        site.pool.adopt(site.pool.slot(), Box::new(door));
        Ok(Arc::new(Self { site, routes: Mutex::default(), closing: AtomicBool::new(false) }))
    }

    /// This node's identity to its peers.
    pub fn peer_id(&self) -> PeerId {
        PeerId { address: self.site.config.address.clone(), epoch: self.site.config.epoch }
    }

    fn routes(&self) -> MutexGuard<'_, Vec<Weak<Route>>> {
        self.routes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Connects and greets.
    fn dial(&self, peer: &PeerId, callers_bell: BorrowedFd<'_>) -> io::Result<DialOutcome> {
        let config = &self.site.config;
        let limit = Duration::from_millis(config.open_timeout_ms);
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let (bell, our_bell) = (eventfd(0, flags)?, eventfd(0, flags)?);
        let rings = Rings::create(config.outstanding_max)?;
        let channel = Channel::connect(&self.site.config.machine, &peer.address, limit)?;
        let greeting = self.site.greeting(Purpose::Lane, peer.epoch, config.address.clone());
        let files = [rings.file(), bell.as_fd(), our_bell.as_fd(), callers_bell];
        channel.send(&greeting.encode(), &files, true)?;
        let answer = channel.receive_greeting(true)?;
        let (record, mut files) = answer.ok_or(io::ErrorKind::TimedOut)?;
        let answer = Greeting::decode(&record).and_then(Greeting::welcome);
        let table = files.pop().map(Table::adopt).transpose()?;
        Ok(DialOutcome { answer, table, parts: (Arc::new(channel), rings, bell), our_bell })
    }
}

/// The result of dialling.
struct DialOutcome {
    answer: Result<Greeting, Fault>,
    table: Option<Table>,
    parts: (Arc<Channel>, Rings, std::os::fd::OwnedFd),
    our_bell: std::os::fd::OwnedFd,
}

fn shutting_down() -> Fault {
    Fault::Path("the transport is shutting down".into())
}

impl Transport for ShmTransport {
    fn name(&self) -> &'static str {
        "shm"
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            slice_bytes_max: self.site.config.slice_bytes_max,
            outstanding_max: self.site.config.outstanding_max,
        }
    }

    fn register(&self, memory: &Arc<Memory>) -> Result<(), Fault> {
        self.site.register(memory)
    }

    fn access(&self, _: WindowId, memory: &Arc<Memory>, at: u64, bytes: u64) -> Result<Vec<u8>, Fault> {
        self.site.registry.check(memory, at, bytes)?;
        Ok(Vec::new())
    }

    fn revoke(&self, window: WindowId) {
        self.site.windows.shut(window);
    }

    fn devices(&self) -> Vec<String> {
        vec!["memory".into()]
    }

    fn open(
        &self,
        id: PathId,
        peer: &PeerId,
        _device: &str,
        completions: Completions,
    ) -> Result<Box<dyn Path>, Fault> {
        if self.closing.load(Ordering::Acquire) {
            return Err(shutting_down());
        }
        let site = &self.site;
        let failed = |error: io::Error| {
            let text = format!("open a path to {} on this host: {error}", peer.address);
            match error.kind() {
                io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock => Fault::Silent(text),
                _ => Fault::Path(text),
            }
        };
        let dialled = completions.bell().and_then(|bell| self.dial(peer, bell));
        let DialOutcome { answer, table, parts: (channel, rings, bell), our_bell } =
            dialled.map_err(failed)?;
        let allowed = answer?;
        let table = table.ok_or_else(|| failed(io::Error::other("its answer lacks the table of windows")))?;
        let room = PathCapacity {
            // The ring has the length that we asked for, so a larger limit of the peer has no use.
            slices: site.config.outstanding_max.min(allowed.outstanding_max),
            bytes: site.config.credit_bytes.min(allowed.credit_bytes),
            slice_bytes: site.config.slice_bytes_max.min(allowed.slice_bytes_max),
        };
        site.introduce(&channel).map_err(failed)?;
        let parts = Parts { channel, rings, table, bell };
        let gate = Gate::new(id, completions.clone(), room);
        let route = Arc::new(Route::new(site.clone(), gate, peer.clone(), parts));
        let mut routes = self.routes();
        if self.closing.load(Ordering::Acquire) {
            return Err(shutting_down());
        }
        routes.retain(|route| route.strong_count() > 0);
        routes.push(Arc::downgrade(&route));
        site.pool.adopt(route.slot, Box::new(Lane::new(route.clone(), our_bell)));
        drop(routes);
        let source: Weak<dyn Source> = Arc::downgrade(&(route.clone() as Arc<dyn Source>));
        completions.join(source);
        Ok(Box::new(ShmPath(route)))
    }

    fn shutdown(&self) {
        let routes: Vec<_> = {
            let routes = self.routes();
            self.closing.store(true, Ordering::Release);
            routes.iter().filter_map(Weak::upgrade).collect()
        };
        for route in &routes {
            route.end(shutting_down(), false);
        }
        let limit = Duration::from_millis(self.site.config.fence_timeout_ms);
        let until = Instant::now() + limit + Duration::from_millis(500);
        for route in &routes {
            route.gate.wait_ended(until.saturating_duration_since(Instant::now()));
        }
        self.site.pool.stop();
        // No thread is left to end the remaining paths, so they end here.
        for route in &routes {
            route.gate.ended(PathEnd::PeerUnknown);
        }
    }
}

impl Drop for ShmTransport {
    fn drop(&mut self) {
        self.shutdown();
    }
}
