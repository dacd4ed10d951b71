//! The listener, and the server's end of a path: it copies what peers write, from their memory into ours.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::bells;
use super::channel::Channel;
use super::codes::{CORRUPT, INVALID, STALE, UNKNOWN};
use super::rings::{Answer, Kind, OUTSTANDING_MAX, Request, Rings, Sleeper};
use super::site::{CHUNK_BYTES, Chunk, Segment, Segments, Site};
use crate::mover::greeting::{GREETING_BYTES, Greeting, Purpose};
use crate::mover::reactor::{Accepts, Connection, Turn, ring};
use crate::mover::{Direction, Fault, Memory, Notice, PeerId, WindowId};

/// Bytes copied in one turn, at most about.
const TURN_BYTES: u64 = 4 << 20;
/// Bytes that are copied before a sleeping opener hears of them, at most about: waking it takes as long as copying
/// a tenth of that.
const UNHEARD_BYTES: u64 = 2 << 20;
/// Budget charged for a request without bytes.
const REQUEST_COST: u64 = 4 << 10;

/// The socket that openers of paths connect to.
pub(super) struct Door {
    pub(super) socket: OwnedFd,
    pub(super) site: Arc<Site>,
}

impl Accepts for Door {
    fn file(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    fn accept(&mut self) -> io::Result<()> {
        let Some(channel) = Channel::accept(&self.socket)? else { return Ok(()) };
        let site = &self.site;
        let served = ServedChannel {
            site: site.clone(),
            channel: Arc::new(channel),
            lane: None,
            channel_ready: true,
            since: Instant::now(),
        };
        if site.served.fetch_add(1, Ordering::AcqRel) >= site.config.paths_max {
            served.answer(Purpose::Busy, "it serves as many paths as it may; raise paths_max", &[]);
            Box::new(served).cut();
            return Ok(());
        }
        site.pool.adopt(site.pool.slot(), Box::new(served));
        Ok(())
    }
}

/// The state of a path after the greeting.
struct Lane {
    from: PeerId,
    rings: Rings,
    /// Wakes us.
    bell: OwnedFd,
    /// Wakes the opener's I/O thread.
    their_bell: OwnedFd,
    /// Wakes a caller of the opener's process.
    their_door: OwnedFd,
    served: u32,
    segments: Segments,
    /// The next request is about a memory that one end has yet to tell of: the channel's next event goes on.
    stalled: bool,
}

/// The server's end of one path.
pub(super) struct ServedChannel {
    site: Arc<Site>,
    channel: Arc<Channel>,
    lane: Option<Lane>,
    /// The channel may have something to say.
    channel_ready: bool,
    since: Instant,
}

impl ServedChannel {
    /// Answers a greeting. Where even that fails the opener sees the end of the channel.
    fn answer(&self, purpose: Purpose, text: &str, files: &[BorrowedFd<'_>]) {
        let record = self.site.greeting(purpose, 0, text.into()).encode();
        let _ = self.channel.send(&record, files, false);
    }

    fn greet(&mut self) -> io::Result<Turn> {
        let Some((record, files)) = self.channel.receive_greeting(false)? else { return Ok(Turn::Wait) };
        match self.greeted(&record, files) {
            Ok(lane) => {
                self.lane = Some(lane);
                self.answer(Purpose::Welcome, &self.site.config.address, &[self.site.windows.file()]);
                self.site.introduce(&self.channel)?;
                Ok(Turn::Files)
            }
            Err(fault) => {
                let (purpose, text) = match &fault {
                    Fault::Stale(text) => (Purpose::Stale, text),
                    Fault::Invalid(text) | Fault::Path(text) | Fault::Silent(text) | Fault::Corrupt(text) => {
                        (Purpose::Invalid, text)
                    }
                };
                self.answer(purpose, text, &[]);
                Ok(Turn::End)
            }
        }
    }

    fn greeted(&self, record: &[u8; GREETING_BYTES], files: Vec<OwnedFd>) -> Result<Lane, Fault> {
        let address = &self.site.config.address;
        let greeting = Greeting::decode(record)?;
        if greeting.to_epoch != self.site.config.epoch {
            let text = format!("{address} lives in another epoch than {}", greeting.to_epoch);
            return Err(Fault::Stale(text));
        }
        let files: Result<[OwnedFd; 4], _> = files.try_into();
        let sound = greeting.purpose == Purpose::Lane && greeting.outstanding_max <= OUTSTANDING_MAX;
        let (Ok([rings, bell, their_bell, their_door]), true) = (files, sound) else {
            return Err(Fault::Invalid(format!("{address}: the greeting does not ask for a path")));
        };
        let bell_of = |file| {
            bells::adopt(file).map_err(|error| Fault::Invalid(format!("{address}: take a bell: {error}")))
        };
        let (bell, their_bell, their_door) = (bell_of(bell)?, bell_of(their_bell)?, bell_of(their_door)?);
        let rings = Rings::adopt(rings, greeting.outstanding_max)
            .map_err(|error| Fault::Invalid(format!("{address}: map the rings: {error}")))?;
        let from = PeerId { address: greeting.text, epoch: greeting.from_epoch };
        let segments = Segments::default();
        Ok(Lane { from, rings, bell, their_bell, their_door, served: 0, segments, stalled: false })
    }
}

impl Lane {
    fn serve(&mut self, site: &Site, channel: &Channel) -> io::Result<Turn> {
        self.rings.server_sleeps(false);
        // Requests and bytes that a sleeping opener has not heard of.
        let mut unheard = (0, 0);
        let turn = self.work(site, channel, &mut unheard);
        if unheard.0 > 0 {
            self.wake();
        }
        turn
    }

    /// Wakes the opener if it sleeps: there are answers.
    fn wake(&self) {
        match self.rings.take_sleeper() {
            Sleeper::Nobody => {}
            Sleeper::Thread => ring(&self.their_bell),
            Sleeper::Caller => ring(&self.their_door),
        }
    }

    fn work(&mut self, site: &Site, channel: &Channel, unheard: &mut (u32, u64)) -> io::Result<Turn> {
        let mut left = TURN_BYTES;
        loop {
            let wrong = || io::Error::other("the opener's ring does not hold requests");
            let requested = self.rings.requested(self.served).ok_or_else(wrong)?;
            if requested == self.served {
                return Ok(Turn::Wait);
            }
            while self.served != requested {
                let request = self.rings.request(self.served).ok_or_else(wrong)?;
                let Some(answer) = self.carry_out(&request, site, channel)? else {
                    self.stalled = true;
                    return Ok(Turn::Wait);
                };
                self.served = self.served.wrapping_add(1);
                self.rings.answer(&Answer { number: request.number, ..answer });
                let cost = REQUEST_COST.max(u64::from(request.bytes));
                *unheard = (unheard.0 + 1, unheard.1 + cost);
                // Half of what it has asked for: so it can ask for more while the rest is copied.
                if unheard.1 >= UNHEARD_BYTES || unheard.0 >= requested.wrapping_sub(self.served) {
                    self.wake();
                    *unheard = (0, 0);
                }
                left = left.saturating_sub(cost);
                if left == 0 {
                    return Ok(Turn::Again);
                }
            }
        }
    }

    /// None for what has to wait.
    fn carry_out(&mut self, request: &Request, site: &Site, channel: &Channel) -> io::Result<Option<Answer>> {
        let coded = |code| Answer { code, ..Answer::default() };
        Ok(Some(match request.kind {
            Kind::Probe => Answer::default(),
            Kind::Write => match self.segments.get(request.segment, channel)? {
                Segment::Mapped(source) => coded(write(request, &source, site)),
                Segment::Awaited => return Ok(None),
                Segment::Unknown => coded(UNKNOWN),
            },
            Kind::Notice => {
                let Some(bytes) = self.rings.notice(request.segment, request.bytes) else {
                    return Ok(Some(coded(INVALID)));
                };
                site.inbound.notice(&self.from, Notice { bytes });
                Answer::default()
            }
            Kind::Admit => match admit(request, site) {
                // The reader must have heard of the memory before it hears that it may read it.
                Ok(answer) if !channel.has_announced(answer.segment) => return Ok(None),
                Ok(answer) => answer,
                Err(code) => coded(code),
            },
        }))
    }
}

/// Copies one slice, with a permit for each chunk; the code of its answer.
fn write(request: &Request, source: &Memory, site: &Site) -> u8 {
    let end = u64::from(request.bytes);
    let fits = request.bytes > 0 && request.bytes <= site.config.slice_bytes_max;
    if !fits || !source.holds(request.segment_at, end) || request.at.checked_add(end).is_none() {
        return INVALID;
    }
    let (mut at, mut intact) = (0, true);
    while at < end {
        let bytes = CHUNK_BYTES.min(end - at);
        let window = WindowId(request.window);
        match site.exposure.admit(window, Direction::Write, request.at + at, bytes) {
            Ok(permit) => {
                let from_at = request.segment_at + at;
                let chunk = Chunk { from: source, from_at, to: permit.memory(), to_at: permit.at(), bytes };
                intact &= chunk.copy(request.verify, &site.config);
            }
            Err(fault) => return code_of(&fault),
        }
        at += bytes;
    }
    if intact { 0 } else { CORRUPT }
}

/// Shows a window to its readers.
fn admit(request: &Request, site: &Site) -> Result<Answer, u8> {
    let window = WindowId(request.window);
    let allowed = || {
        let permit = site.exposure.admit(window, Direction::Read, 0, request.at);
        permit.map_err(|fault| code_of(&fault))
    };
    let permit = allowed()?;
    let segment = site.registry.check(permit.memory(), permit.at(), request.at).map_err(|_| INVALID)?;
    let at = permit.at();
    let slot = site.windows.show(window).map_err(|fault| code_of(&fault))?;
    // The window was closed before it was shown, so the revoking thread found nothing to shut. The permit keeps that
    // thread waiting until the window is shut again here, because no peer may see a closed window open.
    if let Err(code) = allowed() {
        site.windows.shut(window);
        return Err(code);
    }
    drop(permit);
    Ok(Answer { number: 0, code: 0, segment, slot, at })
}

fn code_of(fault: &Fault) -> u8 {
    if matches!(fault, Fault::Stale(_)) { STALE } else { INVALID }
}

impl Connection for ServedChannel {
    fn files(&self) -> Vec<BorrowedFd<'_>> {
        let bell = self.lane.as_ref().map(|lane| lane.bell.as_fd());
        [self.channel.file()].into_iter().chain(bell).collect()
    }

    fn event(&mut self, file: usize, _hung: bool) {
        // The bell carries only the wake-up itself, so its count stays unread.
        self.channel_ready |= file == 0;
    }

    fn turn(&mut self) -> Turn {
        let channel_ready = std::mem::take(&mut self.channel_ready);
        let Some(lane) = &mut self.lane else { return self.greet().unwrap_or(Turn::End) };
        if channel_ready {
            // The end of the channel ends all copies: the opener takes it for our word.
            lane.stalled = false;
            if self.channel.flush().and_then(|()| lane.segments.take(&self.channel)).is_err() {
                return Turn::End;
            }
        }
        if lane.stalled {
            return Turn::Wait;
        }
        lane.serve(&self.site, &self.channel).unwrap_or(Turn::End)
    }

    fn tick(&mut self, now: Instant) -> Turn {
        let limit = Duration::from_millis(self.site.config.progress_timeout_ms);
        if now.duration_since(self.since) < limit { Turn::Wait } else { Turn::End }
    }

    fn waits(&self) -> bool {
        self.lane.is_none()
    }

    fn rest(&mut self) -> bool {
        let Some(lane) = &self.lane else { return true };
        if lane.stalled {
            return true;
        }
        lane.rings.server_sleeps(true);
        let more = lane.rings.requested(lane.served) != Some(lane.served);
        if more {
            lane.rings.server_sleeps(false);
        }
        !more
    }

    fn spins(&self) -> bool {
        self.site.config.poll && self.lane.is_some()
    }

    fn cut(self: Box<Self>) {
        self.site.served.fetch_sub(1, Ordering::AcqRel);
    }
}
