//! Accepting connections, and what all of them share.

use std::future::Future;
use std::io::Write as _;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use baton_http::Identity;
use baton_types::TenantId;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

use super::budget::Budget;
use super::connection;
use super::counts::{self, Counts, ServerStats};
use super::places::{ConnectionState, ConnectionTable};
use crate::store::ObjectStore;

/// Bytes that all connections together may have for commands that come in and answers that wait, beside 128 KiB each.
pub const BUFFERS_MAX_BYTES: u64 = 128 << 20;
/// How long to wait after the system has not handed a connection over.
const ACCEPT_PAUSE: Duration = Duration::from_millis(10);

/// The users, and the tenant of each.
#[derive(Clone, PartialEq, Eq)]
pub struct Login {
    /// User name; `default` is the one that clients mean when they give only a password.
    pub user: String,
    /// The user's password.
    pub password: String,
    /// Name of the tenant.
    pub tenant: String,
    /// Quota of the tenant, bytes of slots.
    pub quota_bytes: u64,
}

impl std::fmt::Debug for Login {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // The password stays out of logs.
        f.debug_struct("Login")
            .field("user", &self.user)
            .field("tenant", &self.tenant)
            .finish_non_exhaustive()
    }
}

/// Settings of a [`Server`].
#[derive(Clone, Debug)]
pub struct RespConfig {
    /// The logins. With none, every client may connect, as the anonymous tenant.
    pub logins: Vec<Login>,
    /// Connections at a time.
    pub connections_max: usize,
    /// How long a client may leave a reply unread or a command half sent, and take to log in, µs.
    pub time_limit_us: u64,
    /// Speak TLS with this certificate.
    pub tls: Option<Identity>,
    /// Whether `FLUSHDB` removes all keys of its tenant.
    pub allow_flush: bool,
    /// Whether a checksum is kept with each value that comes in.
    pub checksums: bool,
}

impl Default for RespConfig {
    fn default() -> Self {
        Self {
            logins: Vec::new(),
            connections_max: 1024,
            time_limit_us: 10_000_000,
            tls: None,
            allow_flush: false,
            checksums: true,
        }
    }
}

/// State shared by the connections of a server.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) store: ObjectStore,
    pub(super) config: RespConfig,
    /// The tenant of each login.
    pub(super) tenants: Vec<TenantId>,
    pub(super) started: Instant,
    pub(super) open: AtomicUsize,
    pub(super) commands: AtomicU64,
    pub(super) budget: Arc<Budget>,
    pub(super) counts: Counts,
    next_id: AtomicU64,
}

/// A store behind Redis' protocol.
#[derive(Clone, Debug)]
pub struct Server {
    shared: Arc<Shared>,
}

impl Server {
    /// A server of `store`.
    ///
    /// # Errors
    /// A setting that cannot be, and what it may be.
    pub fn new(store: ObjectStore, config: RespConfig) -> Result<Self, String> {
        if config.connections_max == 0 || !(1_000..=600_000_000).contains(&config.time_limit_us) {
            return Err("connections_max: at least 1; time_limit_us: from 1000 to 600000000".into());
        }
        let open = |login: &Login| {
            if login.user.is_empty() || login.password.is_empty() || login.tenant.is_empty() {
                return Err("logins: give user, password and tenant".to_owned());
            }
            let tenant = store.open_tenant(&login.tenant, login.quota_bytes);
            tenant.ok_or_else(|| format!("logins: at most {} tenants", crate::TENANTS_MAX))
        };
        let tenants = config.logins.iter().map(open).collect::<Result<_, _>>()?;
        let (started, open) = (Instant::now(), AtomicUsize::new(0));
        let (commands, next_id) = (AtomicU64::new(0), AtomicU64::new(1));
        let (budget, counts) = (Budget::new(BUFFERS_MAX_BYTES), Counts::default());
        let shared = Shared { store, config, tenants, started, open, commands, budget, counts, next_id };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// The gauges and counters of the server.
    #[must_use]
    pub fn stats(&self) -> ServerStats {
        ServerStats {
            connections: self.shared.open.load(Ordering::Relaxed) as u64,
            commands: self.shared.commands.load(Ordering::Relaxed),
            buffered_bytes: self.shared.budget.used_bytes(),
            ..self.shared.counts.stats()
        }
    }

    /// Serves until `stop` is done. Connections that are open then are closed.
    ///
    /// Not [`baton_http::Acceptor`]: that closes newcomers when all places are taken, and here a connection that is idle
    /// or has not logged in makes room for the newcomer.
    pub async fn serve(&self, listener: TcpListener, stop: impl Future<Output = ()>) {
        let mut tasks = JoinSet::new();
        let config = &self.shared.config;
        let mut places = ConnectionTable::new(config.connections_max, !config.logins.is_empty());
        tokio::pin!(stop);
        loop {
            tokio::select! {
                () = &mut stop => break,
                Some(ended) = tasks.join_next_with_id(), if !tasks.is_empty() => {
                    places.leave(ended.map_or_else(|error| error.id(), |(id, ())| id));
                }
                accepted = listener.accept() => match accepted {
                    Ok((stream, peer)) => self.welcome(stream, peer.ip(), &mut places, &mut tasks),
                    Err(_) => {
                        // Too many files are open, mostly: one gives way as if all places were taken.
                        counts::add(&self.shared.counts.accept_errors);
                        let victim = places.victim(self.now_us());
                        self.displace(victim, &mut places);
                        tokio::time::sleep(ACCEPT_PAUSE).await;
                    }
                },
            }
        }
    }

    fn now_us(&self) -> u64 {
        u64::try_from(self.shared.started.elapsed().as_micros()).unwrap_or(u64::MAX)
    }

    /// Ends the connection at a place, if there is one to end.
    fn displace(&self, victim: Option<usize>, places: &mut ConnectionTable) {
        if let Some(at) = victim {
            counts::add(&self.shared.counts.displaced);
            places.clear(at);
        }
    }

    fn welcome(
        &self,
        stream: TcpStream,
        peer: IpAddr,
        places: &mut ConnectionTable,
        tasks: &mut JoinSet<()>,
    ) {
        let now_us = self.now_us();
        match places.find(peer, now_us) {
            Ok(()) => {}
            Err(victim @ Some(_)) => self.displace(victim, places),
            Err(None) => {
                counts::add(&self.shared.counts.refused);
                // The error fits the socket's buffer, or the client has gone. Over TLS it would be noise.
                if self.shared.config.tls.is_none()
                    && let Ok(mut stream) = stream.into_std()
                {
                    let _ = stream.write_all(b"-ERR max number of clients reached\r\n");
                }
                return;
            }
        }
        let known = self.shared.config.logins.is_empty();
        let connection_state =
            ConnectionState { active_us: now_us.into(), known: known.into(), ..ConnectionState::default() };
        let (shared, connection_state) = (Arc::clone(&self.shared), Arc::new(connection_state));
        let task = {
            let connection_state = Arc::clone(&connection_state);
            tasks.spawn(async move {
                shared.open.fetch_add(1, Ordering::Relaxed);
                let counted = ConnectionGuard(Arc::clone(&shared));
                // Without this a small reply waits for the acknowledgement of the one before.
                if stream.set_nodelay(true).is_ok() {
                    converse(stream, &shared, &connection_state).await;
                }
                drop(counted);
            })
        };
        places.take(peer, connection_state, task);
    }
}

/// Serves a client, behind TLS if that is asked for.
async fn converse(stream: TcpStream, shared: &Shared, connection_state: &ConnectionState) {
    let id = shared.next_id.fetch_add(1, Ordering::Relaxed);
    let Some(tls) = &shared.config.tls else {
        return connection::run(stream, shared, connection_state, id).await;
    };
    let time_limit = Duration::from_micros(shared.config.time_limit_us);
    match tokio::time::timeout(time_limit, tls.acceptor().accept(stream)).await {
        Ok(Ok(stream)) => connection::run(stream, shared, connection_state, id).await,
        _ => counts::add(&shared.counts.handshakes_failed),
    }
}

#[cfg(test)]
impl Server {
    /// Serves a client that is not behind a socket.
    pub(super) async fn serve_stream(
        &self,
        stream: impl tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin,
    ) {
        let known = self.shared.config.logins.is_empty();
        let connection_state = ConnectionState { known: known.into(), ..ConnectionState::default() };
        connection::run(stream, &self.shared, &connection_state, 1).await;
    }
}

/// Counts a connection out, however it ends.
struct ConnectionGuard(Arc<Shared>);

impl Drop for ConnectionGuard {
    fn drop(&mut self) {
        self.0.open.fetch_sub(1, Ordering::Relaxed);
    }
}
