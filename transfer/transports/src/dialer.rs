//! Connections outward: made on demand, kept for the next use, bounded.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::net::TcpStream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, timeout};

use crate::error::{Kind, Stage, TransportError};
use crate::handshake::{Connection, Party, greet};
use crate::receiver::PeerAddress;
use crate::stats::TransportStats;
use crate::tls;
use crate::wire::Wire;

/// Reaches peers, for [`crate::Flight`] and [`crate::fetch`]. Cheap to clone; clones share connections.
#[derive(Clone)]
pub struct Dialer {
    inner: Arc<Inner>,
}

struct Inner {
    party: Arc<Party>,
    in_use: Arc<Semaphore>,
    idle: Mutex<Vec<IdleConnection>>,
}

struct IdleConnection {
    peer: PeerAddress,
    since: Instant,
    connection: Connection,
}

/// A connection in use, and the right to use one.
pub(crate) struct LeasedConnection {
    pub(crate) connection: Connection,
    pub(crate) permit: OwnedSemaphorePermit,
    /// It has been used before, so the peer may have closed it since.
    pub(crate) pooled: bool,
}

impl Dialer {
    /// The dialer of an endpoint: same party, same counters.
    pub(crate) fn of(party: Arc<Party>) -> Self {
        let in_use = Arc::new(Semaphore::new(party.limits.connections));
        Self { inner: Arc::new(Inner { party, in_use, idle: Mutex::new(Vec::new()) }) }
    }

    /// The transports of this node's part in the transfer engine, the preferred first, with their devices; and those
    /// that it has not, with the reason.
    pub fn transports(&self) -> &[String] {
        self.party().plane.transports()
    }

    /// Audits the transfer engine: a pass over its batches and paths under its lock.
    ///
    /// # Errors
    /// The first invariant that does not hold.
    pub fn check_mover(&self) -> Result<(), String> {
        self.party().plane.check()
    }

    /// Counters of this dialer and of the endpoint that it came from.
    pub fn stats(&self) -> TransportStats {
        self.party().stats()
    }

    pub(crate) fn party(&self) -> &Arc<Party> {
        &self.inner.party
    }

    /// A connection to the peer: one that is idle, else a new one.
    pub(crate) async fn lease(&self, peer: &PeerAddress) -> Result<LeasedConnection, TransportError> {
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
            return Ok(LeasedConnection { connection, permit, pooled: true });
        }
        let connection = self.connect(peer).await?;
        Ok(LeasedConnection { connection, permit, pooled: false })
    }

    /// Keeps a connection whose work is done; the one idle longest goes where there is no room.
    pub(crate) fn give_back(&self, peer: &PeerAddress, connection: Connection) {
        let most = self.party().limits.idle_connections;
        let mut idle = self.idle();
        while !idle.is_empty() && idle.len() >= most {
            idle.remove(0);
        }
        if most > 0 {
            idle.push(IdleConnection { peer: peer.clone(), since: Instant::now(), connection });
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

    fn idle(&self) -> MutexGuard<'_, Vec<IdleConnection>> {
        self.inner.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn connect(&self, peer: &PeerAddress) -> Result<Connection, TransportError> {
        let wire = self.connect_tcp(&peer.kv_address).await?;
        greet(self.party(), wire).await
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
