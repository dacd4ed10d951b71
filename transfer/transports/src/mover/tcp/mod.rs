//! TCP: each path is one or a few connections whose bodies go straight from and into registered memory.
//!
//! Writes carry their bytes and are acknowledged, many at a time; reads are answered by the peer's I/O thread.
//! A body is moved in chunks of at most 256 KiB, each with a permit of its own, so that closing a window
//! waits for one chunk at most. A path ends in two steps: its own threads cut its connections, so that
//! nothing lands here; then a fresh short connection asks the peer to do the same.

mod fence;
mod incoming;
mod lane;
mod outgoing;
mod route;
mod serving;
mod site;
mod stream;
mod tls;
mod vectored;
mod wire;

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs as _};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use self::lane::Lane;
use self::route::{LaneDoor, Route, TcpPath};
use self::serving::Door;
use self::site::Site;
use self::stream::Stream;
pub use self::tls::{TcpTls, TlsPem};
use super::damage::Damage;
use super::gate::{Gate, PathCapacity};
use super::greeting::{GREETING_BYTES, Greeting, Purpose};
use super::reactor::{Listener, Pool};
use super::registry::Registry;
use super::sockets::{connect, fill, time_left, trouble};
use super::{
    Capabilities, Completions, Exposure, Fault, Memory, NoticeReceiver, Path, PathId, PeerId, Transport,
    WindowId,
};

/// Settings of [`TcpTransport`].
#[derive(Clone, Debug)]
pub struct TcpConfig {
    /// Where to listen; port 0 takes a free one.
    pub listen: SocketAddr,
    /// How peers reach that, `host:port`; by default as it is bound.
    pub advertise: Option<String>,
    /// The number of this life.
    pub epoch: u64,
    /// Connections of a path, 1 to 16.
    pub lanes: usize,
    /// I/O threads, 1 to 64.
    pub io_threads: usize,
    /// Slices that a path takes.
    pub outstanding_max: u32,
    /// Bytes that a path takes.
    pub credit_bytes: u64,
    /// The largest slice.
    pub slice_bytes_max: u32,
    /// Connections that peers may open.
    pub connections_max: usize,
    /// Limit for making a connection.
    pub open_timeout_ms: u64,
    /// How long a peer may move nothing while something is outstanding.
    pub progress_timeout_ms: u64,
    /// Limit for the peer's word that it has cut a path.
    pub fence_timeout_ms: u64,
    /// TLS for all connections, or none.
    pub tls: Option<TcpTls>,
    /// For tests: damages what lands.
    pub damage: Arc<Damage>,
}

impl TcpConfig {
    /// The usual ones.
    pub fn new(listen: SocketAddr, epoch: u64) -> Self {
        Self {
            listen,
            advertise: None,
            epoch,
            lanes: 1,
            io_threads: 2,
            outstanding_max: 4_096,
            credit_bytes: 256 << 20,
            slice_bytes_max: 16 << 20,
            connections_max: 1_024,
            open_timeout_ms: 2_000,
            progress_timeout_ms: 2_000,
            fence_timeout_ms: 1_000,
            tls: None,
            damage: Arc::default(),
        }
    }
}

/// The TCP transport of this node.
pub struct TcpTransport {
    site: Arc<Site>,
    registry: Registry,
    routes: Mutex<Vec<Weak<Route>>>,
    closing: AtomicBool,
}

impl TcpTransport {
    /// Listens and starts the I/O threads.
    ///
    /// # Errors
    /// When the address cannot be had, or the system gives no threads.
    pub fn start(
        config: TcpConfig,
        exposure: Arc<Exposure>,
        inbound: Arc<dyn NoticeReceiver>,
    ) -> io::Result<Arc<Self>> {
        let socket = TcpListener::bind(config.listen)?;
        socket.set_nonblocking(true)?;
        let bound = socket.local_addr()?.to_string();
        let address = config.advertise.clone().unwrap_or(bound);
        let pool = Pool::start("tcp", config.io_threads)?;
        let site = Arc::new(Site { config, address, pool, exposure, inbound, served: AtomicUsize::new(0) });
        let door = Listener::new(Door { socket, site: site.clone() });
        site.pool.adopt(site.pool.slot(), Box::new(door));
        Ok(Arc::new(Self {
            site,
            registry: Registry::default(),
            routes: Mutex::default(),
            closing: AtomicBool::new(false),
        }))
    }

    /// This node's identity to its peers.
    pub fn peer_id(&self) -> PeerId {
        PeerId { address: self.site.address.clone(), epoch: self.site.config.epoch }
    }

    /// Connects and greets; what the peer allows comes with the stream.
    fn dial(&self, peer: &PeerId, session: u128) -> Result<(Stream, SocketAddr, Greeting), Fault> {
        let until = Instant::now() + Duration::from_millis(self.site.config.open_timeout_ms);
        let failed = |what: &str, error: &io::Error| trouble(what, &peer.address, error);
        let found = peer.address.to_socket_addrs().map_err(|error| failed("look up", &error))?;
        let (socket, address) = connect(found, until).map_err(|error| failed("connect to", &error))?;
        let greeted = self.greet(socket, peer, session, until);
        let (stream, answer) = greeted.map_err(|error| failed("greet", &error))?;
        Ok((stream, address, Greeting::decode(&answer)?.welcome()?))
    }

    /// Says who we are and takes the answer, under TLS where that is set.
    fn greet(
        &self,
        mut socket: TcpStream,
        peer: &PeerId,
        session: u128,
        until: Instant,
    ) -> io::Result<(Stream, [u8; GREETING_BYTES])> {
        let text = self.site.address.clone();
        let record = self.site.greeting(Purpose::Lane, peer.epoch, session, text).encode();
        socket.set_nodelay(true)?;
        let mut tls = match &self.site.config.tls {
            Some(tls) => Some(tls.connect(&peer.address)?),
            None => None,
        };
        let clock = socket.try_clone()?;
        let answer = match &mut tls {
            Some(tls) => exchange(&mut rustls::Stream::new(tls, &mut socket), &clock, &record, until)?,
            None => exchange(&mut socket, &clock, &record, until)?,
        };
        Ok((Stream::new(socket, tls.map(rustls::Connection::from))?, answer))
    }

    fn routes(&self) -> MutexGuard<'_, Vec<Weak<Route>>> {
        self.routes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Transport for TcpTransport {
    fn name(&self) -> &'static str {
        "tcp"
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            slice_bytes_max: self.site.config.slice_bytes_max,
            outstanding_max: self.site.config.outstanding_max,
        }
    }

    fn register(&self, memory: &Arc<Memory>) -> Result<(), Fault> {
        self.registry.add(memory);
        Ok(())
    }

    fn access(&self, _: WindowId, memory: &Arc<Memory>, at: u64, bytes: u64) -> Result<Vec<u8>, Fault> {
        self.registry.check(memory, at, bytes)?;
        Ok(Vec::new())
    }

    fn revoke(&self, _: WindowId) {}

    fn devices(&self) -> Vec<String> {
        vec!["net".into()]
    }

    fn open(
        &self,
        id: PathId,
        peer: &PeerId,
        _device: &str,
        completions: Completions,
    ) -> Result<Box<dyn Path>, Fault> {
        if self.closing.load(Ordering::Acquire) {
            return Err(Fault::Path("open: the transport is shutting down".into()));
        }
        let site = &self.site;
        let session = crate::random::random_128();
        let dialled = (0..site.config.lanes).map(|_| self.dial(peer, session));
        let dialled = dialled.collect::<Result<Vec<_>, _>>()?;
        let (_, address, allowed) = dialled.first().expect("at least one lane");
        let room = PathCapacity {
            slices: site.config.outstanding_max.min(allowed.outstanding_max),
            bytes: site.config.credit_bytes.min(allowed.credit_bytes),
            slice_bytes: site.config.slice_bytes_max.min(allowed.slice_bytes_max),
        };
        let route = Arc::new(Route {
            site: site.clone(),
            gate: Gate::new(id, completions, room),
            peer: peer.clone(),
            address: *address,
            session,
            doors: dialled.iter().map(|_| LaneDoor::new(site.pool.slot())).collect(),
            lanes_left: AtomicUsize::new(dialled.len()),
        });
        let mut routes = self.routes();
        if self.closing.load(Ordering::Acquire) {
            return Err(Fault::Path("open: the transport is shutting down".into()));
        }
        routes.retain(|route| route.strong_count() > 0);
        routes.push(Arc::downgrade(&route));
        for (index, (stream, _, _)) in dialled.into_iter().enumerate() {
            let lane = Lane::new(route.clone(), index, stream);
            site.pool.adopt(route.doors[index].slot(), Box::new(lane));
        }
        drop(routes);
        Ok(Box::new(TcpPath(route)))
    }

    fn shutdown(&self) {
        let routes: Vec<_> = {
            let routes = self.routes();
            self.closing.store(true, Ordering::Release);
            routes.iter().filter_map(Weak::upgrade).collect()
        };
        for route in &routes {
            route.end(Fault::Path("the transport is shutting down".into()), false);
        }
        let limit = Duration::from_millis(self.site.config.fence_timeout_ms);
        let until = Instant::now() + limit + Duration::from_millis(500);
        for route in &routes {
            route.gate.wait_ended(until.saturating_duration_since(Instant::now()));
        }
        self.site.pool.stop();
        // No thread is left to end the remaining paths, so they end here.
        for route in &routes {
            route.gate.ended(super::PathEnd::PeerUnknown);
        }
    }
}

impl Drop for TcpTransport {
    fn drop(&mut self) {
        self.shutdown();
    }
}

/// Sends a record and takes the answer; `clock` is the socket whose limits of time count.
fn exchange(
    stream: &mut (impl Read + Write),
    clock: &TcpStream,
    record: &[u8],
    until: Instant,
) -> io::Result<[u8; GREETING_BYTES]> {
    clock.set_write_timeout(Some(time_left(until)))?;
    // Under TLS, writing may read first.
    clock.set_read_timeout(Some(time_left(until)))?;
    stream.write_all(record)?;
    let mut answer = [0; GREETING_BYTES];
    fill(stream, clock, &mut answer, until)?;
    Ok(answer)
}
