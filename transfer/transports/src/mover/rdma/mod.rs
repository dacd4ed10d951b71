//! RDMA: one-sided reads and writes between registered memories, with no copy and no processor at the peer.
//!
//! A path is one or more reliable connected queue pairs from one device here to one of the peer's, and a TCP
//! connection beside them, over which they were arranged and over which their end is. The peer's device is
//! the one whose address is nearest to ours. See `docs/rdma.md`.
//!
//! Only `verbs` and `verbs_queue` call libibverbs; everything else here is safe code.

mod accept;
mod config;
mod control;
mod link;
mod mailbox;
mod path;
mod rail;
mod regions;
mod requests;
mod session;
mod threads;
mod verbs;
mod verbs_queue;
mod view;
mod wire;

use std::io;
use std::net::TcpListener;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Instant;

pub use config::RdmaConfig;
pub use view::{DeviceView, OpenedView, device_views};

use super::{
    Capabilities, Completions, Exposure, Fault, Memory, NoticeReceiver, Path, PathId, PeerId, Transport,
    WindowId,
};
use crate::random::random_128;
use accept::Acceptor;
use control::{ask, dial, keep};
use link::Link;
use path::{OpenedPath, RdmaPath, Terms};
use rail::Rail;
use regions::Regions;
use requests::Requests;
use threads::ThreadCounter;
use wire::{End, Record};

/// The transport's name.
const NAME: &str = "rdma";

/// The node that a transport works for.
#[derive(Clone)]
pub struct RdmaNode {
    /// Its own address and life, as peers know them.
    pub id: PeerId,
    /// Its windows.
    pub exposure: Arc<Exposure>,
    /// Where peers' notices go.
    pub inbound: Arc<dyn NoticeReceiver>,
}

/// The RDMA transport of one node.
pub struct RdmaTransport {
    config: Arc<RdmaConfig>,
    id: PeerId,
    rails: Vec<Arc<Rail>>,
    regions: Arc<Regions>,
    threads: Arc<ThreadCounter>,
    acceptor: Arc<Acceptor>,
    paths: Mutex<Vec<Weak<OpenedPath>>>,
    stopping: AtomicBool,
}

impl RdmaTransport {
    /// Opens the devices and takes peers' handshakes at `listener`.
    ///
    /// # Errors
    /// [`Fault::Invalid`] where there is no device to use, and where the system gives no threads.
    pub fn start(config: RdmaConfig, listener: TcpListener, node: RdmaNode) -> Result<Arc<Self>, Fault> {
        let config = Arc::new(config);
        let rails = open_rails(&config)?;
        let domains = rails.iter().map(|rail| rail.domain.clone()).collect();
        let regions = Arc::new(Regions::new(domains, config.region_bytes, node.exposure.clone()));
        let threads = Arc::new(ThreadCounter::default());
        let failed = |error: io::Error| Fault::Invalid(format!("starting RDMA: {error}"));
        for rail in &rails {
            let of_rail = rail.clone();
            threads.spawn("rdma-device", move || of_rail.run()).map_err(failed)?;
        }
        let acceptor = Acceptor::start(&config, listener, &node, &rails, &threads).map_err(failed)?;
        let (id, paths, stopping) = (node.id, Mutex::default(), AtomicBool::new(false));
        Ok(Arc::new(Self { config, id, rails, regions, threads, acceptor, paths, stopping }))
    }

    /// Windows that peers can reach now, and paths that they have opened to here.
    pub fn open_to_peers(&self) -> (usize, usize) {
        (self.regions.windows_open(), self.acceptor.sessions())
    }

    fn arrange(
        &self,
        id: PathId,
        peer: &PeerId,
        rail: &Arc<Rail>,
        completions: Completions,
    ) -> Result<Box<dyn Path>, Fault> {
        if self.stopping.load(Ordering::Acquire) {
            return Err(Fault::Path("RDMA is stopping here".into()));
        }
        let until = Instant::now() + self.config.open_timeout();
        let broken = |error: io::Error| Fault::Path(format!("{}: {error}", rail.name));
        if !rail.port().map_err(broken)?.active {
            return Err(Fault::Path(format!("{}: port {} is down", rail.name, rail.port_number)));
        }
        let link = Link::new(rail, self.config.queue_pairs, self.config.outstanding_max).map_err(broken)?;
        let ours = link.end(&self.config).map_err(broken)?;
        let stream = dial(&self.config, peer, until)?;
        let session = random_128();
        let (from, end) = (self.id.clone(), ours.clone());
        let hello = Record::Hello { to_epoch: peer.epoch, from, session, end };
        let silent = |error: io::Error| Fault::Silent(format!("{}: handshake: {error}", peer.address));
        let theirs = welcomed(ask(&stream, &hello, until).map_err(silent)?, peer)?;
        link.connect(&self.config, &ours, &theirs)?;
        let terms = Terms {
            id,
            queue_pairs: ours.queue_pairs.len(),
            outstanding_max: self.config.outstanding_max,
            works: link.works(),
        };
        let requests = Requests {
            regions: self.regions.clone(),
            device: usize::from(rail.index),
            peer_device: usize::from(theirs.device_index),
            slice_bytes_max: self.config.slice_bytes_max,
        };
        let path = OpenedPath::new(terms, rail, requests, completions, link).map_err(broken)?;
        if let Err(fault) = path.greet(until.saturating_duration_since(Instant::now())) {
            path.discard();
            return Err(fault);
        }
        self.keep(path, stream, peer.clone(), session)
    }

    fn keep(
        &self,
        path: Arc<OpenedPath>,
        stream: std::net::TcpStream,
        peer: PeerId,
        session: u128,
    ) -> Result<Box<dyn Path>, Fault> {
        let broken = |error: io::Error| Fault::Path(format!("starting a thread: {error}"));
        stream.set_read_timeout(Some(self.config.fence_timeout())).map_err(broken)?;
        {
            let mut paths = self.paths.lock().unwrap_or_else(PoisonError::into_inner);
            paths.retain(|path| path.strong_count() > 0);
            let most = self.config.paths_max as usize;
            if self.stopping.load(Ordering::Acquire) || paths.len() >= most {
                path.discard();
                return Err(Fault::Path(format!("RDMA is stopping, or has its {most} paths (paths_max)")));
            }
            paths.push(Arc::downgrade(&path));
        }
        let (kept, config) = (path.clone(), self.config.clone());
        let started =
            self.threads.spawn("rdma-path", move || keep(&kept, &config, &stream, (&peer, session)));
        if let Err(error) = started {
            path.discard();
            return Err(broken(error));
        }
        Ok(Box::new(RdmaPath(path)))
    }
}

fn welcomed(answer: Record, peer: &PeerId) -> Result<End, Fault> {
    match answer {
        Record::Welcome { end } => Ok(end),
        Record::Stale { epoch } => {
            Err(Fault::Stale(format!("{} lives in epoch {epoch}, not {}", peer.address, peer.epoch)))
        }
        Record::Refused { invalid: true, text } => Err(Fault::Invalid(text)),
        Record::Refused { invalid: false, text } => Err(Fault::Path(text)),
        _ => Err(Fault::Invalid(format!("{} answers what it must not; run the same release", peer.address))),
    }
}

fn open_rails(config: &RdmaConfig) -> Result<Vec<Arc<Rail>>, Fault> {
    let chosen = !config.devices.is_empty();
    let names = if chosen { config.devices.clone() } else { verbs::device_names() };
    let mut rails: Vec<Arc<Rail>> = Vec::new();
    for name in names {
        let index = u16::try_from(rails.len()).expect("a node has few devices");
        let opened = Rail::open(config, &name, index);
        let rail = opened.map_err(|error| Fault::Invalid(format!("{error}; see `baton rdma doctor`")))?;
        let active = rail.port().is_ok_and(|port| port.active);
        if chosen || active {
            rails.push(rail);
        }
    }
    if rails.is_empty() {
        let text = "there is no RDMA device with an active port; see `baton rdma doctor`";
        return Err(Fault::Invalid(text.into()));
    }
    Ok(rails)
}

impl Transport for RdmaTransport {
    fn name(&self) -> &'static str {
        NAME
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            slice_bytes_max: self.config.slice_bytes_max,
            outstanding_max: self.config.outstanding_max,
        }
    }

    fn register(&self, memory: &Arc<Memory>) -> Result<(), Fault> {
        self.regions.register(memory)
    }

    fn access(&self, window: WindowId, memory: &Arc<Memory>, at: u64, bytes: u64) -> Result<Vec<u8>, Fault> {
        self.regions.access(window, memory, at, bytes)
    }

    fn revoke(&self, window: WindowId) {
        if let Err(error) = self.regions.revoke(window) {
            // The device has not confirmed it, so every peer that could use the key is cut off.
            self.acceptor.end_all(&format!("a window could not be closed: {error}"));
        }
    }

    fn devices(&self) -> Vec<String> {
        self.rails.iter().map(|rail| rail.name.clone()).collect()
    }

    fn open(
        &self,
        id: PathId,
        peer: &PeerId,
        device: &str,
        completions: Completions,
    ) -> Result<Box<dyn Path>, Fault> {
        let none = || Fault::Invalid(format!("no RDMA device '{device}'; there are {:?}", self.devices()));
        let rail = self.rails.iter().find(|rail| rail.name == device).ok_or_else(none)?;
        self.arrange(id, peer, rail, completions)
    }

    fn shutdown(&self) {
        self.stopping.store(true, Ordering::Release);
        let paths = std::mem::take(&mut *self.paths.lock().unwrap_or_else(PoisonError::into_inner));
        for path in paths.iter().filter_map(Weak::upgrade) {
            path.end(Fault::Path("RDMA is stopping".into()), false);
        }
        self.acceptor.stop();
        self.rails.iter().for_each(|rail| rail.stop());
        self.threads.wait();
    }
}

impl Drop for RdmaTransport {
    fn drop(&mut self) {
        self.shutdown();
    }
}
