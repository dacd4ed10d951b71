//! The listener, and the end of a connection that a peer has opened.

use std::io;
use std::net::TcpListener;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::incoming::{IncomingStage, Landing, LandingContext, Place, ReceiveOutcome, Step};
use super::outgoing::{Body, FrameQueue};
use super::site::Site;
use super::stream::{Stream, broken};
use super::tls::TcpTls;
use super::vectored::GatheredPieces;
use super::wire::{Head, Kind, Tail};
use crate::mover::greeting::{GREETING_BYTES, Greeting, Purpose, may_begin};
use crate::mover::port::NOTICE_BYTES_MAX;
use crate::mover::reactor::{Accepts, Connection, ReactorSlot, Turn};
use crate::mover::{Direction, Fault, Notice, PeerId, WindowId};

/// Bytes moved in one turn, at most about.
const TURN_BYTES: u64 = 4 << 20;
/// Bytes that land before they are acknowledged although more are coming.
const ACK_BYTES: u64 = 1 << 20;

/// The socket that peers connect to.
pub(super) struct Door {
    pub(super) socket: TcpListener,
    pub(super) site: Arc<Site>,
}

impl Accepts for Door {
    fn file(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    fn accept(&mut self) -> io::Result<()> {
        let (socket, _) = self.socket.accept()?;
        let site = &self.site;
        let tls = site.config.tls.as_ref().map(TcpTls::accept).transpose();
        // One that cannot be served is none of the others' business.
        let Ok(stream) = tls.and_then(|tls| Stream::new(socket, tls)) else { return Ok(()) };
        let slot = site.pool.slot();
        let mut served = ServedConnection::new(site.clone(), stream, slot);
        if site.served.fetch_add(1, Ordering::AcqRel) >= site.config.connections_max {
            served.answer(Purpose::Busy, 0, "it has as many connections as it may; raise connections_max");
            Box::new(served).cut();
            return Ok(());
        }
        site.pool.adopt(slot, Box::new(served));
        Ok(())
    }
}

/// How far a connection has come.
enum Stage {
    Greeting,
    Lane { session: u128, from: PeerId },
    Fence { done: Arc<AtomicBool>, session: u128 },
}

/// The server's end of one connection.
pub(super) struct ServedConnection {
    site: Arc<Site>,
    slot: ReactorSlot,
    stream: Stream,
    stage: Stage,
    outgoing: FrameQueue,
    incoming: IncomingStage,
    landing: Option<Landing>,
    /// The last request that ended well and has not been acknowledged.
    due: Option<u32>,
    /// Bytes landed since the last acknowledgement.
    unacked: u64,
    writable: bool,
    moved: bool,
    still_since: Instant,
}

impl ServedConnection {
    fn new(site: Arc<Site>, stream: Stream, slot: ReactorSlot) -> Self {
        Self {
            site,
            slot,
            stream,
            stage: Stage::Greeting,
            outgoing: FrameQueue::default(),
            incoming: IncomingStage::new(),
            landing: None,
            due: None,
            unacked: 0,
            writable: true,
            moved: true,
            still_since: Instant::now(),
        }
    }

    /// Answers a greeting. A socket that cannot take even that is broken, which the next call finds.
    fn answer(&mut self, purpose: Purpose, session: u128, text: &str) {
        let record = self.site.greeting(purpose, 0, session, text.into()).encode();
        let mut gathered = GatheredPieces::default();
        gathered.plain(&record);
        let _ = self.stream.send(&gathered);
    }

    /// Takes the greeting when it is there.
    fn greet(&mut self) -> Result<Turn, Fault> {
        loop {
            if !may_begin(self.incoming.staged()) {
                return Err(Fault::Invalid("what came is not of this protocol".into()));
            }
            if let Some(record) = self.incoming.take::<GREETING_BYTES>() {
                return self.greeted(&record);
            }
            if self.incoming.fill(&mut self.stream).map_err(broken)? == ReceiveOutcome::Nothing {
                return Ok(Turn::Wait);
            }
        }
    }

    fn greeted(&mut self, record: &[u8; GREETING_BYTES]) -> Result<Turn, Fault> {
        let greeting = match Greeting::decode(record) {
            Ok(greeting) => greeting,
            Err(Fault::Invalid(text)) => {
                self.answer(Purpose::Invalid, 0, &format!("{} answers: {text}", self.site.address));
                return Ok(Turn::End);
            }
            Err(fault) => return Err(fault),
        };
        let session = greeting.session;
        if greeting.to_epoch != self.site.config.epoch {
            let text = format!("{} lives in another epoch than {}", self.site.address, greeting.to_epoch);
            self.answer(Purpose::Stale, session, &text);
            return Ok(Turn::End);
        }
        match greeting.purpose {
            Purpose::Lane => {
                let from = PeerId { address: greeting.text, epoch: greeting.from_epoch };
                self.stage = Stage::Lane { session, from };
                let address = self.site.address.clone();
                self.answer(Purpose::Welcome, session, &address);
                Ok(Turn::Again)
            }
            Purpose::Fence => {
                let done = Arc::new(AtomicBool::new(false));
                self.stage = Stage::Fence { done: done.clone(), session };
                self.site.pool.cut_session(session, self.slot, done);
                Ok(Turn::Wait)
            }
            _ => Err(Fault::Invalid("a greeting asks for a lane or a fence".into())),
        }
    }

    fn serve(&mut self) -> Result<Turn, Fault> {
        let mut left = TURN_BYTES;
        loop {
            let came = self.receive()?;
            self.acknowledge();
            let mut sent = 0;
            if self.writable && (!self.outgoing.is_empty() || self.stream.unsent()) {
                let kept = self.stream.unsent();
                let went = self.outgoing.send(&mut self.stream, &self.site.exposure).map_err(broken)?;
                (sent, self.writable) = (went.bytes, went.more);
                // A peer that reads nothing must not renew its time by asking for more.
                self.moved |= went.bytes > 0 || (kept && !self.stream.unsent());
            }
            if came + sent == 0 && (!self.writable || self.outgoing.is_empty()) {
                return Ok(Turn::Wait);
            }
            left = left.saturating_sub(came + sent);
            if left == 0 {
                return Ok(Turn::Again);
            }
        }
    }

    /// Takes requests until none is there or enough has landed to be acknowledged.
    fn receive(&mut self) -> Result<u64, Fault> {
        let mut came = 0;
        while self.unacked < ACK_BYTES && came < ACK_BYTES {
            if self.landing.is_some() {
                match self.land().map_err(broken)? {
                    Step::Blocked => break,
                    Step::Moved(bytes) => came += bytes as u64,
                    Step::Landed(tail) => self.landed(tail),
                }
                continue;
            }
            match self.incoming.take_head() {
                Some(Some(head)) => self.begin(head)?,
                Some(None) => return Err(Fault::Path("what came is no frame".into())),
                None => match self.incoming.fill(&mut self.stream).map_err(broken)? {
                    ReceiveOutcome::Nothing => break,
                    ReceiveOutcome::Some(bytes) => came += bytes as u64,
                },
            }
        }
        Ok(came)
    }

    fn land(&mut self) -> io::Result<Step> {
        let (exposure, damage) = (&self.site.exposure, &*self.site.config.damage);
        let landing = self.landing.as_mut().expect("looked at by the caller");
        let (stream, incoming) = (&mut self.stream, &mut self.incoming);
        landing.step(&mut LandingContext { stream, incoming, exposure, damage })
    }

    fn begin(&mut self, head: Head) -> Result<(), Fault> {
        let most = usize::try_from(self.site.config.outstanding_max).expect("a usize has 32 bits");
        // Acknowledgements and refusals wait here too, at most one for each request.
        if self.outgoing.frames() > 2 * most {
            return Err(Fault::Path("it does not read what it is answered".into()));
        }
        let fits = (1..=self.site.config.slice_bytes_max).contains(&head.bytes);
        let notice_max = u32::try_from(NOTICE_BYTES_MAX).expect("a few thousand");
        let place = match head.kind {
            Kind::Write if fits => Place::Window(WindowId(head.window), head.at),
            Kind::Read if fits => return self.begin_read(head),
            Kind::Notice if head.bytes <= notice_max => Place::Bytes(Vec::new()),
            Kind::Probe => {
                self.due = Some(head.number);
                return Ok(());
            }
            Kind::Write | Kind::Read | Kind::Notice => {
                return Err(Fault::Invalid(format!("{} bytes are not taken in one piece", head.bytes)));
            }
            _ => return Err(Fault::Path("it sends what only a server sends".into())),
        };
        let tailed = head.kind == Kind::Write && head.verify;
        self.landing = Some(Landing::new(head, place, tailed));
        Ok(())
    }

    fn begin_read(&mut self, head: Head) -> Result<(), Fault> {
        let window = WindowId(head.window);
        match self.site.exposure.admit(window, Direction::Read, head.at, u64::from(head.bytes)) {
            Ok(_for_now) => {
                let answer = Head { kind: Kind::Data, ..head };
                self.outgoing.push(&answer, Body::Window(window, head.at), true);
            }
            Err(fault) => self.outgoing.push_fault(Kind::Refused, head.number, &fault),
        }
        Ok(())
    }

    fn landed(&mut self, tail: Option<Tail>) {
        let mut landing = self.landing.take().expect("it has just landed");
        let number = landing.head.number;
        if landing.code() == 0 && !landing.intact(tail) {
            landing.fault = Some(Fault::Corrupt("what has landed differs from what was sent".into()));
        }
        if let Some(fault) = &landing.fault {
            return self.outgoing.push_fault(Kind::Refused, number, fault);
        }
        if let (Place::Bytes(bytes), Stage::Lane { from, .. }) = (landing.place, &self.stage) {
            self.site.inbound.notice(from, Notice { bytes });
        }
        self.due = Some(number);
        self.unacked += u64::from(landing.head.bytes);
    }

    fn acknowledge(&mut self) {
        if let Some(number) = self.due.take() {
            self.outgoing.push(&Head::new(Kind::Acked, number), Body::None, false);
            self.unacked = 0;
        }
    }

    fn advance(&mut self) -> Result<Turn, Fault> {
        match &self.stage {
            Stage::Greeting => self.greet(),
            Stage::Lane { .. } => self.serve(),
            Stage::Fence { done, session } if done.load(Ordering::Acquire) => {
                let (session, address) = (*session, self.site.address.clone());
                self.answer(Purpose::Welcome, session, &address);
                Ok(Turn::End)
            }
            Stage::Fence { .. } => Ok(Turn::Wait),
        }
    }
}

impl Connection for ServedConnection {
    fn files(&self) -> Vec<BorrowedFd<'_>> {
        vec![self.stream.file()]
    }

    fn event(&mut self, _file: usize, hung: bool) {
        self.writable = true;
        self.incoming.awake(hung);
    }

    fn turn(&mut self) -> Turn {
        self.advance().unwrap_or_else(|fault| {
            if matches!(self.stage, Stage::Lane { .. }) {
                // As far as the socket takes it: the opener learns why.
                self.outgoing.push_fault(Kind::Bye, 0, &fault);
                let _ = self.outgoing.send(&mut self.stream, &self.site.exposure);
            }
            Turn::End
        })
    }

    fn tick(&mut self, now: Instant) -> Turn {
        if std::mem::take(&mut self.moved) {
            self.still_since = now;
        }
        let limit = Duration::from_millis(self.site.config.progress_timeout_ms);
        if now.duration_since(self.still_since) < limit { Turn::Wait } else { Turn::End }
    }

    fn waits(&self) -> bool {
        !matches!(self.stage, Stage::Lane { .. }) || !self.outgoing.is_empty() || self.stream.unsent()
    }

    fn serves(&self, session: u128) -> bool {
        matches!(self.stage, Stage::Lane { session: ours, .. } if ours == session)
    }

    fn cut(self: Box<Self>) {
        self.site.served.fetch_sub(1, Ordering::AcqRel);
    }
}
