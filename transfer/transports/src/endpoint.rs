//! The listening side of a node.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::timeout;

use crate::carrier::{Carrier, CarrierConfig};
use crate::dialer::Dialer;
use crate::error::{Kind, Stage, TransportError};
use crate::guard::Guard;
use crate::handshake::{Party, default_shm_dir};
use crate::landing::Landings;
use crate::limits::Limits;
use crate::random::random;
use crate::receiver::Receiver;
use crate::ring;
use crate::serve::serve;
use crate::stats::{Counters, Place, TransportStats, add};
use crate::tls;
use crate::wire::Wire;

/// Streams from inside the process that wait to be taken.
const INSIDE_QUEUE: usize = 16;
/// Before accepting again when the system is out of files.
const ACCEPT_PAUSE: Duration = Duration::from_millis(10);

/// How far an endpoint has been shut down.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Phase {
    /// Not at all.
    Serving,
    /// What is in progress may end.
    Draining,
    /// What is in progress is aborted.
    Cutting,
}

/// Returns when the endpoint is as far as `phase`, or is gone.
pub(crate) async fn reached(phase: Phase, phases: &mut watch::Receiver<Phase>) {
    // That the sender is gone is the only error, and then it is the end all the same.
    let _ = phases.wait_for(|now| *now >= phase).await;
}

/// What an endpoint needs.
#[derive(Clone, Debug)]
pub struct EndpointConfig {
    /// Where to listen; port 0 takes any that is free.
    pub listen: SocketAddr,
    /// The name of the host that this node runs on: peers that give the same use shared memory.
    pub host: String,
    /// Where rings are; `None` for TCP only.
    pub shm_dir: Option<PathBuf>,
    /// What peers must have in common: model, layout, block size.
    pub fingerprint: u64,
    /// The bounds.
    pub limits: Limits,
    /// Hand-offs by the transfer engine; none leaves them to the flights' own connections.
    pub carrier: Option<CarrierConfig>,
    /// What peers have to show; by default nothing.
    pub guard: Guard,
}

impl EndpointConfig {
    /// With the system's shared memory and the default limits, and without the transfer engine.
    pub fn new(listen: SocketAddr, host: impl Into<String>, fingerprint: u64) -> Self {
        let (host, limits) = (host.into(), Limits::default());
        Self {
            listen,
            host,
            shm_dir: default_shm_dir(),
            fingerprint,
            limits,
            carrier: None,
            guard: Guard::default(),
        }
    }
}

/// Takes in flights and serves fetches for one node, until [`Endpoint::shutdown`] or dropped.
pub struct Endpoint {
    address: SocketAddr,
    party: Arc<Party>,
    dialer: Dialer,
    inside: mpsc::Sender<Wire>,
    phases: watch::Sender<Phase>,
    accepting: Mutex<Option<JoinHandle<()>>>,
}

impl Endpoint {
    /// Listens, after clearing rings that killed processes left behind. Without a usable directory for
    /// rings it goes on over TCP and counts a fallback.
    ///
    /// # Errors
    /// [`Kind::Invalid`] for unsound limits or names, [`Kind::Unavailable`] where the address is taken.
    pub async fn bind(config: EndpointConfig, receiver: Arc<dyn Receiver>) -> Result<Self, TransportError> {
        let mut party = Party {
            host: config.host,
            shm_dir: config.shm_dir,
            fingerprint: config.fingerprint,
            limits: config.limits,
            counters: Arc::new(Counters::default()),
            carrier: None,
            guard: config.guard,
        };
        party.check()?;
        let tls = party.guard.tls.clone();
        party.carrier = config
            .carrier
            .map(|carrier| Carrier::start(&carrier, (&party.host, random()), tls))
            .transpose()?;
        clear_rings(&mut party);
        let failed = |error: std::io::Error| {
            let text = format!("cannot listen on {}: {error}", config.listen);
            TransportError::new(Kind::Unavailable, Stage::Bind, text)
        };
        let listener = TcpListener::bind(config.listen).await.map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        let party = Arc::new(party);
        let (inside, from_inside) = mpsc::channel(INSIDE_QUEUE);
        let (phases, seen) = watch::channel(Phase::Serving);
        let landings = Arc::new(Landings::new(party.clone(), receiver));
        let accepting = tokio::spawn(accept(landings, listener, from_inside, seen));
        let dialer = Dialer::of(party.clone());
        Ok(Self { address, party, dialer, inside, phases, accepting: Mutex::new(Some(accepting)) })
    }

    /// The address that it listens on.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// For flights and fetches from this node to others; counts into the same [`Endpoint::stats`].
    pub fn dialer(&self) -> Dialer {
        self.dialer.clone()
    }

    /// A dialer that reaches this endpoint, whatever the address, through memory of this process.
    pub fn loopback(&self) -> Dialer {
        Dialer::inside(self.party.clone(), self.inside.clone())
    }

    /// What it has done since it was bound.
    pub fn stats(&self) -> TransportStats {
        self.party.stats()
    }

    /// Bytes of registered memory that are in use now, on their way in or out; 0 without the transfer engine.
    pub fn lent_bytes(&self) -> u64 {
        self.party.carrier.as_ref().map_or(0, |carrier| carrier.lent_bytes())
    }

    /// Stops accepting, lets flights and fetches in progress end within `grace`, and aborts the rest.
    /// Returns when none is left. A second call returns at once.
    pub async fn shutdown(&self, grace: Duration) {
        self.phases.send_replace(Phase::Draining);
        let accepting = self.accepting.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(mut accepting) = accepting else { return };
        if timeout(grace, &mut accepting).await.is_err() {
            self.phases.send_replace(Phase::Cutting);
            // It fails only by a panic of a connection, which the runtime has reported.
            let _ = accepting.await;
        }
        if let Some(carrier) = &self.party.carrier {
            carrier.shutdown().await;
        }
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        if let Some(accepting) = self.accepting.lock().unwrap_or_else(PoisonError::into_inner).take() {
            accepting.abort();
        }
    }
}

impl std::fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Endpoint").field("address", &self.address).finish_non_exhaustive()
    }
}

/// A directory that cannot even be read is of no use.
fn clear_rings(party: &mut Party) {
    let Some(dir) = &party.shm_dir else { return };
    if let Err(error) = ring::clear_stale(dir) {
        party.fall_back(&format!("cannot use {} for shared memory: {error}", dir.display()));
        party.shm_dir = None;
    }
}

/// Accepts until stopped, then waits for what is in progress. Aborted, it takes all connections along.
async fn accept(
    landings: Arc<Landings>,
    listener: TcpListener,
    mut from_inside: mpsc::Receiver<Wire>,
    mut seen: watch::Receiver<Phase>,
) {
    let mut connections = JoinSet::new();
    loop {
        let arrival = tokio::select! {
            biased;
            () = reached(Phase::Draining, &mut seen) => break,
            Some(_) = connections.join_next() => continue,
            Some(wire) = from_inside.recv() => Ok(Arrival::Inside(wire)),
            accepted = listener.accept() => accepted.map(|(stream, _)| Arrival::Socket(stream)),
        };
        match arrival {
            Ok(arrival) => take(&landings, arrival, &mut connections, &seen),
            Err(error) => {
                let error = TransportError::from_io(&error, Stage::Serve, "accepting a connection");
                landings.party.counters.failed(&error);
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
    drop((listener, from_inside));
    tokio::select! {
        () = reached(Phase::Cutting, &mut seen) => connections.shutdown().await,
        () = async { while connections.join_next().await.is_some() {} } => {}
    }
}

/// A stream before anything was said on it.
enum Arrival {
    Inside(Wire),
    Socket(TcpStream),
}

fn take(
    landings: &Arc<Landings>,
    arrival: Arrival,
    connections: &mut JoinSet<()>,
    seen: &watch::Receiver<Phase>,
) {
    let party = &landings.party;
    let place = Place::take(&party.counters, |all| &all.open_connections, party.limits.connections);
    let Some(place) = place else {
        add(&party.counters.turned_away_connections, 1);
        return;
    };
    let (landings, seen) = (landings.clone(), seen.clone());
    connections.spawn(async move {
        let _place = place;
        let wire = match arrival {
            Arrival::Inside(wire) => Ok(wire),
            Arrival::Socket(stream) => tls::accept(&landings.party, stream).await,
        };
        match wire {
            Ok(wire) => serve(landings, wire, seen).await,
            Err(error) => landings.party.counters.failed(&error),
        }
    });
}
