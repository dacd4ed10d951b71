//! Accepting connections, and what all of them share.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use baton_types::TenantId;
use tokio::io::AsyncWriteExt as _;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

use super::connection;
use crate::store::ObjectStore;

/// Who may come in, and to which tenant's keys.
#[derive(Clone, PartialEq, Eq)]
pub struct Login {
    /// User name; `default` is the one that clients mean when they give only a password.
    pub user: String,
    /// Password.
    pub password: String,
    /// Name of the tenant.
    pub tenant: String,
    /// What the tenant may have, bytes of slots.
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
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RespConfig {
    /// Who may come in; nobody listed means that everybody may, as the anonymous tenant.
    pub logins: Vec<Login>,
    /// Connections at a time.
    pub connections_max: usize,
    /// How long a client may leave a reply unread, or a value half sent, µs.
    pub patience_us: u64,
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
            patience_us: 10_000_000,
            allow_flush: false,
            checksums: true,
        }
    }
}

/// What the connections of a server share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) store: ObjectStore,
    pub(super) config: RespConfig,
    /// The tenant of each login.
    pub(super) tenants: Vec<TenantId>,
    pub(super) started: Instant,
    pub(super) open: AtomicUsize,
    pub(super) commands: AtomicU64,
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
        if config.connections_max == 0 || !(1_000..=600_000_000).contains(&config.patience_us) {
            return Err("connections_max: at least 1; patience_us: from 1000 to 600000000".into());
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
        let shared = Shared { store, config, tenants, started, open, commands, next_id };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// Commands served so far.
    #[must_use]
    pub fn commands(&self) -> u64 {
        self.shared.commands.load(Ordering::Relaxed)
    }

    /// Connections open now.
    #[must_use]
    pub fn connections(&self) -> usize {
        self.shared.open.load(Ordering::Relaxed)
    }

    /// Serves until `stop` is done. Connections that are open then are closed.
    pub async fn serve(&self, listener: TcpListener, stop: impl Future<Output = ()>) {
        let mut tasks = JoinSet::new();
        tokio::pin!(stop);
        loop {
            tokio::select! {
                () = &mut stop => break,
                Some(_) = tasks.join_next(), if !tasks.is_empty() => {}
                accepted = listener.accept() => match accepted {
                    Ok((stream, _)) => self.welcome(stream, &mut tasks),
                    // Too many files are open: some will be closed.
                    Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
                },
            }
        }
    }

    fn welcome(&self, mut stream: TcpStream, tasks: &mut JoinSet<()>) {
        if tasks.len() >= self.shared.config.connections_max {
            // It fits the socket's buffer, or the client is not there any more.
            tasks.spawn(async move {
                let told = stream.write_all(b"-ERR max number of clients reached\r\n");
                let _ = tokio::time::timeout(Duration::from_millis(100), told).await;
            });
            return;
        }
        let shared = Arc::clone(&self.shared);
        tasks.spawn(async move {
            shared.open.fetch_add(1, Ordering::Relaxed);
            let id = shared.next_id.fetch_add(1, Ordering::Relaxed);
            let counted = Counted(Arc::clone(&shared));
            // Without this a small reply waits for the acknowledgement of the one before.
            if stream.set_nodelay(true).is_ok() {
                connection::run(stream, &shared, id).await;
            }
            drop(counted);
        });
    }
}

/// Counts a connection out, however it ends.
struct Counted(Arc<Shared>);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.open.fetch_sub(1, Ordering::Relaxed);
    }
}
