//! One path as its opener sees it. Requests are put into the ring by whoever posts; answers are taken by the
//! I/O thread, or by a caller that polls. Reads are copied here, from the peer's memory into ours.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::channel::Channel;
use super::codes::{CORRUPT, INVALID, STALE, fault_of};
use super::lane::Farewell;
use super::posture::Posture;
use super::rings::{Answer, Kind, NOTICES, Request, Rings};
use super::site::{CHUNK_BYTES, Chunk, Segment, Segments, Site};
use super::windows::Table;
use crate::mover::completions::Source;
use crate::mover::gate::{Gate, Settled};
use crate::mover::reactor::{Seat, ring};
use crate::mover::{Direction, Fault, Memory, Notice, Path, PeerId, Slice};

/// Windows whose admission is remembered; the oldest number goes first.
const WINDOWS_MAX: usize = 4_096;

/// Reads of one call that are copied by whoever posts them, at most: a few microseconds.
const READ_AT_ONCE_BYTES: u64 = 64 << 10;
/// Bytes that a waiting caller copies before it looks around again, at most about.
const LOOK_BYTES: u64 = 64 << 10;

/// What a request was for.
enum Asked {
    Slice { ticket: u64, bytes: u32, window: u64 },
    Notice { ticket: u64, place: Option<u32> },
    Window(u64),
}

/// A window that may be read.
#[derive(Clone)]
struct Admitted {
    segment: u32,
    memory: Arc<Memory>,
    at: u64,
    slot: u32,
}

/// What posting, polling and the I/O thread share.
#[derive(Default)]
struct Desk {
    next: u32,
    answered: u32,
    asked: VecDeque<Asked>,
    reads: VecDeque<Slice>,
    /// The window that the first read waits for.
    asking: Option<u64>,
    windows: BTreeMap<u64, Admitted>,
    segments: Segments,
    /// Places of notices in use, a bit each.
    places: u64,
    settled: Settled,
    /// Reads being copied at this moment.
    copying: u32,
    /// The path is cut: nothing more is begun.
    over: bool,
    moved: bool,
}

/// A read to be copied.
struct Job {
    slice: Slice,
    source: Admitted,
}

/// See the module.
pub(super) struct Route {
    pub(super) site: Arc<Site>,
    pub(super) gate: Gate,
    pub(super) peer: PeerId,
    pub(super) seat: Seat,
    pub(super) channel: Arc<Channel>,
    pub(super) rings: Rings,
    pub(super) table: Table,
    /// Wakes the server.
    pub(super) bell: OwnedFd,
    /// Whether the I/O thread looks at limits of time.
    watched: AtomicBool,
    posture: Posture,
    desk: Mutex<Desk>,
}

/// What a path is made of.
pub(super) struct Parts {
    pub(super) channel: Arc<Channel>,
    pub(super) rings: Rings,
    pub(super) table: Table,
    pub(super) bell: OwnedFd,
}

impl Route {
    pub(super) fn new(site: Arc<Site>, gate: Gate, peer: PeerId, parts: Parts) -> Self {
        let seat = site.pool.seat();
        let Parts { channel, rings, table, bell } = parts;
        let (watched, posture, desk) = (AtomicBool::new(false), Posture::default(), Mutex::default());
        Self { site, gate, peer, seat, channel, rings, table, bell, watched, posture, desk }
    }

    /// The I/O thread is about to sleep, or awake again.
    pub(super) fn thread_sleeps(&self, asleep: bool) {
        self.posture.thread(&self.rings, asleep);
    }

    fn desk(&self) -> MutexGuard<'_, Desk> {
        self.desk.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins the end; the I/O thread cuts the lane.
    pub(super) fn end(&self, fault: Fault, by_itself: bool) {
        if self.gate.end(fault, by_itself) {
            self.site.pool.cut(self.seat);
        }
    }

    /// Puts a request into the ring.
    fn request(&self, desk: &mut Desk, request: &Request, asked: Asked) {
        self.rings.put(&Request { number: desk.next, ..*request });
        desk.next = desk.next.wrapping_add(1);
        desk.asked.push_back(asked);
    }

    /// Shows what was put, and wakes those who must act on it.
    fn show(&self, desk: &Desk) {
        if self.rings.ask(desk.next) {
            ring(&self.bell);
        }
    }

    fn take(&self, desk: &mut Desk, slice: &Slice) {
        if slice.direction == Direction::Read {
            desk.reads.push_back(slice.clone());
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
                self.request(desk, &request, Asked::Slice { ticket, bytes, window });
            }
            Err(fault) => self.settle_slice(desk, slice.ticket, bytes, Some(fault)),
        }
    }

    fn settle_slice(&self, desk: &mut Desk, ticket: u64, bytes: u32, fault: Option<Fault>) {
        desk.settled.slices += 1;
        desk.settled.bytes += u64::from(bytes);
        desk.settled.completions.push(match fault {
            Some(fault) => self.gate.failed(ticket, fault),
            None => self.gate.done(ticket),
        });
    }

    fn settle_notice(&self, desk: &mut Desk, ticket: u64, place: Option<u32>, fault: Option<Fault>) {
        desk.settled.notices += 1;
        if let Some(place) = place {
            desk.places &= !(1 << place);
        }
        desk.settled.completions.push(match fault {
            Some(fault) => self.gate.failed(ticket, fault),
            None => self.gate.notified(ticket),
        });
    }

    /// Takes answers and copies reads, for about `bytes` at most. True when there is more to do.
    pub(super) fn work(self: &Arc<Self>, mut bytes: u64) -> io::Result<bool> {
        loop {
            let mut desk = self.desk();
            if desk.over {
                return Ok(false);
            }
            let answers = self.answers(&mut desk);
            let job = answers.and_then(|()| self.next_job(&mut desk));
            self.gate.settle(&mut desk.settled);
            let Some(job) = job? else { return Ok(false) };
            desk.copying += 1;
            drop(desk);
            let fault = self.copy(&job);
            bytes = bytes.saturating_sub(u64::from(job.slice.bytes));
            desk = self.desk();
            desk.copying -= 1;
            desk.moved = true;
            self.settle_slice(&mut desk, job.slice.ticket, job.slice.bytes, fault);
            self.gate.settle(&mut desk.settled);
            if desk.over && desk.copying == 0 {
                drop(desk);
                self.say_farewell();
                return Ok(false);
            }
            if bytes == 0 {
                return Ok(true);
            }
        }
    }

    fn answers(&self, desk: &mut Desk) -> io::Result<()> {
        let answered = self.rings.answered();
        while desk.answered != answered {
            let answer = self.rings.answer_to(desk.answered);
            let right = answer.number == desk.answered;
            let Some(asked) = right.then(|| desk.asked.pop_front()).flatten() else {
                return Err(io::Error::other("the peer answers what was not asked"));
            };
            desk.answered = desk.answered.wrapping_add(1);
            desk.moved = true;
            match asked {
                Asked::Slice { ticket, bytes, window } => {
                    self.settle_slice(desk, ticket, bytes, fault_of(answer.code, window));
                }
                Asked::Notice { ticket, place } => {
                    self.settle_notice(desk, ticket, place, fault_of(answer.code, 0));
                }
                Asked::Window(window) => self.admitted(desk, window, answer)?,
            }
        }
        Ok(())
    }

    /// The peer has said whether a window may be read. If not, the read that wanted it fails, and the next
    /// that wants it asks again.
    fn admitted(&self, desk: &mut Desk, window: u64, answer: Answer) -> io::Result<()> {
        desk.asking = None;
        let mut fault = fault_of(answer.code, window);
        if fault.is_none() {
            match desk.segments.get(answer.segment, &self.channel)? {
                Segment::Mapped(memory) => {
                    if desk.windows.len() >= WINDOWS_MAX {
                        desk.windows.pop_first();
                    }
                    let Answer { segment, slot, at, .. } = answer;
                    desk.windows.insert(window, Admitted { segment, memory, at, slot });
                }
                // It tells before it answers.
                Segment::Awaited | Segment::Unknown => {
                    fault = Some(Fault::Invalid("the window is in memory that was not shared".into()));
                }
            }
        }
        let refused = desk.reads.pop_front_if(|read| fault.is_some() && read.remote.window.0 == window);
        if let Some(read) = refused {
            self.settle_slice(desk, read.ticket, read.bytes, fault);
        }
        Ok(())
    }

    /// The next read, when its window has been admitted; else the peer is asked.
    fn next_job(&self, desk: &mut Desk) -> io::Result<Option<Job>> {
        let Some(first) = desk.reads.front() else { return Ok(None) };
        let window = first.remote.window.0;
        let Some(source) = desk.windows.get(&window).cloned() else {
            if desk.asking.is_none() {
                desk.asking = Some(window);
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
                self.request(desk, &request, Asked::Window(window));
                self.show(desk);
            }
            return Ok(None);
        };
        let slice = desk.reads.pop_front().expect("just seen");
        Ok(Some(Job { slice, source }))
    }

    /// Copies a read. What it says holds for the moment after the last byte was copied.
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
        self.desk().windows.remove(&window);
        fault_of(STALE, window)
    }

    /// The I/O thread has let go of the lane: what is outstanding fails. The last copy says farewell.
    pub(super) fn cut(self: &Arc<Self>) {
        let fault = self.gate.fault();
        let mut desk = self.desk();
        desk.over = true;
        let (asked, reads) = (std::mem::take(&mut desk.asked), std::mem::take(&mut desk.reads));
        for one in asked {
            let fault = Some(fault.clone());
            match one {
                Asked::Slice { ticket, bytes, .. } => self.settle_slice(&mut desk, ticket, bytes, fault),
                Asked::Notice { ticket, place } => self.settle_notice(&mut desk, ticket, place, fault),
                Asked::Window(_) => {}
            }
        }
        for read in reads {
            self.settle_slice(&mut desk, read.ticket, read.bytes, Some(fault.clone()));
        }
        self.gate.settle(&mut desk.settled);
        if desk.copying == 0 {
            drop(desk);
            self.say_farewell();
        }
    }

    fn say_farewell(self: &Arc<Self>) {
        self.channel.end();
        self.site.pool.adopt(self.site.pool.seat(), Box::new(Farewell::new(self.clone())));
    }

    /// Takes what the peer tells of its memories, and tells of ours what it had no room for.
    pub(super) fn listen(&self) -> io::Result<()> {
        self.channel.flush()?;
        let mut desk = self.desk();
        let Desk { segments, windows, .. } = &mut *desk;
        segments.take(&self.channel)?;
        // What it has no more is not kept for the sake of windows into it.
        windows.retain(|_, window| segments.holds(window.segment));
        Ok(())
    }

    /// Whether answers or reads wait for somebody to take them; none does any more where the path is cut.
    pub(super) fn busy(&self) -> bool {
        let desk = self.desk();
        let reads = desk.reads.front().is_some() && desk.asking.is_none();
        !desk.over && (desk.answered != self.rings.answered() || reads)
    }

    fn outstanding(&self) -> bool {
        let desk = self.desk();
        !desk.asked.is_empty() || !desk.reads.is_empty()
    }

    /// Whether something is outstanding, and whether anything moved since the last question.
    pub(super) fn pulse(&self) -> (bool, bool) {
        (self.outstanding(), std::mem::take(&mut self.desk().moved))
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
            self.site.pool.nudge(self.seat);
        }
    }
}

impl Source for Route {
    fn look(self: Arc<Self>) {
        if self.work(LOOK_BYTES).is_err() {
            // The I/O thread finds the same and ends the path.
            self.site.pool.nudge(self.seat);
        }
    }

    fn sleeps(&self) -> bool {
        self.posture.caller(&self.rings, true);
        !self.busy()
    }

    fn wakes(&self) {
        self.posture.caller(&self.rings, false);
    }
}

/// What the opener of a path holds.
pub(super) struct ShmPath(pub(super) Arc<Route>);

impl Path for ShmPath {
    fn post(&self, slices: &[Slice]) -> usize {
        let route = &self.0;
        let mut desk = route.desk();
        let (before, waiting) = (desk.next, desk.reads.len());
        let taken = route.gate.take(slices, |slice| route.take(&mut desk, slice));
        if desk.next != before {
            route.show(&desk);
        }
        let reads = desk.reads.range(waiting..).fold(0, |sum, read| sum + u64::from(read.bytes));
        route.gate.settle(&mut desk.settled);
        drop(desk);
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
        let mut desk = route.desk();
        route.gate.take_notice(ticket, Some(&notice), || {
            let place = desk.places.trailing_ones();
            assert!(place < NOTICES, "no more notices are taken than there are places");
            desk.places |= 1 << place;
            route.rings.put_notice(place, &notice.bytes);
            let bytes = u32::try_from(notice.bytes.len()).expect("checked when it was taken");
            let request = Request { kind: Kind::Notice, bytes, segment: place, ..bare(Kind::Notice) };
            route.request(&mut desk, &request, Asked::Notice { ticket, place: Some(place) });
        });
        route.show(&desk);
        drop(desk);
        route.put(false);
    }

    fn probe(&self, ticket: u64) {
        let route = &self.0;
        let mut desk = route.desk();
        route.gate.take_notice(ticket, None, || {
            route.request(&mut desk, &bare(Kind::Probe), Asked::Notice { ticket, place: None });
        });
        route.show(&desk);
        drop(desk);
        route.put(false);
    }

    fn poll(&self) {
        if self.0.work(u64::MAX).is_err() {
            // The I/O thread finds the same and ends the path.
            self.0.site.pool.nudge(self.0.seat);
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
