//! Order of writes to and reads from the slab file: a pure state machine.
//!
//! It takes [`Order`]s and the ends of disk operations, and gives operations and [`Answer`]s; who
//! carries the operations out, and how many at a time, is not its business. Its rules:
//!
//! - operations on one slot follow each other as ordered;
//! - on a lasting file a write is answered only once the block and its entry are on the disk for
//!   good: the block is flushed before its entry is written, and the entry is flushed before the
//!   answer. One flush serves the entries of one group and the blocks of the next;
//! - a slot is free again only once its entry is gone for good, so no entry ever vouches for
//!   bytes that came later;
//! - what fails is answered as failed, and tried again only when there is something new to do.

mod commit;
#[cfg(test)]
pub(crate) mod crash;

use crate::aligned::AlignedBuffer;
use crate::checksum::block_checksum;
use crate::index::{Entry, Index, Place};
use crate::layout::{Header, Layout};
use crate::tier::TierError;
use baton_types::BlockKey;
use commit::Cycle;
use std::collections::{BTreeMap, VecDeque};
use std::io;

/// Commits that may fail one after the other before the sequencer stops writing.
const MAX_FAILURES: u32 = 8;

/// An order to the sequencer.
#[derive(Debug)]
pub(crate) enum Order {
    /// Read a block, verify it, answer.
    Read {
        /// Names the job.
        number: u64,
        /// The block.
        key: BlockKey,
        /// The block's place in the file.
        place: Place,
        /// [`Layout::stride_bytes`] long.
        buffer: AlignedBuffer,
    },
    /// Read the first bytes of a block, answer; nothing vouches for them here.
    Peek {
        /// Names the job.
        number: u64,
        /// The block's place in the file.
        place: Place,
        /// At most [`Layout::stride_bytes`] long.
        buffer: AlignedBuffer,
    },
    /// Write a block and its entry, answer.
    Write {
        /// Names the job.
        number: u64,
        /// The block and its place.
        entry: Entry,
        /// The block, then anything up to [`Layout::stride_bytes`].
        buffer: AlignedBuffer,
    },
    /// Drop a written block: answer `Freed` when its slot may be used again.
    Remove(Place),
    /// Drop all blocks, and begin a new life of the file with this number. Later orders may use every slot.
    Clear(u64),
}

/// A read or write that ended. The buffer holds the block.
#[derive(Debug)]
pub(crate) struct IoCompletion {
    /// The number of the read or write that ended.
    pub number: u64,
    /// How: a checksum that was verified, or written.
    pub outcome: Result<u64, TierError>,
    /// Its buffer; empty if it was given back as [`Answer::Spare`].
    pub buffer: AlignedBuffer,
}

/// An answer of the sequencer.
#[derive(Debug)]
pub(crate) enum Answer {
    /// A job ended.
    Done(IoCompletion),
    /// The buffer of a write that has not ended yet: its bytes are written, and do not last.
    Spare(AlignedBuffer),
    /// A slot may be used again, unless another `Clear` was ordered since.
    Freed {
        /// The slot that is free.
        slot: u32,
        /// How many `Clear`s were ordered before its tenant was.
        epoch: u32,
    },
    /// Slots stay taken until something new is ordered: the disk did not take their removal.
    Stalled,
    /// The disk failed too often: the sequencer has stopped writing.
    Off,
}

/// An operation for the disk.
#[derive(Debug)]
pub(crate) struct Op {
    /// To be named when it ends.
    pub token: u64,
    /// Read, write or flush.
    pub kind: OpKind,
    /// Position in the file, bytes.
    pub offset: u64,
    /// From or to where.
    pub buffer: AlignedBuffer,
}

/// The kinds of operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OpKind {
    /// Fill the buffer.
    Read,
    /// Write the buffer.
    Write,
    /// Make lasting all that was written before; has no buffer.
    Flush,
}

/// A write or a read of a slot.
#[derive(Clone, Copy, Debug)]
struct Job {
    number: u64,
    /// Without a key only its place counts, and what is read is not verified.
    entry: Entry,
    kind: OpKind,
    is_peek: bool,
    epoch: u32,
}

/// A block whose bytes are written and whose entry is not.
#[derive(Debug)]
struct Landing {
    number: u64,
    entry: Entry,
    epoch: u32,
}

/// The purpose of an operation.
#[derive(Debug)]
enum Flight {
    Slot(Job),
    Page,
    Flush,
    Header,
}

/// Orders the writes and reads of one slab file.
#[derive(Debug)]
pub(crate) struct IoSequencer {
    header: Header,
    index: Index,
    /// Whether blocks are to outlive the process.
    lasts: bool,
    epoch: u32,
    flights: BTreeMap<u64, Flight>,
    next_token: u64,
    /// Slots with an operation under way, and what waits for its end.
    lanes: BTreeMap<u32, VecDeque<(Job, AlignedBuffer)>>,
    landed: Vec<Landing>,
    flushed: Vec<Landing>,
    removals: VecDeque<Place>,
    cycle: Cycle,
    /// A `Clear` being carried out, and what was ordered after it.
    clearing: Option<u64>,
    parked: VecDeque<Order>,
    failures: u32,
    is_stalled: bool,
    is_off: bool,
    ops: Vec<Op>,
    answers: Vec<Answer>,
}

impl IoSequencer {
    /// A sequencer over a file that says `header` and has this index.
    pub(crate) fn new(header: Header, index: Index, lasts: bool) -> Self {
        Self {
            header,
            index,
            lasts,
            epoch: 0,
            flights: BTreeMap::new(),
            next_token: 0,
            lanes: BTreeMap::new(),
            landed: Vec::new(),
            flushed: Vec::new(),
            removals: VecDeque::new(),
            cycle: Cycle::Idle,
            clearing: None,
            parked: VecDeque::new(),
            failures: 0,
            is_stalled: false,
            is_off: false,
            ops: Vec::new(),
            answers: Vec::new(),
        }
    }

    /// Takes an order in.
    pub(crate) fn take(&mut self, order: Order) {
        if self.clearing.is_some() {
            return self.parked.push_back(order);
        }
        match order {
            Order::Read { number, key, place, buffer } => {
                let entry = Entry { key, parent: None, place };
                self.enter_lane(self.job(number, entry, OpKind::Read), buffer);
            }
            Order::Peek { number, place, buffer } => {
                let entry = Entry { key: BlockKey(0), parent: None, place };
                self.enter_lane(Job { is_peek: true, ..self.job(number, entry, OpKind::Read) }, buffer);
            }
            Order::Write { number, buffer, .. } if self.is_off => self.refuse(number, buffer),
            Order::Write { number, entry, buffer } => {
                self.is_stalled = false;
                self.enter_lane(self.job(number, entry, OpKind::Write), buffer);
            }
            Order::Remove(_) if self.is_off => {}
            Order::Remove(place) if self.lasts => {
                self.is_stalled = false;
                self.removals.push_back(place);
            }
            Order::Remove(place) => self.free(place.slot, self.epoch),
            Order::Clear(incarnation) if self.lasts && !self.is_off => self.clearing = Some(incarnation),
            Order::Clear(_) => self.epoch += 1,
        }
    }

    fn job(&self, number: u64, entry: Entry, kind: OpKind) -> Job {
        Job { number, entry, kind, is_peek: false, epoch: self.epoch }
    }

    /// An operation ended.
    pub(crate) fn completed(&mut self, token: u64, result: io::Result<()>, buffer: AlignedBuffer) {
        match self.flights.remove(&token) {
            Some(Flight::Slot(job)) => {
                self.leave_lane(job.entry.place.slot);
                match job.kind {
                    OpKind::Read => self.was_read(job, result, buffer),
                    _ => self.was_written(job, result, buffer),
                }
            }
            Some(Flight::Page) => self.page_written(result),
            Some(Flight::Flush) => self.flush_ended(result),
            Some(Flight::Header) => self.header_written(result),
            None => debug_assert!(false, "no operation ends twice"),
        }
    }

    /// The operations to start now.
    pub(crate) fn next_ops(&mut self) -> Vec<Op> {
        self.turn();
        std::mem::take(&mut self.ops)
    }

    /// The answers so far.
    pub(crate) fn next_answers(&mut self) -> Vec<Answer> {
        std::mem::take(&mut self.answers)
    }

    /// Whether nothing is under way, and nothing will be without a new order.
    pub(crate) fn is_idle(&self) -> bool {
        self.flights.is_empty() && self.parked.is_empty() && !self.has_work()
    }

    fn layout(&self) -> &Layout {
        &self.header.layout
    }

    fn free(&mut self, slot: u32, epoch: u32) {
        self.answers.push(Answer::Freed { slot, epoch });
    }

    fn done(&mut self, number: u64, outcome: Result<u64, TierError>, buffer: AlignedBuffer) {
        self.answers.push(Answer::Done(IoCompletion { number, outcome, buffer }));
    }

    fn refuse(&mut self, number: u64, buffer: AlignedBuffer) {
        let why = io::Error::other("the disk failed too often and is left alone until the next start");
        self.done(number, Err(TierError::Io(why)), buffer);
    }

    fn fly(&mut self, flight: Flight, kind: OpKind, offset: u64, buffer: AlignedBuffer) {
        let token = self.next_token;
        self.next_token += 1;
        self.flights.insert(token, flight);
        self.ops.push(Op { token, kind, offset, buffer });
    }

    fn enter_lane(&mut self, job: Job, buffer: AlignedBuffer) {
        let slot = job.entry.place.slot;
        match self.lanes.get_mut(&slot) {
            Some(lane) => lane.push_back((job, buffer)),
            None => {
                self.lanes.insert(slot, VecDeque::new());
                self.fly_slot(job, buffer);
            }
        }
    }

    fn leave_lane(&mut self, slot: u32) {
        match self.lanes.get_mut(&slot).and_then(VecDeque::pop_front) {
            Some((job, buffer)) => self.fly_slot(job, buffer),
            None => _ = self.lanes.remove(&slot),
        }
    }

    fn fly_slot(&mut self, job: Job, buffer: AlignedBuffer) {
        let offset = self.layout().slot_offset(job.entry.place.slot);
        self.fly(Flight::Slot(job), job.kind, offset, buffer);
    }

    fn was_read(&mut self, job: Job, result: io::Result<()>, buffer: AlignedBuffer) {
        let Entry { key, place, .. } = job.entry;
        let block_bytes = self.layout().block_bytes;
        let outcome = result.map_err(TierError::Io).and_then(|()| match job.is_peek {
            true => Ok(place.checksum),
            false => verify(key, place, &buffer[..block_bytes]),
        });
        self.done(job.number, outcome, buffer);
    }

    fn was_written(&mut self, job: Job, result: io::Result<()>, buffer: AlignedBuffer) {
        let Job { number, entry, epoch, .. } = job;
        match result {
            Ok(()) if self.lasts => {
                self.landed.push(Landing { number, entry, epoch });
                self.answers.push(Answer::Spare(buffer));
            }
            Ok(()) => self.done(number, Ok(entry.place.checksum), buffer),
            Err(error) => {
                self.done(number, Err(TierError::Io(error)), buffer);
                // No entry vouches for what may have been written.
                self.free(entry.place.slot, epoch);
            }
        }
    }
}

/// The checksum of a block's bytes, if they are those that were stored in this place.
pub(crate) fn verify(key: BlockKey, place: Place, bytes: &[u8]) -> Result<u64, TierError> {
    let checksum = block_checksum(key, bytes);
    if checksum == place.checksum {
        return Ok(checksum);
    }
    Err(TierError::Corrupt { what: "the checksum of a block on flash" })
}
