//! The opener's end of one connection: requests out, answers in.

use std::collections::VecDeque;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::incoming::{IncomingStage, Landing, LandingContext, Place, ReceiveOutcome, Step};
use super::outgoing::{Body, FrameQueue};
use super::route::{LaneDoor, Route, Work};
use super::stream::{Stream, broken};
use super::wire::{Head, Kind, STRIDE_BYTES, TEXT_BYTES_MAX, Tail, fault_of};
use crate::mover::gate::TurnSummary;
use crate::mover::reactor::{Connection, Turn};
use crate::mover::{Direction, Fault, Region, Slice};

/// Bytes moved in one turn, at most about.
const TURN_BYTES: u64 = 4 << 20;

/// A request that has been sent, or waits to be.
struct WaitingRequest {
    number: u32,
    /// Of the slices in it, one after another, or of what is no slice.
    tickets: Vec<u64>,
    /// Of all slices; 0 for what is no slice.
    bytes: u32,
    /// Where a read goes.
    into: Option<(Region, bool)>,
}

impl WaitingRequest {
    /// A request that is not a slice.
    fn word(number: u32, ticket: u64) -> Self {
        Self { number, tickets: vec![ticket], bytes: 0, into: None }
    }
}

/// Slices that follow each other at both ends, to go as one frame.
struct Run {
    /// The first, with the bytes of all.
    slice: Slice,
    tickets: Vec<u64>,
}

impl Run {
    fn of(slice: Slice) -> Self {
        Self { tickets: vec![slice.ticket], slice }
    }

    /// Takes one more, if it continues these and they do not become too long.
    fn takes(&mut self, next: &Slice, most: u32) -> bool {
        let Slice { direction, local, remote, remote_at, bytes, verify, .. } = &self.slice;
        let behind = u64::from(*bytes);
        let continues = next.direction == *direction
            && next.verify == *verify
            && next.remote.window == remote.window
            && next.remote_at == remote_at + behind
            && Arc::ptr_eq(&next.local.memory, &local.memory)
            && next.local.at == local.at + behind;
        let Some(together) = bytes.checked_add(next.bytes).filter(|all| continues && *all <= most) else {
            return false;
        };
        self.slice.bytes = together;
        self.tickets.push(next.ticket);
        true
    }
}

/// The opener's end of one connection.
pub(super) struct Lane {
    route: Arc<Route>,
    index: usize,
    stream: Stream,
    outgoing: FrameQueue,
    incoming: IncomingStage,
    landing: Option<Landing>,
    /// Writes, notices and probes, in order.
    acks: VecDeque<WaitingRequest>,
    /// Reads, in order.
    reads: VecDeque<WaitingRequest>,
    next: u32,
    settled: TurnSummary,
    /// The socket took all that it was offered, as far as we know.
    writable: bool,
    moved: bool,
    still_since: Instant,
}

impl Lane {
    pub(super) fn new(route: Arc<Route>, index: usize, stream: Stream) -> Self {
        Self {
            route,
            index,
            stream,
            outgoing: FrameQueue::default(),
            incoming: IncomingStage::new(),
            landing: None,
            acks: VecDeque::new(),
            reads: VecDeque::new(),
            next: 0,
            settled: TurnSummary::default(),
            writable: true,
            moved: true,
            still_since: Instant::now(),
        }
    }

    fn door(&self) -> &LaneDoor {
        &self.route.doors[self.index]
    }

    fn submit(&mut self) {
        let most = self.route.gate.slice_bytes_max().min(STRIDE_BYTES);
        let mut run: Option<Run> = None;
        for work in self.door().take() {
            // A lane that was idle starts to wait only now.
            self.moved |= !self.waits() && run.is_none();
            match work {
                Work::Slice(slice) if run.as_mut().is_some_and(|run| run.takes(&slice, most)) => {}
                Work::Slice(slice) => {
                    let before = run.replace(Run::of(slice));
                    self.submit_run(before);
                }
                Work::Notice(ticket, notice) => {
                    self.submit_run(run.take());
                    let number = self.number();
                    let bytes = u32::try_from(notice.bytes.len()).expect("checked when it was taken");
                    let head = Head { bytes, ..Head::new(Kind::Notice, number) };
                    self.outgoing.push(&head, Body::Bytes(notice.bytes), false);
                    self.acks.push_back(WaitingRequest::word(number, ticket));
                }
                Work::Probe(ticket) => {
                    self.submit_run(run.take());
                    let number = self.number();
                    self.outgoing.push(&Head::new(Kind::Probe, number), Body::None, false);
                    self.acks.push_back(WaitingRequest::word(number, ticket));
                }
            }
        }
        self.submit_run(run);
    }

    fn number(&mut self) -> u32 {
        let number = self.next;
        self.next = self.next.wrapping_add(1);
        number
    }

    fn submit_run(&mut self, run: Option<Run>) {
        let Some(Run { slice, tickets }) = run else { return };
        let number = self.number();
        let Slice { bytes, verify, .. } = slice;
        let (window, at) = (slice.remote.window.0, slice.remote_at);
        let head = |kind| Head { verify, bytes, window, at, ..Head::new(kind, number) };
        match slice.direction {
            Direction::Write => {
                let body = Body::Memory(slice.local.memory, slice.local.at);
                self.outgoing.push(&head(Kind::Write), body, verify);
                self.acks.push_back(WaitingRequest { number, tickets, bytes, into: None });
            }
            Direction::Read => {
                self.outgoing.push(&head(Kind::Read), Body::None, false);
                self.reads.push_back(WaitingRequest {
                    number,
                    tickets,
                    bytes,
                    into: Some((slice.local, verify)),
                });
            }
        }
    }

    /// Sends and receives until nothing goes or the turn is long enough.
    fn work(&mut self) -> Result<Turn, Fault> {
        let mut left = TURN_BYTES;
        loop {
            self.submit();
            let before = left;
            if self.writable && (!self.outgoing.is_empty() || self.stream.unsent()) {
                let kept = self.stream.unsent();
                let went = self.outgoing.send(&mut self.stream, &self.route.site.exposure).map_err(broken)?;
                self.writable = went.more;
                left = left.saturating_sub(if went.more { went.bytes.max(1) } else { went.bytes });
                self.moved |= went.bytes > 0 || (kept && !self.stream.unsent());
            }
            left = left.saturating_sub(self.receive()?);
            if left == before && (!self.writable || self.outgoing.is_empty()) {
                return Ok(Turn::Wait);
            }
            if left == 0 {
                return Ok(Turn::Again);
            }
        }
    }

    /// Takes one answer or part of one; says how many bytes came.
    fn receive(&mut self) -> Result<u64, Fault> {
        let mut came = 0;
        while came < TURN_BYTES / 8 {
            if self.landing.is_some() {
                match self.land().map_err(broken)? {
                    Step::Blocked => break,
                    Step::Moved(bytes) => came += bytes as u64,
                    Step::Landed(tail) => self.landed(tail)?,
                }
                continue;
            }
            match self.incoming.take_head() {
                Some(Some(head)) => self.begin(head)?,
                Some(None) => return Err(out_of_step("what came is no frame")),
                None => match self.incoming.fill(&mut self.stream).map_err(broken)? {
                    ReceiveOutcome::Nothing => break,
                    ReceiveOutcome::Some(bytes) => came += bytes as u64,
                },
            }
        }
        self.moved |= came > 0;
        Ok(came)
    }

    fn land(&mut self) -> io::Result<Step> {
        let site = &self.route.site;
        let (exposure, damage) = (&site.exposure, &*site.config.damage);
        let landing = self.landing.as_mut().expect("looked at by the caller");
        let (stream, incoming) = (&mut self.stream, &mut self.incoming);
        landing.step(&mut LandingContext { stream, incoming, exposure, damage })
    }

    fn begin(&mut self, head: Head) -> Result<(), Fault> {
        let place = match head.kind {
            Kind::Acked => {
                self.acked(head.number);
                return Ok(());
            }
            Kind::Refused | Kind::Bye if usize::try_from(head.bytes).is_ok_and(|n| n <= TEXT_BYTES_MAX) => {
                Place::Bytes(Vec::new())
            }
            Kind::Data => {
                let asked = |read: &&WaitingRequest| read.number == head.number && read.bytes == head.bytes;
                let Some(read) = self.reads.front().filter(asked) else {
                    return Err(out_of_step("it sends what was not asked for"));
                };
                let (region, verify) = read.into.clone().expect("a read goes somewhere");
                self.landing = Some(Landing::new(Head { verify, ..head }, Place::Local(region), true));
                return Ok(());
            }
            _ => return Err(out_of_step("it sends what only an opener sends")),
        };
        self.landing = Some(Landing::new(head, place, false));
        Ok(())
    }

    fn acked(&mut self, through: u32) {
        // Numbers wrap; those outstanding are far fewer than half of them.
        while let Some(waiting) = self.acks.pop_front_if(|w| through.wrapping_sub(w.number) < u32::MAX / 2) {
            self.settle(&waiting, None);
        }
    }

    fn landed(&mut self, tail: Option<Tail>) -> Result<(), Fault> {
        let landing = self.landing.take().expect("it has just landed");
        let text = match &landing.place {
            Place::Bytes(text) => String::from_utf8_lossy(text).into_owned(),
            _ => String::new(),
        };
        let number = landing.head.number;
        match landing.head.kind {
            Kind::Bye => return Err(fault_of(landing.head.code, format!("the peer ended it: {text}"))),
            Kind::Refused => {
                let queue = if self.reads.front().is_some_and(|read| read.number == number) {
                    &mut self.reads
                } else {
                    &mut self.acks
                };
                let Some(at) = queue.iter().position(|waiting| waiting.number == number) else {
                    return Err(out_of_step("it refuses what was not asked for"));
                };
                let waiting = queue.remove(at).expect("just found");
                self.settle(&waiting, Some(&fault_of(landing.head.code, text)));
            }
            _ => {
                let waiting = self.reads.pop_front().expect("looked at when it began");
                let fault = match tail.map_or(0, |tail| tail.code) {
                    0 if landing.intact(tail) => None,
                    0 => Some(Fault::Corrupt("what was read differs from what was sent".into())),
                    code => Some(fault_of(code, "the window was closed while it was read".into())),
                };
                self.settle(&waiting, fault.as_ref());
            }
        }
        Ok(())
    }

    fn settle(&mut self, waiting: &WaitingRequest, fault: Option<&Fault>) {
        let gate = &self.route.gate;
        for &ticket in &waiting.tickets {
            self.settled.completions.push(match fault {
                Some(fault) => gate.failed(ticket, fault.clone()),
                None if waiting.bytes == 0 => gate.notified(ticket),
                None => gate.done(ticket),
            });
        }
        let count = u32::try_from(waiting.tickets.len()).expect("no more than are outstanding");
        if waiting.bytes == 0 {
            self.settled.notices += count;
        } else {
            self.settled.slices += count;
            self.settled.bytes += u64::from(waiting.bytes);
            self.route.doors[self.index].relieve(u64::from(waiting.bytes));
        }
    }
}

fn out_of_step(why: &str) -> Fault {
    Fault::Path(format!("the peer is out of step: {why}"))
}

impl Connection for Lane {
    fn files(&self) -> Vec<BorrowedFd<'_>> {
        vec![self.stream.file()]
    }

    fn event(&mut self, _file: usize, hung: bool) {
        self.writable = true;
        self.incoming.awake(hung);
    }

    fn turn(&mut self) -> Turn {
        let turn = self.work();
        self.route.gate.settle(&mut self.settled);
        turn.unwrap_or_else(|fault| {
            self.route.end(fault, true);
            Turn::End
        })
    }

    fn tick(&mut self, now: Instant) -> Turn {
        if std::mem::take(&mut self.moved) {
            self.still_since = now;
        }
        let limit = Duration::from_millis(self.route.site.config.progress_timeout_ms);
        if now.duration_since(self.still_since) < limit {
            return Turn::Wait;
        }
        let text = format!("{} moved nothing for {} ms", self.route.peer.address, limit.as_millis());
        self.route.end(Fault::Silent(text), true);
        Turn::End
    }

    fn waits(&self) -> bool {
        !self.acks.is_empty() || !self.reads.is_empty()
    }

    fn cut(mut self: Box<Self>) {
        // When the thread stops, no other code has begun the end yet.
        self.route.end(Fault::Path("the transport is shutting down".into()), false);
        let fault = self.route.gate.fault();
        let waiting: Vec<WaitingRequest> = self.acks.drain(..).chain(self.reads.drain(..)).collect();
        for one in waiting {
            self.settle(&one, Some(&fault));
        }
        for work in self.door().rest() {
            let (ticket, bytes) = match work {
                Work::Slice(slice) => (slice.ticket, slice.bytes),
                Work::Notice(ticket, _) | Work::Probe(ticket) => (ticket, 0),
            };
            self.settle(&WaitingRequest { bytes, ..WaitingRequest::word(0, ticket) }, Some(&fault));
        }
        let route = self.route.clone();
        route.gate.settle(&mut self.settled);
        drop(self);
        route.lane_is_cut();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mover::{Location, Memory, RemoteSegment, WindowId};

    #[test]
    fn only_slices_that_follow_each_other_at_both_ends_are_one_run() {
        let memory = || Memory::private(1 << 16, Location::Anywhere).unwrap();
        let window =
            |number| Arc::new(RemoteSegment { window: WindowId(number), bytes: 1 << 16, access: Vec::new() });
        let (ours, remote) = (memory(), window(1));
        let first = Slice {
            ticket: 1,
            direction: Direction::Write,
            local: Region { memory: ours.clone(), at: 100 },
            remote: remote.clone(),
            remote_at: 500,
            bytes: 50,
            verify: false,
        };
        let behind = Region { memory: ours, at: 150 };
        let next = Slice { ticket: 2, local: behind.clone(), remote_at: 550, ..first.clone() };
        let mut run = Run::of(first);
        for odd in [
            Slice { direction: Direction::Read, ..next.clone() },
            Slice { verify: true, ..next.clone() },
            Slice { remote_at: 551, ..next.clone() },
            Slice { remote: window(2), ..next.clone() },
            Slice { local: Region { at: 149, ..behind.clone() }, ..next.clone() },
            Slice { local: Region { memory: memory(), at: 150 }, ..next.clone() },
            Slice { bytes: 51, ..next.clone() },
            Slice { bytes: u32::MAX, ..next.clone() },
        ] {
            assert!(!run.takes(&odd, 100), "{odd:?}");
        }
        assert!(run.takes(&next, 100));
        assert_eq!((run.slice.bytes, run.slice.remote_at, &run.tickets[..]), (100, 500, &[1, 2][..]));
        assert!(!run.takes(&Slice { bytes: 1, remote_at: 600, ..next }, 100), "it is long enough");
    }
}
