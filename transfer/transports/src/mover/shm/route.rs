//! The opener's side of a path. The posting thread puts requests into the ring; the I/O thread, or a polling caller,
//! takes the answers. Reads are copied here, from the peer's memory into ours.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::channel::Channel;
use super::codes::{CORRUPT, INVALID, STALE, fault_of};
use super::lane::ClosingLane;
use super::rings::{Answer, Kind, NOTICES, Request, Rings};
use super::site::{CHUNK_BYTES, Chunk, Segment, Segments, Site};
use super::sleep_state::SleepState;
use super::windows::Table;
use crate::mover::completions::Source;
use crate::mover::gate::{Gate, TurnSummary};
use crate::mover::reactor::{ReactorSlot, ring};
use crate::mover::{Direction, Fault, Memory, Notice, Path, PeerId, Slice};

/// Windows whose admission is remembered; the oldest number goes first.
const WINDOWS_MAX: usize = 4_096;

/// Bytes of reads in one call that the posting thread copies itself, at most: a few microseconds.
const READ_AT_ONCE_BYTES: u64 = 64 << 10;
/// Bytes that a waiting caller copies before it looks around again, at most about.
const LOOK_BYTES: u64 = 64 << 10;

/// The purpose of a request.
enum RingRequest {
    Slice { ticket: u64, bytes: u32, window: u64 },
    Notice { ticket: u64, place: Option<u32> },
    Window(u64),
}

/// A window that may be read.
#[derive(Clone)]
struct AdmittedWindow {
    segment: u32,
    memory: Arc<Memory>,
    at: u64,
    slot: u32,
}

/// State shared by posting, polling and the I/O thread.
#[derive(Default)]
struct ReplySlots {
    next: u32,
    answered: u32,
    asked: VecDeque<RingRequest>,
    reads: VecDeque<Slice>,
    /// The window that the first read waits for.
    asking: Option<u64>,
    windows: BTreeMap<u64, AdmittedWindow>,
    segments: Segments,
    /// Places of notices in use, a bit each.
    places: u64,
    settled: TurnSummary,
    /// Reads being copied at this moment.
    copying: u32,
    /// The path is cut: nothing more is begun.
    over: bool,
    moved: bool,
}

/// A read to be copied.
struct Job {
    slice: Slice,
    source: AdmittedWindow,
}

/// The opener's side of one path.
pub(super) struct Route {
    pub(super) site: Arc<Site>,
    pub(super) gate: Gate,
    pub(super) peer: PeerId,
    pub(super) slot: ReactorSlot,
    pub(super) channel: Arc<Channel>,
    pub(super) rings: Rings,
    pub(super) table: Table,
    /// Wakes the server.
    pub(super) bell: OwnedFd,
    /// Whether the I/O thread looks at limits of time.
    watched: AtomicBool,
    sleep_state: SleepState,
    replies: Mutex<ReplySlots>,
}

/// The parts that make up a path.
pub(super) struct Parts {
    pub(super) channel: Arc<Channel>,
    pub(super) rings: Rings,
    pub(super) table: Table,
    pub(super) bell: OwnedFd,
}

impl Route {
    pub(super) fn new(site: Arc<Site>, gate: Gate, peer: PeerId, parts: Parts) -> Self {
        let slot = site.pool.slot();
        let Parts { channel, rings, table, bell } = parts;
        let (watched, sleep_state, replies) =
            (AtomicBool::new(false), SleepState::default(), Mutex::default());
        Self { site, gate, peer, slot, channel, rings, table, bell, watched, sleep_state, replies }
    }

    /// The I/O thread is about to sleep, or awake again.
    pub(super) fn thread_sleeps(&self, asleep: bool) {
        self.sleep_state.thread(&self.rings, asleep);
    }

    fn replies(&self) -> MutexGuard<'_, ReplySlots> {
        self.replies.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins the end; the I/O thread cuts the lane.
    pub(super) fn end(&self, fault: Fault, by_itself: bool) {
        if self.gate.end(fault, by_itself) {
            self.site.pool.cut(self.slot);
        }
    }

    /// Puts a request into the ring.
    fn request(&self, replies: &mut ReplySlots, request: &Request, asked: RingRequest) {
        self.rings.put(&Request { number: replies.next, ..*request });
        replies.next = replies.next.wrapping_add(1);
        replies.asked.push_back(asked);
    }

    /// Shows what was put, and wakes those who must act on it.
    fn show(&self, replies: &ReplySlots) {
        if self.rings.publish_requests(replies.next) {
            ring(&self.bell);
        }
    }

    fn take(&self, replies: &mut ReplySlots, slice: &Slice) {
        if slice.direction == Direction::Read {
            replies.reads.push_back(slice.clone());
            return;
        }
        let (memory, bytes) = (&slice.local.memory, slice.bytes);
        match self.site.registry.check(memory, slice.local.at, u64::from(bytes)) {
            Ok(segment) => {
                let request = Request {
                    kind: Kind::Write,
                    verify: slice.verify,
                    bytes,
                    window: slice.remote.window.0,
                    at: slice.remote_at,
                    segment,
                    segment_at: slice.local.at,
                    number: 0,
                };
                let (ticket, window) = (slice.ticket, slice.remote.window.0);
                self.request(replies, &request, RingRequest::Slice { ticket, bytes, window });
            }
            Err(fault) => self.settle_slice(replies, slice.ticket, bytes, Some(fault)),
        }
    }

    fn settle_slice(&self, replies: &mut ReplySlots, ticket: u64, bytes: u32, fault: Option<Fault>) {
        replies.settled.slices += 1;
        replies.settled.bytes += u64::from(bytes);
        replies.settled.completions.push(match fault {
            Some(fault) => self.gate.failed(ticket, fault),
            None => self.gate.done(ticket),
        });
    }

    fn settle_notice(&self, replies: &mut ReplySlots, ticket: u64, place: Option<u32>, fault: Option<Fault>) {
        replies.settled.notices += 1;
        if let Some(place) = place {
            replies.places &= !(1 << place);
        }
        replies.settled.completions.push(match fault {
            Some(fault) => self.gate.failed(ticket, fault),
            None => self.gate.notified(ticket),
        });
    }

    /// Takes answers and copies reads, for about `bytes` at most. True when there is more to do.
    pub(super) fn work(self: &Arc<Self>, mut bytes: u64) -> io::Result<bool> {
        loop {
            let mut replies = self.replies();
            if replies.over {
                return Ok(false);
            }
            let answers = self.answers(&mut replies);
            let job = answers.and_then(|()| self.next_job(&mut replies));
            self.gate.settle(&mut replies.settled);
            let Some(job) = job? else { return Ok(false) };
            replies.copying += 1;
            drop(replies);
            let fault = self.copy(&job);
            bytes = bytes.saturating_sub(u64::from(job.slice.bytes));
            replies = self.replies();
            replies.copying -= 1;
            replies.moved = true;
            self.settle_slice(&mut replies, job.slice.ticket, job.slice.bytes, fault);
            self.gate.settle(&mut replies.settled);
            if replies.over && replies.copying == 0 {
                drop(replies);
                self.send_farewell();
                return Ok(false);
            }
            if bytes == 0 {
                return Ok(true);
            }
        }
    }

    fn answers(&self, replies: &mut ReplySlots) -> io::Result<()> {
        let answered = self.rings.answered();
        while replies.answered != answered {
            let answer = self.rings.answer_to(replies.answered);
            let right = answer.number == replies.answered;
            let Some(asked) = right.then(|| replies.asked.pop_front()).flatten() else {
                return Err(io::Error::other("the peer answers what was not asked"));
            };
            replies.answered = replies.answered.wrapping_add(1);
            replies.moved = true;
            match asked {
                RingRequest::Slice { ticket, bytes, window } => {
                    self.settle_slice(replies, ticket, bytes, fault_of(answer.code, window));
                }
                RingRequest::Notice { ticket, place } => {
                    self.settle_notice(replies, ticket, place, fault_of(answer.code, 0));
                }
                RingRequest::Window(window) => self.admitted(replies, window, answer)?,
            }
        }
        Ok(())
    }

    /// The peer has said whether a window may be read. If not, the read that wanted it fails, and the next
    /// that wants it asks again.
    fn admitted(&self, replies: &mut ReplySlots, window: u64, answer: Answer) -> io::Result<()> {
        replies.asking = None;
        let mut fault = fault_of(answer.code, window);
        if fault.is_none() {
            match replies.segments.get(answer.segment, &self.channel)? {
                Segment::Mapped(memory) => {
                    if replies.windows.len() >= WINDOWS_MAX {
                        replies.windows.pop_first();
                    }
                    let Answer { segment, slot, at, .. } = answer;
                    replies.windows.insert(window, AdmittedWindow { segment, memory, at, slot });
                }
                // The peer announces memory before it answers.
                Segment::Awaited | Segment::Unknown => {
                    fault = Some(Fault::Invalid("the window is in memory that was not shared".into()));
                }
            }
        }
        let refused = replies.reads.pop_front_if(|read| fault.is_some() && read.remote.window.0 == window);
        if let Some(read) = refused {
            self.settle_slice(replies, read.ticket, read.bytes, fault);
        }
        Ok(())
    }

    /// The next read, when its window has been admitted; else the peer is asked.
    fn next_job(&self, replies: &mut ReplySlots) -> io::Result<Option<Job>> {
        let Some(first) = replies.reads.front() else { return Ok(None) };
        let window = first.remote.window.0;
        let Some(source) = replies.windows.get(&window).cloned() else {
            if replies.asking.is_none() {
                replies.asking = Some(window);
                let request = Request {
                    kind: Kind::Admit,
                    verify: false,
                    bytes: 0,
                    window,
                    at: first.remote.bytes,
                    segment: 0,
                    segment_at: 0,
                    number: 0,
                };
                self.request(replies, &request, RingRequest::Window(window));
                self.show(replies);
            }
            return Ok(None);
        };
        let slice = replies.reads.pop_front().expect("just seen");
        Ok(Some(Job { slice, source }))
    }

    /// Copies a read. The result holds for the moment after the last byte was copied.
    fn copy(&self, job: &Job) -> Option<Fault> {
        let Job { slice, source } = job;
        let window = slice.remote.window.0;
        // Where it lies is the peer's word.
        let inside = |at: &u64| source.memory.holds(*at, u64::from(slice.bytes));
        let Some(from_at) = source.at.checked_add(slice.remote_at).filter(inside) else {
            return fault_of(INVALID, window);
        };
        let (mut at, end) = (0, u64::from(slice.bytes));
        while at < end {
            if !self.table.open(source.slot, window) {
                break;
            }
            let chunk = Chunk {
                from: &source.memory,
                from_at: from_at + at,
                to: &slice.local.memory,
                to_at: slice.local.at + at,
                bytes: CHUNK_BYTES.min(end - at),
            };
            let intact = chunk.copy(slice.verify, &self.site.config);
            at += chunk.bytes;
            if !intact && self.table.open(source.slot, window) {
                return fault_of(CORRUPT, window);
            }
        }
        if at == end && self.table.open(source.slot, window) {
            return None;
        }
        self.replies().windows.remove(&window);
        fault_of(STALE, window)
    }

    /// The I/O thread has let go of the lane: what is outstanding fails. The last copy says farewell.
    pub(super) fn cut(self: &Arc<Self>) {
        let fault = self.gate.fault();
        let mut replies = self.replies();
        replies.over = true;
        let (asked, reads) = (std::mem::take(&mut replies.asked), std::mem::take(&mut replies.reads));
        for one in asked {
            let fault = Some(fault.clone());
            match one {
                RingRequest::Slice { ticket, bytes, .. } => {
                    self.settle_slice(&mut replies, ticket, bytes, fault)
                }
                RingRequest::Notice { ticket, place } => {
                    self.settle_notice(&mut replies, ticket, place, fault)
                }
                RingRequest::Window(_) => {}
            }
        }
        for read in reads {
            self.settle_slice(&mut replies, read.ticket, read.bytes, Some(fault.clone()));
        }
        self.gate.settle(&mut replies.settled);
        if replies.copying == 0 {
            drop(replies);
            self.send_farewell();
        }
    }

    fn send_farewell(self: &Arc<Self>) {
        self.channel.end();
        self.site.pool.adopt(self.site.pool.slot(), Box::new(ClosingLane::new(self.clone())));
    }

    /// Takes the peer's news of its memories, and sends waiting news of ours.
    pub(super) fn listen(&self) -> io::Result<()> {
        self.channel.flush()?;
        let mut replies = self.replies();
        let ReplySlots { segments, windows, .. } = &mut *replies;
        segments.take(&self.channel)?;
        // Windows into memory that the peer has dropped are forgotten too.
        windows.retain(|_, window| segments.holds(window.segment));
        Ok(())
    }

    /// Whether answers or reads wait for a thread to take them. A cut path has none.
    pub(super) fn busy(&self) -> bool {
        let replies = self.replies();
        let reads = replies.reads.front().is_some() && replies.asking.is_none();
        !replies.over && (replies.answered != self.rings.answered() || reads)
    }

    fn outstanding(&self) -> bool {
        let replies = self.replies();
        !replies.asked.is_empty() || !replies.reads.is_empty()
    }

    /// Whether something is outstanding, and whether anything moved since the last question.
    pub(super) fn pulse(&self) -> (bool, bool) {
        (self.outstanding(), std::mem::take(&mut self.replies().moved))
    }

    pub(super) fn watched(&self) -> bool {
        self.watched.load(Ordering::SeqCst)
    }

    /// Nothing has moved for long: the next post wakes the I/O thread again.
    pub(super) fn unwatch(&self) {
        self.watched.store(false, Ordering::SeqCst);
        if self.pulse().0 {
            self.watched.store(true, Ordering::SeqCst);
        }
    }

    /// After something was put: the I/O thread must watch the time, and copy reads unless the caller polls.
    fn put(&self, reads: bool) {
        let watched = self.watched.swap(true, Ordering::SeqCst);
        if !watched || reads && !self.site.config.poll {
            self.site.pool.nudge(self.slot);
        }
    }
}

impl Source for Route {
    fn look(self: Arc<Self>) {
        if self.work(LOOK_BYTES).is_err() {
            // The I/O thread finds the same and ends the path.
            self.site.pool.nudge(self.slot);
        }
    }

    fn sleeps(&self) -> bool {
        self.sleep_state.caller(&self.rings, true);
        !self.busy()
    }

    fn wakes(&self) {
        self.sleep_state.caller(&self.rings, false);
    }
}

/// The handle of a path's owner.
pub(super) struct ShmPath(pub(super) Arc<Route>);

impl Path for ShmPath {
    fn post(&self, slices: &[Slice]) -> usize {
        let route = &self.0;
        let mut replies = route.replies();
        let (before, waiting) = (replies.next, replies.reads.len());
        let taken = route.gate.take(slices, |slice| route.take(&mut replies, slice));
        if replies.next != before {
            route.show(&replies);
        }
        let reads = replies.reads.range(waiting..).fold(0, |sum, read| sum + u64::from(read.bytes));
        route.gate.settle(&mut replies.settled);
        drop(replies);
        if waiting == 0 && (1..=READ_AT_ONCE_BYTES).contains(&reads) {
            self.poll();
            if route.outstanding() {
                route.put(route.busy());
            }
        } else {
            route.put(reads > 0);
        }
        taken
    }

    fn notify(&self, ticket: u64, notice: Notice) {
        let route = &self.0;
        let mut replies = route.replies();
        route.gate.take_notice(ticket, Some(&notice), || {
            let place = replies.places.trailing_ones();
            assert!(place < NOTICES, "no more notices are taken than there are places");
            replies.places |= 1 << place;
            route.rings.put_notice(place, &notice.bytes);
            let bytes = u32::try_from(notice.bytes.len()).expect("checked when it was taken");
            let request = Request { kind: Kind::Notice, bytes, segment: place, ..bare(Kind::Notice) };
            route.request(&mut replies, &request, RingRequest::Notice { ticket, place: Some(place) });
        });
        route.show(&replies);
        drop(replies);
        route.put(false);
    }

    fn probe(&self, ticket: u64) {
        let route = &self.0;
        let mut replies = route.replies();
        route.gate.take_notice(ticket, None, || {
            route.request(&mut replies, &bare(Kind::Probe), RingRequest::Notice { ticket, place: None });
        });
        route.show(&replies);
        drop(replies);
        route.put(false);
    }

    fn poll(&self) {
        if self.0.work(u64::MAX).is_err() {
            // The I/O thread finds the same and ends the path.
            self.0.site.pool.nudge(self.0.slot);
        }
    }

    fn close(&self) {
        self.0.end(Fault::Path("the path was closed".into()), false);
    }
}

fn bare(kind: Kind) -> Request {
    Request { kind, verify: false, bytes: 0, window: 0, at: 0, segment: 0, segment_at: 0, number: 0 }
}

impl Drop for ShmPath {
    fn drop(&mut self) {
        self.close();
    }
}
