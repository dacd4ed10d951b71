//! The listening side of a node.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::timeout;

use crate::data_plane::{DataPlane, DataPlaneConfig};
use crate::dialer::Dialer;
use crate::error::{Kind, Stage, TransportError};
use crate::guard::Guard;
use crate::handshake::{Party, check_host};
use crate::landing::Landings;
use crate::limits::Limits;
use crate::random::random;
use crate::receiver::Receiver;
use crate::serve::serve;
use crate::stats::{Counters, Place, TransportStats};
use crate::tls;

/// Before accepting again when the system is out of files.
const ACCEPT_PAUSE: Duration = Duration::from_millis(10);

/// How far an endpoint has been shut down.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Phase {
    /// Not at all.
    Serving,
    /// Work in progress may end.
    Draining,
    /// The endpoint aborts work in progress.
    Cutting,
}

/// Returns when the endpoint is as far as `phase`, or is gone.
pub(crate) async fn reached(phase: Phase, phases: &mut watch::Receiver<Phase>) {
    // That the sender is gone is the only error, and then it is the end all the same.
    let _ = phases.wait_for(|now| *now >= phase).await;
}

/// Settings of an endpoint.
#[derive(Clone, Debug)]
pub struct EndpointConfig {
    /// Where to listen; port 0 takes any that is free.
    pub listen: SocketAddr,
    /// The name of the machine that this node runs on: peers that give the same share memory.
    pub host: String,
    /// Fingerprint of model, layout and block size. Peers must have the same.
    pub fingerprint: u64,
    /// The bounds.
    pub limits: Limits,
    /// How KV moves.
    pub data: DataPlaneConfig,
    /// Credentials that peers must show; by default none.
    pub guard: Guard,
}

impl EndpointConfig {
    /// With the default limits, over every transport that there is.
    pub fn new(listen: SocketAddr, host: impl Into<String>, fingerprint: u64) -> Self {
        let (host, limits) = (host.into(), Limits::default());
        let data = DataPlaneConfig::new(listen.ip());
        Self { listen, host, fingerprint, limits, data, guard: Guard::default() }
    }
}

/// Takes in flights and serves fetches for one node, until [`Endpoint::shutdown`] or dropped.
pub struct Endpoint {
    address: SocketAddr,
    party: Arc<Party>,
    dialer: Dialer,
    phases: watch::Sender<Phase>,
    accepting: Mutex<Option<JoinHandle<()>>>,
}

impl Endpoint {
    /// Listens, and registers the memory.
    ///
    /// # Errors
    /// [`Kind::Invalid`] for unsound names or devices, [`Kind::Unavailable`] where the address is taken or
    /// there is no memory.
    pub async fn bind(config: EndpointConfig, receiver: Arc<dyn Receiver>) -> Result<Self, TransportError> {
        check_host(&config.host)?;
        let plane = DataPlane::start(&config.data, (&config.host, random()), config.guard.tls.clone())?;
        let party = Party {
            host: config.host,
            fingerprint: config.fingerprint,
            limits: config.limits,
            counters: Arc::new(Counters::default()),
            plane,
            guard: config.guard,
        };
        let failed = |error: std::io::Error| {
            let text = format!("cannot listen on {}: {error}", config.listen);
            TransportError::new(Kind::Unavailable, Stage::Bind, text)
        };
        let listener = TcpListener::bind(config.listen).await.map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        let party = Arc::new(party);
        let (phases, seen) = watch::channel(Phase::Serving);
        let landings = Arc::new(Landings::new(party.clone(), receiver));
        let accepting = tokio::spawn(accept(landings, listener, seen));
        let dialer = Dialer::of(party.clone());
        Ok(Self { address, party, dialer, phases, accepting: Mutex::new(Some(accepting)) })
    }

    /// The address that it listens on.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// For flights and fetches from this node to others; counts into the same [`Endpoint::stats`].
    pub fn dialer(&self) -> Dialer {
        self.dialer.clone()
    }

    /// Counters of the endpoint since it was bound.
    pub fn stats(&self) -> TransportStats {
        self.party.stats()
    }

    /// Bytes of registered memory that are in use now, on their way in or out.
    pub fn lent_bytes(&self) -> u64 {
        self.party.plane.lent_bytes()
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
        self.party.plane.shutdown().await;
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

/// Accepts until stopped, then waits for what is in progress. Aborted, it takes all connections along.
///
/// Not the acceptor of `baton-http`: this crate has no HTTP, and its peers are nodes, of which many may share an address
/// and none may lack a place for that.
async fn accept(landings: Arc<Landings>, listener: TcpListener, mut seen: watch::Receiver<Phase>) {
    let mut connections = JoinSet::new();
    loop {
        let arrival = tokio::select! {
            biased;
            () = reached(Phase::Draining, &mut seen) => break,
            Some(_) = connections.join_next() => continue,
            accepted = listener.accept() => accepted.map(|(stream, _)| stream),
        };
        match arrival {
            Ok(arrival) => take(&landings, arrival, &mut connections, &seen),
            Err(_) => tokio::time::sleep(ACCEPT_PAUSE).await,
        }
    }
    drop(listener);
    tokio::select! {
        () = reached(Phase::Cutting, &mut seen) => connections.shutdown().await,
        () = async { while connections.join_next().await.is_some() {} } => {}
    }
}

fn take(
    landings: &Arc<Landings>,
    arrival: TcpStream,
    connections: &mut JoinSet<()>,
    seen: &watch::Receiver<Phase>,
) {
    let party = &landings.party;
    let place = Place::take(&party.counters, |all| &all.open_connections, party.limits.connections);
    let Some(place) = place else { return };
    let (landings, seen) = (landings.clone(), seen.clone());
    connections.spawn(async move {
        let _place = place;
        if let Ok(wire) = tls::accept(&landings.party, arrival).await {
            serve(landings, wire, seen).await;
        }
    });
}
