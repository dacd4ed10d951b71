//! One client: read, serve and send, all at once and within bounds.

use std::future::poll_fn;
use std::io::{self, ErrorKind};
use std::pin::Pin;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use baton_types::TenantId;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, ReadBuf};

use super::budget::Part;
use super::command;
use super::counts::Cut;
use super::incoming::{CommandParser, ProtocolError, READ_BYTES, Step};
use super::outgoing::ReplyQueue;
use super::places::ConnectionState;
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
/// How long a value, or a command without one, may be on its way, and an answer be unread though the client goes on
/// sending.
const WHOLE_TIME_LIMIT: Duration = Duration::from_secs(60);
/// How long a client may say nothing at all after it has come.
const FIRST_TIME_LIMIT: Duration = Duration::from_secs(60);
/// How long the end of a connection may take.
const GOODBYE: Duration = Duration::from_secs(1);
/// Largest value that is gathered beside the memory, for its key is there.
const GATHERED_VALUE_MAX_BYTES: usize = 8 << 20;
/// How long to wait before another look whether there is room for more of a command.
const ROOM_PAUSE: Duration = Duration::from_millis(5);

/// The state of a connection.
#[derive(Debug)]
pub(super) struct Connection<'a> {
    pub(super) shared: &'a Shared,
    pub(super) id: u64,
    /// The tenant whose keys the connection sees; none before its login.
    pub(super) tenant: Option<TenantId>,
    pub(super) name: Vec<u8>,
    pub(super) incoming: CommandParser,
    pub(super) out: ReplyQueue,
    /// Set by `QUIT`: close when the reply is out.
    pub(super) over: bool,
    /// A `MULTI` was refused, and so is what belongs to it.
    pub(super) refusing: bool,
    part: Part,
    connection_state: &'a ConnectionState,
    times: Times,
}

/// When what happened last that has a time limit.
#[derive(Debug)]
struct Times {
    /// The client came, or logged out.
    unauthenticated_since: Instant,
    /// The command that comes in began, or the value of it.
    began: Instant,
    /// Anything was read or sent.
    moved: Instant,
    /// Anything was sent, or there was nothing to send.
    sent: Instant,
    /// The reservation of the value that comes in was renewed.
    renewed: Instant,
}

/// Serves a client until it leaves, breaks the protocol or exceeds its time limit.
pub(super) async fn run(
    mut stream: impl AsyncRead + AsyncWrite + Unpin,
    shared: &Shared,
    connection_state: &ConnectionState,
    id: u64,
) {
    let tenant = shared.config.logins.is_empty().then_some(TenantId(0));
    let now = Instant::now();
    let connection = Connection {
        shared,
        id,
        tenant,
        name: Vec::new(),
        incoming: CommandParser::new(),
        out: ReplyQueue::default(),
        over: false,
        refusing: false,
        part: shared.budget.part(),
        connection_state,
        times: Times { unauthenticated_since: now, began: now, moved: now, sent: now, renewed: now },
    };
    // The client sees the connection end; there is no other party to report to.
    if connection.serve(&mut stream).await.is_ok() {
        let _ = tokio::time::timeout(GOODBYE, part(&mut stream)).await;
    }
}

/// Ends a connection so that the client gets the last answer: a close with bytes unread would take it back.
async fn part(stream: &mut (impl AsyncRead + AsyncWrite + Unpin)) -> io::Result<()> {
    stream.shutdown().await?;
    let mut nowhere = [0; 4096];
    while stream.read(&mut nowhere).await? > 0 {}
    Ok(())
}

/// The result of a call that must not wait.
fn at_once<T>(polled: Poll<io::Result<T>>) -> io::Result<T> {
    match polled {
        Poll::Ready(done) => done,
        Poll::Pending => Err(ErrorKind::WouldBlock.into()),
    }
}

/// The result of an exchange.
#[derive(Clone, Copy, Debug)]
struct ExchangeResult {
    sent: usize,
    /// Bytes read; 0 is the end of the stream.
    got: Option<usize>,
}

impl Connection<'_> {
    async fn serve<S: AsyncRead + AsyncWrite + Unpin>(mut self, stream: &mut S) -> io::Result<()> {
        loop {
            // A client that never stops sending lets others have their turn.
            tokio::task::coop::consume_budget().await;
            let wants = match self.work().await {
                Ok(wants) => wants,
                Err(broken) => {
                    self.out.error(broken.0);
                    self.over = true;
                    false
                }
            };
            while self.over {
                if self.out.is_empty() {
                    return Ok(());
                }
                self.exchange(stream, false).await?;
            }
            let moved = self.exchange(stream, wants).await?;
            // A client may end its side of the stream while replies are pending. They go out first.
            self.over = moved.got == Some(0);
        }
    }

    /// Serves what has come in, as far as there is room for answers. Whether more is to be read.
    async fn work(&mut self) -> Result<bool, ProtocolError> {
        while !self.over {
            if self.out.is_full() || (!self.out.is_empty() && self.part.is_over()) {
                return Ok(false);
            }
            self.incoming.known = self.tenant.is_some();
            match self.incoming.advance()? {
                Step::Read => {
                    self.weigh();
                    return Ok(true);
                }
                Step::Large(bytes) if self.gathers(bytes) => self.incoming.gather_large(),
                Step::Large(bytes) => {
                    let ticket = self.reserve_large(bytes).await;
                    self.incoming.begin_large(ticket);
                    (self.times.began, self.times.renewed) = (Instant::now(), Instant::now());
                }
                Step::Command => {
                    command::execute(self).await;
                    self.incoming.finish();
                    self.weigh();
                    self.note();
                }
            }
        }
        Ok(false)
    }

    /// A command was served.
    fn note(&mut self) {
        let now = Instant::now();
        (self.times.began, self.times.moved) = (now, now);
        let now_us = self.shared.started.elapsed().as_micros();
        self.connection_state.active_us.store(u64::try_from(now_us).unwrap_or(u64::MAX), Ordering::Relaxed);
        self.connection_state.spoke.store(true, Ordering::Relaxed);
        let known = self.tenant.is_some();
        if self.connection_state.known.swap(known, Ordering::Relaxed) && !known {
            self.times.unauthenticated_since = Instant::now();
        }
    }

    fn weight(&self) -> usize {
        self.incoming.weight() + self.out.weight()
    }

    fn weigh(&mut self) {
        let weight = self.weight();
        self.part.weigh(weight);
    }

    /// Takes room for an answer of so many bytes beside the values, if there is as much.
    pub(super) fn has_room_for(&mut self, bytes: usize) -> bool {
        let weight = self.weight() + bytes;
        self.part.try_weigh(weight)
    }

    /// Sends and reads what can be now; waits while nothing can. A client may write a whole pipeline before it reads the
    /// first answer, so neither waits for the other.
    async fn exchange<S: AsyncRead + AsyncWrite + Unpin>(
        &mut self,
        stream: &mut S,
        wants: bool,
    ) -> io::Result<ExchangeResult> {
        let growth = if wants { self.incoming.growth() } else { 0 };
        let reads = wants && (growth == 0 || self.has_room_for(growth));
        if wants && !reads && self.out.is_empty() {
            tokio::time::sleep(ROOM_PAUSE).await;
        }
        let waits = reads || !self.out.is_empty();
        let deadline = self.deadline(reads);
        let moving = poll_fn(|cx| self.poll_exchange(cx, stream, (reads, waits)));
        let moved = match deadline {
            Some((at, cut)) if !waits && Instant::now() >= at => Err(cut),
            Some((at, cut)) => tokio::time::timeout_at(at.into(), moving).await.map_err(|_| cut),
            None => Ok(moving.await),
        };
        let moved = moved.map_err(|cut| {
            self.shared.counts.cut(cut);
            io::Error::from(ErrorKind::TimedOut)
        })??;
        self.moved(moved, wants);
        Ok(moved)
    }

    fn poll_exchange<S: AsyncRead + AsyncWrite + Unpin>(
        &mut self,
        cx: &mut Context<'_>,
        stream: &mut S,
        (reads, waits): (bool, bool),
    ) -> Poll<io::Result<ExchangeResult>> {
        let mut moved = ExchangeResult { sent: 0, got: None };
        while !self.out.is_empty() {
            let sent =
                self.out.write_with(|slices| at_once(Pin::new(&mut *stream).poll_write_vectored(cx, slices)));
            match sent {
                Ok(0) => return Poll::Ready(Err(ErrorKind::WriteZero.into())),
                Ok(bytes) => moved.sent += bytes,
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
        // Of TLS: what is encrypted is sent. Without it this does nothing.
        if let Poll::Ready(Err(error)) = Pin::new(&mut *stream).poll_flush(cx) {
            return Poll::Ready(Err(error));
        }
        if reads {
            let got = self.incoming.read_with(|place| {
                let mut into = ReadBuf::new(place);
                at_once(Pin::new(&mut *stream).poll_read(cx, &mut into)).map(|()| into.filled().len())
            });
            match got {
                Ok(bytes) => moved.got = Some(bytes),
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
        if moved.sent > 0 || moved.got.is_some() || !waits { Poll::Ready(Ok(moved)) } else { Poll::Pending }
    }

    /// Notes what has moved, and renews what would run out under a client that goes on.
    fn moved(&mut self, moved: ExchangeResult, wants: bool) {
        let now = Instant::now();
        if moved.sent > 0 || moved.got.is_some() {
            self.times.moved = now;
        }
        if moved.sent > 0 || self.out.is_empty() {
            self.times.sent = now;
        }
        if !wants {
            // The server has paused reading, because the client does not read. The client is not late with a command
            // then.
            self.times.began = now;
        }
        if moved.sent > 0 {
            self.weigh();
            let store = &self.shared.store;
            self.out.renew(store.now_us(), store.read_lease_us());
        }
        if let Some(ticket) = self.incoming.filling()
            && now - self.times.renewed > RENEW_EVERY
        {
            self.times.renewed = now;
            // A ticket that was taken over fails at its seal.
            let _ = ticket.renew();
        }
    }

    /// Until when something has to move, and what it is called when it does not.
    fn deadline(&mut self, reads: bool) -> Option<(Instant, Cut)> {
        let time_limit = Duration::from_micros(self.shared.config.time_limit_us);
        let (waits, amid) = (!self.out.is_empty(), self.incoming.is_mid_command());
        let times = &mut self.times;
        if !waits && !amid {
            times.began = Instant::now();
        }
        let unread = (times.moved + time_limit).min(times.sent + WHOLE_TIME_LIMIT);
        let half = (times.moved.max(times.began) + time_limit).min(times.began + WHOLE_TIME_LIMIT);
        let half_cut = if reads { Cut::HalfSent } else { Cut::NoRoom };
        let mute = !self.connection_state.spoke.load(Ordering::Relaxed);
        let deadlines = [
            waits.then_some((unread, Cut::Unread)),
            (amid && (reads || !waits)).then_some((half, half_cut)),
            self.tenant.is_none().then_some((times.unauthenticated_since + time_limit, Cut::Stranger)),
            (mute && self.tenant.is_some())
                .then_some((times.unauthenticated_since + FIRST_TIME_LIMIT, Cut::Mute)),
        ];
        deadlines.into_iter().flatten().min_by_key(|(deadline, _)| *deadline)
    }

    /// Whether a large value is gathered beside the memory: its key is there, and a word comes after it that may leave
    /// that as it is. Memory that is reserved before that word is known would cost other keys their values.
    fn gathers(&mut self, bytes: u64) -> bool {
        let Some(tenant) = self.tenant else { return false };
        let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
        bytes <= GATHERED_VALUE_MAX_BYTES
            && self.incoming.may_be_kept_out()
            && self.shared.store.exists(Key { tenant, bytes: self.incoming.text(1) })
            && self.has_room_for(bytes + 2 * READ_BYTES)
    }

    async fn reserve_large(&self, bytes: u64) -> Result<PutTicket, Refusal> {
        let key = self.incoming.text(self.incoming.count() - 1);
        // SETEX and its like have the time between key and value.
        let name = self.incoming.text(0);
        let timed = name.eq_ignore_ascii_case(b"SETEX") || name.eq_ignore_ascii_case(b"PSETEX");
        let key = if timed { self.incoming.text(1) } else { key };
        let options = PutOptions::REPLACE;
        let tenant = self.tenant.ok_or(Refusal::Tenant)?;
        let key = Key { tenant, bytes: key };
        if name.eq_ignore_ascii_case(b"SETNX") && self.shared.store.exists(key) {
            return Err(Refusal::Exists);
        }
        reserve(self.shared, key, bytes, options).await
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
        let time_limit_us = match refusal {
            Refusal::Busy { .. } => shared.config.time_limit_us,
            Refusal::Full { .. } | Refusal::OverQuota { .. } => shared.store.room_wait_us(),
            other => return Err(other),
        };
        if start.elapsed() >= Duration::from_micros(time_limit_us) {
            return Err(refusal);
        }
        tokio::time::sleep(pause).await;
        pause = (2 * pause).min(RETRY_MAX);
    }
}
