//! Bytes on their way in: heads through a small stage, bodies straight into memory, a chunk at a time.

use std::io;
use std::sync::Arc;

use super::stream::Stream;
use super::vectored::Target;
use super::wire::{HEAD_BYTES, Head, STRIDE_BYTES, TAIL_BYTES, Tail, code_of, fold, step_bytes};
use crate::mover::damage::Damage;
use crate::mover::greeting::field;
use crate::mover::{Direction, Exposure, Memory, Permit, Region, WindowId};

const STAGE_BYTES: usize = 64 << 10;
/// Bodies at least this long are received without reading far ahead: what is staged has to be copied again.
const LONG_BYTES: u32 = 16 << 10;

/// The result of one receive call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ReceiveOutcome {
    /// This much, and perhaps there is more.
    Some(usize),
    /// Nothing is there for now.
    Nothing,
}

/// The stage.
pub(super) struct IncomingStage {
    stage: Box<[u8]>,
    start: usize,
    end: usize,
    /// How far to read ahead.
    ahead: usize,
    /// The last call took all that there was.
    drained: bool,
    /// The end may be right behind the last byte.
    hung: bool,
}

impl IncomingStage {
    pub(super) fn new() -> Self {
        Self {
            stage: vec![0; STAGE_BYTES].into(),
            start: 0,
            end: 0,
            ahead: STAGE_BYTES,
            drained: false,
            hung: false,
        }
    }

    /// There may be more again, or the end.
    pub(super) fn awake(&mut self, hung: bool) {
        self.drained = false;
        self.hung |= hung;
    }

    pub(super) fn staged(&self) -> &[u8] {
        &self.stage[self.start..self.end]
    }

    fn consume(&mut self, bytes: usize) {
        self.start += bytes;
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        }
    }

    /// The next `N` bytes, when they are there.
    pub(super) fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        (self.staged().len() >= N).then(|| {
            let taken = field(self.staged(), 0);
            self.consume(N);
            taken
        })
    }

    pub(super) fn take_head(&mut self) -> Option<Option<Head>> {
        let head = self.take::<HEAD_BYTES>()?;
        // Long bodies set it anew.
        self.ahead = STAGE_BYTES;
        Some(Head::decode(&head))
    }

    /// Receives more of heads and tails.
    ///
    /// # Errors
    /// As the socket; also for its end.
    pub(super) fn fill(&mut self, stream: &mut Stream) -> io::Result<ReceiveOutcome> {
        self.call(stream, None, self.ahead)
    }

    fn call(
        &mut self,
        stream: &mut Stream,
        target: Option<&Target<'_>>,
        ahead: usize,
    ) -> io::Result<ReceiveOutcome> {
        if self.drained {
            return Ok(ReceiveOutcome::Nothing);
        }
        if self.start > 0 {
            self.stage.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        let room = ahead.min(self.stage.len() - self.end);
        let asked = room + target.map_or(0, |target| target.bytes);
        match stream.receive(target, &mut self.stage[self.end..self.end + room]) {
            Ok(0) => Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the peer has closed the connection")),
            Ok(came) => {
                // Fewer bytes than requested: the socket is empty, and the next event signals new bytes.
                self.drained = came < asked && !self.hung && stream.short_is_empty();
                self.end += came.saturating_sub(target.map_or(0, |target| target.bytes));
                Ok(ReceiveOutcome::Some(came))
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                self.drained = true;
                Ok(ReceiveOutcome::Nothing)
            }
            Err(error) => Err(error),
        }
    }
}

/// Where a body goes.
pub(super) enum Place {
    /// To local memory.
    Local(Region),
    /// To a window, looked up anew for each chunk.
    Window(WindowId, u64),
    /// To the program.
    Bytes(Vec<u8>),
    /// The body is read and dropped.
    Nowhere,
}

/// A body on its way in, and the tail behind it.
pub(super) struct Landing {
    pub(super) head: Head,
    pub(super) place: Place,
    tailed: bool,
    landed: u32,
    sum: u64,
    /// The fault on this side: code and text.
    pub(super) fault: Option<crate::mover::Fault>,
}

/// The result of a step of a landing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// So many bytes came.
    Moved(usize),
    /// Nothing is there for now.
    Blocked,
    /// All is there, with this tail.
    Landed(Option<Tail>),
}

/// The parts of a connection that landings use.
pub(super) struct LandingContext<'a> {
    pub(super) stream: &'a mut Stream,
    pub(super) incoming: &'a mut IncomingStage,
    pub(super) exposure: &'a Arc<Exposure>,
    pub(super) damage: &'a Damage,
}

impl Landing {
    pub(super) fn new(head: Head, place: Place, tailed: bool) -> Self {
        Self { head, place, tailed, landed: 0, sum: 0, fault: None }
    }

    /// Whether the bytes that landed are those that the tail is about.
    pub(super) fn intact(&self, tail: Option<Tail>) -> bool {
        !self.head.verify || tail.is_none_or(|tail| tail.sum == self.sum)
    }

    /// Lands some more.
    ///
    /// # Errors
    /// As the socket.
    pub(super) fn step(&mut self, context: &mut LandingContext<'_>) -> io::Result<Step> {
        if self.landed == self.head.bytes {
            return self.tail(context);
        }
        let chunk = step_bytes(self.head.verify, STRIDE_BYTES);
        let start = self.landed - self.landed % chunk;
        let end = self.head.bytes.min(start.saturating_add(chunk));
        let permit = self.admit(start, end, context);
        let (memory, base) = match (&self.place, &permit) {
            (_, Some(permit)) => (permit.memory().clone(), permit.at()),
            (Place::Local(region), None) => (region.memory.clone(), region.at + u64::from(start)),
            _ => return self.aside(end, context),
        };
        let moved = self.land(&memory, base, (start, end), context)?;
        if moved > 0 && self.landed == end {
            context.damage.strike(&memory, base);
            if self.head.verify {
                self.sum = fold(self.sum, memory.checksum(base, u64::from(end - start)));
            }
        }
        Ok(if moved == 0 { Step::Blocked } else { Step::Moved(moved) })
    }

    /// A permit for the chunk, where one is needed. A refusal is kept, and the rest goes nowhere.
    fn admit(&mut self, start: u32, end: u32, context: &LandingContext<'_>) -> Option<Permit> {
        let Place::Window(window, at) = self.place else { return None };
        let first = at.saturating_add(u64::from(start));
        match context.exposure.admit(window, Direction::Write, first, u64::from(end - start)) {
            Ok(permit) => Some(permit),
            Err(fault) => {
                self.fault = Some(fault);
                self.place = Place::Nowhere;
                None
            }
        }
    }

    fn land(
        &mut self,
        memory: &Memory,
        base: u64,
        (start, end): (u32, u32),
        context: &mut LandingContext<'_>,
    ) -> io::Result<usize> {
        let at = base + u64::from(self.landed - start);
        let want = usize::try_from(end - self.landed).expect("at most a chunk");
        let staged = want.min(context.incoming.staged().len());
        let moved = if staged > 0 {
            memory.write(at, &context.incoming.staged()[..staged]);
            context.incoming.consume(staged);
            staged
        } else {
            let target = Target { memory, at, bytes: want };
            let ahead = if end < self.head.bytes { 0 } else { self.ahead() };
            context.incoming.ahead = self.ahead();
            match context.incoming.call(context.stream, Some(&target), ahead)? {
                ReceiveOutcome::Nothing => 0,
                ReceiveOutcome::Some(bytes) => bytes.min(want),
            }
        };
        self.landed += u32::try_from(moved).expect("at most a chunk");
        Ok(moved)
    }

    fn ahead(&self) -> usize {
        if self.head.bytes >= LONG_BYTES { TAIL_BYTES + HEAD_BYTES } else { STAGE_BYTES }
    }

    /// Takes bytes that go to the program or nowhere.
    fn aside(&mut self, end: u32, context: &mut LandingContext<'_>) -> io::Result<Step> {
        if context.incoming.staged().is_empty() {
            context.incoming.ahead = STAGE_BYTES;
            if let ReceiveOutcome::Nothing = context.incoming.fill(context.stream)? {
                return Ok(Step::Blocked);
            }
        }
        let want = usize::try_from(end - self.landed).expect("at most a chunk");
        let bytes = want.min(context.incoming.staged().len());
        if let Place::Bytes(body) = &mut self.place {
            body.extend_from_slice(&context.incoming.staged()[..bytes]);
        }
        context.incoming.consume(bytes);
        self.landed += u32::try_from(bytes).expect("at most a chunk");
        Ok(Step::Moved(bytes))
    }

    fn tail(&mut self, context: &mut LandingContext<'_>) -> io::Result<Step> {
        if !self.tailed {
            return Ok(Step::Landed(None));
        }
        if let Some(tail) = context.incoming.take::<TAIL_BYTES>() {
            return Ok(Step::Landed(Some(Tail::decode(&tail))));
        }
        Ok(match context.incoming.fill(context.stream)? {
            ReceiveOutcome::Nothing => Step::Blocked,
            ReceiveOutcome::Some(bytes) => Step::Moved(bytes),
        })
    }

    /// The code of what went wrong here, 0 for nothing.
    pub(super) fn code(&self) -> u8 {
        self.fault.as_ref().map_or(0, |fault| code_of(fault).0)
    }
}
