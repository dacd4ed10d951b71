//! Connections outward: made on demand, kept for the next use, bounded.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::net::TcpStream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::time::{Instant, timeout};

use crate::error::{Kind, Stage, TransportError};
use crate::guard::Guard;
use crate::handshake::{Connection, Party, greet};
use crate::limits::Limits;
use crate::receiver::PeerAddress;
use crate::stats::{Counters, TransportStats};
use crate::tls;
use crate::wire::Wire;

/// Buffer of a pipe inside the process.
const PIPE_BYTES: usize = 256 << 10;

/// What a dialer without an endpoint needs. Of the limits it uses those that concern sending.
#[derive(Clone, Debug)]
pub struct DialerConfig {
    /// The name of the host that this node runs on.
    pub host: String,
    /// Where rings are made; `None` for TCP only. See [`crate::default_shm_dir`].
    pub shm_dir: Option<PathBuf>,
    /// What peers must have in common: model, layout, block size.
    pub fingerprint: u64,
    /// The bounds.
    pub limits: Limits,
}

/// Reaches peers, for [`crate::Flight`] and [`crate::fetch`]. Cheap to clone; clones share connections.
#[derive(Clone)]
pub struct Dialer {
    inner: Arc<Inner>,
}

struct Inner {
    party: Arc<Party>,
    link: Link,
    in_use: Arc<Semaphore>,
    idle: Mutex<Vec<Idle>>,
}

/// How a peer is reached.
enum Link {
    /// At its address.
    Tcp,
    /// Whatever the address: the endpoint of this process that takes streams here.
    Memory(mpsc::Sender<Wire>),
}

struct Idle {
    peer: PeerAddress,
    since: Instant,
    connection: Connection,
}

/// A connection in use, and the right to use one.
pub(crate) struct Leased {
    pub(crate) connection: Connection,
    pub(crate) permit: OwnedSemaphorePermit,
    /// It has been used before, so the peer may have closed it since.
    pub(crate) pooled: bool,
}

impl Dialer {
    /// # Errors
    /// [`Kind::Invalid`] for unsound limits or names.
    pub fn new(config: DialerConfig) -> Result<Self, TransportError> {
        Self::guarded(config, Guard::default())
    }

    /// The same, to peers that ask for what `guard` has, and have it themselves.
    ///
    /// # Errors
    /// As [`Dialer::new`].
    pub fn guarded(config: DialerConfig, guard: Guard) -> Result<Self, TransportError> {
        let party = Party {
            host: config.host,
            shm_dir: config.shm_dir,
            fingerprint: config.fingerprint,
            limits: config.limits,
            counters: Arc::new(Counters::default()),
            carrier: None,
            guard,
        };
        party.check()?;
        Ok(Self::with(Arc::new(party), Link::Tcp))
    }

    /// The dialer of an endpoint: same party, same counters.
    pub(crate) fn of(party: Arc<Party>) -> Self {
        Self::with(party, Link::Tcp)
    }

    /// A dialer whose every connection goes to one endpoint of this process.
    pub(crate) fn inside(party: Arc<Party>, to: mpsc::Sender<Wire>) -> Self {
        Self::with(party, Link::Memory(to))
    }

    fn with(party: Arc<Party>, link: Link) -> Self {
        let in_use = Arc::new(Semaphore::new(party.limits.connections));
        Self { inner: Arc::new(Inner { party, link, in_use, idle: Mutex::new(Vec::new()) }) }
    }

    /// The transports of this node's part in the transfer engine, the preferred first, with their devices; and those
    /// that it has not, with the reason. Empty without a part in it.
    pub fn ways(&self) -> &[String] {
        self.party().carrier.as_ref().map_or(&[], |carrier| carrier.ways())
    }

    /// What this dialer, and the endpoint it came from, have done.
    pub fn stats(&self) -> TransportStats {
        self.party().stats()
    }

    pub(crate) fn party(&self) -> &Arc<Party> {
        &self.inner.party
    }

    /// A connection to the peer: one that is idle, else a new one.
    pub(crate) async fn lease(&self, peer: &PeerAddress) -> Result<Leased, TransportError> {
        let limit = self.party().limits.connect_timeout();
        let permit = match timeout(limit, self.inner.in_use.clone().acquire_owned()).await {
            Ok(permit) => permit.expect("the semaphore is never closed"),
            Err(_) => {
                let most = self.party().limits.connections;
                let text = format!("all {most} connections are in use");
                return Err(TransportError::new(Kind::Retry, Stage::Connect, text));
            }
        };
        if let Some(connection) = self.take_idle(peer) {
            return Ok(Leased { connection, permit, pooled: true });
        }
        let connection = self.connect(peer).await?;
        Ok(Leased { connection, permit, pooled: false })
    }

    /// Keeps a connection whose work is done; the one idle longest goes where there is no room.
    pub(crate) fn give_back(&self, peer: &PeerAddress, connection: Connection) {
        let most = self.party().limits.idle_connections;
        let mut idle = self.idle();
        while !idle.is_empty() && idle.len() >= most {
            idle.remove(0);
        }
        if most > 0 {
            idle.push(Idle { peer: peer.clone(), since: Instant::now(), connection });
        }
    }

    fn take_idle(&self, peer: &PeerAddress) -> Option<Connection> {
        // Half of what the other side waits, so that it seldom closes one just taken.
        let most = self.party().limits.idle_timeout() / 2;
        let mut idle = self.idle();
        idle.retain(|one| one.since.elapsed() < most);
        let at = idle.iter().rposition(|one| one.peer == *peer)?;
        Some(idle.remove(at).connection)
    }

    fn idle(&self) -> MutexGuard<'_, Vec<Idle>> {
        self.inner.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn connect(&self, peer: &PeerAddress) -> Result<Connection, TransportError> {
        let wire = match &self.inner.link {
            Link::Tcp => self.connect_tcp(&peer.kv_address).await?,
            Link::Memory(to) => {
                let (near, far) = Wire::pipe(PIPE_BYTES);
                to.try_send(far).map_err(|_| {
                    let text = "the endpoint of this process takes no more connections";
                    TransportError::new(Kind::Unavailable, Stage::Connect, text)
                })?;
                near
            }
        };
        greet(self.party(), wire, &peer.host).await
    }

    async fn connect_tcp(&self, address: &str) -> Result<Wire, TransportError> {
        let limit = self.party().limits.connect_timeout();
        let failed = |why: String| {
            TransportError::new(Kind::Unavailable, Stage::Connect, format!("cannot reach {address}: {why}"))
        };
        match timeout(limit, TcpStream::connect(address)).await {
            Ok(Ok(stream)) => tls::open(self.party(), stream, address).await,
            Ok(Err(error)) => Err(failed(error.to_string())),
            Err(_) => Err(failed(format!("no answer for {} ms", limit.as_millis()))),
        }
    }
}

impl std::fmt::Debug for Dialer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Dialer").field("host", &self.party().host).finish_non_exhaustive()
    }
}
