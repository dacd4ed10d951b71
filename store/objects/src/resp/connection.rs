//! One client: read, serve, send, within bounds.

use std::future::Future;
use std::io::{self, ErrorKind};
use std::time::{Duration, Instant};

use baton_types::TenantId;
use tokio::net::TcpStream;

use super::command;
use super::incoming::{Incoming, Step};
use super::outgoing::Outgoing;
use super::server::Shared;
use crate::key::Key;
use crate::refusal::Refusal;
use crate::store::PutOptions;
use crate::ticket::PutTicket;

/// First and longest wait between two tries to reserve.
const RETRY_MIN: Duration = Duration::from_micros(200);
const RETRY_MAX: Duration = Duration::from_millis(10);
/// How often a value on its way renews its reservation.
const RENEW_EVERY: Duration = Duration::from_millis(250);
/// How long a value may be on its way.
const VALUE_PATIENCE: Duration = Duration::from_secs(60);

/// What a connection is and has.
#[derive(Debug)]
pub(super) struct Connection<'a> {
    pub(super) shared: &'a Shared,
    pub(super) id: u64,
    /// Whose keys it sees; none before it has logged in.
    pub(super) tenant: Option<TenantId>,
    pub(super) name: Vec<u8>,
    pub(super) incoming: Incoming,
    pub(super) out: Outgoing,
    /// Set by `QUIT`: close when the reply is out.
    pub(super) over: bool,
}

/// Serves a client until it leaves, breaks the protocol or is out of patience.
pub(super) async fn run(stream: TcpStream, shared: &Shared, id: u64) {
    let tenant = shared.config.logins.is_empty().then_some(TenantId(0));
    let (incoming, out) = (Incoming::new(), Outgoing::default());
    let connection = Connection { shared, id, tenant, name: Vec::new(), incoming, out, over: false };
    // The client sees that the connection has ended; there is nobody else to tell.
    let _ = connection.serve(&stream).await;
}

impl Connection<'_> {
    async fn serve(mut self, stream: &TcpStream) -> io::Result<()> {
        loop {
            // A client that never stops sending lets others have their turn.
            tokio::task::coop::consume_budget().await;
            let broken = loop {
                self.incoming.known = self.tenant.is_some();
                match self.incoming.advance() {
                    Ok(Step::Read) => break None,
                    Ok(Step::Large(bytes)) => {
                        // The client reads nothing while it sends a value: what it is owed goes first.
                        self.send(stream).await?;
                        let ticket = self.reserve_large(bytes).await;
                        self.incoming.begin_large(ticket);
                    }
                    Ok(Step::Command) => {
                        command::execute(&mut self).await;
                        self.incoming.finish();
                    }
                    Err(broken) => break Some(broken),
                }
                if self.over || self.out.is_full() {
                    self.send(stream).await?;
                }
                if self.over {
                    return Ok(());
                }
            };
            if let Some(broken) = broken {
                self.out.error(broken.0);
                return self.send(stream).await;
            }
            self.send(stream).await?;
            if self.read(stream).await? == 0 {
                return Ok(());
            }
        }
    }

    /// Sends all that is pending.
    async fn send(&mut self, stream: &TcpStream) -> io::Result<()> {
        while !self.out.is_empty() {
            match self.out.write_with(|slices| stream.try_write_vectored(slices)) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    self.patiently(stream.writable()).await?;
                }
                other => drop(other?),
            }
        }
        Ok(())
    }

    async fn patiently(&self, wait: impl Future<Output = io::Result<()>>) -> io::Result<()> {
        let patience = Duration::from_micros(self.shared.config.patience_us);
        tokio::time::timeout(patience, wait).await.map_err(|_| io::Error::from(ErrorKind::TimedOut))?
    }

    /// Reads once, or, in the middle of a large value, until its end. 0 is the end of the stream.
    async fn read(&mut self, stream: &TcpStream) -> io::Result<usize> {
        let (start, mut renewed) = (Instant::now(), Instant::now());
        loop {
            let got = self.incoming.read_with(|place| stream.try_read(place));
            let filling = self.incoming.filling();
            let waits = matches!(&got, Err(error) if error.kind() == ErrorKind::WouldBlock);
            if !waits && (got.is_err() || filling.is_none()) {
                return got;
            }
            let Some(ticket) = filling else {
                // A client may be silent between commands as long as it likes.
                stream.readable().await?;
                continue;
            };
            if matches!(got, Ok(0)) || start.elapsed() > VALUE_PATIENCE {
                return Ok(0);
            }
            if renewed.elapsed() > RENEW_EVERY {
                renewed = Instant::now();
                // One that was taken over tells so at its seal.
                let _ = ticket.renew();
            }
            tokio::task::coop::consume_budget().await;
            if waits {
                self.patiently(stream.readable()).await?;
            }
        }
    }

    async fn reserve_large(&self, bytes: u64) -> Result<PutTicket, Refusal> {
        let key = self.incoming.text(self.incoming.count() - 1);
        // SETEX and its like have the time between key and value.
        let name = self.incoming.text(0);
        let timed = name.eq_ignore_ascii_case(b"SETEX") || name.eq_ignore_ascii_case(b"PSETEX");
        let key = if timed { self.incoming.text(1) } else { key };
        let options = PutOptions::REPLACE;
        let tenant = self.tenant.ok_or(Refusal::Tenant)?;
        reserve(self.shared, Key { tenant, bytes: key }, bytes, options).await
    }
}

/// Reserves memory; waits for another writer's end, or for room as long as the settings say.
pub(super) async fn reserve(
    shared: &Shared,
    key: Key<'_>,
    bytes: u64,
    options: PutOptions,
) -> Result<PutTicket, Refusal> {
    let start = Instant::now();
    let mut pause = RETRY_MIN;
    loop {
        let refusal = match shared.store.try_reserve(key, bytes, options) {
            Ok(ticket) => return Ok(ticket),
            Err(refusal) => refusal,
        };
        let patience_us = match refusal {
            Refusal::Busy { .. } => shared.config.patience_us,
            Refusal::Full { .. } => shared.store.room_wait_us(),
            other => return Err(other),
        };
        if start.elapsed() >= Duration::from_micros(patience_us) {
            return Err(refusal);
        }
        tokio::time::sleep(pause).await;
        pause = (2 * pause).min(RETRY_MAX);
    }
}
